"""The classes of parameters that an engine owns, and the operations allowed on a released
parameter.

[Note: released parameters]
A released parameter keeps its identity, hash, shape and dtype; its memory is one element, expanded.
A write through such a tensor would be lost silently, and a save would store garbage. So its class
becomes :class:`ReleasedParameter`, whose ``__torch_function__`` answers metadata and raises on
everything else. Autograd's saved references are to the tensor, not to its Python class, and survive
the change.

[Note: parameters of a class of their own]
Quantized weights are often a subclass of ``nn.Parameter`` with attributes that define how to read
the bytes. Such a parameter keeps its class, its attributes and the name of its class: while an
engine owns it, its class inherits from both the engine's and its own.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from enum import Enum
from itertools import chain
from typing import Any, NoReturn, Protocol, Self, TypeVar

import torch
from torch import nn

from hf_zero.device import kinds
from hf_zero.errors import PartitionError, ReleasedParameterError
from hf_zero.zero.layout.flat_spec import FlatSpec
from hf_zero.zero.layout.gradients import GradientBuffer
from hf_zero.zero.layout.optimizer_shard import OptimizerShard
from hf_zero.zero.layout.tree import tensors_in, transformed

Flat = TypeVar("Flat", contravariant=True)
_NEW_PARAMETER = nn.Parameter.__new__.__code__
HOLDER = "_hf_zero_holder"  # attribute of a parameter that no flat buffer holds: its engine, weakly
_data: Any = torch.Tensor.data
_requires_grad: Any = torch.Tensor.requires_grad


class ZeroParamStatus(Enum):
    """State of a stage 3 parameter's values: whole on this rank or sharded. INFLIGHT, DeepSpeed's
    third, is never reported.
    """

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


class OwningEngine(Protocol[Flat]):
    """An engine with flat buffers of the class ``Flat``, as what it is made of calls it."""

    @property
    def shard_only(self) -> bool: ...

    def refuse_unconfirmed(self, what: str) -> None: ...

    def refuse_update(self) -> None: ...

    def finish_update_in_backward(self) -> None: ...

    def gather_on_use(self, flat: Flat) -> bool: ...

    def gathered(self, flat: Flat) -> AbstractContextManager[None]: ...

    def keep_for_backward(self, flat: Flat, node: torch.autograd.graph.Node) -> None: ...

    def write_gradient(self, flat: Flat, name: str, value: torch.Tensor | None) -> None: ...


class OwningBuffer(Protocol):
    """A flat buffer, as the classes of its parameters call it."""

    spec: FlatSpec
    gradient: GradientBuffer
    optimizer_shard: OptimizerShard

    @property
    def shard(self) -> torch.Tensor: ...

    @property
    def engine(self) -> OwningEngine[Self] | None: ...

    @property
    def live_engine(self) -> OwningEngine[Self] | None: ...

    def data_of(self, name: str, values: torch.Tensor) -> torch.Tensor: ...

    def assign(self, name: str, value: torch.Tensor) -> bool: ...

    def cast(self, name: str, dtype: torch.dtype) -> None: ...

    def note_requires_grad(self, name: str) -> None: ...

    def mark_views(self, tensors: Sequence[torch.Tensor]) -> None: ...


class WholeHolder(Protocol):
    """An engine that trains parameters whole, in no flat buffer, as what reads and writes whole
    state calls it.
    """

    def updated(self, parameter: torch.Tensor) -> torch.Tensor: ...

    def full_gradient(self, parameter: torch.Tensor) -> torch.Tensor | None: ...

    def set_full_gradient(self, parameter: torch.Tensor, value: torch.Tensor) -> None: ...

    def full_optimizer_state(self, parameter: torch.Tensor, kind: str) -> torch.Tensor: ...


def holder_of_whole(parameter: torch.Tensor) -> WholeHolder | None:
    """Return the engine that trains ``parameter`` whole, in no flat buffer, if there is one. Raises
    PartitionError for what is no tensor.
    """
    if not isinstance(parameter, torch.Tensor):
        raise PartitionError(f"{parameter!r:.80} is no parameter; pass one of the model")
    holder: Callable[[], WholeHolder | None] | None = parameter.__dict__.get(HOLDER)
    return None if holder is None else holder()


def name_of(parameter: torch.Tensor) -> str:
    name: str = parameter.__dict__.get("_hf_zero_name", "?")
    return name


def given_class(parameter: torch.Tensor) -> type[nn.Parameter]:
    """Return the class of ``parameter``, without the engine's."""
    kind = type(parameter)  # isinstance asks the class of all parameters, in Python
    return kind.given if issubclass(kind, OwnedParameter) else kind  # type: ignore[return-value]


