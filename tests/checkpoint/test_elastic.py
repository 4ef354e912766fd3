"""Training goes on from a checkpoint: in the same setup bit for bit, also from a save that a thread
has written; and elsewhere, with other ranks, stages, places, units and orders of groups, in each
precision and for each kind of optimizer.
"""

from __future__ import annotations

import itertools
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_zero.checkpoint import verify_checkpoint
from tests.checkpoint.setups import (
    KINDS,
    Elastic,
    Setup,
    described,
    equal,
    first_half,
    global_losses,
    held,
    place,
    same,
    second_half,
    state,
    train,
)
from tests.helpers.cells import fast
from tests.helpers.engines import full_weights
from tests.helpers.ranks import run_ranks
from tests.helpers.training import sgd

__all__ = ["held"]

# ---- in the same setup ----

FAST = [
    (Setup(stage=0), True),
    (Setup(stage=1, way="optimizer in files", precision="fp16", model="bert"), True),
    (Setup(stage=2, precision="bf16", model="llama", optimizer=sgd), False),
    (Setup(stage=2, way="optimizer on cpu", moments="int8"), True),
    (Setup(stage=3, ranks=4, frozen="h.0"), False),
    (Setup(stage=3, way="all on cpu", moments="bf16", frozen="h.0"), False),
    (Setup(stage=3, way="all in files", precision="bf16", model="t5"), False),
]
WAYS = ["optimizer on cpu", "optimizer in files", "half on cpu", "all on cpu", "all in files"]
GRID = [
    Setup(ranks, stage, precision, "bert" if precision == "fp16" else "gpt2", way=way, moments=of)
    for way, stage, ranks, precision, of in itertools.product(
        ["", *WAYS], range(4), (1, 2, 4), ("fp32", "bf16", "fp16"), ("fp32", "bf16", "int8")
    )
    if (stage == 3 or not way.startswith("all")) and (way or of == "fp32")
]
ALL = dict.fromkeys([*FAST, *((setup, number % 2 == 0) for number, setup in enumerate(GRID))])


@pytest.mark.parametrize(
    "setup, blocking",
    fast(ALL, lambda *case: case in FAST),
    ids=lambda each: (
        described(each) if isinstance(each, Setup) else ("waits" if each else "beside")
    ),
)
def test_resume_is_exact(setup, blocking, tmp_path, held):
    """What a thread writes after three more steps is the state of the call."""
    setup, folder = setup.at(tmp_path), tmp_path / "run"
    trained = threading.Barrier(setup.ranks, timeout=60)
    if blocking:
        held.set()

    def whole(engine: Any, rank: int) -> Any:
        losses = first_half(engine, rank, setup, folder, blocking=blocking)
        assert blocking or not (folder / "global_step3").exists()
        assert blocking or not (folder / "latest").exists()
        trained.wait()
        held.set()
        engine.wait_for_checkpoint()
        assert (folder / "latest").read_text() == "global_step3"
        return losses, full_weights(engine)

    before = setup.run(whole)
    assert verify_checkpoint(folder).problems == ()
    resumed = run_ranks(setup.ranks, second_half, setup.models(), setup, folder)
    for (losses, weights), (found, weights_after) in zip(before, resumed):
        assert losses[-len(found) :] == found and same(weights, weights_after)


# ---- elsewhere ----

SAVED, STEPS = 3, 7  # steps before the save, and in all


def goes_on(before: Elastic, after: Elastic, folder: Path) -> tuple[list[Any], list[Any]]:
    """By rank, of both runs: losses from the save on, places at it and after each step, state."""

    def steps(engine: Any, rank: int, setup: Elastic) -> Any:
        places, losses, at = [place(engine)], [], state(engine, setup.kind)
        for step in range(SAVED, STEPS):
            losses += train(engine, rank, range(step, step + 1), setup.model, setup.window)
            places.append(place(engine))
        return losses, places, at

    def uninterrupted(engine: Any, rank: int) -> Any:
        train(engine, rank, range(SAVED), before.model, before.window)
        engine.save_checkpoint(str(folder), client_state={"step": SAVED})
        return steps(engine, rank, before)

    def resumed(rank: int, models: list[torch.nn.Module]) -> Any:
        for parameter in models[rank].parameters():
            torch.nn.init.constant_(parameter, 0.5)
        engine = after.open(models[rank])
        assert engine.load_checkpoint(str(folder))[1] == {"step": SAVED}
        found = steps(engine, rank, after)
        engine.destroy()
        return found

    return before.run(uninterrupted), run_ranks(after.ranks, resumed, after.models())


