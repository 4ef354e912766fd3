"""Hooks of an optimizer before its step, over the members of its groups. They see the gradients and
weights that the step takes, and may change them, the state, and the choice of what is stepped.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from hf_zero.optim.segment_table import SegmentTable
from hf_zero.optim.segments import MemoryRegion, Segment, concatenate, shares_memory, start_of
from hf_zero.optim.snapshots import MemberPart


class Members(Protocol):
    """The interface of the members of groups that a run of hooks needs."""

    @property
    def parts(self) -> Mapping[Any, tuple[MemberPart, int]]:
        """The part that is each member that trains, and its group."""

    def pieces(self, part: MemberPart) -> list[tuple[Segment, int, int]]:
        """Return the elements of ``part`` by segment, in order."""

    def take(self) -> None:
        """Store what a script has written to the state of members."""


class PreStepHooks:
    """Runs of the hooks of an optimizer before its step, whose groups have ``members``."""

    def __init__(self, members: Members, table: SegmentTable) -> None:
        self._members, self._table = members, table

    def run(
        self, run: Callable[[], None], segments: Sequence[Segment], gradients: list[Tensor]
    ) -> tuple[list[Segment], list[Tensor]]:
        """``run`` the optimizer's own pre hooks before a step of ``segments``, whose members have
        the ``gradients`` meanwhile, and the weights that are stepped. Return the segments with
        their gradients without those of members whose gradient a hook has removed.
        """
        gradient_of, lent = dict(zip(segments, gradients)), list[Any]()
        member: Any
        for member, (part, _) in self._members.parts.items():
            pieces, flat = self._members.pieces(part), member.shard
            if not all(segment in gradient_of for segment, *_ in pieces):
                continue
            if not pieces and (flat.offloaded or part.name in flat.gradient.unused):
                continue
            weights = [segment.tensor.data[first:last] for segment, first, last in pieces]
            grads = [gradient_of[segment][first:last] for segment, first, last in pieces]
            former = None
            if self._table.entries.bf16 is not None and pieces:
                former = member.move(concatenate(weights).view(part.shape))
            lent.append((member, part, former, weights, grads))
            member.lend(concatenate(grads).view(part.shape) if grads else torch.zeros_like(member))
        dropped = set[str]()
        try:
            run()
            for member, part, former, weights, grads in lent:
                if member.grad is None and grads:
                    dropped.add(part.name)
                elif grads:
                    _copy_pieces(grads, member.grad)
                if former is not None:
                    _copy_pieces(weights, member.detach())
        finally:
            for member, _, former, *_ in lent:
                member.lend(None)
                if former is not None:
                    member.move(former)
        self._members.take()
        updated = frozenset[str]().union(*(segment.names for segment in segments)) - dropped
        self._table.separate(self._table.segments, updated)
        return self._in_current(gradient_of, dropped)

    @staticmethod
    def _in_current(
        gradient_of: Mapping[Segment, Tensor], dropped: set[str]
    ) -> tuple[list[Segment], list[Tensor]]:
        """Return the current segments of those in ``gradient_of``, which hooks may have cut or
        joined, without those of ``dropped`` parameters, and their gradients.
        """
        of_region = defaultdict[MemoryRegion, list[Segment]](list)
        for segment in gradient_of:
            of_region[segment.region].append(segment)
        stepped, gradients = list[Segment](), list[Tensor]()
        for region, former in of_region.items():
            former.sort(key=start_of)
            for piece in region.segments:
                at = max(0, bisect_right(former, piece.start, key=start_of) - 1)
                grads = list[Tensor]()
                for segment in former[at : bisect_left(former, piece.stop, key=start_of)]:
                    first = max(0, piece.start - segment.start)
                    last = min(segment.stop, piece.stop) - segment.start
                    if first < last:
                        grads.append(gradient_of[segment][first:last])
                if grads and not (piece.names and dropped.issuperset(piece.names)):
                    stepped.append(piece)
                    gradients.append(concatenate(grads))
        return stepped, gradients


def _copy_pieces(pieces: Sequence[Tensor], whole: Tensor) -> None:
    """Copy ``whole`` into ``pieces`` of it, unless it is in their memory."""
    at = 0
    for piece in pieces:
        elements = whole.reshape(-1)[at : at + piece.numel()]
        if not shares_memory(piece, elements):
            piece.copy_(elements)
        at += piece.numel()
