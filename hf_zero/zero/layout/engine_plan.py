"""The plan of an engine: units, flat buffers, their sharding, dtypes, codecs, tiers and bytes.

:func:`plan` runs no collectives, needs no process group and creates no tensors of model size, so it
can plan for any rank of any job, of a model on any device, meta included. An engine builds exactly
what its plan says (``materialize.py``); estimates and the check before training read the same plan.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from hf_zero.config import ZeroConfig
from hf_zero.config.sections import awaited_by_updates
from hf_zero.device.kinds import is_host
from hf_zero.distributed.parallel_dims import ParallelDims
from hf_zero.errors import ConfigError, PartitionError
from hf_zero.offload.nvme import paged, size_in_file
from hf_zero.offload.placement import PlacementRules, ShardSpec
from hf_zero.offload.storage import StorageFormat, SubGroup, size_in_memory
from hf_zero.optim.bf16_state import Bf16State
from hf_zero.optim.cpu_base import names_in_8_bits
from hf_zero.optim.elementwise import updates_in_parts
from hf_zero.optim.fused import reads_16_bits
from hf_zero.optim.offloaded_state import compressible, stored_format
from hf_zero.optim.segments import group_runs, sub_groups
from hf_zero.optim.state import StateEntries, is_elementwise
from hf_zero.optim.whole_tensor import moments_by_group
from hf_zero.zero.layout.codecs import UNCOMPRESSED, Codecs
from hf_zero.zero.layout.flat_layout import BLOCK, FlatLayout
from hf_zero.zero.layout.flat_spec import FlatSpec
from hf_zero.zero.layout.float8_weights import Float8Weights
from hf_zero.zero.layout.precision import COMPUTE, compute_dtype, is_raw, kept_in_fp32
from hf_zero.zero.layout.sharding import Sharding, sharding_of
from hf_zero.zero.layout.stage_policy import POLICIES, Policy
from hf_zero.zero.layout.walk import buffers_of, parameters_of
from hf_zero.zero.layout.wrap import UnitSpec, find_units, persistence, persistent_names

Cuts = Mapping[nn.Parameter, Sharding]
UNCUT: Cuts = MappingProxyType({})
SIXTEEN_BITS = (torch.bfloat16, torch.float16)
CPU = torch.device("cpu")


@dataclass(frozen=True)
class PlannedExtensions:
    """The parts of techniques that a plan reads, by default those of an engine without any.

    codecs: of compressed collectives. node: number of neighbouring ranks of a shard group that form
    a mesh dimension of their own, for gathers. hierarchical: the configuration key that asks for
    gathers across hosts and then within each, if any. needs_one_mesh: configuration keys in use
    whose messages go over one mesh of all ranks, so that they exclude tensor, expert and pipeline
    parallelism.
    """

    codecs: Codecs = UNCOMPRESSED
    node: int = 1
    hierarchical: str = ""
    needs_one_mesh: tuple[str, ...] = ()


ExtensionsOf = Callable[[ZeroConfig, "torch.optim.Optimizer | None"], PlannedExtensions]


def _plain(settings: ZeroConfig, optimizer: torch.optim.Optimizer | None) -> PlannedExtensions:
    return PlannedExtensions()


@dataclass(frozen=True, eq=False)
class FlatPlan:
    """One flat buffer on one rank, before anything is allocated.

    spec: its fixed properties, without a mesh. unit: the unit that gathers it. parameters: by name,
    in the order of the layout. shard_tier: "device", "ram" or "disk", where its parameter shard is
    kept. sub_groups: the pieces of its offloaded optimizer state; None: the state stays on the
    device. gradient_dtype: of the gradient accumulator. sums_whole: the gradient accumulator is
    unsharded (stages 0 and 1). casts_master: its parameter shard has no memory of its own.
    """

    spec: FlatSpec
    unit: UnitSpec
    parameters: dict[str, nn.Parameter]
    shard_tier: str
    sub_groups: tuple[SubGroup, ...] | None
    gradient_dtype: torch.dtype
    sums_whole: bool
    casts_master: bool

    @property
    def device_gradient_numel(self) -> int:
        """Number of elements of the sum of its gradients on the device."""
        if self.sub_groups is not None and not self.sums_whole:
            return 0
        return self.spec.layout.padded if self.sums_whole else self.spec.owned_numel

    def parameter_bytes(self) -> Counter[str]:
        """Return the bytes of its values between steps, by tier."""
        spec = self.spec
        if self.casts_master:
            return Counter()
        nbytes = (spec.owned_numel if spec.sharded else spec.layout.padded) * spec.dtype.itemsize
        return Counter({self.shard_tier: paged(nbytes) if self.shard_tier == "disk" else nbytes})

    def gradient_bytes(self) -> Counter[str]:
        """Return the bytes of its gradient between a backward and its step, by tier."""
        if not self.spec.trainable:
            return Counter()
        size = self.gradient_dtype.itemsize
        nbytes = Counter({"device": size * self.device_gradient_numel})
        if self.sub_groups is not None:
            nbytes["ram"] = size * self.spec.owned_numel
        return nbytes


class KeptState(NamedTuple):
    """A state of the optimizer with a number for each element: the first ``group`` that keeps it,
    its dtype on the device, and that of its ``numbers`` where it is offloaded.
    """

    group: int
    dtype: torch.dtype
    numbers: torch.dtype


def shard_spec(spec: FlatSpec) -> ShardSpec:
    """Return the properties of a flat buffer that its placement depends on."""
    return ShardSpec(spec.key, spec.owned_numel, spec.dtype, spec.trainable, spec.wide)


@dataclass(frozen=True, eq=False)
class EnginePlan:
    """The plan of an engine of one rank. Made by :func:`plan`, whose arguments it keeps and
    explains: model, settings, dims, optimizer, rank, device, cuts, held, keeps_dtypes and
    extensions_of.

    units: the partition of the model, the root first. aliases: other names of tied parameters, each
    with the first name. group_of: the optimizer group of each trainable parameter, by name.
    formats: the same with whether moments of the parameter are in bitsandbytes' 8 bits. flats: the
    flat buffers of all units, in order. axes: the combinations of axes, besides ZeRO, along which
    parameters and buffers are cut; () if some are not cut. extensions: what ``extensions_of``
    returned.
    """

    model: nn.Module
    settings: ZeroConfig
    dims: ParallelDims
    optimizer: torch.optim.Optimizer | None
    rank: int
    device: torch.device
    cuts: Cuts
    held: Collection[str] | None
    keeps_dtypes: bool
    units: tuple[UnitSpec, ...]
    aliases: dict[str, str]
    group_of: dict[str, int]
    formats: dict[str, tuple[int, bool]]
    flats: tuple[FlatPlan, ...]
    axes: frozenset[tuple[str, ...]]
    extensions: Any
    extensions_of: ExtensionsOf

    def replan(self, settings: ZeroConfig, rank: int | None = None) -> EnginePlan:
        """Return the plan of the same model and job with other ``settings``, of ``rank`` unless it
        is None.
        """
        return plan(
            self.model,
            settings,
            self.dims,
            self.optimizer,
            extensions_of=self.extensions_of,
            rank=self.rank if rank is None else rank,
            device=self.device,
            cuts=self.cuts,
            held=self.held,
            keeps_dtypes=self.keeps_dtypes,
        )

    @cached_property
    def trainable(self) -> tuple[FlatPlan, ...]:
        return tuple(flat for flat in self.flats if flat.spec.trainable)

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        """The compute dtype of each parameter, by its first name."""
        return {name: flat.spec.dtype for flat in self.flats for name in flat.parameters}

    @property
    def policy(self) -> Policy:
        return POLICIES[self.settings.stage]

    @property
    def shards(self) -> int:
        """Number of shards of a flat buffer that all ranks of the stage hold."""
        return self.policy.shards(self.dims.in_a_stage, self.settings.replicate_size)

    @property
    def stages(self) -> range:
        """The available ZeRO stages: 0 and 1 for pipelines, which reduce once per step."""
        return range(4 if self.dims.pipeline == 1 else 2)

    @property
    def data_ranks(self) -> int:
        """Number of ranks that read batches of their own: those of a tensor-parallel or
        sequence-parallel group read the same, and a pipeline stage has that many.
        """
        tensor = max(self.dims.tensor, self.settings.tensor_parallel.size)
        sequence = max(self.dims.tokens, self.settings.ranks_of_a_sequence)
        return self.dims.in_a_stage // (tensor * sequence)

    @property
    def persistence(self) -> int:
        """The most elements of a parameter that stays whole between steps at stage 3."""
        return persistence(self.settings.zero.param_persistence_threshold)

    @property
    def all_persistent(self) -> bool:
        """Whether all parameters stay whole between steps at a stage that shards others."""
        return bool(self.flats) and all(flat.spec.persistent for flat in self.flats)

    def sharers(self, flat: FlatPlan) -> int:
        """Return the number of ranks of the stage that hold the same parts as ``flat``."""
        return self.dims.in_a_stage // math.prod(map(self.dims.size, flat.spec.sharding.axes))

    def whole_numel(self, parameter: nn.Parameter) -> int:
        """Return the number of elements that all ranks together hold of ``parameter``."""
        numel = math.prod(shape_of(parameter, self.cuts))
        return numel * math.prod(map(self.dims.size, _sharding(parameter, self.cuts).axes))

    @cached_property
    def rules(self) -> PlacementRules:
        """The choice of tiers."""
        return PlacementRules(self.settings, self.dims.in_a_stage)

    @property
    def buffer_dtype(self) -> torch.dtype | None:
        """The dtype to which floating-point buffers of the model are cast; None keeps theirs."""
        name = self.settings.buffer_dtype
        return COMPUTE[name] if name and not self.keeps_dtypes else None

    @property
    def wire_dtype(self) -> torch.dtype | None:
        """The dtype of gradients in messages; None: that of the parameters."""
        wire = self.settings.communication_data_type
        return COMPUTE[wire] if wire else None

    @property
    def upcasts(self) -> bool:
        """Whether sums of gradients in 16 bits become fp32 as soon as something is added."""
        return self.settings.gradient_accumulation_dtype is None

    @cached_property
    def updates_in_backward(self) -> bool:
        """Whether a unit is updated as soon as its gradients are reduced. Not where an update needs
        numbers that are known when the backward has ended.
        """
        settings, optimizer = self.settings, self.optimizer
        if optimizer is None or not settings.zero.update_in_backward:
            return False
        awaited = awaited_by_updates(
            settings.gradient_clipping,
            settings.precision == "fp16",
            settings.precision == "bf16" and settings.bf16.check_grad_overflow,
            not settings.zero.ignore_unused_parameters,
        )
        return updates_in_parts(optimizer) and not awaited

    @cached_property
    def moments(self) -> int:
        """Numbers that the optimizer keeps for an element, in the group that keeps most."""
        groups = () if self.optimizer is None else self.optimizer.param_groups
        return max((len(self._kept(i, torch.float32)) for i in range(len(groups))), default=0)

    @cached_property
    def compresses_moments(self) -> bool:
        """Whether all moments of the optimizer can be offloaded in fewer bits."""
        if self.optimizer is None or not self.moments:
            return False
        groups = enumerate(self.optimizer.param_groups)
        kinds = (
            (self._kept(at, torch.float32), compressible(self.optimizer, g)) for at, g in groups
        )
        return all(kept.keys() <= signs.keys() for kept, signs in kinds)

    @cached_property
    def _entries(self) -> StateEntries:
        """The state of the optimizer, as an engine makes it."""
        assert self.optimizer is not None
        return StateEntries(self.optimizer, Bf16State.of(self.settings, self.optimizer))

    def _kept(self, group: int, dtype: torch.dtype) -> dict[str, KeptState]:
        """Return by name what the optimizer keeps for an element of ``group`` with master weights
        of ``dtype``.
        """
        if (group, dtype) not in self._kept_by_group:
            like = torch.zeros(1, dtype=dtype)
            numbers = self._entries.fresh(group, like, decoded=True)
            # on the device, 8-bit moments are counted by optimizer_bytes
            blocks = self._entries.groups[group].get("moments") in ("int8", "dynamic8")
            on_device = numbers if blocks else self._entries.fresh(group, like)
            self._kept_by_group[group, dtype] = {
                name: KeptState(group, on_device[name].dtype, value.dtype)
                for name, value in numbers.items()
                if is_elementwise(name, value, (1,))
            }
        return self._kept_by_group[group, dtype]

    @cached_property
    def _kept_by_group(self) -> dict[tuple[int, torch.dtype], dict[str, KeptState]]:
        return {}

    def moments_of(self, flat: FlatPlan) -> dict[str, KeptState]:
        """Return by name what the optimizer keeps for each element that this rank owns of
        ``flat``.
        """
        moments: dict[str, KeptState] = {}
        for run in group_runs(flat.spec.layout, flat.spec.owned, self.group_of):
            if run.group is not None:
                moments = self._kept(run.group, flat.spec.wide) | moments
        return moments

    def optimizer_bytes(self, flat: FlatPlan) -> Counter[str]:
        """Return the bytes of master weights and moments of ``flat``, by tier."""
        if not flat.spec.trainable:
            return Counter()
        if flat.sub_groups is None:
            numel = flat.spec.owned_numel
            needs_master = flat.spec.needs_master or flat.shard_tier != "device"
            master_size = flat.spec.wide.itemsize if needs_master else 0
            return Counter({"device": numel * master_size + self._moment_bytes(flat)})
        in_files = self.settings.offload_optimizer.device == "nvme"
        return Counter({"disk" if in_files else "ram": sum(self.piece_bytes(flat))})

    def _moment_bytes(self, flat: FlatPlan) -> int:
        """Return the bytes of moments of ``flat`` on the device."""
        if not self.names_in_8_bits:
            moments = sum(state.dtype.itemsize for state in self.moments_of(flat).values())
            return flat.spec.owned_numel * moments
        nbytes = 0
        for run in group_runs(flat.spec.layout, flat.spec.owned, self.formats):
            if run.group is not None:
                (group, in_8_bits), numel = run.group, run.stop - run.start
                for _, dtype, _ in self._kept(group, flat.spec.wide).values():
                    how = StorageFormat(dtype, blocks=in_8_bits and dtype == torch.float32)
                    nbytes += size_in_memory(how, numel)
        return nbytes

    @cached_property
    def names_in_8_bits(self) -> frozenset[str]:
        """The parameters with moments in bitsandbytes' 8 bits."""
        return frozenset(name for name, (_, in_8_bits) in self.formats.items() if in_8_bits)

    def piece_bytes(self, flat: FlatPlan) -> list[int]:
        """Return the bytes of master weights and moments of each offloaded piece of ``flat``.

        Raises ConfigError for moments that are kept in fp32 only, and configured in fewer bits.
        """
        others, formats = self._in_numbers(flat), [StorageFormat(flat.spec.wide)]
        for name, (group, _, numbers) in self.moments_of(flat).items():
            how = stored_format(self._entries, self.rules.moments, group, name, numbers, others)
            formats.append(how)
        in_files = self.settings.offload_optimizer.device == "nvme"
        size = size_in_file if in_files else size_in_memory
        pieces = flat.sub_groups or ()
        return [
            sum(size(how.of(number), stop - start) for how in formats)
            for number, (start, stop) in enumerate(pieces)
        ]

    def _in_numbers(self, flat: FlatPlan) -> frozenset[int] | None:
        """Return the offloaded pieces of ``flat`` that are not of parameters in 8 bits; None: none
        are.
        """
        layout, first = flat.spec.layout, flat.spec.owned[0]
        pieces = [
            {name for name, _ in layout.parameters_in(first + start, first + stop)}
            for start, stop in flat.sub_groups or ()
        ]
        others = [at for at, names in enumerate(pieces) if names.isdisjoint(self.names_in_8_bits)]
        return None if len(others) == len(pieces) else frozenset(others)

    def file_bytes(self) -> Counter[tuple[str, ...]]:
        """Return the bytes in files, by the folders that share them."""
        nbytes: Counter[tuple[str, ...]] = Counter()
        for flat in self.flats:
            shards = flat.parameter_bytes()["disk"]
            if shards:
                nbytes[self.settings.offload_param.nvme_path] += shards
            states = self.optimizer_bytes(flat)["disk"]
            if states:
                nbytes[self.settings.offload_optimizer.nvme_path] += states
        return nbytes


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
    keeps_dtypes: bool = False,
) -> EnginePlan:
    """Return the plan of an engine of ``model`` on one rank, without collectives.

    Args:
        model: a module on any device, left unchanged.
        settings: resolved for the ranks of one pipeline stage.
        dims: the sizes of the parallel axes of the job.
        optimizer: an optimizer over the model's parameters; those in none of its groups are frozen:
            gathered and released as the stage requires, never reduced. None: all are.
        extensions_of: the function from settings and optimizer to the parts that techniques
            provide (``hf_zero.compression.registry.extensions_of``); default: none do.
        rank: the rank of the job that is planned for.
        device: the kind of device that computes.
        cuts: the sharding of parameters that tensor and expert parallelism have yet to cut.
        held: names of the parameters that this pipeline stage holds; None: all.
        keeps_dtypes: parameters compute in their own dtypes, as in an engine that only holds them.

    Raises:
        ConfigError: a 16-bit trainable parameter in fp32 training, and keys that do not go with
            model parallelism or the optimizer.
        PartitionError: parameters without a shape, those cut along axes that the job does not have,
            and packed ones that do not exist.
    """
    axes = _axes(model, dims, cuts)
    extensions = extensions_of(settings, optimizer)
    if dims.splits_model and extensions.needs_one_mesh:
        raise ConfigError(
            f"{', '.join(extensions.needs_one_mesh)} does not go with a model that is split over "
            "ranks by tensor, expert or pipeline parallelism; remove the key"
        )
    policy, zero = POLICIES[settings.stage], settings.zero
    sizes = {p: math.prod(shape_of(p, cuts)) for p in parameters_of(model)}
    persistent = persistent_names(
        model, zero.param_persistence_threshold, zero.model_persistence_threshold, sizes
    )
    cuts_units = dims.tensor > 1 and policy.shards_parameters
    in_root = _uncut_vectors(model, persistent, cuts) if cuts_units else ()
    units, aliases = find_units(model, zero.module_granularity_threshold, in_root, sizes)
    group_of = _group_of(units, optimizer)
    bf16 = Bf16State.of(settings, optimizer)
    laying = _Laying(
        None if keeps_dtypes else settings.precision,
        kept_in_fp32(model, settings.precision, settings.keep_in_fp32_modules),
        policy,
        persistent,
        extensions.codecs,
        group_of,
        moments_by_group(optimizer),
        cuts,
        _Places(dims, rank, policy.shards(dims.in_a_stage, settings.replicate_size)),
        bf16 is not None and bf16.masters,
    )
    laid = [(unit, *flat) for unit in units for flat in laying.flats_of(unit, held)]
    slots = {slot.name: slot for _, spec, _ in laid for slot in spec.layout.slots}
    parameters = {name: parameter for _, _, named in laid for name, parameter in named.items()}
    coded = () if optimizer is None else names_in_8_bits(optimizer, parameters, slots, group_of)
    formats = {name: (group, name in coded) for name, group in group_of.items()}
    return EnginePlan(
        model=model,
        settings=settings,
        dims=dims,
        optimizer=optimizer,
        rank=rank,
        device=device,
        cuts=cuts,
        held=held,
        keeps_dtypes=keeps_dtypes,
        units=tuple(units),
        aliases=aliases,
        group_of=group_of,
        formats=formats,
        flats=_placed(laid, settings, dims, optimizer, device, formats),
        axes=axes,
        extensions=extensions,
        extensions_of=extensions_of,
    )


