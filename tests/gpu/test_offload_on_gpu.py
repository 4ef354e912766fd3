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


# ---- bytes ----


def peak_of(section: dict[str, Any]) -> tuple[int, int]:
    """Most bytes of the GPU in some bf16 steps of 50M parameters, and the number of elements."""
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    model = seeded(lambda: Stack(depth=12, width=1024)).bfloat16()
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": section,
        "bf16": {"enabled": True},
    }
    engine = hf_zero.initialize(model=model, optimizer=adamw(model), config=config)[0]
    torch.cuda.reset_peak_memory_stats()
    for inputs in batches():
        engine.backward(engine(inputs.bfloat16()).float().square().mean())
        engine.step()
    peak = torch.cuda.max_memory_allocated() - before
    numel = sum(flat.layout.numel for flat in engine.flats)
    engine.destroy()
    return peak, numel


def test_offload_takes_its_state_off_the_gpu(tmp_path: Path) -> None:
    """Parameters stay (2 bytes), and gradients of some units; with parameters away, a few units."""
    whole, numel = peak_of({"stage": 2})
    unit = numel // 12
    assert whole > 16 * numel
    away, _ = peak_of(offload("optimizer on cpu", 2, tmp_path, buffer_size=1 << 20))
    assert away < 2 * numel + 2 * 9 * unit + (8 << 20)
    nothing, _ = peak_of(offload("all on cpu", 3, tmp_path, buffer_size=1 << 20))
    assert nothing < 2 * 14 * unit + (8 << 20)
