"""Optimizers that may run on shards, and what the others are told: the exact list; Lion against a
plain loop over Python numbers; messages about momenta in one bit.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from hf_zero.config import ZeroConfig
from hf_zero.errors import UnsupportedOptimizerError
from hf_zero.optim import Lion, OneBitAdam, ZeroOneAdam
from hf_zero.optim.elementwise import ELEMENTWISE, check, elementwise_base
from hf_zero.optim.one_bit import as_sent, one_bit_of
from tests.helpers.cells import in_one_item


def over(cls, **options):
    return cls([torch.nn.Parameter(torch.zeros(2, 2))], **options)


def test_listed_classes_pass_and_subclasses_with_the_same_update():
    for cls in ELEMENTWISE:
        check(over(cls))
        assert elementwise_base(cls) is cls
    Defaults = type("Defaults", (torch.optim.AdamW,), {})
    check(over(Defaults))
    assert elementwise_base(Defaults) is torch.optim.AdamW
    found = [c for c in vars(torch.optim).values() if isinstance(c, type)]
    classes = {c for c in found if issubclass(c, torch.optim.Optimizer)} - {torch.optim.Optimizer}
    refused = {cls.__name__ for cls in classes if elementwise_base(cls) is None}
    assert refused == {"Adafactor", "LBFGS", "Muon", "SparseAdam"}


def refused(optimizer, said, vouched=()):
    with pytest.raises(UnsupportedOptimizerError, match=said):
        check(optimizer, vouched)


def test_a_subclass_with_its_own_update_is_refused():
    for method in ("step", "_init_group"):
        Normed = type("Normed", (torch.optim.SGD,), {method: lambda self, *args: None})
        refused(over(Normed), r"Normed .* replaces the update of torch.optim.SGD .*\[\"Normed\"\]")
        check(over(Normed), ("Normed",))
    for name, why in (("LBFGS", "dot products"), ("SparseAdam", "sparse")):
        refused(over(getattr(torch.optim, name)), rf"optimizer {name} .*{why}.*\[\"{name}\"\]")


def test_whole_matrix_optimizers_of_torch_pass_unless_their_update_is_another():
    for cls in (torch.optim.Muon, torch.optim.Adafactor, transformers.Adafactor):
        check(over(cls))
    Normed = type("Normed", (torch.optim.Muon,), {"step": lambda self, *args: None})
    refused(over(Normed), "Normed cannot run")


class Own(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {"lr": 1.0})


SOAP = type("SOAP", (Own,), {})


def test_unknown_classes_are_refused_unless_vouched_for():
    refused(over(Own), "hf-zero does not know whether", ("Other",))
    check(over(Own), ("Other", "Own"))
    check(over(Own), (f"{__name__}.Own",))
    refused(over(SOAP), "SOAP.*preconditions", ("Own",))
    wrapper = type("Wrapper", (), {"optimizer": over(Lion)})
    refused(wrapper(), "Wrapper is not a torch.optim.Optimizer", ("Wrapper",))


def slow(values, gradients, lr, betas, decay):
    """The update of the paper, number by number in double precision."""
    moments = [0.0] * len(values)
    for step in gradients:
        for i, g in enumerate(step):
            c = betas[0] * moments[i] + (1 - betas[0]) * g
            sign = (c > 0) - (c < 0)
            values[i] -= lr * (sign + decay * values[i])
            moments[i] = betas[1] * moments[i] + (1 - betas[1]) * g
    return values


WAYS = ((0.0, False), (0.3, False), (0.3, True))  # decay, maximize


@in_one_item([(foreach, *way) for foreach in (None, True, False) for way in WAYS])
def test_lion_follows_the_paper(case):
    foreach, decay, maximize = case
    start = [torch.randn(3, 2), torch.randn(5), torch.randn(()), torch.randn(0)]
    parameters = [torch.nn.Parameter(t.clone()) for t in start]
    told: dict[str, Any] = {"weight_decay": decay, "foreach": foreach, "maximize": maximize}
    optimizer = Lion(parameters, lr=0.01, betas=(0.7, 0.9), **told)
    gradients = [[torch.randn_like(t) for t in start] for _ in range(6)]
    gradients[3][1].zero_()
    for step in gradients:
        for parameter, gradient in zip(parameters, step):
            parameter.grad = gradient.clone()
        optimizer.step()
    for index, parameter in enumerate(parameters):
        signed = [(-1 if maximize else 1) * step[index] for step in gradients]
        flat = [each.reshape(-1).double().tolist() for each in signed]
        want = slow(start[index].reshape(-1).double().tolist(), flat, 0.01, (0.7, 0.9), decay)
        got = parameter.data.reshape(-1)
        torch.testing.assert_close(got, torch.tensor(want).float(), rtol=1e-5, atol=1e-6)
        assert set(optimizer.state[parameter]) == {"exp_avg"}


def test_both_paths_agree_bit_for_bit_and_leave_gradients_alone():
    start, gradient = torch.randn(257), torch.randn(257)
    results = []
    for foreach in (True, False):
        parameter = torch.nn.Parameter(start.clone())
        optimizer = Lion([parameter], lr=0.1, weight_decay=0.1, foreach=foreach)
        for _ in range(3):
            parameter.grad = gradient.clone()
            optimizer.step()
            assert torch.equal(parameter.grad, gradient)
        results.append((parameter.data, optimizer.state[parameter]["exp_avg"]))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])


def test_parameters_without_gradient_and_mixed_dtypes():
    kinds = (torch.float32, torch.float64, torch.float32)
    parameters = [torch.nn.Parameter(torch.ones(2, dtype=dtype)) for dtype in kinds]
    optimizer = Lion(parameters, lr=0.5)
    parameters[0].grad = torch.ones(2)
    parameters[1].grad = -torch.ones(2, dtype=torch.float64)
    assert optimizer.step(lambda: 7.0) == 7.0
    assert [p.data.tolist() for p in parameters] == [[0.5, 0.5], [1.5, 1.5], [1.0, 1.0]]
    assert parameters[2] not in optimizer.state


def test_state_dict_round_trip():
    parameter = torch.nn.Parameter(torch.zeros(3))
    optimizer, other = Lion([parameter]), Lion([torch.nn.Parameter(torch.zeros(3))], lr=3.0)
    parameter.grad = torch.ones(3)
    optimizer.step()
    saved = optimizer.state_dict()
    for key in ("maximize", "foreach"):  # as an older version would have saved it
        del saved["param_groups"][0][key]
    other.load_state_dict(saved)
    group = other.param_groups[0]
    assert (group["lr"], group["maximize"], group["foreach"]) == (1e-4, False, None)
    kept = other.state[group["params"][0]]["exp_avg"]
    assert torch.equal(kept, optimizer.state[parameter]["exp_avg"])


ONE: dict[str, Any] = {"compressed_communication": {"bits": 1, "freeze_step": 5}}


def parameters():
    return [torch.nn.Parameter(torch.zeros(4, 4))]


def config(stage=1, zero=None, **more):
    return ZeroConfig.from_dict({"zero_optimization": {"stage": stage, **(zero or {})}, **more})


def test_any_adam_sends_its_momentum_where_the_section_asks_for_it():
    for cls in (torch.optim.Adam, torch.optim.AdamW):
        found = one_bit_of(config(**ONE), cls(parameters(), lr=0.1))
        assert found is not None and found.block == 2048
        assert [found.is_dense(step) for step in (1, 5, 6)] == [True, True, False]
    assert one_bit_of(config(), torch.optim.AdamW(parameters())) is None
    assert one_bit_of(config(**ONE), None) is None


def test_it_runs_at_stage_1():
    for stage in (0, 1, 2):
        given = config(stage)
        made = as_sent(given, one_bit_of(given, OneBitAdam(parameters(), freeze_step=3)))
        assert (made.stage, made.compressed_communication.bits) == (1, 1)
        assert "1 bit" in made.sources["compressed_communication.bits"]


def test_what_has_no_effect_is_said(caplog):
    caplog.set_level("INFO", "hf_zero")
    groups = [{"params": parameters(), "exp_avg_mask": torch.ones(4, 4)}]
    ZeroOneAdam(groups, cuda_aware=False, comm_backend_name="nccl")
    for key in ("cuda_aware", "comm_backend_name", "exp_avg_mask"):
        assert key in caplog.text, key
