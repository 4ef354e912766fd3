"""The collectives of this rank: the log of those that it has issued on each communicator, in order,
the passes in which it has issued them, and the handle of one in flight.

The k-th collective of a rank on a communicator matches the k-th of the others.

[Note: prior collectives]
Communicators of one device share it. If two threads issue on them, a rank's collectives have no
order but that of a clock, and two ranks may each run the one that the other has yet to start: NCCL
allows that on no device that cannot run both at once. So every rank issues the collectives of other
threads before the next collective of its training thread.
"""

from __future__ import annotations

import functools
import re
import time
import weakref
import zlib
from collections import Counter, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch.autograd import profiler

from hf_zero.device import graphs, kinds, spans, streams
from hf_zero.distributed.process_group import CPU, Waitable
from hf_zero.errors import PartitionError, RankMismatchError
from hf_zero.logging import first_line

RECENT = 32  # collectives of a communicator that are remembered
BEGINNINGS = 64  # passes that are remembered
KEY = re.compile(r"(\.\.)?([^|\s]*?)\|((?:trainable|frozen)\|\w+(?:\|[\w+]+(?: \d+)?)*)")
_num_issued = attrgetter("num_issued")


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


class OwnStatus(Protocol):
    """The status of this rank (hang_detection.py). ``last_error``: what it publishes of its last
    exception if it ends now, "" without one.
    """

    rank: int
    last_error: str


class WaitWatcher(Protocol):
    """The watchdog of a rank (hang_detection.py), as waits for collectives use it."""

    started: bool
    verdict: str
    current: tuple[PendingCollective, float] | None

    @property
    def rank_status(self) -> OwnStatus: ...

    def start(self) -> None: ...

    def check(self) -> None: ...

    def follow(
        self,
        pending: PendingCollective,
        is_over: Callable[[], bool],
        device: torch.device | None = None,
    ) -> None: ...

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
        self.name, self.ranks = name, tuple(ranks)
        self.timeout, self.abort = timeout, abort
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

    def __init__(self, logs: Mapping[str, CollectiveLog], watchdog: WaitWatcher, shared: bool):
        """``logs``: the communicators, by purpose."""
        self._logs = dict(logs)
        self._watchdog, self._shared = watchdog, shared
        self._passes: deque[TrackedPass] = deque(maxlen=BEGINNINGS)
        self._open: TrackedPass | None = None  # the pass under way
        self._broken: TrackedPass | None = None  # set until another pass begins
        # raises if the state of the engine is half changed
        self.refuse: Callable[[str], None] | None = None

    def _at(self) -> tuple[int, ...]:
        return tuple(map(_num_issued, self._logs.values()))

    def begin(self, what: str, kind: Hashable, joint: bool = True) -> None:
        """Begin a pass of a ``kind`` that is the same on all ranks. ``joint``: every rank issues
        collectives in it, so that one which leaves it early has missed some.

        After a broken pass, return once all ranks begin this one here.
        """
        if self.refuse is not None:
            self.refuse(f"a {what}")
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
                log.before_issue = self._resume_with

    def close(self) -> None:
        """Note that the engine has ended: the ranks go on together in another one, on communicators
        that engines share, too.
        """
        self._broken = None
        for log in self._logs.values():
            if log.before_issue == self._resume_with:
                log.before_issue = None

    def record_last_error(self, error: BaseException | None) -> None:
        """Set the exception of the last forward, to be published if this rank ends now; None after
        a forward without one.
        """
        self._watchdog.rank_status.last_error = "" if error is None else first_line(error)

    def _resume_with(self, log: CollectiveLog, what: str) -> None:
        role = next(role for role, tracked in self._logs.items() if tracked is log)
        self.resume("", [role, log.num_issued, what], what)


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


DEVICE_ERRORS = (torch.OutOfMemoryError, torch.AcceleratorError)  # of this rank alone
# of torch's ValueErrors for a group, and for the default group, that was destroyed
DESTROYED = ("is not registered", "has not been initialized")


