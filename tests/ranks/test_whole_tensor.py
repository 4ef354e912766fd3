"""Optimizers that need sums over whole tensors: over shards as in one plain process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hf_zero.optim import LARS, Lamb
from tests.helpers import oracle
from tests.helpers.cells import fast
from tests.helpers.engines import STAGES, config_of, full_weights, start
from tests.helpers.offloads import WAYS, offload, stages_of
from tests.helpers.stacks import by_hand, on_ranks, squared
from tests.helpers.training import At, Plan, trainable

STEPS = 4
KINDS = {
    "Lamb": (Lamb, {"lr": 0.02, "weight_decay": 0.1, "max_coeff": 0.3}),
    "LARS": (LARS, {"lr": 0.5, "weight_decay": 0.01, "trust_coefficient": 0.02}),
}
CELLS = [(name, stage, ranks) for name in KINDS for stage in STAGES for ranks in (2, 3)]


def groups(model: Any) -> list[dict[str, Any]]:
    """Matrices, and what has another weight decay and rate."""
    return [
        {"params": [p for p in trainable(model) if p.ndim > 1]},
        {"params": [p for p in trainable(model) if p.ndim < 2], "weight_decay": 0.0, "lr": 0.01},
    ]


def plain(name: str, ranks: int, clip: float = 0.0, windows: Any = None) -> Any:
    """Weights and coefficients of a plain run."""
    kind, settings = KINDS[name]
    kept: list[Any] = []

    def make(model: Any) -> Any:
        kept.append(kind(groups(model), **settings))
        return kept[0]

    weights, _ = by_hand(make, windows or [[(1.0, 0)]] * STEPS, ranks, clip)
    return weights, kept[0].get_lamb_coeffs() if name == "Lamb" else None


def train(engine: Any, rank: int, micros: int = 1, steps: range = range(STEPS)) -> None:
    for step in steps:
        for micro in range(micros):
            engine.backward(squared(engine, At(step, micro, rank)))
            engine.step()


def run_with(name: str, config: dict[str, Any], micros: int = 1) -> Any:
    kind, settings = KINDS[name]

    def run(rank: int, model: Any) -> Any:
        optimizer = kind(groups(model), **settings)
        engine = start(model, optimizer, config)
        train(engine, rank, micros)
        coefficients = optimizer.get_lamb_coeffs() if name == "Lamb" else None
        weights = full_weights(engine)
        engine.destroy()
        return weights, coefficients

    return run


@pytest.mark.parametrize(
    ("name", "stage", "ranks"), fast(CELLS, lambda name, stage, ranks: ranks == 2 or stage == 3)
)
def test_the_weights_are_those_of_a_plain_run(name: str, stage: int, ranks: int) -> None:
    want, ratios = plain(name, ranks)
    for weights, found in on_ranks(ranks, run_with(name, config_of(stage, Plan(ranks=ranks)))):
        oracle.compare_tensors("weights", weights, want)
        if ratios is not None:
            assert sorted(found) == pytest.approx(sorted(ratios), rel=1e-4)


PLACES = [
    (name, way, stage)
    for name in KINDS
    for way in WAYS
    for stage in stages_of(way)
    if "parameters" not in way
]


@pytest.mark.parametrize(
    ("name", "way", "stage"),
    fast(
        PLACES,
        lambda name, way, stage: (stage == 3) == (name == "Lamb") and stage in (1, 3),
    ),
)
def test_offloaded(name: str, way: str, stage: int, tmp_path: Path) -> None:
    want, ratios = plain(name, 2)
    section = offload(way, stage, tmp_path, buffer_size=512)
    config = config_of(stage, Plan(ranks=2), zero_optimization=section)
    for weights, found in on_ranks(2, run_with(name, config)):
        oracle.compare_tensors("weights", weights, want)
        if ratios is not None:
            assert sorted(found) == pytest.approx(sorted(ratios), rel=1e-4)


@pytest.mark.parametrize("stage", STAGES)
def test_accumulated_and_clipped(stage: int) -> None:
    windows = [[(0.5, 0), (0.5, 1)]] * STEPS
    want, _ = plain("Lamb", 2, clip=0.1, windows=windows)
    config = config_of(stage, Plan(ranks=2, accumulation=2), gradient_clipping=0.1)
    for weights, _ in on_ranks(2, run_with("Lamb", config, micros=2)):
        oracle.compare_tensors("weights", weights, want)


@pytest.mark.parametrize("stage", STAGES)
def test_by_name(stage: int) -> None:
    """From the configuration, in DeepSpeed's name and ours."""
    params = {"lr": 0.02, "weight_decay": 0.1, "max_coeff": 0.3, "min_coeff": 0.01}
    want, _ = by_hand(lambda model: Lamb(trainable(model), **params), [[(1.0, 0)]] * STEPS, 2)

    def run(rank: int, model: Any) -> Any:
        section = {"type": "FusedLamb" if stage % 2 else "lamb", "params": params}
        engine = start(model, None, config_of(stage, optimizer=section))
        train(engine, rank)
        return full_weights(engine)

    for weights in on_ranks(2, run):
        oracle.compare_tensors("weights", weights, want)


