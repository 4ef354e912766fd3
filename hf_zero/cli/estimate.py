"""``hf-zero estimate``: bytes of training state per rank, stage and tier, and the configuration
that fits a machine; with ``--seq`` activations by sequence length, with ``--link`` bytes and
seconds of a step on a link, dense and compressed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from hf_zero.cli.options import Job, Ranks, expanded, offload_section, refuse
from hf_zero.cli.printing import AsJson, PrintableTable, in_units, print_json, print_table
from hf_zero.config.memory import MemorySection
from hf_zero.errors import ConfigError
from hf_zero.logging import JsonObject, counted, parse_rate, parse_size, rate_in_units

if TYPE_CHECKING:
    from torch.nn import Module

    from hf_zero.device.free_memory import FreeBytes
    from hf_zero.planning.activation_memory import LengthEstimate
    from hf_zero.planning.estimate import MemoryEstimate, Proposal
    from hf_zero.planning.traffic import Traffic

NOTHING_FITS = 1


@dataclass(frozen=True)
class FreeMemory:
    """The memory of the machine that ``--fit`` proposes a configuration for."""

    device_memory: Annotated[
        str | None,
        typer.Option(help="For --fit: free memory of a GPU, as 80GB. Default: this machine's."),
    ] = None
    ram: Annotated[
        str | None,
        typer.Option(help="For --fit: free memory of a host, as 512GiB. Default: this machine's."),
    ] = None
    disk: Annotated[
        list[str] | None,
        typer.Option(help="For --fit: a folder on an NVMe disk that may be used. Repeatable."),
    ] = None

    def on_rank(self, ranks_per_host: int) -> FreeBytes:
        """Return the free bytes for each of the ranks that share a host."""
        import torch

        from hf_zero.device import kinds
        from hf_zero.device.free_memory import measure, nearest

        for path in self.disk or ():
            if not (existing := nearest(path)).is_dir():
                raise ConfigError(
                    f"--disk {path}: {existing} is no folder; pass one on an NVMe disk"
                )
        device = torch.device(kinds.accelerator() or "cpu")
        free = measure(device, [os.path.abspath(path) for path in self.disk or ()], ranks_per_host)
        if self.device_memory is not None:
            nbytes = _memory("--device-memory", self.device_memory)
            free = replace(free, device=nbytes, host_device=False)
        if self.ram is not None:
            nbytes = _memory("--ram", self.ram) // ranks_per_host
            free = replace(free, ram=nbytes, limited_by="--ram")
        return free


# the stage that a file names, and the file
Own = tuple[int, str] | None
# a way of sending, its seconds on the link, the speed in bits per second below which it pays
Row = tuple["Traffic", float, float | None]


@expanded
def estimate(
    ranks: Ranks,
    job: Job,
    free: FreeMemory,
    stage: Annotated[int | None, typer.Option(help="Only this stage, 0 to 3.")] = None,
    moments: Annotated[
        str | None,
        typer.Option(
            help="What moments are stored in where the optimizer is offloaded: fp32, bf16, int8."
        ),
    ] = None,
    fit: Annotated[
        bool,
        typer.Option(
            "--fit",
            help="Propose the fastest configuration that fits this machine, or the one described.",
        ),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            "-o", "--out", help="For --fit: a file to write, .json, or .yaml; it must not exist."
        ),
    ] = None,
    ranks_per_host: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="For --fit, and for checkpoints in memory: ranks that share a host. Default: as "
            "many as it has GPUs, else all.",
        ),
    ] = None,
    link: Annotated[
        str | None,
        typer.Option(
            help="What a rank's link to others carries, as 1Gbit: seconds a step spends on it, "
            "dense and in few bits."
        ),
    ] = None,
    seq: Annotated[
        list[int] | None,
        typer.Option(
            "--seq",
            min=1,
            help="Tokens of a sequence whose activations are counted. Repeatable; with --fit one.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Estimate the bytes of training state per rank at each ZeRO stage, without loading the model;
    with --seq, also those of activations; with --fit, propose a configuration that fits; with
    --link, show whether compression pays.

    Example: hf-zero estimate meta-llama/Llama-3.1-8B --ranks 1 --fit --device-memory 80GB
    """
    from hf_zero.config import ZeroConfig
    from hf_zero.config.files import refuse_existing
    from hf_zero.device import kinds
    from hf_zero.distributed.fake_world import ranks_of_a_host
    from hf_zero.planning.estimate import estimate as compute

    model = _model(job)
    per_host = ranks_per_host or min(ranks, kinds.device_count() or ranks)
    if not seq:
        refuse({"--sp": job.sp, "--cp": job.cp}, "it is about sequences; add --seq")
    if fit:
        _refuse_beside_fit(job, moments, link)
        if out is not None:
            refuse_existing(out)
        _print_proposal(_propose(model, ranks, per_host, job, free, stage, seq), as_json, out)
        return
    _refuse_without_fit(free, out)
    if link and job.pp > 1:
        refuse({"--link": link}, "it is not known of pipelines; leave it or --pp out")
    config = ZeroConfig.coerce(job.config, allow_auto=True) if job.config else None
    if config is None or not config.section_of(MemorySection).every:
        why = "it describes a machine for --fit, or for checkpoint.memory; leave it out"
        refuse({"--ranks-per-host": ranks_per_host}, why)
    options = job.job_options() | {"config": config}
    with ranks_of_a_host(per_host):
        result = compute(
            model,
            ranks,
            cast("Any", job.precision),  # the function checks it
            job.optimizer,
            stage,
            offload_optimizer=offload_section(job.offload_optimizer, moments),
            offload_param=offload_section(job.offload_param),
            sequence_lengths=seq or (),
            **options,
        )
    rates = (
        link_rows(
            model, ranks, stage, link, precision=job.precision, optimizer=job.optimizer, **options
        )
        if link
        else {}
    )
    if as_json:
        print_json(result.to_dict() | ({"link": link_json(rates)} if link else {}))
        return
    marked = (config.stage, str(job.config)) if config is not None and stage is None else None
    _print_estimate(result, per_host, marked)
    if link:
        print_table(link_table(rates, ranks, link))


