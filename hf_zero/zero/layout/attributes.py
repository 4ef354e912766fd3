"""Parameters with a class of their own, such as quantized weights, and the tensors among their
attributes.

Their bytes are laid out, sharded and gathered like any others, and so are large tensors among their
attributes (the scales in the ``quant_state`` of bitsandbytes) and the parts of tensors without
memory of their own (torchao), which :meth:`QuantizedWeights.register` makes parameters of the same
module. Small ones (tables, offsets) stay whole, as buffers do, and get rank 0's values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from hf_zero.distributed.mesh import Mesh
from hf_zero.zero.layout.flat_buffer import owner_of
from hf_zero.zero.layout.initial_values import FormerValues, Source, pending, source_of
from hf_zero.zero.layout.parameter import OwnedParameter, given_class, owned_class
from hf_zero.zero.layout.parameter_classes import ParameterClasses
from hf_zero.zero.layout.sharding import sharding_of
from hf_zero.zero.layout.walk import modules_of
from hf_zero.zero.layout.whole_names import written

LARGEST_TABLE = 256  # elements: a table of the values of one byte; larger tensors are sharded


class AttachedParameter(nn.Parameter):
    """A tensor among the attributes of a quantized weight that is laid out, as a frozen parameter
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
    for attribute in tensors_of(parameter):
        if given_class(attribute.tensor) is not AttachedParameter:
            yield attribute.path, attribute.tensor


def parts_of(weight: torch.Tensor) -> list[str]:
    """Return the names of the plain tensors that a frozen weight without memory of its own consists
    of, such as the quantized tensors of torchao; none of another weight.
    """
    if not hasattr(weight, "__tensor_flatten__") or weight.requires_grad:
        return []
    names, _ = weight.__tensor_flatten__()
    parts = [weight.__dict__.get(name) for name in names]
    plain = all(
        isinstance(part, torch.Tensor)
        and (is_attached(part) or (type(part) is torch.Tensor and part.is_contiguous()))
        for part in parts
    )
    # a DTensor consists of its own part
    return [*names] if plain and not hasattr(weight, "device_mesh") else []


def of_parts(
    weight: torch.Tensor, parts: Mapping[str, torch.Tensor], shape: Sequence[int] | None = None
) -> nn.Parameter:
    """Return a weight as ``weight``, of other tensors by their names, and of ``shape``."""
    _, context = weight.__tensor_flatten__()  # type: ignore[attr-defined]
    kind: Any = type(weight)
    size = torch.Size(weight.shape if shape is None else shape)
    stride = torch.empty(size, device="meta").stride()
    return nn.Parameter(kind.__tensor_unflatten__(parts, context, size, stride), False)


def names_of_parts(name: str, weight: torch.Tensor, prefix: str = "") -> dict[str, str]:
    """Return, by part of the weight ``name``, the name of the parameter that the part becomes, as
    in torchao's safetensors files: without a dot, since torch's strict loads take a name with one
    for a parameter of a child.
    """
    return {part: f"{prefix}_{name}_{part}" for part in parts_of(weight)}


def weights_of_parts(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, weight) for the attributes of ``module`` whose parts are its parameters."""
    for name, value in module.__dict__.items():
        if isinstance(value, torch.Tensor) and parts_of(value):
            yield name, value


def _weights(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, weight) for the weights of ``module`` with a class of their own."""
    for name, parameter in module._parameters.items():
        if (
            parameter is not None
            and given_class(parameter) is not nn.Parameter
            and not is_attached(parameter)
        ):
            yield name, parameter
    yield from weights_of_parts(module)


def _beside(module: nn.Module, weight: torch.Tensor) -> Iterator[Attribute]:
    """Yield the tensors of the objects of ``module`` that refer to the memory of ``weight``, as the
    8-bit layers of bitsandbytes have one after a forward.
    """
    for name, value in module.__dict__.items():
        values = {} if isinstance(value, (torch.Tensor, nn.Module, type)) else _attributes(value)
        if _refers(values, weight):
            yield from _search(values, f"{name}.", {id(weight)})


