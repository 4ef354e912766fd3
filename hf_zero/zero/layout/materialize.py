"""Partitioning of a whole model into units: layouts, and rank 0's values cut into the shards of all
ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from hf_zero.device.host_limits import release_freed
from hf_zero.distributed.mesh import Mesh
from hf_zero.distributed.world_group import raise_on_all_ranks
from hf_zero.errors import PartitionError, RankMismatchError
from hf_zero.offload.placement import Placement
from hf_zero.zero.layout import attributes
from hf_zero.zero.layout.codecs import UNCOMPRESSED, Codecs
from hf_zero.zero.layout.flat_buffer import EngineFlats, FlatBuffer
from hf_zero.zero.layout.flat_layout import ALIGNMENT, FlatLayout
from hf_zero.zero.layout.flat_memory import Dtypes, FlatMemory
from hf_zero.zero.layout.flat_spec import FlatSpec
from hf_zero.zero.layout.initial_values import (
    FormerValues,
    Staging,
    fill_whole,
    is_pending,
    place_buffers,
    read_own,
)
from hf_zero.zero.layout.parameter import owner_of
from hf_zero.zero.layout.precision import CASTABLE, compute_dtype, is_raw
from hf_zero.zero.layout.sharding import Sharding, sharding_of
from hf_zero.zero.layout.stage_policy import Policy
from hf_zero.zero.layout.unit import State, Unit
from hf_zero.zero.layout.wrap import UnitSpec


def partition(
    model: nn.Module,
    specs: Sequence[UnitSpec],
    group_of: Mapping[str, int],
    policy: Policy,
    mesh: Mesh,
    placement: Placement,
    dtypes: Dtypes,
    persistent: frozenset[str] = frozenset(),
    compression: Codecs = UNCOMPRESSED,
    moments: Sequence[tuple[str, ...]] = (),
) -> list[Unit]:
    """Partition ``model`` into units on the device of ``mesh``, with rank 0's values on every rank
    (collective).

    ``group_of`` gives the optimizer group of each trainable parameter. Parameters in none are
    frozen: gathered and released as the stage requires, never reduced. ``placement`` selects the
    storage of shards and optimizer state, ``dtypes`` their dtypes; ``persistent`` names parameters
    that stay whole at every stage, ``compression`` selects the compressed collectives. ``moments``:
    the moments of each group. If groups differ in them, their parameters are in different flat
    buffers, since a moment is an array as long as the flat buffer. Raises PartitionError for
    parameters that cannot be laid out, RankMismatchError if ranks hold different models or one of
    them has no room on its disk, and DiskSpaceError on that rank; the model is then unchanged.
    """
    _check_alike(specs, group_of, mesh)
    device, engine_flats = mesh.device, EngineFlats(mesh)
    units = [
        _plan_unit(
            index,
            spec,
            model,
            group_of,
            policy,
            engine_flats,
            dtypes.precision,
            persistent,
            compression,
            moments,
        )
        for index, spec in enumerate(specs)
    ]
    flats = engine_flats.flats
    memory = FlatMemory(flats, group_of, policy, placement, device, dtypes)
    former, staging, reads = FormerValues(), Staging(), any(is_pending(flat) for flat in flats)
    for unit in units:
        for flat in unit.flats:
            _fill(flat, memory, mesh, former, staging)
        if unit.sharded:
            unit.release()
        unit.state = State.RELEASED if unit.sharded else State.GATHERED
        former.drop_spent()
        if placement.offloads_anything:
            release_freed()  # the unit's former memory
    former.let_go()
    if reads:
        with raise_on_all_ranks("read its part of the model"):
            former.raise_error()
    attributes.share((parameter for spec in specs for _, parameter in spec.parameters), mesh)
    place_buffers(model, device, mesh, dtypes.buffers)
    return units


def _fill(
    flat: FlatBuffer, memory: FlatMemory, mesh: Mesh, former: FormerValues, staging: Staging
) -> None:
    """Allocate the memory of ``flat`` and write its first values."""
    full = memory.full(flat)
    memory.place_shard(flat)
    if is_pending(flat):
        own = read_own(flat, mesh, former, staging)
    else:
        own = fill_whole(flat, full, mesh, former)[flat.owned[0] : flat.owned[1]]
    flat.use_full(full)
    flat.store_shard(own)
    if flat.trainable:
        memory.place_training_state(flat, own)


def check_parameters(specs: Sequence[UnitSpec], device: torch.device) -> None:
    """Raise PartitionError for a parameter that cannot be laid out on ``device``: without values,
    owned by another engine, or of an unsupported class.

    Also for a buffer without values. ``specs[0]`` is the root, whose module is the whole model.
    """
    for module in specs[0].module.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                raise PartitionError(
                    f"buffer {name} of {type(module).__name__} is on the meta device; initialise "
                    "the model's buffers before hf_zero.initialize"
                )
    for spec in specs:
        for name, parameter in spec.parameters:
            if parameter.is_meta:
                raise PartitionError(
                    f"parameter {name} is on the meta device and has no values; load or initialise "
                    "the model before hf_zero.initialize"
                )
            if parameter.requires_grad and parameter.dtype not in CASTABLE:
                remedy = (
                    "as real numbers (torch.view_as_real)"
                    if parameter.is_complex()
                    else "in a wider dtype"
                )
                raise PartitionError(
                    f"parameter {name} is {parameter.dtype}; train it {remedy}, or "
                    "set requires_grad=False"
                )
            owner = owner_of(parameter)
            if owner is not None and not owner.retired:
                raise PartitionError(
                    f"parameter {name} belongs to another hf-zero engine already; destroy() that "
                    "engine first, or pass its module once"
                )
            there = parameter.device.type == device.type
            if not there and not torch._has_compatible_shallow_copy_type(
                parameter, torch.empty(0, device=device)
            ):
                raise PartitionError(
                    f"parameter {name} is on {parameter.device}, and torch cannot let it go on on "
                    f"{device.type!r} as the same object: move the "
                    f"model there first (model.to({device.type!r})), then make the optimizer"
                )
            refused = attributes.refusal(parameter, device) if owner is None else None
            if refused is not None:
                raise PartitionError(f"parameter {name} {refused}")


def _check_alike(specs: Sequence[UnitSpec], group_of: Mapping[str, int], mesh: Mesh) -> None:
    """Raise RankMismatchError unless all ranks hold the same names, shapes, dtypes and groups: else
    their messages would not fit.
    """
    if mesh.world == 1:
        return
    lines = [
        f"{name} {attributes.describe(parameter)}{tuple(parameter.shape)} {parameter.dtype} group "
        f"{group_of.get(name)} in unit {spec.name or '(root)'} {sharding_of(parameter).key}"
        for spec in specs
        for name, parameter in spec.parameters
    ]
    digests = mesh.all_gather_object(hashlib.sha256("\n".join(lines).encode()).hexdigest())
    if len(set(digests)) > 1:
        all_lines = mesh.all_gather_object(lines)
        other = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
        difference = sorted(set(all_lines[0]) ^ set(all_lines[other]))[:4]
        raise RankMismatchError(
            f"ranks {mesh.ranks[0]} and {mesh.ranks[other]} hold different models: {difference}; "
            "build the same model with "
            "the same optimizer groups on every rank"
        )


def _plan_unit(
    index: int,
    spec: UnitSpec,
    model: nn.Module,
    group_of: Mapping[str, int],
    policy: Policy,
    engine_flats: EngineFlats,
    precision: str | None,
    persistent: frozenset[str],
    compression: Codecs,
    moments: Sequence[tuple[str, ...]],
) -> Unit:
    kinds: dict[
        tuple[bool, torch.dtype, bool, Policy, bool, str, Sharding], dict[str, nn.Parameter]
    ] = {}
    # Ordered by group: the elements of a group in a unit are one run. Odd sizes last: the others
    # are aligned.
    for name, parameter in sorted(
        spec.parameters,
        key=lambda item: (group_of.get(item[0], -1), item[1].numel() % ALIGNMENT != 0),
    ):
        dtype = (
            parameter.dtype
            if precision is None
            else compute_dtype(name, parameter, precision, model)
        )
        own = policy.of_persistent if name in persistent else policy
        trains, raw = name in group_of, is_raw(parameter)
        compressed = not raw and compression.takes(parameter, trains)
        differ = trains and len(set(moments)) > 1
        kept = "+".join(moments[group_of[name]]) if differ else ""
        held = replace(sharding_of(parameter), box=None, names=())
        kind = (trains, dtype, raw, own, compressed, kept, held)
        kinds.setdefault(kind, {})[name] = parameter
    flats = []
    for (trainable, dtype, raw, own, compressed, kept, held), parameters in kinds.items():
        mesh = engine_flats.mesh.of(held.axes, held.partial, len(held.stages))
        shards = mesh.shard.size if trainable else own.parameter_shards(mesh.shard.size)
        stays = own != policy
        layout = FlatLayout.build(
            [(name, tuple(p.shape)) for name, p in parameters.items()],
            shards,
            {name: sharding_of(p).box for name, p in parameters.items()},
        )
        writes = mesh.replicate.rank == 0 and (shards > 1 or mesh.shard.rank == 0)
        state = "trainable" if trainable else "frozen"
        key = f"{spec.name}|{state}|{str(dtype).removeprefix('torch.')}{'|raw' if raw else ''}"
        key += "|whole" if stays else ""
        key += "|blocks" if compressed else ""
        key += f"|{kept}" if kept else ""
        key += f"|{held.key}" if held.key else ""
        codecs = (
            compression.codecs(layout, dtype, trainable, own.shards_parameters, stays)
            if compressed
            else (None, None)
        )
        spec_of_flat = FlatSpec(
            number=len(engine_flats.flats),
            key=key,
            layout=layout,
            dtype=dtype,
            trainable=trainable,
            raw=raw,
            sharded=own.shards_parameters,
            persistent=stays,
            writes=writes,
            owned=layout.rank_range(mesh.shard.rank if shards > 1 else 0),
            reduce_codec=codecs[0],
            gather_codec=codecs[1],
            momentum_blocks=compression.momentum_of(layout, dtype)
            if compressed and trainable
            else None,
            mesh=mesh,
            sharding=held,
        )
        flats.append(FlatBuffer(spec_of_flat, parameters, engine_flats))
    return Unit(index, spec.name, dict(zip(spec.paths, spec.modules)), flats)
