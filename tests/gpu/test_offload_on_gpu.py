"""Offload on one GPU: equal to the same training on the device, in pinned memory of the size asked
for. Who waits for whom, tests/late shows.

tests/ranks/test_offload.py shows the same numbers on the CPU, where transfers are copies.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_zero
from tests.helpers.models import Stack, seeded
from tests.helpers.offloads import WAYS, offload, stages_of
from tests.helpers.training import trainable

pytestmark = pytest.mark.usefixtures("process_group")
STEPS = 5
CELLS = [(way, stage) for way in WAYS for stage in stages_of(way)]


def wide() -> torch.nn.Module:
    """Blocks of several pieces, so that the staging memory is used again and again."""
    return seeded(lambda: Stack(depth=4, width=128))


def batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(4, 7, generator=generator).cuda() for _ in range(STEPS)]


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(trainable(model), lr=1e-3, eps=1e-6)


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    """Additions and products alone, which every device rounds alike."""
    return torch.optim.SGD(trainable(model), lr=0.125, foreach=False, fused=False)


Make = Callable[[torch.nn.Module], torch.optim.Optimizer]


def train(
    section: dict[str, Any], precision: str = "fp32", make: Make = adamw, clip: float = 1.0
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Weights (fp32, on the CPU) and losses after :data:`STEPS` steps."""
    model = wide()
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": section,
        "gradient_clipping": clip,
        "bf16": {"enabled": precision == "bf16"},
    }
    engine = hf_zero.initialize(model=model, optimizer=make(model), config=config)[0]
    losses = []
    for inputs in batches():
        loss = engine(inputs.bfloat16() if precision == "bf16" else inputs).float().square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    named = [(name, hf_zero.safe_get_full_fp32_param(p)) for name, p in model.named_parameters()]
    weights = {name: whole.float().cpu().clone() for name, whole in named}
    engine.destroy()
    return weights, [loss.item() for loss in losses]


@pytest.mark.parametrize("way, stage", CELLS)
def test_the_same_additions_give_the_same_bits(way: str, stage: int, tmp_path: Path) -> None:
    """Unclipped, so that no norm is summed in another order."""
    want, losses = train({"stage": stage}, make=sgd, clip=0.0)
    got, away = train(offload(way, stage, tmp_path), make=sgd, clip=0.0)
    assert away == losses
    for name, weights in want.items():
        assert torch.equal(got[name], weights), name
