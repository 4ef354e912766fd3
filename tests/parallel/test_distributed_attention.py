"""Attention of a model's own over sequences that ranks read in parts, against one process."""

from __future__ import annotations

from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import hf_zero
from hf_zero.errors import ConfigError
from hf_zero.parallel.sequence.distributed_attention import DistributedAttention
from tests.helpers.ranks import run_ranks

ROWS, TOKENS, HEADS, WIDTH = 2, 12, 4, 5
FIRST = (1, 0, 2, 3)  # [batch, tokens, ...] to [tokens, batch, ...] and back


class Local(nn.Module):
    """Causal attention of [tokens, batch, heads, D], with tokens or the batch first."""

    def __init__(self, tokens_first: bool, joined: bool):
        super().__init__()
        self.tokens_first, self.joined = tokens_first, joined

    def forward(self, q: Any, k: Any, v: Any, scale: float, causal: bool = False) -> Any:
        if self.tokens_first:
            q, k, v = (each.permute(FIRST) for each in (q, k, v))
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=causal, scale=scale, enable_gqa=True
        ).transpose(1, 2)
        out = out.permute(FIRST) if self.tokens_first else out
        return out.flatten(2) if self.joined else out


def drawn(shared: int) -> list[torch.Tensor]:
    """Queries, keys, values and a gradient, [batch, tokens, heads, D]."""
    generator = torch.Generator().manual_seed(2)
    return [
        torch.randn(ROWS, TOKENS, heads, WIDTH, generator=generator)
        for heads in (HEADS, shared, shared, HEADS)
    ]


def computed(module: Any, tensors: list[torch.Tensor], call: Any) -> list[torch.Tensor]:
    """The output and the gradients of queries, keys and values."""
    given = [each.detach().clone().requires_grad_() for each in tensors[:3]]
    out = call(module, *given)
    out.backward(tensors[3].reshape(out.shape))
    return [out.detach(), *(each.grad for each in given)]


@pytest.mark.turns
@pytest.mark.parametrize("tokens_first", [True, False])
@pytest.mark.parametrize(("size", "shared"), [(2, HEADS), (2, 2), (4, 2)])
@pytest.mark.parametrize("joined", [False, True])
def test_as_in_one_process(tokens_first, size, shared, joined):
    order, at = (FIRST, 0) if tokens_first else ((0, 1, 2, 3), 1)
    whole = [each.permute(order) for each in drawn(shared)]

    def rank(number):
        sequence = hf_zero.sequence_parallel(size)
        module = DistributedAttention(Local(tokens_first, joined), sequence.group, gather_idx=at)
        parts = [each.chunk(size, at)[number] for each in whole]
        found = computed(
            module, parts, lambda m, q, k, v: m(q, k, v, 1 - at, None, 0.3, causal=True)
        )
        return found, sequence.stats.counts["all_to_all"]

    want = computed(
        Local(tokens_first, joined), whole, lambda m, q, k, v: m(q, k, v, 0.3, causal=True)
    )
    got = run_ranks(size, rank)
    for each, value in enumerate(want):
        torch.testing.assert_close(torch.cat([found[each] for found, _ in got], at), value)
    assert [sent for _, sent in got] == [4] * size  # two, and two in the backward


def test_without_sequence_parallelism_nothing_is_sent():
    whole = drawn(HEADS)
    module = deepspeed.sequence.layer.DistributedAttention(Local(False, False), None, gather_idx=1)
    found = computed(module, whole, lambda m, q, k, v: m(q, k, v, 0, None, 0.3))
    want = computed(Local(False, False), whole, lambda m, q, k, v: m(q, k, v, 0.3))
    assert all(torch.equal(a, b) for a, b in zip(found, want))


def test_what_is_refused():
    def rank(_):
        with pytest.raises(ConfigError, match=r"not the group of this job's.*call hf_zero\.seq"):
            DistributedAttention(Local(True, False), dist.group.WORLD)
        module = DistributedAttention(Local(True, False), hf_zero.sequence_parallel(2).group)
        q, k, v, _ = drawn(HEADS)
        with pytest.raises(ConfigError, match="rotate queries and keys before"):
            module(q, k, v, 1, (q, q), 1.0)
        with pytest.raises(ConfigError, match="queries of 3 dimensions"):
            module(q[0], k[0], v[0], 1, None, 1.0)
        with pytest.raises(ConfigError, match="does not divide 3 attention heads"):
            module(q[:, :, :3], k[:, :, :3], v[:, :, :3], 1, None, 1.0)

    run_ranks(2, rank)
