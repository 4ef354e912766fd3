"""Real processes that end at named points of a save into memory, and the attempt after it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_zero.checkpoint.memory import saving
from tests.checkpoint.memory.jobs import Kept
from tests.checkpoint.test_engine import train
from tests.helpers.engines import full_weights
from tests.helpers.processes import run_processes
from tests.helpers.ranks import RankFailed

POINTS = (
    "before", "staging", "staged", "hashed", "copied", "recorded", "committing", "committed",
)  # fmt: skip
FAST = {("copied", "1"), ("committing", "01")}
KILLED = 3  # the save at whose point a process ends


def attempt(
    rank: int, setup: Kept, steps: int, resumes: Path | None, ends_at: str, who: str
) -> Any:
    """Train on this rank's host; a rank of ``who`` ends at the point ``ends_at``."""
    os.environ["HF_ZERO_HOST"] = setup.hosts[rank]
    seen = [0]

    def reached(point: str) -> None:
        seen[0] += point == ends_at
        if point == ends_at and seen[0] == KILLED and str(rank) in who:
            os._exit(1)

    saving.reached = reached
    torch.manual_seed(0)
    engine = setup.open(setup.models()[rank])
    if resumes is not None:
        engine.load_checkpoint(str(resumes))
    first = engine.global_steps
    losses = train(engine, rank, range(first, steps), setup.model)
    weights = full_weights(engine)
    engine.destroy()
    return first, losses, {name: value.clone() for name, value in weights.items()}


@pytest.mark.parametrize(
    ("point", "who"),
    [
        pytest.param(point, who, marks=[pytest.mark.long] if (point, who) not in FAST else [])
        for point in POINTS
        for who in ("1", "0", "01")
    ],
)
def test_a_process_that_ends_anywhere_costs_one_generation_at_most(
    point: str, who: str, tmp_path: Path
) -> None:
    """Nothing is left behind by the attempt that ends well."""
    setup = Kept(stage=2, hosts="ab", base=tmp_path / "memory")
    other = Kept(stage=2, hosts="ab", base=tmp_path / "other")
    whole = run_processes(2, attempt, other, 6, None, "", "")
    with pytest.raises(RankFailed, match="ended without a word"):
        run_processes(2, attempt, setup, 6, None, point, who)
    resumed = run_processes(2, attempt, setup, 6, tmp_path / "disk", "", "")
    assert {first for first, *_ in resumed} <= {KILLED - 1, KILLED}
    for (_, losses, weights), (_, all_losses, all_weights) in zip(resumed, whole):
        assert losses == all_losses[len(all_losses) - len(losses) :]
        assert all(weights[name].equal(all_weights[name]) for name in all_weights)
    assert not list((tmp_path / "memory").glob("*"))
