"""Sequences split among ranks, against one process that reads them whole: every stage, ranks and
data, accumulation; kinds of attention and batches; and faults that must be seen.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest

from tests.helpers import oracle
from tests.helpers.engines import STAGES
from tests.helpers.sequences import (
    Ranks,
    SequenceJob,
    gpt2,
    half_labelled,
    llama,
    packed,
    padded,
    qwen3,
    train_on_threads,
)
from tests.helpers.training import Plan, Trace

SP2, SP4, BOTH, TENSOR = Ranks(2), Ranks(4), Ranks(2, 2), Ranks(2, 1, 2)
JOBS = {
    "llama": SequenceJob(llama),
    "one head of keys": SequenceJob(partial(llama, kv_heads=1)),
    "norms of heads, tied": SequenceJob(qwen3),
    "learned positions": SequenceJob(gpt2),
    "packed": SequenceJob(partial(llama, use_cache=False), packed),
    "packed, one head of keys": SequenceJob(partial(llama, kv_heads=1, use_cache=False), packed),
    "padding": SequenceJob(llama, padded),
    "padding, learned positions": SequenceJob(gpt2, padded),
    "a rank without labels": SequenceJob(llama, half_labelled),
}


def plan_of(ranks: Ranks, accumulation: int, **more: Any) -> Plan:
    return Plan(ranks=ranks.data, steps=2, accumulation=accumulation, **more)


@cache
def expected(name: str, plan: Plan) -> Trace:
    return oracle.run(JOBS[name], plan)


def check(name: str, ranks: Ranks, stage: int, accumulation: int, **more: Any) -> list[Any]:
    plan = plan_of(ranks, accumulation)
    found, stats = train_on_threads(JOBS[name], plan, ranks, stage, **more)
    oracle.compare(found, expected(name, plan))
    return stats


FAST = [
    (SP2, 0, 2),
    (SP4, 1, 1),
    (BOTH, 2, 2),
    (BOTH, 3, 1),
    (SP2, 3, 2),
    (TENSOR, 1, 2),
    (TENSOR, 3, 1),
]
ALL = [
    (ranks, stage, accumulation)
    for ranks in (SP2, SP4, BOTH, TENSOR)
    for stage in STAGES
    for accumulation in (1, 2)
]


@pytest.mark.parametrize(("ranks", "stage", "accumulation"), FAST, ids=str)
def test_as_in_one_process(ranks, stage, accumulation):
    check("llama", ranks, stage, accumulation)


@pytest.mark.long
@pytest.mark.parametrize("name", JOBS)
@pytest.mark.parametrize(("ranks", "stage", "accumulation"), ALL, ids=str)
def test_every_cell(name, ranks, stage, accumulation):
    check(name, ranks, stage, accumulation)


@pytest.mark.parametrize("name", [name for name in JOBS if name != "llama"])
def test_kinds_of_attention_and_batches(name):
    check(name, SP4 if "keys" in name else SP2, 3, 1)


# ---- faults ----


def local_positions(sequence: Any, batch: Any) -> Any:
    return batch | {"position_ids": batch["position_ids"] - batch["position_ids"][:, :1]}


FAULTS = {
    "the factor of the ranks is lost": SequenceJob(llama, factor=lambda each: 1 / each.size),
    "positions of each rank's own": SequenceJob(llama, fault=local_positions),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(fault):
    plan = plan_of(SP2, 1)
    found, _ = train_on_threads(FAULTS[fault], plan, SP2, 1)
    with pytest.raises(AssertionError):
        oracle.compare(found, expected("llama", plan))


# ---- what travels ----


def test_bytes_along_the_sequence():
    """The traffic of a step, in each layer: queries, keys and values there, the output back, and as
    much in the backward; sizes and codes of batches and losses beside them.
    """
    ranks, rows, layers, heads, shared, width, tokens = SP2, 2, 2, 4, 2, 8, 16 // 2
    stats = check("llama", ranks, 3, 1)
    each = rows * tokens * width * 4 * (heads + 2 * shared + heads)
    for found in stats:
        assert found.counts["all_to_all"] == 2 * layers * 2 * 2  # steps, passes, there and back
        assert found.bytes["all_to_all"] == 2 * layers * 2 * each
        losses, compared = 2 * 2 * 8, 2 * 4 * 8
        assert found.bytes["all_gather"] == 2 * (losses + compared)
        assert set(found.counts) == {"all_to_all", "all_gather"}
