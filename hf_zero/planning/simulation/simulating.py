"""``hf_zero.simulate``: a training step of one rank of any world, without memory for the model and
without the other ranks.

The plan is that of ``hf_zero.estimate``, of the check before training and of the engine; the step
is recorded from that engine (:mod:`hf_zero.planning.simulation.recording`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Unpack

import torch
from torch import nn

from hf_zero.config import OffloadOptimizer, OffloadParam, OptimizerConfig, ZeroConfig
from hf_zero.device import kinds
from hf_zero.distributed.collectives import MeshDim
from hf_zero.distributed.fake_world import META, fake_world
from hf_zero.distributed.parallel_groups import get_parallel, init_parallel
from hf_zero.engine import Engine
from hf_zero.errors import ConfigError
from hf_zero.integrations.fused.attention_on_meta import without_memory
from hf_zero.integrations.fused.deferred_heads import defer_head
from hf_zero.integrations.transformers.meta_model import sized_model
from hf_zero.measures.collectives import wire_bytes
from hf_zero.parallel.expert.model import spread_experts
from hf_zero.parallel.pipeline.engine import PipelineTraining, pipelined
from hf_zero.parallel.pipeline.refusals import check_pipeline, check_uncut
from hf_zero.parallel.pipeline.staged import StagedModule
from hf_zero.parallel.pipeline.tied_parameters import set_tied
from hf_zero.parallel.sequence.attention import Axes
from hf_zero.parallel.sequence.division import AXIS, RING, Division
from hf_zero.parallel.tensor import tensor_parallel
from hf_zero.planning.activation_memory import Sequences
from hf_zero.planning.estimate import (
    EstimateJob,
    JobOptions,
    Precision,
    asked_for,
    check_stage,
    open_model,
    parts_of,
    plans_of,
    tokens_of,
)
from hf_zero.planning.needs import needs, state_bytes
from hf_zero.planning.simulation.machine import Machine, Seconds, offload_times, seconds_of_stages
from hf_zero.planning.simulation.measuring import Measured
from hf_zero.planning.simulation.recording import (
    RECORDED,
    Arrival,
    Message,
    Recorder,
    Recording,
    record,
)
from hf_zero.planning.simulation.stages import Header, StageRecorder, record_stage
from hf_zero.planning.simulation.store_load import StoreLoad, store_load
from hf_zero.zero.extensions import extensions_of
from hf_zero.zero.feature import FeatureSet
from hf_zero.zero.layout.engine_plan import EnginePlan
from hf_zero.zero.layout.meta_run import copy_on_meta
from hf_zero.zero.layout.planner import plan, replan
from hf_zero.zero.training_engine import TrainingEngine

LENGTH = 1024  # tokens of a sequence, unless given


@dataclass(frozen=True)
class CollectiveCount:
    """The collectives of a step of one kind: ``operation`` on ``unit`` over ``group`` in ``phase``.

    ranks: of the group. nbytes: of their buffers. wire_bytes: sent by this rank.
    """

    phase: str
    operation: str
    unit: str
    group: str
    ranks: int
    count: int
    nbytes: int
    wire_bytes: int


@dataclass(frozen=True)
class PhaseBytes:
    """The most bytes of the device in ``phase``, and where."""

    phase: str
    device: int
    at: str


@dataclass(frozen=True)
class StageFigures:
    """One stage of a pipeline, by a rank of it. parameters: that this rank holds. peak_bytes: as in
    :class:`Simulation`. wire_bytes: sent by this rank.
    """

    stage: int
    rank: int
    parameters: int
    peak_bytes: dict[str, int]
    wire_bytes: int
    seconds: Seconds


@dataclass(frozen=True)
class Simulation:
    """A step of one rank. Made by :func:`simulate`.

    model_state_bytes: the model states of the ZeRO paper, parameters, gradients and optimizer state
    without offload, with gradients in the precision of the parameters. state: the bytes that the
    engine keeps by kind, also without offload; its sums of gradients have 32 bits by default.
    peak_bytes: the most in each tier, "device", "ram" (of which "pinned") and "disk"; peak_at: the
    place of the device's. phases: the device's, phase by phase. flops: of the matrix products.
    seconds: the time on ``machine``. stages: the stages of a pipeline, of which the rank has one;
    () without a pipeline.
    """

    model: str
    parameters: int
    ranks: int
    rank: int
    stage: int
    precision: str
    optimizer: str
    micro_batch: int
    micro_batches: int
    sequence_length: int
    model_state_bytes: int
    state: dict[str, int]
    peak_bytes: dict[str, int]
    peak_at: str
    phases: tuple[PhaseBytes, ...]
    collectives: tuple[CollectiveCount, ...]
    flops: float
    seconds: Seconds
    machine: Machine
    store: StoreLoad
    stages: tuple[StageFigures, ...] = ()

    @property
    def tokens_per_second(self) -> float:
        """Tokens of this rank's micro-batches by the seconds of a step."""
        return self.micro_batch * self.micro_batches * self.sequence_length / self.seconds.step

    def to_dict(self) -> dict[str, object]:
        """Return all of it as values for JSON."""
        return dataclasses.asdict(self) | {"store": self.store.to_dict()}


