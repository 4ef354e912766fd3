"""The exact list of optimizers that may run on shards, and what the others are told."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from hf_zero.errors import UnsupportedOptimizerError
from hf_zero.optim import Lion
from hf_zero.optim.elementwise import ELEMENTWISE, check, elementwise_base


def over(cls: type, **options: Any) -> Any:
    return cls([torch.nn.Parameter(torch.zeros(2, 2))], **options)


@pytest.mark.parametrize("cls", ELEMENTWISE)
def test_listed_classes_pass(cls):
    check(over(cls))
    assert elementwise_base(cls) is cls


def test_every_class_of_torch_optim_is_either_listed_or_refused():
    classes = {
        c
        for c in vars(torch.optim).values()
        if isinstance(c, type) and issubclass(c, torch.optim.Optimizer)
    }
    refused = {
        cls.__name__ for cls in classes - {torch.optim.Optimizer} if elementwise_base(cls) is None
    }
    assert refused == {"Adafactor", "LBFGS", "Muon", "SparseAdam"}


def test_a_subclass_with_the_same_update_passes():
    class Defaults(torch.optim.AdamW):
        def __init__(self, params):
            super().__init__(params, lr=0.5)

    check(over(Defaults))
    assert elementwise_base(Defaults) is torch.optim.AdamW


@pytest.mark.parametrize("method", ["step", "_init_group"])
def test_a_subclass_with_its_own_update_is_refused(method):
    Normed = type("Normed", (torch.optim.SGD,), {method: lambda self, *args: None})
    with pytest.raises(
        UnsupportedOptimizerError,
        match=r"Normed .* replaces the update of torch.optim.SGD "
        r'.*"elementwise_optimizers": \["Normed"\]',
    ):
        check(over(Normed))
    check(over(Normed), ("Normed",))


@pytest.mark.parametrize(("name", "why"), [("LBFGS", "dot products"), ("SparseAdam", "sparse")])
def test_whole_tensor_optimizers_are_refused_with_the_reason(name, why):
    with pytest.raises(
        UnsupportedOptimizerError,
        match=rf'optimizer {name} .*{why}.*"elementwise_optimizers": \["{name}"\]',
    ):
        check(over(getattr(torch.optim, name)))


def test_whole_matrix_optimizers_of_torch_pass_unless_their_update_is_another():
    matrix = [torch.nn.Parameter(torch.ones(2, 2))]
    check(torch.optim.Muon(matrix))
    check(torch.optim.Adafactor(matrix))
    check(transformers.Adafactor(matrix))
    Normed = type("Normed", (torch.optim.Muon,), {"step": lambda self, *args: None})
    with pytest.raises(UnsupportedOptimizerError, match="Normed cannot run"):
        check(Normed(matrix))


class Own(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1.0})


class SOAP(Own):
    pass


def test_unknown_classes_are_refused_unless_vouched_for():
    with pytest.raises(UnsupportedOptimizerError, match="hf-zero does not know whether"):
        check(over(Own), ("Other",))
    check(over(Own), ("Other", "Own"))
    check(over(Own), (f"{__name__}.Own",))
    with pytest.raises(UnsupportedOptimizerError, match=r"SOAP.*preconditions"):
        check(over(SOAP), ("Own",))


def test_something_that_is_no_optimizer_is_refused():
    class Wrapper:
        optimizer = over(Lion)

    with pytest.raises(
        UnsupportedOptimizerError,
        match=r"Wrapper is not a torch.optim.Optimizer; pass the optimizer itself",
    ):
        check(Wrapper(), ("Wrapper",))
