"""Models made from a configuration: built without memory, their initialisation recorded, done one parameter at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from hf_zero.loading.expressions import Filled
from hf_zero.loading.lazy import LazyTensor, NotRecorded, fill


def make_fillable(model: nn.Module, initialise: Callable[[], None]) -> None:
    """Let ``initialise`` write into the parameters and buffers of ``model``, all on the meta device, and keep what it writes.

    Parameters become lazy; buffers are read at once. Raises NotRecorded where that cannot be put off, or leaves a tensor
    without values: its constructor gave it some, and they are lost on the meta device.
    """
    made: dict[int, LazyTensor | nn.Parameter] = {}
    for tensors, name, tensor in _tensors(model):
        if id(tensor) not in made:
            lazy: LazyTensor | nn.Parameter = LazyTensor(Filled(tensor.shape, tensor.dtype))
            if isinstance(tensor, nn.Parameter):
                lazy = nn.Parameter(lazy, requires_grad=tensor.requires_grad)
            made[id(tensor)] = lazy
        tensors[name] = made[id(tensor)]
    initialise()
    for _, name, tensor in _tensors(model):
        if (
            isinstance(tensor, LazyTensor)
            and isinstance(tensor.expression, Filled)
            and tensor.numel()
            and not tensor.expression.initialised
        ):
            raise NotRecorded(f"nothing initialises {name} but its constructor")


def recorded(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function(tensor, ...)``, which fills a tensor in place, put off for lazy ones: some look at the numbers they have drawn."""

    def record(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(tensor, LazyTensor):
            return function(tensor, *args, **kwargs)
        return fill(tensor, lambda view: function(view, *args, **kwargs))

    return record


def _tensors(model: nn.Module) -> Iterator[tuple[dict[str, torch.Tensor | None], str, torch.Tensor]]:
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in list(tensors.items()):
                if tensor is not None:
                    yield tensors, name, tensor  # type: ignore[misc]
