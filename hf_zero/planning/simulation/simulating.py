"""``hf_zero.simulate``: a training step of one rank of any world, without memory for the model and
without the other ranks.

The plan is that of ``hf_zero.estimate``, of the check before training and of the engine; the step
is recorded from that engine (:mod:`hf_zero.planning.simulation.recording`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from numbers import Integral
from typing import Unpack

import torch
from torch import nn

from hf_zero.config import OffloadOptimizer, OffloadParam, OptimizerConfig, ZeroConfig
from hf_zero.errors import ConfigError
from hf_zero.integrations.transformers.meta_model import sized_model
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
from hf_zero.planning.simulation.figures import (
    Simulation,
    collective_counts,
    figures_of,
    model_states,
    phase_bytes,
)
from hf_zero.planning.simulation.machine import Machine, offload_times, seconds_of_stages
from hf_zero.planning.simulation.measuring import Measured, refuse_parts
from hf_zero.planning.simulation.simulated_engines import record_plans
from hf_zero.planning.simulation.store_load import store_load
from hf_zero.zero.layout.engine_plan import EnginePlan
from hf_zero.zero.layout.planner import replan

LENGTH = 1024  # tokens of a sequence, unless given


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
        refuse_parts(plans[0].dims)
        machine = measured.machine(recordings[0], machine)
    spent = seconds_of_stages(
        {planned.rank: recording for planned, recording in zip(plans, recordings)},
        machine,
        {planned.rank: offload_times(planned, machine) for planned in plans},
    )
    figures = [
        figures_of(planned, recording, spent[planned.rank])
        for planned, recording in zip(plans, recordings)
    ]
    index = next(n for n, planned in enumerate(plans) if planned.rank == options.get("rank", 0))
    planned, recording, figures_here = plans[index], recordings[index], figures[index]
    phases = phase_bytes(planned, recording)
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
        collectives=collective_counts(recording),
        flops=recording.flops,
        seconds=figures_here.seconds,
        machine=machine,
        store=store_load(planned.dims.world, machine.store),
        stages=tuple(figures) if len(plans) > 1 else (),
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
    return settings.placed(stage, *offload_sections(settings, optimizer, parameters))