class Handle:
    """A collective in flight."""

    def __init__(
        self,
        works: Sequence[Waitable | None],
        watchdog: WaitWatcher,
        pending: PendingCollective,
        parts: Sequence[torch.Tensor] = (),
        free: Callable[[], None] | None = None,
        finish: Callable[[], None] | None = None,
        follows: torch.device | None = None,
    ):
        """``follows``: the device whose streams alone wait for the works; ``wait`` then returns
        before they are completed.
        """
        # torch returns None for a message of a group that this rank is not in
        self._works = [*filter(None, works)]
        self._watchdog, self._pending = watchdog, pending
        self._parts, self._free = list(parts), free
        self._finish, self._repeats = finish, True
        self._follows = follows
        self._failure: BaseException | None = None
        self._memory: tuple[torch.Tensor, ...] = ()

    def hold(self, *memory: torch.Tensor) -> Handle:
        """Keep ``memory``, which the collective reads or fills, for the stream that will wait: the
        stream that has issued the collective, and gets freed memory back, may not wait for it.
        """
        self._memory += memory
        return self

    def finish_with(self, finish: Callable[[], None], repeats: bool = True) -> None:
        """Have the first wait call ``finish`` once the collective is done; ``repeats``: again in
        the next wait if an interrupt has ended the call.
        """
        self._finish, self._repeats = finish, repeats

    def wait(self) -> None:
        """Block (on a GPU: make the current stream wait) until the collective is done. After a
        failure, every wait raises it; after an interrupt, the next one goes on, unless it broke
        off a ``finish`` that may not be repeated.
        """
        if self._failure is not None:
            raise self._failure
        if self._works:
            works, waited = self._works, 0
            watchdog = self._watchdog
            if not watchdog.started:
                watchdog.start()
            # as in Watchdog.watching, without a call
            outer, watchdog.current = watchdog.current, (self._pending, time.monotonic())
            try:
                try:
                    for work in works:
                        work.wait()
                        waited += 1
                finally:
                    watchdog.current = outer
                    self._works = works[waited:]
            except RuntimeError as error:
                self._works, self._failure = [], error
                if isinstance(error, DEVICE_ERRORS):
                    raise
                self._failure = watchdog.conclude_failure(self._pending, error)
                raise self._failure from error
            if self._follows is not None and self._memory:
                for tensor in self._memory:
                    streams.record_use(tensor, streams.current_stream(self._follows))
            self._memory = ()
            if self._follows is not None and not graphs.capturing():
                # Works keep tensors alive; an event recorded on the stream that waits for them does
                # not.
                event = streams.record_here(self._follows)
                is_over = partial(_are_completed, works) if event is None else event.query
                watchdog.follow(self._pending, is_over, self._follows)
        if self._finish is not None:
            try:
                self._finish()
            except Exception as error:
                self._failure = error
                raise
            except BaseException as error:
                if not self._repeats:
                    self._failure = PartitionError(
                        f"an interrupt has broken off the end of {self._pending.what}: its values "
                        "are added in part; load a checkpoint, or call initialize again"
                    )
                    self._failure.__cause__ = error
                raise
            self._finish = None

    def reduce_into(self, out: torch.Tensor, accumulate: bool, scale: float) -> None:
        """Wait, then set ``out = scale * sum`` or, if ``accumulate``, ``out += scale * sum``.

        Parts from a point-to-point exchange are summed here, in the dtype of ``out``; a
        backend's own reduce-scatter or all-reduce has summed in the wire dtype already.
        """
        self.wait()
        first, *others = self._parts
        if accumulate:
            for part in self._parts:
                out.add_(part, alpha=scale)
        else:
            # equal dtypes: sum or scale straight into `out`, without a copy first
            if others and first.dtype == out.dtype == others[0].dtype:
                torch.add(first, others[0], out=out)
                others = others[1:]
            elif not others and first.dtype == out.dtype:
                torch.mul(first, scale, out=out) if scale != 1.0 else _copy(out, first)
                scale = 1.0
            elif (
                not others
                and first.itemsize < out.itemsize == 4
                and not kinds.is_synchronous(out.device)
            ):
                # One kernel casts and scales. The host would cast through memory of its own.
                torch.add(minus_zero(out.device), first, alpha=scale, out=out)
                scale = 1.0
            elif first.data_ptr() != out.data_ptr() or first.dtype != out.dtype:
                out.copy_(first)
            for part in others:
                out.add_(part)
            if scale != 1.0:
                out.mul_(scale)
        self._release()

    def split(self, sizes: Sequence[int]) -> list[Handle]:
        """Return a handle for each of ``sizes`` consecutive elements of the result: several tensors
        share one message.
        """
        handles: list[Handle] = []
        remaining, at = [len(sizes)], 0

        def free() -> None:
            remaining[0] -= 1
            if not remaining[0]:
                self._release()

        for size in sizes:
            parts = [part.narrow(0, at, size) for part in self._parts]
            # each part waits for the whole message
            handles.append(Handle([self], self._watchdog, self._pending, parts, free))
            at += size
        return handles

    def drop(self) -> None:
        """Wait and discard the result: the peers need what this rank sends."""
        self.wait()
        self._release()

    def _release(self) -> None:
        self._parts = []
        if self._free is not None:
            self._free()
            self._free = None