@functools.cache
def owned_class(kind: type[OwnedParameter], base: type[nn.Parameter]) -> type[OwnedParameter]:
    """Return the subclass of ``kind`` and ``base``, for a parameter whose class was ``base``.

    Raises TypeError if the two classes cannot be combined.
    """
    if base is nn.Parameter:
        return kind
    return type(
        base.__name__,  # other libraries also check the name of such a class
        (kind, base),
        {
            "given": base,
            "__module__": base.__module__,
            "__qualname__": base.__qualname__,
            # its own methods create parameters that no engine owns
            "__new__": lambda cls, *args, **kwargs: base(*args, **kwargs),
            "to": _to,
        },
    )


def _to(parameter: Any, *args: Any, **kwargs: Any) -> object:
    """Return ``parameter`` itself if it is there already, as torch does: libraries that make a new
    parameter then put that in its place. A copy is a plain tensor, as of the memory of a weight.
    """
    if kwargs.get("copy"):
        return torch.Tensor.to(parameter, *args, **kwargs)
    probe = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
    if probe.to(*args, **kwargs) is probe:
        return parameter
    return parameter.given.to(parameter, *args, **kwargs)


def become(parameter: torch.Tensor, kind: type[OwnedParameter]) -> None:
    """Set the class of ``parameter`` to ``kind``, combined with its class before the engine."""
    parameter.__class__ = owned_class(kind, given_class(parameter))


