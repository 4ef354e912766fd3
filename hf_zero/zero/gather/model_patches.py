"""PyTorch's operations on a whole model, adapted or refused while an engine owns its parameters:
state_dict, load_state_dict, ``.to``, steps of foreign optimizers, unfrozen parameters; and
hooks that copies of the model do not run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import chain
from operator import attrgetter, is_
from traceback import walk_stack
from typing import Any, NoReturn

import torch
from torch import nn
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch.utils.hooks import RemovableHandle

from hf_zero.errors import PartitionError
from hf_zero.zero.gather.schedule import Schedule
from hf_zero.zero.gather.unit import Unit, unit_of
from hf_zero.zero.layout.flat_buffer import FlatBuffer, flat_of, owner_of
from hf_zero.zero.layout.parameter import LiveParameter, OwnedParameter, name_of
from hf_zero.zero.layout.parameter_classes import is_cast, parameter_classes
from hf_zero.zero.layout.sharding import join_parts, sharding_of, take_own_part
from hf_zero.zero.layout.walk import modules_of

_parameters, _children = attrgetter("_parameters"), attrgetter("_modules")
_index, _requires_grad = attrgetter("index"), attrgetter("requires_grad")
# Puts whole parameters of a module into the state dict, under a prefix.
WholeSource = Callable[[nn.Module, dict[str, Any], str], None]


class Attached(partial):  # type: ignore[type-arg]
    """An engine's hook on a module: ``Attached(function, *first_arguments)``. A copy of the module
    gets a hook without effect. torch.compile of a whole model neither traces the function into its
    graphs nor compiles its callees.
    """

    def __new__(cls, function: Callable[..., object], /, *first: object) -> Attached:
        outside_graphs(getattr(function, "__func__", function), callees=False)
        return super().__new__(cls, function, *first)

    def __deepcopy__(self, memo: dict[int, object]) -> Attached:
        return Attached(_nothing)

    def __reduce__(self) -> tuple[type[Attached], tuple[Callable[..., None]]]:
        return Attached, (_nothing,)


# attributes of a module that hold its hooks
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def hooks_of(module: nn.Module) -> list[Callable[..., object]]:
    """Return the hooks on ``module`` that are not an engine's."""
    hooks = chain.from_iterable(module.__dict__[name].values() for name in HOOKS)
    return [hook for hook in hooks if not isinstance(hook, Attached)]


def outside_graphs(function: Any, callees: bool = True) -> Any:
    """Exclude ``function`` from the graphs that torch.compile traces, and return it; ``callees``:
    whether it may compile the functions that this one calls.
    """
    function._torchdynamo_disable = True
    calls = _FrameAction.DEFAULT if callees else _FrameAction.SKIP
    set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, calls))
    return function


def _nothing(*args: object, **kwargs: object) -> None:
    """Hook without effect, on a copied module."""


class Override:
    """A method that the engine sets on one module. A copy of the module has its class's method."""

    def __init__(self, fn: Callable[..., object], module: nn.Module, name: str):
        self._fn, self._module, self._name = fn, module, name

    def __call__(self, *args: object, **kwargs: object) -> object:
        return self._fn(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, object]) -> object:
        copied = memo[id(self._module)]
        return getattr(type(copied), self._name).__get__(copied)

    def __reduce__(self) -> NoReturn:
        raise PartitionError(
            f"a {type(self._module).__name__} under an engine cannot be pickled whole; save its "
            "state_dict(), or call engine.save_checkpoint"
        )


@dataclass
class _StateDictCall:
    """A call of ``state_dict`` of ``module``, during which the units ``pinned`` are whole."""

    module: nn.Module
    pinned: list[Unit] = field(default_factory=list)

    @cached_property
    def inside(self) -> set[nn.Module]:
        return {*self.module.modules()} - {self.module}


def _in_state_dict(module: nn.Module) -> bool:
    """Return whether this thread is inside ``module.state_dict()``."""
    code, frames = nn.Module.state_dict.__code__, walk_stack(sys._getframe())
    return any(f.f_code is code and f.f_locals["self"] is module for f, _ in frames)


@dataclass
class _LoadCall:
    """A call of ``load_state_dict`` of one module, during which the units ``pinned`` are whole;
    ``named``: its parameters in the state dict; ``refused``: keys there of tensors with another
    shape than the whole ones.
    """

    pinned: list[Unit] = field(default_factory=list)
    named: set[str] = field(default_factory=set)
    refused: list[str] = field(default_factory=list)


