"""Cases that fail, each in its own way, between others that do not: for test_parts.py."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
import torch.distributed as dist

from tests.nccl.cases import Answers, Case, Figures, Place
from tests.nccl.rows import named


def summed(place: Place) -> Any:
    value = torch.full((3,), place.rank + 1.0, device=place.device)
    dist.all_reduce(value)
    return value.cpu()


def is_three(answers: Answers, device: torch.device) -> Figures:
    for rank, value in enumerate(answers):
        assert torch.equal(value, torch.full((3,), 3.0)), f"rank {rank} has {value.tolist()}"
    return {"ranks": len(answers)}


def is_four(answers: Answers, device: torch.device) -> Figures:
    assert float(answers[0][0]) == 4.0, f"the sum is {answers[0].tolist()}"
    return {}


def raises(place: Place) -> Any:
    if place.rank == 1:
        raise ValueError("the case of rank 1 breaks")
    return summed(place)


def dies(place: Place) -> Any:
    if place.rank == 0:
        os._exit(7)
    return summed(place)


def hangs(place: Place) -> Any:
    time.sleep(3600 if place.rank == 1 else 0)
    return summed(place)


CASES = named(
    Case("right", summed, is_three),
    Case("another value", summed, is_four),
    Case("raises", raises, is_three),
    Case("dies", dies, is_three),
    Case("hangs", hangs, is_three),
    Case("right again", summed, is_three),
)
