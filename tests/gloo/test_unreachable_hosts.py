"""The link of a host is cut while ranks train, or all its ranks are stopped for a while. Hosts are
network namespaces, joined by a bridge in another one.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from hf_zero.distributed import host_heartbeats
from hf_zero.distributed.collective_log import PendingCollective
from hf_zero.distributed.world_group import get_world_group
from hf_zero.errors import RankMismatchError
from tests.distributed.test_host_heartbeats import threads
from tests.helpers.engines import config_of, start
from tests.helpers.hosts import namespaces_allowed
from tests.helpers.launched import ROOT, ended, environment, running
from tests.helpers.processes import run_processes
from tests.helpers.stacks import run_steps, stack
from tests.helpers.training import adamw

SCRIPT = Path(__file__).with_name("unreachable_host.py")
LIMIT = 300.0  # seconds for a launch: less than the timeout of the configuration
RANKS = 2  # on each host
PORT = 29511  # each network is its own


def call(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


class Network:
    """Hosts 10.77.0.1, 10.77.0.2, ... and the switch between them."""

    def __init__(self, hosts: int) -> None:
        self.switch = f"hf-zero-{os.getpid()}-switch"
        self.hosts = [f"hf-zero-{os.getpid()}-{host}" for host in range(hosts)]

    def _ip(self, namespace: str, *arguments: str) -> None:
        call("ip", "-n", namespace, *arguments)

    def build(self) -> None:
        for name in (self.switch, *self.hosts):
            call("ip", "netns", "add", name)
        self._ip(self.switch, "link", "add", "bridge", "type", "bridge")
        self._ip(self.switch, "link", "set", "bridge", "up")
        for host, name in enumerate(self.hosts):
            port, address = f"port{host}", f"10.77.0.{host + 1}/24"
            pair = ("type", "veth", "peer", "name", "eth0", "netns", name)
            self._ip(self.switch, "link", "add", port, *pair)
            self._ip(self.switch, "link", "set", port, "master", "bridge", "up")
            self._ip(name, "addr", "add", address, "dev", "eth0")
            for device in ("eth0", "lo"):
                self._ip(name, "link", "set", device, "up")

    def cut(self, host: int) -> None:
        """Let no packet to or from ``host`` pass; its own link stays up."""
        self._ip(self.switch, "link", "set", f"port{host}", "nomaster")

    def remove(self) -> None:
        for name in (self.switch, *self.hosts):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


class Training:
    """Ranks that train on the hosts of a network."""

    def __init__(self, network: Network, folder: Path, started: Sequence[Any]) -> None:
        self.network, self.folder, self._started = network, folder, started

    def logs(self) -> list[str]:
        return [(self.folder / f"{rank}.txt").read_text() for rank in range(len(self._started))]

    def wait_for(self, text: str) -> None:
        """Wait until each rank has said ``text``."""
        end = time.monotonic() + LIMIT
        while not all(text in log for log in self.logs()):
            assert time.monotonic() < end, self.logs()
            assert all(each.poll() is None for each in self._started), self.logs()
            time.sleep(0.2)

    def signal(self, host: int, number: signal.Signals) -> None:
        for process in self._started[host * RANKS : (host + 1) * RANKS]:
            process.send_signal(number)

    def codes(self) -> list[int | None]:
        return [ended(each, LIMIT) for each in self._started]


@contextmanager
def training(hosts: int, host_timeout: float, folder: Path) -> Iterator[Training]:
    network = Network(hosts)
    with ExitStack() as stack:
        stack.callback(network.remove)
        network.build()
        started = []
        for rank in range(hosts * RANKS):
            host, local = divmod(rank, RANKS)
            place = {
                "RANK": rank,
                "LOCAL_RANK": local,
                "WORLD_SIZE": hosts * RANKS,
                "LOCAL_WORLD_SIZE": RANKS,
                "MASTER_ADDR": "10.77.0.1",
                "MASTER_PORT": PORT,
                "HF_ZERO_HOST": f"worker-{host}",
                "PYTHONUNBUFFERED": 1,
            }
            environ = environment() | {name: str(value) for name, value in place.items()}
            arguments = [sys.executable, str(SCRIPT), str(host_timeout), str(folder / "stop")]
            command = ["ip", "netns", "exec", network.hosts[host], *arguments]
            log = folder / f"{rank}.txt"
            started.append(stack.enter_context(running(command, ROOT, log, environ)))
        job = Training(network, folder, started)
        job.wait_for("step 50 ")  # by then heartbeats have been regular
        yield job


def train_on_two_hosts(rank: int) -> tuple[list[int], str]:
    """Return the threads that send heartbeats before, during and after an engine of a rank on a
    host of its own, and the error for the other host, whose loss is simulated.
    """
    os.environ.update(HF_ZERO_HOST=f"worker-{rank}", LOCAL_WORLD_SIZE="1")
    counts = [threads()]
    engines = []
    for _ in range(2):
        model = stack()
        engines.append(start(model, adamw(model), config_of(3, host_timeout=30)))
        run_steps(engines[-1], rank, [0])
    counts.append(threads())
    for engine in engines:
        engine.destroy()
    counts.append(threads())
    model = stack()
    engine = start(model, adamw(model), config_of(3, host_timeout=30))
    run_steps(engine, rank, [0])
    heartbeats = host_heartbeats._started[2]
    assert heartbeats is not None
    packet = struct.pack("!4I16s", 0x687A6231, 2, rank, 1 - rank, heartbeats._token)
    watchdog = get_world_group().watchdog
    if rank == 0:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
            other.sendto(packet, heartbeats._members[0][1:])
        with pytest.raises(RankMismatchError) as raised:
            run_steps(engine, rank, [1])
        return counts, str(raised.value)
    with watchdog.watching(PendingCollective("the other rank", needs=(0,))):
        watchdog.sleep(LIMIT)  # until it learns through the store what rank 0 has found
    return counts, watchdog.verdict


def test_a_rank_that_waits_for_an_unreachable_host_names_it() -> None:
    pytest.importorskip("hf_zero._cpu")
    (counts, own), (_, other) = run_processes(2, train_on_two_hosts)
    assert counts == [0, 1, 0]
    cause = "rank 1 on worker-1 (127.0.0.1) is unreachable: no heartbeat of this host for 30 s"
    for told in (own, other):  # by the wait that it ends, or before that begins
        assert cause in told, told


needs_namespaces = pytest.mark.skipif(bool(namespaces_allowed()), reason="needs network namespaces")


@pytest.mark.long
@needs_namespaces
@pytest.mark.parametrize("hosts, cut", [(2, 0), (2, 1), (3, 0), (3, 2)])
def test_a_host_whose_link_is_cut_is_named_on_every_rank(
    hosts: int, cut: int, tmp_path: Path
) -> None:
    """Host 0 has the store."""
    with training(hosts, 3.0, tmp_path) as job:
        job.network.cut(cut)
        codes, logs = job.codes(), job.logs()
    assert codes == [1] * hosts * RANKS, logs
    name = f"ranks {cut * RANKS}, {cut * RANKS + 1} on worker-{cut} (10.77.0.{cut + 1})"
    for rank, log in enumerate(logs):
        assert (
            "RankMismatchError" in log and "no heartbeat of this host for 3 s (host_timeout)" in log
        ), log
        # the host that is cut off hears nothing of any other
        assert (f"{name} are unreachable" in log) == (rank // RANKS != cut), log


@pytest.mark.long
@needs_namespaces
@pytest.mark.parametrize("stopped", [0, 1])
def test_a_host_that_is_stopped_for_less_than_the_timeout_goes_on(
    stopped: int, tmp_path: Path
) -> None:
    """Host 0 has the store."""
    with training(2, 15.0, tmp_path) as job:
        job.signal(stopped, signal.SIGSTOP)
        time.sleep(10.0)
        job.signal(stopped, signal.SIGCONT)
        time.sleep(5.0)
        (tmp_path / "stop").touch()
        codes, logs = job.codes(), job.logs()
    assert codes == [0] * 2 * RANKS, logs
    assert not [log for log in logs if re.search("hf-zero (ERROR|WARNING)", log)], logs


@pytest.mark.long
@needs_namespaces
def test_a_host_with_one_stopped_rank_is_reachable(tmp_path: Path) -> None:
    """The rank that sends for its host is stopped for longer than the timeout of hosts: the others
    wait for it.
    """
    with training(2, 3.0, tmp_path) as job:
        job._started[RANKS].send_signal(signal.SIGSTOP)
        time.sleep(12.0)
        job._started[RANKS].send_signal(signal.SIGCONT)
        (tmp_path / "stop").touch()
        codes, logs = job.codes(), job.logs()
    assert codes == [0] * 2 * RANKS, logs
