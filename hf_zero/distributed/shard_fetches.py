"""Fetches of shards by one rank through the store, outside the recorded order of gathers, and the
thread of each rank that serves them (consensus.py, the note).
"""

from __future__ import annotations

import atexit
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NoReturn

import torch.distributed as dist

from hf_zero.distributed import hang_detection
from hf_zero.distributed.hang_detection import JOIN_SECONDS
from hf_zero.distributed.rank_requests import (
    RankRequest,
    StepEvents,
    announce,
    answers_to,
    await_answers,
    count_request,
    delete_once_read,
)
from hf_zero.distributed.store import (
    ENDED,
    Bell,
    RollCall,
    StoreWait,
    leaving,
    new_client,
    next_pause,
    publish_closed,
    ring,
)
from hf_zero.errors import PartitionError
from hf_zero.logging import logger

BELL_SECONDS = JOIN_SECONDS / 2  # JOIN_SECONDS of a thread that another one waits for as it ends
LEAVE_SECONDS = 5.0  # the most that the host of the store waits for the others to leave it
PART = 4 << 20  # bytes of one value in the store
POLL_SECONDS = 0.05  # between checks whether this rank has written what another waits for
IDLE_SECONDS = 1.0  # between checks whether the engine still exists, which ask no store


class Serving:
    """The thread that serves this rank's shards, if it was started, and its bell."""

    def __init__(self) -> None:
        self.thread: threading.Thread | None = None
        self.ending = threading.Event()
        self.rung = threading.Event()  # the bell's, once there is one

    def end(self) -> None:
        """End the thread and wait for it, :data:`JOIN_SECONDS` at most."""
        self.ending.set()
        self.rung.set()
        if self.thread is not None and self.thread is not threading.current_thread():
            self.thread.join(JOIN_SECONDS)


def refuse_destroyed(rank: int, what: str) -> NoReturn:
    """Raise PartitionError: ``rank`` asks for ``what`` of an engine that it has destroyed."""
    raise PartitionError(
        f"rank {rank} asks for {what} of an engine that it has destroyed; read the parameters "
        "before destroy(), or call destroy(gather=True)"
    )


