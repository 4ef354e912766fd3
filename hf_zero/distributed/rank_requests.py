"""Requests of a rank to all others through the store, and the events that all ranks learn of at the
end of the same step (orders of gathers recorded anew, a stop of the job, a save that has failed).
What ranks request of each other besides, shards, is in shard_fetches.py.

[Note: requests]
A rank informs the others by a numbered request in the store, and rings their bells (store.py). The
thread of each rank that serves shards answers with the number of that rank's current step: hosts
may be steps apart. It sends nothing to the store until its bell rings. All ranks
act at the end of the latest of these steps. No rank is past it, and none ends its current step
before it has read which one that is.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import torch.distributed as dist

from hf_zero.distributed.store import RollCall, StoreWait, ring
from hf_zero.errors import RankMismatchError

# Subject of a request: the index of a fetched unit, after whose step the orders are recorded anew;
# STOP; or, below STOP, an event of the caller.
RENEW, STOP = 0, -1


class RankRequest(NamedTuple):
    """A request of rank ``asking`` on its subject ``about``: of a unit, that ``peers`` serve their
    shards after ``epoch`` writes; ``alone``: outside passes, so that no other rank answers.
    """

    asking: int
    about: int
    epoch: int
    alone: bool
    peers: tuple[int, ...]

    def text(self) -> str:
        """Return it as :meth:`read` takes it."""
        return "|".join(
            map(str, (self.asking, self.about, self.epoch, int(self.alone), *self.peers))
        )

    @classmethod
    def read(cls, text: str) -> RankRequest:
        asking, about, epoch, alone, *peers = map(int, text.split("|"))
        return cls(asking, about, epoch, bool(alone), tuple(peers))


class StepEvents:
    """One rank's side of the events. :attr:`stopped` and :attr:`events` change in :meth:`end_step`,
    equally on all ranks.
    """

    def __init__(self, store: dist.Store, rank: int, ranks: Sequence[int], waits: StoreWait):
        self._store = store
        self._rank = rank
        self._ranks = tuple(ranks)
        self._waits = waits
        self._step = 0
        # requests of other ranks since the last step: (number, asking rank, about)
        self._heard: set[tuple[int, int, int]] = set()
        self.asked: set[int] = set()  # requests of this rank, which its own thread passes over
        self._lock = threading.Lock()  # guards the two above, which the serving thread also uses
        self._unsent: set[int] = set()  # events not yet announced to the other ranks
        self._due: set[tuple[int, int]] = set()  # (step after which all ranks act, event)
        self.stopped = False  # all ranks stop
        self.events: frozenset[int] = frozenset()  # of the last completed step

    def request_stop(self) -> None:
        """Have all ranks stop after the same step, one of the next; safe in signal handlers."""
        self._unsent.add(STOP)

    def broadcast_event(self, event: int) -> None:
        """Have all ranks find ``event``, a number below :data:`STOP`, in :attr:`events` after the
        same step, one of the next.
        """
        if not self._is_due(event):
            self._unsent.add(event)

    def _is_due(self, event: int) -> bool:
        return any(due == event for _, due in self._due)

    def request(self, about: int, epoch: int, peers: Sequence[int], what: str) -> int:
        """Announce a request to every rank, and return its number once all have answered: if
        ``about`` is a unit, ``peers`` have served their shards of it after ``epoch`` writes.

        ``what`` describes the others' task in messages. Raises RankMismatchError if a rank cannot
        do it, or does not answer; the ranks that have answered raise it at the end of their step.
        """
        # await ranks that serve nothing, too: all must know of the request
        others = [rank for rank in self._ranks if rank != self._rank]
        number = count_request(self._store, self.asked)
        try:
            announce(
                self._store, number, RankRequest(self._rank, about, epoch, False, tuple(peers))
            )
            ring(self._store, others)
            answers = await_answers(self._store, self._waits, number, others, what)
        except BaseException as error:  # an interrupt, too: the others wait for the step
            why = str(error) if isinstance(error, RankMismatchError) else type(error).__name__
            with suppress(RuntimeError):  # the store is gone: the others find that out themselves
                self._store.set(
                    f"fetch/{number}/renew",
                    f"!rank {self._rank} could not make the others {what}: {why}",
                )
            raise
        steps = [self._step, *map(int, answers)]
        self._store.set(f"fetch/{number}/renew", str(max(steps)))
        self._due.add((max(steps), min(about, RENEW)))
        return number

    def note_request(self, number: int, asking: int, about: int) -> int:
        """Note request ``number`` of rank ``asking``; return this rank's current step."""
        with self._lock:
            self._heard.add((number, asking, about))
            return self._step

    def end_step(self) -> bool:
        """End a step. Return whether the orders of gathers are recorded anew after it, equal on all
        ranks. Raises RankMismatchError if a request of another rank has failed.
        """
        # Announced here, not when they occur: a rank that waits for the answers may be needed by
        # the current step of another rank.
        while self._unsent:
            event = self._unsent.pop()
            if self._is_due(event) or (event == STOP and self.stopped):
                continue
            stops = event == STOP
            self.request(
                event,
                0,
                (),
                "hear that the job is to stop" if stops else "hear what has become of a save",
            )
        while True:
            with self._lock:
                heard, self._heard = self._heard, set()
                if not heard:
                    step, self._step = self._step, self._step + 1
                    break
            for number, asking, about in heard:
                self._learn_when(number, asking, about)
        events: set[int] = set()
        if self._due:
            events = {event for at, event in self._due if at == step}
            self._due = {(at, event) for at, event in self._due if at > step}
        self.stopped = self.stopped or STOP in events
        self.events = frozenset(events - {RENEW, STOP})
        return RENEW in events

    def _learn_when(self, number: int, asking: int, about: int) -> None:
        """Wait for the step after which all ranks act on request ``number``."""
        key = f"fetch/{number}/renew"
        condition = "say after which step all stop or hear of a save"
        if about >= 0:
            condition = "say from when on orders are recorded anew"
        answer = self._waits.wait(key, lambda: [asking], condition)
        delete_once_read(self._store, key, len(self._ranks) - 1)
        if answer.startswith("!"):
            raise RankMismatchError(answer[1:])
        self._due.add((int(answer), min(about, RENEW)))


