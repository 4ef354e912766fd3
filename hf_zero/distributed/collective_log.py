"""The collectives of this rank: the log of those that it has issued on each communicator, in order,
and what surrounds the calls that start one.

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
import zlib
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch.autograd import profiler

from hf_zero.device import spans
from hf_zero.errors import PartitionError

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

    @property
    def tag(self) -> int:
        """The tag of its point-to-point messages: those of different collectives never match,
        whatever their sizes and the dimensions are that share their connections.
        """
        log = "" if self.log is None else self.log.name
        return zlib.crc32(f"{log} {self.number} {self.what}".encode()) & 0x7FFFFFFF


class Verdicts(Protocol):
    """The watchdog of a rank (hang_detection.py), as the start of a collective asks it.
    ``verdict``: the final reason why this rank ends, "" without one.
    """

    verdict: str

    def check(self) -> None: ...

    def conclude_failure(self, pending: PendingCollective, error: BaseException) -> Exception: ...


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
    peer that dies. Posts of a rank hold ``num_issued``, ``recent`` and ``end_reason``; the timeout
    is that of the last engine on the communicator.
    """

    def __init__(
        self,
        name: str,
        ranks: Sequence[int],
        timeout: float,
        abort: Callable[[], None] = lambda: None,
        reports_dead_peers: bool = True,
    ):
        self.name, self.ranks = name, tuple(ranks)
        self.timeout, self.abort = timeout, abort
        self.reports_dead_peers = reports_dead_peers
        self.num_issued = 0
        self.recent: deque[str] = deque(maxlen=RECENT)
        self.end_reason = ""  # why this rank will issue nothing more
        self.has_communicator = True
        self.before_issue: Callable[[CollectiveLog, str], None] | None = None
        self._prior = PriorCollectives()

    def issue(self, what: str, required: tuple[int, ...] | None = None) -> PendingCollective:
        """Count a collective and return its entry.

        ``required`` are the ranks without which it cannot complete on this rank, by default all.
        """
        if self._prior.calls:
            self._prior.issue()
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

    def share_prior(self, prior: PriorCollectives) -> None:
        """Have ``prior``, which other logs share, issued before each of these collectives (the
        note).
        """
        self._prior = prior

    def hold_back(self, check: Callable[[CollectiveLog, str], None] | None) -> None:
        """Have ``check`` called, with this log and its name, before the next collective, after a
        pass has broken; None: no more.
        """
        self.before_issue = check

    def end(self, reason: str) -> None:
        """Record why this rank will issue nothing more: others read it, and wait no longer."""
        self.end_reason = reason

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
        """Count a collective of ``size`` bytes, for ``key``."""
        self.counts[operation] += 1
        self.bytes[operation] += size
        if self.keep_log:
            self.log.append((operation, key, size))


DEVICE_ERRORS = (torch.OutOfMemoryError, torch.AcceleratorError)  # of this rank alone
# of torch's ValueErrors for a group, and for the default group, that was destroyed
DESTROYED = ("is not registered", "has not been initialized")


class Starting:
    """Context of the calls that start one collective: a span of the step around them, and an error
    that names the cause if the connection was lost, or the group destroyed, before.
    """

    def __init__(
        self, watchdog: Verdicts, pending: PendingCollective, operation: str, key: str, nbytes: int
    ):
        if watchdog.verdict:
            watchdog.check()
        self._watchdog, self._pending = watchdog, pending
        recorded = spans.logs or profiler._is_profiler_enabled
        self._span = spans.span(operation, key, nbytes) if recorded else None

    def __enter__(self) -> None:
        if self._span is not None:
            self._span.__enter__()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._span is not None:
            self._span.__exit__(kind, error, trace)
        if error is not None and self._pending.log is not None:
            self._pending.log.abandon(self._pending.number, self._pending.what)
        if isinstance(error, RuntimeError) and not isinstance(error, DEVICE_ERRORS):
            raise self._watchdog.conclude_failure(self._pending, error) from error
        if isinstance(error, ValueError):
            refuse_destroyed(self._pending, error)


def refuse_destroyed(pending: PendingCollective, error: ValueError) -> None:
    """Raise PartitionError if torch has raised ``error`` because the script has destroyed the
    process group of ``pending``.
    """
    if any(part in str(error) for part in DESTROYED):
        raise PartitionError(
            f"{pending.what} needs a process group that is destroyed; call "
            "torch.distributed.destroy_process_group() after the last step and engine.destroy(), "
            "or hf_zero.initialize again after it"
        ) from error
