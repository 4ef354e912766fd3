"""The class of the engines that ``initialize`` makes of models in stages, for users' types."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hf_zero.engine import Engine
from hf_zero.parallel.pipeline.engine import PipelineTraining, pipelined

if TYPE_CHECKING:

    class PipelineEngine(PipelineTraining, Engine):
        """The engine for a model in pipeline stages: an :class:`Engine` with ``train_batch``."""

else:
    PipelineEngine = pipelined(Engine)
