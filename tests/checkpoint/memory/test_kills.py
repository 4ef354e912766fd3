"""Real processes that end at named points of a save into memory, and the attempt after it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_zero.checkpoint.memory import saving
from tests.checkpoint.memory.jobs import Kept, firsts, same, whole
from tests.checkpoint.memory.test_killed_jobs import SAVE_POINTS
from tests.helpers.engines import full_weights
from tests.helpers.processes import run_processes
from tests.helpers.ranks import RankFailed

KILLED, STEPS = 3, 5  # the save at whose point a process ends, and steps in all


def attempt(
    rank: int, setup: Kept, resumes: Path | None = None, ends_at: str = "", who: str = ""
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
    losses = setup.train(engine, rank, range(first, STEPS))
    weights = {name: value.clone() for name, value in full_weights(engine).items()}
    engine.destroy()
    return first, losses, weights, None


@pytest.mark.long
@pytest.mark.parametrize("who", ["1", "0", "01"])
@pytest.mark.parametrize("point", [each for each in SAVE_POINTS if each != "sending"])
def test_a_process_that_ends_anywhere_costs_one_generation_at_most(point, who, tmp_path):
    """Nothing is left behind by the attempt that ends well."""
    setup = Kept(stage=2, base=tmp_path / "memory")
    with pytest.raises(RankFailed, match="ended without a word"):
        run_processes(2, attempt, setup, None, point, who)
    resumed = run_processes(2, attempt, setup, tmp_path / "disk")
    assert firsts(resumed) <= {KILLED - 1, KILLED}
    same(resumed, whole(setup, STEPS))
    assert not list((tmp_path / "memory").glob("*"))