@pytest.mark.parametrize("stage", [1, 3])
def test_an_overflow_leaves_all_state_as_it_was(stage: int) -> None:
    def run(rank: int, model: Any) -> Any:
        optimizer = Lamb(trainable(model), lr=0.02)
        section = {"enabled": True, "initial_scale_power": 4}
        engine = start(model.half(), optimizer, config_of(stage, fp16=section))
        engine.backward(squared(engine, At(0, 0, rank), torch.float16))
        engine.step()
        before = [state["exp_avg"].clone() for state in optimizer.state.values()]
        weights = full_weights(engine)
        loss = squared(engine, At(1, 0, rank), torch.float16)
        engine.backward(loss * (float("inf") if rank else 1.0))
        engine.step()
        assert engine.skipped_steps == 1
        after = [state["exp_avg"] for state in optimizer.state.values()]
        assert all(map(torch.equal, before, after))
        return weights, full_weights(engine)

    for before, after in on_ranks(2, run):
        assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [((2, 1, "none"), (3, 3, "none")), ((3, 3, "none"), (1, 2, "optimizer on cpu"))],
)
def test_a_checkpoint_goes_on_elsewhere(saved: Any, loaded: Any, tmp_path: Path) -> None:
    """On other ranks, at another stage, in another place: as the run that was not interrupted, up
    to how the sums are rounded.
    """

    def config(of: Any) -> dict[str, Any]:
        ranks, stage, way = of
        more = {} if way == "none" else {"zero_optimization": offload(way, stage, tmp_path)}
        return config_of(stage, Plan(ranks=ranks), **more)

    def run(of: Any, resumes: bool) -> Any:
        def on(rank: int, model: Any) -> Any:
            engine = start(model, Lamb(groups(model), **KINDS["Lamb"][1]), config(of))
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

    want, _ = plain("Lamb", 6)
    run(saved, False)
    oracle.compare_tensors("weights", run(loaded, True), want)


def test_sums_are_added_up_once_a_step() -> None:
    """Two numbers of 64 bits for each tensor, and a row for ranks that own nothing of a group."""

    def run(rank: int, model: Any) -> Any:
        engine = start(model, Lamb(groups(model)), config_of(3))
        train(engine, rank, steps=range(1))
        engine.mesh.stats.keep_log = True
        engine.mesh.stats.log.clear()
        train(engine, rank, steps=range(1, 2))
        sums = [entry for entry in engine.mesh.stats.log if "sums over whole tensors" in str(entry)]
        return sums, len(list(model.parameters()))

    for sums, tensors in on_ranks(2, run):
        (entry,) = sums
        assert str((tensors + 1) * 2 * 8) in str(entry)
