"""``hf_zero.simulate``: a training step of one rank of any world, without memory for the model and
without the other ranks.

The plan is that of ``hf_zero.estimate``, of the check before training and of the engine; the step
is recorded from that engine (:mod:`hf_zero.planning.simulation.recording`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypedDict, Unpack

import torch
from torch import nn

from hf_zero.activations.policy import ActivationPatches
from hf_zero.compression.registry import extensions_of
from hf_zero.config import OffloadOptimizer, OffloadParam, OptimizerConfig, ZeroConfig
from hf_zero.device import kinds
from hf_zero.distributed.collectives import MeshDim
from hf_zero.distributed.fake_world import META, fake_world
from hf_zero.distributed.parallel_groups import AXES, get_parallel, init_parallel
from hf_zero.engine import Engine
from hf_zero.errors import ConfigError
from hf_zero.integrations.fused.attention_on_meta import without_memory
from hf_zero.integrations.fused.heads import fuse_head
from hf_zero.integrations.transformers.sized_model import sized_model
from hf_zero.measures.collectives import wire_bytes
from hf_zero.parallel.expert.model import on_model, spread_experts
from hf_zero.parallel.tensor import tensor_parallel
from hf_zero.planning.activation_memory import Sequences, copy_on_meta
from hf_zero.planning.estimate import Asked, asked_for, check_stage, open_model, plans_of
from hf_zero.planning.needs import needs, state_bytes
from hf_zero.planning.simulation.machine import Machine, Seconds, offload_times, seconds
from hf_zero.planning.simulation.measuring import Measured
from hf_zero.planning.simulation.recording import RECORDED, Message, Recorder, Recording, record
from hf_zero.techniques.registry import TrainingTechniques
from hf_zero.zero.layout.engine_plan import EnginePlan, plan

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
class Simulation:
    """A step of one rank. Made by :func:`simulate`.

    model_state_bytes: the model states of the ZeRO paper, parameters, gradients and optimizer state
    without offload, with gradients in the precision of the parameters. state: the bytes that the
    engine keeps by kind, also without offload; its sums of gradients have 32 bits by default.
    peak_bytes: the most in each tier, "device", "ram" (of which "pinned") and "disk"; peak_at: the
    place of the device's. phases: the device's, phase by phase. flops: of the matrix products.
    seconds: the time on ``machine``.
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

    @property
    def tokens_per_second(self) -> float:
        """Tokens of this rank's micro-batches by the seconds of a step."""
        return self.micro_batch * self.micro_batches * self.sequence_length / self.seconds.step

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as values for JSON."""
        return dataclasses.asdict(self)


class PlanOptions(TypedDict, total=False):
    """Arguments of :func:`simulate` that describe the engine, all optional."""

    params: float | None
    config: Any
    offload_optimizer: Any
    offload_param: Any
    replicas: int | None
    tensor_parallel: int | None
    sequence_parallel: int | None
    expert_parallel: int | None
    pipeline_parallel: int
    micro_batch: int | None
    micro_batches: int | None
    rank: int
    device: torch.device | None


def simulate(
    model: Any = None,
    ranks: int = 1,
    stage: int | None = None,
    precision: str = "bf16",
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
        stage: 0 to 3; None: that of ``config``, else 3.
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
        tensor_parallel, sequence_parallel, expert_parallel: ranks that share each layer, a
            sequence, and a set of experts; None: as in ``config``. Every expert is taken to get as
            many tokens as the others.
        pipeline_parallel: 1: pipelines are not simulated.
        micro_batch: sequences of a micro-batch; None: as in ``config``, else 1.
        micro_batches: backwards of a step; None: as in ``config``, else 1.
        rank: the one that is simulated, 0 unless given.
        device: the device that computes; None: a GPU.

    Raises:
        ConfigError: arguments as for :func:`hf_zero.estimate`; neither or both of model and params;
            a rank that the world lacks; a pipeline; a process that is in a job already; a model
            that cannot run without memory.
    """
    name, own = planned(model, ranks, stage, precision, optimizer, **options)
    machine = machine or Machine()
    recording = record_plan(own, sequence_length, batch, ranks_per_host=machine.ranks_per_host)
    if measured is not None:
        machine = measured.machine(recording, machine)
    return _simulation(name, own, recording, machine, sequence_length)


