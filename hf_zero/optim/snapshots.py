"""State dicts of an optimizer over segments: positions of the elements of each entry, counted in
whole flat buffers, equally on all ranks. ``hf_zero/zero/step/saved_segments.py`` reads them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from torch.optim.optimizer import StateDict

from hf_zero.optim.segments import Segment

if TYPE_CHECKING:
    from hf_zero.zero.layout.training_state import OptimizerShard

KEY = "segments"  # the entry of a state dict
Layout = dict[str, list[list[Any]]]


def layout_of(flats: Iterable[OptimizerShard]) -> Layout:
    """Return [name, offset, elements] of each parameter, by flat buffer. Equal on every rank."""
    return {
        flat.key: [[slot.name, slot.offset, slot.numel] for slot in flat.layout.slots]
        for flat in flats
    }


def in_order(segments: Sequence[Segment]) -> list[Segment]:
    """Return ``segments`` in the order of a state dict's entries: group by group."""
    return sorted(segments, key=lambda segment: segment.group)


def described(
    packed: StateDict,
    segments: Sequence[Segment],
    diverged: Iterable[int],
    flats: Iterable[OptimizerShard],
) -> StateDict:
    """Return ``packed``, a state dict over ``segments`` of ``flats``, with their positions added;
    ``diverged``: optimizer groups whose parameters have made different numbers of steps on any
    rank.
    """
    places = [
        [
            [part.flat.key, part.flat.owned[0] + part.start, part.flat.owned[0] + part.stop]
            for part in segment.parts
        ]
        for segment in in_order(segments)
    ]
    description = {"places": places, "parted": sorted(diverged), "layout": layout_of(flats)}
    return {**packed, KEY: description}
