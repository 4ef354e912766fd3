"""Dropout over parts of sequences is that of the whole one: of a rank's own tokens, and in
attention of its own heads.
"""

from __future__ import annotations

import threading
from collections import defaultdict

import pytest
import torch
from torch import nn

from tests.helpers import oracle
from tests.helpers.dropout import dropout_by
from tests.helpers.sequences import Ranks, SequenceJob, gpt2, train_on_threads
from tests.helpers.training import Plan


def dropping() -> nn.Module:
    return gpt2(resid_pdrop=0.25, embd_pdrop=0.25, attn_pdrop=0.25)


@pytest.mark.parametrize("stage", (1, 3))
def test_as_in_one_process_with_the_masks_of_all_ranks(stage):
    masks: dict[str, list[torch.Tensor]] = defaultdict(list)
    generators: dict[str, torch.Generator] = {}

    def draw(shape, p):
        rank = threading.current_thread().name
        generator = generators.setdefault(rank, torch.Generator().manual_seed(ord(rank[-1])))
        masks[rank].append((torch.rand(shape, generator=generator) >= p).float())
        return masks[rank][-1]

    job, plan = SequenceJob(dropping), Plan(steps=2, accumulation=2)
    with dropout_by(draw):
        found, _ = train_on_threads(job, plan, Ranks(2), stage)
    # of [rows, tokens, width] and of [rows, heads, tokens, tokens]
    whole = [torch.cat(parts, 1) for parts in zip(*(masks[f"rank-{rank}"] for rank in (0, 1)))]
    assert len(whole) == 2 * 2 * (1 + 2 * 3)

    def drawn(shape, p):
        return whole.pop(0)

    with dropout_by(drawn):
        expected = oracle.run(job, plan)
    assert not whole
    oracle.compare(found, expected)