class OwnedParameter(nn.Parameter):
    """A parameter whose memory is a view of its unit's flat buffer."""

    given: type[nn.Parameter] = nn.Parameter
    _hf_zero_flat: OwningBuffer  # as the two below, in its ``__dict__`` while an engine owns it
    _hf_zero_name: str
    _hf_zero_id: int

    @property
    def grad(self) -> torch.Tensor | None:
        """The gradient of this backward. Raises PartitionError once the engine has taken it in."""
        value = raw_grad(self)
        flat: OwningBuffer | None = self.__dict__.get("_hf_zero_flat")
        reduced = (
            flat is not None and flat.gradient.holds_gradient and not torch.compiler.is_compiling()
        )
        # A gradient on the parameter between backwards was seen by no hook: it is only a part
        # of its gradient.
        if reduced and (value is None or torch._C._current_graph_task_id() == -1):
            raise PartitionError(
                f"the gradient of {name_of(self)} has been taken in by the engine and is not on "
                "the parameter; use engine.get_global_grad_norm(), config gradient_clipping "
                "instead of clip_grad_norm_, hf_zero.safe_get_full_grad(parameter), or "
                "hf_zero.safe_set_full_grad(parameter, value) to change it"
            )
        return value

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        """Set ``.grad`` as plain PyTorch does; once the engine has taken the gradient in, replace
        or drop the engine's instead.
        """
        flat: OwningBuffer | None = self.__dict__.get("_hf_zero_flat")
        set_raw_grad(self, value)  # checks its shape, dtype and device
        in_backward = torch._C._current_graph_task_id() != -1
        if flat is None or in_backward or torch.compiler.is_compiling():
            return
        if flat.gradient.holds_gradient:
            set_raw_grad(self, None)
            assert flat.engine is not None
            flat.engine.write_gradient(flat, name_of(self), value)
        elif value is None:
            flat.gradient.set_to_none(name_of(self))

    @property
    def data(self) -> torch.Tensor:
        """The values, outside autograd.

        Writes through it are counted; an assigned tensor is copied into the flat buffer.
        """
        values: torch.Tensor = _data.__get__(self)
        flat: OwningBuffer | None = self.__dict__.get("_hf_zero_flat")
        if flat is None or isinstance(values, ReleasedTensor) or torch.compiler.is_compiling():
            return values
        return flat.data_of(name_of(self), values)

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if value is self:
            return  # as in module.to() without a change
        flat: OwningBuffer | None = self.__dict__.get("_hf_zero_flat")
        if isinstance(self, ReleasedParameter) and isinstance(value, ReleasedTensor):
            assert flat is not None
            flat.cast(name_of(self), value.dtype)
            return
        if (
            flat is None
            or isinstance(self, ReleasedParameter)
            or not flat.assign(name_of(self), value)
        ):
            _data.__set__(self, value)

    @property
    def requires_grad(self) -> bool:
        """Return whether operations on the parameter are recorded."""
        with torch._C.DisableTorchFunctionSubclass():
            requires: bool = _requires_grad.__get__(self)
        return requires

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> OwnedParameter:
        """Freeze or unfreeze the parameter. The next forward of the engine that records a graph
        rebuilds the engine if one that was frozen requires grad, and is in a group of the
        optimizer.
        """
        if requires_grad != self.requires_grad:
            with torch._C.DisableTorchFunctionSubclass():
                _requires_grad.__set__(self, requires_grad)
            flat: OwningBuffer | None = self.__dict__.get("_hf_zero_flat")
            if flat is not None:
                flat.note_requires_grad(name_of(self))
        return self

    def __init__(self, *args: object, **kwargs: object) -> None:
        """Make ``nn.Parameter(weight)`` a plain one: it is in no flat buffer."""
        self.__class__ = self.given  # type: ignore[assignment]

    def detach(self) -> torch.Tensor:
        """Return the values, outside autograd. For ``nn.Parameter(weight)``, which wants a tensor
        of the weight's class, return a parameter over the same memory, of which :meth:`__init__`
        then makes a plain one. Raises PartitionError for a subclass of ``nn.Parameter``.
        """
        if self.given is not nn.Parameter or torch.compiler.is_compiling():
            return super().detach()
        caller = sys._getframe(1)
        if caller.f_code is not _NEW_PARAMETER or isinstance(self, ReleasedParameter):
            return super().detach()
        if (kind := caller.f_locals["cls"]) is not nn.Parameter:
            raise PartitionError(
                f"{kind.__name__}({name_of(self)}) cannot be made of a parameter that an engine "
                f"owns; pass its .data, or a copy: {name_of(self)}.detach().clone()"
            )
        return torch.Tensor._make_subclass(type(self), self.data, False)

    def _bare(self) -> nn.Parameter:
        """Return a copy of the values, with the class and attributes before the engine."""
        with torch._C.DisableTorchFunctionSubclass():
            bare = torch.Tensor._make_subclass(
                self.given, self.detach().clone(), self.requires_grad
            )
        if self.given is not nn.Parameter:
            bare.__dict__.update(
                (name, bare.data if value is self else value)
                for name, value in self.__dict__.items()
                if not name.startswith("_hf_zero_")
            )
        return bare

    def __deepcopy__(self, memo: dict[int, object]) -> nn.Parameter:
        bare = self._bare()
        memo[id(self)] = copied = bare if self.given is nn.Parameter else copy.deepcopy(bare, memo)
        return copied

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        reduced: tuple[object, ...] = self._bare().__reduce_ex__(protocol)
        return reduced


class UpdatingParameter(OwnedParameter):
    """A whole parameter whose update is under way: every operation on it waits for the update."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if not (_called(func) in METADATA and func.__name__ != "__set__"):
            for parameter in tensors_in((args, kwargs)):
                if isinstance(parameter, UpdatingParameter):
                    parameter._hf_zero_flat.optimizer_shard.wait_for_update()
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]

    def _bare(self) -> nn.Parameter:
        self._hf_zero_flat.optimizer_shard.wait_for_update()
        return OwnedParameter._bare(self)  # its class is another one now


class _Status:
    """A read-only class attribute that also hides a status set on the instance before."""

    def __init__(self, status: ZeroParamStatus):
        self._status = status

    def __get__(self, parameter: torch.nn.Parameter, kind: type) -> ZeroParamStatus:
        return self._status

    def __set__(self, parameter: torch.nn.Parameter, value: object) -> None:
        raise AttributeError("ds_status says where the values of a parameter are: it is read only")


class _Stage3Parameter(OwnedParameter):
    """DeepSpeed's attributes of a stage 3 parameter, which other libraries read."""

    ds_status = _Status(ZeroParamStatus.AVAILABLE)

    @property
    def ds_id(self) -> int:
        return self._hf_zero_id

    @property
    def ds_shape(self) -> torch.Size:
        return self.shape

    @property
    def ds_numel(self) -> int:
        return self.numel()

    @property
    def ds_persist(self) -> bool:
        """Return whether the parameter stays whole between steps."""
        return self._hf_zero_flat.spec.persistent

    @property
    def ds_tensor(self) -> torch.Tensor:
        """This rank's elements of the parameter: 1-D, possibly empty."""
        _, start, stop = self._hf_zero_flat.spec.own_range(self._hf_zero_name)
        return self._hf_zero_flat.shard[start:stop]

    @property
    def ds_active_sub_modules(self) -> set[int]:
        return set()

    def partition_numel(self) -> int:
        return self.ds_tensor.numel()


