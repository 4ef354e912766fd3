"""Requests that ranks send to the job's store while they start, wait, save and die.

    python scripts/bench/control_plane.py [TREE] [--ranks 64 256 1024] [--hosts-of 8] [--out FILE]

Ranks are threads of a few processes, with the package's own classes: RankStatus, Watchdog,
TimeoutStore, RecoveryBoard, Consensus, StoreMessages and the exchange of a save. Each has a client
of its own of one TCPStore in a process of its own, and every request of a client is counted. There
is no model and no process group: a collective that nobody completes is an event, which the
watchdog's abort sets. TREE is the checkout to measure, by default this one. Rows:

- start: from the first request of a rank until all have an engine's channels
- idle: nothing happens
- first pass: agreements on the gathers of a recorded pass, in a row
- save: outcomes, with hashes of 200 blocks a rank, to rank 0 and the verdict to all
- all wait: every rank is in the same collective; late: one has not issued it
- late for an agreement: one has not come
- dead: the process of one rank is killed; seconds until the first and the last rank raise

``rate`` is requests a second and rank, of all ranks and of the busiest.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import multiprocessing
import os
import resource
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

HERE = Path(__file__).resolve()
TIMEOUT = 1800.0
AGREEMENTS = 20
BLOCKS = 200
RANKS_OF_A_PROCESS = 128
PATIENCE = 120.0  # seconds of a request: the ranks of a process share an interpreter
SETTLE = 3.0  # seconds of a wait before its rate is counted


class Counted:
    """A client of the store that counts its requests."""

    def __init__(self, store: Any, tally: itertools.count[int]) -> None:
        self._store, self._tally = store, tally

    def clone(self) -> Counted:
        return Counted(self._store.clone(), self._tally)

    def has_extended_api(self) -> bool:
        return bool(self._store.has_extended_api())

    def __getattr__(self, name: str) -> Callable[..., Any]:
        call = getattr(self._store, name)

        def counted(*args: Any) -> Any:
            next(self._tally)
            return call(*args)

        return counted


class Rank:
    """One rank: what `WorldGroup`, `Mesh` and `AsyncSaver` make of the store."""

    def __init__(self, port: int, rank: int, world: int, host: str, process: int) -> None:
        import torch.distributed as dist

        self.rank, self.world = rank, world
        self.tally = itertools.count()
        self._seen = 0
        self._process, self._host = process, host
        client = dist.TCPStore("127.0.0.1", port, world, False, wait_for_workers=False)
        self.part = lambda prefix: Counted(dist.PrefixStore(prefix, client), self.tally)

    def start(self) -> None:
        from hf_zero.distributed import rank_hosts
        from hf_zero.distributed.collective_log import CollectiveLog
        from hf_zero.distributed.consensus import Consensus
        from hf_zero.distributed.rank_status import RankStatus
        from hf_zero.distributed.recovery import RecoveryBoard
        from hf_zero.distributed.store import StoreMessages, TimeoutStore
        from hf_zero.distributed.watchdog import Watchdog

        rank, ranks = self.rank, range(self.world)
        number = self.part("hf_zero/ranks").add(f"made/{rank}", 1)
        own = TimeoutStore(self.part(f"hf_zero/ranks/{number}"), PATIENCE)
        _made.identity = self._host, self._process
        self.status = RankStatus(own, rank, self.world, None)
        board = RecoveryBoard(own, rank)
        self.watchdog = Watchdog(rank_status=self.status, poll=board.answer_statements)
        self.broken = threading.Event()
        self.log = self.status.register(
            CollectiveLog("gathers", ranks, TIMEOUT, self._break, native=False)
        )
        agreements = self.status.register(CollectiveLog("agreements", ranks, TIMEOUT, native=False))
        engine = self.part("hf_zero/engine 1")
        self.consensus = Consensus(engine, rank, ranks, TIMEOUT, self.watchdog, agreements)
        self.agree("initialize")
        rank_hosts.learn(self.part("job"), rank, self.world)
        self.consensus.fetches.serve(self.shard)
        messages = self.part("hf_zero/engine 1/saves")
        # the second name is that of trees before the digest
        gone: Any = getattr(self.status, "exit_reasons", None) or self.status.exit_reason  # type: ignore
        self.mail = StoreMessages(messages, rank, TIMEOUT, gone)

    def shard(self, unit: int, epoch: int) -> bytes:
        return b""

    def _break(self) -> None:
        self.raised = time.time()
        self.broken.set()

    def agree(self, where: str = "forward") -> None:
        self.consensus.gathers.agree(where, (1, 0), lambda wish: f"gather of unit {wish[1]}")

    def wait(self) -> None:
        """Wait in a collective until it is over, or broken off."""
        self.broken.clear()
        pending = self.log.issue("all-gather of layer.0")
        with self.watchdog.watching(pending):
            self.broken.wait()

    def save(self, number: int) -> None:
        from hf_zero.checkpoint import save_job
        from hf_zero.checkpoint.tensorfile import BlockHashes, FileHashes

        outcome = save_job.Outcome(FileHashes("0" * 64, BlockHashes(1 << 20, "0" * 32 * BLOCKS)))
        job: Any = SimpleNamespace(rank=self.rank, world=self.world)
        exchange = save_job._ByStore(self.mail, number, job)
        found = exchange.gather(outcome)
        assert self.rank or (len(found) == self.world and not any(each.error for each in found))
        assert exchange.broadcast("") == ""

    def requests(self) -> int:
        """Return the number of requests since the last call."""
        seen = self._seen
        self._seen = next(self.tally)
        return self._seen - seen - bool(seen)


_made = threading.local()


def work(pipe: Any, port: int, ranks: range, world: int, hosts_of: int, victim: int) -> None:
    """Run the ranks of one process: answer each command of ``pipe`` with the results by rank."""
    from hf_zero.checkpoint import save_job  # noqa: F401  imported before anything is timed
    from hf_zero.distributed import rank_hosts, rank_status, world_group  # noqa: F401

    logging.disable(logging.CRITICAL)
    threading.stack_size(256 << 10)
    # threads that wait for the interpreter's lock wake once in such an interval to ask for it
    sys.setswitchinterval(0.2)

    class Forgetful(list[str]):  # every thread is a rank that has yet to learn the hosts
        __len__ = lambda self: 0  # noqa: E731

    rank_hosts._hosts = Forgetful()
    find = rank_status._identity

    def identity(process: int) -> str:
        host, own = getattr(_made, "identity", ("", 0))
        _made.identity = "", 0
        found = find(own or process)
        return host + found if host else found

    rank_status._identity = identity
    host = lambda rank: f"{rank // hosts_of}:" if hosts_of else ""  # noqa: E731
    process = lambda rank: victim if rank == world // 2 else 0  # noqa: E731
    made = [Rank(port, rank, world, host(rank), process(rank)) for rank in ranks]
    running: list[threading.Thread] = []
    ended: dict[int, float] = {}

    def run(rank: Rank, call: Callable[[Rank], None]) -> None:
        call(rank)
        ended[rank.rank] = time.time()

    pipe.send(None)
    while (command := pipe.recv()) is not None:
        what, *args = command
        if what == "run":
            name, least, most, *rest = args
            begun = [
                threading.Thread(target=run, args=(rank, calls[name](*rest)), daemon=True)
                for rank in made
                if least <= rank.rank <= most
            ]
            running += begun
            for each in begun:
                each.start()
        elif what == "join":
            limit = time.time() + args[0]
            for each in running:
                each.join(max(0.0, limit - time.time()))
            running, times = [each for each in running if each.is_alive()], ended
            ended = {}
        elif what == "release":
            for rank in made:
                rank.broken.set()
        if what == "requests":
            pipe.send([rank.requests() for rank in made])
        elif what == "raised":
            pipe.send([getattr(rank, "raised", None) for rank in made])
        else:
            pipe.send(times if what == "join" else None)
    os._exit(0)


calls: dict[str, Callable[..., Callable[[Rank], None]]] = {
    "start": lambda: Rank.start,
    "wait": lambda: Rank.wait,
    "agree": lambda: Rank.agree,
    "pass": lambda: lambda rank: [rank.agree() for _ in range(AGREEMENTS)],  # type: ignore
    "save": lambda number: partial(Rank.save, number=number),
}


def serve(pipe: Any) -> None:
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    pipe.recv()
    os._exit(0)


class Job:
    """The processes of one world."""

    def __init__(self, world: int, hosts_of: int) -> None:
        self.world = world
        spawn = multiprocessing.get_context("spawn")
        self._pipes: list[Any] = []
        self._processes: list[Any] = []

        def begin(target: Callable[..., None], *args: Any) -> Any:
            here, there = spawn.Pipe()
            self._processes.append(spawn.Process(target=target, args=(there, *args), daemon=True))
            self._processes[-1].start()
            self._pipes.append(here)
            return here

        port = begin(serve).recv()
        self.victim = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        count = max(1, world // RANKS_OF_A_PROCESS)
        for at in range(count):
            ranks = range(at * world // count, (at + 1) * world // count)
            begin(work, port, ranks, world, hosts_of, self.victim.pid)
        self._workers = self._pipes[1:]
        for pipe in self._workers:
            pipe.recv()

    def ask(self, what: str, *args: Any) -> list[Any]:
        for pipe in self._workers:
            pipe.send((what, *args))
        return [pipe.recv() for pipe in self._workers]

    def run(self, name: str, but: int = -1) -> None:
        """Begin ``name`` on all ranks but one."""
        self.ask("run", name, 0, but - 1) if but >= 0 else None
        self.ask("run", name, but + 1, self.world)

    def join(self, limit: float) -> list[float]:
        """Return when each rank ended what it was running."""
        return [each for part in self.ask("join", limit) for each in part.values()]

    def requests(self) -> list[int]:
        return [count for part in self.ask("requests") for count in part]

    def timed(self, name: str, limit: float, *args: Any) -> dict[str, Any]:
        """Run ``name`` on all ranks, and return how long it took and its requests."""
        self.requests()
        begun = time.time()
        self.ask("run", name, 0, self.world, *args)
        ends = self.join(limit)
        asked = self.requests()
        return {
            "seconds": round(max(ends) - begun, 3) if len(ends) == self.world else None,
            "done": len(ends),
            "requests": sum(asked),
            "of_a_rank": [statistics.median(asked), max(asked)],
        }

    def counted(self, seconds: float) -> dict[str, Any]:
        """Return the requests in the next ``seconds``."""
        self.requests()
        begun = time.time()
        time.sleep(seconds)
        asked, seconds = self.requests(), time.time() - begun
        return {
            "seconds": round(seconds, 1),
            "requests": sum(asked),
            "a_second": round(sum(asked) / seconds, 1),
            "rate": [round(each / seconds, 3) for each in (sum(asked) / self.world, max(asked))],
        }

    def close(self) -> None:
        self.victim.kill()
        self.victim.wait()
        for process in self._processes:
            process.kill()


def measure(world: int, hosts_of: int, seconds: float) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []

    def row(what: str, found: dict[str, Any]) -> None:
        rows.append({"ranks": world, "hosts_of": hosts_of or world, "what": what, **found})
        print(json.dumps(rows[-1]), flush=True)

    job, late = Job(world, hosts_of), world // 2
    try:
        row("start", job.timed("start", 600.0))
        time.sleep(SETTLE)
        row("idle", job.counted(seconds))
        row("first pass", {"agreements": AGREEMENTS, **job.timed("pass", 600.0)})
        row("save", job.timed("save", 300.0, 1))
        for what, name, but in (
            ("all wait", "wait", -1),
            ("late", "wait", late),
            ("late for an agreement", "agree", late),
        ):
            job.requests()
            job.run(name, but)
            time.sleep(SETTLE)
            first = sum(job.requests()) / world
            found = {"first_seconds": [SETTLE, round(first, 2)], **job.counted(seconds)}
            if name == "wait":
                job.ask("release")
                job.join(120.0)
            else:
                begun = time.time()
                job.ask("run", name, late, late)
                found["released"] = round(max(job.join(120.0)) - begun, 3)
            row(what, found)
        job.run("wait", late)
        time.sleep(SETTLE)
        job.requests()
        job.victim.kill()
        killed = time.time()
        limit = killed + 180.0
        while time.time() < limit:
            time.sleep(1.0)
            raised = [each for part in job.ask("raised") for each in part]
            if sum(each is not None for each in raised) >= world - 1:
                break
        times = [each - killed for each in raised if each is not None]
        row("dead", {
            "raised": len(times),
            "first": round(min(times), 2) if times else None,
            "last": round(max(times), 2) if len(times) == world - 1 else None,
            "requests": sum(job.requests()),
        })  # fmt: skip
    finally:
        job.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tree", type=Path, nargs="?", default=HERE.parents[2])
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--hosts-of", type=int, default=8, help="ranks of a host; 0: one host")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    sys.path.insert(0, str(args.tree.resolve()))
    # torch looks up the name of every connection's address, and holds the interpreter's lock
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
    os.environ["PYTHONPATH"] = str(args.tree.resolve())
    sys.path.append(str(HERE.parent))
    from versions import versions

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    head = ["git", "-C", str(args.tree), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(head, capture_output=True, text=True).stdout.strip()
    about = {"versions": versions("torch"), "cores": os.cpu_count(), "commit": commit}
    with open(args.out or os.devnull, "a") as out:
        out.write(json.dumps(about) + "\n")
        for world in args.ranks:
            for row in measure(world, args.hosts_of, args.seconds):
                out.write(json.dumps(row) + "\n")
            out.flush()


if __name__ == "__main__":
    main()
