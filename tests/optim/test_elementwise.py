"""Optimizers that may run on shards, and what the others are told: the exact list; Lion, whose
formula is a row of ``test_capabilities.py``; messages about momenta in one bit.
"""

from __future__ import annotations

import math
import re

import pytest
import torch
import transformers

from hf_zero.config import ZeroConfig
from hf_zero.errors import UnsupportedOptimizerError
from hf_zero.optim import Lion, OneBitAdam, ZeroOneAdam
from hf_zero.optim.elementwise import ELEMENTWISE, check, elementwise_base
from hf_zero.optim.one_bit import as_sent, one_bit_of


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


class Own(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {"lr": 1.0})


SOAP = type("SOAP", (Own,), {})
MATRIX = (torch.optim.Muon, torch.optim.Adafactor, transformers.Adafactor)


def with_own(method: str, cls: type) -> type:
    return type("Normed", (cls,), {method: lambda self, *args: None})


def test_others_are_refused_unless_vouched_for():
    for cls in MATRIX:
        check(over(cls))
    for method in ("step", "_init_group"):
        check(over(with_own(method, torch.optim.SGD)), ("Normed",))
    check(over(Own), ("Other", "Own"))
    check(over(Own), (f"{__name__}.Own",))
    wrapper = type("Wrapper", (), {"optimizer": over(Lion)})()
    sgd = r"Normed .* replaces the update of torch.optim.SGD .*\[\"Normed\"\]"
    for optimizer, said, vouched in (
        (over(with_own("step", torch.optim.SGD)), sgd, ()),
        (over(with_own("_init_group", torch.optim.SGD)), sgd, ()),
        (over(torch.optim.LBFGS), r"optimizer LBFGS .*dot products.*\[\"LBFGS\"\]", ()),
        (over(torch.optim.SparseAdam), r"optimizer SparseAdam .*sparse", ()),
        (over(with_own("step", torch.optim.Muon)), "Normed cannot run", ()),
        (over(Own), "hf-zero does not know whether", ("Other",)),
        (over(SOAP), "SOAP.*preconditions", ("Own",)),
        (wrapper, "Wrapper is not a torch.optim.Optimizer", ("Wrapper",)),
    ):
        with pytest.raises(UnsupportedOptimizerError, match=said):
            check(optimizer, vouched)


