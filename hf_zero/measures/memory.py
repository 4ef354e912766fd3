"""``memory_breakdown`` and ``dump_state``: an engine's bytes by kind and tier, and its layout."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hf_zero.device import free_memory, kinds
from hf_zero.logging import in_units
from hf_zero.zero.state_bytes import STATE_KINDS, TIERS, held_bytes

if TYPE_CHECKING:
    from hf_zero.zero.training_engine import TrainingEngine


def breakdown(engine: TrainingEngine) -> str:
    """Return the bytes of this rank's state by kind and tier, allocated ones, and free ones."""
    state = held_bytes(engine)
    parts = [
        f"{kind} on {tier} {in_units(state[kind, tier])}"
        for kind in STATE_KINDS
        for tier in TIERS
        if state[kind, tier]
    ]
    parts += [
        f"{name} {in_units(size)}"
        for name, size in engine.sharded_model.placement.buffer_bytes().items()
        if size
    ]
    device = engine.device
    if not kinds.is_synchronous(device):
        parts.append(f"allocated {in_units(free_memory.allocated(device))}")
        parts.append(f"at most {in_units(free_memory.max_allocated(device))}")
    parts.append(f"free on {device.type} {in_units(free_memory.free_bytes(device))}")
    return ", ".join(parts)


def layout(engine: TrainingEngine) -> str:
    """Return the engine's ranks, units, flat buffers and groups of the optimizer, a line each."""
    mesh = engine.mesh
    lines = [
        f"stage {engine.stage} on {mesh.pp_stage_ranks} ranks, {mesh.shard.size} shards x "
        f"{mesh.replicate.size} replicas, {engine.device}"
    ]
    for unit in engine.units:
        lines.append(f"unit {unit.label}: {in_units(unit.nbytes)}")
        for flat in unit.flats:
            spec = flat.spec
            marks = [
                name
                for name, holds in (
                    ("sharded", spec.sharded),
                    ("persistent", spec.persistent),
                    ("frozen", not spec.trainable),
                )
                if holds
            ]
            lines.append(
                f"  {spec.key}: {', '.join([str(spec.dtype).removeprefix('torch.'), *marks])}, "
                f"{len(spec.layout.by_name)} parameters, elements {spec.owned[0]:,} to "
                f"{spec.owned[1]:,} here"
            )
    groups = [] if engine.optimizer is None else engine.optimizer.param_groups
    for number, group in enumerate(groups):
        values = ", ".join(f"{name}={value}" for name, value in group.items() if name != "params")
        lines.append(f"group {number} of {type(engine.optimizer).__name__}: {values}")
    return "\n".join(lines)
