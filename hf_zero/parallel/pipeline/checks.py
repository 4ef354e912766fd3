"""What does not go with a pipeline, refused before anything is made."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from hf_zero.config import ZeroConfig
from hf_zero.errors import ConfigError
from hf_zero.parallel.pipeline.staged import StagedModule


def check_uncut(config: ZeroConfig, module: StagedModule) -> None:
    """Raise ConfigError where ``config`` would cut the layers of ``module``, which differ from
    stage to stage, over tensor-parallel ranks.
    """
    size = config.tensor_parallel.size
    if size > 1:
        raise ConfigError(
            f"tensor_parallel.autotp_size is {size}, and the model is cut into stages already; "
            f"call hf_zero.tensor_parallel(model, {size}) before pipeline_stages(model, "
            f"{module.num_stages}), and remove the key"
        )


def check_pipeline(
    config: ZeroConfig, module: StagedModule, techniques: Collection[str], one_bit: bool
) -> None:
    """Raise ConfigError for what the engine of ``module`` cannot do: ZeRO beyond stage 1,
    ``techniques`` (keys of those that are on), an optimizer that sends one bit, compiled blocks.
    """
    if config.stage > 1:
        raise ConfigError(
            f"zero_optimization.stage is {config.stage}, and the model is a pipeline: stages 2 "
            "and 3 reduce gradients in the backward of every micro-batch, where stage 1 does once "
            "a step; set stage to 1, or 0"
        )
    if techniques:
        raise ConfigError(
            f"{', '.join(techniques)} change what a forward does, and in a pipeline a rank sees a "
            "part of it; remove them, or train without a pipeline"
        )
    if one_bit:
        raise ConfigError(
            "the optimizer sends its momentum in one bit over all ranks, which hold different "
            "layers in a pipeline; use Adam, AdamW or another one that reduces gradients"
        )
    if config.pipeline.activation_checkpoint_interval:
        set_interval: Any = getattr(module, "set_checkpoint_interval", None)
        if set_interval is None:
            raise ConfigError(
                "pipeline.activation_checkpoint_interval is for a PipelineModule; recompute the "
                "blocks of this model with activation_checkpointing.blocks"
            )
        set_interval(config.pipeline.activation_checkpoint_interval)
    config.pipeline.schedule_for(module.stages_per_rank)
