"""The parallel dimensions of a job, the coordinates of each rank along them, and the check of a
Megatron-style ``mpu`` that states them.

Ranks are numbered with the pipeline slowest, then data, then context, then sequence, and tensor
fastest: the ranks of a tensor-parallel group are neighbors, so that they share a host. The
``context * sequence`` ranks that read parts of the same sequences are the axis
``sequence_context``. Experts are spread over the ranks with different data or different parts of a
sequence: ``data * sequence_context`` ranks are ``expert_data * expert``, expert the faster.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral

from hf_zero.errors import ConfigError, NotBuiltError

AXES = (
    "pipeline",
    "data",
    "context",
    "sequence",
    "sequence_context",
    "tensor",
    "expert_data",
    "expert",
)
# the orders in which axes number all ranks
_ORDERS = (
    ("pipeline", "data", "context", "sequence", "tensor"),
    ("pipeline", "data", "sequence_context", "tensor"),
    ("pipeline", "expert_data", "expert", "tensor"),
)


def check_size(size: object, name: str, what: str = "ranks") -> None:
    """Raise ConfigError unless ``size``, which ``name`` names, is a number of ``what``."""
    if isinstance(size, bool) or not isinstance(size, Integral) or size < 1:
        raise ConfigError(
            f"{name} = {size!r} is not a number of {what}; write an integer of at least 1"
        )


@dataclass(frozen=True)
class ParallelDims:
    """The sizes of the axes of a job, 1 for each axis along which it is not parallel.

    ``data`` ranks hold the same part of the model and read different data; ``tensor`` ranks hold
    parts of each matrix and read the same data; ``sequence`` ranks read parts of the same
    sequences, and exchange tokens for heads in attention; so do ``context`` ranks, which pass keys
    and values around a ring; ``expert`` of the data, context and sequence ranks hold different
    experts; ``pipeline`` ranks hold different layers.
    """

    data: int = 1
    tensor: int = 1
    sequence: int = 1
    expert: int = 1
    pipeline: int = 1
    context: int = 1

    def __post_init__(self) -> None:
        for axis in ("data", "tensor", "sequence", "expert", "pipeline", "context"):
            check_size(getattr(self, axis), f"ParallelDims: {axis}")
        if self.gradient_ranks % self.expert:
            raise ConfigError(
                f"experts cannot be spread over {self.expert} of the {self.gradient_ranks} "
                "ranks that read different tokens; choose an expert-parallel size that divides "
                "ranks / tensor-parallel size / pipeline stages"
            )

    @classmethod
    def over(
        cls,
        world: int,
        *,
        tensor: int = 1,
        sequence: int = 1,
        expert: int = 1,
        pipeline: int = 1,
        context: int = 1,
    ) -> ParallelDims:
        """Return the dimensions of ``world`` ranks, with as many data-parallel ranks as remain.

        Raises ConfigError if a size is no number of ranks, or they do not divide the ranks.
        """
        within = cls(1, tensor, sequence, 1, pipeline, context).world
        if world % within:
            rings = f"{context} context x " if context > 1 else ""
            raise ConfigError(
                f"{world} ranks cannot be {tensor} tensor x {sequence} sequence x {rings}"
                f"{pipeline} pipeline parallel; choose sizes whose product divides the ranks "
                "(those of engines that this process has had count, too, until it destroys the "
                "process group)"
            )
        return cls(world // within, tensor, sequence, expert, pipeline, context)

    def resized(self, **sizes: int) -> ParallelDims:
        """Return the dimensions of as many ranks with other ``sizes`` of axes, and as many
        data-parallel ranks as remain. Raises ConfigError if the sizes do not divide the ranks.
        """
        axes = ("tensor", "sequence", "expert", "pipeline", "context")
        return ParallelDims.over(self.world, **{axis: self.size(axis) for axis in axes} | sizes)

    @cached_property
    def world(self) -> int:
        """Number of ranks of the job."""
        return self.data * self.tensor * self.sequence_context * self.pipeline

    @cached_property
    def sequence_context(self) -> int:
        """Number of ranks that read parts of the same sequences: sequence * context."""
        return self.sequence * self.context

    @cached_property
    def gradient_ranks(self) -> int:
        """Number of ranks over which gradients are averaged: data * sequence * context."""
        return self.data * self.sequence_context

    @cached_property
    def pp_stage_ranks(self) -> int:
        """Number of ranks of one pipeline stage, over which ZeRO shards its parameters."""
        return self.gradient_ranks * self.tensor

    def size(self, axis: str) -> int:
        """Return the number of ranks along ``axis``, one of :data:`AXES`."""
        if axis == "expert_data":
            return self.gradient_ranks // self.expert
        return int(getattr(self, axis))

    @cached_property
    def splits_model(self) -> bool:
        """Return whether ranks hold different parts of the model itself, whatever ZeRO does."""
        return max(self.tensor, self.expert, self.pipeline) > 1

    def coordinate(self, rank: int, axis: str) -> int:
        """Return the coordinate of ``rank`` along ``axis``."""
        order = _order_of(axis)
        below = math.prod(self.size(a) for a in order[order.index(axis) + 1 :])
        return rank // below % self.size(axis)

    def ranks_along(self, rank: int, axis: str) -> tuple[int, ...]:
        """Return the ranks that differ from ``rank`` along ``axis`` only, with itself, in order."""
        return next(ranks for ranks in self.sets_along(axis) if rank in ranks)

    def ranks_sharing(self, rank: int, axes: tuple[str, ...] = ()) -> tuple[int, ...]:
        """Return the ranks of the pipeline stage of ``rank`` with its coordinates along ``axes``:
        they hold the same values of parameters cut along these axes. Without axes: all ranks of the
        stage.
        """
        return next(ranks for ranks in self.sets_sharing(axes) if rank in ranks)

    def sets_along(self, axis: str) -> list[tuple[int, ...]]:
        """Return the sets of ranks that differ along ``axis`` only, by their first ranks."""
        return self._agreeing(tuple(a for a in _order_of(axis) if a != axis))

    def sets_sharing(self, axes: tuple[str, ...] = ()) -> list[tuple[int, ...]]:
        """Return the sets of ranks that :meth:`ranks_sharing` returns, by their first ranks."""
        return self._agreeing(("pipeline", *axes))

    def _agreeing(self, axes: tuple[str, ...]) -> list[tuple[int, ...]]:
        """Return the sets of ranks with equal coordinates along ``axes``."""
        if axes not in self._sets:
            by_coordinates: dict[tuple[int, ...], list[int]] = {}
            for rank in range(self.world):
                coordinates = tuple(self.coordinate(rank, axis) for axis in axes)
                by_coordinates.setdefault(coordinates, []).append(rank)
            self._sets[axes] = [tuple(ranks) for ranks in by_coordinates.values()]
        return self._sets[axes]

    @cached_property
    def _sets(self) -> dict[tuple[str, ...], list[tuple[int, ...]]]:
        return {}


def _order_of(axis: str) -> tuple[str, ...]:
    return next(order for order in _ORDERS if axis in order)


# The ways to split a model or a sample among ranks: what hf-zero has for each, and every name that
# Megatron and DeepSpeed have used for its size.
_SPLITS = {
    "model parallelism": (
        "configure tensor_parallel",
        "get_tensor_model_parallel_world_size",
        "get_slice_parallel_world_size",
        "get_model_parallel_world_size",
    ),
    "pipeline parallelism": (
        "pass a hf_zero.PipelineModule as the model",
        "get_pipeline_model_parallel_world_size",
        "get_pipe_parallel_world_size",
    ),
    "sequence parallelism": (
        "configure sequence_parallel_size",
        "get_sequence_parallel_world_size",
    ),
    "context parallelism": ("configure context_parallel_size", "get_context_parallel_world_size"),
    "expert parallelism": ("configure expert_parallel", "get_expert_model_parallel_world_size"),
}
_DATA = "get_data_parallel_world_size"


def check_mpu(mpu: object, world_size: int) -> None:
    """Raise unless ``mpu`` reports that all ``world_size`` ranks hold the same model and read
    different data.

    Sizes that it lacks count as 1, as in the scripts' own code. Raises NotBuiltError for a split
    model or sample, and ConfigError for what is no size, or data-parallel ranks that are not all.
    """
    for kind, (instead, *names) in _SPLITS.items():
        for name in names:
            size = _ask(mpu, name)
            if size is not None and size > 1:
                raise NotBuiltError(
                    f"initialize(mpu=...): mpu.{name}() is {size}, and hf-zero cannot take {kind} "
                    f"from an mpu; leave mpu out, and {instead}"
                )
    replicas = _ask(mpu, _DATA)
    if replicas is not None and replicas != world_size:
        raise ConfigError(
            f"initialize(mpu=...): mpu.{_DATA}() is {replicas}, but {world_size} ranks were "
            "started and no other parallelism is named; let its "
            "data-parallel group hold all ranks, or leave mpu out"
        )


def _ask(mpu: object, name: str) -> int | None:
    method = getattr(mpu, name, None)
    size = method() if callable(method) else method
    if method is not None:
        check_size(size, f"initialize(mpu=...): mpu.{name}()")
    return size
