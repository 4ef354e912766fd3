"""Heartbeats between hosts: sockets on 127.0.0.x stand for hosts, and a number for the clock, so
that silence is exact; the thread is started where it is the subject.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from hf_zero.distributed import host_heartbeats, rank_hosts
from hf_zero.distributed import watchdog as watching
from hf_zero.distributed.collective_log import CollectiveLog
from hf_zero.distributed.host_heartbeats import HostHeartbeats, learn_hosts
from hf_zero.distributed.rank_status import RankStatus
from hf_zero.distributed.store import TimeoutStore
from hf_zero.distributed.watchdog import Watchdog
from hf_zero.errors import RankMismatchError

core = pytest.importorskip("hf_zero._cpu")
TOKEN, OTHER = b"0123456789abcdef", b"fedcba9876543210"
TIMEOUT, INTERVAL = 10.0, 0.5
SLACK = 2.5 * INTERVAL  # a heartbeat may be this late
BEAT, LEAVE, LOST = range(3)


class Job:
    """Ranks on hosts, whose threads are calls of the test."""

    def __init__(self, hosts: Sequence[int]) -> None:
        self.now = 100.0
        addresses = [f"127.0.0.{host + 1}" for host in hosts]
        self.ranks = [core.Heartbeats(address) for address in addresses]
        self.members = [
            (host, address, rank.port) for host, address, rank in zip(hosts, addresses, self.ranks)
        ]
        for rank in range(len(hosts)):
            self.join(rank)

    def join(self, rank: int) -> None:
        self.ranks[rank].join(TOKEN, rank, self.members, TIMEOUT, self.now)

    def run(self, seconds: float, without: Sequence[int] = ()) -> None:
        """Let ``seconds`` pass, in which the ranks ``without`` are stopped."""
        end = self.now + seconds
        while self.now < end:
            for number, rank in enumerate(self.ranks):
                if number not in without:
                    rank.step(self.now)
            self.now += INTERVAL / 2

    def lost(self) -> list[list[int]]:
        return [rank.lost() for rank in self.ranks]

    def send(self, to: int, kind: int, rank: int, host: int = 0, token: bytes = TOKEN) -> None:
        """Send a packet to rank ``to`` from elsewhere."""
        packet = struct.pack("!4I16s", 0x687A6231, kind, rank, host, token)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
            other.sendto(packet, self.members[to][1:])


def test_a_host_that_is_silent_for_longer_than_the_timeout_is_lost_on_every_rank() -> None:
    job = Job([0, 0, 1, 1, 2, 2, 3, 3, 4, 4])
    job.run(60)
    assert job.lost() == [[]] * 10
    dark = [4, 5]
    job.run(TIMEOUT + SLACK - INTERVAL, without=dark)
    assert job.lost() == [[]] * 10, "not yet"
    job.run(2 * INTERVAL, without=dark)
    assert job.lost() == [[] if rank in dark else [2] for rank in range(10)]


def test_two_hosts_watch_each_other_and_one_watches_nobody() -> None:
    pair = Job([0, 1])
    pair.run(5)
    pair.run(TIMEOUT + 2 * SLACK, without=[0])
    assert pair.lost() == [[], [0]]
    alone = Job([0, 0])
    alone.run(5)
    alone.run(TIMEOUT + 2 * SLACK, without=[0])
    assert alone.lost() == [[], []]


def test_neighbouring_hosts_that_go_dark_together_end_the_job() -> None:
    job = Job(range(5))
    job.run(5)
    job.run(TIMEOUT + 2 * SLACK, without=[1, 2])
    assert job.lost()[3:] == [[1, 2], [1, 2]] and job.lost()[0] == [1, 2]


def test_silence_for_less_than_the_timeout_raises_nothing() -> None:
    job = Job([0, 0, 1, 1])
    for stopped in ([0, 1], [2, 3]):
        job.run(5)
        job.run(TIMEOUT, without=stopped)
        job.run(5)
        assert job.lost() == [[]] * 4


def test_a_job_that_is_stopped_as_a_whole_goes_on() -> None:
    """No rank runs, and no packet waits for any."""
    job = Job([0, 1, 2])
    job.run(5)
    for rank in job.ranks:
        rank.step(job.now)  # nothing is left in a socket
    job.now += 10 * TIMEOUT
    job.run(5)
    assert job.lost() == [[]] * 3


def test_a_rank_that_was_stopped_hears_what_has_arrived_before_it_judges() -> None:
    job = Job([0, 1])
    job.run(5)
    job.run(5 * TIMEOUT, without=[1])
    assert job.lost() == [[1], []], "it has been silent"
    job.run(1)
    assert job.lost() == [[1], [1]], "and learns that it was lost, but not the other host"


@pytest.mark.parametrize("stopped", [[0], [0, 1], [1, 2]])
def test_another_rank_of_the_host_takes_over(stopped: list[int]) -> None:
    job = Job([0, 0, 0, 1])
    job.run(5)
    job.run(5 * TIMEOUT, without=stopped)
    job.run(5)
    assert job.lost() == [[]] * 4


def test_one_rank_of_a_host_sends() -> None:
    """The others are heard by nobody, unless the first is silent."""
    job = Job([0, 0, 1])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as listens:
        listens.bind(("127.0.0.2", 0))
        listens.setblocking(False)
        job.members[2] = (1, *listens.getsockname())
        for rank in (0, 1):
            job.join(rank)

        def senders() -> set[int]:
            found = set()
            try:
                while True:
                    found.add(struct.unpack("!4I16s", listens.recv(100))[2])
            except BlockingIOError:
                return found

        job.run(5, without=[2])
        assert senders() == {0}
        job.run(5, without=[0, 2])
        assert senders() == {1}
        job.run(2 * INTERVAL)
        senders()
        job.run(5, without=[2])
        assert senders() == {0}, "it goes on, and the other is silent again"
        job.ranks[0].stop()
        senders()
        job.run(2 * INTERVAL, without=[0, 2])
        assert senders() == {1}, "at once: the first has said that it leaves"


def test_packets_without_the_token_of_the_attempt_are_ignored() -> None:
    job = Job([0, 1])
    job.run(5)
    for token in (OTHER, b"", TOKEN[:-1]):
        job.send(0, LOST, 1, host=1, token=token)
    for rank, host in ((7, 1), (2**32 - 1, 1), (1, 7)):  # such as an attempt with more hosts has
        job.send(0, LOST, rank, host)
    job.send(0, 99, 1)
    job.run(1)
    assert job.lost() == [[], []]
    end = job.now + TIMEOUT + 2 * SLACK
    while job.now < end:  # nor do they stand for heartbeats
        job.send(0, BEAT, 1, token=OTHER)
        job.run(INTERVAL, without=[1])
    assert job.lost() == [[1], []]


def test_what_members_say_of_a_host_is_believed_of_this_one_too() -> None:
    job = Job([0, 1, 2])
    job.send(1, LOST, 0, host=2)
    job.send(2, LOST, 0, host=2)
    job.run(1, without=[0])
    assert job.lost() == [[], [2], [2]]


def test_a_host_whose_ranks_have_left_is_not_missed() -> None:
    job = Job([0, 0, 1])
    job.run(5)
    job.ranks[0].stop()
    job.run(3 * TIMEOUT, without=[0])
    job.ranks[1].stop()
    job.run(3 * TIMEOUT, without=[0, 1])
    assert job.lost() == [[]] * 3
    for rank in (0, 1):
        job.join(rank)  # another engine
    job.run(5)
    job.run(TIMEOUT + 2 * SLACK, without=[0, 1])
    assert job.lost() == [[], [], [0]]


def test_a_host_that_was_never_heard_is_not_lost_but_reported() -> None:
    job = Job([0, 1, 2])
    job.run(3 * TIMEOUT, without=[2])
    assert job.lost() == [[]] * 3
    assert [rank.unheard() for rank in job.ranks[:2]] == [[2], [2]]
    job.run(1)
    assert [rank.unheard() for rank in job.ranks] == [[], [], []]


def threads() -> int:
    """The number of threads that beat in this process."""
    found = 0
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it ends
            found += (task / "comm").read_text().strip() == "hf_zero-hosts"
    return found


def threads_become(count: int) -> bool:
    """Whether there are ``count`` in the end: the system forgets one after it was joined."""
    end = time.monotonic() + 60
    while threads() != count and time.monotonic() < end:
        time.sleep(0.001)
    return threads() == count


def test_the_thread_ends_with_its_owner_and_a_child_has_none() -> None:
    pair = Job([0, 1])
    for rank in pair.ranks:
        rank.run()
    assert threads_become(2)
    child = os.fork()
    if child == 0:
        # it neither waits for a lock or a thread that is not there, nor speaks for its parent
        quiet = pair.ranks[0].lost() == pair.ranks[0].unheard() == []
        pair.ranks[0].stop()
        pair.ranks.clear()
        os._exit(threads() + (not quiet))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    for _ in range(2):
        pair.ranks[0].stop()
        assert threads_become(1)
    del rank
    pair.ranks.clear()
    assert threads_become(0)


# ---- the rank's side ----


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process has learnt no hosts."""
    monkeypatch.setattr(rank_hosts, "_hosts", [])
    monkeypatch.setattr(rank_hosts, "_entries", [])
    monkeypatch.setattr(host_heartbeats, "_started", {})
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    yield


