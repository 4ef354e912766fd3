"""The passes of an engine on this rank: where in the logs of its collectives each began and ended,
and whether the last one broke.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Protocol

from hf_zero.distributed.collective_log import CollectiveLog
from hf_zero.errors import RankMismatchError
from hf_zero.logging import first_line

BEGINNINGS = 64  # passes that are remembered
_num_issued = attrgetter("num_issued")


class OwnStatus(Protocol):
    """The status of this rank (hang_detection.py). ``last_error``: what it publishes of its last
    exception if it ends now, "" without one.
    """

    rank: int
    last_error: str


class HasStatus(Protocol):
    """The watchdog of a rank (hang_detection.py), as passes use it."""

    @property
    def rank_status(self) -> OwnStatus: ...


@dataclass
class TrackedPass:
    """A pass of this rank: its kind, and the sequence number of each communicator when it began and
    when it ended, by an exception or not; ``ended`` is None during the pass.
    """

    what: str
    kind: Hashable
    joint: bool
    began: tuple[int, ...]
    ended: tuple[int, ...] | None = None

    def __str__(self) -> str:
        return f"{self.what} {self.kind!r}"


class PassTracker:
    """The passes of one engine on this rank: where each began, and whether the last one broke.
    ``shared``: other processes take part in their collectives.
    """

    def __init__(self, logs: Mapping[str, CollectiveLog], watchdog: HasStatus, shared: bool):
        """``logs``: the communicators, by purpose."""
        self._logs = dict(logs)
        self._watchdog, self._shared = watchdog, shared
        self._passes: deque[TrackedPass] = deque(maxlen=BEGINNINGS)
        self._open: TrackedPass | None = None  # the pass under way
        self._broken: TrackedPass | None = None  # set until another pass begins
        self._refuse: Callable[[str], None] | None = None

    def refuse_with(self, refuse: Callable[[str], None] | None) -> None:
        """Have ``refuse`` called before each pass, with what begins: it raises while the state of
        the engine is half changed. None: no more.
        """
        self._refuse = refuse

    def _at(self) -> tuple[int, ...]:
        return tuple(map(_num_issued, self._logs.values()))

    def begin(self, what: str, kind: Hashable, joint: bool = True) -> None:
        """Begin a pass of a ``kind`` that is the same on all ranks. ``joint``: every rank issues
        collectives in it, so that one which leaves it early has missed some.

        After a broken pass, return once all ranks begin this one here.
        """
        if self._refuse is not None:
            self._refuse(f"a {what}")
        self.end()
        self._open = TrackedPass(what, kind, joint, self._at())
        self._passes.append(self._open)
        if self._broken is not None:
            self.resume(str(self._open), None, what)

    def resume(self, kind: str, first: Sequence[object] | None, what: str) -> None:
        """Go on after a broken pass with ``what``, a pass of ``kind`` or the collective ``first``,
        once all ranks have come as far. Raises RankMismatchError if no feature compares them: this
        rank may have issued other collectives of the broken pass than they.
        """
        raise RankMismatchError(
            f"rank {self._watchdog.rank_status.rank} goes on with a {what} after an exception in a "
            f"{self._broken}, and does not know which of its messages the other ranks await; let "
            "the job end at the exception, and resume from a checkpoint"
        )

    def end(self) -> None:
        """End the pass under way, if there is one."""
        if self._open is not None:
            self._open.ended = self._at()
            self._open = None

    def broke(self) -> None:
        """Note that the current pass, if any, has ended with an exception."""
        broken = self._open
        self.end()
        if broken is not None and (broken.joint or broken.began != broken.ended) and self._shared:
            self._broken = broken
            for log in self._logs.values():
                log.hold_back(self._resume_with)

    def close(self) -> None:
        """Note that the engine has ended: the ranks go on together in another one, on communicators
        that engines share, too.
        """
        self._broken = None
        for log in self._logs.values():
            if log.before_issue == self._resume_with:
                log.hold_back(None)

    def record_last_error(self, error: BaseException | None) -> None:
        """Set the exception of the last forward, to be published if this rank ends now; None after
        a forward without one.
        """
        self._watchdog.rank_status.last_error = "" if error is None else first_line(error)

    def _resume_with(self, log: CollectiveLog, what: str) -> None:
        role = next(role for role, tracked in self._logs.items() if tracked is log)
        self.resume("", [role, log.num_issued, what], what)
