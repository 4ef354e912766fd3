"""Groups of a pipeline's messages on devices whose communicators are made by the first message."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from hf_zero.distributed import flat_mesh
from hf_zero.distributed.collective_log import CollectiveStats
from hf_zero.distributed.parallel_dims import ParallelDims
from hf_zero.distributed.watchdog import Watchdog
from hf_zero.parallel.pipeline import stage_messages
from hf_zero.parallel.pipeline.stage_messages import StageMessages

DEVICE = torch.device("cuda", 0)


def test_the_communicator_is_made_with_its_group(monkeypatch):
    """All ranks of a pipeline have to come to it, and messages are between two of them."""
    dims, reduced = ParallelDims.over(6, pipeline=3), list[Any]()
    world = SimpleNamespace(watchdog=Watchdog(enabled=False))
    groups: Any = SimpleNamespace(
        dims=dims, rank=3, device=DEVICE, stats={"pipeline": CollectiveStats()}
    )
    bound = []

    def new_group(ranks, timeout, backend, device_id):
        bound.append((backend, device_id))
        return tuple(ranks)

    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, group: reduced.append((tensor, group)))
    monkeypatch.setattr(torch, "zeros", lambda size, device: (size, device))
    monkeypatch.setattr(stage_messages, "get_world_group", lambda: world)
    monkeypatch.setattr(stage_messages, "backend_serving", lambda device: "gloo")
    monkeypatch.setattr(stage_messages, "group_backend", lambda device: "nccl")
    monkeypatch.setattr(stage_messages, "backends_of_parts", lambda: "cpu:gloo,cuda:nccl")
    environ: dict[str, str] = {}
    monkeypatch.setattr(os, "environ", environ)
    messages = StageMessages.over(groups, "engine 1", 5.0)
    assert environ == {stage_messages.WARNING: "0"}
    assert messages.ranks == [1, 3, 5]
    assert reduced == [((1, DEVICE), (1, 3, 5))]
    # NCCL would make others for messages that are in no batch
    assert bound == [("cpu:gloo,cuda:nccl", DEVICE)] * 2


def test_the_host_needs_none(monkeypatch):
    monkeypatch.setattr(dist, "all_reduce", None)
    flat_mesh.connect(None, (0, 1), torch.device("cpu"), Watchdog(enabled=False), "an axis")


def _messages():
    stats, watchdog = CollectiveStats(keep_log=True), Watchdog(enabled=False)
    return StageMessages([0, 1], 0, None, torch.device("cpu"), stats, watchdog, "engine 1", 5.0)


def _travel(sent, received):
    """One operation on each side, of the same bytes."""
    (out,), (into,) = sent, received
    assert (out.op, into.op) == (dist.isend, dist.irecv)
    assert out.tensor.dtype == into.tensor.dtype == torch.uint8
    into.tensor.copy_(out.tensor)


def test_a_message_of_several_tensors_is_one_operation(monkeypatch):
    """The tensors differ in dtype, strides and shape; one is empty and one is None; there
    and back.
    """
    monkeypatch.setattr(
        dist, "P2POp", lambda op, tensor, **_: SimpleNamespace(op=op, tensor=tensor)
    )
    for name in ("backend_serving", "group_backend"):
        monkeypatch.setattr(stage_messages, name, lambda device: "gloo")
    headers: list[torch.Tensor] = []
    arrives = SimpleNamespace(wait=lambda: None, is_completed=lambda: True)

    def isend(header, **_):
        headers.append(header)
        return arrives

    def irecv(header, **_):
        header.copy_(headers.pop())
        return arrives

    monkeypatch.setattr(dist, "isend", isend)
    monkeypatch.setattr(dist, "irecv", irecv)
    hidden = torch.randn(3, 5, 7).transpose(0, 1).requires_grad_()
    mask = torch.rand(3, 5) < 0.5
    given = (hidden, None, mask, torch.empty(0, 4), torch.randn(5, dtype=torch.bfloat16))
    messages = _messages()
    sent = messages.send(1, given, False, "micro-batch 0")
    came, grads, single, received = messages.receive(1, "micro-batch 0")
    _travel(sent, received)
    assert grads == (True, False, False, False, False) and not single
    for mine, theirs in zip(came, given, strict=True):
        assert mine is theirs is None or torch.equal(mine, theirs)
    saved = came[4] * came[4].requires_grad_()
    came[0].zero_()  # a layer may change its input
    saved.sum().backward()
    assert torch.equal(came[4].grad, 2 * given[4])

    outputs = [torch.empty(2, 3), torch.empty(5, dtype=torch.float64)]
    gradients = [torch.randn(2, 3), torch.randn(5, dtype=torch.float64)]
    into, received = messages.receive_gradients(1, outputs, "micro-batch 0", False)
    _travel(messages.send_gradients(1, gradients, "micro-batch 0"), received)
    assert all(map(torch.equal, into, gradients))
    counted = [size for what, _, size in messages._stats.log if what.startswith("send_")]
    assert counted == [3 * 5 * 7 * 4 + 15 + 10, 6 * 4 + 5 * 8]
    assert messages.receive_gradients(1, [], "micro-batch 1", False) == ([], [])
