"""The planner of engines: forms units and lays their parameters out in flat buffers.

:func:`plan` runs no collectives, needs no process group and creates no tensors of model size, so it
can plan for any rank of any job, of a model on any device, meta included.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from hf_zero.config import ZeroConfig
from hf_zero.device.kinds import is_synchronous
from hf_zero.distributed.parallel_dims import ParallelDims
from hf_zero.errors import ConfigError, PartitionError
from hf_zero.offload.placement import PlacementRules, ShardSpec
from hf_zero.offload.storage import SubGroup
from hf_zero.optim.moment_formats import names_in_8_bits, updates_in_host_memory
from hf_zero.optim.segments import sub_groups
from hf_zero.optim.step_launch import step_launch
from hf_zero.optim.whole_tensor import moments_by_group
from hf_zero.zero.layout.engine_plan import (
    CPU,
    UNCUT,
    Cuts,
    EnginePlan,
    ExtensionsOf,
    FlatPlan,
    PlannedExtensions,
    shape_of,
    shard_spec,
    sharding_under,
)
from hf_zero.zero.layout.flat_layout import BLOCK, FlatLayout
from hf_zero.zero.layout.flat_spec import FlatSpec
from hf_zero.zero.layout.outside import described, outside_unit
from hf_zero.zero.layout.parameter_codec import FlatUse, MessageCodecs, ParameterCodec, ParameterUse
from hf_zero.zero.layout.precision import COMPUTE, compute_dtype, holds_raw_bytes, kept_in_fp32
from hf_zero.zero.layout.sharding import Sharding
from hf_zero.zero.layout.stage_policy import POLICIES, StagePolicy
from hf_zero.zero.layout.walk import buffers_of, parameters_of
from hf_zero.zero.layout.wrap import UnitSpec, find_units, persistent_names


def _plain(settings: ZeroConfig, optimizer: torch.optim.Optimizer | None) -> PlannedExtensions:
    return PlannedExtensions()


def plan(
    model: nn.Module,
    settings: ZeroConfig,
    dims: ParallelDims,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    extensions_of: ExtensionsOf = _plain,
    rank: int = 0,
    device: torch.device = CPU,
    cuts: Cuts = UNCUT,
    held: Collection[str] | None = None,
    shard_only: bool = False,
) -> EnginePlan:
    """Return the plan of an engine of ``model`` on one rank, without collectives.

    Args:
        model: a module on any device, left unchanged.
        settings: resolved for the ranks of one pipeline stage.
        dims: the sizes of the parallel axes of the job.
        optimizer: an optimizer over the model's parameters; those in none of its groups are frozen:
            gathered and released as the ZeRO stage requires, never reduced. None: all are. Its
            parameters outside the model are the last unit (``outside.py``).
        extensions_of: the function from settings and optimizer to the extensions
            (``hf_zero.zero.extensions.extensions_of``); default: none.
        rank: the rank of the job that is planned for.
        device: the kind of device that computes.
        cuts: the sharding of parameters that tensor and expert parallelism have yet to cut.
        held: names of the parameters that this pipeline stage holds; None: all.
        shard_only: parameters compute in their own dtypes, as in an engine that only holds them.

    Raises:
        ConfigError: a 16-bit trainable parameter in fp32 training, and keys that do not go with
            model parallelism or the optimizer.
        PartitionError: parameters without a shape, sparse and nested tensors, parameters cut along
            axes that the job does not have, and packed ones that do not exist.
    """
    named = itertools.chain(model.named_parameters(), model.named_buffers())
    axes = _axes((*parameters_of(model), *buffers_of(model)), named, dims, cuts)
    extensions = extensions_of(settings, optimizer)
    _refuse_split(dims, extensions)
    policy, zero = POLICIES[settings.stage], settings.zero
    sizes = {p: math.prod(shape_of(p, cuts)) for p in parameters_of(model)}
    # an update in host memory cannot reach the state of parameters that stay whole on the device
    persistent = (
        frozenset[str]()
        if optimizer is not None and updates_in_host_memory(optimizer, device)
        else persistent_names(
            model, zero.param_persistence_threshold, zero.model_persistence_threshold, sizes
        )
    )
    cuts_units = dims.tensor > 1 and policy.shards_parameters
    in_root = _uncut_vectors(model, persistent, cuts) if cuts_units else ()
    units, aliases = find_units(model, zero.module_granularity_threshold, in_root, sizes)
    outside = outside_unit(optimizer, units, aliases)
    others = () if outside is None else outside.parameters
    if outside is not None:
        _refuse_in_stages(dims, others)
        axes |= _axes(dict(others).values(), others, dims, cuts)
        units.append(outside)
    group_of = _group_of(units, optimizer)
    layouts = _FlatLayouts(
        None if shard_only else settings.precision,
        kept_in_fp32(model, settings.precision, settings.keep_in_fp32_modules, others),
        policy,
        persistent,
        extensions.codecs,
        group_of,
        moments_by_group(optimizer),
        cuts,
        _Places(dims, rank, policy.num_shards(dims.pp_stage_ranks, settings.replicate_size)),
        extensions.narrow is not None and extensions.narrow.masters,
    )
    flat_specs = [(unit, *flat) for unit in units for flat in layouts.flats_of(unit, held)]
    # state, tiers and files of a checkpoint are looked up by key
    assert len({spec.key for _, spec, _ in flat_specs}) == len(flat_specs), (
        "two flat buffers have one key"
    )
    formats = _moment_formats(flat_specs, optimizer, group_of)
    return EnginePlan(
        model=model,
        settings=settings,
        dims=dims,
        optimizer=optimizer,
        rank=rank,
        device=device,
        cuts=cuts,
        held=held,
        shard_only=shard_only,
        units=tuple(units),
        aliases=aliases,
        group_of=group_of,
        formats=formats,
        flats=_flat_plans(flat_specs, settings, dims, optimizer, device, formats),
        axes=axes,
        extensions=extensions,
        extensions_of=extensions_of,
    )


def replan(planned: EnginePlan, settings: ZeroConfig, rank: int | None = None) -> EnginePlan:
    """Return the plan of the same model and job with other ``settings``, of ``rank`` if given."""
    return plan(
        planned.model,
        settings,
        planned.dims,
        planned.optimizer,
        extensions_of=planned.extensions_of,
        rank=planned.rank if rank is None else rank,
        device=planned.device,
        cuts=planned.cuts,
        held=planned.held,
        shard_only=planned.shard_only,
    )


def _refuse_split(dims: ParallelDims, extensions: PlannedExtensions) -> None:
    if dims.splits_model and extensions.needs_one_mesh:
        raise ConfigError(
            f"{', '.join(extensions.needs_one_mesh)} does not go with a model that is split over "
            "ranks by tensor, expert or pipeline parallelism; remove the key"
        )


def _refuse_in_stages(dims: ParallelDims, others: Sequence[tuple[str, nn.Parameter]]) -> None:
    """Raise PartitionError for parameters ``others`` outside a model in pipeline stages."""
    if dims.pipeline > 1:
        raise PartitionError(
            f"the optimizer holds {described(others)} outside the model, and this model is in "
            "pipeline stages, of which the last alone computes the loss; build it from "
            "model.parameters(), and put the weights of a loss into the last layer"
        )


def _moment_formats(
    flat_specs: Sequence[PlannedSpec],
    optimizer: torch.optim.Optimizer | None,
    group_of: Mapping[str, int],
) -> dict[str, tuple[int, bool]]:
    """Return :attr:`EnginePlan.formats`."""
    slots = {slot.name: slot for _, spec, _ in flat_specs for slot in spec.layout.slots}
    parameters = {
        name: parameter for _, _, named in flat_specs for name, parameter in named.items()
    }
    coded = () if optimizer is None else names_in_8_bits(optimizer, parameters, slots, group_of)
    return {name: (group, name in coded) for name, group in group_of.items()}


def _uncut_vectors(model: nn.Module, persistent: Collection[str], cuts: Cuts) -> frozenset[int]:
    """Return the ids of vectors that all tensor-parallel ranks hold whole, except ``persistent``
    ones. They join the root: among the cut matrices of another unit they would add a message to
    each gather.
    """
    return frozenset(
        id(p)
        for name, p in model.named_parameters()
        if p.dim() < 2 and name not in persistent and not sharding_under(p, cuts).axes
    )


def _group_of(units: Sequence[UnitSpec], optimizer: torch.optim.Optimizer | None) -> dict[str, int]:
    """Return the optimizer group of each trainable parameter, by name, in the optimizer's order."""
    groups = [] if optimizer is None else optimizer.param_groups
    name_of = {id(p): n for unit in units for n, p in unit.parameters if p.requires_grad}
    given = ((index, id(p)) for index, group in enumerate(groups) for p in group["params"])
    return {name_of[key]: index for index, key in given if key in name_of}