def _refuse_beside_fit(job: Job, moments: str | None, link: str | None) -> None:
    refuse({"--link": link}, "it goes with the estimate; leave --fit out")
    placed = {
        "--offload-optimizer": job.offload_optimizer,
        "--offload-param": job.offload_param,
        "--moments": moments,
    }
    refuse(placed, "--fit chooses it; leave it out, or put it into --config")


def _refuse_without_fit(free: FreeMemory, out: Path | None) -> None:
    refuse({"--out": out and str(out)}, "it is for what --fit proposes; add --fit")
    described = {"--device-memory": free.device_memory, "--ram": free.ram, "--disk": free.disk}
    refuse(described, "it describes a machine for --fit; add --fit")


def _propose(
    model: Module,
    ranks: int,
    per_host: int,
    job: Job,
    free: FreeMemory,
    stage: int | None,
    seq: Sequence[int] | None,
) -> Proposal:
    """Return the configuration that fits the memory ``free``. Raises ConfigError for sequences of
    several lengths.
    """
    from hf_zero.distributed.fake_world import ranks_of_a_host
    from hf_zero.planning.estimate import propose

    nbytes = free.on_rank(per_host)
    if seq and len(seq) > 1:
        raise ConfigError(f"--seq {seq}: --fit is for sequences of one length; name the longest")
    length, precision = seq[0] if seq else None, cast("Any", job.precision)
    with ranks_of_a_host(per_host):
        return propose(
            model, ranks, nbytes, precision, job.optimizer, stage,
            sequence_length=length, **job.job_options(),
        )  # fmt: skip


