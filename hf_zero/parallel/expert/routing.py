"""Routing of tokens to experts: top-1 and top-2 gates with capacities.

For S tokens and E experts with gates g = softmax(logits) [S, E], a token goes to the experts of its
k largest gates, and its output is the weighted sum of theirs:

- k = 1 (Switch, arXiv 2101.03961): the weight is the gate itself.
- k = 2 (GShard, arXiv 2006.16668): the weights are both gates divided by their sum over those of
  its experts that take the token. The second expert is drawn by the gates without the first one
  (Gumbel-max), or is the one of the second largest gate.

An expert takes at most C = max(ceil(k S / E * capacity_factor), min_capacity) tokens; further ones
are dropped and add nothing to the output. First choices have priority over second ones; among
equals the order of the tokens decides, or for a top-1 gate optionally chance (random token
selection). The auxiliary loss is E * sum_e mean_s(g[s, e]) * mean_s(e is the first choice of s),
which is 1 for an even spread, and 0 without tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

JITTER = 1e-2  # inputs of a gate with noise are multiplied by 1 - JITTER to 1 + JITTER


@dataclass(frozen=True)
class Capacity:
    """Maximum token count of an expert, by the module's formula. ``drops`` False: no limit."""

    factor: float
    least: int
    drops: bool = True

    def limit(self, tokens: int, experts: int, k: int) -> int | None:
        """Return the capacity for ``tokens``, ``experts`` and ``k`` choices; None: no limit."""
        if not self.drops:
            return None
        return max(math.ceil(tokens / experts * self.factor * k), self.least)


@dataclass(frozen=True, eq=False)
class Routing:
    """Assignment of the tokens of one forward to experts.

    experts: [S, k] int64, the number of experts where a token is dropped. weights: [S, k], 0 there.
    places: [S, k] int64, the token's position among those of its expert. aux_loss: 0-dim. counts:
    [E] int64, tokens of each expert before any is dropped.
    """

    experts: torch.Tensor
    weights: torch.Tensor
    places: torch.Tensor
    aux_loss: torch.Tensor
    counts: torch.Tensor
    capacity: int | None

    def dense(self) -> torch.Tensor:
        """Return the weights by token, expert and place: [S, E, C]. C is the largest count if
        nothing is dropped.
        """
        tokens, experts = len(self.experts), len(self.counts)
        capacity = int(self.counts.max()) if self.capacity is None else self.capacity
        whole = self.weights.new_zeros(tokens, experts + 1, capacity)
        if not capacity:  # every token is dropped
            return whole[:, :-1]
        rows = torch.arange(tokens, device=whole.device)[:, None].expand_as(self.experts)
        places = self.places.clamp(max=capacity - 1)  # clamped ones are dropped and add 0
        return whole.index_put((rows, self.experts, places), self.weights, accumulate=True)[:, :-1]


def jittered(inputs: torch.Tensor) -> torch.Tensor:
    """Return ``inputs`` times noise that is uniform in 1 ± :data:`JITTER` (Switch)."""
    return inputs * torch.empty_like(inputs).uniform_(1.0 - JITTER, 1.0 + JITTER)


def gumbel(like: torch.Tensor) -> torch.Tensor:
    """Return noise n such that argmax(logits + n) is a draw from softmax(logits)."""
    return -torch.empty_like(like).exponential_().log()


def top1(
    logits: torch.Tensor,
    capacity: Capacity,
    used: torch.Tensor | None = None,
    noisy: bool = False,
    selects_at_random: bool = True,
) -> Routing:
    """Route each token [S] to one expert by ``logits`` [S, E].

    ``used`` [S]: tokens with 0 go to no expert. ``noisy``: draw the expert by the gates.
    ``selects_at_random``: an expert with too many tokens takes a random selection of them.
    """
    experts = logits.shape[1]
    gates = logits.softmax(1)
    chosen = (logits + gumbel(logits) if noisy else gates).argmax(1)
    if used is not None:
        chosen = chosen.where(used.to(chosen.device).bool(), experts)
    most = capacity.limit(len(logits), experts, 1)
    order = torch.rand(len(chosen), device=chosen.device).argsort() if selects_at_random else None
    taken = _fits(_places(chosen, order), most) & (chosen < experts)
    assigned = chosen.where(taken, experts)
    weights = _of(gates, assigned) * taken
    return Routing(
        assigned[:, None],
        weights[:, None],
        _places(assigned)[:, None],
        _aux_loss(gates, chosen),
        _counts(chosen, experts),
        most,
    )


def top2(
    logits: torch.Tensor, capacity: Capacity, used: torch.Tensor | None = None, samples: bool = True
) -> Routing:
    """Route each token to two experts by ``logits`` [S, E]. ``used`` [S]: tokens with 0 go to none.
    ``samples``: draw the second expert.
    """
    tokens, experts = logits.shape
    gates = logits.softmax(1)
    first = gates.argmax(1)
    others = (logits + gumbel(logits) if samples else logits).scatter(
        1, first[:, None], float("-inf")
    )
    second = others.argmax(1)
    chosen = torch.cat([first, second])
    if used is not None:
        chosen = chosen.where(used.to(chosen.device).bool().repeat(2), experts)
    most = capacity.limit(tokens, experts, 2)
    places = _places(chosen)
    taken = _fits(places, most) & (chosen < experts)
    assigned = chosen.where(taken, experts)
    weights = (_of(gates.repeat(2, 1), assigned) * taken).view(2, tokens)
    weights = weights / weights.sum(0).clamp(min=torch.finfo(weights.dtype).eps)
    return Routing(
        assigned.view(2, tokens).t(),
        weights.t(),
        places.view(2, tokens).t(),
        _aux_loss(gates, chosen[:tokens]),
        _counts(chosen, experts),
        most,
    )


def _of(gates: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Return the gate of each row's chosen expert; any gate for a row without one."""
    return gates.gather(1, chosen.clamp(max=gates.shape[1] - 1)[:, None])[:, 0]


def _counts(chosen: torch.Tensor, experts: int) -> torch.Tensor:
    counts = torch.zeros(experts + 1, dtype=torch.int64, device=chosen.device)
    return counts.scatter_add_(0, chosen, torch.ones_like(chosen))[:experts]


def _fits(places: torch.Tensor, most: int | None) -> torch.Tensor:
    return torch.ones_like(places, dtype=torch.bool) if most is None else places < most


def _places(chosen: torch.Tensor, order: torch.Tensor | None = None) -> torch.Tensor:
    """Return for each row the number of rows before it, in ``order``, with the same expert."""
    queue = chosen if order is None else chosen[order]
    ranked, by_expert = queue.sort(stable=True)
    at = torch.arange(len(queue), device=queue.device)
    starts = torch.searchsorted(ranked, ranked)
    places = torch.empty_like(at)
    places[by_expert if order is None else order[by_expert]] = at - starts
    return places


def _aux_loss(gates: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    tokens, experts = max(1, len(gates)), gates.shape[1]  # without tokens the loss is 0
    share = _counts(first, experts).to(gates.dtype) / tokens
    return (gates.sum(0) / tokens * share).sum() * experts
