"""Tensor, expert and sequence parallelism as one feature of an engine: the sizes of the axes, the
cuts that its plan foresees, and what it makes of model, loader and engine.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from hf_zero.config import ZeroConfig
from hf_zero.distributed.parallel_dims import ParallelDims
from hf_zero.parallel.expert import model as experts
from hf_zero.parallel.planned_cuts import planned_cuts
from hf_zero.parallel.sequence import sequence_parallel as sequences
from hf_zero.parallel.tensor.model import (
    check_verifiable,
    dims_of,
    tensor_parallel,
    with_tensor_size,
)
from hf_zero.zero.feature import EngineInputs, Feature
from hf_zero.zero.layout.sharding import Sharding


class ParallelAxes(Feature):
    """The axes of ``settings``, and those of the layers of a model."""

    def __init__(self, settings: ZeroConfig):
        self._settings = settings
        self._mpu: object = None
        self._sequence: sequences.SequenceParallel | None = None

    @classmethod
    def resolve(
        cls, model: nn.Module, settings: ZeroConfig, dims: ParallelDims, mpu: object
    ) -> tuple[ZeroConfig, ParallelDims]:
        settings = with_tensor_size(model, settings)
        if settings.tensor_parallel.size > 1:
            dims = dims_of(settings.tensor_parallel.size)
        dims = experts.dims_with_experts(model, settings, dims)
        settings = sequences.with_sequence_size(settings, mpu, dims)
        if settings.ranks_of_a_sequence > 1:
            dims = sequences.sequence_dims(sequences.division_of(settings), dims)
        return settings, dims

    def check_inputs(self, inputs: EngineInputs) -> None:
        self._mpu, section = inputs.mpu, self._settings.tensor_parallel
        sequences.check_model(inputs.model, sequences.division_of(self._settings), inputs.dims)
        if section.size > 1 and section.verify:
            check_verifiable(inputs.model)

    def cuts(
        self, model: nn.Module, dims: ParallelDims, rank: int
    ) -> Mapping[nn.Parameter, Sharding]:
        sizes = self._settings.tensor_parallel.size, self._settings.expert_parallel.size
        return planned_cuts(model, *sizes, dims, rank)

    def cut(self, model: nn.Module, verify: bool) -> None:
        section = self._settings.tensor_parallel
        if section.size > 1:
            tensor_parallel(model, section.size, verify=verify and section.verify)
        # experts that tensor parallelism has cut are cut again, among the rest
        experts.spread_experts(model, self._settings)

    def prepare(self, model: nn.Module) -> None:
        # after both, which regroup the ranks that share a sequence
        self._sequence = sequences.sequence_of(self._settings, self._mpu)

    def follow_loader(self, loader: object) -> object:
        if loader is None or self._sequence is None:
            return loader
        return self._sequence.batches(loader)

    def further(self, model: nn.Module) -> Mapping[str, Feature]:
        return {**sequences.features_of(self._sequence), **experts.features_of(model)}
