"""Activations that leave a GPU and come back: same bits whatever is slow, less memory, and a host
that waits for nothing.

tests/activations/test_offload.py shows the same logic on the CPU, with copies that run as late
as they may.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn

import hf_zero
from hf_zero.activations.host_copies import Streams
from hf_zero.activations.offload import Offload
from hf_zero.activations.policy import offload_of
from hf_zero.config.activations import ActivationOffload
from hf_zero.deepspeed import activation_checkpointing
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


@pytest.fixture
def delays(monkeypatch: pytest.MonkeyPatch) -> random.Random:
    """Before and after each copy, one of the streams sleeps for a while, at random."""
    drawn = random.Random(0)

    def nap(owner: Streams) -> None:
        for stream in (owner._stream, torch.cuda.current_stream()):
            if drawn.random() < 0.3:
                with torch.cuda.stream(stream):
                    torch.cuda._sleep(drawn.randrange(SLOW))

    def napping(function: Any) -> Any:
        def napped(owner: Streams, *args: Any) -> Any:
            nap(owner)
            answer = function(owner, *args)
            nap(owner)
            return answer

        return napped

    for name in ("send", "leave", "reload"):
        monkeypatch.setattr(Streams, name, napping(getattr(Streams, name)))
    return drawn


@pytest.mark.parametrize("name", ["offload", "offload, one at a time", "blocks, inputs offloaded"])
def test_the_same_bits_whoever_is_slow(name: str, delays: random.Random) -> None:
    want = train({})
    for round_ in range(20):
        delays.seed(round_)
        assert_same_bits(train(SECTIONS[name], stage=2 + round_ % 2), want)


def alone() -> Offload:
    here = torch.device("cuda", torch.cuda.current_device())
    away = offload_of(here, ActivationOffload(True, 1, 2 * ACTIVATION))
    assert away is not None
    return away


def grads_of(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def run(model: nn.Module, x: torch.Tensor, away: Offload | None) -> torch.Tensor:
    if away is None:
        return model(x)
    away.begin({t.untyped_storage()._cdata for t in model.parameters()})
    try:
        return model(x)
    finally:
        away.end()


def test_graphs_that_are_dropped_leave_nothing_behind(delays: random.Random) -> None:
    """Backwards that stop half way or never come: regions are used again under copy."""
    model, away = seeded(Net).cuda(), alone()
    x = torch.randn(ROWS, WIDTH, device="cuda")
    model.eval()
    run(model, x, None).backward()
    want = grads_of(model)
    for round_ in range(20):
        delays.seed(round_)
        model.zero_grad()
        run(model, x, away)
        half = run(model, x, away)
        torch.autograd.grad(half, list(model.blocks[DEPTH // 2].parameters()))
        del half
        run(model, x, away).backward()
        assert_same_bits(grads_of(model), want)
    away.close()


def test_a_second_backward_and_another_stream(delays: random.Random) -> None:
    model, away = seeded(Net).cuda().eval(), alone()
    x = torch.randn(ROWS, WIDTH, device="cuda")
    run(model, x, None).backward()
    want = grads_of(model)
    side = torch.cuda.Stream()
    for round_ in range(5):
        delays.seed(round_)
        model.zero_grad()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            loss = run(model, x, away)
            loss.backward(retain_graph=True)
            model.zero_grad()
            loss.backward()
        torch.cuda.current_stream().wait_stream(side)
        assert_same_bits(grads_of(model), want)
        torch.cuda.synchronize()
    away.close()


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


def peak(more: dict[str, Any]) -> int:
    """Bytes above what lies there before the third step's forward."""
    model = seeded(lambda: Net(24))
    config = {"train_micro_batch_size_per_gpu": 16 * ROWS, "zero_optimization": {"stage": 2}}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = hf_zero.initialize(model=model, optimizer=optimizer, config={**config, **more})[0]
    x = torch.randn(16 * ROWS, WIDTH, device="cuda")
    for _ in range(3):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        engine.backward(engine(x))
        torch.cuda.synchronize()
        most = torch.cuda.max_memory_allocated() - before
        engine.step()
    engine.destroy()
    return most


def test_peaks() -> None:
    away = {"min_bytes": 1 << 20, "in_flight_bytes": 64 << 20}
    plain = peak({})
    blocks = peak({"activation_checkpointing": {"blocks": True}})
    half = peak({"activation_checkpointing": {"blocks": 12}})
    selective = peak({"activation_checkpointing": {"blocks": "selective"}})
    offload = peak({"activation_offload": away})
    inputs = {"activation_checkpointing": {"blocks": True, "cpu_checkpointing": True}}
    both = peak({**inputs, "activation_offload": {**away, "enabled": False}})
    assert blocks < half < plain and selective < plain
    assert offload < plain / 2
    assert both < blocks


def test_checkpoints_of_a_script_in_host_memory(delays: random.Random) -> None:
    model = seeded(Net).cuda()

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        torch.manual_seed(1)
        x = torch.randn(ROWS, WIDTH, device="cuda")
        for block in model.blocks:
            x = activation_checkpointing.checkpoint(block, x)
        model.head(x).square().mean().backward()
        return grads_of(model)

    activation_checkpointing.configure()
    want = gradients()
    away = {"activation_offload": {"min_bytes": 1, "in_flight_bytes": ACTIVATION}}
    activation_checkpointing.configure(None, away, checkpoint_in_cpu=True)
    try:
        for round_ in range(5):
            delays.seed(round_)
            assert_same_bits(gradients(), want)
    finally:
        torch.cuda.synchronize()
        activation_checkpointing.configure()


@pytest.mark.parametrize("blocks", [None, True, "selective"])
def test_compiled_blocks(blocks: Any) -> None:
    """With inductor around the checkpoints; no dropout, which a compiler draws otherwise."""

    def gradients(compiled: bool) -> list[torch.Tensor]:
        model = seeded(Net)
        config = {
            "train_micro_batch_size_per_gpu": ROWS,
            "zero_optimization": {"stage": 3},
            "activation_offload": SMALL,
            "activation_checkpointing": {"blocks": blocks},
        }
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine = hf_zero.initialize(model=model, optimizer=optimizer, config=config)[0]
        engine.eval()
        if compiled:
            engine.compile()
        for step in range(2):
            torch.manual_seed(step)
            engine.backward(engine(torch.randn(ROWS, WIDTH, device="cuda")))
            found = [hf_zero.safe_get_full_grad(p).clone() for p in model.parameters()]
            engine.step()
        engine.destroy()
        return found

    for got, want in zip(gradients(compiled=True), gradients(compiled=False), strict=True):
        # TF32 is off: other orders of sums alone
        assert (got - want).norm() <= 2e-3 * want.norm() + 1e-7
