"""How ranks agree on a gather that no recorded order holds, through the key-value store of the
process group.

[Note: departures]
While an order is recorded, every rank asks before every gather (:meth:`Agreement.settle`), and all
of them issue what was agreed. Later a rank may need a unit that the order does not hold while the
others go on by theirs. It must not issue a collective that no rank joins: it fetches the others'
chunks through the store, from a thread that each rank keeps for that (:meth:`Agreement.fetch`).
That is slow and right. Hosts may be steps apart, so each answers with the step it is at; the orders
are recorded anew after the latest of them. A rank that is asked to stop lets the others know in the
same way, and all stop after that step; so does rank 0 whose save in the background has failed,
and all raise after that step.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from hf_zero.distributed.collective_log import CollectiveLog, PendingCollective
from hf_zero.distributed.watchdog import Watchdog
from hf_zero.errors import HfZeroError, RankMismatchError
from hf_zero.logs import logger

JOIN_SECONDS = 5.0
PART = 4 << 20  # bytes of one value in the store
POLL_SECONDS = 0.05
FIRST_PAUSE = 0.0002
SLICE_SECONDS = 1.0  # between looks at who is gone
# between looks where nothing has been asked for a while: many ranks look at one store
IDLE_SECONDS = 1.0
WARN_SECONDS = 60.0
ENDED = "destroyed its engine or ended"
STOP = -1  # in place of a unit: nothing is fetched
Wish = tuple[int, int]


class Consensus:
    """One rank's side of the agreements of one engine.

    ``store`` is a torch.distributed store that all its ranks share.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        world: int,
        timeout: float,
        watchdog: Watchdog | None = None,
        log: CollectiveLog | None = None,
    ):
        self._store = store
        self._watchdog = watchdog or Watchdog(enabled=False)
        self._lane = log or CollectiveLog("agreements", range(world), timeout, native=False)
        self._rank = rank
        self._world = world
        self._timeout = timeout
        self._sequence = 0
        self.all_launched = 0  # reductions that every rank had launched at the last agreement
        self._step = 0
        # fetches of other ranks, as long as this one has not learned when to record anew
        self._heard: set[int] = set()
        self._renewals: set[int] = set()  # steps at whose end orders are recorded anew
        self._stops: set[int] = set()  # steps at whose end all ranks stop
        self._asked = False  # this rank was asked to stop and has not published it
        self.stopped = False
        self._unsent_events: set[int] = set()  # events that this rank has not published
        self._due: dict[int, int] = {}  # events, and the step at whose end all ranks have them
        self.events: frozenset[int] = frozenset()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._shards = threading.RLock()
        self.epoch = 0  # changes of shards so far

    def agree(self, where: str, wish: Wish, name: Callable[[Wish], str], launched: int = 0) -> Wish:
        """Settle the next gather: every rank brings a wish ``(kind, unit)``, all get the largest
        one.

        ``launched`` is how many reductions this rank has launched; the least of all ranks is in
        :attr:`all_launched` then. Ranks in different passes (``where``) can never meet; that raises
        RankMismatchError on all of them. A rank that does not come is named in a warning every
        minute and in the error at the timeout.
        """
        step, self._sequence = self._sequence, self._sequence + 1
        what = f"join the {name(wish)} in {where}"
        pending = self._lane.issue("agreement on the next gather")._replace(
            what=f"all ranks to {what}", warns=True
        )
        store = self._store
        store.set(f"{step}/{self._rank}", f"{where}|{wish[0]}|{wish[1]}|{launched}")
        if store.add(f"{step}/n", 1) == self._world:
            entries = [store.get(f"{step}/{rank}").decode() for rank in range(self._world)]
            split = [entry.rsplit("|", 3) for entry in entries]
            if len({place for place, *_ in split}) > 1:
                wished = [
                    f"{place}: {name((int(kind), int(unit)))}" for place, kind, unit, _ in split
                ]
                outcome = "!" + "; ".join(
                    f"rank {rank}: {entry}" for rank, entry in enumerate(wished)
                )
            else:
                kind, unit = max((int(kind), int(unit)) for _, kind, unit, _ in split)
                outcome = f"{kind}|{unit}|{min(int(count) for *_, count in split)}"
            store.set(f"{step}/go", outcome)
            if step:  # everybody has been here, so everybody has read the verdict before
                for key in ("n", "go", *range(self._world)):
                    store.delete_key(f"{step - 1}/{key}")
        self._await(
            f"{step}/go", {rank: f"{step}/{rank}" for rank in range(self._world)}, what, pending
        )
        outcome = store.get(f"{step}/go").decode()
        if outcome.startswith("!"):
            raise RankMismatchError(
                f"ranks ask for different collectives ({outcome[1:]}). Every rank must run the "
                "same parts of the model in the same order; "
                "look for a forward, backward or state_dict that only some ranks call"
            )
        kind, unit, self.all_launched = map(int, outcome.split("|"))
        return kind, unit

    def _await(
        self,
        key: str,
        arrivals: Mapping[int, str],
        what: str,
        pending: PendingCollective | None = None,
    ) -> None:
        """Wait until ``key`` is there, which follows when the keys ``arrivals`` of the ranks
        are.
        """
        pending = pending or PendingCollective(f"ranks to {what}", warns=True)
        try:
            with self._watchdog.watching(pending):
                self._await_in_slices(key, arrivals, what)
        except RuntimeError as error:
            if isinstance(error, HfZeroError):
                raise
            raise self._watchdog.explain_failure(pending, error) from error  # the store is gone

    def _await_in_slices(self, key: str, arrivals: Mapping[int, str], what: str) -> None:
        # Not store.wait(): torch writes two lines to the terminal whenever it gives up.
        started = looked = time.monotonic()
        warned, pause = WARN_SECONDS, FIRST_PAUSE
        while True:
            self._watchdog.check()
            if self._store.check([key]):
                return
            now = time.monotonic()
            if now - looked >= min(SLICE_SECONDS, self._timeout):
                looked = now
                warned = self._look_who_is_missing(key, arrivals, what, now - started, warned)
            time.sleep(pause)
            pause = min(1.2 * pause, POLL_SECONDS)

    def _look_who_is_missing(
        self, key: str, arrivals: Mapping[int, str], what: str, waited: float, warned: float
    ) -> float:
        """Raise if ``key`` will never be there, warn each minute; returns the seconds of the
        next warning.
        """
        missing = [rank for rank, arrival in arrivals.items() if not self._store.check([arrival])]
        gone = {
            rank: self._closed_because(rank)
            for rank in missing
            if self._store.check([f"closed/{rank}"])
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
        if waited >= self._timeout:
            raise RankMismatchError(
                f"{text}; they never came. Do all ranks call the model, "
                "state_dict and save together?"
            )
        if waited < warned:
            return warned
        logger.warning(text)
        return warned + WARN_SECONDS

    def _closed_because(self, rank: int) -> str:
        return str(self._store.get(f"closed/{rank}").decode())

    def fetch(self, unit: int, label: str, peers: Sequence[int], size: int) -> dict[int, bytes]:
        """The bytes that ``peers`` (global ranks) serve for ``unit``, ``size`` of each; they
        need not be waiting for it.
        """
        logger.warning(
            "%s is needed here outside the recorded order of gathers: fetched through the "
            "store, which is slow. "
            "It is recorded anew after the next step", label,
        )  # fmt: skip
        number, step = self._tell(unit, self.epoch, peers, f"serve {label}")
        self._renewals.add(step)
        got: dict[int, bytes] = {}
        for peer in peers:
            parts = []
            for part in range(-(-size // PART)):
                key = f"fetch/{number}/{part}/{peer}"
                parts.append(self._store.get(key))
                self._store.delete_key(key)
            got[peer] = b"".join(parts)
        return got

    def _tell(self, unit: int, epoch: int, peers: Sequence[int], what: str) -> tuple[int, int]:
        """Let every rank know of a request; returns its number and the step at whose end all act
        on it.
        """
        number = self._store.add("fetch/n", 1)
        self._store.set(f"fetch/{number}", "|".join(map(str, (self._rank, unit, epoch, *peers))))
        steps = [self._step]
        try:
            for rank in range(self._world):
                if rank == self._rank:
                    continue
                # also of those that serve nothing: all must know of it
                key = f"fetch/{number}/ack/{rank}"
                self._await(key, {rank: key}, what)
                answer = self._store.get(key).decode()
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
        # No rank is past the latest of these steps, and none passes the one it is at before it has
        # read this.
        self._store.set(f"fetch/{number}/renew", str(max(steps)))
        return number, max(steps)

    def request_stop(self) -> None:
        """Tell the other ranks, at the end of this rank's step, that all are to stop; signal
        handlers may call it.
        """
        self._asked = True

    def broadcast_event(self, event: int) -> None:
        """Have all ranks find ``event``, a number below :data:`STOP`, in :attr:`events` after
        the same step, one of the next.
        """
        if event not in self._due:
            self._unsent_events.add(event)

    def serve_out_of_order_gathers(
        self, read: Callable[[int, int], bytes], begin: Callable[[], None] = lambda: None
    ) -> None:
        """Answer other ranks' fetches from now on, from a thread of its own.

        ``read(unit, epoch)`` gives this rank's chunk as it is after ``epoch`` writes; ``begin`` is
        the first that the thread calls.
        """
        if self._thread is None:
            store = self._store.clone() if hasattr(self._store, "clone") else self._store
            self._thread = threading.Thread(
                target=_serve,
                args=(weakref.ref(self), store, self._rank, weakref.WeakMethod(read), begin),
                name="hf_zero-serve",
                daemon=True,
            )
            _threads.add(self._thread)
            self._thread.start()

    def close(self, why: str = ENDED) -> None:
        """Serve no more, and let those know that ask."""
        if not self._closed:
            self._closed = True
            _say_closed(self._store, self._rank, why)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Around every change of shards, which all ranks make in the same order: no rank is
        served in the middle of it.
        """
        with self._shards:
            yield
            self.epoch += 1

    def end_step(self) -> bool:
        """At the end of a step: whether the orders are to be recorded anew after it. Alike on all
        ranks, as are :attr:`stopped` and :attr:`events`.

        A rank that has heard of a request learns here from which step on, before that step is over
        for it.
        """
        if self._asked and not self._stops and not self.stopped:
            # Not at once: a rank that waits here for the answer may be one that the step of this
            # rank still needs.
            self._stops.add(self._tell(STOP, 0, (), "hear that the job is to stop")[1])
        while self._unsent_events:
            event = self._unsent_events.pop()
            self._due[event] = self._tell(event, 0, (), "hear what has become of a save")[1]
        while True:
            with self._lock:
                heard, self._heard = self._heard, set()
                if not heard:
                    step, self._step = self._step, self._step + 1
                    break
            for number in heard:
                key = f"fetch/{number}/renew"
                asking, unit = map(int, self._store.get(f"fetch/{number}").decode().split("|")[:2])
                wanted = (
                    "say from when on orders are recorded anew"
                    if unit >= 0
                    else "say after which step all stop or hear of a save"
                )
                self._await(key, {asking: key}, wanted)
                answer = self._store.get(key).decode()
                if answer.startswith("!"):
                    raise RankMismatchError(answer[1:])
                if unit < STOP:
                    self._due[unit] = int(answer)
                else:
                    (self._stops if unit == STOP else self._renewals).add(int(answer))
        self.stopped = self.stopped or step in self._stops
        self.events = frozenset(event for event, at in self._due.items() if at == step)
        self._due = {event: at for event, at in self._due.items() if at > step}
        renewed = step in self._renewals
        self._renewals = {each for each in self._renewals if each > step}
        return renewed

    def _hear(self, number: int) -> int:
        """Note that fetch ``number`` was made; returns the step this rank is at."""
        with self._lock:
            self._heard.add(number)
            return self._step


_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
_ending = threading.Event()


@atexit.register
def _end_threads() -> None:
    """A thread that comes back from the store's C++ while the interpreter shuts down aborts the
    process: end them before.
    """
    _ending.set()
    for thread in list(_threads):
        thread.join(JOIN_SECONDS)


def _say_closed(store: Any, rank: int, why: str = ENDED) -> None:
    try:
        store.set(f"closed/{rank}", why)
    except RuntimeError:
        pass  # the store is gone: no rank can ask


def _serve(
    owner: weakref.ref[Consensus],
    store: Any,
    rank: int,
    read: weakref.WeakMethod[Any],
    begin: Callable[[], None],
) -> None:
    try:
        begin()
        _serve_until_closed(owner, store, rank, read)
    finally:
        consensus = owner()
        if consensus is None or not consensus._closed:  # else it has said why
            _say_closed(store, rank)


def _serve_until_closed(
    owner: weakref.ref[Consensus], store: Any, rank: int, read: weakref.WeakMethod[Any]
) -> None:
    number, pause = 1, POLL_SECONDS
    # requests from ranks that are ahead: this rank is still writing what they ask for
    waiting: list[tuple[int, list[int]]] = []
    while not _ending.is_set():
        consensus, reader = owner(), read()
        if consensus is None or reader is None or consensus._closed:
            return
        try:
            found = store.check([f"fetch/{number}"])
            if found:
                waiting.append(
                    (number, list(map(int, store.get(f"fetch/{number}").decode().split("|"))))
                )
                number += 1
            ready = [entry for entry in waiting if entry[1][2] <= consensus.epoch]
            waiting = [entry for entry in waiting if entry not in ready]
            for each, (requester, unit, epoch, *peers) in ready:
                if requester != rank:
                    _answer(consensus, store, each, unit, epoch, peers, reader)
        except RuntimeError:
            return  # the store is gone: the job is over
        pause = POLL_SECONDS if found or waiting else min(1.5 * pause, IDLE_SECONDS)
        del consensus, reader
        if not found:
            _ending.wait(pause)


def _answer(
    consensus: Consensus,
    store: Any,
    number: int,
    unit: int,
    epoch: int,
    peers: Sequence[int],
    read: Callable[[int, int], bytes],
) -> None:
    rank = consensus._rank
    at = consensus._hear(number)
    try:
        with consensus._shards:
            data = read(unit, epoch) if rank in peers else b""
    except Exception as error:
        logger.exception("rank %d cannot serve unit %d", rank, unit)
        store.set(f"fetch/{number}/ack/{rank}", f"!{type(error).__name__}: {error}")
        return
    for part in range(-(-len(data) // PART)):
        store.set(f"fetch/{number}/{part}/{rank}", data[part * PART : (part + 1) * PART])
    store.set(f"fetch/{number}/ack/{rank}", str(at))
