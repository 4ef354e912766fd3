"""Offloaded optimizer state and parameters bit for bit against the same training on the device;
windows that no configuration announces, shards of any sizes, waits for an update that is under way.
Gathers of updated parameters have one place in the order of a rank's collectives, however long
the updates take, and whoever needs one gets it, also where the others stand still.
Each place against the plain loop is a row of ``test_capabilities.py``.
"""

from __future__ import annotations

import gc
import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hf_zero.setup.offloaded_updates as offloaded_updates
from hf_zero.offload.sub_group_update import SubGroupUpdate
from hf_zero.offload.update import OffloadedUpdater
from tests.helpers import oracle
from tests.helpers.cells import in_turn
from tests.helpers.engines import (
    OnEngine,
    config_of,
    engine_opener,
    start,
    train_on_threads,
)
from tests.helpers.models import ARCHITECTURES, Block, seeded
from tests.helpers.offloads import offload, opened, same
from tests.helpers.ranks import run_ranks
from tests.helpers.stacks import on_ranks
from tests.helpers.training import ArchitectureJob, Plan
from tests.ranks.cases import values_of

LLAMA = ARCHITECTURES["llama"]


class Watched(OnEngine):
    """Sees after each step which flats are on the device again, in which allocations and bytes."""

    def __init__(self, engine, plan, seen):
        super().__init__(engine, plan)
        self.seen = seen

    def step(self):
        super().step()
        flats = [flat for flat in self.engine.flats if not flat.spec.persistent]
        back = [flat for flat in flats if not flat.optimizer_shard.offloaded]
        masters = [flat for flat in back if flat.optimizer_shard.has_separate_master]
        taken = sum(12 * flat.spec.owned_numel for flat in back)
        taken += sum(4 * flat.spec.owned_numel for flat in masters)
        pairs = [(flat.optimizer_shard.master, flat.gradient.shard) for flat in back]
        allocations = [
            len({each.untyped_storage()._cdata for each in tensors}) for tensors in zip(*pairs)
        ]
        self.seen.append(([flat in back for flat in flats], allocations, taken))


@in_turn(
    "way, stage, ranks, whole, precision",
    [("optimizer on cpu", 3, 2, 64, "bf16"), ("all on cpu", 3, 2, 0, "fp32")],
)
def test_what_fits_on_the_device_comes_back_after_the_first_step(
    way, stage, ranks, whole, precision, tmp_path, monkeypatch
):
    """Device memory that the first step left free takes the first units."""
    # for some of the flats of a rank, not all
    room = {"fp32": 12 * 12_000, "bf16": 16 * 12_000}[precision] * 2 // ranks
    monkeypatch.setattr(offloaded_updates, "free_beside_a_step", lambda device: room)
    seen = []

    def opener(model, optimizer, plan):
        zero = offload(way, stage, tmp_path, ratio="auto")
        zero["stage3_param_persistence_threshold"] = whole
        engine = start(model, optimizer, config_of(stage, plan, zero_optimization=zero))
        return Watched(engine, plan, seen)

    job = ArchitectureJob(ARCHITECTURES["gpt2"])
    plan = Plan(ranks=ranks, steps=3, precision=precision, clip=1.0)
    oracle.accept(train_on_threads(job, plan, opener), job, plan, stage)
    assert all(sorted(homes, reverse=True) == homes for homes, *_ in seen), "those that come first"
    assert max(taken for *_, taken in seen) <= room
    homes, allocations, _ = seen[-1]
    assert sum(homes) > 1 and not all(homes)
    assert allocations == [1, 1], "neighbors, which one launch updates"


@in_turn(
    "way, precision, accumulation, clip",
    [
        ("optimizer on cpu", "bf16", 2, 0.0),
        ("all in files", "fp32", 1, 0.0),
        ("optimizer on cpu", "fp32", 1, 1.0),
    ],
)
def test_updates_begin_in_the_backward(way, precision, accumulation, clip, tmp_path, monkeypatch):
    begun, early = [], OffloadedUpdater.start_in_backward

    def noted(updater, update, unit):
        begun.append(unit.label)
        return early(updater, update, unit)

    monkeypatch.setattr(OffloadedUpdater, "start_in_backward", noted)
    job, plan = ArchitectureJob(LLAMA), Plan(2, 3, accumulation, precision, clip)
    zero = offload(way, 3, tmp_path, update_in_backward=True)
    got = train_on_threads(job, plan, engine_opener(3, zero_optimization=zero))
    oracle.accept(got, job, plan, 3)
    if clip:
        assert not begun, "clipping needs the norm first"
    else:
        assert len(begun) >= 2 * 2 * 3, "two ranks, the steps after the first, the units"
    gc.collect()  # shards stay as long as the model, so that another engine can take them over
    assert list(tmp_path.iterdir()) == [], "files are left behind"


def train(engine, step, rank=0):
    engine.backward(engine(**LLAMA.batch(step, 0, rank)).loss)
    engine.step()


