"""Whole models from shards: one unit is gathered at a time and copied to the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from hf_zero.zero.layout.flat_buffer import FlatBuffer
from hf_zero.zero.layout.flat_layout import Slot
from hf_zero.zero.layout.sharding import WholeNames, belongs, written
from hf_zero.zero.layout.unit import Unit


def _gathered(engine: Any, unit: Unit) -> Iterator[tuple[FlatBuffer, Slot, torch.Tensor]]:
    unit.wait_for_update()
    if unit.sharded:
        engine.schedule.pin(unit)
    try:
        for flat in unit.flats:
            for slot in flat.layout.slots:
                yield flat, slot, flat.views[slot.name]
    finally:
        if unit.sharded:
            engine.schedule.unpin(unit)


@torch.no_grad()
def consolidated(
    engine: Any, dtype: torch.dtype | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (first name, whole tensor on the CPU) for every parameter. Collective.

    Parameters that are not raw are cast to ``dtype``; torch.float32 selects the master weights
    where training keeps them.
    """
    for flat, _, name, whole in _wholes(engine, dtype):
        yield name, _copy(whole, None if flat.raw else dtype)


def _wholes(
    engine: Any, dtype: torch.dtype | None
) -> Iterator[tuple[FlatBuffer, str, str, torch.Tensor]]:
    """Yield every whole parameter on its device, with its flat buffer and its names on this rank
    and in the whole model, one unit at a time. Master weights replace the values if ``dtype`` is
    float32, or if steps send differences, so that all ranks' values lag behind them.
    """
    engine.optimizer_step.synchronise()
    names = WholeNames(engine.module)
    for unit in engine.units:
        unit.take_user_writes()
        masters = {
            flat: _whole_master(flat)
            for flat in unit.flats
            if flat.optimizer_shard.has_own_master
            and (dtype == torch.float32 or flat.spec.sends_differences)
        }
        for flat, slot, view in _gathered(engine, unit):
            master = masters.get(flat)
            if master is not None:
                view = master[slot.offset : slot.end].view(slot.shape).to(dtype or view.dtype)
            for name, whole in names.wholes(flat.parameters[slot.name], view, slot.name):
                yield flat, slot.name, name, whole


def _whole_master(flat: FlatBuffer) -> torch.Tensor:
    """Return the fp32 master weights of all ranks: [padded] (collective)."""
    master = flat.optimizer_shard.master
    assert master is not None
    if flat.layout.shards == 1:
        return master
    master = master.to(flat.full.device)
    whole = torch.empty(flat.layout.padded, dtype=master.dtype, device=master.device)
    flat.axis.all_gather([(whole, master)], f"masters of {flat.key}").wait()
    return whole


def _copy(view: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    return torch.empty(view.shape, dtype=dtype or view.dtype).copy_(view)


@torch.no_grad()
def whole_state_dict(
    engine: Any,
    everywhere: bool = True,
    exclude_frozen: bool = False,
    dtype: torch.dtype | None = None,
) -> dict[str, Any] | None:
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
    state: dict[str, Any] = {}
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