class PlanOptions(JobOptions, total=False):
    """Arguments of :func:`simulate` that describe the engine, all optional."""

    params: float | None
    offload_optimizer: str | OffloadOptimizer | Mapping[str, object] | None
    offload_param: str | OffloadParam | Mapping[str, object] | None
    replicas: int | None
    micro_batch: int | None
    micro_batches: int | None
    rank: int
    device: torch.device | None


def simulate(
    model: object = None,
    ranks: int = 1,
    stage: int | None = None,
    precision: Precision = "bf16",
    optimizer: str | OptimizerConfig = "AdamW",
    *,
    sequence_length: int = LENGTH,
    machine: Machine | None = None,
    measured: Measured | None = None,
    batch: Callable[[int, int], Mapping[str, torch.Tensor]] | None = None,
    **options: Unpack[PlanOptions],
) -> Simulation:
    """Return a training step of one of ``ranks`` ranks, as the engine takes it.

    Args:
        model: as for :func:`hf_zero.estimate`; left unchanged.
        ranks: the world size.
        stage: 0 to 3; None: that of ``config``, else 3, and 1 for a pipeline.
        precision, optimizer: as for :func:`hf_zero.estimate`.
        sequence_length: tokens of a sequence.
        machine: its rates and links; None: those of the ZeRO paper's machine.
        measured: the result of :func:`measure`, which replaces those that are not given.
        batch: the function from sequences and tokens to the keyword arguments of the model, tensors
            on the meta device, whose first result, or the one named loss, is the loss; None:
            ``input_ids`` and ``labels``.
        params: number of parameters of a decoder to simulate instead of a model.
        config, offload_optimizer, offload_param: as for :func:`hf_zero.estimate`.
        replicas: copies of the shards; None: as in ``config``, else 1.
        tensor_parallel, sequence_parallel, context_parallel, expert_parallel: ranks that share each
            layer, a sequence by heads, a sequence in a ring, and a set of experts; None: as in
            ``config``. Every expert is taken to get as many tokens as the others.
        pipeline_parallel: stages into which ``hf_zero.pipeline_stages`` cuts the model, with the
            schedule of ``config``; only ZeRO stages 0 and 1 then exist. A rank of each is recorded.
        micro_batch: sequences of a micro-batch; None: as in ``config``, else 1.
        micro_batches: backwards of a step; None: as in ``config``, else 1.
        rank: the one that is simulated, 0 unless given.
        device: the device that computes; None: a GPU.

    Raises:
        ConfigError: arguments as for :func:`hf_zero.estimate`; neither or both of model and params;
            a rank that the world lacks; a pipeline that the engine does not have (of experts,
            sequences or ZeRO stages beyond 1, with fewer layers than stages, of an unknown model);
            a process that is in a job already; a model that cannot run without memory.
    """
    sequence_length = tokens_of(sequence_length)
    for name, value, kind in (("machine", machine, Machine), ("measured", measured, Measured)):
        if value is not None and not isinstance(value, kind):
            raise ConfigError(
                f"{name} = {value!r:.40} is no {kind.__name__}; pass one, or leave it out"
            )
    if batch is not None and not callable(batch):
        raise ConfigError(
            f"batch = {batch!r:.40} is no function; pass one from sequences and tokens to the "
            "keyword arguments of the model, or leave it out"
        )
    name, plans = plans_of_stages(model, ranks, stage, precision, optimizer, **options)
    machine = machine or Machine()
    recordings = record_plans(plans, sequence_length, batch, machine.ranks_per_host)
    if measured is not None:
        machine = measured.machine(recordings[0], machine)
    spent = seconds_of_stages(
        {planned.rank: recording for planned, recording in zip(plans, recordings)},
        machine,
        {planned.rank: offload_times(planned, machine) for planned in plans},
    )
    figures = [
        _figures(planned, recording, spent[planned.rank])
        for planned, recording in zip(plans, recordings)
    ]
    index = next(n for n, planned in enumerate(plans) if planned.rank == options.get("rank", 0))
    planned, recording, figures_here = plans[index], recordings[index], figures[index]
    phases = _phases(planned, recording)
    settings = planned.settings
    return Simulation(
        model=name,
        parameters=sum(planned.whole_numel(p) for p in planned.model.parameters()),
        ranks=planned.dims.world,
        rank=planned.rank,
        stage=settings.stage,
        precision=settings.precision,
        optimizer=type(planned.optimizer).__name__,
        micro_batch=settings.train_micro_batch_size_per_gpu or 1,
        micro_batches=recording.micro_batches,
        sequence_length=sequence_length,
        model_state_bytes=sum(model_states(planned, narrow=True).values()),
        state=model_states(planned),
        peak_bytes=figures_here.peak_bytes,
        peak_at=max(phases, key=lambda phase: phase.device).at,
        phases=phases,
        collectives=_counts(recording),
        flops=recording.flops,
        seconds=figures_here.seconds,
        machine=machine,
        store=store_load(planned.dims.world, machine.store),
        stages=tuple(figures) if len(plans) > 1 else (),
    )


