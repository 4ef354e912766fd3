"""Whole models from shards: one unit is gathered at a time and copied to the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import nn

from hf_zero.zero.access.wholes import Whole, whole_groups
from hf_zero.zero.layout.parameter import OwnedParameter, name_of
from hf_zero.zero.layout.whole_names import WholeNames, belongs, written

if TYPE_CHECKING:
    from hf_zero.zero.sharded_engine import ShardedEngine


@torch.no_grad()
def consolidated(
    engine: ShardedEngine, dtype: torch.dtype | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (first name, whole tensor on the CPU) for every parameter. Collective.

    Parameters that are not raw are cast to ``dtype``; torch.float32 selects the master weights
    where training keeps them.
    """
    for flat, _, name, whole in _wholes(engine, dtype):
        yield name, _copy(whole, None if flat.raw else dtype)


def _wholes(engine: ShardedEngine, dtype: torch.dtype | None) -> Iterator[Whole]:
    """Yield every whole parameter of the model on its device, one unit at a time."""
    units = [unit.flats for unit in engine.units if unit.modules]
    return chain.from_iterable(whole_groups(engine, units, dtype))


def _copy(view: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    return torch.empty(view.shape, dtype=dtype or view.dtype).copy_(view)


@torch.no_grad()
def whole_state_dict(
    engine: ShardedEngine,
    everywhere: bool = True,
    exclude_frozen: bool = False,
    dtype: torch.dtype | None = None,
) -> dict[str, object] | None:
    """Return ``engine.module.state_dict()`` as it would be on one device, on the CPU; None on ranks
    other than 0 unless ``everywhere``.

    Tied names share memory. Hooks for state dicts run where the result is returned; the parameters
    themselves are not gathered for them. ``exclude_frozen`` leaves out frozen parameters except
    ``engine.kept_when_frozen``; ``dtype`` as in :func:`consolidated`. Collective.
    """
    build = gather_state_dict(engine, everywhere, exclude_frozen, dtype)
    return None if build is None else build()


@torch.no_grad()
def gather_state_dict(
    engine: ShardedEngine,
    everywhere: bool = True,
    exclude_frozen: bool = False,
    dtype: torch.dtype | None = None,
) -> Callable[[], dict[str, object]] | None:
    """Gather what :func:`whole_state_dict` returns, and return a function that builds it, in which
    hooks of modules may raise: it is not collective.
    """
    wanted = everywhere or engine.global_rank == 0
    values: dict[str, torch.Tensor] = {}
    frozen: set[str] = set()
    for flat, here, name, whole in _wholes(engine, dtype):
        if not flat.trainable and here not in engine.kept_when_frozen:
            frozen.add(here)
        if wanted and not (exclude_frozen and here in frozen):
            values[name] = _copy(whole, None if flat.raw else dtype)
    if not wanted:
        return None
    names = WholeNames(engine.module)

    def take_values(module: nn.Module, state: dict[str, object], prefix: str) -> None:
        left_out: set[str] = set()
        for name, parameter in module._parameters.items():
            if not isinstance(parameter, OwnedParameter):
                continue
            first = name_of(parameter)
            if exclude_frozen and first in frozen:
                left_out.add(name)
            for key, source in zip(names.every(prefix + name), names.every(first)):
                if source in values:
                    state[key] = values[source]
                else:
                    state.pop(key, None)
        for name in written(module) if left_out else ():
            if belongs(name, left_out):
                state.pop(prefix + name, None)

    @torch.no_grad()
    def build() -> dict[str, object]:
        # torch's own walk: hooks of modules change names and values
        with engine.sharded_model.patches.state_dict_from(take_values):
            state: dict[str, object] = engine.module.state_dict()
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                state[key] = value.to("cpu")
        return state

    return build
