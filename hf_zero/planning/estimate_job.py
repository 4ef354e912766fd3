"""The input of an estimate, a proposal or a simulation: the model, the settings and sizes that the
arguments ask for, and the plans of an engine with them.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any, Literal, TypedDict

import torch
from torch import nn

from hf_zero.config import OffloadOptimizer, OffloadParam, OptimizerConfig, ZeroConfig
from hf_zero.config.sections import AUTOEP_SIZE, TENSOR_SIZE
from hf_zero.device import kinds
from hf_zero.distributed.parallel_dims import ParallelDims, check_size
from hf_zero.errors import ConfigError
from hf_zero.optim.build import build_optimizer
from hf_zero.optim.one_bit import one_bit_at_one
from hf_zero.parallel.planned_cuts import planned_cuts, planned_dims
from hf_zero.parallel.sequence.division import CONTEXT, Division
from hf_zero.parallel.sequence.division import KEY as SEQUENCE
from hf_zero.parallel.sequence.sequence_parallel import division_of
from hf_zero.zero.extensions import Extensions, extensions_of
from hf_zero.zero.layout.engine_plan import Cuts, EnginePlan, shape_of
from hf_zero.zero.layout.planner import plan
from hf_zero.zero.layout.sharding import sharding_of
from hf_zero.zero.layout.stage_policy import POLICIES

Precision = Literal["fp32", "float32", "no", "bf16", "bfloat16", "fp16", "float16"]
MAX_RANKS = 1 << 20
LONGEST = 1 << 40  # tokens of a sequence; shapes of more overflow
PRECISIONS = {
    **dict.fromkeys(("fp32", "float32", "no"), "fp32"),
    **dict.fromkeys(("bf16", "bfloat16"), "bf16"),
    **dict.fromkeys(("fp16", "float16"), "fp16"),
}


class JobOptions(TypedDict, total=False):
    """Arguments of :func:`estimate`, :func:`propose` and ``simulate`` that describe the engine and
    its ranks, all optional.
    """

    config: object
    tensor_parallel: int | None
    expert_parallel: int | None
    pipeline_parallel: int
    sequence_parallel: int | None
    context_parallel: int | None


@dataclass(frozen=True)
class EstimateJob:
    """The input of an estimate: settings resolved for ``device``, an optimizer, sizes of axes."""

    settings: ZeroConfig
    optimizer: OptimizerConfig
    dims: ParallelDims
    device: torch.device


def asked_for(
    ranks: int,
    precision: Precision,
    optimizer: str | OptimizerConfig,
    device: torch.device | None = None,
    *,
    config: object = None,
    tensor_parallel: int | None = None,
    expert_parallel: int | None = None,
    pipeline_parallel: int = 1,
    sequence_parallel: int | None = None,
    context_parallel: int | None = None,
) -> EstimateJob:
    """Return the settings that the arguments of :func:`estimate` describe, for a GPU unless
    ``device`` is another kind. Raises ConfigError for sizes that do not divide the ranks.
    """
    if isinstance(ranks, bool) or not isinstance(ranks, int) or not 1 <= ranks <= MAX_RANKS:
        raise ConfigError(
            f"ranks = {ranks!r:.40} is not a number of ranks; pass an integer from 1 to "
            f"{MAX_RANKS:,}"
        )
    chosen = optimizer if isinstance(optimizer, OptimizerConfig) else OptimizerConfig(optimizer, {})
    check_size(pipeline_parallel, "pipeline_parallel")
    pp_stage_ranks = ParallelDims.over(ranks, pipeline=pipeline_parallel).pp_stage_ranks
    if config is not None:
        settings = ZeroConfig.coerce(config, allow_auto=True)
    else:
        exact = exact_precision(precision)
        settings = ZeroConfig(3, bf16=exact == "bf16", fp16=exact == "fp16")
    for size, key in ((tensor_parallel, TENSOR_SIZE), (expert_parallel, AUTOEP_SIZE)):
        if size is not None:
            check_size(size, key)
    # as in a run: the ranks that share layers of a pipeline's stage share its batches, too
    axes = {SEQUENCE: sequence_parallel, CONTEXT: context_parallel, TENSOR_SIZE: tensor_parallel}
    sizes = {key: size for key, size in axes.items() if size is not None}
    if sizes:
        settings = settings.override(sizes, "what was asked for")
    if tensor_parallel is not None:
        # names the ranks of a stage in its error
        ParallelDims.over(pp_stage_ranks, tensor=tensor_parallel)
    if config is not None or sizes:
        settings = settings.resolve(pp_stage_ranks, training=False)
    dims = _dims(
        ranks,
        settings.tensor_parallel.size,
        expert_parallel or settings.expert_parallel.size,
        pipeline_parallel,
        division_of(settings),
    )
    device = torch.device(device or kinds.device_for_estimate(gpu=True))
    settings = settings.on_device(device.type)
    return EstimateJob(settings, settings.optimizer or chosen, dims, device)


def offload_sections(
    settings: ZeroConfig, optimizer: object, parameters: object
) -> tuple[OffloadOptimizer, OffloadParam]:
    """Return the sections of offload as they are given, in any form that a ``ZeroConfig`` takes;
    for None those of ``settings``.
    """
    given: dict[str, Any] = {"offload_optimizer": optimizer, "offload_param": parameters}
    sections = ZeroConfig(3, **given)  # stage 3 allows both
    return (
        settings.offload_optimizer if optimizer is None else sections.offload_optimizer,
        settings.offload_param if parameters is None else sections.offload_param,
    )


def _dims(ranks: int, tensor: int, expert: int, pipeline: int, division: Division) -> ParallelDims:
    _refuse_experts(expert, pipeline)
    within = {"tensor": tensor, "expert": expert}
    ParallelDims.over(ranks // pipeline, **within)  # names the ranks of a stage in its error
    sequences = {"sequence": division.sequence, "context": division.context}
    return ParallelDims.over(ranks, pipeline=pipeline, **sequences, **within)


def _refuse_experts(expert: int, pipeline: int) -> None:
    if expert > 1 < pipeline:
        raise ConfigError(
            f"experts over {expert} ranks in a pipeline of {pipeline} stages are not "
            "built; leave pipeline_parallel or expert_parallel out"
        )


def plans_of(module: nn.Module, job: EstimateJob, settings: ZeroConfig) -> list[EnginePlan]:
    """Return the plan, with ``settings``, of the first rank of each pipeline stage."""
    dims = planned_dims(module, job.dims)
    _refuse_experts(dims.expert, dims.pipeline)
    cuts = planned_cuts(module, dims.tensor, job.dims.expert, dims)
    trained = [p for p in module.parameters() if p.requires_grad]
    optimizer = build_optimizer(job.optimizer, trained, module) if trained else None
    stages: list[frozenset[str] | None] = [None]
    if dims.pipeline > 1:
        from hf_zero.integrations.transformers.pipeline_stages import (
            names_of_stages,
            stages_of_tied,
        )

        stages = [*(named := names_of_stages(module, parts_of(module, dims, cuts)))]
        for name, holders in stages_of_tied(named).items():
            parameter = module.get_parameter(name)
            sharding = cuts.get(parameter, sharding_of(parameter))
            cuts[parameter] = replace(sharding, pp_stages=holders)
    return [
        plan(
            module,
            settings,
            dims,
            optimizer,
            extensions_of=_extensions_of,
            rank=stage * dims.pp_stage_ranks,
            device=job.device,
            cuts=cuts,
            held=parameters,
        )
        for stage, parameters in enumerate(stages)
    ]


def parts_of(module: nn.Module, dims: ParallelDims, cuts: Cuts) -> list[int]:
    """Return the bounds of the pipeline stages of ``module``, after ``cuts``: the first item of
    each among the embeddings, the blocks and the head, and the end.
    """
    from hf_zero.integrations.transformers.pipeline_stages import planned_parts

    return planned_parts(module, dims.pipeline, lambda parameter: shape_of(parameter, cuts))


def _extensions_of(settings: ZeroConfig, optimizer: torch.optim.Optimizer | None) -> Extensions:
    """Return the extensions of an engine. A momentum in one bit is sent at stage 1 only, so that
    the rows of other stages are those of the dense optimizer.
    """
    if settings.stage != 1 and one_bit_at_one(settings, optimizer) is not None:
        return Extensions()
    return extensions_of(settings, optimizer)


def exact_precision(precision: object) -> str:
    """Return fp32, bf16 or fp16 for a name of it. Raises ConfigError for another one."""
    if not isinstance(precision, str) or precision not in PRECISIONS:
        raise ConfigError(f"precision {precision!r} is unknown; choose one of fp32, bf16, fp16")
    return PRECISIONS[precision]


def check_stage(stage: object) -> None:
    """Raise ConfigError unless ``stage`` is one of ZeRO."""
    if type(stage) is not int or stage not in POLICIES:
        raise ConfigError(
            f"stage {stage!r} is unknown; choose one of {', '.join(map(str, sorted(POLICIES)))}"
        )


def tokens_of(length: object) -> int:
    """Return a sequence length as an int. Raises ConfigError for what is not a number of tokens."""
    tokens = int(length) if isinstance(length, Integral) and not isinstance(length, bool) else 0
    if not 1 <= tokens <= LONGEST:
        raise ConfigError(
            f"a sequence length of {length!r:.40} is not a number of tokens; pass an integer from "
            f"1 to {LONGEST:,}"
        )
    return tokens


def open_model(model: object, needs_loss: bool = False) -> tuple[str, nn.Module]:
    """Return the name of ``model``, a module or what describes one, and the module itself, which is
    built on the meta device unless it exists. Raises ConfigError if the model ``needs_loss`` and
    would be built without its head.
    """
    if isinstance(model, nn.Module):
        return type(model).__name__, model
    _refuse_missing(model)
    from hf_zero.integrations.transformers.meta_model import build_on_meta

    module = build_on_meta(model, needs_loss)
    if isinstance(model, (str, os.PathLike)):
        return os.fspath(model), module
    return type(module).__name__, module


def _refuse_missing(model: object) -> None:
    """Raise ConfigError for a path at which no model can be, before Transformers is imported."""
    if not isinstance(model, (str, os.PathLike)):
        return
    name = os.fspath(model)
    path = os.path.expanduser(name)
    if os.path.isdir(path) and not os.path.isfile(os.path.join(path, "config.json")):
        raise ConfigError(f"folder {name} has no config.json; pass a model folder")
    as_path = name[:1] in ("", "/", ".", "~") or name.count("/") > 1 or name.endswith(".json")
    if as_path and not os.path.exists(path):
        raise ConfigError(
            f"there is no file or folder {name!r}; pass a model folder, a config.json, or the name "
            "of a model on the hub"
        )
