"""Runs of a cut copy without memory, and the kinds of gradients that their graph tells."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from hf_zero.errors import ConfigError, PartitionError
from hf_zero.parallel.tensor import axis as borders
from hf_zero.parallel.tensor.partial_gradients import GradientKind, kinds_in
from hf_zero.parallel.tensor.rehearsal import RehearsedAxis, run_on_zeros, shrink
from hf_zero.zero.layout.sharding import Sharding, set_sharding

COMPLETE, PARTIAL = GradientKind.COMPLETE, GradientKind.PARTIAL
AXIS = RehearsedAxis(0, 2)


def parameter(*shape: int, is_cut: bool = False) -> nn.Parameter:
    value = nn.Parameter(torch.empty(shape, device="meta"))
    if is_cut:
        set_sharding(value, Sharding(axes=("tensor",)))
    return value


def test_an_output_that_is_a_parameter_itself_is_read_as_it_is() -> None:
    """A model whose first output is a parameter has an output without a ``grad_fn``."""
    whole, cut = parameter(4), parameter(4, is_cut=True)
    assert kinds_in([whole]) == {whole: {COMPLETE}}
    assert kinds_in([cut]) == {cut: set()}
    assert kinds_in([whole, whole * 2]) == {whole: {COMPLETE}}


# the function that reads a whole parameter before a cut one: the gradient of the whole one
READERS: dict[str, tuple[Any, Any]] = {
    "copy_to": (lambda x: borders.copy_to(x, AXIS, "x"), COMPLETE),
    "copy_last_to": (lambda x: borders.copy_last_to(x, AXIS, "x", 2), COMPLETE),
    "split": (lambda x: borders.split(x, AXIS, "x").repeat(2), COMPLETE),
    "own_part": (lambda x: borders.own_part(x, "x", 0, 2).repeat(2), PARTIAL),
    "no function": (lambda x: x, PARTIAL),
}


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("end", (borders.sum_over, borders.gather))
def test_the_kind_of_a_gradient_follows_from_the_function_that_reads(name: str, end: Any) -> None:
    read, kind = READERS[name]
    whole, cut, after = parameter(4), parameter(4, is_cut=True), parameter(1)
    output = end(read(whole) * cut, AXIS, "x") * after
    assert kinds_in([output]) == {whole: {kind}, cut: set(), after: {COMPLETE}}


def test_every_function_has_a_border_and_no_operation_of_torch_has() -> None:
    functions = {
        value
        for value in vars(borders).values()
        if isinstance(value, type) and issubclass(value, torch.autograd.Function)
    }
    assert functions == set(borders.BORDERS)
    assert borders.border_of((parameter(2) * 2).grad_fn) is None  # type: ignore[arg-type]


def test_a_sum_of_complete_gradients_is_refused() -> None:
    copied = borders.copy_to(parameter(4), AXIS, "the layer's input")
    with pytest.raises(ConfigError, match="sums the gradient of its inputs"):
        kinds_in([copied * 2])


class _ReturnsATensor(nn.Module):
    config, main_input_name = SimpleNamespace(), "input_ids"

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 2, device="meta")

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.embed(input_ids)  # type: ignore[no-any-return]


def test_a_model_that_returns_a_tensor_runs() -> None:
    model = _ReturnsATensor()
    outputs, ran = run_on_zeros(model)
    assert kinds_in(outputs) == {model.embed.weight: {COMPLETE}}
    assert ran == {"", "embed"}


def test_a_parameter_is_not_shrunk_without_a_box() -> None:
    with pytest.raises(PartitionError, match="give it a box"):
        shrink(parameter(4), Sharding(axes=("tensor",)))
