"""Waits for a key of the ranks' store, with warnings that name the missing ranks."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from hf_zero.distributed.collective_log import PendingCollective
from hf_zero.distributed.watchdog import Watchdog
from hf_zero.errors import HfZeroError, RankMismatchError
from hf_zero.logging import logger

POLL_SECONDS = 0.05
FIRST_PAUSE = 0.0002
SLICE_SECONDS = 1.0  # between checks for missing ranks
WARN_SECONDS = 60.0
ENDED = "destroyed its engine or ended"


class StoreWait:
    """The waits of ``rank`` for keys of ``store``, each of ``timeout`` seconds at most."""

    def __init__(self, store: Any, rank: int, timeout: float, watchdog: Watchdog):
        self._store = store
        self._rank = rank
        self.timeout = timeout
        self._watchdog = watchdog

    def wait(
        self,
        key: str,
        arrivals: Mapping[int, str],
        what: str,
        pending: PendingCollective | None = None,
    ) -> str:
        """Return the value of ``key`` once it is set; it is set after the ranks of ``arrivals``
        have set their keys.

        A warning each minute names the ranks whose keys are missing, which are to do ``what``.
        Raises RankMismatchError if one of them has ended, at the timeout, and for what the watchdog
        finds.
        """
        value = self.wait_or_leave(key, arrivals, what, pending, may_leave=False)
        assert value is not None
        return value

    def wait_or_leave(
        self,
        key: str,
        arrivals: Mapping[int, str],
        what: str,
        pending: PendingCollective | None = None,
        may_leave: bool = True,
        at_once: bool = False,
    ) -> str | None:
        """Wait like :meth:`wait`; with ``may_leave`` return None if a missing rank is
        :meth:`elsewhere`, checked after a second, or ``at_once``.
        """
        pending = pending or PendingCollective(f"ranks to {what}", warns=True)
        try:
            with self._watchdog.watching(pending):
                if not self._poll(key, arrivals, what, may_leave, at_once):
                    return None
        except RuntimeError as error:
            if isinstance(error, HfZeroError):
                raise
            raise self._watchdog.explain_failure(pending, error) from error  # the store is gone
        return str(self._store.get(key).decode())

    def is_over(self, rank: int) -> bool:
        """Whether ``rank`` is known to have failed, died or ended."""
        status = self._watchdog.rank_status
        return status is not None and status.exit_reason(rank) is not None

    def elsewhere(self, rank: int) -> bool:
        """Whether ``rank`` cannot come before this rank goes on: it ends its engine or its script,
        or it waits in a collective that needs this rank.
        """
        status = self._watchdog.rank_status
        gone = any(self._store.check([key]) for key in (_closed(rank), leaving(rank)))
        return gone or (status is not None and status.is_elsewhere(rank))

    def _poll(
        self, key: str, arrivals: Mapping[int, str], what: str, may_leave: bool, at_once: bool
    ) -> bool:
        """Return True once ``key`` is set; False if this rank may leave and others do not come."""
        # Not store.wait(): torch prints two lines whenever it gives up.
        started = time.monotonic()
        looked = started - SLICE_SECONDS if may_leave and at_once else started
        warned, pause = WARN_SECONDS, FIRST_PAUSE
        while True:
            self._watchdog.check()
            if self._store.check([key]):
                return True
            now = time.monotonic()
            if now - looked >= min(SLICE_SECONDS, self.timeout):
                looked = now
                if may_leave and any(
                    self.elsewhere(rank)
                    for rank, arrival in arrivals.items()
                    if rank != self._rank and not self._store.check([arrival])
                ):
                    return False
                warned = self._report_missing(key, arrivals, what, now - started, warned)
            time.sleep(pause)
            pause = min(1.2 * pause, POLL_SECONDS)

    def _report_missing(
        self, key: str, arrivals: Mapping[int, str], what: str, waited: float, warned: float
    ) -> float:
        """Raise if ``key`` will never be set, warn each minute; return the time of the next
        warning, in seconds of the wait.
        """
        missing = [rank for rank, arrival in arrivals.items() if not self._store.check([arrival])]
        gone = {
            rank: self._store.get(_closed(rank)).decode()
            for rank in missing
            if self._store.check([_closed(rank)])
        }
        if gone and not self._store.check([key]):
            raise RankMismatchError(
                f"rank {self._rank} needs all ranks to {what}, but "
                f"{'; '.join(f'rank {rank} has {why}' for rank, why in gone.items())}; "
                "every rank must run the same number of forwards, and destroy or "
                "end after the last one"
            )
        text = (
            f"rank {self._rank} has waited {waited:.0f} s for ranks "
            f"{', '.join(map(str, missing))} to {what}"
        )
        if waited >= self.timeout:
            raise RankMismatchError(
                f"{text}; they never came. Do all ranks call the model, "
                "state_dict and save together?"
            )
        if waited < warned:
            return warned
        logger.warning(text)
        return warned + WARN_SECONDS


def publish_closed(store: Any, rank: int, why: str = ENDED) -> None:
    """Tell ranks that wait for ``rank`` that it no longer answers, and why."""
    try:
        store.set(_closed(rank), why)
    except RuntimeError:
        pass  # the store is gone: no rank can ask


def leaving(rank: int) -> str:
    """Return the key of a rank that ends its engine, and serves requests until then."""
    return f"leaving/{rank}"


def _closed(rank: int) -> str:
    return f"closed/{rank}"
