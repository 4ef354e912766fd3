"""Logs of the collectives that this rank has issued on each communicator, in order.

The k-th collective of a rank on a communicator matches the k-th of the others.

[Note: prior collectives]
Communicators of one device share it. If two threads issue on them, a rank's collectives have no
order but that of a clock, and two ranks may each run the one that the other has yet to start: NCCL
allows that on no device that cannot run both at once. So every rank issues the collectives of other
threads before the next collective of its training thread.
"""

from __future__ import annotations

import re
import weakref
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

RECENT = 32  # collectives of a communicator that are remembered
KEY = re.compile(r"(\.\.)?([^|\s]*?)\|((?:trainable|frozen)\|\w+(?:\|[\w+]+(?: \d+)?)*)")


def in_words(what: str) -> str:
    """Return ``what`` with each key of a flat buffer as its unit and, in brackets, its kind."""
    return KEY.sub(
        lambda key: f"{key[1] or ''}{key[2] or '(root)'} ({key[3].replace('|', ', ')})", what
    )


class PendingCollective(NamedTuple):
    """A collective that this rank has issued and waits for."""

    what: str
    log: CollectiveLog | None = None
    number: int = 0
    required: tuple[int, ...] = ()  # global ranks without which it cannot complete
    warns: bool = False  # the waiting code issues its own warnings

    def __str__(self) -> str:
        what = in_words(self.what)
        return what if self.log is None else f"{what} (number {self.number} of {self.log.name})"


class PriorCollectives:
    """Calls that issue the collectives of this rank's other threads; shared by all engines."""

    def __init__(self) -> None:
        self.calls: list[weakref.WeakMethod[Callable[[], None]]] = []

    def add(self, call: Callable[[], None]) -> None:
        """Have ``call``, a method whose object is held weakly, called before each collective."""
        self.calls.append(weakref.WeakMethod(call))

    def issue(self) -> None:
        """Issue all of them. Waits for no other rank."""
        for reference in list(self.calls):
            call = reference()
            if call is None:
                self.calls.remove(reference)
            else:
                call()


class CollectiveLog:
    """The collectives that this rank has issued on one communicator, by sequence number.

    ``abort`` makes waits on the communicator raise; ``reports_dead_peers``: the backend reports a
    peer that dies.
    """

    def __init__(
        self,
        name: str,
        ranks: Sequence[int],
        timeout: float,
        abort: Callable[[], None] = lambda: None,
        reports_dead_peers: bool = True,
    ):
        self.name = name
        self.ranks = tuple(ranks)
        self.timeout = timeout
        self.abort = abort
        self.reports_dead_peers = reports_dead_peers
        self.num_issued = 0
        self.recent: deque[str] = deque(maxlen=RECENT)
        self.end_reason = ""  # why this rank will issue nothing more
        self.has_communicator = True
        # called before the next collective, after a pass has broken (recovery.py)
        self.before_issue: Callable[[CollectiveLog, str], None] | None = None
        self.prior = PriorCollectives()  # issued before each of its own (the note)

    def issue(self, what: str, required: tuple[int, ...] | None = None) -> PendingCollective:
        """Count a collective and return its entry.

        ``required`` are the ranks without which it cannot complete on this rank, by default all.
        """
        if self.prior.calls:
            self.prior.issue()
        if self.before_issue is not None:
            self.before_issue(self, what)
        number = self.num_issued
        self.num_issued = number + 1
        self.recent.append(what)
        return PendingCollective(what, self, number, self.ranks if required is None else required)

    def abandon(self, number: int, what: str) -> None:
        """Record that an exception interrupted collective ``number``, perhaps before its messages
        were sent: ranks that wait in it then see another collective here.
        """
        if self.num_issued > number:
            if not self.recent or self.recent[-1] is not what:
                self.recent.append(what)  # the exception came between the two lines of `issue`
            self.recent[-1] = f"{what}, left by an exception"

    def close(self) -> None:
        """Drop the reference to the communicator; the log of issued collectives stays."""
        self.abort, self.has_communicator = lambda: None, False

    def withdraw(self) -> None:
        """Remove the last collective, which no rank has joined."""
        self.num_issued -= 1
        self.recent.pop()


@dataclass
class CollectiveStats:
    """Logical collectives issued by this rank: counts and bytes by operation, and their order if
    ``keep_log`` is set.
    """

    counts: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)
    keep_log: bool = False
    log: list[tuple[str, str, int]] = field(default_factory=list)

    def record(self, operation: str, key: str, size: int) -> None:
        self.counts[operation] += 1
        self.bytes[operation] += size
        if self.keep_log:
            self.log.append((operation, key, size))
