"""Walks by lists are those of torch."""

import pytest
from torch import nn

from hf_zero.zero.layout.walk import (
    attribute_of,
    buffers_of,
    modules_of,
    named_modules_of,
    parameters_of,
)


def shared() -> nn.Module:
    """A model with a shared module, a tied parameter, an empty place and nested containers."""
    inner = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2)))
    model = nn.ModuleDict({"a": inner, "b": nn.ModuleList([inner[1], nn.Linear(2, 2)])})
    model["b"][1].weight = inner[0].weight
    model["b"].register_module("none", None)
    model.register_parameter("none", None)
    model.register_buffer("empty", None)
    model.register_buffer("again", inner[1][0].running_mean)
    return model


def test_objects_and_their_order_are_those_of_torch() -> None:
    model = shared()
    assert list(map(id, modules_of(model))) == list(map(id, model.modules()))
    assert named_modules_of(model) == list(model.named_modules())
    assert list(map(id, parameters_of(model))) == list(map(id, model.parameters()))
    assert list(map(id, buffers_of(model))) == list(map(id, model.buffers()))


class Computing(nn.Linear):
    """A layer whose class computes attributes, in a property and in ``__getattr__``."""

    kind = "computing"

    @property
    def weight_norm(self) -> object:
        raise RuntimeError("a property was read")

    def __getattr__(self, name: str) -> object:
        if name.startswith("_"):
            return super().__getattr__(name)
        raise RuntimeError(f"{name} was read")


def test_an_attribute_is_read_without_running_code_of_the_module() -> None:
    linear = nn.Linear(3, 2)
    assert attribute_of(linear, "missing") is None
    assert attribute_of(linear, "in_features") == 3
    assert attribute_of(linear, "weight") is linear.weight
    assert attribute_of(linear, "extra_repr")() == linear.extra_repr()
    assert attribute_of(linear, "__constants__") == ["in_features", "out_features"]
    computing = Computing.__new__(Computing)
    computing.__dict__.update(linear.__dict__)
    assert attribute_of(computing, "kind") == "computing"
    assert attribute_of(computing, "weight_norm") is None
    assert attribute_of(computing, "missing") is None


@pytest.mark.parametrize("package", ["transformers", "peft", "elsewhere"])
def test_a_property_is_read_of_packages_that_rows_of_features_name(package: str) -> None:
    body = {"__module__": f"{package}.models", "kind": property(lambda self: "computed")}
    module = type("Declaring", (nn.Module,), body)()
    assert attribute_of(module, "kind") == (None if package == "elsewhere" else "computed")