def _uncut_vectors(model: nn.Module, persistent: Collection[str], cuts: Cuts) -> frozenset[int]:
    """Return the ids of vectors that all tensor-parallel ranks hold whole, except ``persistent``
    ones. They join the root: among the cut matrices of another unit they would add a message to
    each gather.
    """
    return frozenset(
        id(p)
        for name, p in model.named_parameters()
        if p.dim() < 2 and name not in persistent and not _sharding(p, cuts).axes
    )


def _group_of(units: Sequence[UnitSpec], optimizer: torch.optim.Optimizer | None) -> dict[str, int]:
    """Return the optimizer group of each trainable parameter, by name."""
    groups = [] if optimizer is None else optimizer.param_groups
    index_of = {id(p): index for index, group in enumerate(groups) for p in group["params"]}
    parameters = (item for unit in units for item in unit.parameters)
    return {n: index_of[id(p)] for n, p in parameters if id(p) in index_of and p.requires_grad}


def _axes(model: nn.Module, dims: ParallelDims, cuts: Cuts) -> frozenset[tuple[str, ...]]:
    """Return the axes that cut parameters and buffers of ``model`` besides ZeRO, for each kind."""
    combinations: set[tuple[str, ...]] = {()}

    def name_of(tensor: torch.Tensor) -> str:
        named = itertools.chain(model.named_parameters(), model.named_buffers())
        return next(name for name, other in named if other is tensor)

    for tensor in itertools.chain(parameters_of(model), buffers_of(model)):
        if is_lazy(tensor):
            raise PartitionError(
                f"{name_of(tensor)} has no shape yet, as its module is lazy; call the model once "
                "before hf_zero.initialize"
            )
        axes = _sharding(tensor, cuts).axes
        combinations.add(axes)
        for axis in axes:
            if dims.size(axis) == 1:
                raise PartitionError(
                    f"{name_of(tensor)} is cut along the {axis!r} axis, which this job does not "
                    f"have; call init_parallel(ParallelDims.over(ranks, {axis}=...)) before "
                    "the model is cut"
                )
    return frozenset(combinations)


