"""Heartbeats between hosts: sockets on 127.0.0.x stand for hosts, and a number for the clock, so
that times are exact; the thread is started where it is the subject.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hf_zero.distributed import host_heartbeats, rank_hosts
from hf_zero.distributed.host_heartbeats import HostHeartbeats, learn_hosts

core = pytest.importorskip("hf_zero._cpu")
TOKEN, OTHER = b"0123456789abcdef", b"fedcba9876543210"
TIMEOUT, INTERVAL = 10.0, 0.5
SLACK = 2.5 * INTERVAL  # a heartbeat may be this late
REGULAR = 10 * INTERVAL + SLACK  # after which a host is judged
BEAT, LEAVE, UNREACHABLE = range(3)


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

    def unreachable(self) -> list[list[int]]:
        return [rank.unreachable() for rank in self.ranks]

    def send(self, to: int, kind: int, rank: int, host: int = 0, token: bytes = TOKEN) -> None:
        """Send a packet to rank ``to`` from elsewhere."""
        packet = struct.pack("!4I16s", 0x687A6231, kind, rank, host, token)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
            other.sendto(packet, self.members[to][1:])


def test_a_host_without_heartbeats_for_the_timeout_is_unreachable_on_every_rank() -> None:
    job = Job([0, 0, 1, 1, 2, 2, 3, 3, 4, 4])
    job.run(60)
    assert job.unreachable() == [[]] * 10
    cut = [4, 5]
    job.run(TIMEOUT + SLACK - INTERVAL, without=cut)
    assert job.unreachable() == [[]] * 10, "not yet"
    job.run(2 * INTERVAL, without=cut)
    assert job.unreachable() == [[] if rank in cut else [2] for rank in range(10)]


def test_pauses_raise_nothing_and_a_rank_hears_what_has_arrived_before_it_judges() -> None:
    """A pause shorter than the timeout, and one of the whole job, in which no packet waits."""
    job = Job([0, 0, 1, 1])
    for stopped in ([0, 1], [2, 3]):
        job.run(REGULAR)
        job.run(TIMEOUT, without=stopped)
    job.run(REGULAR)
    for rank in job.ranks:
        rank.step(job.now)  # nothing is left in a socket
    job.now += 10 * TIMEOUT
    job.run(REGULAR)
    assert job.unreachable() == [[]] * 4
    pair = Job([0, 1])
    pair.run(REGULAR)
    pair.run(5 * TIMEOUT, without=[1])
    assert pair.unreachable() == [[1], []], "it has sent nothing"
    pair.run(1)
    assert pair.unreachable() == [[1], [1]], "it learns that it was unreachable"


def test_another_rank_of_the_host_takes_over() -> None:
    for stopped in ([0], [0, 1], [1, 2]):
        job = Job([0, 0, 0, 1])
        job.run(REGULAR)
        job.run(5 * TIMEOUT, without=stopped)
        job.run(REGULAR)
        assert job.unreachable() == [[]] * 4


def test_packets_without_the_token_of_the_attempt_are_ignored() -> None:
    job = Job([0, 1])
    job.run(REGULAR)
    for token in (OTHER, b"", TOKEN[:-1]):
        job.send(0, UNREACHABLE, 1, host=1, token=token)
    for rank, host in ((7, 1), (2**32 - 1, 1), (1, 7)):  # such as an attempt with more hosts has
        job.send(0, UNREACHABLE, rank, host)
    job.send(0, 99, 1)
    job.run(1)
    assert job.unreachable() == [[], []]
    end = job.now + TIMEOUT + 2 * SLACK
    while job.now < end:  # nor do they stand for heartbeats
        job.send(0, BEAT, 1, token=OTHER)
        job.run(INTERVAL, without=[1])
    assert job.unreachable() == [[1], []]


def test_a_host_whose_ranks_have_left_is_not_missed() -> None:
    job = Job([0, 0, 1])
    job.run(REGULAR)
    job.ranks[0].stop()
    job.run(3 * TIMEOUT, without=[0])
    job.ranks[1].stop()
    job.run(3 * TIMEOUT, without=[0, 1])
    assert job.unreachable() == [[]] * 3
    for rank in (0, 1):
        job.join(rank)  # another engine
    job.run(REGULAR)
    job.run(TIMEOUT + 2 * SLACK, without=[0, 1])
    assert job.unreachable() == [[], [], [0]]


def test_a_host_that_was_never_heard_is_not_unreachable_but_reported() -> None:
    job = Job([0, 1, 2])
    job.run(3 * TIMEOUT, without=[2])
    assert job.unreachable() == [[]] * 3
    assert [rank.unheard() for rank in job.ranks[:2]] == [[2], [2]]
    job.run(REGULAR)
    assert [rank.unheard() for rank in job.ranks] == [[], [], []]


def test_irregular_heartbeats_end_no_run() -> None:
    """A network lets the first pass, and drops most for longer than a host may be late."""
    job = Job([0, 1])
    for seconds in (INTERVAL, INTERVAL, *[2 * SLACK] * 10, 3 * TIMEOUT):
        job.send(0, BEAT, 1)
        job.run(seconds, without=[1])
    assert job.unreachable() == [[], []] and job.ranks[0].unheard() == [1]
    job.run(REGULAR)
    job.run(TIMEOUT + 2 * SLACK, without=[1])
    assert job.unreachable() == [[1], []], "it is judged once its heartbeats are regular"


@pytest.mark.parametrize("exits", [[1], [1, 2]])
def test_a_host_whose_processes_have_exited_is_not_unreachable(exits: list[int]) -> None:
    """It runs, and refuses packets to their ports; if one of them is stopped, it is unreachable."""
    job, sockets = Job([0, 1, 1]), {}
    for rank in (1, 2):  # sockets in place of its ranks, whose heartbeats the test sends
        sockets[rank] = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        sockets[rank].bind((job.members[rank][1], 0))
        job.members[rank] = (1, *sockets[rank].getsockname())
    for rank in range(3):
        job.join(rank)
    end = job.now + REGULAR
    while job.now < end:
        job.send(0, BEAT, 1)
        job.run(INTERVAL, without=[1, 2])
    assert job.ranks[0].exited() == []
    for rank in exits:
        sockets[rank].close()
    job.run(TIMEOUT + 2 * SLACK, without=[1, 2])
    assert job.ranks[0].exited() == exits
    assert job.ranks[0].unreachable() == ([] if exits == [1, 2] else [1])
    for each in sockets.values():
        each.close()


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
        first = pair.ranks[0]
        quiet = first.unreachable() == first.unheard() == first.exited() == []
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


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process has learnt no hosts."""
    monkeypatch.setattr(rank_hosts, "_hosts", [])
    monkeypatch.setattr(host_heartbeats, "_started", {})
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    yield


