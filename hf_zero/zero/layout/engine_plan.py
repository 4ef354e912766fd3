"""The plan of an engine: units, flat buffers, their sharding, dtypes, codecs, tiers and bytes.

An engine builds exactly what its plan says (``materialize.py``); estimates and the check before
training read the same plan. ``planner.py`` makes it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from hf_zero.config import ZeroConfig
from hf_zero.config.sections import awaited_by_updates
from hf_zero.distributed.parallel_dims import ParallelDims
from hf_zero.offload.placement import PlacementRules, ShardSpec
from hf_zero.offload.storage import StorageFormat, SubGroup, paged, size_in_file, size_in_memory
from hf_zero.optim.elementwise import updates_in_parts
from hf_zero.optim.initial_state import InitialStates
from hf_zero.optim.moment_formats import codec_of
from hf_zero.optim.segment_entries import SegmentStateAccess, is_elementwise
from hf_zero.optim.segments import ParamGroup, group_runs
from hf_zero.zero.layout.flat_spec import FlatSpec
from hf_zero.zero.layout.parameter_codec import ParameterCodec
from hf_zero.zero.layout.precision import COMPUTE
from hf_zero.zero.layout.sharding import Sharding, sharding_of
from hf_zero.zero.layout.stage_policy import POLICIES, StagePolicy
from hf_zero.zero.layout.wrap import UnitSpec, persistence

if TYPE_CHECKING:
    from hf_zero.distributed.collectives import GatherRoute, MeshDim

Cuts = Mapping[nn.Parameter, Sharding]
UNCUT: Cuts = MappingProxyType({})
SIXTEEN_BITS = (torch.bfloat16, torch.float16)
CPU = torch.device("cpu")


def sharding_under(tensor: torch.Tensor, cuts: Cuts) -> Sharding:
    """Return the sharding of ``tensor``, as it is or by ``cuts``."""
    own = sharding_of(tensor)
    return cuts.get(tensor, own) if cuts else own  # type: ignore[call-overload]  # buffers, too


def shape_of(parameter: nn.Parameter, cuts: Cuts) -> tuple[int, ...]:
    """Return the shape of this rank's part of ``parameter``, cut already or by ``cuts``."""
    box = sharding_under(parameter, cuts).box
    return tuple(parameter.shape) if box is None else box.shape


