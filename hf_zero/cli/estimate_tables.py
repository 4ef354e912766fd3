"""Tables of ``hf-zero estimate``: bytes by stage and tier, what was tried for a fit, activations by
length, seconds on a link.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from hf_zero.cli.printing import PrintableTable, in_units
from hf_zero.logging import JsonObject, counted, rate_in_units

if TYPE_CHECKING:
    from torch.nn import Module

    from hf_zero.planning.activation_memory import LengthEstimate
    from hf_zero.planning.estimate import MemoryEstimate, Proposal
    from hf_zero.planning.traffic import Traffic


# the stage that a file names, and the file
ConfiguredStage = tuple[int, str] | None
# a way of sending, its seconds on the link, the speed in bits per second below which it pays
WayOnLink = tuple["Traffic", float, float | None]


def _footnote(configured: ConfiguredStage) -> str:
    return f" *: the stage of {configured[1]}." if configured is not None else ""


def _mark(stage: int, configured: ConfiguredStage) -> str:
    return f"*{stage}" if configured is not None and configured[0] == stage else str(stage)


def state_table(
    result: MemoryEstimate, per_host: int, configured: ConfiguredStage
) -> PrintableTable:
    """Return the bytes of training state by stage, as if nothing were offloaded."""
    frozen = result.total_parameters - result.trainable_parameters
    count = f"{result.total_parameters:,} parameters" + (f" ({frozen:,} frozen)" if frozen else "")
    over = f"{result.ranks} rank{'s' if result.ranks > 1 else ''}" + (
        f" in {result.replicas} replicas" if result.replicas > 1 else ""
    )
    shared = {
        "pipeline stage": result.pipeline, "tensor-parallel rank": result.tensor,
        "expert-parallel rank": result.expert,
    }  # fmt: skip
    over += "".join(f", {count} {what}s" for what, count in shared.items() if count > 1)
    without = ""
    if result.offload_optimizer.on or result.offload_param.on:
        without = ", as if nothing were offloaded"
    caption = (
        "Per rank, without activations. Largest unit: whole while it computes, with a "
        "neighbor or two ahead of it. Communicators: NCCL's, whose memory is not counted; users "
        "report 0.5 to 0.7 GB each on some machines, which was not measured."
    )
    in_memory = any(row.memory_checkpoints for row in result.stages)
    if in_memory:
        hosts = counted(-(-result.ranks // per_host), "host")
        caption += (
            " Checkpoints in memory: two generations with their copies, in RAM, on "
            f"{hosts} of {counted(per_host, 'rank')}."
        )
    caption += _footnote(configured)
    table = PrintableTable(
        title=f"{result.model}: {count}, {over}, {result.precision}, {result.optimizer}{without}",
        caption=caption,
    )
    heads = ["stage", "parameters", "gradients", "optimizer", "state"]
    heads += ["gradient buffers", "largest unit", "communicators"]
    heads += ["checkpoints in memory"] if in_memory else []
    heads += ["pipeline stage"] if result.pipeline > 1 else []
    for head in heads:
        table.add_column(head, justify="right")
    for row in result.stages:
        sizes = (row.parameters, row.gradients, row.optimizer, row.state, row.gradient_buffers)
        table.add_row(
            _mark(row.stage, configured),
            *map(in_units, sizes),
            f"{in_units(row.largest_unit)}: {row.largest_unit_name}"
            if row.largest_unit
            else "none: all stay whole",
            str(row.communicators),
            *([in_units(row.memory_checkpoints)] if in_memory else []),
            *([str(row.pipeline_stage)] if result.pipeline > 1 else []),
        )
    return table


def tiers_table(result: MemoryEstimate, configured: ConfiguredStage) -> PrintableTable:
    """Return the bytes by stage and tier, with offload."""
    table = PrintableTable(
        title=f"{result.model}: with offload: {', '.join(_places(result))}",
        caption="Per rank, without activations. Pinned is part of RAM. Parameters are "
        f"offloaded at stage 3 alone.{_footnote(configured)}",
    )
    for name in ("stage", "device", "RAM", "pinned", "disk"):
        table.add_column(name, justify="right")
    for row in result.stages:
        tiers = row.tiers
        table.add_row(
            _mark(row.stage, configured),
            *map(in_units, (tiers.device, tiers.ram, tiers.pinned, tiers.disk)),
        )
    return table


def _places(result: MemoryEstimate) -> Iterator[str]:
    if result.offload_optimizer.on:
        yield (
            f"optimizer on {result.offload_optimizer.device}, "
            f"{result.offload_optimizer.moments} moments"
        )
    if result.offload_param.on:
        yield f"parameters on {result.offload_param.device}"


def _margin(proposal: Proposal) -> str:
    margin = f"{proposal.fit.margin:.0%} of the device is left"
    if any(trial.activations.most for trial in proposal.fit.trials):
        return f"Activations are counted; {margin} to what is not."
    return f"Activations are not known: {margin} to them."


def trials_table(plan: Proposal) -> PrintableTable:
    """Return the configurations that were tried, with their bytes and what does not fit."""
    free = plan.free
    device = "" if free.host_device else f"device {in_units(free.device)}, "
    disks = "".join(f", {in_units(disk.nbytes)} in {disk.path}" for disk in free.disks)
    table = PrintableTable(
        title=f"{plan.model}: what fits one rank, from the fastest; free for each rank: {device}"
        f"RAM {in_units(free.ram)}{disks}",
        caption=f"{_margin(plan)} A larger batch may need more."
        + " Without a GPU the device is the CPU, and its memory RAM." * free.host_device,
    )
    for name in ("configuration", "device", "RAM", "disk", "fits"):
        table.add_column(name, justify="left" if name in ("configuration", "fits") else "right")
    for trial in plan.fit.trials:
        needs = trial.needs
        table.add_row(
            trial.name,
            *map(in_units, (needs.device_bytes, needs.ram_bytes, needs.disk_bytes)),
            trial.why or "yes",
        )
    return table


def lengths_table(rows: Sequence[LengthEstimate], ranks: int) -> PrintableTable:
    """Return a table with one row per length and one column per way, from the fastest to the
    smallest. ``ranks`` share a sequence.
    """
    shared = f", each shared by {ranks} ranks" if ranks > 1 else ""
    table = PrintableTable(
        title=f"activations of {rows[0].rows} sequence{'s' if rows[0].rows > 1 else ''}{shared}",
        caption="Per rank, at most at once, beside the tables above; in brackets what waits for "
        "the backward. With the kernels of torch.",
    )
    table.add_column("length", justify="right")
    table.add_column("tokens of a rank", justify="right")
    for way in rows[0].ways:
        table.add_column(way.name or "as configured", justify="right")
    for row in rows:
        sizes = (f"{in_units(way.most)} ({in_units(way.kept)})" for way in row.ways)
        table.add_row(f"{row.length:,}", f"{row.tokens:,}", *sizes)
    return table


def link_rows(
    model: Module, ranks: int, stage: int | None, rate: float, **options: Any
) -> dict[int, list[WayOnLink]]:
    """Return the ways of sending of each stage on a link of ``rate`` bits a second, the dense one
    first. ``options``: further arguments of :func:`hf_zero.planning.estimate.traffic`.
    """
    from hf_zero.planning.estimate import traffic

    by_stage = traffic(model, ranks, stage=stage, **options)
    return {
        number: [
            (way, way.seconds(rate), None if way is ways[0] else way.pays_below(ways[0]))
            for way in ways
        ]
        for number, ways in by_stage.items()
    }


def link_json(rows: dict[int, list[WayOnLink]]) -> list[JsonObject]:
    """Return ``rows`` as values for JSON."""
    return [
        {
            "stage": stage,
            "way": way.name,
            "bytes": way.nbytes,
            "seconds": seconds,
            "coding": way.coding,
            "pays_below": below,
        }
        for stage, ways in rows.items()
        for way, seconds, below in ways
    ]


def link_table(rows: dict[int, list[WayOnLink]], ranks: int, rate: float) -> PrintableTable:
    """Return the ways of sending of each stage on links of ``rate`` bits a second."""
    table = PrintableTable(
        title=f"{ranks} ranks, each with a link of {rate_in_units(rate)}: a step sends",
        caption="Per rank and step, if nothing is computed meanwhile; with the seconds that "
        "putting elements into few bits takes on this machine. Below the last column's speed a "
        "step is shorter than a dense one.",
    )
    for name in ("stage", "how", "bytes", "of dense", "seconds", "pays below"):
        table.add_column(name, justify="left" if name == "how" else "right")
    for stage, ways in rows.items():
        dense = ways[0][0].nbytes
        for way, seconds, below in ways:
            table.add_row(
                str(stage),
                way.name,
                in_units(way.nbytes),
                f"{way.nbytes / dense:.2f}" if dense else "",
                f"{seconds:.3g}",
                "" if way is ways[0][0] else "never" if below is None else rate_in_units(below),
            )
    return table
