"""The engine on one GPU: no step waits for the device."""

from __future__ import annotations

import pytest
import torch

import hf_zero
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
