"""Experts on different gloo processes: their tokens travel by point-to-point messages."""

from __future__ import annotations

import pytest

from hf_zero.errors import RankMismatchError
from tests.helpers import oracle
from tests.helpers.engines import config_of, start, train_on_rank
from tests.helpers.models import tokens
from tests.helpers.processes import run_processes
from tests.helpers.training import Plan, Trace, merge, plain_sgd
from tests.parallel.expert_cases import keys, spread
from tests.ranks.test_moe import Routed

PLAN = Plan(ranks=2, steps=2, accumulation=2)


def train_then_part(rank: int) -> tuple[list[Trace], str]:
    """Traces at stages 1 and 3; then what rank 0 is told as rank 1 ends in place of a forward."""
    job = Routed("mixtral")
    traces = [
        train_on_rank(rank, {rank: job.build()}, job, PLAN, spread(stage, 2)) for stage in (1, 3)
    ]
    model = job.build()
    engine = start(model, plain_sgd(model), config_of(1, **keys(2)))
    if rank == 1:
        engine.destroy()
        return traces, ""
    ids = tokens(0, 0, rank)
    with pytest.raises(RankMismatchError) as parted:
        engine(input_ids=ids, labels=ids)
    return traces, str(parted.value)


@pytest.mark.long
def test_experts_on_two_processes():
    answers = run_processes(2, train_then_part, timeout=300)
    for index in range(2):
        oracle.compare(
            merge([traces[index] for traces, _ in answers]),
            oracle.kept(Routed("mixtral"), PLAN),
            weight_floor=oracle.ROUNDING,
        )
    assert "expert parallelism" in answers[0][1]
