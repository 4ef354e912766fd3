"""Parameters that share memory without being one object, as after ``a.weight.data =
b.weight.data``, and tensors among the attributes of modules in the memory of a parameter: the
engine gives each parameter memory of its own, which would untie them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from hf_zero.errors import PartitionError
from hf_zero.logging import log_rank0
from hf_zero.zero.layout.flat_buffer import owner_of
from hf_zero.zero.layout.initial_values import source_of
from hf_zero.zero.layout.walk import buffers_of, named_modules_of, parameters_of

T = TypeVar("T", bound=torch.Tensor)
Tied = dict[nn.Parameter, nn.Parameter]
REMEDY = "give one of them memory of its own (.clone()), or assign the parameter itself to both"
COMPUTED = (
    "compute the {} from the parameter in forward, or give it memory of its own (.clone()) if it "
    "is to keep its values"
)


class _SharedView(NamedTuple):
    """A tensor of a model, and the bytes of its storage from its first to its last element."""

    name: str
    tensor: torch.Tensor
    start: int
    end: int

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> _SharedView:
        """Return the view of a tensor with its name."""
        size = tensor.element_size()
        start = int(tensor.storage_offset()) * size
        reach = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride()))
        return cls(name, tensor, start, start + (int(reach) + 1) * size)

    @property
    def trains(self) -> bool:
        return isinstance(self.tensor, nn.Parameter) and self.tensor.requires_grad

    def is_same(self, other: _SharedView) -> bool:
        """Return whether both have the same elements of their memory, in the same order."""
        return _geometry(self.tensor) == _geometry(other.tensor)

    def meets(self, other: _SharedView) -> bool:
        """Return whether both tensors, whose byte ranges overlap, have an element in common."""
        if self.tensor.dtype != other.tensor.dtype:
            return True
        first = min(self.start, other.start) // self.tensor.element_size()
        last = max(self.end, other.end) // self.tensor.element_size()
        taken = torch.zeros(last - first, dtype=torch.bool)
        memory, others = (
            taken.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset() - first)
            for tensor in (self.tensor, other.tensor)
        )
        memory.fill_(True)
        return bool(others.any())


def tie_shared_memory(
    model: nn.Module, logs: bool = True, on_rollback: Callable[..., None] | None = None
) -> Tied:
    """Tie parameters of ``model`` that are the same elements of one memory: one parameter takes the
    place of all and gets the sum of their gradients. Return {replaced: kept}. ``on_rollback`` takes
    the inverse of each replacement. Other parameters in one storage get a ``_version`` each.

    Raises PartitionError for tensors that share memory with a trainable parameter in another way:
    other views of it, buffers, frozen parameters, attributes of modules.
    """
    tied: Tied = {}
    for one, other in _overlapping(model, ()):
        if not (one.trains or other.trains):
            continue
        if one.trains and other.trains and one.is_same(other):
            first = tied.get(one.tensor, one.tensor)  # type: ignore[call-overload]
            tied[other.tensor] = first  # type: ignore[index]
            if logs:
                log_rank0(
                    f"{one.name} and {other.name} are the same memory: one parameter from now on"
                )
        elif one.meets(other):
            raise PartitionError(_refusal(one, other))
    for module in model.modules() if tied else ():
        for name, parameter in list(module._parameters.items()):
            if parameter in tied:
                if on_rollback is not None:
                    on_rollback(setattr, module, name, parameter)
                setattr(module, name, tied[parameter])
    _refuse_attributes(model)
    _separate_write_counts(model)
    return tied


def _refuse_attributes(model: nn.Module) -> None:
    """Raise PartitionError if an attribute of a module of ``model``, or an item of a list, tuple or
    dictionary there, is in the memory of a trainable parameter and not that parameter itself.
    """
    parameters = parameters_of(model)
    registered = {id(tensor) for tensor in (*parameters, *buffers_of(model))}
    by_storage = _by_storage(parameter for parameter in parameters if parameter.requires_grad)
    for prefix, module in named_modules_of(model):
        for name, path, tensor in _attributes(module):
            if id(tensor) in registered:
                continue
            with torch._C.DisableTorchFunctionSubclass():  # runs no code of the tensor's class
                sharing = by_storage.get((tensor.device, _address(tensor)), [])
            for parameter in sharing:
                view = _SharedView.of(f"{prefix}.{path}".lstrip("."), tensor)
                owner = next(key for key, p in model.named_parameters() if p is parameter)
                other = _SharedView.of(owner, parameter)
                overlap = view.start < other.end and other.start < view.end
                if overlap and view.meets(other) and name not in _set_by_hooks(module):
                    raise PartitionError(
                        f"the attribute {view.name} shares memory with the parameter {other.name}; "
                        "the engine lays parameters out anew, and the attribute would keep the "
                        f"values from before the first step; {COMPUTED.format('attribute')}"
                    )


def _attributes(module: nn.Module) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Yield name of the attribute, path and tensor for the tensors among the attributes of
    ``module`` and in its lists, tuples and dictionaries.
    """
    for name, value in module.__dict__.items():
        kind = type(value)
        if kind in (dict, list, tuple):
            for key, item in value.items() if kind is dict else enumerate(value):
                if issubclass(type(item), torch.Tensor):
                    yield name, f"{name}[{key!r}]", item
        elif issubclass(kind, torch.Tensor):
            yield name, name, value


