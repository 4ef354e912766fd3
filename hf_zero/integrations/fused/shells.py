"""Copies of modules that run the code of their classes on other tensors: on the meta device, to see
which module is called with which tensor, and small ones with random values, to see what a module
computes.
"""

from __future__ import annotations

import copy
import dis
import functools
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from hf_zero.errors import ConfigError
from hf_zero.zero.gather.model_patches import HOOKS
from hf_zero.zero.layout.meta_run import META, NUMBERS, MetaAnswers, inputs_on_meta
from hf_zero.zero.layout.walk import attribute_of

CONTAINERS = (list, dict, set)
CONSTANT = (bool, int, float, str, type, types.FunctionType, types.BuiltinFunctionType)
OF_TORCH = frozenset(nn.Module().__dict__)
_HOOKS = (
    *HOOKS,
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_always_called",
)


def shell(
    module: nn.Module,
    parameter: Callable[[torch.Tensor], torch.Tensor],
    buffer: Callable[[torch.Tensor], torch.Tensor],
    instead: Callable[[nn.Module], nn.Module | None] = lambda module: None,
) -> nn.Module:
    """Return a copy of ``module`` with ``parameter`` of each parameter, ``buffer`` of each buffer,
    the modules of ``instead`` in place of some, and no hooks and no replaced forwards. Lists,
    dicts and sets are copied, and everything else is shared.
    """
    tensors: dict[int, torch.Tensor] = {}
    modules: dict[int, nn.Module] = {}

    def copied(
        value: torch.Tensor | None, make: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor | None:
        if value is None:
            return None
        if id(value) not in tensors:
            tensors[id(value)] = make(value)
        return tensors[id(value)]

    def trained(value: torch.Tensor) -> nn.Parameter:
        new = parameter(value)
        return nn.Parameter(new, new.is_floating_point())

    def build(old: nn.Module) -> nn.Module:
        if id(old) in modules:
            return modules[id(old)]
        other = instead(old)
        if other is None:
            other = old.__class__.__new__(old.__class__)
            modules[id(old)] = other
            other.__dict__.update(
                (name, _attribute(value, old, other))
                for name, value in old.__dict__.items()
                if not hasattr(nn.Module, name)  # as forward
            )
            for name in _HOOKS:
                other.__dict__[name] = OrderedDict()
            other.__dict__["_parameters"] = {
                k: copied(v, trained) for k, v in old._parameters.items()
            }
            other.__dict__["_buffers"] = {k: copied(v, buffer) for k, v in old._buffers.items()}
            other.__dict__["_modules"] = {
                k: v if v is None else build(v) for k, v in old._modules.items()
            }
        modules[id(old)] = other
        return other

    return build(module)


def attributes(module: nn.Module) -> Iterator[tuple[str, object]]:
    """Yield the attributes that the class of ``module`` may branch on."""
    for name, value in module.__dict__.items():
        if (
            name not in OF_TORCH
            and name != "forward"
            and not name.startswith(("_hf_zero", "_is_hf"))
        ):
            yield name, value


def is_constant(value: object) -> bool:
    return value is None or isinstance(value, CONSTANT)


def _attribute(value: object, old: nn.Module, new: nn.Module) -> object:
    """Return an attribute of ``old`` for its copy ``new``, whose forward may write into it."""
    if isinstance(value, types.MethodType) and value.__self__ is old:
        return types.MethodType(value.__func__, new)
    return copy.copy(value) if type(value) in CONTAINERS else value


def layers_of(function: object) -> Iterator[types.FunctionType]:
    """Yield ``function`` and the functions that its decorators wrap."""
    functions: list[object] = [function]
    for wrapped in functions:
        if isinstance(wrapped, types.FunctionType):
            yield wrapped
            functions.extend(
                value
                for cell in wrapped.__closure__ or ()
                if isinstance(value := content(cell), types.FunctionType) and value not in functions
            )


def content(cell: types.CellType) -> object:
    """Return what a cell of a closure holds; None if it is empty."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def names_used(function: object) -> Iterator[tuple[str, str, object]]:
    """Yield the operation on each global name and attribute in the code of ``function`` and of its
    decorators, the name, and what it stands for as a global, or None.
    """
    for layer in layers_of(function):
        for use in dis.get_instructions(layer.__code__):
            if use.opcode in dis.hasname:
                yield use.opname, use.argval, layer.__globals__.get(use.argval)


@dataclass(eq=False)
class ModuleCall:
    """A call of the module ``name``: its (args, kwargs), the tensors among them, and among its
    results.
    """

    name: str
    module: nn.Module
    arguments: tuple[tuple[object, ...], Mapping[str, object]]
    inputs: tuple[torch.Tensor, ...]
    outputs: tuple[torch.Tensor, ...]

    def __post_init__(self) -> None:
        self.version = self.outputs[0]._version if self.outputs else 0  # at its return


@contextmanager
def calls(module: nn.Module, outermost: bool) -> Iterator[list[ModuleCall]]:
    """Record the calls of submodules of ``module``, in the order in which they return; the
    ``outermost`` alone, or all.
    """
    records: list[ModuleCall] = []
    inside = 0

    def enter(*_: object) -> None:
        nonlocal inside
        inside += 1

    def leave(name: str) -> Callable[..., None]:
        def hook(
            called: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], out: object
        ) -> None:
            nonlocal inside
            inside -= 1
            if not outermost or inside == 0:
                tensors = _tensors((args, kwargs))
                records.append(ModuleCall(name, called, (args, kwargs), tensors, _tensors(out)))

        return hook

    handles = []
    for name, submodule in module.named_modules():
        if submodule is not module:
            handles.append(submodule.register_forward_pre_hook(enter))
            handles.append(submodule.register_forward_hook(leave(name), with_kwargs=True))
    try:
        yield records
    finally:
        for handle in handles:
            handle.remove()


def _tensors(values: object) -> tuple[torch.Tensor, ...]:
    return tuple(leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor))


def calls_of_model(model: nn.Module) -> list[ModuleCall] | str:
    """Return all calls of a training forward of ``model``, a model of transformers, on the meta
    device; or the reason why it cannot run there.
    """
    get_base = attribute_of(model, "get_base_model")  # inside the adapters of PEFT
    base = model if get_base is None else get_base()
    try:
        positions = getattr(getattr(base, "config", None), "max_position_embeddings", None)
        inputs = inputs_on_meta(base, rows=2, tokens=min(6, positions or 6))
        copied = shell(model, _on_meta, _on_meta)
        copied.train()
        _without_caches(copied)
        for module in copied.modules():
            if getattr(module, "gradient_checkpointing", False):
                module.__dict__["gradient_checkpointing"] = False
            if module is not copied:
                module.__dict__["forward"] = functools.partial(_call_or_pass, module)
        with calls(copied, outermost=False) as records, torch.no_grad(), MetaAnswers(NUMBERS):
            copied(**inputs)
    except ConfigError as error:
        return str(error)
    except Exception as error:  # code of other people, on a device it was not written for
        return f"its forward does not run without values: {type(error).__name__}: {error}"[:200]
    return records


def _without_caches(copied: nn.Module) -> None:
    """Give the modules of a copy configurations without caches of keys and values, which a block
    of the run would leave to a later call of it. Forwards without the argument ``use_cache`` read
    it there.
    """
    configs: dict[int, object] = {}
    for module in copied.modules():
        config = module.__dict__.get("config")
        if getattr(config, "use_cache", False):
            if id(config) not in configs:
                configs[id(config)] = changed = copy.copy(config)
                changed.use_cache = False  # type: ignore[union-attr]
            module.__dict__["config"] = configs[id(config)]


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=META)


def _call_or_pass(module: nn.Module, *args: object, **kwargs: object) -> object:
    """Call the forward of the module's class. One that needs values, as experts do, which choose
    rows, returns its first argument instead, of whose shape a sublayer's output is.
    """
    try:
        return type(module).forward(module, *args, **kwargs)
    except Exception:
        tensors = _tensors((args, kwargs))
        if not tensors or not tensors[0].is_floating_point():
            raise
        return tensors[0].clone()
