"""Adafactor over shards: the weights of transformers' in one plain process."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import hf_zero
from hf_zero.errors import HfZeroError
from hf_zero.optim import Adafactor
from tests.helpers import oracle
from tests.helpers.cells import fast
from tests.helpers.engines import STAGES, config_of, full_weights, start
from tests.helpers.offloads import WAYS, offload, stages_of
from tests.helpers.stacks import by_hand, on_ranks, squared
from tests.helpers.training import At, Plan, trainable

STEPS = 4
SETTINGS: dict[str, dict[str, Any]] = {
    "relative": {},
    "warm": {"warmup_init": True, "weight_decay": 0.1, "clip_threshold": 0.2},
    "averaged": {"beta1": 0.9, "weight_decay": 0.1},
    "given rate": {"lr": 0.02, "relative_step": False, "scale_parameter": False},
}
CELLS = [(name, stage, ranks) for name in SETTINGS for stage in STAGES for ranks in (1, 2, 3, 4)]


def plain(name: str, ranks: int, clip: float = 0.0, windows: Any = None) -> Any:
    def make(model: Any) -> Any:
        return transformers.Adafactor(trainable(model), **SETTINGS[name])

    return by_hand(make, windows or [[(1.0, 0)]] * STEPS, ranks, clip)[0]


def ours(model: Any, name: str = "averaged") -> Adafactor:
    return Adafactor(trainable(model), **SETTINGS[name])


def train(engine: Any, rank: int, micros: int = 1, steps: range = range(STEPS)) -> Any:
    for step in steps:
        for micro in range(micros):
            engine.backward(squared(engine, At(step, micro, rank)))
            engine.step()
    return full_weights(engine)


@pytest.mark.parametrize(
    ("name", "stage", "ranks"),
    fast(
        CELLS,
        lambda name, stage, ranks: (
            (ranks, stage) == (2, 3) or (name == "averaged" and (ranks == 2 or stage == 3))
        ),
    ),
)
def test_the_weights_are_transformers(name: str, stage: int, ranks: int) -> None:
    want = plain(name, ranks)

    def run(rank: int, model: Any) -> Any:
        return train(start(model, ours(model, name), config_of(stage, Plan(ranks=ranks))), rank)

    for weights in on_ranks(ranks, run):
        oracle.compare_tensors("weights", weights, want)


PLACES = [(way, stage) for way in WAYS for stage in stages_of(way) if "parameters" not in way]


@pytest.mark.parametrize(("way", "stage"), fast(PLACES, lambda way, stage: stage in (0, 3)))
def test_offloaded(way: str, stage: int, tmp_path: Path) -> None:
    """Sub-groups end in the middle of rows."""
    want = plain("averaged", 2)
    section = offload(way, stage, tmp_path, buffer_size=500)
    config = config_of(stage, Plan(ranks=2), zero_optimization=section)
    for weights in on_ranks(2, lambda rank, model: train(start(model, ours(model), config), rank)):
        oracle.compare_tensors("weights", weights, want)


@pytest.mark.parametrize("stage", STAGES)
def test_accumulated_and_clipped(stage: int) -> None:
    want = plain("given rate", 2, clip=0.1, windows=[[(0.5, 0), (0.5, 1)]] * STEPS)
    config = config_of(stage, Plan(ranks=2, accumulation=2), gradient_clipping=0.1)

    def run(rank: int, model: Any) -> Any:
        return train(start(model, ours(model, "given rate"), config), rank, 2)

    for weights in on_ranks(2, run):
        oracle.compare_tensors("weights", weights, want)


@pytest.mark.parametrize("stage", [1, 3])
def test_by_name(stage: int) -> None:
    want = plain("given rate", 2)
    section = {"type": "Adafactor", "params": SETTINGS["given rate"]}

    def run(rank: int, model: Any) -> Any:
        engine = start(model, None, config_of(stage, optimizer=section))
        assert engine.get_lr() == [0.02]
        return train(engine, rank)

    for weights in on_ranks(2, run):
        oracle.compare_tensors("weights", weights, want)


@pytest.mark.parametrize("kind", [transformers.Adafactor, torch.optim.Adafactor])
def test_an_object_of_another_library(kind: Any) -> None:
    def make(model: Any) -> Any:
        matrices = [p for p in trainable(model) if p.ndim > 1]
        groups = [{"params": matrices}, {"params": [p for p in trainable(model) if p.ndim < 2]}]
        return kind(groups)

    want, _ = by_hand(make, [[(1.0, 0)]] * STEPS, 2)

    def run(rank: int, model: Any) -> Any:
        optimizer = make(model)
        engine = start(model, optimizer, config_of(2))
        weights = train(engine, rank)
        engine.destroy()
        assert type(optimizer) is kind
        return weights

    for weights in on_ranks(2, run):
        oracle.compare_tensors("weights", weights, want)


@pytest.mark.parametrize("stage", [1, 3])
def test_an_overflow_leaves_all_state_as_it_was(stage: int) -> None:
    def copied(optimizer: Any) -> Any:
        return [
            [state["exp_avg"].clone(), *(each.clone() for each in state["factors"].values())]
            for state in optimizer.state.values()
            if "factors" in state
        ]

    def run(rank: int, model: Any) -> None:
        optimizer = ours(model)
        section = {"enabled": True, "initial_scale_power": 4}
        engine = start(model.half(), optimizer, config_of(stage, fp16=section))
        engine.backward(squared(engine, At(0, 0, rank), torch.float16))
        engine.step()
        before, weights = copied(optimizer), full_weights(engine)
        loss = squared(engine, At(1, 0, rank), torch.float16)
        engine.backward(loss * (float("inf") if rank else 1.0))
        engine.step()
        assert engine.skipped_steps == 1
        assert before
        for old, new in zip(before, copied(optimizer)):
            assert all(map(torch.equal, old, new))
        for name, weight in full_weights(engine).items():
            assert torch.equal(weight, weights[name])

    on_ranks(2, run)


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ((2, 1, "none"), (3, 3, "none")),
        ((3, 3, "none"), (1, 2, "optimizer on cpu")),
        ((2, 2, "optimizer in files"), (2, 0, "none")),
    ],
)
def test_a_checkpoint_goes_on_elsewhere(saved: Any, loaded: Any, tmp_path: Path) -> None:
    """On other ranks, at another stage, in another place; verified."""

    def config(of: Any) -> dict[str, Any]:
        ranks, stage, way = of
        section = offload(way, stage, tmp_path, buffer_size=500)
        more = {} if way == "none" else {"zero_optimization": section}
        return config_of(stage, Plan(ranks=ranks), **more)

    def run(of: Any, resumes: bool) -> Any:
        def on(rank: int, model: Any) -> Any:
            engine = start(model, ours(model), config(of))
            if resumes:
                engine.load_checkpoint(tmp_path / "saved")
            for step in range(2, 4) if resumes else range(2):
                # the same rows, however many ranks there are
                for at in range(rank, 6, of[0]):
                    engine.set_gradient_accumulation_boundary(at + of[0] >= 6)
                    engine.backward(squared(engine, At(step, 0, at)) * (of[0] / 6))
                    engine.step()
            if not resumes:
                engine.save_checkpoint(tmp_path / "saved")
            return full_weights(engine)

        return on_ranks(of[0], on)[0]

    run(saved, False)
    assert not hf_zero.verify_checkpoint(tmp_path / "saved").problems
    oracle.compare_tensors("weights", run(loaded, True), plain("averaged", 6))


def test_a_checkpoint_of_torchs_is_refused(tmp_path: Path) -> None:
    def run(rank: int, model: Any) -> None:
        engine = start(model, torch.optim.Adafactor(trainable(model)), config_of(1))
        train(engine, rank, steps=range(1))
        engine.save_checkpoint(tmp_path)
        engine.destroy()
        engine = start(model, Adafactor(trainable(model)), config_of(1))
        with pytest.raises(
            HfZeroError, match=r"has col_var, row_var, variance of whole parameters"
        ):
            engine.load_checkpoint(tmp_path)

    on_ranks(2, run)


def test_nothing_is_gathered() -> None:
    """Two all-reduces a step: rows, columns and a number for each matrix, and one number."""

    def run(rank: int, model: Any) -> Any:
        engine = start(model, ours(model), config_of(1))
        train(engine, rank, steps=range(1))
        engine.mesh.stats.keep_log = True
        engine.mesh.stats.log.clear()
        engine.backward(squared(engine, At(1, 0, rank)))
        engine.step()
        sums = [entry for entry in engine.mesh.stats.log if "sums over whole tensors" in str(entry)]
        shapes = [tuple(p.shape) for p in model.parameters()]
        numbers = sum(sum(shape) for shape in shapes) + len(shapes)
        first, second = map(str, sums)
        assert str(8 * numbers) in first and str(8 * len(shapes)) in second

    on_ranks(2, run)


def test_a_state_dict_of_shards_goes_on(tmp_path: Path) -> None:
    """Loaded into an optimizer whose segments are cut elsewhere."""

    def run(rank: int, model: Any) -> Any:
        optimizer = ours(model)
        engine = start(model, optimizer, config_of(1))
        train(engine, rank, steps=range(2))
        engine.save_checkpoint(tmp_path, tag="weights")
        packed = optimizer.state_dict()
        engine.destroy(gather=True)
        section = offload("optimizer on cpu", 1, tmp_path, buffer_size=500)
        optimizer = ours(model)
        engine = start(model, optimizer, config_of(1, zero_optimization=section))
        engine.load_checkpoint(tmp_path, tag="weights", load_optimizer_states=False)
        optimizer.load_state_dict(packed)
        return train(engine, rank, steps=range(2, STEPS))

    for weights in on_ranks(2, run):
        oracle.compare_tensors("weights", weights, plain("averaged", 2))


def test_factors_that_a_manifest_promises_are_looked_for(tmp_path: Path) -> None:
    def run(rank: int, model: Any) -> None:
        engine = start(model, ours(model), config_of(2))
        train(engine, rank, steps=range(1))
        engine.save_checkpoint(tmp_path, tag="saved")

    on_ranks(2, run)
    path = tmp_path / "saved" / "manifest.json"
    content = json.loads(path.read_text())
    del content["digest"]
    factors = content["optimizer"]["factors"]
    name = next(iter(factors))
    for change, message in (
        ({"file": 9}, rf"whole parameter '{name}' is promised in file 9; there are 2 files"),
        ({"shapes": {"exp_avg_sq_row": [1000]}}, rf"factor::{name}::exp_avg_sq_row.*expected 1000"),
        ({"shapes": {"other": [4]}}, rf"factor::{name}::other' is absent"),
    ):
        told = {**factors, name: {**factors[name], **change}}
        changed = {**content, "optimizer": {**content["optimizer"], "factors": told}}
        path.write_text(json.dumps(changed))
        assert any(
            re.search(message, each) for each in hf_zero.verify_checkpoint(path.parent).problems
        )
