"""Construction of an engine from its plan: the mesh, and the units with their flat buffers, memory
and first values, which are rank 0's cut into the shards of all ranks.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from hf_zero.config.variables import local_world_size
from hf_zero.device import kinds
from hf_zero.device.host_limits import release_freed
from hf_zero.distributed.flat_mesh import MeshOptions
from hf_zero.distributed.mesh import Mesh
from hf_zero.distributed.parallel_groups import get_parallel
from hf_zero.distributed.process_group import get_world_size
from hf_zero.distributed.world_group import get_world_group, raise_on_all_ranks
from hf_zero.errors import ConfigError, PartitionError, RankMismatchError
from hf_zero.offload.placement import Placement
from hf_zero.optim.group_settings import plain_settings
from hf_zero.zero.gather.unit import GatherState, Unit
from hf_zero.zero.layout.engine_plan import SIXTEEN_BITS, EnginePlan
from hf_zero.zero.layout.flat_buffer import EngineFlats, FlatBuffer, owner_of
from hf_zero.zero.layout.flat_memory import FlatAllocator
from hf_zero.zero.layout.initial_values import (
    FormerValues,
    Staging,
    fill_whole,
    is_pending,
    place_buffers,
    read_own,
)
from hf_zero.zero.layout.parameter import name_of
from hf_zero.zero.layout.parameter_classes import parameter_classes
from hf_zero.zero.layout.precision import CASTABLE
from hf_zero.zero.layout.sharding import sharding_of
from hf_zero.zero.layout.walk import modules_of, named_modules_of
from hf_zero.zero.layout.wrap import UnitSpec


def make_mesh(plan: EnginePlan) -> Mesh:
    """Return the mesh for the engine of ``plan`` (collective over all ranks of the job)."""
    settings, extensions, parallel = plan.settings, plan.extensions, get_parallel()
    cuts = set(plan.axes)
    if plan.dims.splits_model:
        # pipeline stages may hold other kinds, and every rank takes part in making process groups
        every = get_world_group().all_gather_object(sorted(cuts), "how parameters are cut")
        cuts = set(itertools.chain.from_iterable(every))
    hierarchical = extensions.hierarchical
    options = MeshOptions(
        plan.gathers_updates,
        extensions.node,
        _ranks_of_a_host(plan.num_shards, hierarchical) if hierarchical else 1,
        tuple(sorted(cuts)),
        settings.nccl.written,
        extensions.route,
    )
    return Mesh(
        plan.num_shards, plan.device, settings.timeout, options, parallel, settings.host_timeout
    )


def _ranks_of_a_host(shards: int, key: str) -> int:
    """Return the number of ranks per host, 1 if one host has all ``shards`` ranks that share a copy
    (collective over all ranks of the job); ``key`` asks for it.
    """
    world = get_world_group()
    size = local_world_size(get_world_size())
    sizes = set(world.all_gather_object(size, "ranks of each host"))
    if shards <= min(sizes):
        return 1
    if len(sizes) > 1 or shards % min(sizes):
        raise ConfigError(
            f"{key} needs the same number of ranks on each host, of which the {shards} that share "
            f"one copy are a multiple; hosts have {', '.join(map(str, sorted(sizes)))}: choose "
            "another number of ranks for a copy, or remove the key"
        )
    return min(sizes)


def materialize(plan: EnginePlan, engine_flats: EngineFlats, placement: Placement) -> list[Unit]:
    """Build the units of ``plan``, with their flat buffers in ``engine_flats`` and rank 0's values
    on every rank but in ``plan.kept_buffers`` (collective). ``placement`` allocates shards and
    optimizer state.

    Raises RankMismatchError if one of the ranks has no room on its disk, and DiskSpaceError on that
    rank; the model is then unchanged.
    """
    mesh, device = engine_flats.mesh, engine_flats.mesh.device
    flats_of: dict[int, list[FlatBuffer]] = {}
    for planned in plan.flats:
        cut = planned.spec.sharding
        spec = replace(planned.spec, mesh=mesh.of(cut.axes, cut.partial, len(cut.pp_stages)))
        flat = FlatBuffer(spec, planned.parameters, engine_flats)
        flats_of.setdefault(id(planned.unit), []).append(flat)
    flats = engine_flats.flats
    units = [
        Unit(
            index,
            unit.name,
            dict(zip(unit.paths, unit.modules)),
            flats_of.get(id(unit), []),
            device,
        )
        for index, unit in enumerate(plan.units)
    ]
    memory = FlatAllocator(plan, flats, placement, device)
    former, staging, reads = FormerValues(), Staging(), any(is_pending(flat) for flat in flats)
    for unit in units:
        for flat in unit.flats:
            _initialize_values(flat, memory, mesh, former, staging)
        if unit.sharded_flats:
            unit.release()
        unit.state = GatherState.RELEASED if unit.sharded_flats else GatherState.GATHERED
        former.drop_spent()
        if placement.offloads_anything:
            release_freed()  # the unit's former memory
    for gradients in {flat.gradient.memory for flat in flats}:
        if gradients is not None:
            gradients.set_allocated(False)
    classes = parameter_classes()
    parameters = [parameter for spec in plan.units for _, parameter in spec.parameters]
    if reads:
        classes.read(parameters, mesh, former)
    former.close()
    if reads:
        with raise_on_all_ranks("read its part of the model"):
            former.raise_error()
    classes.broadcast(parameters, mesh)
    place_buffers(plan, mesh)
    return units


def _initialize_values(
    flat: FlatBuffer, memory: FlatAllocator, mesh: Mesh, former: FormerValues, staging: Staging
) -> None:
    """Allocate the memory of ``flat`` and write its first values."""
    full = memory.full(flat)
    memory.place_shard(flat)
    if flat.sharded and is_pending(flat):
        local_shard = read_own(flat, mesh, former, staging)
    else:
        local_shard = fill_whole(flat, full, mesh, former)[flat.owned[0] : flat.owned[1]]
    flat.use_full(full)
    flat.store_shard(local_shard)
    if flat.trainable:
        memory.place_training_state(flat, local_shard)


def check_parameters(specs: Sequence[UnitSpec], device: torch.device) -> None:
    """Raise PartitionError for a parameter that cannot be laid out on ``device``: without values,
    owned by another engine, or of an unsupported class.

    Also for a buffer without values. ``specs[0]`` is the root, whose module is the whole model. An
    engine on the meta device, for a simulation, needs no values.
    """
    has_values = device.type != "meta"
    for module in modules_of(specs[0].module):
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta and has_values:
                raise PartitionError(
                    f"buffer {name} of {type(module).__name__} is on the meta device; initialize "
                    "the model's buffers before hf_zero.initialize"
                )
    classes = parameter_classes()
    for spec in specs:
        for name, parameter in spec.parameters:
            if parameter.is_meta and has_values:
                raise PartitionError(
                    f"parameter {name} is on the meta device and has no values; load or initialize "
                    "the model before hf_zero.initialize"
                )
            if parameter.requires_grad and parameter.dtype not in CASTABLE:
                remedy = "in a wider dtype"
                if parameter.is_complex():
                    remedy = "as real numbers (torch.view_as_real)"
                raise PartitionError(
                    f"parameter {name} is {parameter.dtype}; train it {remedy}, or "
                    "set requires_grad=False"
                )
            owner = owner_of(parameter)
            if owner is not None and not owner.retired:
                remedy = (
                    "build this optimizer without it" if spec.outside else "pass its module once"
                )
                raise PartitionError(
                    f"parameter {name} belongs to another hf-zero engine already (as "
                    f"{name_of(parameter)}); destroy() that engine first, or {remedy}"
                )
            on_device = parameter.device.type == device.type
            if not on_device and not torch._has_compatible_shallow_copy_type(
                parameter, torch.empty(0, device=device)
            ):
                raise PartitionError(
                    f"parameter {name} is on {parameter.device}, and torch cannot move it to "
                    f"{device.type!r} in place: move the model there first "
                    f"(model.to({device.type!r})), then make the optimizer"
                )
            refused = classes.refusal(parameter, device) if owner is None else None
            if refused is not None:
                raise PartitionError(f"parameter {name} {refused}")


def check_statistics(plan: EnginePlan, device: torch.device) -> None:
    """Raise ConfigError for a batch norm whose weights compute in 16 bits and whose statistics stay
    in fp32: torch's kernels for the CPU take both in one dtype.
    """
    for name, module in named_modules_of(plan.model) if kinds.is_synchronous(device) else ():
        if type(module).forward not in (_BatchNorm.forward, _InstanceNorm.forward):
            continue
        mean, weight = module._buffers.get("running_mean"), f"{name}.weight".lstrip(".")
        dtype = plan.dtypes.get(weight)
        if mean is None or dtype not in SIXTEEN_BITS or (plan.buffer_dtype or mean.dtype) == dtype:
            continue
        short = "bf16" if dtype == torch.bfloat16 else "fp16"
        raise ConfigError(
            f"{type(module).__name__} {name or '(the model)'} computes in {short}, and its running "
            f'statistics are {mean.dtype}, which torch does not compute on CPUs; set "data_types": '
            f'{{"buffer_dtype": "{short}"}}, or "keep_in_fp32_modules": ["{name.split(".")[-1]}"]'
        )


def check_alike(plan: EnginePlan) -> None:
    """Raise RankMismatchError on all ranks of the job unless the ranks of each pipeline stage hold
    the same names, shapes, dtypes and groups at the same ZeRO stage (else their messages would not
    fit) and the same settings of groups, clipping and accumulation (else shards would train apart).
    Collective.
    """
    dims = plan.dims
    if dims.world == 1:
        return
    settings = plan.settings
    mine = {
        "the engine": {
            "stage": str(settings.stage),
            "precision": settings.precision,
            "gradient_clipping": str(settings.gradient_clipping),
            "gradient_accumulation_steps": str(settings.gradient_accumulation_steps),
            "modules that it had before": ", ".join(sorted(plan.kept_buffers)),
        }
    }
    if plan.optimizer is not None:
        for at, group in enumerate(plan.optimizer.param_groups):
            mine[f"optimizer group {at}"] = {
                name: str(value)
                for name, value in sorted(plain_settings(group).items())
                if name in plan.optimizer.defaults and value is not None
            }
    describe = parameter_classes().describe
    mine |= {
        name: {
            "shape": f"{describe(parameter)}{tuple(parameter.shape)}",
            "dtype": str(parameter.dtype),
            "optimizer group": str(plan.group_of.get(name)),
            "unit": spec.name or "(root)",
            "sharding": sharding_of(parameter).key,
        }
        for spec in plan.units
        for name, parameter in spec.parameters
    }
    world = get_world_group()
    digests = world.all_gather_object(hashlib.sha256(str(mine).encode()).hexdigest(), "models")
    for second, digest in enumerate(digests):
        first = second - second % dims.pp_stage_ranks
        if digest != digests[first]:
            infos = world.all_gather_object(mine, "models")
            raise RankMismatchError(
                f"ranks {first} and {second} hold different models: "
                f"{_difference(infos[first], infos[second], first, second)}; build the same model "
                "with the same configuration and optimizer groups on every rank"
            )


def _difference(
    left: dict[str, dict[str, str]], right: dict[str, dict[str, str]], first: int, second: int
) -> str:
    """Return the first difference between the parameters of ranks ``first`` and ``second``."""
    for name in sorted({**left, **right}):
        if name not in left or name not in right:
            return f"rank {first if name in left else second} alone has {name}"
        for kind in {**left[name], **right[name]}:
            value, other = (info[name].get(kind, "not set") for info in (left, right))
            if value != other:
                return f"{kind} of {name} is {value} on rank {first}, {other} on rank {second}"
    return "the order of their parameters"
