"""Activations that leave a GPU and come back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import hf_zero
from hf_zero.activations.offload import Offload
from hf_zero.activations.policy import offload_of
from hf_zero.config import ActivationOffload
from tests.helpers.models import seeded

pytestmark = pytest.mark.usefixtures("process_group")
ROWS, WIDTH, DEPTH, STEPS = 512, 256, 8, 3
ACTIVATION = ROWS * WIDTH * 4
SLOW = 4_000_000  # cycles that a delayed stream sleeps at most: some 2 ms
SMALL = {"min_bytes": 1, "in_flight_bytes": 2 * ACTIVATION}

SECTIONS: dict[str, dict[str, Any]] = {
    "offload": {"activation_offload": SMALL},
    "offload, one at a time": {"activation_offload": {"min_bytes": 1, "in_flight_bytes": 1}},
    "offload, pageable": {"activation_offload": {**SMALL, "pin_memory": False}},
    "blocks": {"activation_checkpointing": {"blocks": True}},
    "blocks, inputs offloaded": {
        "activation_checkpointing": {"blocks": True, "cpu_checkpointing": True},
        "activation_offload": SMALL,
    },
    "selective, offloaded": {
        "activation_checkpointing": {"blocks": "selective"},
        "activation_offload": SMALL,
    },
}


class Block(nn.Module):
    """Slices of one buffer, and dropout; memory that is free is overwritten with NaN at once."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(nn.functional.layer_norm(x, (WIDTH,))).split(WIDTH, -1)
        h = torch.relu(self.out(torch.sigmoid(q) * torch.tanh(k) + v))
        y = x + nn.functional.dropout(h, 0.1, self.training)
        trample(x.device)
        return y


def trample(device: torch.device) -> None:
    for scale in (1, 3):
        torch.full((scale * ACTIVATION,), 255, dtype=torch.uint8, device=device)


class Net(nn.Module):
    def __init__(self, depth: int = DEPTH) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).float().square().mean()


def train(more: dict[str, Any], stage: int = 2, precision: str = "fp32") -> list[torch.Tensor]:
    """Losses, gradients and weights of :data:`STEPS` steps of two micro-batches."""
    model = seeded(Net)
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": precision == "bf16"},
        **more,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, foreach=False)
    engine = hf_zero.initialize(model=model, optimizer=optimizer, config=config)[0]
    found: list[torch.Tensor] = []
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    for step in range(2 * STEPS):
        torch.manual_seed(step)
        x = torch.randn(ROWS, WIDTH, device="cuda", dtype=dtype)
        loss = engine(x)
        engine.backward(loss)
        trample(x.device)
        found.append(loss.detach())
        if step % 2:
            found += [hf_zero.safe_get_full_grad(p).clone() for p in model.parameters()]
        engine.step()
    found += [hf_zero.safe_get_full_fp32_param(p).clone() for p in model.parameters()]
    engine.destroy()
    return found


def assert_same_bits(got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    for number, (one, other) in enumerate(zip(got, want, strict=True)):
        assert torch.equal(one, other), f"tensor {number}: off by {(one - other).abs().max()}"


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("name", SECTIONS)
def test_the_same_bits(name: str, stage: int, precision: str) -> None:
    assert_same_bits(train(SECTIONS[name], stage, precision), train({}, stage, precision))


def alone() -> Offload:
    here = torch.device("cuda", torch.cuda.current_device())
    away = offload_of(here, ActivationOffload(True, 1, 2 * ACTIVATION))
    assert away is not None
    return away


def run(model: nn.Module, x: torch.Tensor, away: Offload | None) -> torch.Tensor:
    if away is None:
        return model(x)
    away.begin({t.untyped_storage()._cdata for t in model.parameters()})
    try:
        return model(x)
    finally:
        away.end()


def test_the_host_waits_for_nothing() -> None:
    """Four blocks: the driver queues about a thousand kernels and fewer copies, and then waits."""
    model, away = seeded(lambda: Net(4)).cuda(), alone()
    x = torch.randn(ROWS, WIDTH, device="cuda")
    for _ in range(2):
        run(model, x, away).backward()  # memory is taken and pinned
    torch.cuda.synchronize()
    done = torch.cuda.Event()
    torch.cuda._sleep(100 * SLOW)
    done.record()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(model, x, away).backward()
        assert not done.query(), "forward and backward were launched while the device slept"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    away.close()
