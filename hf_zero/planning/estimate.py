"""``hf_zero.estimate`` and ``hf_zero.propose``: bytes of training state per rank, and the
configuration that fits a machine, from the plan of an engine, without memory for the model.

Activations depend on the batch: they are counted for given sequence lengths
(:mod:`hf_zero.planning.activation_memory`).
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Unpack

import torch
from torch import nn

from hf_zero.config import OffloadOptimizer, OffloadParam, OptimizerConfig, ZeroConfig
from hf_zero.device import kinds
from hf_zero.device.free_memory import FreeBytes
from hf_zero.distributed.parallel_dims import ParallelDims
from hf_zero.errors import ConfigError, UnsupportedOptimizerError
from hf_zero.logging import JsonObject
from hf_zero.optim.bf16_state import check_bf16
from hf_zero.optim.one_bit import as_sent, one_bit_at_one
from hf_zero.parallel.sequence.division import CONTEXT
from hf_zero.parallel.sequence.division import KEY as SEQUENCE
from hf_zero.parallel.sequence.sequence_parallel import division_of
from hf_zero.planning.activation_memory import LengthEstimate, length_estimate
from hf_zero.planning.checking import communicators
from hf_zero.planning.estimate_job import (
    EstimateJob,
    JobOptions,
    Precision,
    asked_for,
    check_stage,
    offload_sections,
    open_model,
    plans_of,
    tokens_of,
)
from hf_zero.planning.fit import ACTIVATIONS, BESIDE_ACTIVATIONS, ActivationOption, Fit, fit
from hf_zero.planning.narrow_state import NarrowState, narrow_states
from hf_zero.planning.needs import (
    Needs,
    gradient_buffers,
    memory_checkpoints,
    needs,
    state_bytes,
    unit_bytes,
)
from hf_zero.planning.traffic import Traffic, codings, ways_of_sending
from hf_zero.zero.layout.attributes import elements_of
from hf_zero.zero.layout.engine_plan import EnginePlan
from hf_zero.zero.layout.planner import replan
from hf_zero.zero.layout.stage_policy import POLICIES

__all__ = ["MemoryEstimate", "Proposal", "StageEstimate", "Tiers", "estimate", "propose", "traffic"]


@dataclass(frozen=True)
class Tiers:
    """Bytes of one rank in each tier.

    ``device`` includes gathered units and gradient buffers; ``pinned`` is part of ``ram``.
    """

    device: int
    pinned: int
    ram: int
    disk: int


@dataclass(frozen=True)
class StageEstimate:
    """Bytes of one rank at one stage.

    ``parameters``, ``gradients`` and ``optimizer`` (fp32 master weights and moments): persistent
    bytes, computed without offload; ``tiers`` has the placement with offload. At stage 3 the
    largest unit and the units prefetched after it are unsharded at the same time.
    ``gradient_buffers`` hold gradients on their way between ranks and stay for the next step; over
    gloo with more than two ranks, chunks from all peers add to it. ``communicators``: how many a
    rank takes on a GPU, at most, whose bytes are in none of these. ``pipeline_stage``: of a
    pipeline, the stage that needs most of the device, and of those that need the same, most RAM; of
    RAM and disk ``tiers`` has what the stage needs that needs most there. ``memory_checkpoints``:
    bytes of ``checkpoint.memory`` on a host for each of its ranks, part of ``tiers.ram``.
    """

    stage: int
    parameters: int
    gradients: int
    optimizer: int
    largest_unit: int
    largest_unit_name: str
    gradient_buffers: int
    tiers: Tiers
    communicators: int
    pipeline_stage: int = 0
    memory_checkpoints: int = 0

    @property
    def state(self) -> int:
        return self.parameters + self.gradients + self.optimizer

    def to_dict(self) -> JsonObject:
        return {**dataclasses.asdict(self), "state": self.state}


@dataclass(frozen=True)
class MemoryEstimate:
    """Result of :func:`estimate`: the size of the model, and one row per stage.

    ``moments``: numbers the optimizer keeps per parameter. ``tensor``, ``expert``, ``pipeline``:
    numbers of ranks or stages over which layers, experts and the model are spread.
    """

    model: str
    total_parameters: int
    trainable_parameters: int
    units: int
    ranks: int
    replicas: int
    precision: str
    optimizer: str
    moments: int
    stages: tuple[StageEstimate, ...]
    offload_optimizer: OffloadOptimizer = field(default_factory=OffloadOptimizer)
    offload_param: OffloadParam = field(default_factory=OffloadParam)
    tensor: int = 1
    expert: int = 1
    pipeline: int = 1
    lengths: tuple[LengthEstimate, ...] = ()

    def at(self, stage: int) -> StageEstimate:
        for row in self.stages:
            if row.stage == stage:
                return row
        raise ConfigError(
            f"stage {stage!r} was not estimated; estimated were "
            f"{[row.stage for row in self.stages]}"
        )

    def to_dict(self) -> JsonObject:
        """Return everything as values for JSON."""
        plain = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}
        offload = {
            name: dataclasses.asdict(plain[name]) for name in ("offload_optimizer", "offload_param")
        }
        stages = [row.to_dict() for row in self.stages]
        lengths = [dataclasses.asdict(row) for row in self.lengths]
        return {**plain, **offload, "stages": stages, "lengths": lengths}


@dataclass(frozen=True)
class Proposal:
    """Result of :func:`propose`: a configuration that fits, None if none does, and all trials.
    ``cut``: code that cuts the model before ``initialize``, "" if it is not cut.
    """

    model: str
    config: JsonObject | None
    fit: Fit
    free: FreeBytes
    cut: str = ""

    @property
    def cost(self) -> str:
        """What narrow state of the configuration cost the loss, in words; "" without it."""
        chosen = self.fit.chosen
        if chosen is None or chosen.narrow is None:
            return ""
        return f"{chosen.narrow.name}: {chosen.narrow.cost}"

    def to_dict(self) -> JsonObject:
        """Return everything as values for JSON."""
        tried = [
            {
                "name": trial.name,
                "fits": trial.verdict.fits,
                "why_not": trial.why,
                **by_tier(trial.needs),
            }
            for trial in self.fit.trials
        ]
        return {
            "model": self.model,
            "config": self.config,
            "cut": self.cut,
            "cost": self.cost,
            "margin": self.fit.margin,
            "free": dataclasses.asdict(self.free),
            "tried": tried,
        }


def by_tier(needed: Needs) -> dict[str, int]:
    """Return the bytes of one rank in each tier, by the field names of :class:`Tiers`."""
    return {
        "device": needed.device_bytes,
        "pinned": needed.pinned,
        "ram": needed.ram_bytes,
        "disk": needed.disk_bytes,
    }


def estimate(
    model: object,
    ranks: int,
    precision: Precision = "bf16",
    optimizer: str | OptimizerConfig = "AdamW",
    stage: int | None = None,
    *,
    offload_optimizer: str | OffloadOptimizer | Mapping[str, object] | None = None,
    offload_param: str | OffloadParam | Mapping[str, object] | None = None,
    sequence_lengths: Sequence[int] = (),
    **job: Unpack[JobOptions],
) -> MemoryEstimate:
    """Return the bytes of parameters, gradients and optimizer state per rank and tier, for every
    stage or for one; for a pipeline, those of the stage that needs most. With sequence lengths,
    also the bytes of activations.

    Args:
        model: a module (on any device, including meta), a transformers configuration or a dict of
            one, a model folder, a ``config.json``, or the name of a model in the local cache or on
            the hub.
        ranks: the world size.
        precision: ``fp32``, ``bf16`` or ``fp16``.
        optimizer: a name, or an ``OptimizerConfig`` with the parameters that determine its state
            (momentum, amsgrad).
        stage: 0 to 3; None estimates all four.
        config: whatever ``ZeroConfig.coerce`` reads. Its precision and optimizer override the
            arguments; the other arguments override it.
        offload_optimizer, offload_param: sections as in a ``ZeroConfig``. Parameters are
            offloaded at stage 3 only.
        tensor_parallel, expert_parallel: ranks that share each layer, and ranks that hold one set
            of a mixture's experts together; None: as in ``config``.
        pipeline_parallel: stages into which ``hf_zero.pipeline_stages`` would cut the model; only
            ZeRO stages 0 and 1 then exist.
        sequence_lengths: tokens of the sequences whose activations are counted, for a language
            model; it runs without memory, once for each way of saving activations.
        sequence_parallel, context_parallel: ranks that share a sequence, by heads and in a ring;
            None: as in ``config``.

    Raises:
        ConfigError: an invalid model, precision, optimizer, stage or number of ranks; ranks, heads
            or lengths that do not divide.
    """
    estimate_job = asked_for(ranks, precision, optimizer, **job)
    settings, lengths = estimate_job.settings, _tokens(sequence_lengths)
    # the rows of stages below 3 do not offload parameters
    optimizer_section, param_section = offload_sections(settings, offload_optimizer, offload_param)
    name, module = open_model(model, needs_loss=bool(lengths))
    placed = settings.placed(3, optimizer_section, param_section)
    plans = plans_of(module, estimate_job, placed)
    stages = _stages(plans[0], settings.stage, stage, list(plans[0].zero_stages))
    counts: Counter[bool] = Counter()
    for parameter in module.parameters():
        weights = elements_of(parameter)
        numel = weights if weights != parameter.numel() else plans[0].whole_numel(parameter)
        counts[parameter.requires_grad] += numel
    dims = plans[0].dims
    return MemoryEstimate(
        model=name,
        total_parameters=counts[True] + counts[False],
        trainable_parameters=counts[True],
        units=len(plans[0].units),
        ranks=ranks,
        replicas=settings.replicate_size,
        precision=settings.precision,
        optimizer=estimate_job.optimizer.type,
        moments=plans[0].moments,
        stages=tuple(
            _largest_row(plans, settings.placed(stage, optimizer_section, param_section))
            for stage in stages
        ),
        offload_optimizer=optimizer_section,
        offload_param=param_section,
        tensor=dims.tensor,
        expert=dims.expert,
        pipeline=dims.pipeline,
        lengths=_lengths(plans[0], lengths),
    )


def traffic(
    model: object,
    ranks: int,
    precision: Precision = "bf16",
    stage: int | None = None,
    *,
    optimizer: str | OptimizerConfig = "AdamW",
    device: torch.device | None = None,
    **job: Unpack[JobOptions],
) -> dict[int, list[Traffic]]:
    """Return the bytes that a rank sends in a step, dense and compressed, at each stage or at
    ``stage``. Arguments as for :func:`estimate`.

    ``device``: where the time of compression is measured; default: the accelerator of this machine,
    else its CPU. Raises ConfigError for a pipeline, whose traffic is not known.
    """
    estimate_job = asked_for(ranks, precision, optimizer, **job)
    if stage is not None:
        check_stage(stage)
    if estimate_job.dims.pipeline > 1:
        raise ConfigError(
            f"pipeline_parallel = {estimate_job.dims.pipeline}: the traffic of a pipeline is not "
            "known; leave it out"
        )
    [base_plan] = plans_of(open_model(model)[1], estimate_job, estimate_job.settings)
    seconds = codings(device or torch.device(kinds.accelerator() or "cpu"))
    stages = [stage] if stage is not None else sorted(POLICIES)
    return {stage: ways_of_sending(_at_stage(base_plan, stage), seconds) for stage in stages}


def propose(
    model: object,
    ranks: int,
    free: FreeBytes,
    precision: Precision = "bf16",
    optimizer: str | OptimizerConfig = "AdamW",
    stage: int | None = None,
    *,
    margin: float | None = None,
    sequence_length: int | None = None,
    **job: Unpack[JobOptions],
) -> Proposal:
    """Return the fastest configuration whose state, and activations of sequences of
    ``sequence_length``, fit into ``free``, the bytes of one rank
    (:func:`hf_zero.device.free_memory.measure`).

    ``margin`` is the share of the device that stays free: None means 20 % if activations are not
    known, and 10 % if they are. The other arguments are those of :func:`estimate`. The search tries
    only ``stage`` if it is given, the stage of ``config`` and higher ones if that is given, and
    otherwise stages 1 to 3. If nothing fits with state as configured, it tries moments in 8 bits
    and master weights in bf16 (:mod:`hf_zero.planning.narrow_state`).
    """
    if not isinstance(free, FreeBytes):
        raise ConfigError(
            f"free = {free!r:.40} is not the free memory of a rank; pass a FreeBytes, or what "
            "hf_zero.device.free_memory.measure(device) returns"
        )
    if margin is not None and not (isinstance(margin, (int, float)) and 0 <= margin < 1):
        raise ConfigError(
            f"margin = {margin!r:.40} is not a share of the device; pass a number from 0, below 1, "
            "or leave it out"
        )
    device = kinds.device_for_estimate(gpu=not free.host_device)
    estimate_job = asked_for(ranks, precision, optimizer, device, **job)
    settings, config = estimate_job.settings, job.get("config")
    name, module = open_model(model, needs_loss=sequence_length is not None)
    plans = plans_of(module, estimate_job, settings)
    one_bit = one_bit_at_one(settings, plans[0].optimizer)
    if one_bit is not None:
        at_one = settings.placed(1, settings.offload_optimizer, settings.offload_param)
        settings, stage = as_sent(at_one, one_bit), 1
        plans = [replan(part, settings) for part in plans]
    begins = settings.stage if config is not None else 1
    stages = _stages(plans[0], settings.stage, stage, list(plans[0].zero_stages[begins:]))
    lengths = _lengths(plans[0], [] if sequence_length is None else [tokens_of(sequence_length)])
    options = [way for row in lengths for way in row.ways] or [ActivationOption()]
    if margin is None:
        margin = BESIDE_ACTIVATIONS if lengths else ACTIVATIONS
    may_change = config is None or settings.optimizer is not None
    narrow = _narrow_plans(module, estimate_job, settings, plans[0].optimizer, may_change)
    fitting = fit(plans, free, margin, stages, options, narrow)
    return Proposal(
        name, _written(config, estimate_job, fitting), fitting, free, _cut(plans[0].dims)
    )


def _narrow_plans(
    module: nn.Module,
    job: EstimateJob,
    settings: ZeroConfig,
    optimizer: torch.optim.Optimizer | None,
    may_change: bool,
) -> Iterator[tuple[NarrowState, list[EnginePlan]]]:
    """Yield the narrow states of ``job`` that an engine runs, with the plans of each; ``optimizer``
    is that of its plans.
    """
    for state in narrow_states(settings, job.optimizer, optimizer, may_change):
        of_state = replace(job, optimizer=state.optimizer or job.optimizer)
        try:
            plans = plans_of(module, of_state, state.applied(settings))
            for planned in plans:
                if planned.optimizer is not None:
                    few_bits = any(c.sends_changes for c in planned.extensions.codecs)
                    in_8_bits = bool(planned.names_in_8_bits)
                    check_bf16(planned.optimizer, planned.settings, in_8_bits, few_bits)
        except (ConfigError, UnsupportedOptimizerError):
            continue
        yield state, plans


def _at_stage(base_plan: EnginePlan, stage: int) -> EnginePlan:
    now = base_plan.settings
    return replan(base_plan, now.placed(stage, now.offload_optimizer, now.offload_param))


def _stages(
    base_plan: EnginePlan, configured: int, stage: int | None, otherwise: list[int]
) -> list[int]:
    """Return the ZeRO stages to consider: ``stage``, or ``otherwise``.

    Raises ConfigError for an unknown stage, or one that a pipeline does not have.
    """
    if stage is not None:
        check_stage(stage)
    chosen = otherwise if stage is None else [stage]
    if base_plan.dims.pipeline > 1 and (not chosen or max(chosen) not in base_plan.zero_stages):
        raise ConfigError(
            f"a pipeline of {base_plan.dims.pipeline} stages trains at ZeRO stage 0 or 1, not at "
            f"{configured if stage is None else stage}; leave stage out, or pass 1"
        )
    return chosen


def _cut(dims: ParallelDims) -> str:
    """Return the code that cuts the model into the stages of a pipeline, and its layers before."""
    if dims.pipeline == 1:
        return ""
    model = "model" if dims.tensor == 1 else f"hf_zero.tensor_parallel(model, {dims.tensor})"
    return f"hf_zero.pipeline_stages({model}, {dims.pipeline})"


def _tokens(lengths: Any) -> list[int]:
    """Return the lengths in a sequence or an array as ints, or one length as a list. Raises
    ConfigError for what is not a number of tokens.
    """
    lengths = lengths.tolist() if hasattr(lengths, "tolist") else lengths
    return [tokens_of(n) for n in (lengths if isinstance(lengths, Iterable) else [lengths])]


def _lengths(base_plan: EnginePlan, tokens: Sequence[int]) -> tuple[LengthEstimate, ...]:
    """Return the activation estimates for sequences of each of these lengths. Raises ConfigError
    with tensor, expert or pipeline parallelism.
    """
    if tokens and base_plan.dims.splits_model:
        raise ConfigError(
            "activations beside tensor, expert or pipeline parallelism are not known; leave the "
            "lengths of sequences out, or estimate without it, which is the most it can be"
        )
    return tuple(length_estimate(base_plan, length) for length in tokens)


def _largest_row(parts: Sequence[EnginePlan], settings: ZeroConfig) -> StageEstimate:
    """Return the row, with ``settings``, of the pipeline stage that needs most of the device; of
    the other tiers, what the stage needs that needs most there.
    """
    rows = [
        replace(_row(replan(part, settings)), pipeline_stage=stage)
        for stage, part in enumerate(parts)
    ]
    chosen = max(rows, key=lambda row: (row.tiers.device, row.tiers.ram, row.tiers.disk))
    most = [max(of_tier) for of_tier in zip(*(dataclasses.astuple(row.tiers) for row in rows))]
    return replace(chosen, tiers=Tiers(*most))


def _row(planned: EnginePlan) -> StageEstimate:
    stage = planned.settings.stage
    plain = replan(planned, planned.settings.placed(stage, OffloadOptimizer(), OffloadParam()))
    sums: Counter[str] = Counter()
    for (kind, _), nbytes in state_bytes(plain).items():
        sums[kind] += nbytes
    largest, size = max(unit_bytes(planned).items(), key=lambda item: item[1], default=("", 0))
    return StageEstimate(
        stage,
        sums["parameters"],
        sums["gradients"],
        sums["optimizer"],
        size,
        largest,
        gradient_buffers(plain),
        Tiers(**by_tier(needs(planned))),
        sum(communicators(planned).values()),
        memory_checkpoints=memory_checkpoints(planned),
    )


def _written(config: object, job: EstimateJob, fitting: Fit) -> dict[str, object] | None:
    """Return the given configuration, or one made of the arguments, with the settings that fit."""
    if fitting.chosen is None:
        return None
    optimizer, settings, dims = job.optimizer, job.settings, job.dims
    if config is not None:
        written: JsonObject = ZeroConfig.coerce(config, allow_auto=True).to_dict()
    else:
        written = {"optimizer": {"type": optimizer.type, "params": dict(optimizer.params)}}
        if settings.precision != "fp32":
            written[settings.precision] = {"enabled": True}
    if dims.tensor > 1 and dims.pipeline == 1:  # with a pipeline, `_cut` cuts the layers
        written["tensor_parallel"] = {"autotp_size": dims.tensor}
    division = division_of(settings)
    sizes = {SEQUENCE: division.sequence, CONTEXT: division.context}
    written.update({key: size for key, size in sizes.items() if size > 1})
    if dims.expert > 1:
        written["expert_parallel"] = {"enabled": True, "autoep_size": dims.expert}
    others = {
        key: value
        for key, value in written.get("zero_optimization", {}).items()
        if key not in ("offload_optimizer", "offload_param")
    }
    chosen = fitting.chosen.to_config()
    merged = {"zero_optimization": {**others, **chosen["zero_optimization"]}}
    if "bf16" in chosen:
        merged["bf16"] = {**written.get("bf16", {}), **chosen["bf16"]}
    return {**written, **chosen, **merged}
