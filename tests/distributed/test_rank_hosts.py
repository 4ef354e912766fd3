"""The hosts of ranks: learnt through the store, named when a peer is lost."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from hf_zero.distributed import rank_hosts
from hf_zero.distributed.collective_log import CollectiveLog
from hf_zero.distributed.collectives import Handle
from hf_zero.distributed.watchdog import Watchdog
from hf_zero.errors import RankMismatchError


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


@pytest.mark.parametrize("name", rank_hosts.NAMES)
def test_a_host_has_the_name_that_its_launcher_gives_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for each in (*rank_hosts.NAMES, "MASTER_ADDR"):
        monkeypatch.delenv(each, raising=False)
    monkeypatch.setenv(name, "gpu07")
    assert rank_hosts.own_host() == "gpu07"


def test_the_name_that_the_user_gives_goes_before_slurms_and_the_machines_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A pod has a name of its own, and HF_ZERO_HOST says on which node it is."""
    for each in rank_hosts.NAMES:
        monkeypatch.delenv(each, raising=False)
    monkeypatch.setattr(rank_hosts.socket, "gethostname", lambda: "train-7c9d")
    found = [rank_hosts.host_name()]
    for name, value in (("SLURMD_NODENAME", "gpu07"), ("HF_ZERO_HOST", "node-3")):
        monkeypatch.setenv(name, value)
        found.append(rank_hosts.host_name())
    assert found == ["train-7c9d", "gpu07", "node-3"]


def test_hosts_that_nobody_told_are_left_out(known: list[str]) -> None:
    assert rank_hosts.of([0, 3]) == "ranks 0, 3"


def test_a_collective_that_breaks_names_the_peers_and_their_hosts(known: list[str]) -> None:
    known += ["a (10.0.0.1)", "b (10.0.0.2)"]
    log = CollectiveLog("gathers", [0, 1], 60.0)
    handle = Handle([Lost()], Watchdog(enabled=False), log.issue("all-gather of layer.1", (1,)))
    with pytest.raises(
        RankMismatchError,
        match=r"could not finish all-gather of layer.1.*Connection "
        r"closed.*rank 1 on b \(10.0.0.2\)",
    ):
        handle.wait()


def test_numbers_of_ranks_name_those_alone() -> None:
    groups = ([0, 1, 2, 3], [0, 2], [4, 5], [0, 1, 2, 8, 10, 9], [7])
    said = ["0-3", "0, 2", "4, 5", "0-2, 8-10", "7"]
    assert [rank_hosts.numbers(ranks) for ranks in groups] == said
