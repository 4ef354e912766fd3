"""``hf_zero.estimate``: bytes of training state per rank, computed from layouts without memory for
the model.

The model is cut into units and laid out, with padding, as the engine does it; bytes follow from the
policy table of the stages and, tier by tier, from :mod:`hf_zero.planning`. Activations depend on
the batch: they are counted for given sequence lengths (:mod:`hf_zero.planning.activation_memory`).
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from hf_zero.config import OffloadOptimizer, OffloadParam, OptimizerConfig, ZeroConfig
from hf_zero.config.parallelism import AUTOEP_SIZE, TENSOR_SIZE
from hf_zero.device import kinds
from hf_zero.device.free_memory import Free
from hf_zero.distributed.parallel_dims import ParallelDims, check_size
from hf_zero.errors import ConfigError
from hf_zero.parallel.expert.model import cuts_of_experts, experts_of_layers
from hf_zero.parallel.sequence.attention import KEY as SEQUENCE
from hf_zero.parallel.tensor import cuts_of
from hf_zero.planning import ACTIVATIONS, Fit, FlatParameters, MemoryPlan, fit, groups_of, needs
from hf_zero.planning.activation_memory import LengthEstimate, length_estimate
from hf_zero.planning.communicators import communicators
from hf_zero.planning.estimated import MemoryEstimate, Proposal, StageEstimate, Tiers, in_places
from hf_zero.planning.fit import ActivationWay
from hf_zero.planning.moments import moments_of
from hf_zero.planning.needs import gradient_buffers, unit_bytes
from hf_zero.planning.traffic import Traffic, codings
from hf_zero.planning.traffic import traffic as ways
from hf_zero.planning.verdict import BESIDE_ACTIVATIONS
from hf_zero.zero.layout.sharding import Sharding
from hf_zero.zero.layout.stage_policy import POLICIES
from hf_zero.zero.layout.wrap import find_units, persistent_names

__all__ = [
    "MemoryEstimate",
    "Proposal",
    "StageEstimate",
    "Tiers",
    "estimate",
    "moments_of",
    "propose",
    "traffic",
]

PRECISIONS = {
    "fp32": "fp32",
    "float32": "fp32",
    "no": "fp32",
    "bf16": "bf16",
    "bfloat16": "bf16",
    "fp16": "fp16",
    "float16": "fp16",
}


def estimate(
    model: Any,
    ranks: int,
    precision: str = "bf16",
    optimizer: str | OptimizerConfig = "AdamW",
    stage: int | None = None,
    *,
    config: Any = None,
    offload_optimizer: str | OffloadOptimizer | Mapping[str, Any] | None = None,
    offload_param: str | OffloadParam | Mapping[str, Any] | None = None,
    tensor_parallel: int | None = None,
    expert_parallel: int | None = None,
    pipeline_parallel: int = 1,
    sequence_lengths: Sequence[int] = (),
    sequence_parallel: int | None = None,
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
        config: whatever ``ZeroConfig.coerce`` reads; its precision, optimizer, replicas,
            accumulation and offload override the arguments.
        offload_optimizer, offload_param: sections as in a ``ZeroConfig``; they override those of
            ``config``. Parameters are offloaded at stage 3 only.
        tensor_parallel, expert_parallel: ranks that share each layer, and ranks that hold one set
            of a mixture's experts together; None: as in ``config``.
        pipeline_parallel: stages into which ``hf_zero.pipeline_stages`` would cut the model; only
            ZeRO stages 0 and 1 then exist.
        sequence_lengths: tokens of the sequences whose activations are counted, for a language
            model; it runs without memory, once for each way of saving activations.
        sequence_parallel: ranks that share a sequence; None: as in ``config``.

    Raises:
        ConfigError: an invalid model, precision, optimizer, stage or number of ranks; ranks, heads
            or lengths that do not divide.
    """
    wanted, settings = _settings(
        ranks, precision, optimizer, config, pipeline_parallel, sequence_parallel
    )
    plan = _plan(settings, wanted, offload_optimizer, offload_param, ranks, pipeline_parallel)
    plan = _split(plan, tensor_parallel, expert_parallel)
    stages = _stages(plan, stage, list(plan.stages))
    name, module, groups, units = _counted(model, plan)
    plan = _with_layers(plan, module)
    parts = _of_stages(module, groups, plan)
    counts: Counter[bool] = Counter()
    for group in groups:
        counts[group.trainable] += group.numel * plan.apart(group)
    return MemoryEstimate(
        model=name,
        total_parameters=counts[True] + counts[False],
        trainable_parameters=counts[True],
        units=units,
        ranks=ranks,
        replicas=plan.replicas,
        precision=plan.precision,
        optimizer=wanted.type,
        moments=plan.moments,
        stages=tuple(_largest_row(parts, replace(plan, stage=each)) for each in stages),
        offload_optimizer=plan.optimizer,
        offload_param=plan.param,
        tensor=plan.tensor,
        expert=plan.expert,
        pipeline=plan.pipeline,
        lengths=_lengths(model, sequence_lengths, settings, plan),
    )