def learnt(
    monkeypatch: pytest.MonkeyPatch, names: Sequence[str], host_timeout: float = TIMEOUT
) -> HostHeartbeats | None:
    """What rank 0 of a rank on each host of ``names`` gets."""
    store = dist.HashStore()
    for rank, name in enumerate(names[1:], 1):
        other = core.Heartbeats("127.0.0.1")
        store.set(f"{rank_hosts.KEY}/{rank}", f"{name}\t127.0.0.1 {other.port} ")
    monkeypatch.setenv("HF_ZERO_HOST", names[0])
    return learn_hosts(store, 0, len(names), host_timeout, 1800.0)


@pytest.mark.usefixtures("hosts")
def test_a_job_on_one_host_starts_nothing(
    monkeypatch: pytest.MonkeyPatch, heard: list[str]
) -> None:
    assert learnt(monkeypatch, ["127.0.0.1", "127.0.0.1"]) is None
    host_heartbeats._started.clear()
    rank_hosts._hosts.clear()
    opened: list[str] = []
    monkeypatch.setattr(core, "Heartbeats", opened.append)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.setenv("HF_ZERO_HOST", "a")
    assert learn_hosts(dist.HashStore(), 0, 1, TIMEOUT, 1800.0) is None
    assert opened == [] and heard == []