class LiveParameter(_Stage3Parameter):
    """A stage 3 parameter that is whole and readable: its unit is gathered, or it is persistent."""


_METADATA = """
shape dtype device layout requires_grad is_leaf grad grad_fn ndim is_cuda is_cpu is_meta is_sparse
is_quantized is_nested is_mkldnn is_xpu is_mps nbytes itemsize names _version _backward_hooks
_post_accumulate_grad_hooks output_nr retains_grad size dim numel nelement element_size stride
ndimension is_floating_point is_complex is_contiguous is_inference is_same_size register_hook
register_post_accumulate_grad_hook get_device __hash__ __len__ __get_device is_signed has_names
grad_dtype is_distributed is_sparse_csr _is_view _has_symbolic_sizes_strides
_has_compatible_shallow_copy_type
"""
METADATA = frozenset(_METADATA.split())  # allowed on a released parameter
# operations behind module.to() and the like; they return the tensor itself if it has the dtype and
# device already
CONVERSIONS = frozenset(("to", "float", "half", "bfloat16", "double", "type")) | kinds.COPIES


LEFT_SHARDED = (
    "was destroyed and left its parameters sharded; call hf_zero.initialize again, or "
    "destroy(gather=True) next time"
)


def _refuse(name: str, operation: str, flat: OwningBuffer | None = None) -> ReleasedParameterError:
    if flat is not None and flat.live_engine is None:
        return ReleasedParameterError(f"{operation} on {name}: its engine {LEFT_SHARDED}")
    return ReleasedParameterError(
        f"{operation} on {name}: its values are sharded over the ranks and not here. "
        "Gather them first: `with hf_zero.GatheredParameters([parameter], modifier_rank=0 or "
        "None):`; for a whole copy use engine.state_dict()"
    )


def _called(func: Callable[..., object]) -> str:
    if func.__name__ in ("__get__", "__set__", "__delete__"):
        return getattr(getattr(func, "__self__", None), "__name__", func.__name__)
    return func.__name__


class WatchedParameter(LiveParameter):
    """A gathered parameter whose own module is not running, as inside GatheredParameters: a graph
    recorded on it keeps its unit gathered for the backward, and a view of it marks the unit as
    aliased.
    """

    @classmethod
    def __torch_function__(
        cls, func: object, types: object, args: object = (), kwargs: object = None
    ) -> object:
        answer = super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        results = list(tensors_in(answer))
        records = torch.is_grad_enabled() and not transformed()
        nodes = [t.grad_fn for t in results if t.grad_fn is not None] if records else []
        if results:
            flats: set[OwningBuffer] = {
                p._hf_zero_flat
                for p in tensors_in((args, kwargs))
                if isinstance(p, WatchedParameter)
            }
            for flat in flats:
                for node in nodes:
                    assert flat.engine is not None
                    flat.engine.keep_for_backward(flat, node)
                flat.mark_views(results)
        return answer