def test_step_returns_while_units_are_updated_and_a_forward_waits_unit_by_unit(
    tmp_path, monkeypatch
):
    """The forward of the first unit runs while the last one is still being updated."""
    engine = opened(LLAMA.build(), offload("optimizer on cpu", 2, tmp_path))
    train(engine, 0)
    engine.updater.finish()
    order, run, reached, last = [], SubGroupUpdate.run, [], threading.Event()
    unit_of = {flat.optimizer_shard: flat.unit for flat in engine.flats}

    def held_up(update, shard, output_for, finish_output):
        if unit_of[shard] is engine.updater.units[-1]:
            assert last.wait(120)
        run(update, shard, output_for, finish_output)
        order.append(unit_of[shard])

    monkeypatch.setattr(SubGroupUpdate, "run", held_up)
    train(engine, 1)
    assert engine.updater.pending
    for unit in engine.units:
        unit.module.register_forward_hook(lambda *_, label=unit.label: reached.append(label))
    blocks = [unit for unit in engine.updater.units if unit.label.startswith("model.layers")]
    assert [unit.label for unit in blocks] == ["model.layers.0", "model.layers.1"]
    blocks[1].module.register_forward_pre_hook(lambda module, args: last.set(), prepend=True)
    assert engine.updater.units[-1] is blocks[1], "it is needed last"
    train(engine, 2)
    assert reached[0] == "model.layers.0" and order[-1] is not None
    engine.destroy()


STEPS = 3


def on_host(model, stage, folder, **more):
    return opened(model, offload("optimizer on cpu", stage, folder, **more))


def _one_reads(rank, model, folder, how, gate):
    engine = on_host(model, 2, folder)
    train(engine, 0, rank)
    assert set(engine.updater.pending) == {unit for unit in engine.units if unit.trainable_flats}
    dist.barrier()
    gate.set()
    if rank == 0 and how == "a forward":
        with torch.no_grad():
            engine(**LLAMA.batch(5, 0, 0))
    elif rank == 0:
        engine.module.lm_head.weight.sum()
    dist.barrier()
    left = len(engine.updater.pending)
    train(engine, 1, rank)
    weights = values_of(engine.module)
    engine.destroy()
    return left, weights


@in_turn("how", ["a forward", "a parameter"])
def test_one_rank_reads_while_the_others_stand_in_a_barrier(how, gate, tmp_path):
    """``step`` returns before any gather; rank 0 continues alone."""
    gate.clear()
    seen = on_ranks(2, _one_reads, tmp_path, how, gate, build=LLAMA.build)
    assert all(left for left, _ in seen[1:]), "the others have not asked for their parameters"
    for _, weights in seen[1:]:
        same(weights, seen[0][1], exact=True)


def _breaks(rank, model, folder):
    engine = on_host(model, 2, folder)
    train(engine, 0, rank)
    with pytest.raises(OSError, match="Input/output error"):
        engine(**LLAMA.batch(1, 0, rank))
    with pytest.raises(OSError, match="Input/output error"):  # nor what comes after in the order
        engine.module.lm_head.weight.sum()
    if engine.world_size > 1:
        engine.mesh.shard.all_reduce(torch.zeros(1), "something else").wait()
    with pytest.raises(OSError, match="Input/output error"):
        engine.destroy()


@in_turn("ranks", [1, 2])
def test_an_update_that_fails_is_raised_and_holds_up_nothing_else(ranks, tmp_path, monkeypatch):
    def broken(update, *args):
        raise OSError(5, "Input/output error", "/disk")

    monkeypatch.setattr(SubGroupUpdate, "run", broken)
    on_ranks(ranks, _breaks, tmp_path, build=LLAMA.build)


class EitherWay(nn.Module):
    """Two blocks of one size, which a call uses in the order that it names."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(8) for _ in range(2))

    def forward(self, rows: torch.Tensor, first: int) -> torch.Tensor:
        for at in (first, 1 - first):
            rows = self.blocks[at](rows)
        return rows.square().mean()


def test_ranks_whose_forwards_differ_in_order(tmp_path):
    models = [seeded(EitherWay) for _ in range(3)]
    rows = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(0))
    section = offload("optimizer on cpu", 2, tmp_path)
    section["stage3_module_granularity_threshold"] = 0

    def over(rank: int) -> dict[str, torch.Tensor]:
        model = models[rank]
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        engine = start(model, optimizer, config_of(2, zero_optimization=section))
        for _ in range(4):
            engine.backward(engine(rows[rank], rank))
            engine.step()
        weights: dict[str, torch.Tensor] = engine.state_dict()
        engine.destroy()
        return weights

    plain = models[2]
    optimizer = torch.optim.AdamW(plain.parameters(), 1e-2)
    for _ in range(4):
        for rank in range(2):
            (plain(rows[rank], rank) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    for got in run_ranks(2, over):
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(got[name], value, rtol=1e-4, atol=1e-6)
