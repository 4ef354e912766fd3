"""Engines of a simulation, on copies of a model without memory, and recordings of their steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from hf_zero.config import OffloadOptimizer, OffloadParam, ZeroConfig
from hf_zero.device import kinds
from hf_zero.distributed.collectives import MeshDim
from hf_zero.distributed.fake_world import META, fake_world
from hf_zero.distributed.parallel_groups import get_parallel, init_parallel
from hf_zero.engine import Engine
from hf_zero.errors import ConfigError
from hf_zero.integrations.fused.attention_on_meta import without_memory
from hf_zero.integrations.fused.deferred_heads import defer_head
from hf_zero.parallel.expert.model import spread_experts
from hf_zero.parallel.pipeline.engine import PipelineTraining, pipelined
from hf_zero.parallel.pipeline.feature import check_pipeline, check_uncut
from hf_zero.parallel.pipeline.staged import StagedModule
from hf_zero.parallel.pipeline.tied_parameters import set_tied
from hf_zero.parallel.sequence.attention import Axes
from hf_zero.parallel.sequence.division import AXIS, RING, Division
from hf_zero.parallel.tensor import tensor_parallel
from hf_zero.planning.activation_memory import Sequences
from hf_zero.planning.estimate_job import parts_of
from hf_zero.planning.simulation.recording import RECORDED, Recorder, Recording, record
from hf_zero.planning.simulation.stages import Header, StageRecorder, record_stage
from hf_zero.zero.extensions import extensions_of
from hf_zero.zero.feature import FeatureSet
from hf_zero.zero.layout.engine_plan import EnginePlan
from hf_zero.zero.layout.meta_run import copy_on_meta
from hf_zero.zero.layout.planner import plan
from hf_zero.zero.training_engine import TrainingEngine

# from sequences and their tokens on a rank to the arguments of a model, on the meta device
Batch = Callable[[int, int], Mapping[str, torch.Tensor]]


def record_plans(
    plans: Sequence[EnginePlan],
    length: int,
    batch: Batch | None = None,
    ranks_per_host: int | None = None,
) -> list[Recording]:
    """Return the recordings of a step of the engines that ``plans`` are of, those of the ranks of a
    pipeline in order, on copies of their models on the meta device, without offload: the plans
    themselves have the bytes of other tiers.

    Raises ConfigError for a model that cannot run without memory.
    """
    recordings: list[Recording] = []
    announced: Sequence[Header] = ()
    for planned in plans:
        recording, announced = _record(planned, length, batch, ranks_per_host, announced)
        recordings.append(recording)
    return recordings


def _record(
    planned: EnginePlan,
    length: int,
    batch: Batch | None,
    ranks_per_host: int | None,
    announced: Sequence[Header],
) -> tuple[Recording, Sequence[Header]]:
    """Return the recording of one rank, and what it announces to the next stage of a pipeline;
    ``announced``: what the stage before has announced.
    """
    dims, micro_batches = planned.dims, planned.settings.gradient_accumulation_steps or 1
    settings = planned.settings.placed(planned.settings.stage, OffloadOptimizer(), OffloadParam())
    if dims.pipeline == 1:
        settings = dataclasses.replace(
            settings, gradient_accumulation_steps=min(micro_batches, RECORDED)
        )
    rows = settings.train_micro_batch_size_per_gpu or 1
    division = Division(dims.sequence, dims.context)
    Sequences(length, rows, division).check(planned.model)
    copied = _copy(planned).train()
    if dims.pipeline == 1 and "loss" in settings.kernels and not isinstance(settings.kernels, str):
        defer_head(copied)
    inputs = _arguments(batch, rows, length // division.ranks, dims.pipeline)
    backend = "gloo" if kinds.is_synchronous(planned.device) else "nccl"
    with fake_world(dims.world, planned.rank, backend, ranks_per_host):
        engine = _engine(planned, copied, settings)
        groups = get_parallel()
        assert groups is not None
        recorder = recorder_of(engine, announced=announced)
        try:
            axes = Axes(groups.along(AXIS), groups.along(RING))
            with without_memory(copied, length, count=recorder.add_flops, axes=axes):
                if isinstance(recorder, StageRecorder):
                    window = [inputs] * micro_batches
                    return record_stage(recorder, window), recorder.announcements
                return record(recorder, lambda: _loss(engine, inputs), micro_batches), ()
        except ConfigError:
            raise
        except Exception as error:
            reason = (str(error).strip().splitlines() or [""])[0]
            raise ConfigError(
                f"{type(planned.model).__name__} cannot be trained without memory "
                f"({type(error).__name__}: {reason}); give batch=, a function that makes its "
                "arguments on the meta device, or simulate another model"
            ) from error
        finally:
            engine.destroy()


def recorder_of(
    engine: TrainingEngine, simulated: bool = True, announced: Sequence[Header] = ()
) -> Recorder:
    """Return the recorder of ``engine``; arguments as for a :class:`StageRecorder`."""
    if isinstance(engine, PipelineTraining):
        dims = [*dims_of(engine), *engine.tied.mesh_dims]
        return StageRecorder(engine, dims, simulated, announced)
    return Recorder(engine, dims_of(engine))


def _copy(planned: EnginePlan) -> nn.Module:
    """Return a copy of the model of ``planned``, without blocks of other pipeline stages."""
    if planned.dims.pipeline == 1:
        return copy_on_meta(planned.model)
    from hf_zero.integrations.transformers.pipeline_stages import blocks_elsewhere

    stage = planned.dims.coordinate(planned.rank, "pipeline")
    parts = parts_of(planned.model, planned.dims, planned.cuts)
    others = blocks_elsewhere(planned.model, parts, stage)
    return copy_on_meta(planned.model, memo={id(block): other for block, other in others.items()})


def _engine(planned: EnginePlan, copied: nn.Module, settings: ZeroConfig) -> Engine:
    """Return the engine of ``planned`` on ``copied``, a copy of its model, whose layers and experts
    it cuts, with ``settings`` in place of its own.
    """
    tensor_parallel(copied, planned.dims.tensor)
    module, kind = copied, Engine
    if planned.dims.pipeline > 1:
        module, kind = _staged(planned, copied), pipelined(Engine)
        # a script cuts the layers itself, before the stages, and leaves the key out
        uncut = dataclasses.replace(settings.tensor_parallel, autotp_size=0)
        settings = dataclasses.replace(settings, tensor_parallel=uncut)
    spread_experts(module, settings)
    init_parallel(planned.dims)
    optimizer = _optimizer_for(planned, module)
    features = FeatureSet.of(settings, module, optimizer)
    features.mark(module)
    if isinstance(module, StagedModule):
        check_uncut(settings, module)
        check_pipeline(settings, module)
    engine_plan = plan(
        module, settings, planned.dims, optimizer, extensions_of=extensions_of, rank=planned.rank,
        device=META,
    )  # fmt: skip
    return kind(engine_plan, features.with_further(module))


def _staged(planned: EnginePlan, copied: nn.Module) -> StagedModule:
    """Return the stage of ``planned`` of ``copied``."""
    from hf_zero.integrations.transformers.pipeline_stages import stages_without_values

    module = stages_without_values(copied, parts_of(planned.model, planned.dims, planned.cuts))
    tied = {
        name: planned.cuts[p].pp_stages
        for name, p in planned.model.named_parameters()
        if p in planned.cuts
    }
    set_tied(module, {name: stages for name, stages in tied.items() if stages})
    return module


def dims_of(engine: TrainingEngine) -> list[MeshDim]:
    """Return the dimensions over which the ranks of ``engine`` exchange messages."""
    groups = get_parallel()
    parallel = [] if groups is None else [*groups.axes.values()]
    return [*engine.mesh.mesh_dims, *parallel]


def _loss(engine: Engine, inputs: Mapping[str, object]) -> torch.Tensor:
    output = engine(**inputs)
    if isinstance(output, Mapping):
        output = output["loss"] if "loss" in output else next(iter(output.values()))
    loss: torch.Tensor = output if isinstance(output, torch.Tensor) else output[0]
    return loss


def _arguments(batch: Batch | None, rows: int, tokens: int, stages: int) -> dict[str, object]:
    """Return the arguments of the model for a micro-batch, those of ``batch`` if it is given.
    ``tokens``: of each sequence, on this rank. Raises ConfigError unless ``batch`` returns a dict.
    """
    if batch is None:
        ids = torch.zeros(rows, tokens, dtype=torch.int64, device=META)
        as_tuple = {"return_dict": False} if stages == 1 else {}
        return {"input_ids": ids, "labels": ids, **as_tuple}
    arguments: object = batch(rows, tokens)
    if not isinstance(arguments, Mapping):
        raise ConfigError(
            f"batch= gives a {type(arguments).__name__}; return the keyword arguments of the model "
            "in a dict, as {'input_ids': ...}"
        )
    return {**arguments}


def _optimizer_for(planned: EnginePlan, module: nn.Module) -> torch.optim.Optimizer | None:
    """Return an optimizer like that of ``planned`` over the parameters of ``module``, a copy of its
    model or of a stage of it.
    """
    if planned.optimizer is None:
        return None
    names = {parameter: name for name, parameter in planned.model.named_parameters()}
    copies = dict(module.named_parameters())
    groups = [
        {**group, "params": [copies[names[p]] for p in group["params"] if names[p] in copies]}
        for group in planned.optimizer.param_groups
    ]
    optimizer: torch.optim.Optimizer = type(planned.optimizer)(groups)  # type: ignore[call-arg]
    return optimizer
