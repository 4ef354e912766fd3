"""The hosts of ranks: learnt through the store, named when a peer is lost; the network interface
that gloo is given.
"""

from __future__ import annotations

import os
import re
import socket
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from hf_zero.distributed import init, process_group, rank_hosts
from hf_zero.distributed.collective_log import CollectiveLog
from hf_zero.distributed.collectives import Handle
from hf_zero.distributed.rank_hosts import VARIABLES, choose_interface, interface_of
from hf_zero.distributed.watchdog import Watchdog
from hf_zero.errors import LaunchError, RankMismatchError


class Lost:
    def wait(self) -> None:
        raise RuntimeError("Connection closed by peer")


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    names: list[str] = []
    monkeypatch.setattr(rank_hosts, "_hosts", names)
    return names


def test_every_rank_learns_every_host(known: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with ThreadPoolExecutor(3) as ranks:
        for rank in (2, 1):  # they wait for rank 0, which collects
            monkeypatch.setenv("HF_ZERO_HOST", "worker-1")
            ranks.submit(rank_hosts.learn, store, rank, 3)
            store.wait([f"{rank_hosts.KEY}/1/{rank}"], timedelta(seconds=60))
        monkeypatch.setenv("HF_ZERO_HOST", "worker-0")
        rank_hosts.learn(store, 0, 3)
    assert known == ["worker-0 (127.0.0.1)", "worker-1 (127.0.0.1)", "worker-1 (127.0.0.1)"]
    said = rank_hosts.named([0, 1, 2])
    assert said == "rank 0 on worker-0 (127.0.0.1), ranks 1, 2 on worker-1 (127.0.0.1)"


def test_a_collective_that_breaks_names_the_peers_and_their_hosts(known: list[str]) -> None:
    assert rank_hosts.named([0, 3]) == "ranks 0, 3"  # nobody told their hosts
    known += ["a (10.0.0.1)", "b (10.0.0.2)"]
    log = CollectiveLog("gathers", [0, 1], 60.0)
    handle = Handle([Lost()], Watchdog(enabled=False), log.issue("all-gather of layer.1", (1,)))
    said = r"could not finish all-gather of layer.1.*Connection closed.*rank 1 on b \(10.0.0.2\)"
    for _ in range(2):  # a later wait does not take the result for complete
        with pytest.raises(RankMismatchError, match=said):
            handle.wait()


def test_a_name_that_does_not_resolve_is_an_error_that_names_its_variable(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unknown(*_: object, **__: object) -> list[object]:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    for source, remedy in (
        ("SLURM_STEP_NODELIST=bad[1-2]", "export MASTER_ADDR with an IP address"),
        ("MASTER_ADDR=bad1", "--local-addr"),  # under torchrun
    ):
        caplog.clear()
        with pytest.raises(LaunchError) as raised:
            rank_hosts.wait_for_address("bad1.invalid", source, 0.05, 0.01)
        assert "cannot resolve 'bad1.invalid', the host of rank 0" in str(raised.value)
        assert source in str(raised.value) and remedy in str(raised.value)
        assert caplog.text.count("hf-zero tries again for") == 1
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")


SLURM = {
    **dict.fromkeys(("SLURM_PROCID", "SLURM_STEP_ID", "SLURM_LOCALID", "SLURM_NODEID"), "0"),
    "SLURM_NTASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_STEP_NODELIST": "bad[1-2].invalid",
}


@pytest.mark.parametrize(
    "variables, source",
    [
        ({"MASTER_ADDR": "bad.invalid"}, "MASTER_ADDR=bad.invalid"),
        (SLURM, "SLURM_STEP_NODELIST=bad[1-2].invalid"),
    ],
    ids=["MASTER_ADDR", "SLURM"],
)
def test_init_distributed_looks_the_name_up_before_it_waits_for_ranks(
    variables: dict[str, str], source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_PORT": "29999"}
    for name in ("TORCHELASTIC_RUN_ID", "LOCAL_WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in (own | variables).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "environ", os.environ.copy())  # announce() writes into it
    with pytest.raises(LaunchError, match=re.escape(source)):
        init.init_distributed(timeout=0.1)
    assert not process_group.is_initialized()


# ---- interfaces ----


@pytest.fixture
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.setenv(name, "")  # so that monkeypatch takes back what a test sets


def chosen() -> list[str]:
    return [os.environ[name] for name in VARIABLES]


def test_ranks_that_meet_on_loopback_talk_on_loopback(
    unset: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for address in ("127.0.0.1", "localhost", "127.0.0.2"):
        monkeypatch.setenv(VARIABLES[0], "")
        choose_interface(address, several_hosts=True)
        assert chosen() == ["lo", ""]
    for address in (None, "no-such-host.invalid"):  # where no way is known the choice is gloo's
        monkeypatch.setenv(VARIABLES[0], "")
        choose_interface(address, several_hosts=True)
        assert chosen() == ["", ""]
    choose_interface("10.1.2.3", several_hosts=True, interface="lo")  # for gloo and NCCL
    assert chosen() == ["lo", "lo"]
    assert interface_of("192.0.2.1") is None and interface_of("127.0.0.1") == "lo"


def test_an_interface_that_is_not_there_is_named(
    unset: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = r"interface=eth99: this host has no network interface eth99; it has .*lo"
    with pytest.raises(LaunchError, match=said):
        choose_interface("127.0.0.1", several_hosts=False, interface="eth99")
    monkeypatch.setenv(VARIABLES[0], "lo,lo")
    choose_interface("127.0.0.1", several_hosts=False)
    assert chosen() == ["lo,lo", ""], "what the user set stays"
    monkeypatch.setenv(VARIABLES[0], "lo,eth98")
    with pytest.raises(LaunchError, match=r"GLOO_SOCKET_IFNAME=lo,eth98: .* interface eth98;"):
        choose_interface("127.0.0.1", several_hosts=False)


def test_a_name_that_is_loopback_in_etc_hosts_does_not_lead_other_hosts_astray(
    unset: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many machines know their own name as 127.0.1.1."""
    ways = {"worker-0": "127.0.0.1", rank_hosts.SOMEWHERE: "10.9.8.7"}
    monkeypatch.setattr(rank_hosts, "_source", lambda address: ways.get(address))
    names = {"127.0.0.1": "lo", "10.9.8.7": "eth0"}
    monkeypatch.setattr(rank_hosts, "interface_of", names.get)
    choose_interface("worker-0", several_hosts=True)
    assert os.environ[VARIABLES[0]] == "eth0"
    monkeypatch.setenv(VARIABLES[0], "")
    choose_interface("worker-0", several_hosts=False)
    assert os.environ[VARIABLES[0]] == "lo"