class OffloadedMoments:
    """How moments are kept outside of the device; without a feature as they are on it."""

    def compressible(
        self, optimizer: torch.optim.Optimizer, group: ParamGroup
    ) -> Mapping[str, bool]:
        """Return the states of ``group`` that may be in fewer bits, and whether they have signs."""
        return {}

    def stored_format(
        self,
        entries: SegmentStateAccess,
        moments: str,
        group: int,
        name: str,
        dtype: torch.dtype,
        unquantized_sub_groups: frozenset[int] | None,
    ) -> StorageFormat:
        """Return the format of state ``name``, of ``dtype`` on the device, of group ``group`` under
        the configured ``moments``. ``unquantized_sub_groups``: those without 8-bit moments; None:
        all. Raises ConfigError for a state that has one format only.
        """
        return StorageFormat(dtype)

    def refuse(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise UnsupportedOptimizerError for an optimizer whose state stays on the device."""


AS_ON_DEVICE = OffloadedMoments()


@dataclass(frozen=True)
class PlannedExtensions:
    """The extensions that a plan reads; the defaults are for an engine without any.

    codecs: of parameters; of each direction the last that takes a parameter counts. node: number of
    neighboring ranks of a shard group that form a mesh dimension of their own, for gathers.
    hierarchical: the configuration key that asks for gathers over ``route`` across hosts and within
    each, if any. needs_one_mesh: configuration keys in use whose messages go over one mesh of all
    ranks, so that they exclude tensor, expert and pipeline parallelism. narrow: the state of the
    optimizer that is kept in fewer bits between steps (``Bf16State``), if any is.
    """

    codecs: tuple[ParameterCodec, ...] = ()
    node: int = 1
    hierarchical: str = ""
    route: Callable[[MeshDim, MeshDim], GatherRoute] | None = None
    needs_one_mesh: tuple[str, ...] = ()
    narrow: Any = None
    offloaded_moments: OffloadedMoments = AS_ON_DEVICE


ExtensionsOf = Callable[[ZeroConfig, "torch.optim.Optimizer | None"], PlannedExtensions]


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
    def needs_master(self) -> bool:
        """Return whether an update on the device needs master weights besides the parameter shard:
        this has another dtype, or is elsewhere.
        """
        return self.spec.needs_master or self.shard_tier != "device"

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
    """A per-element state of the optimizer: the first ``group`` that keeps it, its dtype on the
    device, and its unquantized dtype where offloaded.
    """

    group: int
    dtype: torch.dtype
    offloaded_dtype: torch.dtype


def shard_spec(spec: FlatSpec) -> ShardSpec:
    """Return the properties of a flat buffer that its placement depends on."""
    return ShardSpec(spec.key, spec.owned_numel, spec.dtype, spec.trainable, spec.master_dtype)


@dataclass(frozen=True, eq=False)
class EnginePlan:
    """The plan of an engine of one rank. Made by :func:`plan`, whose arguments it keeps and
    explains: model, settings, dims, optimizer, rank, device, cuts, held, shard_only and
    extensions_of.

    units: the partition of the model, the root first, then the parameters of the optimizer outside
    the model. aliases: other names of tied parameters, each
    with the first name. group_of: the optimizer group of each trainable parameter, by name, in the
    optimizer's order. formats: the same with whether moments of the parameter are in bitsandbytes'
    8 bits. flats: the flat buffers of all units, in order. axes: the combinations of axes, besides
    ZeRO, along which parameters and buffers are cut; () if some are not cut. extensions: what
    ``extensions_of`` returned. kept_buffers: the names of the modules that the engine had before it
    is built again, whose buffers keep the values of each rank.
    """

    model: nn.Module
    settings: ZeroConfig
    dims: ParallelDims
    optimizer: torch.optim.Optimizer | None
    rank: int
    device: torch.device
    cuts: Cuts
    held: Collection[str] | None
    shard_only: bool
    units: tuple[UnitSpec, ...]
    aliases: dict[str, str]
    group_of: dict[str, int]
    formats: dict[str, tuple[int, bool]]
    flats: tuple[FlatPlan, ...]
    axes: frozenset[tuple[str, ...]]
    extensions: Any
    extensions_of: ExtensionsOf
    kept_buffers: frozenset[str] = frozenset()

    @cached_property
    def trainable(self) -> tuple[FlatPlan, ...]:
        return tuple(flat for flat in self.flats if flat.spec.trainable)

    @property
    def outside(self) -> tuple[tuple[str, nn.Parameter], ...]:
        """The parameters of the optimizer outside the model, by name."""
        return next((unit.parameters for unit in self.units if unit.outside), ())

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        """The compute dtype of each parameter, by its first name."""
        return {name: flat.spec.dtype for flat in self.flats for name in flat.parameters}

    @property
    def policy(self) -> StagePolicy:
        return POLICIES[self.settings.stage]

    @property
    def num_shards(self) -> int:
        """Number of shards of a flat buffer that all ranks of the pipeline stage hold."""
        return self.policy.num_shards(self.dims.pp_stage_ranks, self.settings.replicate_size)

    @property
    def zero_stages(self) -> range:
        """The available ZeRO stages: 0 and 1 for pipelines, which reduce once per step."""
        return range(4 if self.dims.pipeline == 1 else 2)

    @property
    def gathers_updates(self) -> bool:
        """Return whether updates of offloaded state end with gathers: some parameters are whole,
        and their state is sharded.
        """
        return self.settings.offload_optimizer.on and (
            self.policy.gathers_after_step
            or any(flat.spec.outside and flat.sub_groups is not None for flat in self.flats)
        )

    @property
    def data_ranks(self) -> int:
        """Number of data-parallel ranks: the ranks of a pipeline stage / (tensor * sequence *
        context), since the ranks of such a group read one batch.
        """
        tensor = max(self.dims.tensor, self.settings.tensor_parallel.size)
        sequence = max(self.dims.sequence_context, self.settings.ranks_of_a_sequence)
        return self.dims.pp_stage_ranks // (tensor * sequence)

    @property
    def persistence(self) -> int:
        """The most elements of a parameter that stays whole between steps at stage 3."""
        return persistence(self.settings.zero.param_persistence_threshold)

    @property
    def all_persistent(self) -> bool:
        """Return whether all parameters stay whole between steps at a stage that shards others."""
        within = [flat for flat in self.flats if not flat.spec.outside]
        return bool(within) and all(flat.spec.persistent for flat in within)

    def sharers(self, flat: FlatPlan) -> int:
        """Return the number of ranks of the pipeline stage that hold the same parts as ``flat``."""
        return self.dims.pp_stage_ranks // math.prod(map(self.dims.size, flat.spec.sharding.axes))

    def whole_numel(self, parameter: nn.Parameter) -> int:
        """Return the number of elements that all ranks together hold of ``parameter``."""
        numel = math.prod(shape_of(parameter, self.cuts))
        return numel * math.prod(map(self.dims.size, sharding_under(parameter, self.cuts).axes))

    @cached_property
    def rules(self) -> PlacementRules:
        """The choice of tiers."""
        return PlacementRules(self.settings, self.dims.pp_stage_ranks)

    @property
    def buffer_dtype(self) -> torch.dtype | None:
        """The dtype to which floating-point buffers of the model are cast; None keeps theirs."""
        name = self.settings.buffer_dtype
        return COMPUTE[name] if name and not self.shard_only else None

    @property
    def wire_dtype(self) -> torch.dtype | None:
        """The dtype of gradients in messages; None: the parameters' own."""
        wire = self.settings.communication_data_type
        return COMPUTE[wire] if wire else None

    @property
    def upcasts(self) -> bool:
        """Return whether sums of gradients in 16 bits become fp32 as soon as something is added."""
        return self.settings.gradient_accumulation_dtype is None

    @cached_property
    def updates_in_backward(self) -> bool:
        """Return whether a unit is updated as soon as its gradients are reduced. Not where an
        update needs numbers that are known when the backward has ended.
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
        """Return whether all moments of the optimizer can be offloaded in fewer bits."""
        if self.optimizer is None or not self.moments:
            return False
        groups = enumerate(self.optimizer.param_groups)
        compressible = self.extensions.offloaded_moments.compressible
        pairs = (
            (self._kept(at, torch.float32), compressible(self.optimizer, g)) for at, g in groups
        )
        return all(kept.keys() <= signs.keys() for kept, signs in pairs)

    @cached_property
    def _entries(self) -> SegmentStateAccess:
        """The state of the optimizer, as an engine makes it."""
        assert self.optimizer is not None
        return SegmentStateAccess(self.optimizer, self.extensions.narrow)

    def _kept(self, group: int, dtype: torch.dtype) -> dict[str, KeptState]:
        """Return by name what the optimizer keeps for an element of ``group`` with master weights
        of ``dtype``.
        """
        if (group, dtype) not in self._kept_by_group:
            like = torch.zeros(1, dtype=dtype)
            initial = InitialStates(self._entries)
            numbers = initial.of_group(group, like, decoded=True)
            # on the device, 8-bit moments are counted by optimizer_bytes
            blocks = self._entries.groups[group].get("moments") in ("int8", "dynamic8")
            on_device = numbers if blocks else initial.of_group(group, like)
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
        """Return by name what the optimizer keeps for each element that this rank owns."""
        moments: dict[str, KeptState] = {}
        for run in group_runs(flat.spec.layout, flat.spec.owned, self.group_of):
            if run.group is not None:
                moments = self._kept(run.group, flat.spec.master_dtype) | moments
        return moments

    def optimizer_bytes(self, flat: FlatPlan) -> Counter[str]:
        """Return the bytes of master weights and moments of ``flat``, by tier."""
        if not flat.spec.trainable:
            return Counter()
        if flat.sub_groups is None:
            numel = flat.spec.owned_numel
            master_size = flat.spec.master_dtype.itemsize if flat.needs_master else 0
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
                for name, (_, dtype, _) in self._kept(group, flat.spec.master_dtype).items():
                    coded = in_8_bits and dtype == torch.float32
                    codec = codec_of(self._entries.optimizer, name) if coded else None
                    nbytes += size_in_memory(StorageFormat(dtype, codec), numel)
        return nbytes

    @cached_property
    def names_in_8_bits(self) -> frozenset[str]:
        """The parameters with moments in bitsandbytes' 8 bits."""
        return frozenset(name for name, (_, in_8_bits) in self.formats.items() if in_8_bits)

    def piece_bytes(self, flat: FlatPlan) -> list[int]:
        """Return the bytes of master weights and moments of each offloaded piece of ``flat``.

        Raises ConfigError for moments that are kept in fp32 only, and configured in fewer bits.
        """
        others = self._unquantized_sub_groups(flat)
        formats = [StorageFormat(flat.spec.master_dtype)]
        stored_format = self.extensions.offloaded_moments.stored_format
        for name, (group, _, dtype) in self.moments_of(flat).items():
            how = stored_format(self._entries, self.rules.moments, group, name, dtype, others)
            formats.append(how)
        in_files = self.settings.offload_optimizer.device == "nvme"
        size = size_in_file if in_files else size_in_memory
        pieces = flat.sub_groups or ()
        return [
            sum(size(how.of(number), stop - start) for how in formats)
            for number, (start, stop) in enumerate(pieces)
        ]

    def _unquantized_sub_groups(self, flat: FlatPlan) -> frozenset[int] | None:
        """Return the indices of the offloaded sub-groups of ``flat`` without parameters that have
        8-bit moments; None if no sub-group has any.
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