def _set_by_hooks(module: nn.Module) -> list[object]:
    """Return the names of attributes of ``module`` that hooks compute before each forward, as
    ``spectral_norm`` of ``torch.nn.utils`` does.
    """
    hooks = module._forward_pre_hooks.values()
    return [getattr(hook, "__dict__", {}).get("name") for hook in hooks]


def _separate_write_counts(model: nn.Module) -> None:
    """Give each parameter of ``model`` its own ``_version``. Views of one tensor, such as those of
    ``map(nn.Parameter, base.chunk(2))``, share one, and a write to a view counts for all of them.
    """
    for group in _by_storage(parameters_of(model)).values():
        for view in group[1:]:
            # a graph or a hook of the script refers to the parameter as it is
            hooks = view._backward_hooks or view._post_accumulate_grad_hooks
            if not hooks and view._use_count() == 1:  # type: ignore[attr-defined]
                separate = nn.Parameter(view.data, view.requires_grad)
                separate.grad = view.grad
                torch._C._swap_tensor_impl(view, separate)


def without_tied(
    optimizer: torch.optim.Optimizer, tied: Mapping[nn.Parameter, nn.Parameter]
) -> None:
    """Replace the keys of ``tied`` in the groups of ``optimizer`` by their values.

    Raises PartitionError if they are in different groups.
    """
    group_of = {p: group for group in optimizer.param_groups for p in group["params"]}
    for alias, first in tied.items():
        if alias not in group_of:
            continue
        if group_of.get(first, group_of[alias]) is not group_of[alias]:
            raise PartitionError(
                f"parameters of shape {tuple(first.shape)} that are one memory are in different "
                "groups of the optimizer; put them into one group"
            )
        params, state = group_of[alias]["params"], optimizer.state.pop(alias, None)
        at = next(index for index, parameter in enumerate(params) if parameter is alias)
        params[at : at + 1] = [] if first in group_of else [first]
        group_of[first] = group_of[alias]
        if state is not None:
            optimizer.state.setdefault(first, state)


def refuse_shared(model: nn.Module, others: Sequence[tuple[str, nn.Parameter]]) -> None:
    """Raise PartitionError if the parameters ``others``, outside ``model``, share memory with it or
    with each other.
    """
    names = {name for name, _ in others}
    for one, other in _overlapping(model, others):
        if (one.trains or other.trains) and names & {one.name, other.name} and one.meets(other):
            raise PartitionError(_refusal(one, other))


def _refusal(one: _SharedView, other: _SharedView) -> str:
    remedy = REMEDY
    if not all(isinstance(view.tensor, nn.Parameter) for view in (one, other)):
        how, remedy = "a buffer and a parameter", COMPUTED.format("buffer")
    elif one.is_same(other):
        trains = one.trains and other.trains
        how = "two parameters" if trains else "a parameter that trains and one that is frozen"
    else:
        how = "different views"
    return (
        f"{one.name} and {other.name} are {how} that share memory; the engine would "
        f"lay them out separately, and a step would change only one of them; {remedy}"
    )


def _overlapping(
    model: nn.Module, others: Sequence[tuple[str, nn.Parameter]]
) -> Iterator[tuple[_SharedView, _SharedView]]:
    """Yield pairs of tensors of ``model`` and ``others`` that overlap in one memory."""
    tensors = (*parameters_of(model), *buffers_of(model), *dict(others).values())
    shared = [group for group in _by_storage(tensors).values() if len(group) > 1]
    named = (*model.named_parameters(), *model.named_buffers(), *others) if shared else ()
    name_of = {id(tensor): name for name, tensor in named}
    for group in shared:
        under_way: list[_SharedView] = []
        views = [_SharedView.of(name_of[id(tensor)], tensor) for tensor in group]
        for view in sorted(views, key=lambda view: view.start):
            under_way = [earlier for earlier in under_way if earlier.end > view.start]
            for earlier in under_way:
                yield earlier, view
            under_way.append(view)


def _by_storage(tensors: Iterable[T]) -> dict[tuple[torch.device, int], list[T]]:
    """Return the tensors in each storage, by device and address."""
    groups: dict[tuple[torch.device, int], list[T]] = {}
    for tensor in tensors:
        if address := _address(tensor):
            groups.setdefault((tensor.device, address), []).append(tensor)
    return groups


def _address(tensor: torch.Tensor) -> int:
    """Return the address of the storage of ``tensor``; 0 without ordinary memory: an engine, a file
    or a subclass holds its values.
    """
    kind = type(tensor)
    if kind is not nn.Parameter and kind is not torch.Tensor:
        if is_lazy(tensor) or owner_of(tensor) is not None:
            return 0
        if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            return 0  # its class defines the place of its values
    if tensor.layout is not torch.strided or source_of(tensor) is not None or not tensor.numel():
        return 0
    return tensor.untyped_storage().data_ptr()


def _geometry(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride()
