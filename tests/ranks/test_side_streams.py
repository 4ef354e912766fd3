"""Forwards on a stream of their own: what takes their gradients in waits for that stream."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hf_zero.device import kinds, streams
from tests.helpers.accelerators import PlayedStream, play_streams
from tests.helpers.engines import config_of, start
from tests.helpers.training import Plan, sgd


class Net(nn.Module):
    """Its second layer runs on ``side``, if there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.side: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            with streams.on_stream(self.side if index == 1 else None):
                x = layer(x).tanh()
        return x.sum()


@pytest.mark.parametrize("stage, accumulation", [(1, 1), (1, 2), (2, 1)])
def test_gradients_are_taken_in_after_the_stream_that_accumulated_them(
    stage, accumulation, monkeypatch
):
    net = Net()
    engine = start(net, sgd(net), config_of(stage, Plan(accumulation=accumulation)))
    played = play_streams(monkeypatch)
    net.side = PlayedStream(played.log, "side")
    monkeypatch.setattr(kinds, "is_host", lambda device: False)
    loss = engine(torch.randn(2, 64))
    played.log.clear()
    # autograd's thread is this one, and its current stream the one of the caller
    engine.backward(loss)
    assert played.log.count(("compute", "waits for", "side")) >= 1
    monkeypatch.undo()
    engine.destroy()
