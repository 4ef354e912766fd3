"""The summary of an engine in rank 0's log: its model, its ranks, and its bytes by tier."""

from __future__ import annotations

from dataclasses import asdict

from hf_zero.config import ZeroConfig
from hf_zero.logging import counted, in_units
from hf_zero.planning.checking import PreflightReport


def summary(report: PreflightReport) -> str:
    """Return what is about to train on the ranks, the bytes of rank 0 that were predicted beside
    those that are free, and the kernels that run.
    """
    plan, settings = report.plan, report.plan.settings
    elements = sum(flat.spec.layout.numel for flat in plan.flats)
    trained = sum(flat.spec.layout.numel for flat in plan.trainable)
    sizes = {
        name: size for name, size in asdict(plan.dims).items() if name not in ("world", "data")
    }
    split = "".join(f", {name} parallel {size}" for name, size in sizes.items() if size > 1)
    part = " on this rank" if split else ""
    trains = "all trainable" if trained == elements else f"{trained:,} trainable"
    if plan.optimizer is None:
        trains = "no optimizer"
    lines = [
        f"{type(plan.model).__name__}: {elements:,} parameters{part}, {trains}, in "
        f"{settings.precision}, in {counted(len(plan.units), 'unit')} of communication; stage "
        f"{settings.stage} on {counted(plan.dims.world, 'rank')} of "
        f"{counted(report.hosts, 'host')}{split}"
    ]
    if plan.optimizer is None:
        lines.append(
            "no optimizer: inference only, step() will raise; to train, pass optimizer= to "
            "hf_zero.initialize or name one in the config"
        )
    if plan.dims.world == 1:
        lines.append(
            "one rank: nothing is sharded; `hf-zero launch train.py` or `torchrun "
            "--nproc_per_node N train.py` starts several"
        )
    for row in report.verdict.rows:
        limit = f" ({row.limited_by})" if row.limited_by else ""
        lines.append(
            f"{row.tier}: {in_units(row.needed)} predicted, excluding activations; "
            f"{in_units(row.free)} free{limit}"
        )
    lines.append(f"kernels: {_kernels(settings)}")
    return "\n  ".join(lines)


def _kernels(settings: ZeroConfig) -> str:
    source = settings.sources["kernels"].removeprefix("computed: ")
    if settings.kernels != "off":
        return f"{', '.join(settings.kernels)} ({source})"
    # Which these are is not asked here: that would start the driver for kernels that are off.
    return f"off ({source}); `kernels: auto` runs those that are fast on this device"
