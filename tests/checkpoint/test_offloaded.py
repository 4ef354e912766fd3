"""Checkpoints of offloaded state: resumed bit for bit in the same place, and as the oracle has
it in another one.
"""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hf_zero import checkpoint, safe_get_full_fp32_param, safe_get_full_optimizer_state
from hf_zero.checkpoint import convert_checkpoint
from tests.checkpoint.test_engine import Setup, first_half, global_losses, second_half, train
from tests.checkpoint.test_memory import grows
from tests.helpers.cells import fast
from tests.helpers.engines import full_weights, start
from tests.helpers.offloads import offload
from tests.helpers.ranks import run_ranks


@dataclass(frozen=True)
class Away(Setup):
    """``way`` "" keeps everything on the device; ``folder`` is where files go."""

    way: str = ""
    moments: str = "fp32"
    folder: Path = Path()

    @property
    def config(self) -> dict[str, Any]:
        config = super().config
        if self.way:
            config["zero_optimization"] = offload(
                self.way, self.stage, self.folder, moments=self.moments
            )
        return config


def described(setup: Away) -> str:
    return (
        f"{setup.ranks} ranks stage {setup.stage} {setup.precision} "
        f"{setup.way or 'device'} {setup.moments}"
    )


PLACES = ["optimizer on cpu", "optimizer in files", "half on cpu", "all on cpu", "all in files"]
SAME = [
    Away(stage=0, way="optimizer on cpu", ranks=1),
    Away(stage=1, way="optimizer in files", precision="fp16", model="bert"),
    Away(stage=2, way="half on cpu", precision="bf16", model="llama"),
    Away(stage=2, way="optimizer on cpu", moments="int8"),
    Away(stage=3, way="all in files", moments="int8", precision="bf16", model="t5"),
    Away(stage=3, way="all on cpu", moments="bf16", ranks=4, frozen="h.0"),
    Away(stage=3, way="all in files", precision="fp16", model="bert"),
]
MORE = [
    Away(
        ranks=ranks,
        stage=stage,
        precision=precision,
        way=way,
        moments=moments,
        model="bert" if precision == "fp16" else "gpt2",
    )
    for way, stage, ranks, precision, moments in itertools.product(
        PLACES, range(4), (1, 2, 4), ("fp32", "bf16", "fp16"), ("fp32", "bf16", "int8")
    )
    if stage == 3 or not way.startswith("all")
]


def check_same(setup: Away, tmp_path: Path) -> None:
    setup = dataclasses.replace(setup, folder=tmp_path / "disk")
    setup.folder.mkdir()
    whole = run_ranks(setup.ranks, first_half, setup.models(), setup, tmp_path / "saved", True)
    resumed = run_ranks(setup.ranks, second_half, setup.models(), setup, tmp_path / "saved")
    for (losses, weights), (losses_after, weights_after) in zip(whole, resumed):
        assert losses[-len(losses_after) :] == losses_after
        assert all(torch.equal(weights[name], weights_after[name]) for name in weights)