def check(before: Elastic, after: Elastic, tmp_path: Path) -> None:
    there, here = goes_on(before.at(tmp_path), after.at(tmp_path), tmp_path / "run")
    for ranks in (there, here):
        assert all(places == ranks[0][1] for _, places, _ in ranks), "ranks agree"
    exact = before.moments == after.moments
    (_, there_at, saved), (_, here_at, _) = there[0], here[0]
    for *_, found in here:
        assert not exact or equal(found, saved), "what was loaded is what was saved"
    assert here_at[0] == there_at[0]
    alike = STEPS - SAVED
    if before.precision == "fp16":
        assert 0 < there_at[0]["counters"][1] < SAVED, "steps were skipped before the save"
        # Where the scale is at its limit, which step overflows depends on what is added up before
        # it is divided: stages and numbers of ranks part there, in runs that nobody interrupts,
        # too.
        alike = next((at for at in range(alike) if here_at[at + 1] != there_at[at + 1]), alike)
    assert here_at[: alike + 1] == there_at[: alike + 1]
    # 16-bit gradients are rounded as other ranks add them up; the losses are about 5, of which bf16
    # has steps of 1/32. Moments of 8 bits are rounded where they lie.
    within = 1e-6 if before.precision == "fp32" else 5e-3
    expected, found = (
        global_losses([losses for losses, *_ in ranks], setup.ranks, setup.window)
        for ranks, setup in ((there, before), (here, after))
    )
    assert found[: alike + 1] == pytest.approx(expected[: alike + 1], abs=within if exact else 1e-2)


CHANGES = [
    (Elastic(2, 3), Elastic(4, 1, whole=True, turned=True)),
    (Elastic(4, 2, kind="sgd", turned=True), Elastic(1, 3, kind="sgd", way="all in files")),
    (Elastic(1, 0, kind="lion"), Elastic(2, 3, kind="lion", whole=True)),
    (
        Elastic(4, 3, "bf16", frozen="h.0.attn"),
        Elastic(2, 1, "bf16", frozen="h.0.attn", way="optimizer on cpu", turned=True),
    ),
    (Elastic(2, 1, "fp16", "bert"), Elastic(4, 3, "fp16", "bert", turned=True)),
    (Elastic(2, 3, way="all on cpu"), Elastic(1, 2, way="optimizer in files", whole=True)),
    (Elastic(2, 3, way="all in files", moments="int8"), Elastic(4, 0, turned=True)),
    (Elastic(8, 3, window=8), Elastic(4, 2, window=8, turned=True)),
]


@pytest.mark.parametrize(
    "before, after", fast(CHANGES, lambda before, after: before.ranks != 8), ids=described
)
def test_training_goes_on_elsewhere(before: Elastic, after: Elastic, tmp_path: Path) -> None:
    check(before, after, tmp_path)


PLACES = [
    (ranks, stage, way)
    for way, stage, ranks in itertools.product(["", *WAYS], range(4), (1, 2, 4))
    if stage == 3 or not way.startswith("all")
]
HELD = [
    Elastic(*shape, precision, "bert" if precision == "fp16" else "gpt2", kind=kind, way=way)
    for precision, kind, (*shape, way) in itertools.product(("fp32", "bf16", "fp16"), KINDS, PLACES)
]


@pytest.mark.long
@pytest.mark.parametrize("at", range(len(HELD)), ids=lambda at: described(HELD[at]))
def test_training_goes_on_everywhere(at: int, tmp_path: Path) -> None:
    """Seven places further in the same precision, with the same kind of optimizer."""
    there = HELD[at // len(PLACES) * len(PLACES) + (at + 7) % len(PLACES)]
    check(HELD[at], replace(there, whole=at % 2 > 0, turned=at % 3 > 0), tmp_path)