def _axes(
    tensors: Iterable[torch.Tensor],
    named: Iterable[tuple[str, torch.Tensor]],
    dims: ParallelDims,
    cuts: Cuts,
) -> frozenset[tuple[str, ...]]:
    """Return the axes that cut parameters and buffers besides ZeRO, for each kind; ``named``: the
    same ``tensors`` with their names.
    """
    combinations: set[tuple[str, ...]] = {()}

    def name_of(tensor: torch.Tensor) -> str:
        return next(name for name, other in named if other is tensor)

    for tensor in tensors:
        if is_lazy(tensor):
            raise PartitionError(
                f"{name_of(tensor)} has no shape yet, as its module is lazy; call the model once "
                "before hf_zero.initialize"
            )
        if tensor.layout is not torch.strided or tensor.is_nested:
            kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
            raise PartitionError(
                f"{name_of(tensor)} is a {kind} tensor, which has no memory that ranks can share; "
                "keep the dense tensors that it consists of, such as indices and values, and put "
                "them together in the forward"
            )
        axes = sharding_under(tensor, cuts).axes
        combinations.add(axes)
        for axis in axes:
            if dims.size(axis) == 1:
                raise PartitionError(
                    f"{name_of(tensor)} is cut along the {axis!r} axis, which this job does not "
                    f"have; call init_parallel(ParallelDims.over(ranks, {axis}=...)) before "
                    "the model is cut"
                )
    return frozenset(combinations)


