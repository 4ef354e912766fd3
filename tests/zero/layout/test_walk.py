"""Walks by lists are those of torch."""

from torch import nn

from hf_zero.zero.layout.declared import attribute_of
from hf_zero.zero.layout.walk import buffers_of, modules_of, named_modules_of, parameters_of


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


class Forwarding(nn.Module):
    """A wrapper that has the attributes of what it wraps, as PEFT's."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def __getattr__(self, name: str) -> object:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.inner, name)


def test_an_attribute_is_read_wherever_getattr_finds_it() -> None:
    linear = nn.Linear(3, 2)
    assert attribute_of(linear, "missing") is None
    assert attribute_of(linear, "in_features") == 3
    assert attribute_of(linear, "__constants__") == ["in_features", "out_features"]
    assert attribute_of(Forwarding(linear), "out_features") == 2
    assert attribute_of(Forwarding(linear), "missing") is None
