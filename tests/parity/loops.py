"""A training loop for comparisons, over ranks that are threads."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import hf_zero
from hf_zero.parity.answers import Answer
from tests.helpers.ranks import run_ranks

FEATURES, ROWS = 12, 3
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def stack() -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.GELU()) for _ in range(3)]
    model = nn.Sequential(*blocks, nn.Linear(FEATURES, 2))
    model[1][0].weight = model[0][0].weight  # tied
    return model


def config(stage: int, precision: str = "fp32", accumulation: int = 1, **more: Any) -> dict:
    sections = {} if precision == "fp32" else {precision: {"enabled": True}}
    if precision == "fp16":
        sections["fp16"]["initial_scale_power"] = 20  # the first steps overflow
    return {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        **sections,
        **more,
    }


def loop(
    rank: int,
    model: nn.Module,
    settings: dict,
    plain: bool = False,
    spoil: Callable[[Any, int], object] = lambda engine, step: None,
) -> Callable[[], None]:
    """The function that trains a copy of ``model``; ``spoil(engine, step)`` runs before a step, and
    leaves it out if it returns True.
    """

    def train() -> None:
        engine, *_ = hf_zero.initialize(model=copy.deepcopy(model), config=settings)
        generator = torch.Generator().manual_seed(rank)
        dtype = DTYPES[engine.config.precision]
        for micro_step in range(400):
            batch = torch.randn(ROWS, FEATURES, generator=generator)
            loss = (engine(batch.to(dtype)).float() - 1).square().mean()
            if plain:
                loss.backward()
            else:
                engine.backward(loss)
            if not spoil(engine, micro_step):
                engine.step()

    return train


def answer(
    ranks: int,
    settings: dict,
    plain: bool = False,
    spoil: Callable[[Any, int], object] = lambda engine, step: None,
    **options: Any,
) -> Answer:
    """The answer of rank 0 of ``ranks``; that of the others is equal."""
    model = stack()

    def compare(rank: int) -> Answer:
        return hf_zero.parity(loop(rank, model, settings, plain, spoil), **options)

    first, *others = run_ranks(ranks, compare)
    assert all(str(other) == str(first) for other in others)
    return first
