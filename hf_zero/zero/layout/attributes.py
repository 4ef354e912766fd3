"""Parameters with a class of their own, such as quantised weights, and the tensors among their
attributes.

Their bytes are laid out, sharded and gathered like any others. The tensors among their attributes
(scales, tables, the ``quant_state`` of bitsandbytes) stay whole, as buffers do, and get rank 0's
values.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from hf_zero.distributed.mesh import Mesh
from hf_zero.zero.layout.parameter import OwnedParameter, given_class, owned_class
from hf_zero.zero.layout.sharding import sharding_of


def attached(parameter: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (path, tensor) for the tensors among the attributes of a parameter with a class of its
    own, in attribute order.
    """
    if given_class(parameter) is not nn.Parameter:
        yield from _search(_attributes(parameter), "", {id(parameter)})


def describe(parameter: torch.Tensor) -> str:
    """Return class and attached tensors of ``parameter``, to compare ranks; "" for a plain one."""
    kind = given_class(parameter)
    if kind is nn.Parameter:
        return ""
    tensors = [(path, tuple(held.shape), str(held.dtype)) for path, held in attached(parameter)]
    return f"{kind.__qualname__} with {tensors}"


def refusal(parameter: torch.Tensor, device: torch.device) -> str | None:
    """Return the reason and the remedy if a parameter of this class cannot be laid out on
    ``device``; None if it can.
    """
    kind = type(parameter)
    if kind is nn.Parameter:
        return None
    plain = (
        nn.Parameter in kind.__mro__
        and kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__
        and not is_lazy(parameter)
    )
    if not plain or not _combines(kind):
        return (
            f"is a {kind.__name__}, whose memory cannot be laid out flat; pass a model "
            "of plain nn.Parameters"
        )
    if parameter.device.type != device.type:
        return (
            f"is a {kind.__name__} on {parameter.device}, and the engine computes on {device}; "
            "move the model there before "
            "(model.to(device)), as its class may have more to do for that than copy"
        )
    for path, tensor in attached(parameter):
        if (
            tensor.numel()
            and tensor.untyped_storage().data_ptr() == parameter.untyped_storage().data_ptr()
        ):
            return (
                f"is a {kind.__name__} whose attribute {path} keeps its whole memory alive; "
                "delete the attribute before hf_zero.initialize"
            )
    return None


def share(parameters: Iterable[torch.Tensor], mesh: Mesh) -> None:
    """Broadcast the tensors attached to ``parameters``, in place, from the first rank that holds
    the parameter (collective).
    """
    for parameter in parameters:
        within = mesh.of(sharding_of(parameter).axes)
        for _, tensor in attached(parameter):
            if tensor.is_contiguous():
                mesh.broadcast(tensor, within)


def _combines(kind: Any) -> bool:
    try:
        torch.Tensor._make_subclass(kind, torch.empty(0)).__class__ = owned_class(
            OwnedParameter, kind
        )
    except TypeError:
        return False
    return True


def _attributes(holder: Any) -> dict[str, Any]:
    found = getattr(holder, "__dict__", None)
    return (
        {name: value for name, value in found.items() if not name.startswith("_hf_zero_")}
        if isinstance(found, dict)
        else {}
    )


def _search(
    values: dict[Any, Any], prefix: str, seen: set[int]
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in values.items():
        path = f"{prefix}{name}"
        if (
            isinstance(value, (nn.Module, nn.Parameter, type))
            or callable(value)
            or id(value) in seen
        ):
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            yield path, value
        elif isinstance(value, dict):
            yield from _search(value, f"{path}.", seen)
        elif isinstance(value, (list, tuple)):
            yield from _search(dict(enumerate(value)), f"{path}.", seen)
        else:
            yield from _search(_attributes(value), f"{path}.", seen)
