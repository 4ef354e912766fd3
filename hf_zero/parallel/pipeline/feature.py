"""Pipelines as a feature: no key switches them on, but a model in stages."""

from __future__ import annotations

from torch import nn

from hf_zero.config import ZeroConfig
from hf_zero.parallel.pipeline.engine import E, pipelined
from hf_zero.parallel.pipeline.refusals import check_pipeline, check_uncut
from hf_zero.parallel.pipeline.staged import StagedModule, make_parallel_for
from hf_zero.zero.feature import EngineInputs, Feature


class Pipeline(Feature):
    """The engine of a model in stages, and what it refuses."""

    def __init__(self, settings: ZeroConfig):
        pass

    @classmethod
    def join(cls, model: nn.Module) -> None:
        make_parallel_for(model)

    @classmethod
    def begin(cls, model: nn.Module, settings: ZeroConfig) -> None:
        if isinstance(model, StagedModule):
            check_uncut(settings, model)

    @classmethod
    def is_called(cls, model: nn.Module, settings: ZeroConfig, optimizer: object) -> bool:
        return isinstance(model, StagedModule)

    @classmethod
    def engine_class(cls, model: nn.Module, base: type[E]) -> type[E]:
        return pipelined(base) if isinstance(model, StagedModule) else base

    def check_inputs(self, inputs: EngineInputs) -> None:
        if isinstance(inputs.model, StagedModule):
            check_pipeline(inputs.settings, inputs.model)
