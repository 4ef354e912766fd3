"""Messages along a tree of ranks: the values of all, in order, whatever their sizes, by few
messages of each rank.
"""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_zero.distributed import world_group
from hf_zero.distributed.world_group import FRAME, RankTree

TAG = 7
SIZES = (0, 1, FRAME - 8, FRAME - 7, 5 * FRAME)


class Network:
    """Point-to-point messages between threads, each of which is a rank."""

    def __init__(self) -> None:
        self.rank = threading.local()
        self.sent: Counter[int] = Counter()
        self._lock, self._queues = threading.Lock(), dict[Any, SimpleQueue[torch.Tensor]]()

    def _queue(self, *ends: Any) -> SimpleQueue[torch.Tensor]:
        with self._lock:
            return self._queues.setdefault(ends, SimpleQueue())

    def isend(self, tensor: torch.Tensor, rank: int, group: Any, tag: int) -> Any:
        with self._lock:
            self.sent[self.rank.own] += 1
        self._queue(self.rank.own, rank, tag).put(tensor.clone())
        return SimpleNamespace(wait=lambda: None)

    def recv(self, tensor: torch.Tensor, rank: int, group: Any, tag: int) -> None:
        came = self._queue(rank, self.rank.own, tag).get(timeout=20)
        assert came.shape == tensor.shape, "gloo aborts where sizes differ"
        tensor.copy_(came)

    def irecv(self, tensor: torch.Tensor, rank: int, group: Any, tag: int) -> Any:
        return SimpleNamespace(wait=lambda: self.recv(tensor, rank, group, tag))


def contents(rank: int) -> bytes:
    return bytes([rank]) * SIZES[rank % len(SIZES)]


@pytest.mark.parametrize("world", [1, 2, 3, 5, 8, 13])
def test_all_ranks_get_the_values_of_all_by_few_messages(
    world: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = [10 + 3 * place for place in range(world)]
    for root in {0, world // 2, world - 1}:
        network = Network()
        monkeypatch.setattr(world_group, "dist", network)

        def run(own: int, network: Network = network, root: int = root) -> list[list[bytes]]:
            network.rank.own = ranks[own]
            tree = RankTree(ranks, own, root, None, TAG)
            values = tree.gather(contents(own))
            told = [tree.broadcast(bytes([root]) * size) for size in SIZES]
            return [values if own == root else [], told]

        with ThreadPoolExecutor(world) as pool:
            answers = list(pool.map(run, range(world), timeout=30))
        ordered = [contents((root + place) % world) for place in range(world)]
        assert answers[root][0] == ordered
        assert all(told == [bytes([root]) * size for size in SIZES] for _, told in answers)
        # two messages for a long content, of which the broadcasts have two
        depth = (world - 1).bit_length()
        assert max(network.sent.values(), default=0) <= 2 + depth * (len(SIZES) + 2)
        assert sum(network.sent.values()) <= (world - 1) * (2 + len(SIZES) + 2)