def _figures(planned: EnginePlan, recording: Recording, spent: Seconds) -> StageFigures:
    """Return the figures of the rank of ``planned``, whose step takes ``spent``."""
    beside = needs(planned)
    return StageFigures(
        planned.dims.coordinate(planned.rank, "pipeline"),
        planned.rank,
        sum(slot.numel for flat in planned.flats for slot in flat.spec.layout.slots),
        {
            "device": max(phase.device for phase in _phases(planned, recording)),
            "ram": beside.ram_bytes,
            "pinned": beside.pinned,
            "disk": beside.disk_bytes,
        },
        sum(row.wire_bytes for row in _counts(recording)),
        spent,
    )


def _phases(planned: EnginePlan, recording: Recording) -> tuple[PhaseBytes, ...]:
    """Return the most bytes of each phase, with the state at rest."""

    def at_rest(phase: str) -> int:
        # a window's first forward finds no gradients
        first = phase == "forward" and recording.micro_batches == 1
        by_tier = state_bytes(planned, between_steps=first).items()
        return sum(n for (_, tier), n in by_tier if tier == "device")

    return tuple(
        PhaseBytes(phase, at_rest(phase) + most, str(peak_at))
        for phase, (most, peak_at) in recording.peaks.items()
    )


def plans_of_stages(
    model: object,
    ranks: int,
    stage: int | None,
    precision: Precision = "bf16",
    optimizer: str | OptimizerConfig = "AdamW",
    *,
    params: float | None = None,
    offload_optimizer: object = None,
    offload_param: object = None,
    replicas: int | None = None,
    micro_batch: int | None = None,
    micro_batches: int | None = None,
    rank: int = 0,
    device: torch.device | None = None,
    **job: Unpack[JobOptions],
) -> tuple[str, list[EnginePlan]]:
    """Return the name of the model and the plans of the ranks of one pipeline, the one with the
    rank that is asked for: of this rank alone without stages. Arguments as for :func:`simulate`.
    """
    name, module = module_of(model, params)
    experts = job.get("expert_parallel")
    if stage is not None:
        check_stage(stage)
    job_asked = asked_for(ranks, precision, optimizer, device, **job)
    if isinstance(rank, bool) or not isinstance(rank, Integral) or not 0 <= rank < ranks:
        raise ConfigError(f"rank {rank!r} is none of {ranks} ranks; choose 0 to {ranks - 1}")
    if stage is None:
        default = 3 if job_asked.dims.pipeline == 1 else 1
        stage = default if job.get("config") is None else job_asked.settings.stage
    spread = {"enabled": True, "autoep_size": experts}
    keys = {
        "replicate_size": replicas,
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": micro_batches,
        "expert_parallel": None if experts is None else spread,
    }
    settings = _placed(job_asked, keys, stage, offload_optimizer, offload_param)
    plans = plans_of(module, job_asked, settings)
    ranks_of = job_asked.dims.ranks_along(rank, "pipeline")
    return name, [
        planned if planned.rank == r else replan(planned, settings, r)
        for planned, r in zip(plans, ranks_of)
    ]


