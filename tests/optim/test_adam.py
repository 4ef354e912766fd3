"""Adam without bias correction: the formula written out, by torch's loops, the host kernels and
the flat ones, at every stage and offloaded; one step of what is offloaded, flat by flat.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hf_zero.deepspeed import optimizers
from hf_zero.errors import ConfigError
from hf_zero.optim import Adam, CPUAdam
from tests.helpers import oracle
from tests.helpers.cells import in_one_item
from tests.helpers.engines import config_of, full_weights, start
from tests.helpers.stacks import by_hand, on_each_rank, on_ranks, run_steps

LR, BETAS, EPS, DECAY = 1e-2, (0.9, 0.999), 1e-6, 0.1
SETTINGS = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": DECAY, "bias_correction": False}
PARAMS = SETTINGS | {"betas": list(BETAS)}  # as in a file


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


WAYS: list[Any] = [{"fused": True}, {"foreach": True}, {"foreach": False}, "cpu"]


@in_one_item([(way, decoupled) for way in WAYS for decoupled in (True, False)])
def test_moments_count_as_they_are(case):
    way, decoupled = case
    start = torch.randn(37, generator=torch.Generator().manual_seed(0))
    ours, plain = (nn.Parameter(start.clone()) for _ in range(2))
    if way == "cpu":
        optimizer: Any = CPUAdam([ours], **SETTINGS, adamw_mode=decoupled)
    else:
        optimizer = Adam([ours], **SETTINGS, decoupled_weight_decay=decoupled, **way)
    by = ByHand([plain], decoupled)
    for step in range(4):
        ours.grad, plain.grad = torch.sin(start * 3 + step), torch.sin(start * 3 + step)
        optimizer.step()
        by.step()
    torch.testing.assert_close(ours, plain, rtol=1e-6, atol=1e-6)
    assert optimizer.state[ours]["step"] == 4


def test_offloaded_from_a_checkpoint_that_was_not_and_back(tmp_path):
    def run(rank, model, steps, kind, device):
        zero = {"stage": 2, "offload_optimizer": {"device": device}}
        section = {"type": kind, "params": PARAMS}
        engine = start(model, None, config_of(2, zero_optimization=zero, optimizer=section))
        if steps[0]:
            engine.load_checkpoint(tmp_path)
        run_steps(engine, rank, steps)
        engine.save_checkpoint(tmp_path)
        weights = full_weights(engine)
        engine.destroy()
        return weights

    on_ranks(2, run, range(2), "AdamW", "none")
    on_ranks(2, run, range(2, 3), "AdamW", "cpu")
    found = on_ranks(2, run, range(3, 4), "AdamW", "none")[0]
    want, _ = by_hand(lambda model: ByHand(model.parameters()), [[(1.0, 0)]] * 4, 2)
    oracle.compare_tensors("weights", found, want, floor=oracle.ADAM_ROUNDING)


@on_each_rank(1)
def test_groups_in_one_bit_agree_on_the_correction(rank, model):
    named = enumerate(model.parameters())
    groups = [{"params": [each], "bias_correction": bool(n)} for n, each in named]
    one_bit = {"bits": 1, "freeze_step": 2}
    with pytest.raises(ConfigError, match="bias_correction: groups differ"):
        start(model, optimizers.FusedAdam(groups), config_of(1, compressed_communication=one_bit))
