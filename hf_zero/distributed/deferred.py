"""Collectives that another thread has to issue before the next one of the thread that trains.

Communicators of one device share it. Where two threads issue on them, a rank's collectives have no
order but that of a clock, and two ranks may each run the one that the other has yet to start: NCCL
allows that on no device that cannot hold both. So what threads have to issue is issued, on every
rank, before the next collective that is issued by the thread that trains.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable


class DeferredCollectives:
    """Calls that issue what other threads of this rank have to issue; of all engines."""

    def __init__(self) -> None:
        self._calls: list[weakref.WeakMethod[Callable[[], None]]] = []

    def add(self, call: Callable[[], None]) -> None:
        """Have ``call``, a method whose object is held weakly, called before each collective."""
        self._calls.append(weakref.WeakMethod(call))

    def issue(self) -> None:
        """Return when nothing is deferred any more. Waits for no other rank."""
        for each in list(self._calls):
            call = each()
            if call is None:
                self._calls.remove(each)
            else:
                call()