@pytest.mark.usefixtures("hosts")
def test_without_the_native_core_one_warning_names_the_consequence(
    monkeypatch: pytest.MonkeyPatch, heard: list[str]
) -> None:
    monkeypatch.setenv("HF_ZERO_NATIVE", "0")
    for _ in range(2):  # two engines
        assert learnt(monkeypatch, ["a", "b"]) is None
    assert len(heard) == 1
    assert heard[0].startswith("no heartbeats between hosts: HF_ZERO_NATIVE=0 switches")
    assert heard[0].endswith("If a host goes dark, ranks notice only after the timeout of 1800 s")


@pytest.mark.usefixtures("hosts")
def test_the_key_turns_them_off(monkeypatch: pytest.MonkeyPatch, heard: list[str]) -> None:
    monkeypatch.setattr(core, "Heartbeats", lambda address: SimpleNamespace(port=1))
    assert learnt(monkeypatch, ["a", "b"], host_timeout=0.0) is None
    assert heard == []


@pytest.mark.usefixtures("hosts")
def test_the_thread_runs_while_an_engine_of_the_process_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heartbeats = learnt(monkeypatch, ["a", "b"])
    assert heartbeats is not None and threads() == 0
    for _ in range(2):
        heartbeats.hold(TIMEOUT)
        heartbeats.hold(TIMEOUT)
        heartbeats.release()
        assert threads_become(1)
        heartbeats.release()
        assert threads_become(0)


class Native:
    """Heartbeats whose findings the test sets."""

    def __init__(self) -> None:
        self.gone: list[int] = []
        self.never: list[int] = []

    def lost(self) -> list[int]:
        return self.gone

    def unheard(self) -> list[int]:
        return self.never

    def join(self, *arguments: Any) -> None:
        """Begin."""

    run = stop = join


def heartbeats_of(native: Any, names: Sequence[str], monkeypatch: Any) -> HostHeartbeats:
    monkeypatch.setattr(rank_hosts, "_hosts", list(names))
    contacts = [(f"10.0.0.{names.index(name) + 1}", 1) for name in names]
    found = HostHeartbeats(native, 0, TOKEN, contacts, 1800.0)
    found.hold(15.0)
    return found


def test_a_rank_that_waits_ends_for_a_lost_host_and_says_so(
    monkeypatch: pytest.MonkeyPatch, heard: list[str]
) -> None:
    native, store = Native(), dist.HashStore()
    heartbeats = heartbeats_of(native, ["a", "b", "b"], monkeypatch)
    status, other = (RankStatus(TimeoutStore(store), rank, 3) for rank in (0, 2))
    status.watch_hosts(heartbeats)
    aborted: list[str] = []
    log = status.register(
        CollectiveLog("gathers", range(3), 1800.0, lambda: aborted.append("gathers"))
    )
    watchdog = Watchdog(rank_status=status)
    watchdog.started = True
    watchdog.current = (log.issue("gather of x"), 0.0)
    watchdog.look_at_hosts()
    assert not watchdog.verdict and status.exit_reasons([1]) == {}
    native.gone = [1]
    cause = "ranks 1, 2 on b are lost: the host has been silent for 15 s (host_timeout)"
    assert status.exit_reasons([1, 2])[1].startswith(cause), "a save waits no longer"
    assert status.elsewhere([1]) == [1]
    assert str(status.failure_cause(0)).startswith(cause)
    watchdog.look_at_hosts()
    with pytest.raises(
        RankMismatchError, match=r"rank 0 cannot finish gather of x .*ranks 1, 2 on b"
    ):
        watchdog.check()
    assert aborted == ["gathers"] and len(heard) == 1
    found = other.failure_cause(0)  # a rank that UDP does not reach learns it from the store
    assert found is not None and found.startswith(cause)


