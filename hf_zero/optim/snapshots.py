"""The form of state dicts of an optimizer under an engine: an entry for each parameter of its
groups, as torch has them, with this rank's part of each. ``state_dicts.py`` writes them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor
from torch.optim.optimizer import StateDict

from hf_zero.optim.segments import ParamState

if TYPE_CHECKING:
    from hf_zero.zero.layout.optimizer_shard import OptimizerShard

KEY = "segments"  # the entry of a state dict
Layout = dict[str, list[list[Any]]]


class MemberPart(NamedTuple):
    """This rank's part of the parameter ``name``: elements ``[first, last)`` of it, from ``start``
    on in the owned range of ``flat``; ``whole``: its shape. A frozen one has no flat buffer here.
    """

    name: str
    flat: OptimizerShard | None = None
    first: int = 0
    last: int = 0
    start: int = 0
    whole: tuple[int, ...] = (0,)
    shape: tuple[int, ...] = (0,)

    @property
    def stop(self) -> int:
        """The end of the part in the owned range."""
        return self.start + self.last - self.first

    def of(self, array: Tensor) -> Tensor:
        """Return this part of ``array`` [owned], in the shape of the parameter if it is whole."""
        return array.narrow(0, self.start, self.last - self.first).view(self.shape)

    def read_as(self, state: ParamState) -> MemberPart:
        """Return the part that has ``state``: the whole parameter, if a tensor has its shape."""
        whole = any(isinstance(v, Tensor) and v.shape == self.whole for v in state.values())
        return self._replace(first=0, last=math.prod(self.whole)) if whole else self


def parts_of(
    members: Iterable[Iterable[tuple[str, object]]], flats: Sequence[OptimizerShard]
) -> list[list[MemberPart]]:
    """Return this rank's part of each of ``members``, the names of each group."""
    own = dict[str, MemberPart]()
    for flat in flats:
        begin, end = flat.owned
        for slot in flat.layout.slots:
            whole, numel, offset = tuple(slot.shape), slot.numel, slot.offset
            start, stop = max(offset, begin), min(offset + numel, end)
            first, last, at = (0, 0, 0)
            if start < stop:
                first, last, at = start - offset, stop - offset, start - begin
            shape = whole if last - first == numel else (last - first,)
            # MemberPart(...) is a call of Python, of which a large model would make many
            values = (slot.name, flat, first, last, at, whole, shape)
            own[slot.name] = tuple.__new__(MemberPart, values)
    return [
        [own[name] if name in own else MemberPart(name) for name, _ in of_group]
        for of_group in members
    ]


def layout_of(flats: Iterable[OptimizerShard]) -> Layout:
    """Return [name, offset, elements] of each parameter, by flat buffer. Equal on every rank."""
    return {
        flat.key: [[slot.name, slot.offset, slot.numel] for slot in flat.layout.slots]
        for flat in flats
    }


def described(
    packed: StateDict,
    parts: Iterable[Iterable[MemberPart]],
    shared: Sequence[dict[str, float]] | None,
    flats: Iterable[OptimizerShard],
) -> StateDict:
    """Return ``packed``, a state dict with ``parts`` of each group, with a description of these
    added. ``shared``: the scalars of each group, None: those of most entries.
    """
    return packed | {
        KEY: {
            "parts": [[part.name, part.first, part.last] for of in parts for part in of],
            "shared": shared,
            "layout": layout_of(flats),
        }
    }