def count_request(store: dist.Store, requested: set[int]) -> int:
    """Return the number of a new request, added to ``requested``."""
    number = int(store.add("fetch/n", 1))
    requested.add(number)
    return number


def announce(store: dist.Store, number: int, request: RankRequest) -> None:
    """Put ``request`` into the store under ``number``."""
    store.set(f"fetch/{number}", request.text())


def delete_once_read(store: dist.Store, key: str, readers: int) -> None:
    """Note that this rank has read ``key``; the last of ``readers`` deletes it."""
    if store.add(f"{key}/read", 1) >= readers:
        store.delete_key(key)
        store.delete_key(f"{key}/read")


def await_answers(
    store: dist.Store, waits: StoreWait, number: int, ranks: Sequence[int], what: str
) -> list[str]:
    """Return the answers of ``ranks`` to request ``number``, and delete them.

    Raises RankMismatchError for one that cannot do ``what``, or does not answer.
    """
    if not ranks:
        return []
    calls = answers_to(store, number, len(ranks))
    waits.wait(f"fetch/{number}/all", partial(calls.missing, ranks, -1), what)
    answers = calls.entries()
    store.delete_key(f"fetch/{number}/all")
    calls.delete()
    for rank, answer in answers.items():
        if answer.startswith("!"):
            raise RankMismatchError(
                f"rank {rank} could not {what}: {answer[1:]}; its log says where"
            )
    return list(answers.values())


def answers_to(store: dist.Store, number: int, size: int) -> RollCall:
    return RollCall(store, f"fetch/{number}/answers", size)
