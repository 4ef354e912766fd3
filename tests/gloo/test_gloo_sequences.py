"""Sequences that processes share over gloo: four ranks as two by two, models that load in shards,
dropout that is recomputed, and a rank that leaves.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import hf_zero
from hf_zero.errors import RankMismatchError
from tests.helpers import oracle
from tests.helpers.dropout import dropout_by
from tests.helpers.engines import OnEngine, config_of, start
from tests.helpers.models import seeded
from tests.helpers.processes import run_processes, say
from tests.helpers.sequences import Ranks, SequenceJob, gpt2, llama, on_rank, plain
from tests.helpers.training import At, Plan, Trace, merge, train

RANKS = Ranks(2, 2)
PLAN = Plan(ranks=2, steps=2, accumulation=2)
JOB = SequenceJob(llama)
DROPPING = SequenceJob(partial(gpt2, resid_pdrop=0.25, embd_pdrop=0.25, attn_pdrop=0.25))
RECOMPUTED = {"activation_checkpointing": {"blocks": True}}


def trained(rank: int, stage: int) -> Trace:
    return on_rank(rank, {rank: JOB.build()}, JOB, PLAN, RANKS, config_of(stage, PLAN))[0]  # type: ignore[arg-type]


def loaded(rank: int, folder: str) -> Trace:
    """Stage 3, from files that each rank reads its own elements of."""
    config = config_of(3, PLAN, sequence_parallel_size=RANKS.sequence)
    model = hf_zero.from_pretrained(transformers.LlamaForCausalLM, folder, config)
    session = OnEngine(start(model.train(), JOB.optimizer(model), config), PLAN)
    session.memory["sequence"] = hf_zero.sequence_parallel()
    trace = train(session, JOB, PLAN, rank // RANKS.sequence)
    session.close()
    return trace


def dropped(rank: int) -> tuple[Trace, list[torch.Tensor]]:
    """With the masks of the forwards, without those of the recomputations."""
    masks: list[torch.Tensor] = []

    def draw(shape: tuple[int, ...], p: float) -> torch.Tensor:
        mask = (torch.rand(shape) >= p).float()
        if torch._C._current_graph_task_id() == -1:
            masks.append(mask)
        return mask

    config = config_of(3, PLAN, **RECOMPUTED)
    torch.manual_seed(rank)
    with dropout_by(draw):
        trace = on_rank(rank, {rank: DROPPING.build()}, DROPPING, PLAN, RANKS, config)[0]  # type: ignore[arg-type]
    return trace, masks


def leaving(rank: int) -> str:
    """Return the error of a rank that shares sequences with one that ends instead of a forward; ""
    on the rank that ends.
    """
    sequence = hf_zero.sequence_parallel(RANKS.sequence)
    model = JOB.build()
    engine = start(model, JOB.optimizer(model), config_of(1), mpu=sequence)
    engine.train()
    if rank % 2:
        return ""
    with pytest.raises(RankMismatchError) as parted:
        engine(**sequence.shard(plain(At(0, 0, 0))))
    return str(parted.value)


def each(rank: int, folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for stage in (1, 3):
        say(f"stage {stage}")
        found[f"stage {stage}"] = trained(rank, stage)
    say("loaded")
    found["loaded in shards"] = loaded(rank, folder)
    say("dropped")
    found["dropped"] = dropped(rank)
    say("leaving")
    found["left"] = leaving(rank)
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder: Path = tmp_path_factory.mktemp("llama")
    seeded(llama).save_pretrained(folder)
    return run_processes(RANKS.world, each, str(folder), timeout=300.0)


@pytest.mark.long
@pytest.mark.parametrize("case", ("stage 1", "stage 3", "loaded in shards"))
def test_as_in_one_process(ranks, case):
    expected = oracle.run(JOB, PLAN)
    oracle.compare(merge([found[case] for found in ranks]), expected, weight_floor=oracle.ROUNDING)


@pytest.mark.long
def test_recomputed_dropout(ranks):
    """Each of the two batches of a step with the masks of its two ranks, one after another."""
    masks = [found["dropped"][1] for found in ranks]
    groups = [
        [torch.cat(parts, 1) for parts in zip(*masks[first : first + 2], strict=True)]
        for first in (0, 2)
    ]
    a_step = len(groups[0]) // PLAN.steps
    order = [
        mask
        for step in range(PLAN.steps)
        for group in groups
        for mask in group[step * a_step : (step + 1) * a_step]
    ]
    assert order and not torch.equal(masks[0][0], masks[1][0])
    with dropout_by(lambda shape, p: order.pop(0)):
        expected = oracle.run(DROPPING, PLAN)
    oracle.compare(merge([found["dropped"][0] for found in ranks]), expected)


@pytest.mark.long
def test_a_rank_that_leaves_is_named_with_its_axis(ranks):
    for rank, found in enumerate(ranks):
        if rank % 2 == 0:
            assert "sequence parallelism" in found["left"] and str(rank + 1) in found["left"]