def traffic(
    model: Any,
    ranks: int,
    precision: str = "bf16",
    stage: int | None = None,
    *,
    config: Any = None,
    device: torch.device | None = None,
    tensor_parallel: int | None = None,
    expert_parallel: int | None = None,
) -> dict[int, list[Traffic]]:
    """Return the bytes that a rank sends in a step, dense and compressed, at each stage or at
    ``stage``. Arguments as for :func:`estimate`.

    ``device``: where the time of compression is measured; default: the accelerator of this machine,
    else its CPU.
    """
    wanted, settings = _settings(ranks, precision, "AdamW", config)
    plan = _plan(settings, wanted, None, None, ranks)
    plan = _split(plan, tensor_parallel, expert_parallel)
    _, module, groups, _ = _counted(model, plan)
    plan = _with_layers(plan, module)
    seconds = codings(device or torch.device(kinds.accelerator() or "cpu"))
    stages = [stage] if stage is not None else sorted(POLICIES)
    return {each: ways(groups, replace(plan, stage=each), seconds) for each in stages}


def propose(
    model: Any,
    ranks: int,
    free: Free,
    precision: str = "bf16",
    optimizer: str | OptimizerConfig = "AdamW",
    stage: int | None = None,
    *,
    config: Any = None,
    margin: float | None = None,
    tensor_parallel: int | None = None,
    expert_parallel: int | None = None,
    pipeline_parallel: int = 1,
    sequence_length: int | None = None,
    sequence_parallel: int | None = None,
) -> Proposal:
    """Return the fastest configuration whose state, and activations of sequences of
    ``sequence_length``, fit into ``free``, the bytes of one rank
    (:func:`hf_zero.device.free_memory.measure`).

    ``margin`` is the share of the device that is left free: None means 20 % if activations are not
    known, 10 % if they are. Other arguments as for :func:`estimate`. With ``stage`` only that stage
    is tried, with ``config`` its stage and the larger ones, else stages 1 to 3.
    """
    wanted, settings = _settings(
        ranks, precision, optimizer, config, pipeline_parallel, sequence_parallel
    )
    plan = _plan(settings, wanted, None, None, ranks, pipeline_parallel)
    plan = replace(_split(plan, tensor_parallel, expert_parallel), gpu=not free.host_device)
    begins = plan.stage if config is not None else 1
    stages = _stages(plan, stage, list(plan.stages[begins:]))
    name, module, groups, _ = _counted(model, plan)
    spread = _with_layers(plan, module)
    largest = max(
        _of_stages(module, groups, spread),
        key=lambda part: _row(part, replace(spread, stage=stages[0])).state,
    )
    known = _lengths(model, () if sequence_length is None else (sequence_length,), settings, plan)
    ways = [way for row in known for way in row.ways]
    if margin is None:
        margin = BESIDE_ACTIVATIONS if known else ACTIVATIONS
    found = fit(largest, spread, free, margin, stages, ways or (ActivationWay(),))
    return Proposal(name, _written(config, settings, plan, wanted, found), found, free, _cut(plan))


def _stages(plan: MemoryPlan, stage: int | None, otherwise: list[int]) -> list[int]:
    """Return the ZeRO stages to consider: ``stage``, or ``otherwise``.

    Raises ConfigError for an unknown stage, or one that a pipeline does not have.
    """
    if stage is not None and stage not in POLICIES:
        raise ConfigError(f"stage {stage!r} is unknown; choose one of {sorted(POLICIES)}")
    chosen = otherwise if stage is None else [stage]
    if plan.pipeline > 1 and (not chosen or max(chosen) not in plan.stages):
        raise ConfigError(
            f"a pipeline of {plan.pipeline} stages trains at ZeRO stage 0 or 1, not at "
            f"{plan.stage if stage is None else stage}; leave --stage out, or write stage 1"
        )
    return chosen


