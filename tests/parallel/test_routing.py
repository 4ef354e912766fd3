"""Gates of mixtures of experts against their definition, token by token."""

from __future__ import annotations

import math

import pytest
import torch

from hf_zero.parallel.expert import routing
from hf_zero.parallel.expert.routing import Capacity

TOKENS, EXPERTS = 13, 4


def logits(seed=0, spread=1.0):
    generator = torch.Generator().manual_seed(seed)
    return spread * torch.randn(TOKENS, EXPERTS, generator=generator, dtype=torch.float64)


def defined(scores, k, most):
    """Weights [S, E], tokens by expert [E] and the auxiliary loss, in loops."""
    gates = scores.softmax(1)
    choices = [row.argsort(descending=True)[:k].tolist() for row in gates]
    counts, weights = [0] * EXPERTS, torch.zeros_like(gates)
    for choice in range(k):
        for token in range(TOKENS):
            expert = choices[token][choice]
            if counts[expert] < most:
                weights[token, expert] = gates[token, expert]
            counts[expert] += 1
    if k == 2:
        weights = weights / weights.sum(1, keepdim=True).clamp(min=1e-12)
    share = [sum(c[0] == e for c in choices) / TOKENS for e in range(EXPERTS)]
    aux = EXPERTS * sum(share[e] * float(gates[:, e].mean()) for e in range(EXPERTS))
    return weights, torch.tensor(counts), aux


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("capacity", [Capacity(1.0, 0), Capacity(0.5, 3), Capacity(1, 0, False)])
def test_weights_counts_and_loss(k, capacity):
    scores = logits(spread=2.0)
    most = capacity.of(TOKENS, EXPERTS, k)
    found = (
        routing.top1(scores, capacity, selects_at_random=False)
        if k == 1
        else routing.top2(scores, capacity, samples=False)
    )
    weights, counts, aux = defined(scores, k, TOKENS if most is None else most)
    dense = found.dense()
    torch.testing.assert_close(dense.sum(2), weights)
    assert torch.equal(found.counts, counts) and float(found.aux_loss) == pytest.approx(aux)
    assert dense.shape[2] == (int(counts.max()) if most is None else most)
    # a place of an expert has one token at most
    assert int((dense > 0).sum(0).max()) <= 1
    if most is not None:
        assert most == max(math.ceil(TOKENS * k * capacity.factor / EXPERTS), capacity.least)
        assert int((weights > 0).sum(0).max()) == most < int(counts.max())


def test_gradients_reach_the_logits():
    scores = logits(1, 2.0).requires_grad_()
    factor = torch.randn(TOKENS, EXPERTS, dtype=torch.float64)
    capacity = Capacity(1.0, 0)

    def loss(found):
        return (found.dense().sum(2) * factor).sum() + found.aux_loss

    for route in (
        lambda s: routing.top1(s, capacity, selects_at_random=False),
        lambda s: routing.top2(s, capacity, samples=False),
    ):
        assert torch.autograd.gradcheck(lambda s, route=route: loss(route(s)), scores)


def test_chance_decides_which_tokens_an_expert_takes():
    scores = torch.zeros(TOKENS, EXPERTS)
    scores[:, 2] = 5.0
    first = routing.top1(scores, Capacity(1.0, 0), selects_at_random=False)
    most = first.capacity
    assert first.experts[:, 0].tolist() == [2] * most + [EXPERTS] * (TOKENS - most)
    taken = torch.stack(
        [routing.top1(scores, Capacity(1.0, 0)).experts[:, 0] == 2 for _ in range(200)]
    )
    assert taken.sum(1).tolist() == [most] * 200
    share = taken.double().mean(0)
    assert (share - most / TOKENS).abs().max() < 0.15
    places = routing.top1(scores, Capacity(1.0, 0)).dense().nonzero()[:, 2]
    assert places.tolist() == list(range(most))  # in the order of the tokens


def test_unused_tokens_go_nowhere():
    scores, used = logits(2), torch.ones(TOKENS)
    used[[0, 5]] = 0
    found = routing.top1(scores, Capacity(4.0, 0), used)
    assert found.experts[[0, 5], 0].tolist() == [EXPERTS, EXPERTS]
    assert int(found.counts.sum()) == TOKENS - 2 and not found.weights[[0, 5]].any()


def test_noise_draws_by_the_gates():
    torch.manual_seed(0)
    scores = torch.tensor([[2.0, 1.0, 0.0, -1.0]]).repeat(20_000, 1)
    wide = Capacity(4.0, 0)
    share = routing.top1(scores, wide, noisy=True).counts / 20_000
    assert (share - scores[0].softmax(0)).abs().max() < 0.02
    counts = routing.top2(scores, wide).counts - torch.tensor([20_000, 0, 0, 0])
    others = scores[0, 1:].softmax(0)
    assert (counts[1:] / 20_000 - others).abs().max() < 0.02
    noisy = routing.jittered(torch.ones(10_000))
    assert noisy.min() >= 0.99 and noisy.max() <= 1.01 and abs(float(noisy.mean()) - 1) < 1e-3
