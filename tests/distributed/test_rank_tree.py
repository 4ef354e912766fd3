"""Objects of all ranks along a tree: what arrives, and the messages that each rank sends; the
exchanges of a blocking save.
"""

from __future__ import annotations

import queue
import threading
from collections import Counter, defaultdict
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_zero.distributed import world_group
from hf_zero.distributed.collective_log import CollectiveLog
from hf_zero.distributed.hang_detection import Watchdog
from hf_zero.distributed.world_group import FRAME, RankGroup, get_world_group
from tests.helpers.engines import config_of, start
from tests.helpers.stacks import on_each_rank
from tests.helpers.training import adamw

SECONDS = 120.0
EXCHANGES = 4  # of a blocking save among all ranks, and one broadcast of the verdict


class Post:
    """Messages between ranks that are threads, counted by their sender; it cannot run the
    collectives that the tree replaces.
    """

    all_gather_object = broadcast_object_list = NotImplementedError

    def __init__(self) -> None:
        self.sent = Counter[int]()
        self.here = threading.local()
        self._boxes: Any = defaultdict(queue.Queue)

    def isend(self, tensor: torch.Tensor, target: int, group: object, tag: int) -> Any:
        self.sent[self.here.rank] += 1
        self._boxes[self.here.rank, target, tag].put(tensor.clone())
        return SimpleNamespace(wait=lambda: None)

    def recv(self, into: torch.Tensor, source: int, group: object, tag: int) -> None:
        into.copy_(self._boxes[source, self.here.rank, tag].get(timeout=SECONDS))

    def irecv(self, *message: Any) -> Any:
        return SimpleNamespace(wait=partial(self.recv, *message))


def run_on(ranks: int, act: Any, patch: pytest.MonkeyPatch) -> tuple[list[Any], Counter[int]]:
    """Return the results of ``act(group)`` on each rank, and the messages that each has sent."""
    post, results = Post(), dict[int, Any]()
    patch.setattr(world_group, "dist", post)
    numbers = range(10, 10 + ranks)  # ranks of a part of the job

    def run(rank: int) -> None:
        post.here.rank = rank
        log = CollectiveLog("calls", numbers, SECONDS)
        results[rank] = act(RankGroup(numbers, rank, None, log, Watchdog(), True))

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in numbers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    return [results[rank] for rank in numbers], post.sent


@pytest.mark.parametrize("agrees", [True, False])
def test_a_broadcast_needs_the_path_to_its_source_and_the_ranks_below(agrees: bool) -> None:
    """The source of a tensor over gloo awaits all: each message ends once it is received."""
    ranks = range(10, 18)

    def needs(rank: int, source: int, by_tree: bool) -> tuple[int, ...] | None:
        log = CollectiveLog("calls", ranks, SECONDS)
        group = RankGroup(ranks, rank, None, log, Watchdog(), agrees)
        return group._required(ranks.index(rank), ranks.index(source), by_tree)

    if not agrees:
        assert needs(10, 10, True) == () and needs(17, 10, True) == (10,)
        return
    assert needs(10, 10, False) is None and needs(17, 10, False) == (10,)
    assert [needs(rank, 10, True) for rank in (10, 14, 16, 17)] == [
        (11, 12, 14),
        (10, 15, 16),
        (14, 10, 17),
        (16, 14, 10),
    ]
    assert needs(12, 15, True) == (11, 15)


@pytest.mark.parametrize("size", [10, 4 * FRAME])
@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 16, 37])
def test_messages_of_a_rank_grow_with_the_logarithm_of_the_ranks(
    ranks: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save(group: RankGroup) -> Any:
        exchanged = [
            group.all_gather_object((number, group.rank, "x" * size)) for number in range(EXCHANGES)
        ]
        return exchanged, group.broadcast_object(f"verdict of {group.rank}")

    results, sent = run_on(ranks, save, monkeypatch)
    for exchanged, verdict in results:
        assert exchanged == [
            [(number, 10 + rank, "x" * size) for rank in range(ranks)]
            for number in range(EXCHANGES)
        ]
        assert verdict == "verdict of 10"
    others = (ranks - 1).bit_length()  # a rank exchanges messages with at most so many
    assert max(sent.values()) <= (2 * EXCHANGES + 1) * others
    # twice per edge and exchange, once per edge and broadcast; a long content takes two messages
    assert sum(sent.values()) <= (2 * 2 * EXCHANGES + 1) * (ranks - 1)


@on_each_rank(2)
def test_a_blocking_save_takes_five_exchanges(rank: int, model: Any, tmp_path: Any) -> None:
    engine = start(model, adamw(model), config_of(3))
    log = get_world_group().log
    before = log.num_issued
    engine.save_checkpoint(str(tmp_path))
    assert log.num_issued - before == EXCHANGES + 1


@on_each_rank(2)
def test_collectives_of_saves_and_loads_carry_their_numbers(rank: int, model: Any) -> None:
    """Those of another save, which a rank begins after an exception, never match them."""
    world = get_world_group()
    for number, what in enumerate(("save", "load"), 1):
        with world.during(what):
            assert world.all_gather_object(rank, "ranks") == [0, 1]
        assert world.log.recent[-1].endswith(f"exchange of ranks in {what} {number}")
    world.all_gather_object(rank, "ranks")
    assert world.log.recent[-1] == "exchange of ranks"
