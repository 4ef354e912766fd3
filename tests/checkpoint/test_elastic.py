"""Training goes on elsewhere: other ranks, stage, places, units and order of groups, in each
precision and for each kind of optimizer.
"""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_zero.optim import Lion
from hf_zero.zero.layout.wrap import WHOLE
from tests.checkpoint.test_offloaded import Away
from tests.helpers.cells import fast
from tests.helpers.engines import start
from tests.helpers.models import ARCHITECTURES
from tests.helpers.ranks import run_ranks
from tests.helpers.training import trainable

SAVED, STEPS = 3, 7  # steps before the save, and in all


def grouped(model: torch.nn.Module, turned: bool) -> list[dict[str, Any]]:
    """Matrices decay, the rest has a learning rate of its own."""
    groups = [
        {"params": [p for p in trainable(model) if p.ndim > 1], "lr": 2e-3, "weight_decay": 0.1},
        {"params": [p for p in trainable(model) if p.ndim < 2], "lr": 1e-3, "weight_decay": 0.0},
    ]
    return groups[::-1] if turned else groups


OPTIMIZERS = {
    "adamw": lambda groups: torch.optim.AdamW(groups, eps=1e-6),
    "sgd": lambda groups: torch.optim.SGD(groups, momentum=0.9),
    "lion": lambda groups: Lion(groups),
}


