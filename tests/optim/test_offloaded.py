"""One step of what is offloaded, flat by flat."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_zero.offload.storage import MASTER
from hf_zero.offload.sub_group_update import Counted, Update
from hf_zero.optim.segments import Segment, SegmentPart

SUB_GROUPS = 3


@dataclass(eq=False)
class Recorded:
    """States that tell what was held and what was announced, by flat and sub_group."""

    key: str
    events: list[tuple[str, str, int]] = field(default_factory=list)

    def acquire(self, sub_group: int) -> dict[str, Tensor]:
        self.events.append(("held", self.key, sub_group))
        return {MASTER: torch.zeros(4)}

    def prefetch(self, sub_group: int) -> None:
        self.events.append(("ahead", self.key, sub_group))

    def release(self, sub_group: int) -> None:
        """Nothing was kept."""


class Stepping:
    """Stands for the optimizer: each flat has some sub_groups."""

    def __init__(self, flats: list[Any]) -> None:
        self._hosted = {
            flat.key: [
                Segment(0, 4 * n, 4 * n + 4, [SegmentPart(flat, 4 * n, 4 * n + 4, 0)], n)
                for n in range(SUB_GROUPS)
            ]
            for flat in flats
        }

    def offloaded_segments(self, flat: Any) -> list[Segment]:
        return self._hosted[flat.key]

    def count(self, flat: Any, rules: Any) -> dict[Segment, Counted]:
        return dict.fromkeys(self._hosted[flat.key], Counted())

    def step_sub_group(
        self, segment: Segment, held: Mapping[str, Any], grad: Tensor, divisor: float, fresh: bool
    ) -> None:
        held[MASTER].add_(grad)


@pytest.mark.parametrize("order", ["abc", "cba", "cab", "bca"])
def test_what_was_updated_is_not_announced_again(order):
    """Flats may be updated in another order than they were announced in: what waits is what the
    next forward needs first.
    """
    events: list[tuple[str, str, int]] = []
    flats = {
        key: SimpleNamespace(
            key=key, storage=Recorded(key, events), grad=torch.ones(4 * SUB_GROUPS)
        )
        for key in "abc"
    }
    update = Update(Stepping(list(flats.values())), [None], [{}], 1.0, 0)
    for key in "abc":
        update.announce(flats[key])
    for key in order:
        update.run(flats[key], lambda start, stop: None, lambda start, stop, values: None)
    held = [event for event in events if event[0] == "held"]
    assert held == [("held", key, sub_group) for key in order for sub_group in range(SUB_GROUPS)]
    for place, (what, key, sub_group) in enumerate(events):
        assert what == "held" or ("held", key, sub_group) in events[place:]
    assert len(set(events)) == 2 * len(held) - 1, "all but the first were announced"
