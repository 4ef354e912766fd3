"""Collectives of other threads, issued before the next one of the training thread.

Communicators of one device share it. If two threads issue on them, a rank's collectives have no
order but that of a clock, and two ranks may each run the one that the other has yet to start: NCCL
allows that on no device that cannot run both at once. So every rank issues the collectives of other
threads before the next collective of its training thread.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable


class DeferredCollectives:
    """Calls that issue the collectives of this rank's other threads; shared by all engines."""

    def __init__(self) -> None:
        self._calls: list[weakref.WeakMethod[Callable[[], None]]] = []

    def add(self, call: Callable[[], None]) -> None:
        """Have ``call``, a method whose object is held weakly, called before each collective."""
        self._calls.append(weakref.WeakMethod(call))

    def issue(self) -> None:
        """Issue all deferred collectives. Waits for no other rank."""
        for each in list(self._calls):
            call = each()
            if call is None:
                self._calls.remove(each)
            else:
                call()