def kept_in_attributes(model: nn.Module) -> str | None:
    """Return the name of a weight of ``model`` whose memory is also among its attributes, or in an
    object of its module; None if there is none.
    """
    for prefix, module in model.named_modules():
        for name, weight in _weights(module):
            beside = next(_beside(module, weight), None)
            if beside is not None or _refers(_attributes(weight), weight):
                return f"{prefix}.{name}".lstrip(".")
    return None


def _refers(attributes: dict[str, object], weight: torch.Tensor) -> bool:
    """Return whether one of ``attributes`` is ``weight`` or its memory."""
    tensors = [value for value in attributes.values() if isinstance(value, torch.Tensor)]
    return any(tensor is weight or _has_the_memory_of(weight, tensor) for tensor in tensors)


def _has_the_memory_of(weight: torch.Tensor, tensor: torch.Tensor) -> bool:
    return (
        not parts_of(weight)
        and owner_of(weight) is None
        and tensor.shape == weight.shape
        and tensor.dtype == weight.dtype
        and tensor.numel() > 0
        and not tensor.is_meta
        and tensor.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()
    )


def is_attached(parameter: torch.Tensor) -> bool:
    """Return whether ``parameter`` was a tensor among the attributes of another one."""
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
    of the shape in their ``quant_state``; of the parts of a weight, the largest has them.
    """
    shape = getattr(getattr(parameter, "quant_state", None), "shape", None)
    if shape is not None:
        return math.prod(shape)
    if is_attached(parameter):
        return int(parameter.__dict__.get("_hf_zero_elements", 0))
    return parameter.numel()


def attached_later(shape: Sequence[int], source: Source) -> torch.Tensor:
    """Return a tensor for an attribute of a weight whose values an engine reads from ``source``: a
    parameter without memory if it will be laid out, else zeros.
    """
    if math.prod(shape) > LARGEST_TABLE:
        return pending(shape, source, AttachedParameter)
    template = torch.zeros(tuple(shape), dtype=source.dtype)
    template.__dict__["_hf_zero_source"] = source
    return template


def _combines(kind: type[torch.Tensor]) -> bool:
    try:
        torch.Tensor._make_subclass(kind, torch.empty(0)).__class__ = owned_class(
            OwnedParameter, kind
        )
    except TypeError:
        return False
    return True


def _attributes(holder: object) -> dict[str, object]:
    attributes = getattr(holder, "__dict__", None)
    return attributes if isinstance(attributes, dict) else {}


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


class QuantizedWeights(ParameterClasses):
    """Quantized weights: packed ones of bitsandbytes, those of torchao that consist of parts."""

    def refusal(self, parameter: torch.Tensor, device: torch.device) -> str | None:
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
                "of plain nn.Parameters, or one that bitsandbytes has quantized to 4 or 8 bits, or "
                "torchao by rows (Int8WeightOnlyConfig, Float8WeightOnlyConfig)"
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

    def describe(self, parameter: torch.Tensor) -> str:
        kind = given_class(parameter)
        if kind is nn.Parameter:
            return ""
        tensors = [(path, tuple(t.shape), str(t.dtype)) for path, t in attached(parameter)]
        return f"{kind.__qualname__} with {tensors}"

    def register(self, model: nn.Module, push_inverse: Callable[..., object] | None = None) -> None:
        """Make the tensors among the attributes of the quantized weights of ``model`` frozen
        parameters of the same module, in place: tensors of more than :data:`LARGEST_TABLE`
        elements, and all that a weight without memory of its own consists of. Such a weight is an
        attribute of the module then.

        A new parameter is named as its tensor in the module's state dict, else by the name of the
        weight and the path of the attribute (``_weight_qdata``: a part). Parameters whose weights
        the module has no longer are removed. Attributes with the memory of the weight become the
        weight itself.
        """
        undo = push_inverse if push_inverse is not None else lambda *_: None
        for module in modules_of(model):
            registered = module._parameters
            former = {key for key, p in registered.items() if p is not None and is_attached(p)}
            weights = dict(_weights(module))
            if not weights and not former:
                continue
            state = {id(value): key for key, value in written(module).items()}
            current: dict[str, nn.Parameter] = {}
            for name, weight in weights.items():
                parts = names_of_parts(name, weight)
                for attribute in (*tensors_of(weight), *_beside(module, weight)):
                    path, holder, key, tensor = attribute
                    if _has_the_memory_of(weight, tensor):
                        undo(holder.__setitem__, key, tensor)
                        holder[key] = weight
                    elif _is_laid_out(attribute) or path in parts:
                        if not is_attached(tensor):
                            undo(holder.__setitem__, key, tensor)
                            holder[key] = AttachedParameter(tensor.detach(), requires_grad=False)
                        default = parts.get(path, f"{name}.{path}")
                        current[state.get(id(tensor), default)] = holder[key]
                if parts:
                    largest = max((getattr(weight, part) for part in parts), key=torch.Tensor.numel)
                    largest.__dict__["_hf_zero_elements"] = weight.numel()
                    if registered.pop(name, None) is not None:
                        undo(module.__dict__.pop, name, None)
                        module.__dict__[name] = weight
            for key in former - current.keys():
                del registered[key]
            registered.update(current)

    def drop(self, optimizer: torch.optim.Optimizer) -> None:
        """Remove frozen weights without memory of their own from the groups of ``optimizer``."""
        for group in optimizer.param_groups:
            group["params"][:] = [p for p in group["params"] if not parts_of(p)]

    @torch.no_grad()
    def read(self, parameters: Iterable[torch.Tensor], mesh: Mesh, former: FormerValues) -> None:
        """Move the small tensors attached to ``parameters`` that are read from a source to the
        device of ``mesh``; the first rank that holds the parameter reads them.
        """
        for parameter in parameters:
            for _, holder, key, tensor in tensors_of(parameter):
                source = None if is_attached(tensor) else source_of(tensor)
                if source is not None:
                    if mesh.of(sharding_of(parameter).axes).is_first:
                        values = former.attempt(source.whole)
                        tensor = tensor if values is None else values
                    holder[key] = tensor.detach().to(mesh.device)

    def broadcast(self, parameters: Iterable[torch.Tensor], mesh: Mesh) -> None:
        """Broadcast the tensors attached to ``parameters``, in place, from the first rank that
        holds the parameter.
        """
        for parameter in parameters:
            within = mesh.of(sharding_of(parameter).axes)
            for _, tensor in attached(parameter):
                if tensor.is_contiguous():
                    mesh.broadcast(tensor, within)

    def make_pending(
        self, weight: torch.Tensor | None, source_of: Callable[[torch.Tensor], Source | None]
    ) -> None:
        """Make the parts of a weight without memory of its own pending, and the weight frozen."""
        if weight is None or not hasattr(weight, "__tensor_flatten__"):
            return
        for part in weight.__tensor_flatten__()[0]:
            value = getattr(weight, part)
            if (source := source_of(value)) is not None:
                setattr(weight, part, pending(value.shape, source, AttachedParameter))
                weight.requires_grad_(False)

    def join_in_state(self, module: nn.Module, state: dict[str, Any], prefix: str) -> None:
        for name, weight in weights_of_parts(module):
            paths = names_of_parts(name, weight, prefix)
            if all(path in state for path in paths.values()):
                parts = {part: state.pop(path).detach() for part, path in paths.items()}
                state[prefix + name] = of_parts(weight, parts)

    def part_in_state(self, module: nn.Module, state: dict[str, Any], prefix: str) -> None:
        for name, weight in weights_of_parts(module):
            if prefix + name in state:
                whole = state.pop(prefix + name)
                for part, path in names_of_parts(name, weight, prefix).items():
                    state[path] = getattr(whole, part)