def _sharding(tensor: torch.Tensor, cuts: Cuts) -> Sharding:
    own = sharding_of(tensor)
    return cuts.get(tensor, own) if cuts else own  # type: ignore[call-overload]  # buffers, too


def shape_of(parameter: nn.Parameter, cuts: Cuts) -> tuple[int, ...]:
    """Return the shape of this rank's part of ``parameter``, cut already or by ``cuts``."""
    box = _sharding(parameter, cuts).box
    return tuple(parameter.shape) if box is None else box.shape


@dataclass(frozen=True)
class _Places:
    """The places of ``rank`` among the ranks that hold the same parts; ``shards``: of flat buffers
    that all ranks of its stage hold.
    """

    dims: ParallelDims
    rank: int
    shards: int

    def along(self, axes: tuple[str, ...]) -> tuple[int, int, int]:
        """Return, for flat buffers that ``axes`` cut besides ZeRO: the number of their shards, the
        number of the shard of this rank, and that of its replica.
        """
        sharing = self.dims.ranks_sharing(self.rank, axes)
        shards = len(sharing) if axes and self.shards > 1 else self.shards
        position = sharing.index(self.rank)
        return shards, position % shards, position // shards


class FlatKind(NamedTuple):
    """The properties by which parameters of one unit share a flat buffer.

    policy: that of persistent parameters, or the stage's. compressed: codecs may encode it. float8:
    gathers send it in float8. moments: the names of the moments, joined, if groups of the optimizer
    differ in them, else "".
    """

    trainable: bool
    dtype: torch.dtype
    raw: bool
    policy: Policy
    compressed: bool
    float8: bool
    moments: str
    sharding: Sharding


