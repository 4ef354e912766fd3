"""One step of state that is offloaded: flats in any order, piece by piece, also on another thread than the one that trains."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any, Protocol

from torch import Tensor

from hf_zero.optim.host_rules import Rule
from hf_zero.optim.kernel_calls import MASTER, Call
from hf_zero.optim.table import Flat, Segment

AHEAD = 8  # pieces that are announced; buffers may be fewer
Place = Callable[[int, int], Tensor | None]  # memory for the new values of elements [start, stop), in the dtype of the parameters
Placed = Callable[[int, int, Tensor | None], None]


class Bound(Protocol):
    """What a step needs of the optimizer that is bound to the flats."""

    def hosted(self, flat: Flat) -> Sequence[Segment]:
        """The segments of ``flat``, whose state is offloaded."""

    def step_piece(self, segment: Segment, held: Mapping[str, Any], grad: Tensor, divisor: float, fresh: bool) -> None:
        """One update of ``segment`` by the optimizer itself, over the arrays in ``held``."""


class Update:
    """One step of what is offloaded. Each flat is to be run once."""

    def __init__(
        self,
        bound: Bound,
        rules: Sequence[Rule | None],
        groups: Sequence[Mapping[str, Any]],
        steps: Mapping[Segment, int],
        fresh: set[Segment],
        divisor: float,
        number: int,
    ) -> None:
        self._bound, self._number = bound, number
        self._rules, self._groups, self._steps, self._fresh = rules, groups, steps, fresh
        self._divisor = divisor
        self._line: dict[tuple[Any, int], None] = {}  # pieces that are still to be held, in the order in which they were announced
        self._lock = threading.Lock()

    @property
    def touches_optimizer(self) -> bool:
        """Whether the optimizer's own step is called: not while its groups may be changed."""
        return any(rule is None for rule in self._rules)

    def announce(self, flat: Flat) -> None:
        """Say that ``flat`` is to be run, after those that were announced before as a rule."""
        with self._lock:
            self._line |= dict.fromkeys((flat.states, segment.piece) for segment in self._bound.hosted(flat))

    def run(self, flat: Flat, place: Place, placed: Placed) -> None:
        """Update ``flat``, which was announced, piece by piece: its new values go to ``place(start, stop)``, and ``placed`` is told."""
        states, grad = flat.states, flat.grad
        assert grad is not None
        for segment in self._bound.hosted(flat):
            held = states.hold(segment.piece)
            with self._lock:
                del self._line[states, segment.piece]
                following = list(islice(self._line, AHEAD))
            for other, piece in following:
                other.ahead(piece)
            out = place(segment.start, segment.stop)
            self._apply(segment, held, grad[segment.start : segment.stop], out)
            states.release(segment.piece)
            placed(segment.start, segment.stop, out)

    def _apply(self, segment: Segment, held: Mapping[str, Any], grad: Tensor, out: Tensor | None) -> None:
        rule = self._rules[segment.group]
        fresh = segment in self._fresh
        if rule is None:
            self._bound.step_piece(segment, held, grad, self._divisor, fresh)
            if out is not None:
                out.copy_(held[MASTER])
            return
        step = self._steps.get(segment, 0)
        seed = zlib.crc32(f"{self._number} {segment.parts[0].flat.key} {segment.start}".encode())
        rule.update(held, grad, out, Call(self._groups[segment.group], step, self._divisor, seed, fresh))
