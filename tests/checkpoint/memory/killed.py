"""Ranks as threads that end at a named point without a word, as a process does that is killed."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict, deque
from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist

from hf_zero.checkpoint.memory import saving
from hf_zero.distributed import host_transfers

THREAD = "hf-zero memory"
SENDING = 3  # the message of a copy after which a rank ends at the point "sending"


class Killed(BaseException):
    """The end of a rank."""


class Kills:
    """While entered, each rank of ``who`` ends when it reaches ``point`` for the ``number``-th
    time. On leaving, the threads of all ranks have ended, as those of processes whose launcher
    ends the others.

    step: the step of the first that ended; None: none has.
    """

    def __init__(self, point: str = "", number: int = 0, who: Collection[int] = ()) -> None:
        self._point, self._number, self._who = point, number, who
        self._seen: Counter[tuple[int, str]] = Counter()
        self._committed: dict[int, set[int]] = {}
        self._dead: set[int] = set()
        self._engines: dict[int, Any] = {}
        self._mains: dict[int, threading.Thread] = {}
        self._here = threading.local()
        self.mail = _Mail()
        self.step: int | None = None

    def watch(self, engine: Any) -> None:
        """Note the engine of the rank whose thread this is."""
        self._here.rank = rank = dist.get_rank()
        self._engines[rank], self._mains[rank] = engine, threading.current_thread()
        memory = engine.memory
        connected = memory.transfers._group
        memory.transfers._group = _Group(connected, self, rank, dist.get_world_size())
        run = memory._run

        def run_as_rank(*args: Any) -> None:
            self._here.rank = rank
            run(*args)

        memory._run = run_as_rank

    def committed(self) -> list[int]:
        """Return the steps that all ranks have committed."""
        world = len(self._engines)
        return [step for step, ranks in self._committed.items() if len(ranks) == world]

    def __enter__(self) -> Kills:
        self._before = saving.reached, host_transfers.PIECE
        saving.reached, host_transfers.PIECE = self.reached, 1 << 14
        return self

    def __exit__(self, *_: object) -> None:
        memories = [engine.memory for engine in self._engines.values()]
        self.mail.close()
        for thread in threading.enumerate():
            if thread.name == THREAD or thread in self._mains.values():
                thread.join(60)
                assert not thread.is_alive(), thread.name
        for memory in memories:
            for mark in memory._marks.values():
                mark.close()
        for engine in self._engines.values():
            engine.mesh.consensus.close()  # else this process serves its ranks when it ends
        saving.reached, host_transfers.PIECE = self._before

    def reached(self, point: str) -> None:
        rank = self._here.rank
        self._seen[rank, point] += 1
        if point == "committed":
            self._committed.setdefault(self._engines[rank].memory._last_step, set()).add(rank)
        met = point == self._point and self._seen[rank, point] == self._number
        if rank in self._dead or (met and rank in self._who):
            self._end(rank)

    def _end(self, rank: int) -> None:
        """End this thread of ``rank``, and all connections; the other one ends at its next point,
        where no rank writes into memory of this one.
        """
        engine = self._engines[rank]
        beside = threading.current_thread() is not self._mains[rank]
        if self.step is None:
            self.step = engine.memory._last_step if beside else engine.global_steps
        self._dead.add(rank)
        self.mail.close()
        raise SystemExit if beside else Killed


class _Mail:
    """Messages between the ranks of one attempt."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.closed = False
        self._queues: defaultdict[object, deque[torch.Tensor]] = defaultdict(deque)

    def put(self, key: object, tensor: torch.Tensor) -> None:
        with self.changed:
            self._queues[key].append(tensor.clone())
            self.changed.notify_all()

    def take(self, key: object) -> torch.Tensor:
        with self.changed:
            self.changed.wait_for(lambda: self.closed or self._queues[key], 120)
            if not self._queues[key]:
                raise RuntimeError("Connection closed by peer")
            return self._queues[key].popleft()

    def close(self) -> None:
        with self.changed:
            self.closed = True
            self.changed.notify_all()


class _Received:
    def __init__(self, mail: _Mail, key: object, tensor: torch.Tensor) -> None:
        self._mail, self._key, self._tensor = mail, key, tensor

    def wait(self) -> None:
        self._tensor.copy_(self._mail.take(self._key))


class _Done:
    def wait(self) -> None:
        pass


class _Group:
    """The calls of a gloo group that :class:`HostTransfers` makes, between threads: gloo's own
    cannot be closed while a thread waits for it, as the end of a process does.

    connected: gloo's, kept because ranks may still be connecting to this one.
    """

    def __init__(self, connected: Any, kills: Kills, rank: int, world: int) -> None:
        self.connected = connected
        self._kills, self._mail, self._rank, self._world = kills, kills.mail, rank, world
        self._sent = 0

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> _Done:
        self._sent += 1
        if self._sent % SENDING == 0:
            self._kills.reached("sending")
        self._mail.put((self._rank, peer), tensors[0])
        return _Done()

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> _Received:
        return _Received(self._mail, (peer, self._rank), tensors[0])

    def allreduce(self, tensors: list[torch.Tensor]) -> _Done:
        for peer in range(self._world):
            self._mail.put(("reduced", self._rank, peer), tensors[0])
        told = [self._mail.take(("reduced", peer, self._rank)) for peer in range(self._world)]
        tensors[0].copy_(torch.stack(told).sum(0))
        return _Done()