@pytest.mark.parametrize("setup", fast(SAME, lambda setup: setup not in SAME[::6]), ids=described)
def test_resume_is_exact(setup: Away, tmp_path: Path) -> None:
    """Saved right after a step, while its update is under way."""
    check_same(setup, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("setup", MORE, ids=described)
def test_resume_is_exact_everywhere(setup: Away, tmp_path: Path) -> None:
    check_same(setup, tmp_path)


MOVES = [
    (Away(ranks=2, stage=2, way="optimizer on cpu"), Away(ranks=2, stage=2)),
    (Away(ranks=2, stage=3), Away(ranks=4, stage=3, way="all in files")),
    (Away(ranks=4, stage=3, way="all on cpu"), Away(ranks=1, stage=0, way="optimizer in files")),
    (Away(ranks=1, stage=1, way="optimizer in files"), Away(ranks=2, stage=3, way="half on cpu")),
    (Away(ranks=2, stage=3, way="all in files", moments="int8"), Away(ranks=4, stage=1)),
    (Away(ranks=2, stage=0), Away(ranks=2, stage=2, way="optimizer in files", moments="bf16")),
]
ANYWHERE = [
    Away(ranks=ranks, stage=stage, way=way)
    for way, stage, ranks in itertools.product(["", *PLACES], (0, 1, 2, 3), (1, 2, 4))
]
ANYWHERE = [setup for setup in ANYWHERE if setup.stage == 3 or not setup.way.startswith("all")]
ALL_MOVES = [(ANYWHERE[at], ANYWHERE[(7 * at + 5) % len(ANYWHERE)]) for at in range(len(ANYWHERE))]


def check_moved(before: Away, after: Away, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    before, after = (
        dataclasses.replace(setup, folder=tmp_path / "disk", frozen="h.0.attn")
        for setup in (before, after)
    )
    whole = run_ranks(before.ranks, first_half, before.models(), before, tmp_path / "saved", True)
    resumed = run_ranks(after.ranks, second_half, after.models(), after, tmp_path / "saved")
    expected = global_losses([losses for losses, _ in whole], before.ranks)[3:]
    exact = (before.moments, after.moments) == ("fp32", "fp32")
    assert global_losses([losses for losses, _ in resumed], after.ranks) == pytest.approx(
        expected, abs=1e-5 if exact else 1e-2
    )


@pytest.mark.parametrize(
    "before, after",
    fast(MOVES, lambda *move: move not in (MOVES[0], MOVES[3])),
    ids=lambda setup: described(setup),
)
def test_another_place_goes_on_from_there(before: Away, after: Away, tmp_path: Path) -> None:
    check_moved(before, after, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("before, after", ALL_MOVES, ids=lambda setup: described(setup))
def test_every_place_goes_on_elsewhere(before: Away, after: Away, tmp_path: Path) -> None:
    check_moved(before, after, tmp_path)


def state_at(
    rank: int, models: list[Any], setup: Away, folder: Path, saves: bool
) -> dict[str, Any]:
    """Whole master weights and moments on the CPU, at the save or after the load; the same on
    every rank.
    """
    engine = setup.open(models[rank])
    if saves:
        train(engine, rank, range(2))
        engine.save_checkpoint(str(folder))
    else:
        engine.load_checkpoint(str(folder))
    state = {}
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            moments = [
                safe_get_full_optimizer_state(parameter, kind).clone()
                for kind in ("exp_avg", "exp_avg_sq")
            ]
            state[name] = [safe_get_full_fp32_param(parameter).clone(), *moments]
    engine.destroy()
    return state


def check_moved_exactly(before: Away, after: Away, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    before, after = (
        dataclasses.replace(setup, folder=tmp_path / "disk", moments="fp32")
        for setup in (before, after)
    )
    saved = run_ranks(before.ranks, state_at, before.models(), before, tmp_path / "saved", True)
    loaded = run_ranks(after.ranks, state_at, after.models(), after, tmp_path / "saved", False)
    for state in loaded:
        assert state.keys() == saved[0].keys()
        for name, tensors in state.items():
            assert all(
                torch.equal(one.cpu(), other.cpu()) for one, other in zip(tensors, saved[0][name])
            ), name


@pytest.mark.parametrize("before, after", MOVES[1:4], ids=lambda setup: described(setup))
def test_another_place_holds_the_same_bits(before: Away, after: Away, tmp_path: Path) -> None:
    check_moved_exactly(before, after, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("before, after", ALL_MOVES, ids=lambda setup: described(setup))
def test_every_place_holds_the_same_bits(before: Away, after: Away, tmp_path: Path) -> None:
    check_moved_exactly(before, after, tmp_path)


@pytest.mark.parametrize("way", ["optimizer in files", "all on cpu", "half on cpu", "all in files"])
def test_an_engine_that_has_stepped_goes_back(way: str, tmp_path: Path) -> None:
    """And a load of the weights alone leaves moments and counters as they are."""
    setup = Away(stage=3, way=way, folder=tmp_path)

    def run(engine: Any, rank: int) -> None:
        start_weights = full_weights(engine)
        engine.save_checkpoint(str(tmp_path / "saved"), tag="start")
        train(engine, rank, range(2))
        engine.save_checkpoint(str(tmp_path / "saved"), tag="two")
        first = train(engine, rank, range(2, 4)), full_weights(engine)
        engine.load_checkpoint(str(tmp_path / "saved"), tag="two")
        second = train(engine, rank, range(2, 4)), full_weights(engine)
        assert first[0] == second[0]
        assert all(torch.equal(value, second[1][name]) for name, value in first[1].items())
        flat = next(flat for flat in engine.flats if flat.trainable)
        moments = engine.bound.tensors(flat.optimizer_shard)["exp_avg"].clone()
        engine.load_checkpoint(str(tmp_path / "saved"), tag="two", load_optimizer_states=False)
        assert torch.equal(engine.bound.tensors(flat.optimizer_shard)["exp_avg"], moments)
        engine.load_checkpoint(str(tmp_path / "saved"), tag="start")
        assert engine.global_steps == 0
        assert all(
            torch.equal(value, start_weights[name]) for name, value in full_weights(engine).items()
        )
        train(engine, rank, range(2))
        third = train(engine, rank, range(2, 4)), full_weights(engine)
        assert first[0] == third[0]
        assert all(torch.equal(value, third[1][name]) for name, value in first[1].items())

    setup.run(run)


@pytest.mark.parametrize("way, stage", [("optimizer in files", 1), ("all in files", 3)])
def test_converted_it_is_the_model_that_was_trained(way: str, stage: int, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    setup = Away(stage=stage, way=way, folder=tmp_path / "disk", precision="bf16")

    def run(engine: Any, rank: int) -> Any:
        train(engine, rank, range(2))
        engine.save_checkpoint(str(tmp_path / "run"))
        train(engine, rank, range(2, 3))
        engine.save_16bit_model(str(tmp_path), "whole.safetensors")
        weights = full_weights(engine)
        state = {name: value.clone() for name, value in engine.state_dict().items()}
        engine.load_checkpoint(str(tmp_path / "run"))
        earlier = full_weights(engine)
        return weights, state, earlier

    weights, state, earlier = setup.run(run)[0]
    whole = load_file(tmp_path / "whole.safetensors")
    convert_checkpoint(tmp_path / "run", tmp_path / "out")
    converted = load_file(tmp_path / "out" / "model.safetensors")
    for name, value in weights.items():
        assert torch.equal(whole[name], value.bfloat16()) and torch.equal(
            state[name], value.bfloat16()
        ), name
        assert torch.equal(converted[name].float(), earlier[name]), name


MB = 1 << 20


def deep() -> torch.nn.Module:
    """Ten units of 16 MB."""
    model = torch.nn.Module()
    model.blocks = torch.nn.ModuleList(torch.nn.Linear(2048, 2048, bias=False) for _ in range(10))
    model.forward = lambda x: x  # type: ignore[method-assign]
    return model


def test_saving_what_is_in_files_takes_the_memory_of_one_flat(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()

    def run(rank: int) -> None:
        model = deep()
        nvme = {"device": "nvme", "nvme_path": str(tmp_path / "disk")}
        section = {
            "stage": 3,
            "offload_optimizer": {**nvme, "buffer_size": 1 << 18},
            "offload_param": {**nvme, "max_in_cpu": 0},
        }
        config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": section}
        engine = start(model, torch.optim.AdamW(model.parameters()), config)
        assert len(engine.flats) == 10
        assert grows(lambda: checkpoint.save(engine, tmp_path / "saved")) < 96 * MB, (
            "state is 480 MB"
        )
        assert (
            grows(lambda: checkpoint.load(engine, tmp_path / "saved")) < 200 * MB
        )  # a flat's master, moments and shard, and buffers beside
        engine.destroy()

    run_ranks(1, run)