def _are_completed(works: Sequence[Waitable]) -> bool:
    # where works are followed on a device, they are torch's
    return all(work.is_completed() for work in works)  # type: ignore[attr-defined]


@functools.cache
def minus_zero(device: torch.device) -> torch.Tensor:
    """Return -0.0, [1] fp32: adding it changes no bit, while adding +0.0 turns -0.0 into +0.0."""
    return torch.full((1,), -0.0, device=device)


def _copy(out: torch.Tensor, source: torch.Tensor) -> None:
    if out.data_ptr() != source.data_ptr():
        out.copy_(source)


class Starting:
    """Context of the calls that start one collective: a span of the step around them, and an error
    that names the cause if the connection was lost, or the group destroyed, before.
    """

    def __init__(
        self,
        watchdog: WaitWatcher,
        pending: PendingCollective,
        operation: str,
        key: str,
        nbytes: int,
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
            _refuse_destroyed(self._pending, error)


def _refuse_destroyed(pending: PendingCollective, error: ValueError) -> None:
    """Raise PartitionError if torch has raised ``error`` because the script has destroyed the
    process group of ``pending``.
    """
    if any(part in str(error) for part in DESTROYED):
        raise PartitionError(
            f"{pending.what} needs a process group that is destroyed; call "
            "torch.distributed.destroy_process_group() after the last step and engine.destroy(), "
            "or hf_zero.initialize again after it"
        ) from error


def tagged_barrier(
    pending: PendingCollective,
    ranks: Sequence[int],
    rank: int,
    group: dist.ProcessGroup | None,
    watchdog: WaitWatcher,
    source: int | None = None,
) -> list[Waitable | None]:
    """Return when the ranks that ``pending`` needs are at the same collective. ``rank`` and
    ``source`` are indices into ``ranks``.

    The ``source`` of a broadcast waits for no rank: it gets the works to wait for once its values
    are sent.
    """
    empty, tag = torch.zeros(1, dtype=torch.uint8, device=CPU), pending.tag
    sent: list[Waitable | None] = []
    came: list[Waitable | None] = []
    if watchdog.verdict:
        watchdog.check()
    try:
        for peer, target in enumerate(ranks):
            if peer != rank and (source is None or rank == source):
                sent.append(dist.isend(empty, target, group, tag))
        for peer, target in enumerate(ranks):
            if peer != rank and (source is None or peer == source):
                came.append(dist.irecv(empty.clone(), target, group, tag))
    except RuntimeError as error:
        raise watchdog.conclude_failure(pending, error) from error
    except ValueError as error:
        _refuse_destroyed(pending, error)
        raise
    if rank == source:
        return sent
    Handle([*came, *sent], watchdog, pending).wait()
    return []
