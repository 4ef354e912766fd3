"""Dispatch tokens to the ranks of their experts and back: expert parallelism's two all-to-alls.

Rank r of n expert-parallel ranks holds experts r E/n to (r + 1) E/n - 1. Each (token, expert)
pair is sent without padding; the ranks first exchange the row counts, which the host reads once per
layer and forward. The backward sends gradients along the same routes, and a recomputation in it
reuses the routes of its forward: it sends rows to the same ranks, without communication and without
reading from the device. A token whose gates round differently the second time thus changes no
shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hf_zero.distributed.collectives import MeshDim
from hf_zero.ops.operators import GradientContext
from hf_zero.zero.feature import Feature

if TYPE_CHECKING:
    from hf_zero.zero.training_engine import TrainingEngine

# Computes [n, hidden] from rows [n, hidden], the index of each row's expert among this rank's
# experts [n], and the number of rows of each of these experts.
RunExperts = Callable[[torch.Tensor, torch.Tensor, Sequence[int]], torch.Tensor]

KEPT = "_hf_zero_routes"  # attribute of expert modules: the :class:`_Kept` of their routes
_SEVERAL = object()  # mark of a module that one forward called more than once: routes ambiguous


@dataclass(frozen=True, eq=False)
class Routes:
    """Routing of the rows of one forward of a layer between ranks.

    sent, received: rows to and from each rank. sizes: rows of each expert of this rank. pairs: for
    each row, its index among all (token, choice) pairs. numbers: for each received row, its expert
    among those of this rank.
    """

    sent: Sequence[int]
    received: Sequence[int]
    sizes: Sequence[int]
    pairs: torch.Tensor
    numbers: torch.Tensor


# Returns the routes of the current forward; calls its argument to compute them if not known.
KeepRoutes = Callable[[Callable[[], Routes]], Routes]


@dataclass(frozen=True)
class _Swap:
    """All-to-all of rows along ``mesh_dim``: row counts to and from each rank; ``name``: the
    collective's name in CollectiveStats.
    """

    mesh_dim: MeshDim
    sent: Sequence[int]
    received: Sequence[int]
    name: str

    def back(self) -> _Swap:
        return _Swap(self.mesh_dim, self.received, self.sent, self.name)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        width = math.prod(rows.shape[1:])
        handle, came = self.mesh_dim.all_to_all(
            rows.contiguous().view(-1),
            [count * width for count in self.sent],
            [count * width for count in self.received],
            self.name,
        )
        handle.wait()
        return came.view(-1, *rows.shape[1:])


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: GradientContext, rows: torch.Tensor, swap: _Swap) -> torch.Tensor:
        ctx.back = swap.back()
        return swap(rows)

    @staticmethod
    def backward(ctx: GradientContext, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _Exchange.apply(grads[0], ctx.back), None


@torch.compiler.disable
def run_experts(
    tokens: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    count: int,
    run: RunExperts,
    mesh_dim: MeshDim | None = None,
    name: str = "experts",
    keep: KeepRoutes | None = None,
) -> torch.Tensor:
    """Return for each token the weighted sum of its experts' outputs: [S, hidden]. Collective over
    ``mesh_dim``, in forward and backward.

    Args:
        tokens: [S, hidden]; a rank may have none.
        experts: [S, k], indices among all experts; ``count`` where a token has none.
        weights: [S, k]; 0 where a token has none.
        count: number of experts on all ranks of ``mesh_dim`` together.
        run: computes this rank's experts.
        mesh_dim: mesh dimension of the expert ranks; None: this rank holds all experts.
        keep: keeps the routes of forwards for their recomputations.
    """

    def find() -> Routes:
        return _routes(experts, count, mesh_dim, name)

    routes = find() if keep is None else keep(find)
    k, pairs = experts.shape[-1], routes.pairs
    rows = tokens[pairs // k]
    swap = None if mesh_dim is None else _Swap(mesh_dim, routes.sent, routes.received, name)
    if swap is not None:
        rows = _Exchange.apply(rows, swap)
    outputs = run(rows, routes.numbers, routes.sizes)
    if swap is not None:
        outputs = _Exchange.apply(outputs, swap.back())
    weighted = outputs * weights.reshape(-1)[pairs, None].to(outputs.dtype)
    # No index_add_: its order of summation is not deterministic on a GPU.
    whole = outputs.new_zeros(experts.numel(), outputs.shape[-1]).index_copy(0, pairs, weighted)
    return whole.view(len(tokens), k, outputs.shape[-1]).sum(1)


def _routes(experts: torch.Tensor, count: int, mesh_dim: MeshDim | None, name: str) -> Routes:
    """Return the routes of tokens whose ``experts`` [S, k] are indices among ``count`` (collective
    over ``mesh_dim``). The host waits for the device once.
    """
    flat = experts.reshape(-1)
    by_expert = flat.argsort(stable=True)
    size = 1 if mesh_dim is None else mesh_dim.size
    counts = torch.zeros(count + 1, dtype=torch.int64, device=flat.device)
    counts = counts.scatter_add_(0, flat, torch.ones_like(flat))[:count].view(size, -1)
    arriving = counts if mesh_dim is None else _exchange_counts(mesh_dim, counts, name)
    if flat.is_meta:
        sent, *by_rank = _even_rows(flat.numel(), count, mesh_dim)
    else:
        sent, *by_rank = _on_host(counts.sum(1), arriving)
    received = [sum(counts) for counts in by_rank]
    numbers = torch.arange(count // size, device=flat.device).repeat(size)
    numbers = numbers.repeat_interleave(arriving.reshape(-1), output_size=sum(received))
    sizes = [sum(counts) for counts in zip(*by_rank)]
    return Routes(sent, received, sizes, by_expert[: sum(sent)], numbers)


def _exchange_counts(mesh_dim: MeshDim, counts: torch.Tensor, name: str) -> torch.Tensor:
    """Exchange row counts: from ``counts`` [ranks, experts per rank] sent by this rank, return the
    rows that each expert of this rank receives, by source rank.
    """
    ones = [1] * mesh_dim.size
    return _Swap(mesh_dim, ones, ones, f"counts of {name}")(counts)


def _on_host(sent: torch.Tensor, arriving: torch.Tensor) -> list[list[int]]:
    """Return ``sent`` [ranks] and each row of ``arriving`` [ranks, experts] as lists; one wait."""
    numbers = torch.cat([sent, arriving.reshape(-1)]).tolist()
    ranks, experts = arriving.shape
    starts = range(ranks, len(numbers), experts)
    return [numbers[:ranks], *(numbers[start : start + experts] for start in starts)]


def _even_rows(pairs: int, count: int, mesh_dim: MeshDim | None) -> list[list[int]]:
    """Return what :func:`_on_host` does if every rank sends as many ``pairs``, evenly to ``count``
    experts: tensors without values, of a simulation, do not tell.
    """
    size, rank = (1, 0) if mesh_dim is None else (mesh_dim.size, mesh_dim.rank)
    rows = [pairs // count + (expert < pairs % count) for expert in range(count)]
    share = count // size
    by_rank = [rows[at : at + share] for at in range(0, count, share)]
    return [[sum(counts) for counts in by_rank], *([by_rank[rank]] * size)]


class RoutesOfForwards(Feature):
    """The routes of ``modules`` on one engine, kept by forward."""

    def __init__(self, modules: Sequence[nn.Module]):
        self._modules = list(modules)

    def apply(self, engine: TrainingEngine) -> None:
        for module in self._modules:
            module.__dict__[KEPT] = _Kept(engine.pass_runner.module_hooks)

    def remove(self) -> None:
        for module in self._modules:
            module.__dict__.pop(KEPT, None)
        self._modules = []


class _Kept:
    """The routes of one module, by forward. Copies and pickles of it start empty."""

    def __init__(self, hooks: Any = None):
        self._hooks = hooks

    def __reduce__(self) -> tuple[type[_Kept], tuple[()]]:
        return _Kept, ()

    def __call__(self, find: Callable[[], Routes]) -> Routes:
        forward = None if self._hooks is None else self._hooks.current_forward
        if forward is None:
            return find()
        draws = forward.drawn.get(self)
        if torch._C._current_graph_task_id() != -1:  # inside a backward: a recomputation
            return draws if isinstance(draws, Routes) else find()
        key = find()
        forward.drawn[self] = key if draws is None else _SEVERAL
        return key
