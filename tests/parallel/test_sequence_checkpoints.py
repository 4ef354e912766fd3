"""Checkpoints of ranks that share sequences: other ranks go on with them as one process would have
done without a break.
"""

from __future__ import annotations

import dataclasses
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import hf_zero
from tests.helpers import oracle
from tests.helpers.engines import OnEngine, config_of, start
from tests.helpers.models import Batch
from tests.helpers.ranks import run_ranks
from tests.helpers.sequences import Ranks, SequenceJob, joined, llama, plain
from tests.helpers.training import At, Plan, Trace, merge, train

STEPS = 2


@dataclasses.dataclass
class Rows(SequenceJob):
    """Two rows a step, of as many labels: those of one batch, or one for each of two groups."""

    groups: int = 1
    first: int = 0  # step

    def __post_init__(self) -> None:
        self.batch = self._own

    def _own(self, at: At) -> Batch:
        batch = plain(At(at.step + self.first, 0, 0))
        own = slice(None) if self.groups == 1 else slice(at.rank, at.rank + 1)
        return {name: each[own] for name, each in batch.items()}


@cache
def expected() -> Trace:
    return oracle.run(Rows(llama), Plan(steps=2 * STEPS))


def run(ranks: Ranks, stage: int, folder: Path, load: bool) -> Trace:
    """The first steps and a save, or what was saved and the steps after it."""
    job = Rows(llama, groups=ranks.data, first=STEPS * load)
    models = [job.build() for _ in range(ranks.world)]
    plan = Plan(ranks=ranks.data, steps=STEPS)

    def on_rank(rank: int) -> Any:
        tensor = {"tensor_parallel": {"autotp_size": ranks.tensor}} if ranks.tensor > 1 else {}
        config = config_of(stage, plan, sequence_parallel_size=ranks.sequence, **tensor)
        config["train_micro_batch_size_per_gpu"] = 2 // ranks.data
        engine = start(models[rank], job.optimizer(models[rank]), config)
        session = OnEngine(engine, plan)
        if ranks.sequence > 1:
            session.memory["sequence"] = hf_zero.sequence_parallel()
        if load:
            engine.load_checkpoint(str(folder))
        trace = train(session, job, plan, rank // ranks.alike)
        if not load:
            engine.save_checkpoint(str(folder))
        session.close()
        return trace, None, {}

    return merge(joined(run_ranks(ranks.world, on_rank), 1))


CASES = [
    (Ranks(2), Ranks(1, 2), 3),
    (Ranks(2), Ranks(1), 1),
    (Ranks(1, 2), Ranks(2), 2),
    (Ranks(2, 2), Ranks(4), 3),
    (Ranks(4), Ranks(1, 2), 0),
    (Ranks(1), Ranks(2, 2), 3),
]
FAST = 3


@pytest.mark.parametrize(
    ("before", "after", "stage"),
    [
        pytest.param(*case, marks=() if place < FAST else pytest.mark.long)
        for place, case in enumerate(CASES)
    ],
    ids=str,
)
def test_other_ranks_go_on(before, after, stage, tmp_path):
    whole = expected()
    first = run(before, stage, tmp_path, load=False)
    second = run(after, stage, tmp_path, load=True)
    both = Trace(
        first.losses + second.losses,
        first.norms + second.norms,
        first.grads + second.grads,
        second.weights,
    )
    oracle.compare(both, whole, weight_floor=oracle.ROUNDING)
