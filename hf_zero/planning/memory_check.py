"""The check of memory as a feature: before an engine is built, and its summary in rank 0's log once
it is: its model, its ranks, and its bytes by tier.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import asdict

from hf_zero.config import ZeroConfig
from hf_zero.config.summary import as_summary, written
from hf_zero.logging import counted, in_units, logger
from hf_zero.optim.elementwise import updates_in_parts
from hf_zero.planning.checking import PreflightReport, check_on_all_ranks
from hf_zero.zero.feature import Feature
from hf_zero.zero.layout.attributes import attached, elements_of
from hf_zero.zero.layout.engine_plan import EnginePlan
from hf_zero.zero.training_engine import TrainingEngine


class MemoryCheck(Feature):
    """Refuse a plan that does not fit, and log what one that fits takes."""

    def __init__(self, settings: ZeroConfig):
        self._report: PreflightReport | None = None

    def admit(self, plan: EnginePlan, freed: tuple[int, int]) -> bool:
        self._report = check_on_all_ranks(plan, freed)
        return self._report.spare

    def apply(self, engine: TrainingEngine) -> None:
        report, self._report = self._report, None  # an engine that is built anew logs nothing
        if report is not None and engine.global_rank == 0:
            describe(report)


def describe(report: PreflightReport) -> None:
    """Log the summary and the written configuration; warn of what the model or the optimizer leaves
    without effect.
    """
    logger.info("%s\n%s", summary(report), _configuration(report.plan.settings))
    _warn_of_idle_offload(report.plan)
    _warn_of_idle_updates(report.plan)
    if experimental := report.plan.settings.experimental:
        logger.warning(
            "experimental keys, which any version may change: %s (`hf-zero docs compatibility`)",
            ", ".join(experimental),
        )


def summary(report: PreflightReport) -> str:
    """Return what is about to train on the ranks, the bytes predicted for rank 0 and those that are
    free, and the kernels that run.
    """
    plan, settings = report.plan, report.plan.settings
    elements = sum(flat.spec.layout.numel for flat in plan.flats)
    trained = sum(flat.spec.layout.numel for flat in plan.trainable)
    sizes = {
        name: size for name, size in asdict(plan.dims).items() if name not in ("world", "data")
    }
    split = "".join(f", {name} parallel {size}" for name, size in sizes.items() if size > 1)
    part = " on this rank" if split else ""
    trains = "for evaluation, as no optimizer was given"
    if plan.optimizer is not None:
        trains = f"{'all' if trained == elements else f'{trained:,}'} trainable"
    gathered = settings.stage == 3 and not plan.all_persistent
    together = "gathered and reduced" if gathered else "reduced"
    lines = [
        f"{type(plan.model).__name__}: {elements:,} parameters{part}, {trains}, in "
        f"{settings.precision}; stage {settings.stage} on {counted(plan.dims.world, 'rank')} of "
        f"{counted(report.hosts, 'host')}{split}"
    ]
    if plan.dims.world > 1:
        lines.append(f"{counted(len(plan.units), 'unit')} (modules that are {together} together)")
        # without effect, an offload of parameters has a warning of its own
        if plan.all_persistent and not settings.offload_param.on:
            lines.append(
                f"all parameters stay whole on each rank: none has more than {plan.persistence:,} "
                "elements (zero_optimization.stage3_param_persistence_threshold); set it to 0 to "
                "shard them"
            )
    elif settings.stage:
        lines.append(f"nothing is sharded on one rank{_more_ranks()}")
    bf16 = plan.extensions.narrow
    if bf16 is not None:
        parts = [("master weights", bf16.masters), ("moments", bf16.moments)]
        rounds = " and ".join(what for what, narrow in parts if narrow)
        how = ", with Kahan sums" if bf16.kahan else ", rounded stochastically in each step"
        lines.append(f"{rounds} in bf16{how}")
    coded = plan.names_in_8_bits
    if coded:
        slots = [slot for flat in plan.trainable for slot in flat.spec.layout.slots]
        numel = sum(slot.numel for slot in slots if slot.name in coded)
        lines.append(f"moments of {numel:,} parameters in 8 bits, of {trained - numel:,} in fp32")
    lines += _quantized(report)
    for row in report.verdict.rows:
        limit = f" ({row.limited_by})" if row.limited_by else ""
        lines.append(
            f"{row.tier}: {in_units(row.needed)} predicted, excluding activations; "
            f"{in_units(row.free)} free{limit}"
        )
    lines.append(f"kernels: {_kernels(settings)}")
    return "\n  ".join(lines)


def _quantized(report: PreflightReport) -> list[str]:
    """Return a line on the frozen quantized weights: their bits, bytes and sharding, and whether
    the device has room for all of them.
    """
    plan = report.plan
    flats = [flat for flat in plan.flats if flat.spec.raw and not flat.spec.trainable]
    quantized = [(flat, p) for flat in flats for p in flat.parameters.values()]
    weights = Counter[int]()
    for _, parameter in quantized:
        elements = elements_of(parameter)
        if elements:
            weights[round(8 * parameter.nbytes / elements)] += elements
    if not weights:
        return []
    shards = sum(p.nbytes for flat, p in quantized if flat.spec.sharded)
    beside = sum(tensor.nbytes for _, p in quantized for _, tensor in attached(p))
    whole = sum(p.nbytes for flat, p in quantized if not flat.spec.sharded) + beside
    widths = ", ".join(f"{numel:,} in {bits} bits" for bits, numel in sorted(weights.items()))
    places = [(shards, "in shards"), (whole, "whole on each rank")]
    sizes = " and ".join(f"{in_units(nbytes)} {where}" for nbytes, where in places if nbytes)
    line = f"frozen quantized weights: {widths}; with their scales {sizes}"
    more, row = shards - shards // plan.num_shards, report.verdict.rows[0]  # of the device
    if more and row.needed + more <= 0.8 * row.free and not plan.settings.offload_param.on:
        line += (
            f"; stage 2 would keep them whole with {in_units(more)} more on each rank, and gather "
            "none of them"
        )
    return [line]


def _more_ranks() -> str:
    """Return the commands that start several ranks, unless a launcher has started this one."""
    if "RANK" in os.environ:
        return ""
    return "; `hf-zero launch --ranks N SCRIPT` or `torchrun --nproc_per_node N SCRIPT` starts N"


def _kernels(settings: ZeroConfig) -> str:
    source = settings.sources["kernels"].removeprefix("computed: ")
    if settings.kernels != "off":
        return f"{', '.join(settings.kernels)} ({source})"
    # Which these are is not asked here: that would start the driver for kernels that are off.
    return f"off ({source}); `kernels: auto` runs those that are fast on this device"


def _warn_of_idle_offload(plan: EnginePlan) -> None:
    """Warn if all parameters stay on the device although the configuration offloads them."""
    if plan.settings.offload_param.on and plan.all_persistent:
        logger.warning(
            "offload_param moves nothing: each parameter has at most %s elements "
            "(zero_optimization.stage3_param_persistence_threshold) and so stays whole on the "
            "device; set it to 0 to move them, or take offload_param out",
            f"{plan.persistence:,}",
        )


def _warn_of_idle_updates(plan: EnginePlan) -> None:
    """Warn if the optimizer can make no update in the backward."""
    optimizer, asked = plan.optimizer, plan.settings.zero.update_in_backward
    if asked and optimizer is not None and not updates_in_parts(optimizer):
        logger.warning(
            "zero_optimization.update_in_backward has no effect: %s combines numbers of whole "
            "tensors, or may count the steps of a group; use an optimizer that is known to update "
            "each element by itself (AdamW, Lion, SGD), or remove the key",
            type(optimizer).__name__,
        )


def _configuration(config: ZeroConfig) -> str:
    """Return the written values by source, and the keys without effect by reason."""
    rows = [row for row in written(config.explain()) if row.key != "$schema"]
    lines = [f"    {line}" for line in as_summary(rows)]
    head = "  resolved configuration (`hf-zero explain FILE` shows the defaults, too):"
    return "\n".join([head, *lines])