def test_a_rank_that_computes_is_told_at_once(
    monkeypatch: pytest.MonkeyPatch, heard: list[str]
) -> None:
    native = Native()
    status = RankStatus(TimeoutStore(dist.HashStore()), 0, 2)
    status.watch_hosts(heartbeats_of(native, ["a", "b"], monkeypatch))
    watchdog = Watchdog(rank_status=status)
    native.gone = [1]
    turns = iter([False, True])
    once: Any = SimpleNamespace(wait=lambda pause: next(turns))
    watching._run(weakref.ref(watchdog), once)
    assert [text.startswith("rank 1 on b is lost: ") for text in heard] == [True]


class Silent:
    """A store that does not answer."""

    def __init__(self) -> None:
        self.closed = threading.Event()

    def get(self, key: str) -> bytes:
        self.closed.wait()
        raise RuntimeError("the connection was closed")


def test_a_store_is_waited_for_as_long_as_its_host_may_be_silent() -> None:
    silent = Silent()
    store = TimeoutStore(silent)
    store.wait_for_host(1e6, lambda: False)
    assert store._seconds > 1e6
    store.wait_for_host(-4.9, lambda: True)  # a slice, not the whole time
    with pytest.raises(RuntimeError, match="has not answered"):
        store.get("key")
    silent.closed.set()


def test_connections_to_a_lost_host_are_shut_down_and_no_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A call of a store that blocks in native code ends."""
    servers = [socket.create_server((f"127.0.0.{host}", 0)) for host in (1, 2)]
    clients = [socket.create_connection(each.getsockname()) for each in servers]
    native = Native()
    monkeypatch.setattr(rank_hosts, "_hosts", ["a", "b"])
    contacts = [("127.0.0.1", 1), ("127.0.0.2", 1)]
    heartbeats = HostHeartbeats(native, 0, TOKEN, contacts, 1800.0)
    native.gone = [1]
    with ThreadPoolExecutor(1) as thread:
        blocked = thread.submit(clients[1].recv, 1)
        heartbeats.sever()
        assert blocked.result(60) == b""
    clients[0].sendall(b"x")
    assert servers[0].accept()[0].recv(1) == b"x"
    for each in (*servers, *clients):
        each.close()
    shared = HostHeartbeats(native, 0, TOKEN, [("127.0.0.1", 1)] * 2, 1800.0)
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as client,
    ):
        shared.sever()  # the hosts are containers of one network
        client.sendall(b"y")
        assert server.accept()[0].recv(1) == b"y"


def test_a_network_without_udp_is_reported_once(
    monkeypatch: pytest.MonkeyPatch, heard: list[str]
) -> None:
    clock, native = SimpleNamespace(now=1000.0), Native()
    monkeypatch.setattr(host_heartbeats, "time", SimpleNamespace(monotonic=lambda: clock.now))
    heartbeats = heartbeats_of(native, ["a", "b", "b"], monkeypatch)
    native.never = [1]
    heartbeats.report_unheard()
    assert heard == []
    clock.now += host_heartbeats.UNHEARD_SECONDS
    for _ in range(2):
        heartbeats.report_unheard()
    (said,) = heard
    assert said.startswith("no heartbeat of ranks 1, 2 on b has arrived") and "1800 s" in said


@pytest.mark.usefixtures("hosts")
def test_a_start_costs_the_store_what_hosts_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    class Counted:
        def __init__(self, store: Any) -> None:
            self._store = store

        def __getattr__(self, name: str) -> Any:
            asked.append(name)
            return getattr(self._store, name)

    monkeypatch.setattr(dist, "HashStore", lambda make=dist.HashStore: Counted(make()))
    assert learnt(monkeypatch, ["a", "b", "c"]) is not None
    of_the_test, own = asked[:2], asked[2:]
    assert of_the_test == ["set", "set"] and own == ["set", "multi_get", "set", "get"]