def placeholder(dtype: torch.dtype, shape: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return a tensor of one element, expanded: a shape and a dtype without memory. Floats have all
    bits set, which is NaN: a leak cannot pass for a weight.
    """
    value = 255 if dtype.is_floating_point else 0
    bits = torch.full((dtype.itemsize,), value, dtype=torch.uint8, device=device)
    return bits.view(dtype).view(()).expand(tuple(shape))


class ReleasedTensor(torch.Tensor):
    """The result of ``parameter.data`` and ``parameter.detach()`` for a released parameter: shape
    and dtype, no values. Under an engine that only holds the model, it can be cast and assigned to
    the data of the parameter, whose values the next engine casts.
    """

    _hf_zero_flat: OwningBuffer
    _hf_zero_name: str

    @classmethod
    def __torch_function__(
        cls, func: Any, types: object, args: Any = (), kwargs: Any = None
    ) -> object:
        name = _called(func)
        if name in METADATA and func.__name__ != "__set__":
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        tensor = next((a for a in args if isinstance(a, ReleasedTensor)), None)
        if name in CONVERSIONS and tensor is args[0]:
            engine = tensor._hf_zero_flat.engine
            probe = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            result = func(probe, *args[1:], **(kwargs or {}))
            if engine is not None and engine.shard_only and result.device == probe.device:
                with torch._C.DisableTorchFunctionSubclass():
                    whole = placeholder(result.dtype, tensor.shape, result.device)
                    return _without_values(whole, tensor._hf_zero_flat, tensor._hf_zero_name)
        raise _refuse(getattr(tensor, "_hf_zero_name", "a released parameter"), name)


def _without_values(bare: torch.Tensor, flat: OwningBuffer, name: str) -> ReleasedTensor:
    released = bare.as_subclass(ReleasedTensor)
    released._hf_zero_flat, released._hf_zero_name = flat, name
    return released


class ReleasedParameter(_Stage3Parameter):
    """A stage 3 parameter whose values are sharded: metadata only."""

    ds_status = _Status(ZeroParamStatus.NOT_AVAILABLE)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        name = _called(func)
        setting = func.__name__ == "__set__"
        if name in METADATA and (
            not setting or name in ("grad", "_backward_hooks", "_post_accumulate_grad_hooks")
        ):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        lists = (a for a in args if isinstance(a, (list, tuple)))
        operands = chain(args, kwargs.values(), chain.from_iterable(lists))
        released = next((a for a in operands if isinstance(a, ReleasedParameter)), None)
        if released is None:
            raise _refuse("a released parameter", name)
        if setting or (name.endswith("_") and not name.endswith("__")):
            raise _refuse(name_of(released), name, released._hf_zero_flat)
        return released._read(func, name, args, kwargs)

    def _read(
        self,
        func: Callable[..., object],
        name: str,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
    ) -> object:
        """Call ``func``, ``name`` in messages, which reads this parameter: with its values in a
        forward, and elsewhere on an engine that only shards. Raises PartitionError otherwise.
        """
        flat = self._hf_zero_flat
        if name in ("data", "detach"):
            with torch._C.DisableTorchFunctionSubclass():
                return _without_values(torch.Tensor.detach(self), flat, name_of(self))
        engine = flat.live_engine
        if engine is not None and engine.gather_on_use(flat):
            return func(*args, **kwargs)
        if name in CONVERSIONS and self is args[0]:
            probe = torch.empty(0, dtype=self.dtype, device=self.device)
            if func(probe, *args[1:], **kwargs) is probe:
                return self
        # adapters read the weights they are made for, on all ranks
        if engine is not None and engine.shard_only:
            with engine.gathered(flat):
                return func(*args, **kwargs)
        raise _refuse(name_of(self), name, flat)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"ReleasedParameter({name_of(self)}, shape={tuple(self.shape)}, dtype={self.dtype})"

    def __deepcopy__(self, memo: dict[int, object]) -> nn.Parameter:
        flat = self._hf_zero_flat
        engine = flat.live_engine
        if engine is None or not engine.shard_only:
            raise _refuse(name_of(self), "deepcopy", flat)
        dtype = self.dtype  # after a cast it differs from the dtype of the values
        with engine.gathered(flat):
            copied = OwnedParameter.__deepcopy__(self, memo)  # its class is another one now
        if copied.dtype != dtype:
            copied.data = copied.data.to(dtype)
        return copied

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise _refuse(name_of(self), "pickling", self._hf_zero_flat)


_grad: Any = torch.Tensor.grad


def raw_grad(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient that autograd left on ``parameter``."""
    with torch._C.DisableTorchFunctionSubclass():
        grad: torch.Tensor | None = _grad.__get__(parameter)
    return grad


def set_raw_grad(parameter: torch.Tensor, value: torch.Tensor | None) -> None:
    with torch._C.DisableTorchFunctionSubclass():
        _grad.__set__(parameter, value)