PlannedSpec = tuple[UnitSpec, FlatSpec, dict[str, nn.Parameter]]


@dataclass(frozen=True)
class _Places:
    """The places of ``rank`` among the ranks that hold the same parts; ``num_shards``: of flat
    buffers that all ranks of its pipeline stage hold.
    """

    dims: ParallelDims
    rank: int
    num_shards: int
    _found: dict[tuple[str, ...], tuple[int, int, int]] = field(default_factory=dict)

    def along(self, axes: tuple[str, ...]) -> tuple[int, int, int]:
        """Return, for flat buffers that ``axes`` cut besides ZeRO: the number of their shards, the
        index of this rank's shard, and the index of its replica.
        """
        if axes not in self._found:
            sharing = self.dims.ranks_sharing(self.rank, axes)
            num_shards = len(sharing) if axes and self.num_shards > 1 else self.num_shards
            position = sharing.index(self.rank)
            self._found[axes] = num_shards, position % num_shards, position // num_shards
        return self._found[axes]


class FlatKind(NamedTuple):
    """The properties by which parameters of one unit share a flat buffer.

    policy: of persistent parameters, or of the ZeRO stage. codecs: those that may send it. moments:
    the names of the moments, joined, if groups of the optimizer differ in them, else "".
    """

    trainable: bool
    dtype: torch.dtype
    raw: bool
    policy: StagePolicy
    codecs: tuple[ParameterCodec, ...]
    moments: str
    sharding: Sharding


