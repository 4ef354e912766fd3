"""The engine on one GPU: equal to plain PyTorch there, and no step waits for the device."""

from __future__ import annotations

import copy

import pytest
import torch

import hf_zero
from hf_zero.ops import dispatch
from tests.helpers.engines import STAGES
from tests.helpers.stacks import stack

STEPS = 5
KERNELS = ["off", pytest.param("auto", id="compiled")]
pytestmark = pytest.mark.usefixtures("process_group")


def batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(4, 7, generator=generator).cuda() for _ in range(STEPS)]


def loss_of(model, inputs: torch.Tensor) -> torch.Tensor:
    return model(inputs.to(next(model.parameters()).dtype)).float().square().mean()


def plain(model, precision: torch.dtype) -> list[float]:
    """fp32 master weights beside ``precision`` ones, in one process."""
    master = copy.deepcopy(model).cuda()
    working = copy.deepcopy(master).to(precision)
    optimizer = torch.optim.AdamW(master.parameters(), lr=1e-3, eps=1e-6, fused=True)
    losses = []
    for inputs in batches():
        loss = loss_of(working, inputs)
        loss.backward()
        losses.append(loss.item())
        for whole, small in zip(master.parameters(), working.parameters()):
            whole.grad, small.grad = small.grad.float(), None
        torch.nn.utils.clip_grad_norm_(master.parameters(), 1.0)
        optimizer.step()
        with torch.no_grad():
            for whole, small in zip(master.parameters(), working.parameters()):
                small.copy_(whole)
    return losses


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("precision, tolerance", [("fp32", 1e-5), ("bf16", 2e-2)])
@pytest.mark.parametrize("stage", STAGES)
def test_losses_equal_the_plain_loop(stage, precision, tolerance, kernels):
    model = stack()
    want = plain(model, torch.bfloat16 if precision == "bf16" else torch.float32)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 1.0,
        "bf16": {"enabled": precision == "bf16"},
        "kernels": kernels,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6)
    engine = hf_zero.initialize(model=model, optimizer=optimizer, config=config)[0]
    losses = []
    for inputs in batches():
        loss = (
            loss_of(engine, inputs)
            if precision == "fp32"
            else engine(inputs.bfloat16()).float().square().mean()
        )
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    assert losses == pytest.approx(want, rel=tolerance)
    if kernels == "auto":
        assert engine.bound._fused._tables and not dispatch.broken()
    engine.destroy()


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("stage", STAGES)
def test_a_step_never_waits_for_the_device(stage, kernels):
    model = stack()
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "kernels": kernels,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine = hf_zero.initialize(model=model, optimizer=optimizer, config=config)[0]
    data = [inputs.bfloat16() for inputs in batches()]
    for number, inputs in enumerate(data):
        if number == 2:  # the first steps record orders and make optimizer state
            torch.cuda.set_sync_debug_mode("error")
        try:
            optimizer.param_groups[0]["lr"] *= 0.9  # uploaded anew
            engine.backward(engine(inputs).float().square().mean())
            engine.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert engine.get_global_grad_norm() > 0
    engine.destroy()
