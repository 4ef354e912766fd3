"""Right engines in 16 bits over gloo: equal to the last bit, or as far apart as they round."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import hf_zero
from hf_zero.parity.reference import Reference
from tests.helpers.processes import run_processes

WIDTH, ROWS = 32, 16
STEPS = 8


def answers(rank: int, settings: list[dict[str, Any]], adds_in_16_bits: bool) -> list[Any]:
    """Return of each of ``settings`` the answer, and whether rounding had to be measured; the
    number of each is its seed. ``adds_in_16_bits``: as over NCCL.
    """
    torch.set_num_threads(1)
    if adds_in_16_bits:
        Reference._adds_in_fp32 = False
    return [compared(rank, seed, config) for seed, config in enumerate(settings)]


def compared(rank: int, seed: int, config: dict[str, Any]) -> tuple[str, bool]:
    def train() -> None:
        torch.manual_seed(seed)
        blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(3)]
        model = nn.Sequential(*blocks, nn.Linear(WIDTH, 2))
        engine, *_ = hf_zero.initialize(model=model, config=config)
        generator = torch.Generator().manual_seed(7 * seed + rank)
        for _ in range(STEPS):
            batch = torch.randn(ROWS, WIDTH, generator=generator).bfloat16()
            engine.backward((engine(batch).float() - 1).square().mean())
            engine.step()

    answer = hf_zero.parity(train, steps=STEPS)
    return str(answer), answer.measured


def config(stage: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": ROWS,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    }


def test_sums_over_gloo_are_the_same_numbers() -> None:
    for text, measured in run_processes(2, answers, [config(of) for of in range(4)], False)[0]:
        assert text.startswith("equal to torch for 8 steps"), text
        assert not measured, text


@pytest.mark.long
def test_runs_that_round_independently_are_equal() -> None:
    """Weights of both runs differ in the last places of 16 bits, and so do single losses."""
    found = run_processes(2, answers, [config(stage) for stage in (2, 3) * 6], True)[0]
    assert all(measured for _, measured in found)
    assert not [text for text, _ in found if not text.startswith("equal to torch for 8 steps")]