class ModelPatches:
    """Hooks on every module that owns parameters of an engine or wraps a unit.

    ``state_dict`` gathers and returns copies (on the CPU where parameters are sharded), which a
    module's other hooks for state dicts read and change, as they do in a plain module;
    ``load_state_dict`` gathers, lets torch copy, and takes the values over into shards and master
    weights. Both are collective at stage 3, and where parameters are cut by tensor or expert
    parallelism: a state dict has them whole. ``.to`` and its kin move buffers and refuse to change
    parameters.
    """

    def __init__(self, model: nn.Module, units: Sequence[Unit], schedule: Schedule):
        self._schedule = schedule
        # raises, with what was called, where values may not be loaded
        self.refuse_load: Callable[[str], None] = _nothing
        self._copies: dict[int, torch.Tensor] = {}
        # state_dict calls under way, outermost first
        self._entered: list[_StateDictCall] = []
        # units that stay pinned until a module of another unit, or the end: several blocks may
        # share one, which would be gathered for each of them
        self._kept: list[Unit] = []
        self._removable: list[RemovableHandle] = []
        self._patched: list[nn.Module] = []
        self._model = model
        self._part = False  # the state_dict call under way is for a part of the model
        self._whole_source: WholeSource | None = None  # of whole parameters, in place of gathers
        self._own: dict[nn.Module, dict[str, OwnedParameter]] = {}
        self._applies = False  # a call of ``_apply`` is under way
        # load_state_dict calls under way, by module
        self._loads: dict[nn.Module, _LoadCall] = {}
        # Result of the last walk: modules, their numbers of parameters and children, all of these
        # objects, and parameters that the engine does not train.
        self._walked: list[nn.Module] = [model]
        self._lengths: list[int] = []
        self._held: list[object] = []
        self._untrained: list[nn.Parameter] = []
        self._install(units)

    def _install(self, units: Sequence[Unit]) -> None:
        wraps = {module: unit for unit in units for module in unit.modules.values()}
        hooks_of: dict[tuple[Unit, ...], list[Attached]] = {}
        others = self._fill_state_dict, self._after_state_dict, self._after_load
        fill, after, after_load = [Attached(hook) for hook in others]
        modules = modules_of(self._model)
        for module in modules:
            parameters = module._parameters.items()
            owned = {name: p for name, p in parameters if isinstance(p, OwnedParameter)}
            flats = filter(None, map(owner_of, owned.values()))
            touched = set(map(unit_of, flats)) | ({wraps[module]} if module in wraps else set())
            if not touched:
                continue
            pinned = sorted((unit for unit in touched if unit.sharded_flats), key=_index)
            if tuple(pinned) not in hooks_of:
                hooks_of[tuple(pinned)] = [
                    Attached(hook, pinned) for hook in (self._before_state_dict, self._before_load)
                ]
            before, before_load = hooks_of[tuple(pinned)]
            filled = module._register_state_dict_hook(fill)
            # before the hooks of others, which would read a released parameter's placeholder, and
            # whose changes it would overwrite
            module._state_dict_hooks.move_to_end(filled.id, last=False)  # type: ignore[attr-defined]
            self._removable += [
                module.register_state_dict_pre_hook(before),
                filled,
                module._register_state_dict_hook(after),
                module.register_load_state_dict_pre_hook(before_load),
                module.register_load_state_dict_post_hook(after_load),
            ]
            if owned:
                self._own[module] = owned
        holding = set(self._own)  # and the modules that contain these
        for module in reversed(modules):
            if module in holding or not holding.isdisjoint(module._modules.values()):
                holding.add(module)
                module.__dict__["_apply"] = Override(partial(self._apply, module), module, "_apply")
                self._patched.append(module)

    def remove(self) -> None:
        for handle in self._removable:
            handle.remove()
        for module in self._patched:
            module.__dict__.pop("_apply", None)
        self._removable, self._patched = [], []

    def check(self) -> None:
        """Raise PartitionError if a parameter of the model was replaced or added since initialize:
        the engine would not train it. End state_dict and load_state_dict calls that an exception
        has broken.
        """
        if self._entered or self._loads:
            self._end_broken()
        # Runs in each step: as long as no module has changed since the last walk, this executes no
        # Python per module.
        registries = [*map(_parameters, self._walked), *map(_children, self._walked)]
        unchanged = list(map(len, registries)) == self._lengths and all(
            map(is_, chain.from_iterable(map(dict.values, registries)), self._held)
        )
        if not unchanged or any(map(_requires_grad, self._untrained)):
            self._walk()

    def _walk(self) -> None:
        """Check every module and record its parameters and children."""
        seen, pending = {self._model: None}, [self._model]
        untrained = []
        while pending:
            module = pending.pop()
            for child in module._modules.values():
                if child is not None and child not in seen:
                    seen[child] = None
                    pending.append(child)
            owned = self._own.get(module, {})
            for name, parameter in module._parameters.items():
                if name in owned or parameter is None or isinstance(parameter, OwnedParameter):
                    continue
                untrained.append(parameter)
                if parameter.requires_grad:
                    raise PartitionError(
                        f"{type(module).__name__}.{name}, of shape {tuple(parameter.shape)}, was "
                        "added to the model after hf_zero.initialize, and nothing trains it; call "
                        "engine.replace(module or parameter) or optimizer.add_param_group, on all "
                        "ranks, or set requires_grad=False"
                    )
            for name, parameter in owned.items():
                if module._parameters.get(name) is not parameter:
                    raise PartitionError(
                        f"{name_of(parameter)} has been replaced by another parameter after "
                        "hf_zero.initialize, which the engine does not train; call "
                        "engine.replace(module or parameter), on all ranks, or copy into it inside "
                        "GatheredParameters"
                    )
        self._walked, self._untrained = list(seen), untrained
        registries = [*map(_parameters, self._walked), *map(_children, self._walked)]
        self._lengths = list(map(len, registries))
        self._held = list(chain.from_iterable(map(dict.values, registries)))

    @contextmanager
    def state_dict_from(self, whole_source: WholeSource) -> Iterator[None]:
        """Context in which ``state_dict`` gathers nothing: ``whole_source`` puts the whole
        parameters of each module into it, before other hooks of the module read them.
        """
        self._end_broken()
        self._whole_source = whole_source
        try:
            yield
        finally:
            self._whole_source = None

    def _before_state_dict(
        self, pinned: list[Unit], module: nn.Module, prefix: str, keep_vars: bool
    ) -> None:
        if self._whole_source is not None:
            return
        while self._entered and module not in self._entered[-1].inside:
            outer = self._entered[-1].module
            if outer is not module and _in_state_dict(outer):
                break  # a hook asks for that of a module elsewhere
            self._leave_one()  # an exception has broken that call
        if not self._entered:
            self._schedule.abort_broken_backward()
            self._part = module is not self._model
        call = _StateDictCall(module)
        self._entered.append(call)
        if pinned:
            self._unpin_kept(except_for=pinned)
        for unit in pinned:
            if unit in self._kept:
                self._kept.remove(unit)
            else:
                self._schedule.pin(unit)
            call.pinned.append(unit)

    def _fill_state_dict(
        self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: object
    ) -> None:
        (self._whole_source or self._copy_gathered)(module, state, prefix)
        parameter_classes().join_in_state(module, state, prefix)

    def _copy_gathered(self, module: nn.Module, state: dict[str, Any], prefix: str) -> None:
        for name, parameter in module._parameters.items():
            key = prefix + name
            if not isinstance(parameter, OwnedParameter) or key not in state:
                continue
            live = isinstance(parameter, LiveParameter)
            if self._part or live or sharding_of(parameter).axes:
                if not is_cast(parameter) and state[key].data_ptr() != parameter.data_ptr():
                    continue  # its module writes others, as the scales of a merged weight
                # Copies, because a sharded parameter is released again, and a view would be saved
                # with its whole storage. One copy per parameter: tied names still share memory and
                # are saved once.
                if id(parameter) not in self._copies:
                    value = join_parts(sharding_of(parameter), parameter.detach(), key)
                    copy = torch.empty(value.shape, dtype=parameter.dtype)
                    self._copies[id(parameter)] = copy.copy_(value)
                state[key] = self._copies[id(parameter)]

    def _after_state_dict(
        self, module: nn.Module, state: object, prefix: str, metadata: object
    ) -> None:
        if self._whole_source is not None:
            return
        while self._leave_one() is not module:
            pass

    def _leave_one(self) -> nn.Module:
        call = self._entered.pop()
        for unit in call.pinned:
            if any(unit in outer.pinned for outer in self._entered):
                self._schedule.unpin(unit)
            else:
                self._kept.append(unit)
        if not self._entered:
            self._unpin_kept()
            self._copies = {}
            self._schedule.shards.end_asking()
        return call.module

    def _unpin_kept(self, except_for: Sequence[Unit] = ()) -> None:
        for unit in [unit for unit in self._kept if unit not in except_for]:
            self._kept.remove(unit)
            self._schedule.unpin(unit)

    def _before_load(
        self,
        pinned: list[Unit],
        module: nn.Module,
        state: dict[str, object],
        prefix: str,
        metadata: dict[str, object],
        strict: bool,
        missing: list[str],
        unexpected: list[str],
        errors: list[str],
    ) -> None:
        # refused before anything is replaced or pinned
        if metadata.get("assign_to_params_buffers"):
            owned = next((p for p in module.parameters() if isinstance(p, OwnedParameter)), None)
            raise PartitionError(
                "load_state_dict(assign=True) cannot replace "
                f"{name_of(owned) if owned is not None else 'parameters'}, "
                "which lives in a flat buffer; use assign=False"
            )
        if self._own.get(module):
            self.refuse_load("load_state_dict()")
        if self._loads:
            self._end_loads(module)
        call = self._loads[module] = _LoadCall()
        for unit in pinned:
            self._schedule.pin(unit)
            call.pinned.append(unit)
        parameter_classes().part_in_state(module, state, prefix)
        parameters = self._own.get(module, {})
        for name, parameter in parameters.items():
            cuts = sharding_of(parameter)
            if cuts.axes and not take_own_part(cuts, state, prefix + name, errors):
                call.refused.append(prefix + name)
        call.named.update(name for name in parameters if prefix + name in state)

    @torch.no_grad()
    def _after_load(self, module: nn.Module, incompatible: Any) -> None:
        # a module with a ``_load_from_state_dict`` of its own may have called no pre-hook
        call = self._loads.get(module, _LoadCall())
        for key in call.refused:  # torch counts them as missing, too
            if key in incompatible.missing_keys:
                incompatible.missing_keys.remove(key)
        with self._schedule.shards.writing():
            for name, parameter in self._own.get(module, {}).items():
                if name in call.named and module._parameters.get(name) is parameter:
                    flat_of(parameter).store_gathered(name_of(parameter))
        self._end_loads(module)

    def _end_loads(self, module: nn.Module) -> None:
        """End the loads of ``module`` and of the modules inside it: an exception has broken those
        whose post-hook has not run.
        """
        for part in [part for part in module.modules() if part in self._loads]:
            for unit in self._loads.pop(part).pinned:
                self._schedule.unpin(unit)

    def _end_broken(self) -> None:
        """End the state_dict and load_state_dict calls that an exception has broken."""
        while self._entered:
            self._leave_one()
        self._end_loads(self._model)

    def _apply(
        self, module: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
    ) -> nn.Module:
        outermost, self._applies = not self._applies, True
        try:
            if outermost:  # before any module is changed
                for part in module.modules() if recurse else (module,):
                    _refuse_change(part, fn)
            if module not in self._own:
                applied: nn.Module = type(module)._apply(module, fn, recurse)
                return applied
            for child in module.children() if recurse else ():
                child._apply(fn)
        finally:
            self._applies = not outermost
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = fn(buffer)
        return module