def _cut(plan: MemoryPlan) -> str:
    """Return the code that cuts the model into the stages of ``plan``, and its layers before."""
    if plan.pipeline == 1:
        return ""
    model = "model" if plan.tensor == 1 else f"hf_zero.tensor_parallel(model, {plan.tensor})"
    return f"hf_zero.pipeline_stages({model}, {plan.pipeline})"


def _settings(
    ranks: int,
    precision: str,
    optimizer: str | OptimizerConfig,
    config: Any,
    pipeline: int = 1,
    sequence: int | None = None,
) -> tuple[OptimizerConfig, ZeroConfig]:
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise ConfigError(
            f"ranks = {ranks!r} is not a number of ranks; pass an integer of at least 1"
        )
    wanted = optimizer if isinstance(optimizer, OptimizerConfig) else OptimizerConfig(optimizer, {})
    in_a_stage = ParallelDims.over(ranks, pipeline=pipeline).in_a_stage
    if config is not None:
        settings = ZeroConfig.coerce(config, allow_auto=True)
    else:
        if precision not in PRECISIONS:
            raise ConfigError(f"precision {precision!r} is unknown; choose one of fp32, bf16, fp16")
        exact = PRECISIONS[precision]
        settings = ZeroConfig(3, bf16=exact == "bf16", fp16=exact == "fp16")
    if sequence is not None:
        settings = settings.override({SEQUENCE: sequence}, "what was asked for")
    if config is not None or sequence is not None:
        settings = settings.resolve(in_a_stage, training=False)
    return settings.optimizer or wanted, settings