def _simulation(
    name: str, own: EnginePlan, recording: Recording, machine: Machine, length: int
) -> Simulation:
    settings, beside = own.settings, needs(own)
    at_rest = sum(n for (_, tier), n in state_bytes(own).items() if tier == "device")
    phases = tuple(
        PhaseBytes(phase, at_rest + most, str(place))
        for phase, (most, place) in recording.peaks.items()
    )
    peak = max(phases, key=lambda each: each.device)
    return Simulation(
        model=name,
        parameters=sum(own.whole_numel(parameter) for parameter in own.model.parameters()),
        ranks=own.dims.world,
        rank=own.rank,
        stage=settings.stage,
        precision=settings.precision,
        optimizer=type(own.optimizer).__name__,
        micro_batch=settings.train_micro_batch_size_per_gpu or 1,
        micro_batches=recording.micro_batches,
        sequence_length=length,
        model_state_bytes=sum(model_states(own, narrow=True).values()),
        state=model_states(own),
        peak_bytes={
            "device": peak.device,
            "ram": beside.ram_bytes,
            "pinned": beside.pinned,
            "disk": beside.disk_bytes,
        },
        peak_at=peak.at,
        phases=phases,
        collectives=_counts(recording),
        flops=recording.flops,
        seconds=seconds(recording, machine, offload_times(own, machine)),
        machine=machine,
    )


def planned(
    model: Any,
    ranks: int,
    stage: int | None,
    precision: str = "bf16",
    optimizer: str | OptimizerConfig = "AdamW",
    **options: Unpack[PlanOptions],
) -> tuple[str, EnginePlan]:
    """Return the name of the model and the plan of a rank; arguments as for :func:`simulate`."""
    name, module = module_of(model, options.get("params"))
    rank, experts = options.get("rank", 0), options.get("expert_parallel")
    pipeline = options.get("pipeline_parallel", 1)
    if pipeline != 1:
        raise ConfigError(
            f"pipeline_parallel = {pipeline} is not simulated: a stage waits for the other stages, "
            "and one rank is recorded; leave it out (`hf-zero estimate --pp` counts the bytes of "
            "state of a stage)"
        )
    if stage is not None:
        check_stage(stage)
    config = options.get("config")
    asked = asked_for(
        ranks, precision, optimizer, config, options.get("tensor_parallel"), experts, 1,
        options.get("sequence_parallel"), options.get("device"),
    )  # fmt: skip
    if not 0 <= rank < ranks:
        raise ConfigError(f"rank {rank} is none of {ranks} ranks; choose 0 to {ranks - 1}")
    if stage is None:
        stage = 3 if config is None else asked.settings.stage
    spread = {"enabled": True, "autoep_size": experts}
    given = {
        "replicate_size": options.get("replicas"),
        "train_micro_batch_size_per_gpu": options.get("micro_batch"),
        "gradient_accumulation_steps": options.get("micro_batches"),
        "expert_parallel": None if experts is None else spread,
    }
    settings = _placed(
        asked, given, stage, options.get("offload_optimizer"), options.get("offload_param")
    )
    return name, plans_of(module, asked, settings)[0].replan(settings, rank)


def module_of(model: Any, params: float | None) -> tuple[str, nn.Module]:
    """Return the name of the model to simulate and the model. Raises ConfigError unless exactly one
    of ``model`` and ``params`` is given.
    """
    if (model is None) == (params is None):
        raise ConfigError(
            "a simulation needs either a model or params, a number of parameters; pass one"
        )
    return open_model(model) if params is None else (f"{params:g} parameters", sized_model(params))


