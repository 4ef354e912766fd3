"""Pipelines as a feature: no key switches them on, but a model in stages."""

from __future__ import annotations

from torch import nn

from hf_zero.config import ZeroConfig
from hf_zero.distributed.parallel_dims import ParallelDims
from hf_zero.distributed.parallel_groups import get_parallel
from hf_zero.errors import ConfigError, UnmanagedWindowError
from hf_zero.parallel.expert.moe_layer import MOELayer
from hf_zero.parallel.pipeline.engine import E, pipelined
from hf_zero.parallel.pipeline.staged import StagedModule, make_parallel_for
from hf_zero.parallel.sequence.division import CONTEXT, KEY
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


def check_uncut(config: ZeroConfig, module: StagedModule) -> None:
    """Raise ConfigError if ``config``, the job or layers of ``module`` spread over ranks what the
    stages have already separated, or what is not built with a pipeline: layers, experts, sequences.
    """
    if next(module.parameters(), None) is None:
        raise ConfigError(
            f"stage {module.stage_id} of {module.num_stages} of the pipeline has no parameters; "
            "choose num_stages or partition_method so that each has some"
        )
    size, groups = config.tensor_parallel.size, get_parallel()
    dims = ParallelDims() if groups is None else groups.dims
    if size > 1:
        raise ConfigError(
            f"tensor_parallel.autotp_size is {size}, and the model is cut into stages already; "
            f"call hf_zero.tensor_parallel(model, {size}) before pipeline_stages(model, "
            f"{module.num_stages}), and remove the key"
        )
    layers = [layer.ep_size for layer in module.modules() if isinstance(layer, MOELayer)]
    experts = max(config.expert_parallel.size, dims.expert, *layers, 1)
    if experts > 1:
        raise ConfigError(
            f"experts are spread over {experts} ranks (expert_parallel.autoep_size, ep_size), and "
            "the model is a pipeline; leave each expert whole in its stage (ep_size=1, without "
            "the section), or train the whole model without stages"
        )
    sizes = {
        KEY: max(config.sequence_parallel_size, dims.sequence),
        CONTEXT: max(config.context_parallel_size, dims.context),
    }
    for key, readers in sizes.items():
        if readers > 1:
            raise ConfigError(
                f"{key} is {readers}, and the model is a pipeline, whose stages read whole "
                "sequences; remove it and hf_zero.sequence_parallel, or train the whole model "
                "without stages, at ZeRO stage 3"
            )


def check_pipeline(config: ZeroConfig, module: StagedModule) -> None:
    """Raise ConfigError for recomputation of a model that does not offer it, and for a schedule for
    another number of stages per rank. Raise UnmanagedWindowError if the script is to end
    accumulation windows itself. What no pipeline goes with is in ``config/features.toml``.
    """
    if not config.managed_gradient_accumulation:
        raise UnmanagedWindowError(
            "managed_gradient_accumulation is false, which is not supported with pipeline "
            "parallelism: train_batch runs all micro-batches of a step; remove the key"
        )
    if config.pipeline.activation_checkpoint_interval and not hasattr(
        module, "set_checkpoint_interval"
    ):
        raise ConfigError(
            "pipeline.activation_checkpoint_interval is for a PipelineModule; recompute the "
            "blocks of this model with activation_checkpointing.blocks"
        )
    config.pipeline.schedule_for(module.stages_per_rank)
