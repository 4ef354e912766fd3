"""Parameters with a class of their own, such as quantised weights, and the tensors among their
attributes.

Their bytes are laid out, sharded and gathered like any others, and so are large tensors among their
attributes (the scales in the ``quant_state`` of bitsandbytes), which :func:`register_attached`
makes parameters of the same module. Small ones (tables, offsets) stay whole, as buffers do, and get
rank 0's values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from hf_zero.distributed.mesh import Mesh
from hf_zero.zero.layout.initial_values import FormerValues, Source, pending, source_of
from hf_zero.zero.layout.parameter import OwnedParameter, given_class, owned_class
from hf_zero.zero.layout.sharding import sharding_of, written

LARGEST_TABLE = 256  # elements: a table of the values of one byte; larger tensors are sharded


class AttachedParameter(nn.Parameter):
    """A tensor among the attributes of a quantised weight that is laid out, as a frozen parameter
    of the same module. Its class keeps it from being cast.
    """

    def is_floating_point(self) -> bool:
        """Return False: ``module.to(dtype)`` casts what is True."""
        return False


class Attribute(NamedTuple):
    """A tensor among the attributes of a parameter: its path from there, and the dictionary, list
    or tuple that holds it under ``key``.
    """

    path: str
    holder: Any
    key: Any
    tensor: torch.Tensor


def attached(parameter: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (path, tensor) for the tensors among the attributes of a parameter with a class of its
    own that are no parameters themselves, in attribute order.
    """
    for found in tensors_of(parameter):
        if given_class(found.tensor) is not AttachedParameter:
            yield found.path, found.tensor


def register_attached(model: nn.Module, push_inverse: Callable[..., object] | None = None) -> None:
    """Make the tensors of more than :data:`LARGEST_TABLE` elements among the attributes of the
    parameters of ``model`` frozen parameters of the same module, in place.

    They get the names that they have in the module's state dict, else that of the parameter with
    the path of the attribute. Those of weights that the module has no longer are removed.
    ``push_inverse`` is called with a function that undoes the change of an attribute, and its
    arguments.
    """
    for module in model.modules():
        own = module._parameters
        found = [
            (name, attribute)
            for name, parameter in own.items()
            if parameter is not None
            for attribute in tensors_of(parameter)
            if _is_laid_out(attribute)
        ]
        former = {key for key, p in own.items() if p is not None and is_attached(p)}
        if not found and not former:
            continue
        state = {id(value): key for key, value in written(module).items()}
        made: dict[str, nn.Parameter] = {}
        for name, (path, holder, key, tensor) in found:
            parameter = tensor
            if not is_attached(tensor):
                parameter = AttachedParameter(tensor.detach(), requires_grad=False)
                if push_inverse is not None:
                    push_inverse(holder.__setitem__, key, tensor)
                holder[key] = parameter
            made[state.get(id(tensor), f"{name}.{path}")] = parameter  # type: ignore[assignment]
        for key in former - made.keys():
            del own[key]
        own.update(made)


def is_attached(parameter: torch.Tensor) -> bool:
    """Whether ``parameter`` was a tensor among the attributes of another one."""
    return given_class(parameter) is AttachedParameter


def _is_laid_out(attribute: Attribute) -> bool:
    tensor = attribute.tensor
    return is_attached(tensor) or (
        tensor.numel() > LARGEST_TABLE
        and tensor.is_contiguous()
        and not isinstance(attribute.holder, tuple)
    )


def tensors_of(parameter: torch.Tensor) -> Iterator[Attribute]:
    """Yield the tensors among the attributes of a parameter with a class of its own."""
    if given_class(parameter) is not nn.Parameter:
        yield from _search(_attributes(parameter), "", {id(parameter)})


def elements_of(parameter: torch.Tensor) -> int:
    """Return the number of weights that the bytes of ``parameter`` hold: of packed ones, the size
    of the shape in their ``quant_state``; of scales, none.
    """
    shape = getattr(getattr(parameter, "quant_state", None), "shape", None)
    if shape is not None:
        return math.prod(shape)
    return 0 if is_attached(parameter) else parameter.numel()


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
            "of plain nn.Parameters, or one that bitsandbytes has quantized to 4 bits"
        )
    if parameter.device.type != device.type and source_of(parameter) is None:
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
                "delete the attribute before hf_zero.initialize, or quantize with "
                "BitsAndBytesConfig(load_in_4bit=True)"
            )
    return None


def attached_later(shape: Sequence[int], source: Source) -> torch.Tensor:
    """Return a tensor for an attribute of a weight whose values an engine reads from ``source``: a
    parameter without memory if it will be laid out, else zeros.
    """
    if math.prod(shape) > LARGEST_TABLE:
        return pending(shape, source, AttachedParameter)
    made = torch.zeros(tuple(shape), dtype=source.dtype)
    made.__dict__["_hf_zero_source"] = source
    return made


@torch.no_grad()
def read_attached(parameters: Iterable[torch.Tensor], mesh: Mesh, former: FormerValues) -> None:
    """Move the small tensors attached to ``parameters`` that are read from a source to the device
    of ``mesh``; the first rank that holds the parameter reads them.
    """
    for parameter in parameters:
        for _, holder, key, tensor in tensors_of(parameter):
            source = None if is_attached(tensor) else source_of(tensor)
            if source is not None:
                if mesh.of(sharding_of(parameter).axes).is_first:
                    values = former.attempt(source.whole)
                    tensor = tensor if values is None else values
                holder[key] = tensor.detach().to(mesh.device)


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
    return found if isinstance(found, dict) else {}


def _search(values: Any, prefix: str, seen: set[int]) -> Iterator[Attribute]:
    items = values.items() if isinstance(values, dict) else enumerate(values)
    for key, value in list(items):
        path = f"{prefix}{key}"
        if str(key).startswith("_hf_zero_") or id(value) in seen:
            continue
        tensor = isinstance(value, torch.Tensor)
        other = isinstance(value, nn.Parameter) and not is_attached(value)
        if other or isinstance(value, (nn.Module, type)) or (callable(value) and not tensor):
            continue
        seen.add(id(value))
        if tensor:
            yield Attribute(path, values, key, value)
        elif isinstance(value, (dict, list, tuple)):
            yield from _search(value, f"{path}.", seen)
        else:
            yield from _search(_attributes(value), f"{path}.", seen)
