"""Inputs of the memory model: the flat buffers of a model before they are laid out, and the
settings besides the model that determine bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import torch
from torch import nn

from hf_zero.config import OffloadOptimizer, OffloadParam, OptimizerConfig, ZeroConfig
from hf_zero.planning.moments import moments_of
from hf_zero.zero.layout.codecs import DEFAULT_BLOCKS, SMALLEST_TENSOR
from hf_zero.zero.layout.flat_layout import FlatLayout
from hf_zero.zero.layout.precision import compute_dtype
from hf_zero.zero.layout.sharding import Sharding, sharding_of
from hf_zero.zero.layout.stage_policy import POLICIES, Policy
from hf_zero.zero.layout.wrap import UnitSpec, names_in_blocks

SIXTEEN_BITS = (torch.bfloat16, torch.float16)
ACCUMULATED = {None: 4, "fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True)
class FlatParameters:
    """Parameters that share a flat buffer: computed in ``dtype``, gathered with unit ``unit``.

    Those in ``persistent`` stay whole between steps at stages that shard parameters, in a flat
    buffer of their own (:meth:`MemoryPlan.flats_of`), which is ``whole``. ``in_blocks`` names the
    parameters inside blocks of the model. Along the mesh dimensions ``axes`` ranks hold different
    parts; ``shapes`` are those of the parts.
    """

    unit: str
    trainable: bool
    dtype: torch.dtype
    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    persistent: frozenset[str] = frozenset()
    whole: bool = False
    in_blocks: frozenset[str] = frozenset()
    axes: tuple[str, ...] = ()

    @cached_property
    def numel(self) -> int:
        return sum(math.prod(shape) for _, shape in self.shapes)

    def layout(self, shards: int) -> FlatLayout:
        """Return a layout with one slot, as long, padded and cut as with one per parameter."""
        return FlatLayout.build([(self.unit, (self.numel,))], shards)


def groups_of(
    specs: Sequence[UnitSpec],
    module: nn.Module,
    precision: str,
    persistent: frozenset[str] = frozenset(),
    cuts: Mapping[nn.Parameter, Sharding] | None = None,
) -> list[FlatParameters]:
    """The flats of the units that :func:`hf_zero.zero.layout.wrap.find_units` found, not laid out
    yet; ``persistent`` as :func:`hf_zero.zero.layout.wrap.persistent_names` gives it. ``cuts``: how
    parameters that are still whole will be spread over ranks.
    """
    found, in_blocks = [], names_in_blocks(module)
    for spec in specs:
        kinds: dict[
            tuple[bool, torch.dtype, tuple[str, ...], bool], list[tuple[str, tuple[int, ...]]]
        ] = {}
        for name, parameter in spec.parameters:
            spread = (cuts or {}).get(parameter, sharding_of(parameter))
            dtype = compute_dtype(name, parameter, precision, module)
            kind = (parameter.requires_grad, dtype, spread.axes, spread.partial)
            shape = tuple(parameter.shape) if spread.box is None else spread.box.shape
            kinds.setdefault(kind, []).append((name, shape))
        found += [
            FlatParameters(
                spec.name or "(root)",
                trainable,
                dtype,
                tuple(shapes),
                persistent,
                in_blocks=in_blocks,
                axes=axes,
            )
            for (trainable, dtype, axes, _), shapes in kinds.items()
        ]
    return found


@dataclass(frozen=True)
class MemoryPlan:
    """The settings besides the model that determine bytes.

    ``ranks``: ranks of one pipeline stage; ``moments``: numbers the optimizer keeps per parameter;
    ``gpu``: whether the device is a GPU.
    """

    stage: int
    ranks: int
    replicas: int = 1
    precision: str = "bf16"
    moments: int = 2
    accumulation: int = 1
    accumulation_dtype: str | None = None
    prefetch: int = 50_000_000
    granularity: int | None = None  # as for hf_zero.zero.layout.wrap.find_units
    optimizer: OffloadOptimizer = field(default_factory=OffloadOptimizer)
    param: OffloadParam = field(default_factory=OffloadParam)
    gpu: bool = True
    # as for hf_zero.zero.layout.wrap.persistent_names
    persistence: tuple[int | None, int | None] = (None, None)
    # steps send differences of weights, so that 32-bit weights need separate master weights too
    differences: bool = False
    one_bit: bool = False  # momenta are communicated in one bit
    local_steps: bool = False  # momenta are later not communicated in every step
    tensor: int = 1  # ranks that share a layer
    sequence: int = 1  # ranks that share a sequence
    expert: int = 1  # ranks that hold one set of experts together
    pipeline: int = 1  # stages with different layers, all with equally many ranks
    # ranks of a node that hold a secondary sharding of gathered weights (hpZ); 1: none
    node: int = 1
    hops: bool = False  # gathers over several hosts take two hops
    # elements of a block of gradients in few bits whose errors are kept, and of the smallest tensor
    # that has some
    errors: tuple[int, int] | None = None
    # modules that compute with rounded weights: those in blocks, all, or (None) none
    rounds: Literal["blocks", "modules"] | None = None

    @classmethod
    def of(
        cls, config: ZeroConfig, world: int, gpu: bool = True, moments: int | None = None
    ) -> MemoryPlan:
        """Return the plan of a configuration for ``world`` ranks of a pipeline stage.

        ``moments`` None: those of the configuration's optimizer (by default AdamW).
        """
        wanted = config.optimizer or OptimizerConfig("AdamW", {})
        block = config.compressed_communication.block_size
        return cls(
            stage=config.stage,
            ranks=world,
            replicas=config.replicate_size,
            precision=config.precision,
            moments=moments_of(wanted) if moments is None else moments,
            accumulation=config.gradient_accumulation_steps or 1,
            accumulation_dtype=config.gradient_accumulation_dtype,
            prefetch=config.zero.prefetch_bucket_size,
            granularity=config.zero.module_granularity_threshold,
            persistence=(
                config.zero.param_persistence_threshold,
                config.zero.model_persistence_threshold,
            ),
            optimizer=config.offload_optimizer,
            param=config.offload_param,
            gpu=gpu,
            differences=config.compressed_communication.bits == 4,
            one_bit=config.compressed_communication.bits == 1
            or wanted.type.lower() in ("onebitadam", "onebitlamb", "zerooneadam"),
            local_steps=wanted.type.lower() == "zerooneadam"
            and wanted.params.get("local_step_clipper") != 1,
            tensor=config.tensor_parallel.size,
            sequence=config.sequence_parallel_size,
            expert=config.expert_parallel.size,
            node=max(1, config.zero.hpz_partition_size),
            hops=config.zero.hierarchical_gather,
            errors=(block or DEFAULT_BLOCKS[4], block or SMALLEST_TENSOR)
            if config.zeropp_loco_param.on
            else None,
            rounds="blocks"
            if config.quantize_training.enabled
            else "modules"
            if config.compression_weights.enabled
            else None,
        )

    @property
    def stages(self) -> range:
        """The available ZeRO stages: 0 and 1 for pipelines, which reduce once per step."""
        return range(4 if self.pipeline == 1 else 2)

    @property
    def policy(self) -> Policy:
        return POLICIES[self.stage]

    def flats_of(self, groups: Sequence[FlatParameters]) -> list[FlatParameters]:
        """Return ``groups`` as flat buffers of this stage, with persistent parameters in flat
        buffers of their own. Idempotent.
        """
        if not self.policy.shards_parameters:
            return list(groups)
        found = []
        for group in groups:
            parts: dict[bool, list[tuple[str, tuple[int, ...]]]] = {}
            for name, shape in group.shapes:
                parts.setdefault(group.whole or name in group.persistent, []).append((name, shape))
            found += [
                replace(group, shapes=tuple(shapes), persistent=frozenset(), whole=whole)
                for whole, shapes in parts.items()
            ]
        return found

    def policy_of(self, group: FlatParameters) -> Policy:
        """Return the sharding policy of a flat buffer."""
        return self.policy.of_persistent if group.whole else self.policy

    @property
    def shards(self) -> int:
        return self.policy.shards(self.ranks, self.replicas)

    def apart(self, group: FlatParameters) -> int:
        """Return the number of ranks that hold different parts of ``group``."""
        sizes = {"tensor": self.tensor, "expert": self.expert}
        return math.prod(sizes[axis] for axis in group.axes)

    def shards_of(self, group: FlatParameters) -> int:
        """Return the chunks of the flat buffer of ``group``: one per rank with the same part."""
        return max(1, self.shards // self.apart(group))

    @property
    def ratio(self) -> float:
        """The offloaded share of the optimizer state. "auto" is tuned after the first step; until
        then it is 1.
        """
        if not self.optimizer.on:
            return 0.0
        return 1.0 if self.optimizer.ratio == "auto" else float(self.optimizer.ratio)

    @property
    def offloads(self) -> bool:
        return self.optimizer.on or self.param.on

    def secondary_bytes(self, group: FlatParameters, padded: int) -> int:
        """Return the bytes of this rank's secondary shard, within its node, of a flat buffer of
        ``padded`` elements.
        """
        gathered = self.policy_of(group).shards_parameters and self.node > 1
        return padded // self.node * group.dtype.itemsize if gathered else 0

    def rounded_bytes(self, group: FlatParameters, padded: int) -> int:
        """Return the upper bound on the bytes of the second buffer, of the weights that modules
        compute with, for a flat buffer of ``padded`` elements that is whole between passes.
        """
        anywhere = self.rounds == "modules"
        rounded = any(
            len(shape) > 1 and (anywhere or name in group.in_blocks) for name, shape in group.shapes
        )
        whole = not self.policy_of(group).shards_parameters
        held = self.rounds and rounded and whole and group.trainable
        return padded * group.dtype.itemsize if held else 0

    def error_bytes(self, group: FlatParameters) -> int:
        """Return the bytes of the compression errors of the gradient of a trainable flat buffer."""
        if not self.errors or self.shards == 1:
            return 0
        sizes = [math.prod(shape) for _, shape in group.shapes if len(shape) > 1]
        block, least = self.errors
        return sum(size + -(-size // block) * 2 for size in sizes if size >= least)

    def on_device(self) -> MemoryPlan:
        """Return this plan without offload."""
        return replace(self, optimizer=OffloadOptimizer(), param=OffloadParam())

    def accumulator_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes per element of a gradient that is kept and used for the update on the
        device. An upper bound: the fused update may leave whole gradients in 16 bits.
        """
        return max(
            ACCUMULATED[self.accumulation_dtype], dtype.itemsize if dtype == torch.float64 else 0
        )

    def gradient_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes per element of a gradient that is copied to the CPU: 2 if no
        accumulation would lose precision in 16 bits.
        """
        once = self.accumulation == 1 and self.accumulation_dtype is None
        if dtype in SIXTEEN_BITS and once and (self.precision == "bf16" or self.ranks == 1):
            return dtype.itemsize
        return self.accumulator_bytes(dtype)
