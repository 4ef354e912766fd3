"""A rank that goes on after an exception: whether it tries the same batch again or skips it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hf_zero.distributed.recovery import SkippedBatches

BATCH = torch.arange(80.0).view(4, 20)
NAN = torch.full((4, 20), torch.nan)


def again(first: Any, second: Any) -> str:
    batches = SkippedBatches()
    batches.begin((), {"input": torch.zeros(3)})
    batches.begin((first,), {})
    batches.broke()
    batches.broke()  # of the backward and of the pass
    batches.begin((second,), {})
    return batches.said


SAME: list[Callable[[], tuple[Any, Any]]] = [
    lambda: (BATCH, BATCH),
    lambda: (BATCH, BATCH.clone()),
    lambda: (BATCH, BATCH[:2]),  # a smaller batch, and a shorter one
    lambda: (BATCH, BATCH[:, :5]),
    lambda: ({"x": BATCH}, {"x": BATCH}),
    lambda: (NAN, NAN.clone()),
    lambda: (BATCH.long(), BATCH.long()),
    lambda: (torch.zeros(0, 3), torch.zeros(0, 3)),
    lambda: ("no tensor", BATCH),
]
OTHER: list[Callable[[], tuple[Any, Any]]] = [
    lambda: (BATCH, BATCH + 1),
    lambda: (BATCH, torch.cat([BATCH[:3], BATCH[3:] + 1])),
    lambda: ({"x": BATCH.long()}, {"x": BATCH[1:].long()}),
    lambda: (BATCH > 7, BATCH > 8),
]


@pytest.mark.parametrize("batches", SAME)
def test_the_same_batch_or_its_beginning_is_not_skipped(batches: Any) -> None:
    assert again(*batches()) == ""


@pytest.mark.parametrize("batches", OTHER)
def test_another_batch_skips_the_one_that_broke(batches: Any) -> None:
    assert again(*batches()) == ", having skipped the batch of forward 2"


def test_nothing_is_skipped_without_an_exception_or_once_the_batch_is_gone() -> None:
    batches = SkippedBatches()
    for number in range(3):
        batches.begin((BATCH + number,), {})
    batches.broke()  # nothing holds that batch any more
    batches.begin((BATCH,), {})
    assert batches.said == ""
