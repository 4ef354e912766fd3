"""Faults of an engine and of scripts: the first step in which they act, and their cause."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_zero
from hf_zero.parity.causes import OF_ENGINE, cause_of_failure, lines_that_read_gradients
from hf_zero.parity.comparison import is_other_batch
from hf_zero.parity.recorder import fingerprint
from hf_zero.zero.gather.schedule import Schedule
from hf_zero.zero.step.gradient_norm import GradientNorm
from hf_zero.zero.step.optimizer_step import OptimizerStep
from tests.parity.loops import FEATURES, ROWS, answer, config, stack


def factor(patch: pytest.MonkeyPatch) -> None:
    squares = GradientNorm._own_squares
    patch.setattr(GradientNorm, "_own_squares", lambda self, *args: squares(self, *args) * 1.001)


def stale_weights(patch: pytest.MonkeyPatch) -> None:
    """The third refresh is left out: the forward of the next step reads old weights."""
    refresh, calls = Schedule.refresh, [0]

    def third_is_lost(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls[0] += bool(kwargs.get("after_step"))
        return (
            None if kwargs.get("after_step") and calls[0] == 3 else refresh(self, *args, **kwargs)
        )

    patch.setattr(Schedule, "refresh", third_is_lost)


def wrong_clipping(patch: pytest.MonkeyPatch) -> None:
    update = OptimizerStep.update

    def at_twice_the_norm(self: Any, *args: Any) -> Any:
        before = self.gradient.max_norm
        self.gradient.clip_to(2 * before)
        try:
            return update(self, *args)
        finally:
            self.gradient.clip_to(before)

    patch.setattr(OptimizerStep, "update", at_twice_the_norm)


FAULTS: dict[Callable[[pytest.MonkeyPatch], None], tuple[str, int]] = {
    factor: ("gradient norm", 1),
    stale_weights: ("weights of the forward", 3),
    wrong_clipping: ("weights", 1),
}
"""What is named first, and the step."""


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_is_named_in_the_step_where_it_acts(
    fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    # not threads: a patch counts the calls of one rank
    settings = config(2, optimizer={"type": "SGD", "params": {"lr": 0.1}})
    settings["bf16"] = {"enabled": fault is stale_weights}
    fault(monkeypatch)
    result = answer(1, settings)
    what, step = FAULTS[fault]
    first = result.outcome.first
    assert first is not None and (first.what, first.step) == (what, step), str(result)
    assert result.cause == OF_ENGINE
    assert ("unit: " in str(result)) == what.startswith("weights")


def writes_on_one_rank(engine: Any, step: int) -> None:
    if step == 1 and engine.global_rank == 1:
        with torch.no_grad():
            next(engine.module.parameters()).mul_(1.5)


def test_a_write_on_one_rank_is_the_cause() -> None:
    result = answer(2, config(0), spoil=writes_on_one_rank)
    assert not result.equal
    assert "with torch, rank 1 has other weights of 0.0.weight" in str(result), str(result)


def test_other_batches_are_the_cause() -> None:
    generator = torch.Generator().manual_seed(0)  # goes on from run to run
    model = stack()

    def train() -> None:
        engine, *_ = hf_zero.initialize(model=copy.deepcopy(model), config=config(1))
        for _ in range(20):
            batch = torch.randn(ROWS, FEATURES, generator=generator)
            engine.backward(engine(batch).square().mean())
            engine.step()

    result = hf_zero.parity(train)
    assert "rank 0 reads other batches in step 1" in str(result)


@pytest.mark.parametrize(
    ("precision", "size"), [("fp32", 1.0), ("fp32", 1e-4), ("bf16", 1.0), ("bf16", 0.02)]
)
def test_draws_without_a_seed_are_the_cause(precision: str, size: float) -> None:
    """They change losses alone, and are no rounding, however small."""
    generator, model = torch.Generator().manual_seed(0), stack()  # goes on from run to run
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16

    def train() -> None:
        settings = config(1, precision)
        engine, *_ = hf_zero.initialize(model=copy.deepcopy(model), config=settings)
        rows = torch.ones(ROWS, FEATURES, dtype=dtype)
        for _ in range(20):
            target = 2 + size * torch.randn(ROWS, 2, generator=generator)
            engine.backward((engine(rows).float() - target).square().mean())
            engine.step()

    result = hf_zero.parity(train)
    assert not result.equal, str(result)
    assert "cause: two runs of torch alone differ as well" in str(result), str(result)


def test_inputs_that_another_model_computes_are_the_same_batch() -> None:
    rows = torch.randn(64, FEATURES)
    tokens = torch.arange(12)
    one = fingerprint((rows, {"tokens": tokens}))
    assert not is_other_batch(fingerprint((rows * (1 + 1e-5), {"tokens": tokens})), one)
    assert is_other_batch(fingerprint((rows.flip(0), {"tokens": tokens})), one)
    assert is_other_batch(fingerprint((rows, {"tokens": tokens + 1})), one)
    assert is_other_batch(fingerprint(torch.full((3,), math.nan)), fingerprint(torch.ones(3)))


def test_lines_that_use_gradients(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    text = "(slope,) = torch.autograd.grad(out, x)\nfor p in model.parameters():\n    p.grad *= 2\n"
    script.write_text(text)
    assert [*lines_that_read_gradients(script)] == [3]


def test_a_run_that_fails_where_the_script_uses_gradients(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("loss.backward()\nfor p in model.parameters():\n    p.grad.mul_(2)\n")
    for failed in ('  File "/somewhere/train.py", line 3, in f\n', "  at train.py:3\n  (hf-zero"):
        cause = cause_of_failure(f"Its error:\n{failed}", script)
        assert cause is not None and "uses gradients itself (train.py, line 3)" in cause
        assert cause_of_failure(failed.replace("3", "1"), script) is None
