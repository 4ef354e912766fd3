"""Words that ranks leave for each other without a collective: for threads that work beside the
training.

A collective of such a thread could meet one of the training. A word in the store cannot: whoever
wants it looks for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from hf_zero.distributed.patience import PatientStore
from hf_zero.errors import RankMismatchError

FIRST_PAUSE, LAST_PAUSE = 0.002, 0.25  # seconds between looks
STORE_SECONDS = 60.0  # after which a store that does not answer counts as gone


class Mailbox:
    """``store`` as one rank sees it. Each rank's word on a topic replaces its last one, so that
    nothing piles up.

    gone: why nothing more will come from a rank, or None; asked only while its word is missing.
    timeout: seconds after which a word that is missing is an error.
    """

    def __init__(self, store: Any, rank: int, timeout: float, gone: Callable[[int], str | None]):
        self._store = PatientStore(
            store.clone() if hasattr(store, "clone") else store, STORE_SECONDS
        )
        self._rank, self._timeout, self._gone = rank, timeout, gone
        # starts the thread that asks: none can be started once the interpreter ends
        self._store.add("opened", 1)

    def leave(self, topic: str, number: int, word: str) -> None:
        """Leave ``word`` as this rank's ``number``-th on ``topic``.

        Raises RuntimeError where the store is gone.
        """
        self._store.set(f"{topic}/{self._rank}", f"{number}|{word}")

    def await_word(self, topic: str, number: int, rank: int) -> str:
        """The ``number``-th word of ``rank``.

        Raises RankMismatchError if it will not come, RuntimeError where the store is gone.
        """
        key, pause, limit = f"{topic}/{rank}", FIRST_PAUSE, time.monotonic() + self._timeout
        gone: str | None = None
        while True:
            found, _, word = (
                self._store.get(key).decode().partition("|")
                if self._store.check([key])
                else ("-1", "", "")
            )
            if int(found) == number:
                return word
            if gone is not None:  # known before the last look
                raise RankMismatchError(
                    f"rank {rank} did not say what came of it: {gone}; its own output says more"
                )
            gone = self._gone(rank)
            if time.monotonic() > limit:
                gone = (
                    gone
                    or f"nothing was heard of it for {self._timeout:g} s (the timeout "
                    "of the configuration)"
                )
            time.sleep(pause)
            pause = min(1.5 * pause, LAST_PAUSE)