class ShardFetches:
    """One rank's side of the fetches: :meth:`fetch` reads the others' shards, :meth:`serve` serves
    its own.

    ``events`` carries the requests of passes, and has the orders recorded anew.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        ranks: Sequence[int],
        events: StepEvents,
        waits: StoreWait,
        askers: Callable[[], Sequence[int]],
    ):
        """``askers()``: the other ranks with a lone fetch under way."""
        self._store = store
        self._rank = rank
        self._others = [r for r in ranks if r != rank]
        self._events = events
        self._waits = waits
        self._alone = False  # whether this rank has made a lone fetch
        self._leaving = False  # whether this rank has announced that it ends its engine
        self._askers = askers
        # Held while shards are written or read: no request is served during a write, which adds 1
        # to the epoch, in one order on all ranks.
        self.writes = threading.RLock()
        self.epoch = 0
        self._fetched = 0  # units
        self.serving = Serving()
        self.closed = False

    def fetch(self, unit: int, label: str, peers: Sequence[int], size: int) -> dict[int, bytes]:
        """Return the bytes that ``peers`` (global ranks) serve for ``unit``, ``size`` of each; they
        need not be waiting for it.
        """
        self._check_open(label)
        self._warn(label)
        number = self._events.request(unit, self.epoch, peers, f"serve {label}")
        return self._read(number, peers, size)

    def fetch_alone(
        self, unit: int, label: str, peers: Sequence[int], size: int
    ) -> dict[int, bytes]:
        """Fetch like :meth:`fetch`, outside passes: no order changes, and only ``peers`` take part.
        Raises RankMismatchError if one of them cannot serve; the others do not learn of it.
        """
        if not self._alone:
            self._alone = True
            logger.warning(
                "rank %d asks for %s while the other ranks do something else: its values are "
                "fetched through the store, which is slow; call state_dict() on all ranks "
                "together to gather them",
                self._rank,
                label,
            )
        self._check_open(label)
        number = count_request(self._store, self._events.asked)
        announce(self._store, number, RankRequest(self._rank, unit, self.epoch, True, tuple(peers)))
        ring(self._store, peers)
        await_answers(self._store, self._waits, number, peers, f"serve {label}")
        return self._read(number, peers, size)

    def _check_open(self, label: str) -> None:
        if self.closed:
            refuse_destroyed(self._rank, label)

    def _read(self, number: int, peers: Sequence[int], size: int) -> dict[int, bytes]:
        contents: dict[int, bytes] = {}
        for peer in peers:
            parts = []
            for part in range(-(-size // PART)):
                key = f"fetch/{number}/{part}/{peer}"
                parts.append(self._store.get(key))
                self._store.delete_key(key)
            contents[peer] = b"".join(parts)
        return contents

    def _warn(self, label: str) -> None:
        """Warn of the first fetch, then of the 10th, the 100th and so on: a model that uses other
        blocks in each step fetches in every one.
        """
        self._fetched += 1
        if self._fetched == 1:
            logger.warning(
                "%s is needed here outside the recorded order of gathers: fetched through the "
                "store, which is slow. The order is recorded again after the next step; the 10th, "
                "the 100th and so on of further fetches are reported",
                label,
            )
        elif str(self._fetched).strip("0") == "1":
            logger.warning(
                "%d units so far were needed outside the recorded order of gathers, the last one "
                "is %s: each was fetched through the store, which is slow. If the steps use other "
                "modules each time, name the one that calls them in zero_optimization.leaf_module, "
                "which gathers them together, or train at stage 2",
                self._fetched,
                label,
            )

    def serve(
        self, read: Callable[[int, int], bytes], begin: Callable[[], None] = lambda: None
    ) -> None:
        """Answer other ranks' requests from now on, on a thread of its own. Idempotent.

        ``read(unit, epoch)``, a method whose object is held weakly, returns this rank's shard after
        ``epoch`` writes; the thread calls ``begin`` first.
        """
        if self.serving.thread is None:
            self.serving.thread = threading.Thread(
                target=_serve,
                # ``serving``, so that the thread is awaited at exit though the engine is gone
                args=(
                    self.serving,
                    weakref.ref(self),
                    self._store,
                    self._rank,
                    weakref.WeakMethod(read),
                    begin,
                ),
                name="hf_zero-serve",
                daemon=True,
            )
            _serving.add(self.serving)
            _owners.add(self)
            self.serving.thread.start()

    def answer(
        self,
        store: dist.Store,
        number: int,
        request: RankRequest,
        read: Callable[[int, int], bytes],
    ) -> None:
        """Serve ``request``, of this ``number``, through ``store``, a client of the serving
        thread's own: publish this rank's shard, if it is among the peers, and the current step of
        this rank, or the error.
        """
        rank, unit, alone, peers = self._rank, request.about, request.alone, request.peers
        if alone and rank not in peers:
            return
        step = 0 if alone else self._events.note_request(number, request.asking, unit)
        try:
            with self.writes:
                data = read(unit, request.epoch) if rank in peers else b""
        except Exception as error:
            logger.exception("rank %d cannot serve unit %d", rank, unit)
            answers_to(store, number, 0).enter(rank, f"!{type(error).__name__}: {error}")
            store.set(f"fetch/{number}/all", "")  # whatever the others answer
            return
        for part in range(-(-len(data) // PART)):
            content = data[part * PART : (part + 1) * PART]
            store.set(f"fetch/{number}/{part}/{rank}", content)  # type: ignore[arg-type]
        size = len(peers) if alone else len(self._others)
        if answers_to(store, number, size).enter(rank, str(step)):
            store.set(f"fetch/{number}/all", "")

    @property
    def readers(self) -> int:
        """Number of ranks that read a request: all but the one that asks."""
        return len(self._others)

    @property
    def own_requests(self) -> set[int]:
        """Numbers of this rank's requests that its serving thread has not skipped yet."""
        return self._events.asked

    def serve_until_nobody_asks(self) -> None:
        """Return when no other live rank's lone fetch is under way, before this engine ends."""
        if self.closed or self.serving.thread is None:
            return
        self._linger(lambda: self._waits.is_over(self._askers()))

    def serve_until_others_end(self) -> None:
        """Return when each other rank has ended its engine or its script, or waits for something
        that no ending rank will join.
        """
        if not self.closed and self.serving.thread is not None:
            others, leaves = self._others, leaving(self._store, 0)
            self._linger(
                lambda: (
                    leaves.entered() > len(others)
                    or len(self._waits.elsewhere(others)) == len(others)
                )
            )

    def announce_leaving(self) -> None:
        """Note that this rank ends its engine and serves until the others have. Idempotent."""
        if self._leaving or self.closed or self.serving.thread is None:
            return
        self._leaving = True
        with suppress(RuntimeError):  # the store is gone: no rank can ask
            leaving(self._store, 0).enter(self._rank)

    def _linger(self, over: Callable[[], bool]) -> None:
        begun, ranks = time.monotonic(), len(self._others) + 1
        self.announce_leaving()
        try:
            while not over() and (waited := time.monotonic() - begun) < self._waits.timeout:
                time.sleep(next_pause(waited, ranks))
        except RuntimeError:
            pass  # the store is gone: no rank can ask

    def announce_exit(self) -> None:
        """Announce that this rank sends the store no more requests. The rank that hosts the store
        waits for the announcements of the others, whose clients would report its end,
        :data:`LEAVE_SECONDS` at most.
        """
        if self.closed or self.serving.thread is None:
            return
        call, begun = RollCall(self._store, "said", 0), time.monotonic()
        try:
            call.enter(self._rank)
            while self._waits.hosts_store() and (
                self._others_missing(call) and time.monotonic() - begun < LEAVE_SECONDS
            ):
                time.sleep(POLL_SECONDS)
        except RuntimeError:
            pass  # the store is gone

    def _others_missing(self, call: RollCall) -> bool:
        return call.entered() <= len(self._others) and not self._waits.closed().issuperset(
            set(self._others) - call.entries().keys()
        )

    def close(self, why: str = ENDED) -> None:
        """Stop serving; ranks that ask read ``why``."""
        if not self.closed:
            self.closed = True
            self.serving.rung.set()
            publish_closed(self._store, self._rank, why)


