"""``hf-zero estimate``: bytes of training state per rank, stage and tier, and the configuration
that fits a machine; with ``--seq`` activations by sequence length, with ``--link`` bytes and
seconds of a step on a link, dense and compressed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from hf_zero.cli.estimate_tables import (
    ConfiguredStage,
    WayOnLink,
    lengths_table,
    link_json,
    link_rows,
    link_table,
    state_table,
    tiers_table,
    trials_table,
)
from hf_zero.cli.options import Job, Ranks, expanded, offload_section, parsed, refuse, refuse_out
from hf_zero.cli.printing import AsJson, print_json, print_table
from hf_zero.config.memory import MemorySection
from hf_zero.errors import ConfigError
from hf_zero.logging import parse_rate, parse_size

if TYPE_CHECKING:
    from torch.nn import Module

    from hf_zero.device.free_memory import FreeBytes
    from hf_zero.planning.estimate import MemoryEstimate, Proposal

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
    from hf_zero.device import kinds
    from hf_zero.distributed.fake_world import ranks_of_a_host
    from hf_zero.planning.estimate import estimate as compute

    model = _model(job)
    per_host = min(ranks, ranks_per_host or kinds.device_count() or ranks)
    if not seq:
        refuse({"--sp": job.sp, "--cp": job.cp}, "it is about sequences; add --seq")
    if fit:
        _refuse_beside_fit(job, moments, link)
        if out is not None:
            refuse_out(out)
        _print_proposal(_propose(model, ranks, per_host, job, free, stage, seq), as_json, out)
        return
    _refuse_without_fit(free, out)
    if job.pp > 1:
        refuse({"--link": link}, "it is not known of pipelines; leave it or --pp out")
    rate = None if link is None else parsed("--link", parse_rate, link)
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
    ways: dict[int, list[WayOnLink]] = {}
    if rate is not None:
        ways = link_rows(
            model, ranks, stage, rate, precision=job.precision, optimizer=job.optimizer, **options
        )
    if as_json:
        print_json(result.to_dict() | ({"link": link_json(ways)} if ways else {}))
        return
    marked = (config.stage, str(job.config)) if config is not None and stage is None else None
    _print_estimate(result, per_host, marked)
    if rate is not None:
        print_table(link_table(ways, ranks, rate))


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


def _print_estimate(result: MemoryEstimate, per_host: int, marked: ConfiguredStage) -> None:
    if result.offload_optimizer.on or result.offload_param.on:
        print_table(tiers_table(result, marked))
    print_table(state_table(result, per_host, marked))
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
    """Return the bytes that ``option`` gives. Raises ConfigError for few bytes without a unit."""
    size = int(parsed(option, parse_size, text))
    if text.strip().isdecimal() and size < 1e6:
        raise ConfigError(f"{option} {text} is {size} bytes; write the unit: {option} {text}GB")
    return size


def _print_proposal(proposal: Proposal, as_json: bool, out: Path | None) -> None:
    from hf_zero.config.files import dump, write_new

    if out is not None and proposal.config is not None:
        write_new(out, dump(proposal.config, out.suffix))
    if as_json:
        print_json(proposal.to_dict())
    else:
        print_table(trials_table(proposal))
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
