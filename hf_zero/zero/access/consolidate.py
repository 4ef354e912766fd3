"""Whole models from shards: one unit is gathered at a time and copied to the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING

import torch

from hf_zero.zero.access.wholes import Whole, whole_groups
from hf_zero.zero.layout.sharding import WholeNames, belongs, written

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
    """Yield every whole parameter on its device, one unit at a time."""
    units = [unit.flats for unit in engine.units]
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

    Tied names share memory. ``exclude_frozen`` leaves out frozen parameters except
    ``engine.kept_when_frozen``; ``dtype`` as in :func:`consolidated`. Collective.
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
    state: dict[str, object] = {}
    for prefix, module in engine.module.named_modules(remove_duplicate=False):
        dot = f"{prefix}." if prefix else ""
        for name, value in written(module).items():
            first = engine.aliases.get(dot + name, dot + name)
            if module._parameters.get(name) is not None:
                for each, held in zip(names.every(dot + name), names.every(first)):
                    if held in values:
                        state[each] = values[held]
            elif not (exclude_frozen and belongs(dot + name, frozen)):
                state[dot + name] = (
                    value.detach().to("cpu") if isinstance(value, torch.Tensor) else value
                )
    return state
