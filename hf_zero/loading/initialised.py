"""Initialisation of models without values: the model's own initialisation is recorded, and run one
parameter at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hf_zero.errors import ConfigError
from hf_zero.loading.expressions import Filled
from hf_zero.loading.lazy import LazyTensor, fill, is_filled
from hf_zero.loading.opened import make_pending, make_real

_RULES = ("reset_parameters", "_reset_parameters")


def give_values(model: nn.Module) -> None:
    """Set up the initialisation of ``model``, all of whose parameters are on the meta device, by
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
    done: set[int] = set()
    for tensors, name, parameter in places:
        made = tensors[name]
        if made is not parameter and id(parameter) not in done:
            torch.utils.swap_tensors(parameter, made)  # an optimizer may already refer to it
        done.add(id(parameter))
        tensors[name] = parameter


def _rule(model: nn.Module) -> Callable[[], None]:
    whole = getattr(model, "initialize_weights", None)
    if callable(whole):
        return whole
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


def _make_fillable(model: nn.Module, initialise: Callable[[], None]) -> None:
    made: dict[int, LazyTensor | nn.Parameter] = {}
    for tensors, name, tensor in _tensors(model):
        if id(tensor) not in made:
            lazy: LazyTensor | nn.Parameter = LazyTensor(Filled(tensor.shape, tensor.dtype))
            if isinstance(tensor, nn.Parameter):
                lazy = nn.Parameter(lazy, requires_grad=tensor.requires_grad)
            made[id(tensor)] = lazy
        tensors[name] = made[id(tensor)]
    with torch.no_grad():
        initialise()
    empty = [
        name
        for _, name, tensor in _tensors(model)
        if isinstance(tensor, LazyTensor)
        and isinstance(tensor.expression, Filled)
        and tensor.numel()
        and not tensor.expression.initialised
    ]
    if empty:
        raise ConfigError(
            "the model is on the meta device, and nothing but its constructor gives "
            f"{', '.join(sorted(set(empty))[:4])} values; build it inside "
            "hf_zero.Init(config=...) instead of torch.device('meta')"
        )


_lock = threading.Lock()
_tables: list[dict[str, Any]] = [vars(nn.init)]
_kept: list[dict[str, Any]] = []
_recorders = 0


def record_in(table: dict[str, Any]) -> None:
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
    global _recorders
    with _lock:
        _recorders += 1
        if _recorders == 1:
            for table in _tables:
                kept = {
                    name: value
                    for name, value in table.items()
                    if name.endswith("_") and not name.startswith("_") and callable(value)
                }
                _kept.append(kept)
                table.update({name: recorded(function) for name, function in kept.items()})
    try:
        yield
    finally:
        with _lock:
            _recorders -= 1
            if _recorders == 0:
                for table, kept in zip(_tables, _kept):
                    table.update(kept)
                _kept.clear()


def recorded(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``function(tensor, ...)``, which fills a tensor in place, to be deferred for lazy
    tensors under initialisation.
    """

    def record(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not is_filled(tensor):
            return function(tensor, *args, **kwargs)
        return fill(tensor, lambda view: function(view, *args, **kwargs))  # type: ignore[arg-type]

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
