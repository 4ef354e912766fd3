"""Waits of a rank for others, as the core sees them, and what a feature that detects hangs answers
in place of these classes (``hang_detection`` in a row of ``config/features.toml``).

Without it a wait ends by the timeout of its backend, a dead rank is a lost connection, and an
engine makes no further pass after one that an exception has broken.
"""

from __future__ import annotations

import atexit
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist

from hf_zero.distributed import rank_hosts
from hf_zero.distributed.collective_log import CollectiveLog, PendingCollective
from hf_zero.distributed.pass_tracker import PassTracker
from hf_zero.errors import RankMismatchError

JOIN_SECONDS = 30.0  # a thread that has not ended by then is left


class RunNotes(Protocol):
    """The record of a run."""

    def note(self, kind: str, value: object) -> None: ...


class RankStatus:
    """What this rank posts of itself, and knows of the others: nothing.

    ``store_host``: the rank that hosts the store; ``identity``: host and process of this rank.
    """

    store_host: int | None = None
    identity = ""
    # whether the end of a rank would be known here, and none is known to have failed or died
    all_live = False

    def __init__(self, rank: int = 0, world: int = 1):
        self.rank, self.world = rank, world
        # the last exception that passed through the engine, if no forward has succeeded since
        self.last_error = ""

    def register(self, log: CollectiveLog) -> CollectiveLog:
        """Register the log of a communicator under its name, by which other ranks find it."""
        return log

    def unregister(self, logs: Sequence[CollectiveLog]) -> None:
        """Remove the logs of communicators that no rank will use again."""

    def post_logs(self) -> None:
        """Post the logs of this rank, which waits for nothing."""

    def exit_reasons(self, ranks: Sequence[int]) -> dict[int, str]:
        """Return why no thread of some of ``ranks`` will say anything more."""
        return {}

    def elsewhere(self, ranks: Sequence[int]) -> list[int]:
        """Return those of ``ranks`` that cannot arrive before this rank goes on."""
        return []


class Watchdog:
    """The waits of one rank. This one polls none of them."""

    def __init__(self, rank_status: RankStatus | None = None) -> None:
        self.rank_status = RankStatus() if rank_status is None else rank_status
        self.verdict = ""  # the final reason why this rank ends
        # what this rank waits for, and since when; a collective's wait sets it, as `watching` does
        self.current: tuple[PendingCollective, float] | None = None
        self.started = True  # whether a thread polls waits, or none is to
        # records of runs, whose ``note`` gets the states of all ranks in long waits
        self.records = weakref.WeakSet[RunNotes]()

    def beside(self) -> Watchdog:
        """Return a watchdog for collectives that another thread issues: a rank waits for one thing
        at a time. Collectives that only streams wait for are followed here.
        """
        return Watchdog(self.rank_status)

    def start(self) -> None:
        """Start the thread that polls, at the first wait."""

    @contextmanager
    def watching(self, pending: PendingCollective) -> Iterator[None]:
        """Mark the enclosed block as waiting."""
        if not self.started:
            self.start()
        outer, self.current = self.current, (pending, time.monotonic())
        try:
            yield
        finally:
            self.current = outer

    def follow(
        self,
        pending: PendingCollective,
        is_over: Callable[[], bool],
        device: torch.device | None = None,
    ) -> None:
        """Watch a collective for which only a stream waits until ``is_over``. The collectives of a
        communicator complete in their order.

        ``is_over`` is called on other threads, and should keep no tensor alive; ``device``: the
        device of the event that it queries.
        """

    def check(self) -> None:
        """Raise the watchdog's verdict, for code that does not wait in a backend."""
        if self.verdict:
            raise RankMismatchError(self.verdict)

    def sleep(self, seconds: float) -> None:
        """Sleep, until there is a verdict at most."""
        time.sleep(seconds)

    def end(self, verdict: str) -> None:
        """End this rank, and all its waits, for a reason found by another thread or rank."""
        self.verdict = self.verdict or verdict

    def conclude_failure(
        self, pending: PendingCollective, error: BaseException
    ) -> RankMismatchError:
        """Return the exception to raise for ``error``, raised by the wait for ``pending``, and end
        this rank's waits. The exception names the rank that caused the error, if it can be found.
        """
        self.end(self.unfinished(pending, self.lost_connection(pending, error)))
        return RankMismatchError(self.verdict)

    def unfinished(self, pending: PendingCollective, cause: str) -> str:
        """Return the message that ``pending`` does not end because of ``cause``."""
        return f"rank {self.rank_status.rank} could not finish {pending}: {cause}"

    def lost_connection(self, pending: PendingCollective, error: BaseException) -> str:
        """Return the cause of ``error`` if no rank is known that caused it."""
        others = rank_hosts.named(r for r in pending.required if r != self.rank_status.rank)
        return (
            f"a connection was lost ({error}): a rank has ended or died, or its network; "
            f"see the output of {others}"
        )

    def report_mismatch(self, pending: PendingCollective) -> RankMismatchError:
        """Return the exception to raise if different collectives of ranks have matched, and end
        this rank's waits. Each rank notices.
        """
        self.end(f"rank {self.rank_status.rank} is at {pending}, another rank elsewhere")
        return RankMismatchError(self.verdict)

    def close(self) -> None:
        """End the thread."""

    def leave(self) -> None:
        """Publish how this rank ends, once its interpreter does."""


watchdogs: weakref.WeakSet[Watchdog] = weakref.WeakSet()
"""Those that have something to do at the end of the interpreter."""


@atexit.register
def leave() -> None:
    """Close all watchdogs, and publish how this rank ends. Idempotent."""
    leaving = list(watchdogs)
    for watchdog in leaving:
        watchdog.close()
    for watchdog in leaving:
        watchdog.leave()


class Heartbeats(Protocol):
    """Heartbeats between the hosts of a job, of which an engine is a holder."""

    def release(self) -> None:
        """Count an engine less."""


class HangDetection:
    """Detection of hangs and dead ranks in a job of ``world`` ranks that share ``store``, by their
    default group: none. Without a ``store``, as for ranks that are threads, ``world`` is 1.
    """

    def __init__(self, store: dist.Store | None = None, rank: int = 0, world: int = 1) -> None:
        self._world = world
        self.watchdog = Watchdog(RankStatus(rank, world))

    @classmethod
    def watchdog_of_start(cls) -> Watchdog:
        """Return a watchdog for the wait in which the ranks meet, before there is a group."""
        return Watchdog()

    def tracker(
        self,
        name: str,
        rank: int,
        ranks: Sequence[int],
        logs: Mapping[str, CollectiveLog],
        timeout: float,
    ) -> PassTracker:
        """Return the tracker of the passes of the engine ``name`` over ``ranks``, whose
        communicators have ``logs``, by purpose.
        """
        return PassTracker(logs, self.watchdog, shared=min(self._world, len(ranks)) > 1)

    def meet(
        self,
        identities: Sequence[str],
        exchange: Callable[..., list[Any]],
        host_timeout: float,
        timeout: float,
    ) -> Heartbeats | None:
        """Begin an engine at which the ranks with ``identities`` meet (collective): start
        heartbeats of this host, which count as lost after ``host_timeout`` seconds. ``exchange``
        gathers an object of each rank; ``timeout``: of waits.
        """
        return None