def record_plan(
    own: EnginePlan,
    length: int,
    batch: Callable[[int, int], Mapping[str, torch.Tensor]] | None = None,
    ranks_per_host: int | None = None,
) -> Recording:
    """Return the recording of a step of the engine that ``own`` plans, on a copy of its model on
    the meta device, without offload: the plan itself has the bytes of other tiers.

    Raises ConfigError for a model that cannot run without memory.
    """
    dims, micro_batches = own.dims, own.settings.gradient_accumulation_steps or 1
    settings = own.settings.placed(own.settings.stage, OffloadOptimizer(), OffloadParam())
    settings = dataclasses.replace(
        settings, gradient_accumulation_steps=min(micro_batches, RECORDED)
    )
    rows = settings.train_micro_batch_size_per_gpu or 1
    Sequences(length, rows, dims.sequence).check(own.model)
    copied = copy_on_meta(own.model, {}).train()
    if "loss" in settings.kernels and not isinstance(settings.kernels, str):
        fuse_head(copied)
    inputs = (batch or _tokens)(rows, length // dims.sequence)
    backend = "gloo" if kinds.is_host(own.device) else "nccl"
    with fake_world(dims.world, own.rank, backend, ranks_per_host):
        engine = _engine(own, copied, settings)
        groups = get_parallel()
        assert groups is not None
        recorder = Recorder(engine, dims_of(engine))
        try:
            with without_memory(
                copied, length, count=recorder.add_flops, axis=groups.along("sequence")
            ):
                return record(recorder, lambda: _loss(engine, inputs), micro_batches)
        except ConfigError:
            raise
        except Exception as error:
            said = (str(error).strip().splitlines() or [""])[0]
            raise ConfigError(
                f"{type(own.model).__name__} cannot be trained without memory "
                f"({type(error).__name__}: {said}); give batch=, a function that makes its "
                "arguments on the meta device, or simulate another model"
            ) from error
        finally:
            engine.destroy()


def _engine(own: EnginePlan, copied: nn.Module, settings: ZeroConfig) -> Engine:
    """Return the engine of ``own`` on ``copied``, a copy of its model, whose layers and experts it
    cuts, with ``settings`` in place of its own.
    """
    tensor_parallel(copied, own.dims.tensor)
    spread_experts(copied, settings)
    init_parallel(own.dims)
    optimizer = _optimizer_for(own, copied)
    made = plan(
        copied, settings, own.dims, optimizer, extensions_of=extensions_of, rank=own.rank,
        device=META,
    )  # fmt: skip
    techniques = TrainingTechniques(settings, on_model(copied))
    return Engine(made, ActivationPatches(settings), techniques)


def dims_of(engine: Engine) -> list[MeshDim]:
    """Return the dimensions over which the ranks of ``engine`` exchange messages."""
    groups = get_parallel()
    parallel = [] if groups is None else [groups.along(axis) for axis in AXES]
    return [*engine.mesh.axes, *parallel]


def _loss(engine: Engine, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    found = engine(**inputs)
    if isinstance(found, Mapping):
        found = found["loss"] if "loss" in found else next(iter(found.values()))
    loss: torch.Tensor = found if isinstance(found, torch.Tensor) else found[0]
    return loss


def _tokens(rows: int, length: int) -> dict[str, Any]:
    ids = torch.zeros(rows, length, dtype=torch.int64, device=META)
    return {"input_ids": ids, "labels": ids, "return_dict": False}


def _optimizer_for(own: EnginePlan, copied: nn.Module) -> torch.optim.Optimizer | None:
    """Return an optimizer like that of ``own`` over the parameters of ``copied``."""
    if own.optimizer is None:
        return None
    there = dict(zip(own.model.parameters(), copied.parameters()))
    groups = [
        {**group, "params": [there[parameter] for parameter in group["params"]]}
        for group in own.optimizer.param_groups
    ]
    made: torch.optim.Optimizer = type(own.optimizer)(groups)  # type: ignore[call-arg]
    return made


def _placed(
    asked: Asked, given: Mapping[str, Any], stage: int, optimizer: Any, parameters: Any
) -> ZeroConfig:
    """Return the settings with the values that are given, at ``stage``, with the sections of
    offload that are given.
    """
    values = {name: value for name, value in given.items() if value is not None}
    settings = asked.settings.override(values, "what was asked for") if values else asked.settings
    settings = settings.resolve(asked.dims.in_a_stage, training=False).on_device(asked.device.type)
    written: dict[str, Any] = {"offload_optimizer": optimizer, "offload_param": parameters}
    sections = ZeroConfig(3, **written)
    return settings.placed(
        stage,
        *(
            getattr(settings if section is None else sections, name)
            for name, section in written.items()
        ),
    )


def model_states(own: EnginePlan, narrow: bool = False) -> dict[str, int]:
    """Return the bytes of state by kind, without offload. ``narrow``: with gradients summed in the
    dtype of their parameters.
    """
    plain = own.replan(own.settings.placed(own.settings.stage, OffloadOptimizer(), OffloadParam()))
    if narrow:
        flats = (dataclasses.replace(each, gradient_dtype=each.spec.dtype) for each in plain.flats)
        plain = dataclasses.replace(plain, flats=tuple(flats))
    found = dict.fromkeys(("parameters", "gradients", "optimizer"), 0)
    for (kind, _), nbytes in state_bytes(plain).items():
        found[kind] += nbytes
    return found


def _counts(recording: Recording) -> tuple[CollectiveCount, ...]:
    """Return the messages of a step, by phase, operation, unit and group, in order."""
    found: dict[tuple[str, str, str, str], list[Message]] = {}
    for each in recording.step():
        if isinstance(each, Message):
            unit = each.unit_name or "(root)"
            key = each.place.phase, each.operation, unit, each.group.name
            found.setdefault(key, []).append(each)
    return tuple(
        CollectiveCount(
            *key,
            len(each[0].group.ranks),
            len(each),
            sum(one.nbytes for one in each),
            round(sum(wire_bytes(one.operation, one.nbytes, len(one.group.ranks)) for one in each)),
        )
        for key, each in found.items()
    )
