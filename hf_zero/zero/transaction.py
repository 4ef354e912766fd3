"""Transactions: changes of a model, an optimizer and the process that an exception undoes, in a
set-up or a rebuild.

[Note: one undo stack]
:func:`hf_zero.initialize` runs in one :func:`transaction`. Whoever changes something outside the
objects that it creates pushes the inverse operation first (:func:`on_rollback`); outside a
transaction that does nothing. An exception runs the inverse operations from the last to the first.
What many lines change, modules and optimizers, is not undone line by line but restored from a
snapshot (:func:`restore_on_rollback`), whichever lines have run, those of other libraries included.
A step or a load is not undone: ``StateChanges`` (``step/state_changes.py``) refuses a half changed
state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from hf_zero.zero.layout.flat_buffer import owner_of
from hf_zero.zero.layout.initial_values import without_repeats
from hf_zero.zero.layout.parameter import raw_grad, set_raw_grad
from hf_zero.zero.layout.walk import buffers_of, modules_of, parameters_with

_TABLES = ("_parameters", "_modules")
_data: Any = torch.Tensor.data
_requires_grad: Any = torch.Tensor.requires_grad
_stack: ContextVar[ExitStack | None] = ContextVar("inverse operations", default=None)


@contextmanager
def transaction() -> Iterator[None]:
    """Context for changes that are complete or undone: an exception runs the inverse operations
    that were pushed inside, then propagates. Those of an inner transaction that has ended well
    belong to the outer one.
    """
    outer = _stack.get()
    with _undone() as undo:
        yield
        steps = undo.pop_all()
    if outer is not None:
        outer.push(steps)


@contextmanager
def trial() -> Iterator[None]:
    """Context for changes that are undone in any case, as in a transaction."""
    with _undone():
        yield


@contextmanager
def _undone() -> Iterator[ExitStack]:
    """Context whose end runs the inverse operations on the stack that it yields."""
    with ExitStack() as undo:
        token = _stack.set(undo)
        try:
            yield undo
        finally:
            _stack.reset(token)


def on_rollback(function: Callable[..., object], *args: object) -> None:
    """Push the inverse of a change on the stack of the transaction under way, if there is one."""
    undo = _stack.get()
    if undo is not None:
        undo.callback(function, *args)


def restore_on_rollback(*owners: object) -> None:
    """Restore ``owners`` as :func:`snapshot_of` does, if the transaction is undone."""
    if _stack.get() is not None:
        on_rollback(snapshot_of(*owners))


def snapshot_of(*owners: object) -> Callable[[], None]:
    """Return a function that restores classes, attributes, hooks, parameters, children and
    configurations of the modules of models, groups and state of optimizers, dictionaries, and
    attributes of other objects. It does not restore their tensors: see
    :func:`snapshot_of_parameters` and :func:`restore_buffers_on_rollback`.
    """
    snapshots: list[_Snapshot] = []
    for owner in owners:
        if isinstance(owner, nn.Module):
            modules = modules_of(owner)
            configs = {id(config): config for config in map(config_of_module, modules) if config}
            snapshots += map(_Attributes, (*modules, *configs.values()))
        elif isinstance(owner, dict):
            snapshots.append(_Entries(owner))
        elif isinstance(owner, torch.optim.Optimizer):
            snapshots.append(_OptimizerState(owner))
        elif hasattr(owner, "__dict__"):
            snapshots.append(_Attributes(owner))
    return partial(_restore_all, snapshots)


def snapshot_of_parameters(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> Callable[[], None]:
    """Return a function that restores memory, class, attributes and gradient of each parameter of
    ``model`` and ``optimizer``. It keeps their memory, so the model needs it twice. Parameters that
    an engine owns, or a former one has left sharded, are left out.
    """
    parameters = parameters_with(model, optimizer)
    return partial(_restore_all, [_Memory(p) for p in parameters if owner_of(p) is None])


@torch.no_grad()
def restore_buffers_on_rollback(model: nn.Module) -> None:
    """Restore the buffers of ``model`` and their values if the transaction is undone."""
    for buffer in buffers_of(model):
        if not buffer.is_meta:
            elements = without_repeats(buffer)
            on_rollback(elements.detach().copy_, elements.clone())
    for module in modules_of(model):
        on_rollback(module._buffers.update, dict(module._buffers))


def _restore_all(snapshots: Sequence[_Snapshot]) -> None:
    """Restore ``snapshots`` from the last to the first, also those before one that fails. One that
    an exception interrupts, such as KeyboardInterrupt, is restored once more: it may be half done.
    """
    left = list(snapshots)
    try:
        while left:
            try:
                left[-1].restore()
            except BaseException:
                left[-1].restore()
                raise
            finally:
                left.pop()
    finally:
        if left:
            _restore_all(left)


def config_of_module(module: nn.Module) -> object:
    """Return the configuration of a model of transformers; None for another one, as a class or an
    object without a dictionary of attributes.
    """
    config = vars(module).get("config")
    has_attributes = isinstance(getattr(config, "__dict__", None), dict)
    return config if has_attributes and hasattr(config, "to_dict") else None


class _Snapshot(Protocol):
    def restore(self) -> None:
        """Restore the owner as it was when the snapshot was taken, any number of times."""


class _Entries:
    """The entries of a dictionary."""

    def __init__(self, owner: dict[object, object]):
        self._owner, self._entries = owner, dict(owner)

    def restore(self) -> None:
        self._owner.clear()
        self._owner.update(self._entries)


class _Attributes:
    """The class and the attributes of ``owner``; of a module, with the entries of its tables of
    parameters, children and hooks.
    """

    def __init__(self, owner: object):
        self._owner, self._class, self._values = owner, type(owner), dict(vars(owner))
        self._tables = [
            (table, table.copy() if table else ())
            for key, table in self._values.items()
            if isinstance(table, dict) and (key in _TABLES or "_hooks" in key)
        ]

    def restore(self) -> None:
        """Set the attributes and the entries to these values."""
        if type(self._owner) is not self._class:
            self._owner.__class__ = self._class
        live = vars(self._owner)
        live.clear()
        live.update(self._values)
        for table, entries in self._tables:
            # the same table: handles of the script's own hooks refer to it
            table.clear()
            table.update(entries)


class _OptimizerState:
    """The attributes, groups and state of an optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer):
        self._attributes, self._optimizer = _Attributes(optimizer), optimizer
        groups = optimizer.param_groups
        self._groups = [(group, group | {"params": [*group["params"]]}) for group in groups]
        self._state = {key: (state, dict(state)) for key, state in optimizer.state.items()}

    def restore(self) -> None:
        """Restore them, in the same dictionaries."""
        self._attributes.restore()
        self._optimizer.param_groups[:] = [group for group, _ in self._groups]
        self._optimizer.state.clear()
        for key, (state, _) in self._state.items():
            self._optimizer.state[key] = state
        for live, content in (*self._groups, *self._state.values()):
            live.clear()
            live.update(content)
        for group, _ in self._groups:
            group["params"] = [*group["params"]]  # the list of this snapshot stays as it is


class _Memory:
    """The memory, class, attributes and gradient of a parameter that no engine owns."""

    def __init__(self, parameter: nn.Parameter):
        self._parameter, self._class = parameter, type(parameter)
        self._attributes, self._grad = dict(vars(parameter)), raw_grad(parameter)
        with torch._C.DisableTorchFunctionSubclass():
            self._data, self._trains = _data.__get__(parameter), parameter.requires_grad

    def restore(self) -> None:
        parameter, flat = self._parameter, owner_of(self._parameter)
        if flat is not None:
            flat.parameter_views.allow_swaps()
        with torch._C.DisableTorchFunctionSubclass():
            if torch._has_compatible_shallow_copy_type(parameter, self._data):
                _data.__set__(parameter, self._data)
            else:
                # ``data`` cannot be set to a meta tensor. torch.utils.swap_tensors refuses
                # parameters with weak references, which an engine that was broken off has.
                torch._C._swap_tensor_impl(parameter, nn.Parameter(self._data, self._trains))
            _requires_grad.__set__(parameter, self._trains)
        parameter.__class__ = self._class
        vars(parameter).clear()
        vars(parameter).update(self._attributes)
        set_raw_grad(parameter, self._grad)
