"""Adam without bias correction: the formula written out, by torch's loops, the host kernels and
the flat ones, at every stage and offloaded; one step of what is offloaded, flat by flat.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from hf_zero.deepspeed import optimizers
from hf_zero.errors import ConfigError
from hf_zero.offload.storage import MASTER
from hf_zero.offload.sub_group_update import Counted, Update
from hf_zero.ops import dispatch
from hf_zero.optim import Adam, CPUAdam
from hf_zero.optim.fused import FusedStep
from hf_zero.optim.segments import Segment, SegmentPart
from tests.helpers import oracle
from tests.helpers.checked_triton import checked_triton
from tests.helpers.engines import config_of, full_weights, start
from tests.helpers.stacks import by_hand, on_each_rank, on_ranks, run_steps

LR, BETAS, EPS, DECAY = 1e-2, (0.9, 0.999), 1e-6, 0.1


class ByHand(torch.optim.Optimizer):
    """The formula, a line per line."""

    def __init__(self, params, decoupled=True):
        super().__init__(params, {"decoupled": decoupled})

    @torch.no_grad()
    def step(self, closure=None):
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


def settings(decoupled):
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
def launches(request, monkeypatch):
    made: list[Any] = []
    if request.param == "torch's step":
        yield made
        return
    step = FusedStep.step

    def counted(self, *args):
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
        run_steps(engine, rank, range(3))
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
        run_steps(engine, rank, range(3))
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
        run_steps(engine, rank, steps)
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
def test_groups_in_one_bit_agree_on_the_correction(rank, model):
    groups = [
        {"params": [each], "bias_correction": bool(n)} for n, each in enumerate(model.parameters())
    ]
    one_bit = {"bits": 1, "freeze_step": 2}
    with pytest.raises(ConfigError, match="bias_correction: groups differ; give all the same"):
        start(model, optimizers.FusedAdam(groups), config_of(1, compressed_communication=one_bit))


SUB_GROUPS = 3


@dataclass(eq=False)
class Recorded:
    """States that tell what was held and what was announced, by flat and sub_group."""

    key: str
    events: list[tuple[str, str, int]] = field(default_factory=list)

    def acquire(self, sub_group):
        self.events.append(("held", self.key, sub_group))
        return {MASTER: torch.zeros(4)}

    def prefetch(self, sub_group):
        self.events.append(("ahead", self.key, sub_group))

    def release(self, sub_group):
        """Nothing was kept."""


class Stepping:
    """Stands for the optimizer: each flat has some sub_groups."""

    def __init__(self, flats):
        self._hosted = {
            flat.key: [
                Segment(0, 4 * n, 4 * n + 4, [SegmentPart(flat, 4 * n, 4 * n + 4, 0)], n)
                for n in range(SUB_GROUPS)
            ]
            for flat in flats
        }

    def offloaded_segments(self, flat):
        return self._hosted[flat.key]

    def count(self, flat, rules):
        return dict.fromkeys(self._hosted[flat.key], Counted())

    def step_sub_group(self, segment, held, grad, divisor, fresh):
        held[MASTER].add_(grad)


@pytest.mark.parametrize("order", ["abc", "cba", "cab", "bca"])
def test_what_was_updated_is_not_announced_again(order):
    """Flats may be updated in another order than they were announced in: what waits is what the
    next forward needs first.
    """
    events: list[tuple[str, str, int]] = []
    flats = {
        key: SimpleNamespace(
            key=key, storage=Recorded(key, events), grad=torch.ones(4 * SUB_GROUPS)
        )
        for key in "abc"
    }
    update = Update(Stepping(list(flats.values())), [None], [{}], 1.0, 0)
    for key in "abc":
        update.announce(flats[key])
    for key in order:
        update.run(flats[key], lambda start, stop: None, lambda start, stop, values: None)
    held = [event for event in events if event[0] == "held"]
    assert held == [("held", key, sub_group) for key in order for sub_group in range(SUB_GROUPS)]
    for place, (what, key, sub_group) in enumerate(events):
        assert what == "held" or ("held", key, sub_group) in events[place:]
    assert len(set(events)) == 2 * len(held) - 1, "all but the first were announced"