def told_by(names: Sequence[str], entry: str = "") -> rank_hosts.Exchange:
    """Return the exchange of rank 0 with ranks from 1 on, on the hosts ``names``; ``entry`` in
    place of their sockets.
    """
    others = [
        (name, entry or f"127.0.0.1 {core.Heartbeats('127.0.0.1').port} ") for name in names[1:]
    ]
    return lambda own: [own, *others]


def learnt(
    monkeypatch: pytest.MonkeyPatch, names: Sequence[str], host_timeout: float = TIMEOUT
) -> HostHeartbeats | None:
    """What rank 0 of a rank on each host of ``names`` gets."""
    monkeypatch.setenv("HF_ZERO_HOST", names[0])
    return learn_hosts(told_by(names), 0, len(names), host_timeout, 1800.0)


@pytest.mark.usefixtures("hosts")
def test_without_the_native_core_one_warning_names_the_consequence(
    monkeypatch: pytest.MonkeyPatch, heard: list[str]
) -> None:
    monkeypatch.setenv("HF_ZERO_NATIVE", "0")
    for _ in range(2):  # two engines
        assert learnt(monkeypatch, ["a", "b"]) is None
    assert len(heard) == 1
    assert heard[0].startswith("no heartbeats between hosts: HF_ZERO_NATIVE=0 switches")
    said = "If a host becomes unreachable, ranks notice only after the timeout of 1800 s"
    assert heard[0].endswith(said)