def module_of(model: object, params: float | None) -> tuple[str, nn.Module]:
    """Return the name of the model to simulate and the model. Raises ConfigError unless exactly one
    of ``model`` and ``params`` is given.
    """
    if (model is None) == (params is None):
        raise ConfigError(
            "a simulation needs either a model or params, a number of parameters; pass one"
        )
    if params is not None:
        sized = sized_model(params)
        return f"{params:g} parameters", sized
    return open_model(model, needs_loss=True)


def record_plans(
    plans: Sequence[EnginePlan],
    length: int,
    batch: Callable[[int, int], Mapping[str, torch.Tensor]] | None = None,
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
    batch: Callable[[int, int], Mapping[str, torch.Tensor]] | None,
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
    made = (batch or _tokens)(rows, length // division.ranks)
    if not isinstance(made, Mapping):
        raise ConfigError(
            f"batch= gives a {type(made).__name__}; return the keyword arguments of the model in a "
            "dict, as {'input_ids': ...}"
        )
    inputs: dict[str, object] = {**made}
    if batch is None and dims.pipeline == 1:
        inputs["return_dict"] = False
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


def _tokens(rows: int, length: int) -> dict[str, torch.Tensor]:
    ids = torch.zeros(rows, length, dtype=torch.int64, device=META)
    return {"input_ids": ids, "labels": ids}


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


def _placed(
    job: EstimateJob,
    chosen: Mapping[str, object],
    stage: int,
    optimizer: object,
    parameters: object,
) -> ZeroConfig:
    """Return the settings with the values that are given, at ``stage``, with the sections of
    offload that are given.
    """
    values = {name: value for name, value in chosen.items() if value is not None}
    settings = job.settings.override(values, "what was asked for") if values else job.settings
    settings = settings.resolve(job.dims.pp_stage_ranks, training=False).on_device(job.device.type)
    written: dict[str, Any] = {"offload_optimizer": optimizer, "offload_param": parameters}
    sections = ZeroConfig(3, **written)
    return settings.placed(
        stage,
        *(
            getattr(settings if section is None else sections, name)
            for name, section in written.items()
        ),
    )


def model_states(planned: EnginePlan, narrow: bool = False) -> dict[str, int]:
    """Return the bytes of state by kind, without offload. ``narrow``: with gradients summed in the
    dtype of their parameters.
    """
    without = planned.settings.placed(planned.settings.stage, OffloadOptimizer(), OffloadParam())
    plain = planned if without == planned.settings else replan(planned, without)
    if narrow:
        flats = (dataclasses.replace(flat, gradient_dtype=flat.spec.dtype) for flat in plain.flats)
        plain = dataclasses.replace(plain, flats=tuple(flats))
    by_kind = dict.fromkeys(("parameters", "gradients", "optimizer"), 0)
    for (kind, _), nbytes in state_bytes(plain).items():
        by_kind[kind] += nbytes
    return by_kind


def _counts(recording: Recording) -> tuple[CollectiveCount, ...]:
    """Return the messages of a step, by phase, operation, unit and group, in order."""
    by_key: dict[tuple[str, str, str, str], list[Message]] = {}
    for event in recording.step():
        if isinstance(event, Message) and not isinstance(event, Arrival):
            unit = event.unit_name or "(root)"
            key = event.place.phase, event.operation, unit, event.group.name
            by_key.setdefault(key, []).append(event)
    return tuple(
        CollectiveCount(
            *key,
            len(sent[0].group.ranks),
            len(sent),
            sum(one.nbytes for one in sent),
            round(sum(wire_bytes(one.operation, one.nbytes, len(one.group.ranks)) for one in sent)),
        )
        for key, sent in by_key.items()
    )
