"""The hosts of ranks: learnt through the store, named when a peer is lost."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from hf_zero.distributed import whereabouts
from hf_zero.distributed.axis import Handle
from hf_zero.distributed.lane import Lane
from hf_zero.distributed.watch import Watch
from hf_zero.errors import RankMismatchError


class Lost:
    def wait(self) -> None:
        raise RuntimeError("Connection closed by peer")


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    names: list[str] = []
    monkeypatch.setattr(whereabouts, "_hosts", names)
    return names


def test_every_rank_learns_every_host(hosts: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with ThreadPoolExecutor(3) as ranks:
        for rank in (2, 1):  # they wait for rank 0, which collects
            monkeypatch.setenv("HF_ZERO_HOST", "worker-1")
            ranks.submit(whereabouts.learn, store, rank, 3)
            while not store.check([f"{whereabouts.KEY}/{rank}"]):
                continue
        monkeypatch.setenv("HF_ZERO_HOST", "worker-0")
        whereabouts.learn(store, 0, 3)
    assert hosts == ["worker-0 (127.0.0.1)", "worker-1 (127.0.0.1)", "worker-1 (127.0.0.1)"]
    assert (
        whereabouts.of([0, 1, 2])
        == "rank 0 on worker-0 (127.0.0.1), ranks 1, 2 on worker-1 (127.0.0.1)"
    )


@pytest.mark.parametrize("name", whereabouts.NAMES)
def test_a_host_has_the_name_that_its_launcher_gives_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for each in (*whereabouts.NAMES, "MASTER_ADDR"):
        monkeypatch.delenv(each, raising=False)
    monkeypatch.setenv(name, "gpu07")
    assert whereabouts.own_host() == "gpu07"


def test_hosts_that_nobody_told_are_left_out(hosts: list[str]) -> None:
    assert whereabouts.of([0, 3]) == "ranks 0, 3"


def test_a_collective_that_breaks_names_the_peers_and_their_hosts(hosts: list[str]) -> None:
    hosts += ["a (10.0.0.1)", "b (10.0.0.2)"]
    lane = Lane("gathers", [0, 1], 60.0)
    handle = Handle([Lost()], Watch(enabled=False), lane.issue("all-gather of layer.1", (1,)))
    with pytest.raises(
        RankMismatchError,
        match=r"could not finish all-gather of layer.1.*Connection "
        r"closed.*rank 1 on b \(10.0.0.2\)",
    ):
        handle.wait()
