"""Parameter shards without memory of their own: a gather casts the master weights. Nothing differs
from shards that are kept but their bytes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

import hf_zero
from hf_zero.offload.storage import SHARD, CastStorage
from tests.helpers.cells import in_turn
from tests.helpers.engines import config_of, start
from tests.helpers.ranks import run_ranks
from tests.helpers.stacks import run_steps, stack
from tests.helpers.training import Plan, adamw

RANKS = 2


def keys(precision: str, keeps: bool, **more: Any) -> dict[str, Any]:
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "keep_parameter_shards": keeps}
    plan = Plan(precision=precision, clip=1.0)
    return config_of(3, plan, zero_optimization={**zero, **more})


def write(model: nn.Module, engine: Any) -> None:
    """What scripts write: one rank's values, a master, a state dict."""
    first, second, *_ = model.parameters()
    with hf_zero.GatheredParameters([first], modifier_rank=1), torch.no_grad():
        first.mul_(0.5)
    master = hf_zero.safe_get_full_fp32_param(second)
    hf_zero.safe_set_full_fp32_param(second, master + 1e-4)
    model.load_state_dict(model.state_dict())  # rounded values: the masters stay


def life(precision: str, keeps: bool, folder: Path, **more: Any) -> Any:
    def on_rank(rank: int) -> Any:
        model = stack()
        engine = start(model, adamw(model), keys(precision, keeps, **more))
        held, numel = engine.state_bytes(), sum(p.numel() for p in model.parameters())
        losses = run_steps(engine, rank, range(2))
        write(model, engine)
        losses += run_steps(engine, rank, range(2, 4))
        engine.save_checkpoint(str(folder), tag="a")
        after = run_steps(engine, rank, range(4, 5))
        engine.load_checkpoint(str(folder), tag="a")
        again = run_steps(engine, rank, range(4, 5))
        assert all(map(torch.equal, after, again))
        masters = [hf_zero.safe_get_full_fp32_param(p) for p in model.parameters()]
        weights = [*engine.state_dict().values()]
        engine.destroy()
        # another engine takes the values over from the shards
        engine = start(model, adamw(model), keys(precision, keeps, **more))
        taken = [*engine.state_dict().values()]
        assert all(map(torch.equal, taken, weights))
        engine.destroy()
        return [*losses, *after, *masters, *weights], held["parameters"], numel

    return run_ranks(RANKS, on_rank)


@in_turn("precision, more", [
    ("bf16", {}), ("fp16", {}), ("bf16", {"mics_shard_size": 1}),
])  # fmt: skip
def test_bits_are_those_of_shards_that_are_kept(
    tmp_path: Path, precision: str, more: dict[str, Any]
) -> None:
    kept = life(precision, True, tmp_path / "kept", **more)
    cast = life(precision, False, tmp_path / "cast", **more)
    for (values, nbytes, numel), (found, others, _) in zip(kept, cast):
        assert all(map(torch.equal, values, found))
        assert nbytes >= 2 * numel / RANKS and others == 0


def test_a_write_keeps_masters_that_round_to_it() -> None:
    master = torch.tensor([1.0001, -0.0, 2.0, float("nan"), 3.0])
    shard = CastStorage(master, torch.bfloat16)
    values = master.to(torch.bfloat16)
    shard.store(SHARD, 0, values)
    assert torch.equal(master[:3], torch.tensor([1.0001, -0.0, 2.0])) and master[1].signbit()
    shard.store(SHARD, 1, torch.tensor([0.0, 5.0]).bfloat16())
    assert not master[1].signbit() and master[2] == 5.0 and master[4] == 3.0
    out = torch.empty(2, dtype=torch.bfloat16)
    shard.fetch_into(SHARD, 0, out)
    assert torch.equal(out, torch.tensor([1.0001, 0.0]).bfloat16())
    assert set(shard.nbytes().values()) == {0} and shard.dtype(SHARD) == torch.bfloat16