@dataclass(frozen=True)
class _FlatLayouts:
    """The layout of the parameters of units in flat buffers."""

    precision: str | None
    in_fp32: frozenset[str]  # names of the parameters that compute in fp32 whatever the precision
    policy: StagePolicy
    persistent: frozenset[str]
    codecs: Sequence[ParameterCodec]
    group_of: Mapping[str, int]
    moments: Sequence[tuple[str, ...]]
    cuts: Cuts
    places: _Places
    bf16_masters: bool

    def flats_of(
        self, unit: UnitSpec, held: Collection[str] | None
    ) -> Iterator[tuple[FlatSpec, dict[str, nn.Parameter]]]:
        """Yield the flat buffers of ``unit``, each with its parameters by name. ``held``: names of
        the parameters of this pipeline stage; None: all.
        """
        by_kind: dict[FlatKind, dict[str, nn.Parameter]] = {}
        for_persistent, differ = self.policy.for_persistent, len(set(self.moments)) > 1
        parameters = [item for item in unit.parameters if held is None or item[0] in held]
        # Ordered by group: the elements of a group in a unit are one run.
        for name, parameter in sorted(parameters, key=lambda item: self.group_of.get(item[0], -1)):
            dtype = (
                parameter.dtype
                if self.precision is None
                else compute_dtype(name, parameter, self.precision, self.in_fp32)
            )
            stays = unit.outside or name in self.persistent
            policy = for_persistent if stays else self.policy
            trains, raw = name in self.group_of, holds_raw_bytes(parameter)
            moments = "+".join(self.moments[self.group_of[name]]) if trains and differ else ""
            sharding = sharding_under(parameter, self.cuts).kind
            gathers = policy.shards_parameters and self.places.along(sharding.axes)[0] > 1
            codecs: tuple[ParameterCodec, ...] = ()
            if self.codecs:
                use = ParameterUse(dtype, trains, raw, unit.outside, gathers)
                codecs = tuple(codec for codec in self.codecs if codec.takes(parameter, use))
            kind = FlatKind(trains, dtype, raw, policy, codecs, moments, sharding)
            by_kind.setdefault(kind, {})[name] = parameter
        for kind, named in by_kind.items():
            yield self._flat(unit, kind, named), named

    def _flat(
        self, unit: UnitSpec, kind: FlatKind, parameters: dict[str, nn.Parameter]
    ) -> FlatSpec:
        trainable, dtype, policy, sharding = kind.trainable, kind.dtype, kind.policy, kind.sharding
        num_shards, shard, replica = self.places.along(sharding.axes)
        # A frozen persistent flat buffer is unsharded, so every rank owns all of it, and shard 0 of
        # replica 0 saves it.
        num_shards = num_shards if trainable else policy.num_parameter_shards(num_shards)
        stays = policy != self.policy and not unit.outside
        layout = FlatLayout.build(
            [(name, shape_of(p, self.cuts)) for name, p in parameters.items()],
            num_shards,
            {name: sharding_under(p, self.cuts).box for name, p in parameters.items()},
            dtype.itemsize,
        )
        state = "trainable" if trainable else "frozen"
        key = f"{unit.name}|{state}|{str(dtype).removeprefix('torch.')}{'|raw' if kind.raw else ''}"
        key += "|whole" if stays else ""
        key += "".join(f"|{codec.key}" for codec in kind.codecs)
        key += f"|{kind.moments}" if kind.moments else ""
        key += f"|{sharding.key}" if sharding.key else ""
        owned = layout.shard_range(shard if num_shards > 1 else 0)
        use = FlatUse(layout, dtype, trainable, policy.shards_parameters, stays, owned)
        codecs = MessageCodecs()
        for codec in kind.codecs:
            codecs = codecs.overridden(codec.messages(use))
        return FlatSpec(
            index=-1,
            key=key,
            layout=layout,
            dtype=dtype,
            trainable=trainable,
            raw=kind.raw,
            sharded=policy.shards_parameters,
            persistent=stays,
            outside=unit.outside,
            saves_shard=replica == 0 and (num_shards > 1 or shard == 0),
            owned=owned,
            reduce_codec=codecs.reduced,
            gather_codec=codecs.gathered,
            momentum_blocks=codecs.momentum,
            sharding=sharding,
            master_dtype=self._master_dtype(dtype),
        )

    def _master_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of master weights, and of sums of gradients, of parameters that compute
        in ``dtype``.
        """
        if dtype == torch.float64 or (self.bf16_masters and dtype == torch.bfloat16):
            return dtype
        return torch.float32


def _flat_plans(
    flat_specs: Sequence[PlannedSpec],
    settings: ZeroConfig,
    dims: ParallelDims,
    optimizer: torch.optim.Optimizer | None,
    device: torch.device,
    formats: Mapping[str, tuple[int, bool]],
) -> tuple[FlatPlan, ...]:
    """Return the plans of ``flat_specs``, with indices, tiers and dtypes of gradients."""
    rules, policy = PlacementRules(settings, dims.pp_stage_ranks), POLICIES[settings.stage]
    specs = [shard_spec(spec) for _, spec, _ in flat_specs]
    away = rules.offloaded([s for s, (_, spec, _) in zip(specs, flat_specs) if not spec.persistent])
    tiers = rules.shard_tiers([s for s, (_, spec, _) in zip(specs, flat_specs) if spec.sharded])
    # gloo sums what ranks send in 16 bits in the dtype of a sharded gradient
    sums_wide = policy.shards_gradients and is_synchronous(device) and dims.pp_stage_ranks > 1
    narrow = (
        optimizer is not None
        and not sums_wide
        and step_launch().reads_16_bits(optimizer, settings.kernels, device)
    )
    return tuple(
        FlatPlan(
            replace(spec, index=index),
            unit,
            parameters,
            tiers.get(shard.key, "device"),
            _pieces(spec, rules, formats) if shard.key in away else None,
            _gradient_dtype(shard, settings, rules, narrow or shard.key in away),
            not policy.shards_gradients,
            shard.key not in away
            and tiers.get(shard.key, "device") == "device"
            and not settings.zero.keep_parameter_shards
            and _casts_master(spec),
        )
        for index, (shard, (unit, spec, parameters)) in enumerate(zip(specs, flat_specs))
    )


def _gradient_dtype(
    shard: ShardSpec, settings: ZeroConfig, rules: PlacementRules, narrow: bool
) -> torch.dtype:
    """Return the dtype of the gradient of ``shard``. ``narrow``: its update reads 16-bit gradients,
    in host memory or by a fused kernel; torch's would copy them to fp32 first.
    """
    if settings.gradient_accumulation_dtype:
        return COMPUTE[settings.gradient_accumulation_dtype]
    if narrow:
        wire = settings.communication_data_type
        return rules.gradient_dtype(shard, COMPUTE[wire] if wire else shard.dtype)
    return shard.master_dtype


def _casts_master(spec: FlatSpec) -> bool:
    """Return whether the master weights of ``spec`` can be cast in place of a parameter shard.
    Messages in blocks are encoded from the shard, also where steps send differences.
    """
    narrower = spec.dtype.itemsize < spec.master_dtype.itemsize
    if not (spec.sharded and spec.trainable and narrower):
        return False
    from_master = spec.gather_codec is None or spec.gather_codec.reads_master
    return from_master and spec.momentum_blocks is None and not spec.sends_differences


def _pieces(
    spec: FlatSpec, rules: PlacementRules, formats: Mapping[str, tuple[int, bool]]
) -> tuple[SubGroup, ...]:
    """Return the sub-groups of the offloaded state of ``spec``. The moments of one have one format,
    and it ends with a block.
    """
    limit = rules.sub_group_size
    if any(formats[slot.name][1] for slot in spec.layout.slots):
        limit = max(limit // BLOCK, 1) * BLOCK
    return tuple(sub_groups(spec.layout, spec.owned, formats, limit))
