"""Events that all ranks learn of at the end of the same step: orders of gathers recorded anew, a
stop of the job, a save that has failed.

[Note: requests]
A rank informs the others by a numbered request in the store. The thread of each rank that serves
shards (shard_fetches.py) answers it with the number of that rank's current step: hosts may be steps
apart. All ranks act at the end of the latest of these steps. No rank is past it, and none ends its
current step before it has read which one that is.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from hf_zero.distributed.store_wait import StoreWait
from hf_zero.errors import RankMismatchError

# Subject of a request: the index of a fetched unit, after whose step the orders are recorded anew;
# STOP; or, below STOP, an event of the caller.
RENEW, STOP = 0, -1


class StepEvents:
    """One rank's side of the events. :attr:`stopped` and :attr:`events` change in :meth:`end_step`,
    equally on all ranks.
    """

    def __init__(self, store: Any, rank: int, ranks: Sequence[int], waits: StoreWait):
        self._store = store
        self._rank = rank
        self._ranks = tuple(ranks)
        self._waits = waits
        self._step = 0
        self._heard: set[int] = set()  # requests of other ranks, since the last step
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
        return any(each == event for _, each in self._due)

    def request(self, about: int, epoch: int, peers: Sequence[int], what: str) -> int:
        """Announce a request to every rank, and return its number once all have answered: if
        ``about`` is a unit, ``peers`` have served their shards of it after ``epoch`` writes.

        ``what`` describes the others' task in messages. Raises RankMismatchError if a rank cannot
        do it, or does not answer; the ranks that have answered raise it at the end of their step.
        """
        number = self._store.add("fetch/n", 1)
        self._store.set(
            f"fetch/{number}", "|".join(map(str, (self._rank, about, epoch, 0, *peers)))
        )
        steps = [self._step]
        try:
            for rank in self._ranks:
                if rank == self._rank:
                    continue
                # wait for ranks that serve nothing, too: all must know of the request
                key = f"fetch/{number}/ack/{rank}"
                answer = self._waits.wait(key, {rank: key}, what)
                self._store.delete_key(key)
                if answer.startswith("!"):
                    raise RankMismatchError(
                        f"rank {rank} could not {what}: {answer[1:]}; its log says where"
                    )
                steps.append(int(answer))
        except RankMismatchError as error:
            self._store.set(
                f"fetch/{number}/renew",
                f"!rank {self._rank} could not make the others {what}: {error}",
            )
            raise
        self._store.set(f"fetch/{number}/renew", str(max(steps)))
        self._due.add((max(steps), min(about, RENEW)))
        return number

    def hear(self, number: int) -> int:
        """Note request ``number`` of another rank; return this rank's current step."""
        with self._lock:
            self._heard.add(number)
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
            for number in heard:
                self._learn_when(number)
        events = {event for at, event in self._due if at == step}
        self._due = {(at, event) for at, event in self._due if at > step}
        self.stopped = self.stopped or STOP in events
        self.events = frozenset(events - {RENEW, STOP})
        return RENEW in events

    def _learn_when(self, number: int) -> None:
        """Wait for the step after which all ranks act on request ``number``."""
        key = f"fetch/{number}/renew"
        asking, about = map(int, self._store.get(f"fetch/{number}").decode().split("|")[:2])
        wanted = (
            "say from when on orders are recorded anew"
            if about >= 0
            else "say after which step all stop or hear of a save"
        )
        answer = self._waits.wait(key, {asking: key}, wanted)
        if answer.startswith("!"):
            raise RankMismatchError(answer[1:])
        self._due.add((int(answer), min(about, RENEW)))
