"""Construction of models without memory, whatever their constructors do, and the initialization of
models without values: their own initialization is recorded, and run one parameter at a time.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from hf_zero.errors import ConfigError, PartitionError
from hf_zero.loading.expressions import Filled
from hf_zero.loading.lazy import SET_DATA, LazyTensor, fill, is_filled
from hf_zero.loading.pending import make_pending, make_real
from hf_zero.logging import first_line
from hf_zero.zero.engine_parts import ModelWrapper

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

_RULES = ("reset_parameters", "_reset_parameters")


def _default_dtype(func: Callable[..., object], args: tuple[object, ...]) -> torch.dtype:
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

    def __torch_dispatch__(
        self, func: Callable[..., object], types: object, args: Any = (), kwargs: Any = None
    ) -> object:
        kwargs = kwargs or {}
        if func not in _FACTORIES or self._pauses():
            return func(*args, **kwargs)
        dtype = kwargs.get("dtype") or _default_dtype(func, args)
        nbytes = math.prod(args[0]) * dtype.itemsize
        on_cpu = torch.device(kwargs.get("device") or "cpu").type == "cpu"
        strided = kwargs.get("layout") in (None, torch.strided)
        large = dtype.is_floating_point and nbytes >= SMALL_BYTES
        if on_cpu and strided and large and not kwargs.get("pin_memory"):
            self._left -= nbytes
            if self._left < 0:
                tensor = LazyTensor(Filled(args[0], dtype))
                values = _FACTORIES[func](args)
                return tensor if values is None else fill(tensor, values)
        return func(*args, **kwargs)


class _LazyData(TorchFunctionMode):
    """Function mode that makes a tensor in memory lazy if its ``data`` becomes a lazy tensor."""

    def __torch_function__(
        self, func: Callable[..., object], types: object, args: Any = (), kwargs: Any = None
    ) -> object:
        if func != SET_DATA or [isinstance(each, LazyTensor) for each in args] != [False, True]:
            return func(*args, **(kwargs or {}))
        tensor, value = args
        parameter = isinstance(tensor, nn.Parameter)
        lazy = nn.Parameter(value) if parameter else value.detach()
        lazy.requires_grad_(tensor.requires_grad)
        vars(lazy).update(vars(tensor))
        try:
            torch.utils.swap_tensors(tensor, lazy)
        except RuntimeError as error:  # weak references would see the other one
            raise PartitionError(
                f"the data of a tensor of shape {tuple(tensor.shape)} cannot become that of a "
                f"weight under initialization: {first_line(error)}; register a new parameter"
            ) from error
        return None


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
        self._stack.enter_context(_LazyData())
        self._stack.enter_context(self._mode)
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    @property
    def roots(self) -> list[nn.Module]:
        return self.outermost(is_filled)

    def outermost(self, counts: Callable[[object], bool]) -> list[nn.Module]:
        """Return the outermost modules around those given a parameter for which ``counts``."""
        modules: dict[nn.Module, None] = {}
        for reference in self._owners:
            owner = reference()
            if owner is not None and any(map(counts, owner._parameters.values())):
                while (up := self._parents.get(owner)) is not None and (parent := up()) is not None:
                    owner = parent
                modules[owner] = None
        return list(modules)

    def _parameter(self, module: nn.Module, name: str, parameter: object) -> None:
        if parameter is not None and threading.get_ident() == self._thread:
            self._owners.append(weakref.ref(module))

    def _child(self, module: nn.Module, name: str, child: Any) -> None:
        if child is not None and not isinstance(module, ModelWrapper):  # an engine holds its model
            self._parents[child] = weakref.ref(module)


def give_values(model: nn.Module) -> None:
    """Set up the initialization of ``model``, all of whose parameters are on the meta device, by
    the model's own rule. The parameter objects stay the same.

    The rule is ``initialize_weights()``, as in models of transformers, else ``reset_parameters()``
    of every module with parameters or buffers. Raises ConfigError for tensors that the rule does
    not reach: their values came from a constructor, and the meta device has lost them.
    """
    before = {id(parameter): parameter for parameter in model.parameters()}
    places = [
        (tensors, name, before[id(tensor)])
        for tensors, name, tensor in _tensors(model)
        if id(tensor) in before
    ]
    with recording_functions():
        _make_fillable(model, _rule(model))
    if callable(getattr(model, "tie_weights", None)):
        model.tie_weights()  # type: ignore[operator]
    make_real(model)
    make_pending(model)
    filled: set[int] = set()
    for tensors, name, parameter in places:
        value = tensors[name]
        if value is not parameter and id(parameter) not in filled:
            torch.utils.swap_tensors(parameter, value)  # an optimizer may already refer to it
        filled.add(id(parameter))
        tensors[name] = parameter


def _rule(model: nn.Module) -> Callable[[], None]:
    """Return the function that initializes ``model``; raise ConfigError for modules without one."""
    initialize = getattr(model, "initialize_weights", None)
    if callable(initialize):
        return initialize
    owners = [module for module in model.modules() if next(_own(module), None) is not None]
    rules = [
        next(
            (getattr(module, name) for name in _RULES if callable(getattr(module, name, None))),
            None,
        )
        for module in owners
    ]
    without = sorted({type(module).__name__ for module, rule in zip(owners, rules) if rule is None})
    if without:
        raise ConfigError(
            f"the model is on the meta device, and {', '.join(without)} cannot give "
            f"{'its' if len(without) == 1 else 'their'} tensors values there; "
            "add reset_parameters() to each, or build the model inside hf_zero.Init(config=...) "
            "instead of torch.device('meta')"
        )

    def every_module() -> None:
        for rule in reversed(rules):  # so that the first owner of a tied weight writes it last
            if rule is not None:
                rule()

    return every_module


def _make_fillable(model: nn.Module, initialize: Callable[[], None]) -> None:
    """Replace the tensors of ``model`` by lazy ones, and record ``initialize`` on them. Raises
    ConfigError for tensors that it does not reach.
    """
    tensors_by_id: dict[int, LazyTensor | nn.Parameter] = {}
    for tensors, name, tensor in _tensors(model):
        if id(tensor) not in tensors_by_id:
            lazy: LazyTensor | nn.Parameter = LazyTensor(Filled(tensor.shape, tensor.dtype))
            if isinstance(tensor, nn.Parameter):
                lazy = nn.Parameter(lazy, requires_grad=tensor.requires_grad)
            tensors_by_id[id(tensor)] = lazy
        tensors[name] = tensors_by_id[id(tensor)]
    with torch.no_grad():
        initialize()
    empty = [
        name
        for _, name, tensor in _tensors(model)
        if isinstance(tensor, LazyTensor)
        and isinstance(tensor.expression, Filled)
        and tensor.numel()
        and not tensor.expression.initialized
    ]
    if empty:
        raise ConfigError(
            "the model is on the meta device, and nothing but its constructor gives "
            f"{', '.join(sorted(set(empty))[:4])} values; build it inside "
            "hf_zero.Init(config=...) instead of torch.device('meta')"
        )


_lock = threading.Lock()
_tables: list[dict[str, Any]] = [vars(nn.init)]  # namespaces whose functions are replaced
_originals: list[dict[str, object]] = []  # of each of these, while a context is open
_open_contexts = 0


def record_in(table: dict[str, object]) -> None:
    """Make :func:`recording_functions` also patch ``table``, another namespace with
    ``torch.nn.init``'s functions by name.
    """
    with _lock:
        if not any(known is table for known in _tables):
            _tables.append(table)


@contextmanager
def recording_functions() -> Iterator[None]:
    """Defer ``torch.nn.init``'s functions on lazy tensors as a whole within the ``with`` block:
    some of them inspect the numbers they have drawn.
    """
    global _open_contexts
    with _lock:
        _open_contexts += 1
        if _open_contexts == 1:
            for table in _tables:
                originals = {
                    name: value
                    for name, value in table.items()
                    if name.endswith("_") and not name.startswith("_") and callable(value)
                }
                _originals.append(originals)
                table.update({name: recorded(function) for name, function in originals.items()})
    try:
        yield
    finally:
        with _lock:
            _open_contexts -= 1
            if _open_contexts == 0:
                for table, originals in zip(_tables, _originals):
                    table.update(originals)
                _originals.clear()


def recorded(function: Callable[..., object]) -> Callable[..., object]:
    """Wrap ``function(tensor, ...)``, which fills a tensor in place, to be deferred for lazy
    tensors under initialization.
    """

    def record(tensor: torch.Tensor, *args: object, **kwargs: object) -> object:
        if not is_filled(tensor):
            return function(tensor, *args, **kwargs)
        return fill(tensor, function, *args, **kwargs)  # type: ignore[arg-type]

    return record


def _own(module: nn.Module) -> Iterator[tuple[dict[str, torch.Tensor | None], str, torch.Tensor]]:
    for tensors in (module._parameters, module._buffers):
        for name, tensor in list(tensors.items()):
            if tensor is not None:
                yield tensors, name, tensor  # type: ignore[misc]


def _tensors(
    model: nn.Module,
) -> Iterator[tuple[dict[str, torch.Tensor | None], str, torch.Tensor]]:
    for module in model.modules():
        yield from _own(module)