def _refuse_change(module: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Raise PartitionError if ``fn`` changes dtype or device of a parameter of ``module``."""
    for parameter in module._parameters.values():
        if not isinstance(parameter, OwnedParameter):
            continue
        # scales of quantized weights keep their dtype in a cast of their module
        dtype = parameter.dtype if is_cast(parameter) else torch.uint8
        probe = fn(torch.empty(0, dtype=dtype, device=parameter.device))
        if probe.dtype != dtype or probe.device != parameter.device:
            raise PartitionError(
                f"{name_of(parameter)} is {parameter.dtype} on {parameter.device} and cannot "
                f"become {probe.dtype} on {probe.device} now that an engine owns it; move or cast "
                "the model before, load it with dtype=, and choose bf16 or fp16 in the config"
            )


def refuse_switched(flats: Sequence[FlatBuffer]) -> None:
    """Raise PartitionError if a parameter laid out as frozen requires grad in a backward. A
    trainable one may be frozen for a while and then gets no gradient.
    """
    for flat in flats:
        for name in sorted(flat.parameter_views.switched):
            if flat.parameters[name].requires_grad:
                raise PartitionError(
                    f"requires_grad of {name} is True in this backward, and the engine keeps it "
                    "frozen: set it back after forwards that need it otherwise; or, to train it "
                    "from now on, give it to optimizer.add_param_group if no group has it, and "
                    "call the engine, not its module (in Lightning: unfreeze between batches)"
                )


def refuse_foreign_step(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
    """Raise PartitionError if ``optimizer`` was built over parameters that an engine owns: it would
    see no gradients and train nothing.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            flat = owner_of(parameter) if isinstance(parameter, OwnedParameter) else None
            if flat is not None and getattr(flat.live_engine, "optimizer", None) is not optimizer:
                raise PartitionError(
                    f"{type(optimizer).__name__} holds {name_of(parameter)}, which an hf-zero "
                    "engine owns and trains; pass the optimizer with its model to "
                    "hf_zero.initialize or accelerator.prepare, and step the one that it returns"
                )
