"""``deepspeed.runtime.pipe.engine``: DeepSpeed's name for the engine of a pipeline."""

from __future__ import annotations

from hf_zero.deepspeed.engine import DeepSpeedEngine
from hf_zero.parallel.pipeline.engine import pipelined

PipelineEngine = pipelined(DeepSpeedEngine)
