"""Groups of a pipeline's messages on devices whose communicators are made by the first message."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hf_zero.distributed import dim_maker, stage_messages
from hf_zero.distributed.collective_log import CollectiveStats
from hf_zero.distributed.parallel_dims import ParallelDims
from hf_zero.distributed.stage_messages import StageMessages
from hf_zero.distributed.watchdog import Watchdog

DEVICE = torch.device("cuda", 0)


def test_the_communicator_is_made_with_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks of a pipeline have to come to it, and messages are between two of them."""
    dims, reduced = ParallelDims.over(6, pipeline=3), list[Any]()
    world = SimpleNamespace(watchdog=Watchdog(enabled=False))
    groups: Any = SimpleNamespace(
        dims=dims, rank=3, device=DEVICE, stats={"pipeline": CollectiveStats()}
    )
    bound = []

    def new_group(
        ranks: list[int], timeout: Any, backend: str, device_id: torch.device
    ) -> tuple[int, ...]:
        bound.append((backend, device_id))
        return tuple(ranks)

    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, group: reduced.append((tensor, group)))
    monkeypatch.setattr(torch, "zeros", lambda size, device: (size, device))
    monkeypatch.setattr(stage_messages, "get_world_group", lambda: world)
    monkeypatch.setattr(stage_messages, "backend_serving", lambda device: "gloo")
    monkeypatch.setattr(stage_messages, "group_backend", lambda device: "nccl")
    monkeypatch.setattr(stage_messages, "backends_of_parts", lambda: "cpu:gloo,cuda:nccl")
    messages = StageMessages.over(groups, "engine 1", 5.0)
    assert messages.ranks == [1, 3, 5]
    assert reduced == [((1, DEVICE), (1, 3, 5))]
    # NCCL would make others for messages that are in no batch
    assert bound == [("cpu:gloo,cuda:nccl", DEVICE)] * 2


def test_the_host_needs_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "all_reduce", None)
    dim_maker.connect(None, (0, 1), torch.device("cpu"), Watchdog(enabled=False), "an axis")
