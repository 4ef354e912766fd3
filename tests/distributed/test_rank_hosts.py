"""The hosts of ranks: learnt through the store, named when a peer is lost."""

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
            store.wait([f"{rank_hosts.KEY}/{rank}"], timedelta(seconds=60))
        monkeypatch.setenv("HF_ZERO_HOST", "worker-0")
        rank_hosts.learn(store, 0, 3)
    assert known == ["worker-0 (127.0.0.1)", "worker-1 (127.0.0.1)", "worker-1 (127.0.0.1)"]
    said = rank_hosts.of([0, 1, 2])
    assert said == "rank 0 on worker-0 (127.0.0.1), ranks 1, 2 on worker-1 (127.0.0.1)"


def test_the_name_that_the_user_gives_goes_before_a_launchers_and_the_machines_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A pod has a name of its own, and HF_ZERO_HOST says on which node it is."""
    for each in (*rank_hosts.NAMES, "MASTER_ADDR"):
        monkeypatch.delenv(each, raising=False)
    for name in rank_hosts.NAMES:
        with monkeypatch.context() as patch:
            patch.setenv(name, "gpu07")
            assert rank_hosts.own_host() == "gpu07"
    monkeypatch.setattr(rank_hosts.socket, "gethostname", lambda: "train-7c9d")
    found = [rank_hosts.host_name()]
    for name, value in (("SLURMD_NODENAME", "gpu07"), ("HF_ZERO_HOST", "node-3")):
        monkeypatch.setenv(name, value)
        found.append(rank_hosts.host_name())
    assert found == ["train-7c9d", "gpu07", "node-3"]


def test_a_collective_that_breaks_names_the_peers_and_their_hosts(known: list[str]) -> None:
    assert rank_hosts.of([0, 3]) == "ranks 0, 3"  # nobody told their hosts
    known += ["a (10.0.0.1)", "b (10.0.0.2)"]
    log = CollectiveLog("gathers", [0, 1], 60.0)
    handle = Handle([Lost()], Watchdog(enabled=False), log.issue("all-gather of layer.1", (1,)))
    said = r"could not finish all-gather of layer.1.*Connection closed.*rank 1 on b \(10.0.0.2\)"
    with pytest.raises(RankMismatchError, match=said):
        handle.wait()


def test_numbers_of_ranks_name_those_alone() -> None:
    groups = ([0, 1, 2, 3], [0, 2], [4, 5], [0, 1, 2, 8, 10, 9], [7])
    said = ["0-3", "0, 2", "4, 5", "0-2, 8-10", "7"]
    assert [rank_hosts.numbers(ranks) for ranks in groups] == said


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


def test_a_name_that_resolves_later_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kubernetes publishes the name of a pod only after the pod has started."""
    answers: list[Exception | None] = [socket.gaierror(-2, "Name or service not known"), None]

    def look_up(*_: object, **__: object) -> list[object]:
        answer = answers.pop(0)
        if answer is not None:
            raise answer
        return []

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    rank_hosts.wait_for_address("pod-0.job", "MASTER_ADDR=pod-0.job", 5.0, 0.01)
    assert not answers


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
