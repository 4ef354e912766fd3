"""Ranks that share sequences and are given other batches are told, by axis and remedy; others are
left alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hf_zero
from hf_zero.errors import RankMismatchError
from hf_zero.parallel.alike import due
from tests.helpers.engines import config_of, start
from tests.helpers.models import seeded
from tests.helpers.ranks import RankFailed, run_ranks
from tests.helpers.sequences import TOKENS, Ranks, llama, plain
from tests.helpers.training import At, sgd

SP2 = Ranks(2)
Given = Callable[[Any, int, int], Any]


def forwards(rank: int, models: list[nn.Module], ranks: Ranks, given: Given, count: int) -> None:
    config = config_of(1, tensor_parallel={"autotp_size": ranks.tensor})
    engine = start(
        models[rank], sgd(models[rank]), config | {"sequence_parallel_size": ranks.sequence}
    )
    sequence = hf_zero.sequence_parallel()
    engine.train()
    parts = [given(sequence, rank, step) for step in range(count)]
    for part in parts:
        engine(**part)
    engine.destroy()


def run(given: Given, ranks: Ranks = SP2, count: int = 1) -> None:
    models = [seeded(llama) for _ in range(ranks.world)]
    run_ranks(ranks.world, forwards, models, ranks, given, count)


def refused(match: str, *args: Any) -> None:
    with pytest.raises(RankFailed) as raised:
        run(*args)
    assert isinstance(raised.value.__cause__, RankMismatchError)
    assert raised.match(match)


def test_other_batches():
    refused(
        r"ranks 0, 1, which share sequences \(sequence_parallel_size = 2\), were given parts of "
        r"different batches; read data as rank // 2 of ranks // 2 .*\.batches\(loader\)",
        lambda sequence, rank, step: sequence.shard(plain(At(0, 0, rank))),
    )


def test_other_batches_beside_shared_layers():
    """Ranks 0 and 1 share layers, 0 and 2 sequences."""
    refused(
        r"ranks (0, 2|1, 3), which share .* read data as rank // 4 of ranks // 4",
        lambda sequence, rank, step: sequence.shard(plain(At(0, 0, rank // 2))),
        Ranks(2, 1, 2),
    )


def test_other_batches_later_and_after_others_were_cut():
    refused(
        "different batches",
        lambda sequence, rank, step: sequence.shard(plain(At(step, 0, rank * (step == 3)))),
        SP2,
        4,
    )


def test_other_documents_are_told_in_the_same_forward():
    """Also in the third one, before which no hashes of batches are compared."""

    def given(sequence, rank, step):
        first = 5 + 2 * (rank == 1 and step == 2)
        places = torch.cat([torch.arange(first), torch.arange(TOKENS - first)])
        return sequence.shard(plain(At(0, 0, 0)) | {"position_ids": places.expand(2, -1)})

    assert not due(3)
    refused("different batches", given, SP2, 3)


def test_parts_of_other_sizes():
    def uneven(sequence, rank, step):
        batch = plain(At(0, 0, 0)) | {"position_ids": torch.arange(TOKENS).expand(2, -1)}
        own = slice(0, 9) if rank == 0 else slice(9, TOKENS)
        return {name: each[:, own] for name, each in batch.items()}

    refused(r"ranks 0, 1, .* parts of \[\[2, 9\], \[2, 7\]\] tokens; .*shard\(batch\)", uneven)


def test_batches_that_are_alike_and_parts_that_were_cut_by_hand():
    def given(sequence, rank, step):
        batch = plain(At(step, 0, 0))
        if step == 0 and rank == 1:  # not known to shard
            part = {name: each[:, TOKENS // 2 :] for name, each in batch.items()}
            return part | {"position_ids": torch.arange(TOKENS // 2, TOKENS).expand(2, -1)}
        return sequence.shard(batch)

    run(given, SP2, 5)


def test_parts_that_are_alike_in_other_batches():
    """Padding, cut for the second rank from two batches before any of them is read."""

    def given(sequence, rank, step):
        batch = plain(At(step, 0, 0))
        batch["input_ids"][:, TOKENS // 2 :] = 2
        return sequence.shard(batch)

    run(given, SP2, 2)


def test_when_ranks_compare():
    assert [count for count in range(1, 1025) if due(count)] == [
        1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 768, 1024,
    ]  # fmt: skip
