"""Warnings about a training that goes wrong without an error: each once, of rank 0, and never
where nothing is wrong.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hf_zero.engine import Engine
from hf_zero.zero.step.nonfinite_warnings import SanityChecks
from tests.helpers.engines import config_of, start
from tests.helpers.host_syncs import HostSyncs
from tests.helpers.models import features
from tests.helpers.ranks import run_ranks
from tests.helpers.stacks import stack
from tests.helpers.training import Plan


def engine_of(
    model: nn.Module, stage: int = 2, precision: str = "fp32", accumulation: int = 1
) -> Engine:
    config = config_of(stage, Plan(accumulation=accumulation, precision=precision))
    engine: Engine = start(model, torch.optim.SGD(model.parameters(), lr=0.1), config)
    return engine


def loss_of(engine: Engine) -> torch.Tensor:
    loss: torch.Tensor = engine(features(0, 0, 0).to(engine.flats[0].dtype)).float().pow(2).mean()
    return loss


def of_finite(messages: list[str]) -> list[str]:
    return [message for message in messages if "Look at the learning rate" in message]


def diverges(rank: int, models: list[nn.Module], stage: int, precision: str) -> None:
    engine = engine_of(models[rank], stage, precision)
    for step in range(4):
        engine.backward(loss_of(engine) * (1.0 if step < 2 else float("nan")))
        with HostSyncs() as syncs:
            engine.step()
        assert not syncs.of("hf_zero")
    engine.destroy()


@pytest.mark.parametrize(("stage", "precision"), [(0, "fp32"), (2, "bf16"), (3, "fp32")])
def test_a_loss_that_is_not_finite_is_named_once(stage, precision, heard):
    run_ranks(2, diverges, [stack(), stack()], stage, precision)
    (message,) = of_finite(heard)
    assert message.startswith("step 3: the loss of rank 0 is nan and the gradient norm nan")
    assert "set_detect_anomaly(True)" in message and ("bf16" in message) is (precision == "bf16")


def one_rank_diverges(rank: int, models: list[nn.Module]) -> None:
    engine = engine_of(models[rank])
    engine.backward(loss_of(engine) * (float("inf") if rank == 1 else 1.0))
    engine.step()
    engine.destroy()


def test_the_norm_tells_of_the_other_ranks(heard):
    run_ranks(2, one_rank_diverges, [stack(), stack()])
    (message,) = of_finite(heard)
    assert message.startswith("step 1: the gradient norm is ")


def test_labels_that_are_all_ignored(heard):
    """Their loss is NaN, their gradient is zero."""
    engine = engine_of(stack())
    logits = engine(features(0, 0, 0))
    engine.backward(nn.functional.cross_entropy(logits, torch.full((len(logits),), -100)))
    engine.step()
    engine.destroy()
    (message,) = of_finite(heard)
    assert (
        "the loss of rank 0 is nan and the gradient norm 0; the weights are still finite" in message
    )


def test_an_overflow_in_fp16_is_the_scales_business(heard):
    engine = engine_of(stack(), precision="fp16")
    engine.backward(loss_of(engine) * float("inf"))
    engine.step()
    assert engine.skipped_steps == 1 and not of_finite(heard)
    engine.destroy()


def test_backwards_that_no_step_follows(heard):
    engine = engine_of(stack(), accumulation=2)
    for _ in range(12):
        engine.backward(loss_of(engine))
    (message,) = (text for text in heard if "without engine.step()" in text)
    assert message.startswith("9 backwards") and "inside a window of 2 micro-batches" in message
    engine.destroy()


def test_a_loop_that_collects_micro_batches_by_itself(heard):
    """It steps once a window: each step counts one micro-batch, and nothing is updated."""
    engine = engine_of(stack(), accumulation=3)
    for _ in range(4):
        for _ in range(3):
            engine.backward(loss_of(engine))
        engine.step()
    assert engine.global_steps == 1
    (message,) = (text for text in heard if "has counted one micro-batch of 3" in text)
    assert message.startswith("engine.step() after 3 backwards") and "steps to 1" in message
    engine.destroy()


def test_steps_after_each_backward_are_no_news(heard):
    engine = engine_of(stack(), accumulation=3)
    for _ in range(6):
        engine.backward(loss_of(engine))
        engine.step()
    assert engine.global_steps == 2
    assert not any("has counted one micro-batch" in text for text in heard)
    engine.destroy()


def test_a_window_of_another_size_is_known(heard):
    engine = engine_of(stack())
    engine.accumulation.steps = 12
    for _ in range(12):
        engine.backward(loss_of(engine))
        engine.step()
    assert engine.global_steps == 1
    engine.set_gradient_accumulation_boundary(True)
    for _ in range(12):
        engine.backward(loss_of(engine))
    engine.step()
    engine.destroy()
    assert not any("one micro-batch" in text or "backwards without" in text for text in heard)


def without_warning(engine: Engine) -> None:
    for _ in range(6):  # gradients of three losses
        for _ in range(3):
            engine.backward(loss_of(engine))
        engine.step()
    for _ in range(6):  # gradients alone
        engine.backward(loss_of(engine))
        engine.zero_grad()
        engine.backward(loss_of(engine))
    engine.step()
    engine.set_gradient_accumulation_boundary(False)
    for _ in range(12):  # a window as long as the script says
        engine.backward(loss_of(engine))
    engine.set_gradient_accumulation_boundary(True)
    engine.backward(loss_of(engine))
    engine.step()
    with engine.no_sync():
        for _ in range(12):
            engine.backward(loss_of(engine))
    engine.backward(loss_of(engine))
    engine.step()


def test_windows_that_a_script_chooses(heard):
    engine = engine_of(stack())
    without_warning(engine)
    engine.destroy()
    assert not any("without engine.step()" in text for text in heard)


class Event:
    over = False

    def query(self) -> bool:
        return self.over


def test_on_a_device_the_norm_is_read_when_its_copy_is_over(monkeypatch, heard):
    event, copies = Event(), []
    monkeypatch.setattr(
        "hf_zero.zero.step.nonfinite_warnings.streams.record_here",
        lambda device: copies.append(device) or event,
    )
    checks = SanityChecks(torch.device("cpu"), lambda: 1, "fp32", 0)
    nan: Any = torch.tensor(float("nan"), dtype=torch.float64)
    for step in (1, 2, 3):
        checks.on_norm(nan, step)
        assert len(copies) == 1 and not heard
    event.over = True
    checks.on_norm(nan, 4)
    checks.on_norm(nan, 5)
    (message,) = heard
    assert message.startswith("step 1: the gradient norm is nan") and len(copies) <= 2
