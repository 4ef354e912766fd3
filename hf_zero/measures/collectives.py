"""The collectives of one engine by operation, unit and group: their number, bytes, and the time
that computation waited for them. Nothing is serialized: a collective overlaps what it always does.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

import torch

from hf_zero.device import graphs
from hf_zero.distributed.collective_log import CollectiveStats
from hf_zero.distributed.collectives import MeshDim
from hf_zero.distributed.handle import Handle
from hf_zero.logging import JsonObject
from hf_zero.measures.stopwatch import Stopwatch

GATHERS = "all_gather"
FIGURES = "figures of the step"  # sums of the measures themselves, which count no bytes of theirs
MESSAGES = ("send_activations", "send_gradients")  # to one other stage of a pipeline
TO_ONE_RANK = (*MESSAGES, "send_to_next")
Note = TypeVar("Note")


def wire_bytes(operation: str, size: int, ranks: int) -> float:
    """Return the bytes that a rank sends for a collective on ``size`` bytes over ``ranks`` ranks,
    as rings and direct exchanges do: (N - 1) / N of them, twice that in an all-reduce, and all of a
    message.
    """
    if operation in TO_ONE_RANK:
        return size
    return (2 if operation == "all_reduce" else 1) * size * (ranks - 1) / ranks


@dataclass
class CollectiveRow:
    """The collectives of one kind: ``operation`` on ``unit`` over ``group``. ``nbytes``: of their
    buffers; ``wire``: sent by this rank; ``waited``: milliseconds that computation waited.
    """

    operation: str
    unit: str
    group: str
    ranks: int
    count: int = 0
    nbytes: int = 0
    wire: float = 0.0
    waited: float = 0.0
    waits: list[Stopwatch] = field(default_factory=list, repr=False)

    def as_dict(self) -> JsonObject:
        """Return the row under the names of the log."""
        return {
            "operation": self.operation,
            "unit": self.unit,
            "group": self.group,
            "count": self.count,
            "bytes": self.nbytes,
            "wire_bytes": round(self.wire),
            "waited_ms": self.waited,
        }


class EngineCollectives:
    """Counts the collectives over ``dims``, from now until :meth:`close`."""

    def __init__(self, dims: Iterable[MeshDim], device: torch.device):
        self.rows: dict[tuple[str, str, str], CollectiveRow] = {}
        self.wire = Counter[str]()  # bytes by operation, since it was made
        self._device = device
        self._waiting = False  # a collective in several hops counts once
        self._unread: dict[int, CollectiveRow] = {}
        observed = {id(dim): dim for dim in dims if dim.size > 1}.values()
        self._restore: list[Callable[[], None]] = [self._observe(dim) for dim in observed]

    def _observe(self, dim: MeshDim) -> Callable[[], None]:
        stats = _DimStats(self, dim)
        restore = dim.observe(stats, partial(ObservedHandle, self.wait, stats))

        def end() -> None:
            stats.of = None
            if dim.stats is stats:  # otherwise another engine observes this dimension, too
                restore()

        return end

    def close(self) -> None:
        """Count no more."""
        while self._restore:
            self._restore.pop()()

    def add(self, operation: str, unit: str, dim: MeshDim, size: int) -> CollectiveRow:
        """Count one collective."""
        group = dim.reductions.name.partition(" of ")[2]
        row = self.rows.get((operation, unit, group))
        if row is None:
            row = self.rows[operation, unit, group] = CollectiveRow(
                operation, unit, group, dim.size
            )
        sent = wire_bytes(operation, size, dim.size)
        row.count += 1
        row.nbytes += size
        row.wire += sent
        self.wire[operation] += sent  # type: ignore[assignment]
        return row

    def totals(self) -> list[dict[str, object]]:
        """Return the rows of all units summed up, by operation and group."""
        sums: dict[tuple[str, str], JsonObject] = {}
        for row in self.rows.values():
            figures = row.as_dict()
            del figures["unit"]
            total = sums.setdefault((row.operation, row.group), dict.fromkeys(figures, 0))
            for name, value in figures.items():
                total[name] = value if isinstance(value, str) else total[name] + value
        return list(sums.values())

    def wait(self, row: CollectiveRow, wait: Callable[[], None]) -> None:
        """Call ``wait`` and time it, unless it is captured: events in a graph have no times."""
        if self._waiting or graphs.capturing():
            wait()
            return
        watch = Stopwatch(self._device)
        self._waiting = True
        try:
            with watch:
                wait()
        finally:
            self._waiting = False
        row.waits.append(watch)
        self._unread[id(row)] = row

    def take_waits(self) -> list[tuple[CollectiveRow, list[Stopwatch]]]:
        """Return the waits since the last call, to be given to :meth:`read` once they are over."""
        taken = [(row, row.waits) for row in self._unread.values()]
        for row, _ in taken:
            row.waits = []
        self._unread = {}
        return taken

    def read(self, waits: Sequence[tuple[CollectiveRow, list[Stopwatch]]]) -> dict[str, float]:
        """Add the times of ``waits`` to their rows; return their milliseconds by "gather" and
        "reduction".
        """
        milliseconds = defaultdict[str, float](float)
        for row, watches in waits:
            took = sum(watch.read() for watch in watches)
            row.waited += took
            milliseconds["gather" if row.operation == GATHERS else "reduction"] += took
        return milliseconds


class IssuedStats(CollectiveStats, Generic[Note]):
    """Counts that keep a note of each collective for its handle. ``last``: that of the collective
    that is being issued.
    """

    last: Note | None = None


class ObservedHandle(Handle, Generic[Note]):
    """A handle that passes its first wait, and the note of ``stats``, to ``waited``, which calls
    it. Collectives that are over, or have no note, are not passed.
    """

    def __init__(
        self,
        waited: Callable[[Note, Callable[[], None]], None],
        stats: IssuedStats[Note],
        *args: Any,
        **kwargs: Any,
    ):
        super().__init__(*args, **kwargs)
        self._waited, self._note = waited, stats.last
        stats.last = None

    def wait(self) -> None:
        note, self._note = self._note, None
        if note is None or not self._works:
            super().wait()
        else:
            self._waited(note, super().wait)


class _DimStats(IssuedStats[CollectiveRow]):
    """Counts the collectives of one dimension for its engine, and where they were counted before.
    A note is the row of its collective. ``of``: None once it is closed.
    """

    def __init__(self, counts: EngineCollectives, dim: MeshDim):
        super().__init__()
        self.of: EngineCollectives | None = counts
        self._dim, self._before = dim, dim.stats

    def record(self, operation: str, key: str, size: int) -> None:
        if graphs.capturing():  # the launches of the graph issue it, and the first one follows
            graphs.call_in_launches(partial(self._count, operation, key, size))
        else:
            self.last = self._count(operation, key, size)

    def _count(self, operation: str, key: str, size: int) -> CollectiveRow | None:
        self._before.record(operation, key, size)
        if self.of is None or key == FIGURES:
            return None
        return self.of.add(operation, key, self._dim, size)
