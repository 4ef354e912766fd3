"""What all ranks learn at the end of the same step: that the orders of gathers are recorded anew,
that the job is to stop, and events such as a save that has failed.

[Note: requests]
A rank lets the others know by a numbered request in the store. The thread of each rank that serves
shards (shard_fetches.py) answers it with the number of the step which that rank is at: hosts may be
steps apart. All ranks act at the end of the latest of these steps. No rank is past it, and none
ends the step it is at before it has read which one that is.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from hf_zero.distributed.store_wait import StoreWait
from hf_zero.errors import RankMismatchError

# What a request is about: a unit that is fetched (its index), whose end of step has the orders
# recorded anew; that all stop; or, below that, an event of the caller's.
RENEW, STOP = 0, -1


class StepEvents:
    """One rank's side of it. :attr:`stopped` and :attr:`events` change in :meth:`end_step`, alike
    on all ranks.
    """

    def __init__(self, store: Any, rank: int, ranks: Sequence[int], waits: StoreWait):
        self._store = store
        self._rank = rank
        self._ranks = tuple(ranks)
        self._waits = waits
        self._step = 0
        self._heard: set[int] = set()  # requests of other ranks, since the last step
        self._lock = threading.Lock()  # of the two above: the serving thread uses them, too
        self._unsent: set[int] = set()  # what this rank has yet to let the others know
        self._due: set[tuple[int, int]] = set()  # (step at whose end, what) all ranks learn
        self.stopped = False  # all ranks stop
        self.events: frozenset[int] = frozenset()  # of the step that has just ended

    def request_stop(self) -> None:
        """Have all ranks stop after the same step, one of the next; signal handlers may call it."""
        self._unsent.add(STOP)

    def broadcast_event(self, event: int) -> None:
        """Have all ranks find ``event``, a number below :data:`STOP`, in :attr:`events` after
        the same step, one of the next.
        """
        if not self._is_due(event):
            self._unsent.add(event)

    def _is_due(self, event: int) -> bool:
        return any(each == event for _, each in self._due)

    def request(self, about: int, epoch: int, peers: Sequence[int], what: str) -> int:
        """Let every rank know of a request, and return its number once all of them do: they have
        served ``peers``' shards of the unit ``about`` after ``epoch`` writes, if it is one.

        ``what`` is what the others are to do, for messages. Raises RankMismatchError where a rank
        cannot, or does not answer; those that have answered raise it at the end of their step.
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
                # also of those that serve nothing: all must know of it
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
        """Note request ``number`` of another rank; returns the step that this rank is at."""
        with self._lock:
            self._heard.add(number)
            return self._step

    def end_step(self) -> bool:
        """End a step: whether the orders of gathers are to be recorded anew after it, alike on all
        ranks. Raises RankMismatchError where a request of another rank has failed.
        """
        # Not when they are asked for: a rank that waits here for the answers may be one that the
        # step of another rank still needs.
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
        """Wait for the step at whose end all ranks act on request ``number``."""
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
