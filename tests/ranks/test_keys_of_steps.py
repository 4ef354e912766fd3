"""Configuration keys that decide what a step does: the operation over ranks, unused parameters,
modules that are gathered whole.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hf_zero.errors import PartitionError, UnusedParameterError
from tests.helpers.engines import STAGES, config_of, full_grads, full_weights, start
from tests.helpers.stacks import by_hand, on_ranks, squared
from tests.helpers.training import At, Plan, adamw

RANKS = 2


@pytest.mark.turns
@pytest.mark.parametrize("prescale", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", STAGES)
def test_gradients_are_summed_over_the_ranks_where_asked(stage, precision, prescale):
    plan = Plan(precision=precision, accumulation=2)

    keys = {"prescale_gradients": prescale}

    def run(rank, model, operation):
        config = config_of(stage, plan, gradient_allreduce_op=operation, **keys)
        engine = start(model, adamw(model), config)
        for micro in range(2):
            engine.backward(squared(engine, At(0, micro, rank), plan.dtype))
            if micro == 0:
                engine.step()
        grads = full_grads(engine)
        engine.destroy()
        return grads

    mean, summed = (on_ranks(RANKS, run, operation)[0] for operation in ("mean", "sum"))
    for name, value in mean.items():
        torch.testing.assert_close(summed[name], value * RANKS, rtol=1e-2, atol=1e-4)


@pytest.mark.turns
@pytest.mark.parametrize("lacking", [(0, 1), (1,)])
@pytest.mark.parametrize("offload", [{}, {"offload_optimizer": {"device": "cpu"}}])
@pytest.mark.parametrize("stage", STAGES)
def test_a_parameter_without_a_gradient_is_an_error_on_all_ranks_where_asked(
    stage, offload, lacking
):
    def run(rank, model, ignore):
        zero = {"stage": stage, "ignore_unused_parameters": ignore, **(offload if stage else {})}
        engine = start(model, adamw(model), config_of(0, zero_optimization=zero))
        engine.backward(squared(engine, At(0, 0, rank)))
        engine.step()
        if rank in lacking:
            model.head.forward = lambda x: x.mean(-1, keepdim=True)  # its weights are not used
        engine.backward(squared(engine, At(1, 0, rank)))
        if ignore:
            engine.step()
        else:
            with pytest.raises(UnusedParameterError, match=r"head\.weight, head\.bias got no grad"):
                engine.step()
        weights = full_weights(engine)
        engine.destroy()
        return weights

    want, _ = by_hand(adamw, [[(1.0, 0)]], RANKS)
    on_ranks(RANKS, run, True)
    stayed = on_ranks(RANKS, run, False)[0]
    for name, value in stayed.items():
        torch.testing.assert_close(value, want[name], rtol=2e-5, atol=1e-6)
    assert issubclass(UnusedParameterError, (PartitionError, AssertionError))


def test_modules_that_the_configuration_names_are_units():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def forward(self, x):
            return sum(expert(x) for expert in self.experts)

    def run(rank, model, leaf):
        zero = {"stage": 3, "stage3_module_granularity_threshold": 0, **leaf}
        engine = start(model, adamw(model), config_of(0, zero_optimization=zero))
        units = [unit.label for unit in engine.units]
        engine.destroy()
        return units

    def build():
        return nn.Sequential(Experts(), nn.Linear(4, 4))

    plain = on_ranks(RANKS, run, {}, build=build)[0]
    marked = on_ranks(RANKS, run, {"leaf_module": {"classes": ["Experts"]}}, build=build)[0]
    assert len([label for label in plain if "experts" in label]) == 3
    assert "0" in marked and not [label for label in marked if "experts" in label]