def _plan(
    settings: ZeroConfig,
    wanted: OptimizerConfig,
    offload: Any,
    param: Any,
    ranks: int,
    pipeline: int = 1,
) -> MemoryPlan:
    # Validated at stage 3, which allows every offload section; the rows of smaller stages do not
    # offload parameters.
    given = {
        name: section
        for name, section in (("offload_optimizer", offload), ("offload_param", param))
        if section is not None
    }
    sections = ZeroConfig(3, **given)
    plan = MemoryPlan.of(settings, ranks // pipeline, moments=moments_of(wanted))
    return replace(
        plan,
        pipeline=pipeline,
        optimizer=sections.offload_optimizer if offload is not None else plan.optimizer,
        param=sections.offload_param if param is not None else plan.param,
    )


def _lengths(
    model: Any, lengths: Sequence[int], settings: ZeroConfig, plan: MemoryPlan
) -> tuple[LengthEstimate, ...]:
    """Return the activation estimates for sequences of each of ``lengths``.

    Raises ConfigError with tensor, expert or pipeline parallelism.
    """
    if not lengths:
        return ()
    if max(plan.tensor, plan.expert, plan.pipeline) > 1:
        raise ConfigError(
            "activations beside tensor, expert or pipeline parallelism are not known; leave the "
            "lengths of sequences out, or estimate without it, which is the most it can be"
        )
    module, ranks = _open(model)[1], settings.sequence_parallel_size
    return tuple(length_estimate(module, each, ranks, settings, plan.gpu) for each in lengths)


def _split(plan: MemoryPlan, tensor: int | None, expert: int | None) -> MemoryPlan:
    """Return ``plan`` with the given numbers of tensor- and expert-parallel ranks. Raises
    ConfigError for sizes that do not divide the ranks.
    """
    for size, asked in ((tensor, TENSOR_SIZE), (expert, AUTOEP_SIZE)):
        if size is not None:
            check_size(size, asked)
    plan = replace(plan, tensor=tensor or plan.tensor, expert=expert or plan.expert)
    ParallelDims.over(plan.ranks, tensor=plan.tensor, expert=plan.expert)
    if plan.expert > 1 < plan.pipeline:
        raise ConfigError(
            f"experts over {plan.expert} ranks in a pipeline of {plan.pipeline} stages are not "
            "built; leave --pp or --ep out"
        )
    return plan


def _counted(model: Any, plan: MemoryPlan) -> tuple[str, nn.Module, list[FlatParameters], int]:
    name, module = _open(model)
    specs, _ = find_units(module, plan.granularity)
    persistent = persistent_names(module, *plan.persistence)
    cuts = cuts_of(module, plan.tensor)
    if plan.expert > 1:
        cuts = {**cuts, **cuts_of_experts(module, 0, plan.expert, cuts)}
    cuts = {**cuts, **dict.fromkeys(experts_of_layers(module), Sharding(("expert",)))}
    return name, module, groups_of(specs, module, plan.precision, persistent, cuts), len(specs)


def _with_layers(plan: MemoryPlan, model: nn.Module) -> MemoryPlan:
    """Return ``plan`` with the expert-parallel size that layers of ``model`` itself have."""
    sizes = experts_of_layers(model).values()
    return _split(plan, None, max(sizes)) if sizes else plan


def _of_stages(
    model: nn.Module, groups: Sequence[FlatParameters], plan: MemoryPlan
) -> list[list[FlatParameters]]:
    """Return the part of ``groups`` that each pipeline stage holds."""
    if plan.pipeline == 1:
        return [list(groups)]
    from hf_zero.integrations.transformers.pipeline_stages import names_of_stages

    return [
        [
            replace(group, shapes=kept)
            for group in groups
            if (kept := tuple(shape for shape in group.shapes if shape[0] in names))
        ]
        for names in names_of_stages(model, plan.pipeline)
    ]


def _largest_row(parts: Sequence[Sequence[FlatParameters]], plan: MemoryPlan) -> StageEstimate:
    """Return the row of the pipeline stage with the most state."""
    rows = [replace(_row(part, plan), pipeline_stage=each) for each, part in enumerate(parts)]
    return max(rows, key=lambda row: row.state)


def _open(model: Any) -> tuple[str, nn.Module]:
    if isinstance(model, nn.Module):
        return type(model).__name__, model
    from hf_zero.integrations.transformers.meta_model import build_on_meta

    module = build_on_meta(model)
    return os.fspath(model) if isinstance(model, (str, os.PathLike)) else type(
        module
    ).__name__, module


def _row(groups: Sequence[FlatParameters], plan: MemoryPlan) -> StageEstimate:
    if plan.stage < 3:
        plan = replace(plan, param=OffloadParam())
    plain = plan.on_device()
    sums: Counter[str] = Counter()
    for group in plan.flats_of(groups):
        policy, shards = plan.policy_of(group), plan.shards_of(group)
        layout = group.layout(shards if group.trainable else policy.parameter_shards(shards))
        kept = {"gradient": _name(plan.accumulation_dtype)} if plan.accumulation_dtype else {}
        price = policy.bytes_per_parameter(
            layout.shards, str(group.dtype).removeprefix("torch."), plan.moments, **kept
        )
        for what in (
            ("parameters", "gradients", "optimizer") if group.trainable else ("parameters",)
        ):
            sums[what] += round(price[what] * layout.padded)
        sums["gradients"] += plan.error_bytes(group) if group.trainable else 0
        sums["parameters"] += plan.secondary_bytes(group, layout.padded)
        sums["parameters"] += plan.rounded_bytes(group, layout.padded)
    largest, size = max(unit_bytes(groups, plan).items(), key=lambda item: item[1], default=("", 0))
    return StageEstimate(
        plan.stage,
        sums["parameters"],
        sums["gradients"],
        sums["optimizer"],
        size,
        largest,
        gradient_buffers(groups, plain),
        Tiers(**in_places(needs(groups, plan))),
        sum(communicators((group.axes for group in groups), plan).values()),
    )


def _name(dtype: str) -> str:
    return {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}[dtype]


def _written(
    config: Any, settings: ZeroConfig, plan: MemoryPlan, wanted: OptimizerConfig, found: Fit
) -> dict[str, Any] | None:
    """Return the given configuration, or one made of the arguments, with the settings that fit."""
    if found.chosen is None:
        return None
    if config is not None:
        written: dict[str, Any] = ZeroConfig.coerce(config, allow_auto=True).to_dict()
    else:
        written = {"optimizer": {"type": wanted.type, "params": dict(wanted.params)}}
        if plan.precision != "fp32":
            written[plan.precision] = {"enabled": True}
    if plan.tensor > 1 and plan.pipeline == 1:  # with a pipeline, `_cut` cuts the layers
        written["tensor_parallel"] = {"autotp_size": plan.tensor}
    if settings.sequence_parallel_size > 1:
        written[SEQUENCE] = settings.sequence_parallel_size
    if plan.expert > 1:
        written["expert_parallel"] = {"enabled": True, "autoep_size": plan.expert}
    kept = {
        key: value
        for key, value in written.get("zero_optimization", {}).items()
        if key not in ("offload_optimizer", "offload_param")
    }
    chosen = found.chosen.to_config()
    zero = {**kept, **chosen["zero_optimization"]}
    return {**written, **chosen, "zero_optimization": zero}