def _print_estimate(result: MemoryEstimate, per_host: int, marked: Own) -> None:
    if result.offload_optimizer.on or result.offload_param.on:
        print_table(_tiers(result, marked))
    print_table(_table(result, per_host, marked))
    if result.lengths:
        first = result.lengths[0]
        print_table(lengths_table(result.lengths, first.length // first.tokens))


def _model(job: Job) -> Any:
    """Return what describes the model: its name, or a module of the size ``params``."""
    if (job.model is None) == (job.params is None):
        raise ConfigError(
            f"{'a model and --params are' if job.model else 'no model is'} given; pass a model, or "
            "--params 7B for a dense decoder of that size"
        )
    if job.params is None:
        return job.model
    from hf_zero.integrations.transformers.meta_model import sized_model

    return sized_model(job.params)


def _memory(option: str, text: str) -> int:
    """Parse the memory that ``option`` gives. Raises ConfigError for a number without a unit."""
    size = parse_size(text)
    if text.strip().isdecimal() and size < 1e6:
        raise ConfigError(f"{option} {text} is {size} bytes; write the unit: {option} {text}GB")
    return size


def _footnote(configured: Own) -> str:
    return f" *: the stage of {configured[1]}." if configured is not None else ""


def _mark(stage: int, configured: Own) -> str:
    return f"*{stage}" if configured is not None and configured[0] == stage else str(stage)


def _table(result: MemoryEstimate, per_host: int, configured: Own) -> PrintableTable:
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
    table.add_column("stage", justify="right")
    for name in (
        "parameters",
        "gradients",
        "optimizer",
        "state",
        "gradient buffers",
        "largest unit",
        "communicators",
        *(["checkpoints in memory"] if in_memory else []),
        *(["pipeline stage"] if result.pipeline > 1 else []),
    ):
        table.add_column(name, justify="right")
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


def _tiers(result: MemoryEstimate, configured: Own) -> PrintableTable:
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


def _print_proposal(proposal: Proposal, as_json: bool, out: Path | None) -> None:
    from hf_zero.config.files import dump, write_new

    if out is not None and proposal.config is not None:
        write_new(out, dump(proposal.config, out.suffix))
    if as_json:
        print_json(proposal.to_dict())
    else:
        print_table(_tried(proposal))
        if proposal.config is None:
            more = "use more ranks, or name a folder for files with --disk"
            if proposal.free.host_device:
                more = (
                    "this machine has no GPU: describe one with --device-memory 80GB and its host "
                    f"with --ram 512GB, {more}"
                )
            print(f"nothing that was tried fits; {more}")
        else:
            print(json.dumps(proposal.config, indent=2))
            if proposal.cost:
                print(proposal.cost)
            if proposal.cut:
                print(f"after model = {proposal.cut}")
            if out is not None:
                print(
                    f"written: {out}, with DeepSpeed's names of keys; pass it as config= to "
                    "hf_zero.initialize or zero_config= to hf_zero.TrainingArguments "
                    "(accelerate launch takes an Accelerate YAML instead)"
                )
    if proposal.config is None:
        raise typer.Exit(NOTHING_FITS)


def _margin(proposal: Proposal) -> str:
    margin = f"{proposal.fit.margin:.0%} of the device is left"
    if any(trial.activations.most for trial in proposal.fit.trials):
        return f"Activations are counted; {margin} to what is not."
    return f"Activations are not known: {margin} to them."


def _tried(plan: Proposal) -> PrintableTable:
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
    model: Module, ranks: int, stage: int | None, link: str, **options: Any
) -> dict[int, list[Row]]:
    """Return the ways of sending of each stage, the dense one first. ``options``: further arguments
    of :func:`hf_zero.planning.estimate.traffic`. Raises ConfigError for an invalid ``link`` speed.
    """
    rate = parse_rate(link)
    from hf_zero.planning.estimate import traffic

    by_stage = traffic(model, ranks, stage=stage, **options)
    return {
        number: [
            (way, way.seconds(rate), None if way is ways[0] else way.pays_below(ways[0]))
            for way in ways
        ]
        for number, ways in by_stage.items()
    }


def link_json(rows: dict[int, list[Row]]) -> list[JsonObject]:
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


def link_table(rows: dict[int, list[Row]], ranks: int, link: str) -> PrintableTable:
    table = PrintableTable(
        title=f"{ranks} ranks, each with a link of {rate_in_units(parse_rate(link))}: a step sends",
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