def test_a_network_without_udp_is_reported_once(
    monkeypatch: pytest.MonkeyPatch, heard: list[str]
) -> None:
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(host_heartbeats, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(rank_hosts, "_hosts", ["a", "b", "b"])
    native: Any = SimpleNamespace(unheard=lambda: [1], join=lambda *_: None, run=lambda: None)
    contacts = [(f"10.0.0.{host}", 1) for host in (1, 2, 2)]
    heartbeats = HostHeartbeats(native, 0, TOKEN, contacts, 1800.0)
    heartbeats.hold(15.0)
    heartbeats.hold(15.0)
    heartbeats.report_unheard()
    assert heard == []
    heartbeats.hold(30.0)
    assert heartbeats.timeout == 15.0  # of the first engine
    clock.now += host_heartbeats.UNHEARD_SECONDS
    for _ in range(2):
        heartbeats.report_unheard()
    (said,) = heard
    assert said.startswith("the heartbeats of ranks 1, 2 on b do not arrive") and "1800 s" in said


@pytest.mark.usefixtures("hosts")
@pytest.mark.parametrize("rank", [0, 1])
def test_an_engine_without_heartbeats_leaves_them_to_the_next_one(
    rank: int, monkeypatch: pytest.MonkeyPatch, heard: list[str]
) -> None:
    """``rank`` has asked for none in the first engine."""
    off = f"{host_heartbeats.OFF}{host_heartbeats.NOT_ASKED}"
    monkeypatch.setenv("HF_ZERO_HOST", "a")
    told = told_by(["a", "b"], off if rank == 1 else "")
    assert learn_hosts(told, 0, 2, TIMEOUT * (rank == 1), 1800.0) is None
    assert [f"{host_heartbeats.NOT_ASKED} (rank 1 on b)" in text for text in heard] == [True] * rank
    told = told_by(["a", "b"])
    heartbeats = learn_hosts(told, 0, 2, TIMEOUT, 1800.0)
    assert heartbeats is not None
    assert learn_hosts(told, 0, 2, TIMEOUT, 1800.0) is heartbeats
    assert learn_hosts(told, 0, 2, 0.0, 1800.0) is None


def test_connections_to_an_unreachable_host_are_shut_down_and_no_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A call of a store that blocks in native code ends."""
    servers = [socket.create_server((f"127.0.0.{host}", 0)) for host in (1, 2)]
    clients = [socket.create_connection(each.getsockname()) for each in servers]
    native: Any = SimpleNamespace(unreachable=lambda: [1])
    monkeypatch.setattr(rank_hosts, "_hosts", ["a", "b"])
    contacts = [("127.0.0.1", 1), ("127.0.0.2", 1)]
    heartbeats = HostHeartbeats(native, 0, TOKEN, contacts, 1800.0)
    with ThreadPoolExecutor(1) as thread:
        blocked = thread.submit(clients[1].recv, 1)
        heartbeats.sever()
        assert blocked.result(60) == b""
    before = os.listdir("/proc/self/fd")

    with open(__file__) as file, monkeypatch.context() as patch:
        copy = os.dup  # of a descriptor that another thread has closed and used again
        patch.setattr(os, "dup", lambda descriptor: copy(file.fileno()))
        heartbeats.sever()
    assert len(os.listdir("/proc/self/fd")) == len(before)
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


@pytest.mark.usefixtures("hosts")
def test_a_start_costs_the_exchange_of_hosts_alone() -> None:
    told, calls = told_by(["a", "b", "c"]), list[tuple[str, str]]()

    def exchange(own: tuple[str, str]) -> Sequence[tuple[str, str]]:
        calls.append(own)
        return told(own)

    for _ in range(2):  # engines
        assert learn_hosts(exchange, 0, 3, TIMEOUT, 1800.0) is not None
    assert len(calls) == 1
