"""Construction of models without memory, whatever their constructors do."""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as hooks
from torch.utils._python_dispatch import TorchDispatchMode

from hf_zero.loading.expressions import Filled
from hf_zero.loading.initialised import recording_functions
from hf_zero.loading.lazy import LazyTensor, fill, is_filled

aten = torch.ops.aten
SMALL_BYTES = 1 << 20  # smaller tensors are made in memory: they are many and take little

# Factory operation -> function from its arguments to the in-place operation that sets the values of
# the new tensor, or to None.
_FACTORIES: dict[Any, Callable[[tuple[Any, ...]], Callable[[torch.Tensor], Any] | None]] = {
    aten.empty.memory_format: lambda args: None,
    aten.zeros.default: lambda args: torch.Tensor.zero_,
    aten.ones.default: lambda args: lambda view: view.fill_(1),
    aten.full.default: lambda args: lambda view: view.fill_(args[1]),
    aten.rand.default: lambda args: torch.Tensor.uniform_,
    aten.randn.default: lambda args: torch.Tensor.normal_,
}


def _default_dtype(func: Any, args: tuple[Any, ...]) -> torch.dtype:
    """Return the dtype of a tensor made without one: ``full`` takes that of its value."""
    if func is aten.full.default and not isinstance(args[1], float):
        return torch.tensor(args[1]).dtype
    return torch.get_default_dtype()


class _WithoutMemory(TorchDispatchMode):
    """Dispatch mode that makes large floating-point CPU tensors lazy once ``whole_bytes`` of them
    are in memory, except while ``pauses()`` is true.
    """

    def __init__(self, whole_bytes: int, pauses: Callable[[], bool]):
        super().__init__()
        self._left = whole_bytes
        self._pauses = pauses

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _FACTORIES and not self._pauses():
            dtype = kwargs.get("dtype") or _default_dtype(func, args)
            nbytes = math.prod(args[0]) * dtype.itemsize
            plain = torch.device(kwargs.get("device") or "cpu").type == "cpu" and kwargs.get(
                "layout"
            ) in (None, torch.strided)
            if (
                plain
                and dtype.is_floating_point
                and nbytes >= SMALL_BYTES
                and not kwargs.get("pin_memory")
            ):
                self._left -= nbytes
                if self._left < 0:
                    made = LazyTensor(Filled(args[0], dtype))
                    values = _FACTORIES[func](args)
                    return made if values is None else fill(made, values)
        return func(*args, **kwargs)


class Building:
    """Context for the construction of models: beyond the first ``whole_bytes``, parameters have no
    memory, only a record of their values.

    ``roots`` are afterwards the outermost modules with such parameters, ``outermost(counts)`` those
    with any that ``counts``. While ``pauses()`` is true, tensors are made in memory.
    """

    def __init__(self, whole_bytes: int, pauses: Callable[[], bool] = lambda: False):
        self._mode = _WithoutMemory(whole_bytes, pauses)
        self._stack = ExitStack()
        self._thread = threading.get_ident()
        # in the order of construction, which is equal on all ranks
        self._owners: list[weakref.ref[nn.Module]] = []
        self._parents: weakref.WeakKeyDictionary[nn.Module, weakref.ref[nn.Module]] = (
            weakref.WeakKeyDictionary()
        )

    def __enter__(self) -> Building:
        self._stack.enter_context(recording_functions())
        for register, hook in (
            (hooks.register_module_parameter_registration_hook, self._parameter),
            (hooks.register_module_module_registration_hook, self._child),
        ):
            self._stack.callback(register(hook).remove)
        self._stack.enter_context(self._mode)
        return self

    def __exit__(self, *exc: Any) -> None:
        self._stack.close()

    @property
    def roots(self) -> list[nn.Module]:
        return self.outermost(is_filled)

    def outermost(self, counts: Callable[[Any], bool]) -> list[nn.Module]:
        """Return the outermost modules around those given a parameter for which ``counts``."""
        found: dict[nn.Module, None] = {}
        for reference in self._owners:
            owner = reference()
            if owner is not None and any(map(counts, owner._parameters.values())):
                while (up := self._parents.get(owner)) is not None and (parent := up()) is not None:
                    owner = parent
                found[owner] = None
        return list(found)

    def _parameter(self, module: nn.Module, name: str, parameter: Any) -> None:
        if parameter is not None and threading.get_ident() == self._thread:
            self._owners.append(weakref.ref(module))

    def _child(self, module: nn.Module, name: str, child: Any) -> None:
        if child is not None:
            self._parents[child] = weakref.ref(module)
