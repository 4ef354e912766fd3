"""Block-sparse attention in plain torch: dense scores under the expanded mask of the layout, in
fp32, one sequence at a time.
"""

from __future__ import annotations

import torch

from hf_zero.ops.philox import words

from .plan import SparsePlan

_ROUNDS = 7


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: SparsePlan,
    padding: torch.Tensor | None,
    seed: torch.Tensor | None,
    causal: bool,
    scale: float,
    dropout: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``o`` [B, H, S, D] in the dtype of ``q``, and the log of each row's sum of
    exponentials, fp32 [B, H, S], inf for rows without a key.
    """
    o = empty_like_heads(q)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    for sequence in range(q.shape[0]):
        scores = _scores(sequence, q, k, plan, padding, causal, scale)
        total = torch.logsumexp(scores, -1)
        total = total.masked_fill(total == -torch.inf, torch.inf)
        p = torch.exp(scores - total[..., None]) * _kept(sequence, q, seed, dropout)
        o[sequence] = (p @ _grouped(v, sequence, q.shape[1])).to(q.dtype)
        lse[sequence] = total
    return o, lse


def backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    plan: SparsePlan,
    padding: torch.Tensor | None,
    seed: torch.Tensor | None,
    causal: bool,
    scale: float,
    dropout: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of q, k and v, the last two summed over the heads that share them (Dao,
    arXiv:2307.08691, algorithm 2).
    """
    dq, dk, dv = empty_like_heads(q), empty_like_heads(k), empty_like_heads(v)
    heads, (kv_heads, length, width) = q.shape[1], k.shape[1:]
    for sequence in range(q.shape[0]):
        key, value = _grouped(k, sequence, heads), _grouped(v, sequence, heads)
        mask = _kept(sequence, q, seed, dropout)
        p = torch.exp(
            _scores(sequence, q, k, plan, padding, causal, scale) - lse[sequence, ..., None]
        )
        g = _wide(grad[sequence])
        delta = (g * _wide(o[sequence])).sum(-1, keepdim=True)
        ds = p * (g @ value.transpose(-1, -2) * mask - delta)
        dq[sequence] = (ds @ key * scale).to(q.dtype)
        shared = (kv_heads, heads // kv_heads, length, width)
        dk[sequence] = (
            (ds.transpose(-1, -2) @ _wide(q[sequence]) * scale).view(shared).sum(1).to(k.dtype)
        )
        dv[sequence] = ((p * mask).transpose(-1, -2) @ g).view(shared).sum(1).to(v.dtype)
    return dq, dk, dv


def empty_like_heads(x: torch.Tensor) -> torch.Tensor:
    """Allocate [B, H, S, D] laid out as [B, S, H, D], like a projection's output."""
    batch, heads, length, width = x.shape
    return torch.empty((batch, length, heads, width), dtype=x.dtype, device=x.device).transpose(
        1, 2
    )


def allowed(plan: SparsePlan, length: int, causal: bool) -> torch.Tensor:
    """Return the mask of a layout: bool [heads or 1, S, S]."""
    mask = plan.layout.repeat_interleave(plan.block, 1).repeat_interleave(plan.block, 2)[
        :, :length, :length
    ]
    return mask.tril() if causal else mask


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _grouped(x: torch.Tensor, sequence: int, heads: int) -> torch.Tensor:
    return _wide(x[sequence]).repeat_interleave(heads // x.shape[1], 0)


def _scores(
    sequence: int,
    q: torch.Tensor,
    k: torch.Tensor,
    plan: SparsePlan,
    padding: torch.Tensor | None,
    causal: bool,
    scale: float,
) -> torch.Tensor:
    mask = allowed(plan, q.shape[2], causal)
    if padding is not None:
        mask = mask & padding[sequence]
    # [heads, S, S]
    scores = _wide(q[sequence]) @ _grouped(k, sequence, q.shape[1]).transpose(-1, -2) * scale
    return scores.masked_fill(~mask, -torch.inf)


def _kept(
    sequence: int, q: torch.Tensor, seed: torch.Tensor | None, dropout: float
) -> torch.Tensor | float:
    """Return 1 / (1 - p) where a probability is kept, else 0: [heads, S, S]."""
    if seed is None:
        return 1.0
    heads, length = q.shape[1:3]
    return (
        dropout_words(seed, sequence * heads, heads, length) >= int(dropout * 2**31)
    ).float() / (1 - dropout)


def dropout_words(seed: torch.Tensor, first: int, heads: int, length: int) -> torch.Tensor:
    """Return 31 random bits for each probability, int64 [heads, S, S], by Philox-4x32-7 (Salmon et
    al., SC 2011).

    The counter is (row, column / 4, sequence * heads + head, 0), and the column picks one of the
    four words: its bit 1 is the lower bit of the word's number, its bit 0 the upper.
    """
    device = seed.device
    fours = -(-length // 4)
    shape = (heads, length, fours)
    head = torch.arange(first, first + heads, device=device)[:, None, None]
    counter = [
        torch.arange(length, device=device)[None, :, None],
        torch.arange(fours, device=device)[None, None, :],
        head,
        head * 0,
    ]
    w0, w1, w2, w3 = (word.expand(shape) for word in counter)
    c0, c1, c2, c3 = words((w0, w1, w2, w3), seed, _ROUNDS)
    return torch.stack([c0, c2, c1, c3], -1).view(heads, length, fours * 4)[..., :length] >> 1
