"""Adam without bias correction: the formula written out, by torch's loops, the host kernels and the
flat ones, at every stage and offloaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from hf_zero.deepspeed import optimizers
from hf_zero.errors import ConfigError
from hf_zero.ops import dispatch
from hf_zero.optim import Adam, CPUAdam
from hf_zero.optim.fused import FusedStep
from tests.helpers import oracle
from tests.helpers.checked_triton import checked_triton
from tests.helpers.engines import config_of, full_weights, start
from tests.helpers.stacks import by_hand, on_each_rank, on_ranks, squared
from tests.helpers.training import At

LR, BETAS, EPS, DECAY = 1e-2, (0.9, 0.999), 1e-6, 0.1


class ByHand(torch.optim.Optimizer):
    """The formula, a line per line."""

    def __init__(self, params: Any, decoupled: bool = True) -> None:
        super().__init__(params, {"decoupled": decoupled})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in (p for p in group["params"] if p.grad is not None):
                state, grad = self.state[param], param.grad
                if group["decoupled"]:
                    param.mul_(1 - LR * DECAY)
                else:
                    grad = grad + DECAY * param
                state["m"] = BETAS[0] * state.get("m", 0.0) + (1 - BETAS[0]) * grad
                state["v"] = BETAS[1] * state.get("v", 0.0) + (1 - BETAS[1]) * grad * grad
                param.sub_(LR * state["m"] / (state["v"].sqrt() + EPS))


def settings(decoupled: bool) -> dict[str, Any]:
    return {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": DECAY, "bias_correction": False}


WAYS: list[dict[str, Any]] = [{}, {"fused": True}, {"foreach": True}, {"foreach": False}]


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("way", [*WAYS, "cpu"])
def test_moments_count_as_they_are(way, decoupled):
    start = torch.randn(37, generator=torch.Generator().manual_seed(0))
    ours, plain = (nn.Parameter(start.clone()) for _ in range(2))
    if way == "cpu":
        optimizer: Any = CPUAdam([ours], **settings(decoupled), adamw_mode=decoupled)
    else:
        optimizer = Adam([ours], **settings(decoupled), decoupled_weight_decay=decoupled, **way)
    by = ByHand([plain], decoupled)
    for step in range(4):
        ours.grad, plain.grad = torch.sin(start * 3 + step), torch.sin(start * 3 + step)
        optimizer.step()
        by.step()
    torch.testing.assert_close(ours, plain, rtol=1e-6, atol=1e-6)
    assert optimizer.state[ours]["step"] == 4


def test_with_correction_it_is_torchs():
    start = torch.arange(5.0)
    ours, theirs = (nn.Parameter(start.clone()) for _ in range(2))
    for optimizer in (Adam([ours]), torch.optim.Adam([theirs])):
        for _ in range(2):
            (ours if isinstance(optimizer, Adam) else theirs).grad = start - 2
            optimizer.step()
    assert torch.equal(ours, theirs)


@pytest.fixture(params=["torch's step", "one launch"])
def launches(request: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    made: list[Any] = []
    if request.param == "torch's step":
        yield made
        return
    step = FusedStep.step

    def counted(self: Any, *args: Any) -> Any:
        made.append(step(self, *args))
        return made[-1]

    monkeypatch.setattr(FusedStep, "step", counted)
    monkeypatch.setattr(dispatch, "wanted", lambda name, kernels, device: dispatch.runs_on(device))
    monkeypatch.delenv("HF_ZERO_TRITON", raising=False)
    with checked_triton(poison=False):
        yield made
    assert made


@pytest.mark.parametrize("stage", [1, 3])
def test_named_by_a_configuration_or_passed(stage, launches):
    want, _ = by_hand(lambda model: ByHand(model.parameters()), [[(1.0, 0)]] * 3, 2)
    params = settings(True) | {"betas": list(BETAS)}

    def run(rank, model, named):
        section = {"optimizer": {"type": "AdamW", "params": params}} if named else {}
        passed = None if named else optimizers.FusedAdam(model.parameters(), **settings(True))
        engine = start(model, passed, config_of(stage, **section))
        for step in range(3):
            engine.backward(squared(engine, At(step, 0, rank)))
            engine.step()
        assert engine.bound.scalars()[0]["step"] == 3
        return full_weights(engine)

    for named in (True, False):
        for weights in on_ranks(2, run, named):
            oracle.compare_tensors("weights", weights, want, floor=oracle.ADAM_ROUNDING)


@pytest.mark.parametrize("kind", ["Adam", "DeepSpeedCPUAdam"])
def test_offloaded(kind):
    want, _ = by_hand(lambda model: ByHand(model.parameters()), [[(1.0, 0)]] * 3, 2)
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    section = {"type": kind, "params": settings(True) | {"betas": list(BETAS)}}

    def run(rank, model):
        engine = start(model, None, config_of(2, zero_optimization=zero, optimizer=section))
        for step in range(3):
            engine.backward(squared(engine, At(step, 0, rank)))
            engine.step()
        return full_weights(engine)

    oracle.compare_tensors("weights", on_ranks(2, run)[0], want, floor=oracle.ADAM_ROUNDING)


def test_a_checkpoint_goes_on_offloaded_and_not(tmp_path):
    want, _ = by_hand(lambda model: ByHand(model.parameters()), [[(1.0, 0)]] * 4, 2)
    section = {"type": "AdamW", "params": settings(True) | {"betas": list(BETAS)}}

    def run(rank, model, steps, device):
        zero = {"stage": 2, "offload_optimizer": {"device": device}}
        engine = start(model, None, config_of(2, zero_optimization=zero, optimizer=section))
        if steps[0]:
            engine.load_checkpoint(tmp_path)
        for step in steps:
            engine.backward(squared(engine, At(step, 0, rank)))
            engine.step()
        engine.save_checkpoint(tmp_path)
        weights = full_weights(engine)
        engine.destroy()
        return weights

    on_ranks(2, run, range(2), "none")
    on_ranks(2, run, range(2, 3), "cpu")
    got = on_ranks(2, run, range(3, 4), "none")[0]
    oracle.compare_tensors("weights", got, want, floor=oracle.ADAM_ROUNDING)


def test_a_step_that_overflows_is_not_counted():
    parameter = nn.Parameter(torch.ones(4))
    optimizer: Any = Adam([parameter], bias_correction=False, fused=True)
    for found in (0.0, 1.0, 0.0):
        parameter.grad = torch.ones(4)
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(1.0), torch.tensor(found)
        optimizer.step()
    assert optimizer.state[parameter]["step"] == 2


@on_each_rank(1)
def test_not_in_one_bit(rank, model):
    optimizer = optimizers.FusedAdam(model.parameters(), bias_correction=False)
    one_bit = {"bits": 1, "freeze_step": 2}
    with pytest.raises(ConfigError, match="bias_correction: a group leaves it out"):
        start(model, optimizer, config_of(1, compressed_communication=one_bit))