@dataclass(frozen=True)
class _Laying:
    """The layout of the parameters of units in flat buffers."""

    precision: str | None
    in_fp32: frozenset[str]  # names of the parameters that compute in fp32 whatever the precision
    policy: Policy
    persistent: frozenset[str]
    codecs: Codecs
    group_of: Mapping[str, int]
    moments: Sequence[tuple[str, ...]]
    cuts: Cuts
    places: _Places
    bf16_masters: bool
    _places_of: dict[tuple[str, ...], tuple[int, int, int]] = field(default_factory=dict)

    def flats_of(
        self, unit: UnitSpec, held: Collection[str] | None
    ) -> Iterator[tuple[FlatSpec, dict[str, nn.Parameter]]]:
        """Yield the flat buffers of ``unit``, each with its parameters by name. ``held``: names of
        the parameters of this pipeline stage; None: all.
        """
        kinds: dict[FlatKind, dict[str, nn.Parameter]] = {}
        of_persistent, differ = self.policy.of_persistent, len(set(self.moments)) > 1
        parameters = [item for item in unit.parameters if held is None or item[0] in held]
        # Ordered by group: the elements of a group in a unit are one run.
        for name, parameter in sorted(parameters, key=lambda item: self.group_of.get(item[0], -1)):
            dtype = (
                parameter.dtype
                if self.precision is None
                else compute_dtype(name, parameter, self.precision, self.in_fp32)
            )
            policy = of_persistent if name in self.persistent else self.policy
            trains, raw = name in self.group_of, is_raw(parameter)
            compressed = not raw and self.codecs.takes(parameter, trains)
            moments = "+".join(self.moments[self.group_of[name]]) if trains and differ else ""
            sharding = _sharding(parameter, self.cuts).kind
            gathers = policy.shards_parameters and self._place(sharding.axes)[0] > 1
            float8 = gathers and self.codecs.sends_float8(parameter, dtype)
            kind = FlatKind(trains, dtype, raw, policy, compressed, float8, moments, sharding)
            kinds.setdefault(kind, {})[name] = parameter
        for kind, named in kinds.items():
            yield self._flat(unit, kind, named), named

    def _flat(
        self, unit: UnitSpec, kind: FlatKind, parameters: dict[str, nn.Parameter]
    ) -> FlatSpec:
        trainable, dtype, policy, sharding = kind.trainable, kind.dtype, kind.policy, kind.sharding
        shards, shard, replica = self._place(sharding.axes)
        # A frozen persistent flat buffer is unsharded, so every rank owns all of it, and shard 0 of
        # replica 0 saves it.
        shards = shards if trainable else policy.parameter_shards(shards)
        stays = policy != self.policy
        layout = FlatLayout.build(
            [(name, shape_of(p, self.cuts)) for name, p in parameters.items()],
            shards,
            {name: _sharding(p, self.cuts).box for name, p in parameters.items()},
            dtype.itemsize,
        )
        state = "trainable" if trainable else "frozen"
        key = f"{unit.name}|{state}|{str(dtype).removeprefix('torch.')}{'|raw' if kind.raw else ''}"
        key += "|whole" if stays else ""
        key += "|blocks" if kind.compressed else ""
        key += "|float8" if kind.float8 else ""
        key += f"|{kind.moments}" if kind.moments else ""
        key += f"|{sharding.key}" if sharding.key else ""
        owned = layout.rank_range(shard if shards > 1 else 0)
        reduce_codec, gather_codec = (
            self.codecs.codecs(layout, dtype, trainable, policy.shards_parameters, stays)
            if kind.compressed
            else (None, None)
        )
        if kind.float8:
            gather_codec = Float8Weights(layout, owned)
        return FlatSpec(
            number=-1,
            key=key,
            layout=layout,
            dtype=dtype,
            trainable=trainable,
            raw=kind.raw,
            sharded=policy.shards_parameters,
            persistent=stays,
            writes=replica == 0 and (shards > 1 or shard == 0),
            owned=owned,
            reduce_codec=reduce_codec,
            gather_codec=gather_codec,
            momentum_blocks=self.codecs.momentum_of(layout, dtype)
            if kind.compressed and trainable
            else None,
            sharding=sharding,
            wide=self._wide(dtype),
        )

    def _place(self, axes: tuple[str, ...]) -> tuple[int, int, int]:
        """Return :meth:`_Places.along` of ``axes``."""
        if axes not in self._places_of:
            self._places_of[axes] = self.places.along(axes)
        return self._places_of[axes]

    def _wide(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of master weights, and of sums of gradients, of parameters that compute
        in ``dtype``.
        """
        if dtype == torch.float64 or (self.bf16_masters and dtype == torch.bfloat16):
            return dtype
        return torch.float32


def _placed(
    laid: Sequence[tuple[UnitSpec, FlatSpec, dict[str, nn.Parameter]]],
    settings: ZeroConfig,
    dims: ParallelDims,
    optimizer: torch.optim.Optimizer | None,
    device: torch.device,
    formats: Mapping[str, tuple[int, bool]],
) -> tuple[FlatPlan, ...]:
    """Return the flat buffers ``laid`` out, with numbers, tiers and dtypes of gradients."""
    rules, policy = PlacementRules(settings, dims.in_a_stage), POLICIES[settings.stage]
    specs = [shard_spec(spec) for _, spec, _ in laid]
    away = rules.offloaded([s for s, (_, spec, _) in zip(specs, laid) if not spec.persistent])
    tiers = rules.shard_tiers([s for s, (_, spec, _) in zip(specs, laid) if spec.sharded])
    accumulate = settings.gradient_accumulation_dtype
    wire = settings.communication_data_type
    # gloo sums what ranks send in 16 bits in the dtype of a sharded gradient
    sums_wide = policy.shards_gradients and is_host(device) and dims.in_a_stage > 1
    narrow = (
        optimizer is not None
        and not sums_wide
        and reads_16_bits(optimizer, settings.kernels, device)
    )

    def gradient_dtype(shard: ShardSpec) -> torch.dtype:
        if accumulate:
            return COMPUTE[accumulate]
        # an update in host memory, or by a fused kernel, reads 16-bit gradients; torch's would copy
        # them to fp32 first
        if shard.key in away or narrow:
            return rules.gradient_dtype(shard, COMPUTE[wire] if wire else shard.dtype)
        return shard.wide

    def casts_master(shard: ShardSpec, spec: FlatSpec) -> bool:
        # messages in blocks are encoded from the shard, also where steps send differences
        whole = spec.gather_codec is None or isinstance(spec.gather_codec, Float8Weights)
        plain = whole and spec.momentum_blocks is None
        return (
            spec.sharded
            and spec.trainable
            and spec.dtype.itemsize < spec.wide.itemsize
            and plain
            and not spec.sends_differences
            and shard.key not in away
            and tiers.get(shard.key, "device") == "device"
            and not settings.zero.keep_parameter_shards
        )

    def pieces(spec: FlatSpec) -> tuple[SubGroup, ...]:
        limit = rules.sub_group_size
        # moments of a piece have one format, and pieces end with blocks
        if any(formats[slot.name][1] for slot in spec.layout.slots):
            limit = max(limit // BLOCK, 1) * BLOCK
        return tuple(sub_groups(spec.layout, spec.owned, formats, limit))

    return tuple(
        FlatPlan(
            replace(spec, number=number),
            unit,
            parameters,
            tiers.get(shard.key, "device"),
            pieces(spec) if shard.key in away else None,
            gradient_dtype(shard),
            not policy.shards_gradients,
            casts_master(shard, spec),
        )
        for number, (shard, (unit, spec, parameters)) in enumerate(zip(specs, laid))
    )