class Signed(Own):
    """An update of each element by itself, with a momentum."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                momentum.mul_(0.9).add_(p.grad)
                p.data.add_(self.changed(momentum).sign(), alpha=-group["lr"])

    def changed(self, momentum):
        return momentum


def changing(by):
    return type("Changing", (Signed,), {"changed": lambda self, momentum: by(momentum)})


def holding(params):
    optimizer = Signed(params)
    optimizer.base = torch.optim.SGD(params, 0.1)
    return optimizer


def test_a_probe_tells_updates_of_elements_from_those_of_tensors():
    def means(momentum):
        return momentum - momentum.mean(-1, keepdim=True) if momentum.dim() > 1 else momentum

    for make, said in (
        (Signed, ""),
        (changing(means), "updates shards differently from whole tensors, by"),
        (changing(lambda momentum: momentum - momentum.mean()), "updates shards differently"),
        (changing(torch.zeros_like), "changed nothing in a probe"),
        (changing(lambda momentum: momentum @ momentum.T), "raised RuntimeError in a probe"),
        (holding, "keeps tensors or an optimizer of its own (base)"),
    ):
        optimizer = over(make)
        optimizer.param_groups[0]["lr"] = 0.0  # that of a warmup
        calls = []
        optimizer.register_step_post_hook(lambda *_, calls=calls: calls.append(1))
        weight, drawn = optimizer.param_groups[0]["params"][0], torch.get_rng_state()
        warning = None
        if said:
            with pytest.raises(UnsupportedOptimizerError, match=re.escape(f"it {said}")):
                check(optimizer, untested=True)
        else:
            warning = check(optimizer, untested=True)
        assert bool(warning) is not bool(said)
        assert not weight.any() and not optimizer.state and not calls
        assert torch.equal(torch.get_rng_state(), drawn)
        with pytest.raises(UnsupportedOptimizerError, match="cannot run on sharded parameters"):
            check(optimizer)


def test_lion_shows_gradients_that_are_not_numbers():
    """The sign of NaN is 0 to torch: weights would never move again."""
    for foreach in (True, False):
        parameter = torch.nn.Parameter(torch.tensor([1.0, -0.0, 2.0, 3.0]))
        parameter.grad = torch.tensor([float("nan"), 0.0, float("inf"), -1.0])
        Lion([parameter], lr=0.5, weight_decay=0.0, foreach=foreach).step()
        assert parameter.tolist() == [pytest.approx(math.nan, nan_ok=True), -0.0, 1.5, 3.5]
        assert torch.equal(parameter.signbit()[1:], torch.tensor([True, False, False]))


def test_lion_without_some_gradients_of_mixed_dtypes_and_from_an_older_state_dict():
    kinds = (torch.float32, torch.float64, torch.float32)
    parameters = [torch.nn.Parameter(torch.ones(2, dtype=dtype)) for dtype in kinds]
    optimizer = Lion(parameters, lr=0.5)
    parameters[0].grad = torch.ones(2)
    parameters[1].grad = -torch.ones(2, dtype=torch.float64)
    assert optimizer.step(lambda: 7.0) == 7.0
    rising = torch.nn.Parameter(torch.ones(2))
    rising.grad = torch.ones(2)
    Lion([rising], lr=0.5, maximize=True).step()
    assert rising.data.tolist() == [1.5, 1.5]
    assert [p.data.tolist() for p in parameters] == [[0.5, 0.5], [1.5, 1.5], [1.0, 1.0]]
    assert parameters[2] not in optimizer.state
    saved, other = optimizer.state_dict(), Lion([p.detach().clone() for p in parameters], lr=3.0)
    for key in ("maximize", "foreach"):  # as an older version would have saved it
        del saved["param_groups"][0][key]
    other.load_state_dict(saved)
    group = other.param_groups[0]
    assert (group["lr"], group["maximize"], group["foreach"]) == (0.5, False, None)
    kept = other.state[group["params"][0]]["exp_avg"]
    assert torch.equal(kept, optimizer.state[parameters[0]]["exp_avg"])


def test_momenta_in_one_bit_where_the_section_asks_for_it(caplog):
    """At stage 1, by any Adam; settings without effect are said."""

    def config(stage=1, **more):
        return ZeroConfig.from_dict({"zero_optimization": {"stage": stage}, **more})

    matrices = [torch.nn.Parameter(torch.zeros(4, 4))]
    asked = config(compressed_communication={"bits": 1, "freeze_step": 5})
    for cls in (torch.optim.Adam, torch.optim.AdamW):
        found = one_bit_of(asked, cls(matrices, lr=0.1))
        assert found is not None and found.block == 2048
        assert [found.is_dense(step) for step in (1, 5, 6)] == [True, True, False]
    assert one_bit_of(config(), torch.optim.AdamW(matrices)) is None
    assert one_bit_of(asked, None) is None
    for stage in (0, 1, 2):
        given = config(stage)
        made = as_sent(given, one_bit_of(given, OneBitAdam(matrices, freeze_step=3)))
        assert (made.stage, made.compressed_communication.bits) == (1, 1)
        assert "1 bit" in made.sources["compressed_communication.bits"]
    caplog.set_level("INFO", "hf_zero")
    groups = [{"params": matrices, "exp_avg_mask": torch.ones(4, 4)}]
    ZeroOneAdam(groups, cuda_aware=False, comm_backend_name="nccl")
    for key in ("cuda_aware", "comm_backend_name", "exp_avg_mask"):
        assert key in caplog.text, key