_serving: weakref.WeakSet[Serving] = weakref.WeakSet()


_owners: weakref.WeakSet[ShardFetches] = weakref.WeakSet()


@atexit.register
def _end_threads() -> None:
    """Serve until no rank can ask any more, unless this one has failed; then end the threads: one
    that returns from the store's C++ while the interpreter shuts down aborts the process.

    Ranks that are threads of one process end here one after the other, so all announce it before
    the first one waits for the others.
    """
    hang_detection.leave()
    failed = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    owners = [] if failed else list(_owners)
    for fetches in owners:
        fetches.announce_leaving()
    for fetches in owners:
        fetches.serve_until_others_end()
    ending = list(_serving)
    for thread in ending:
        thread.ending.set()
    for thread in ending:
        thread.end()
    for fetches in owners:
        fetches.announce_exit()


def _serve(
    serving: Serving,
    owner: weakref.ref[ShardFetches],
    store: dist.Store,
    rank: int,
    read: weakref.WeakMethod[Callable[[int, int], bytes]],
    begin: Callable[[], None],
) -> None:
    try:
        store = new_client(store)
    except RuntimeError:
        return  # the store is gone: the job is over
    bell = Bell(store, rank)
    try:
        begin()
        serving.rung = bell.rung
        bell.rung.set()  # requests may have come before
        _serve_until_closed(owner, store, read, serving.ending, bell.rung)
    finally:
        bell.end(store, BELL_SECONDS)
        fetches = owner()
        if fetches is None or not fetches.closed:  # otherwise `close` has published why
            publish_closed(store, rank)


def _serve_until_closed(
    owner: weakref.ref[ShardFetches],
    store: dist.Store,
    read: weakref.WeakMethod[Callable[[int, int], bytes]],
    ending: threading.Event,
    rung: threading.Event,
) -> None:
    last, since = 0, 0.0  # number of the last request, and when it was heard of
    # Requests that are counted, and whose keys are still on their way to the store; for ever if
    # the asking rank was interrupted or killed between the two.
    unread: list[int] = []
    # requests from ranks ahead of this one, which is still writing the shards they need
    waiting: list[tuple[int, RankRequest]] = []
    while not ending.is_set():
        fetches, reader = owner(), read()
        if fetches is None or reader is None or fetches.closed:
            return
        requests = fetches.own_requests
        try:
            if rung.is_set():
                rung.clear()
                counted = store.add("fetch/n", 0) if store.check(["fetch/n"]) else 0
                unread += range(last + 1, counted + 1)
                last, since = counted, time.monotonic()
            for number in list(unread):
                key = f"fetch/{number}"
                if number not in requests and not store.check([key]):
                    continue
                unread.remove(number)
                # Only now: this rank notes a request before it sets its key, so that a key that is
                # there and was not noted is another rank's.
                if number in requests:
                    requests.remove(number)
                    continue
                waiting.append((number, RankRequest.read(store.get(key).decode())))
                delete_once_read(store, key, fetches.readers)
            ready = [entry for entry in waiting if entry[1].epoch <= fetches.epoch]
            waiting = [entry for entry in waiting if entry not in ready]
            for number, request in ready:
                fetches.answer(store, number, request, reader)
        except RuntimeError:
            return  # the store is gone: the job is over
        del fetches, reader
        pause = max(POLL_SECONDS, next_pause(time.monotonic() - since)) if unread else IDLE_SECONDS
        rung.wait(POLL_SECONDS if waiting else min(pause, IDLE_SECONDS))
