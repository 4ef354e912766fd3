"""``deepspeed.pipe``: pipeline parallelism."""

from hf_zero.integrations.not_built import type_of

_INSTEAD = "pass the whole model to initialize, at stage 3 if it does not fit"

LayerSpec = type_of("deepspeed.pipe.LayerSpec", _INSTEAD)
PipelineModule = type_of("deepspeed.pipe.PipelineModule", _INSTEAD)
TiedLayerSpec = type_of("deepspeed.pipe.TiedLayerSpec", _INSTEAD)

__all__ = ["LayerSpec", "PipelineModule", "TiedLayerSpec"]