@dataclass(frozen=True)
class Elastic(Away):
    """``window`` micro-batches are a global batch.

    ``whole``: all of the model is one unit. ``turned``: the groups in the other order.
    """

    kind: str = "adamw"
    window: int = 4
    whole: bool = False
    turned: bool = False

    @property
    def config(self) -> dict[str, Any]:
        config = super().config | {"gradient_accumulation_steps": self.window // self.ranks}
        del config["scheduler"]
        return config

    def open(self, model: torch.nn.Module) -> Any:
        if self.whole:
            setattr(model.transformer if hasattr(model, "transformer") else model.bert, WHOLE, True)
        optimizer = OPTIMIZERS[self.kind](grouped(model, self.turned))
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
        return start(model, optimizer, self.config, lr_scheduler=schedule)


def described(setup: Elastic) -> str:
    more = [
        setup.way or "device",
        *("whole" for _ in [0] if setup.whole),
        *("turned" for _ in [0] if setup.turned),
    ]
    return f"{setup.ranks}x{setup.stage} {setup.precision} {setup.kind} {' '.join(more)}"


def micro_losses(engine: Any, rank: int, steps: range, setup: Elastic) -> list[list[float]]:
    """By step, the losses of this rank's part of the window.

    Which micro-batches are in the window does not depend on the ranks.
    """
    each, losses = setup.window // setup.ranks, []
    for step in steps:
        losses.append([])
        for micro in range(each):
            loss = engine(**ARCHITECTURES[setup.model].batch(step, rank * each + micro, 0)).loss
            losses[-1].append(float(loss.detach()))
            engine.backward(loss)
            engine.step()
    return losses


def joined(results: list[list[list[float]]]) -> list[list[float]]:
    """By step, the losses of all micro-batches of the window, in their order."""
    return [
        [loss for losses in results for loss in losses[step]] for step in range(len(results[0]))
    ]


def place(engine: Any) -> dict[str, Any]:
    """All that is one number for all ranks."""
    return {
        "counters": (
            engine.counters.global_steps,
            engine.counters.skipped_steps,
            engine.counters.global_samples,
        ),
        "scaler": engine.scaler.state_dict() if engine.config.precision == "fp16" else None,
        "lr": sorted(engine.get_lr()),
        "schedule": engine.lr_scheduler.last_epoch,
    }


def goes_on(
    before: Elastic, after: Elastic, tmp_path: Path
) -> tuple[list[list[float]], list[list[float]], list[Any], list[Any]]:
    """Losses from the save on, of the run that was not interrupted and of the one that was; and
    where both were then and after each step.
    """
    (tmp_path / "disk").mkdir()
    before, after = (
        dataclasses.replace(setup, folder=tmp_path / "disk") for setup in (before, after)
    )

    def uninterrupted(engine: Any, rank: int) -> Any:
        micro_losses(engine, rank, range(SAVED), before)
        engine.save_checkpoint(str(tmp_path / "run"), client_state={"step": SAVED})
        places = [place(engine)]
        losses = []
        for step in range(SAVED, STEPS):
            losses += micro_losses(engine, rank, range(step, step + 1), before)
            places.append(place(engine))
        return losses, places

    def resumed(rank: int, models: list[torch.nn.Module]) -> Any:
        for parameter in models[rank].parameters():
            torch.nn.init.constant_(parameter, 0.5)
        engine = after.open(models[rank])
        assert engine.load_checkpoint(str(tmp_path / "run"))[1] == {"step": SAVED}
        places = [place(engine)]
        losses = []
        for step in range(SAVED, STEPS):
            losses += micro_losses(engine, rank, range(step, step + 1), after)
            places.append(place(engine))
        engine.destroy()
        return losses, places

    there = before.run(uninterrupted)
    here = run_ranks(after.ranks, resumed, after.models())
    for losses in (there, here):
        assert all(places == losses[0][1] for _, places in losses), "ranks agree"
    return (
        joined([losses for losses, _ in there]),
        joined([losses for losses, _ in here]),
        there[0][1],
        here[0][1],
    )


def check(before: Elastic, after: Elastic, tmp_path: Path) -> None:
    expected, found, there, here = goes_on(before, after, tmp_path)
    # A micro-batch alone depends on the weights alone: what was loaded is what was saved, in each
    # precision.
    assert found[0] == expected[0] and here[0] == there[0]
    alike = STEPS - SAVED
    if before.precision == "fp16":
        assert 0 < there[0]["counters"][1] < SAVED, "steps were skipped before the save"
        # Where the scale is at its limit, which step overflows depends on what is added up before
        # it is divided: stages and numbers of ranks part there, in runs that nobody interrupts,
        # too.
        alike = next((step for step in range(alike) if here[step + 1] != there[step + 1]), alike)
    # 16-bit gradients are rounded as other ranks add them up; the losses are about 5, of which bf16
    # has steps of 1/32.
    within = 1e-6 if before.precision == "fp32" else 5e-3
    assert here[: alike + 1] == there[: alike + 1]
    for one, other in list(zip(found, expected))[: alike + 1]:
        assert sum(one) / len(one) == pytest.approx(sum(other) / len(other), abs=within)


CHANGES = [
    (Elastic(ranks=2, stage=3), Elastic(ranks=4, stage=1, whole=True, turned=True)),
    (
        Elastic(ranks=4, stage=2, kind="sgd", turned=True),
        Elastic(ranks=1, stage=3, kind="sgd", way="all in files"),
    ),
    (Elastic(ranks=1, stage=0, kind="lion"), Elastic(ranks=4, stage=3, kind="lion", whole=True)),
    (
        Elastic(ranks=4, stage=3, precision="bf16"),
        Elastic(ranks=2, stage=1, precision="bf16", way="optimizer on cpu", turned=True),
    ),
    (
        Elastic(ranks=2, stage=1, precision="fp16", model="bert"),
        Elastic(ranks=4, stage=3, precision="fp16", model="bert", turned=True),
    ),
    (
        Elastic(ranks=2, stage=3, way="all on cpu"),
        Elastic(ranks=1, stage=2, way="optimizer in files", whole=True),
    ),
    (Elastic(ranks=8, stage=3, window=8), Elastic(ranks=4, stage=2, window=8, turned=True)),
]


@pytest.mark.parametrize(
    "before, after",
    fast(CHANGES, lambda before, after: before.ranks != 8 and before.kind != "lion"),
    ids=described,
)
def test_training_goes_on_elsewhere(before: Elastic, after: Elastic, tmp_path: Path) -> None:
    check(before, after, tmp_path)


SHAPES = [(1, 0), (2, 1), (4, 2), (2, 3), (4, 3), (1, 3)]
WAYS = ["", "optimizer on cpu", "", "all in files", "all on cpu", "optimizer in files"]
HELD = [
    Elastic(
        ranks=ranks,
        stage=stage,
        precision=precision,
        kind=kind,
        way=way,
        model="bert" if precision == "fp16" else "gpt2",
    )
    for precision, kind, ((ranks, stage), way) in itertools.product(
        ("fp32", "bf16", "fp16"), OPTIMIZERS, zip(SHAPES, WAYS)
    )
]


def elsewhere(at: int, by: int) -> Elastic:
    """``by`` shapes further in the same precision, with the same kind of optimizer."""
    there = HELD[at // len(SHAPES) * len(SHAPES) + (at + by) % len(SHAPES)]
    return dataclasses.replace(there, whole=bool((at + by) % 2), turned=bool(at % 3))


@pytest.mark.long
@pytest.mark.parametrize("by", [1, 2, 3, 5])
@pytest.mark.parametrize("at", range(len(HELD)), ids=lambda at: described(HELD[at]))
def test_training_goes_on_everywhere(at: int, by: int, tmp_path: Path) -> None:
    check(HELD[at], elsewhere(at, by), tmp_path)
