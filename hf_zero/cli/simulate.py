"""``hf-zero simulate``: a training step of one rank of any world, without its memory and without
the other ranks: bytes by tier and phase, collectives, seconds.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from hf_zero.cli.options import Job, Ranks, expanded, offload_section, parsed
from hf_zero.cli.printing import AsJson, PrintableTable, in_units, print_json, print_table
from hf_zero.logging import JsonObject, parse_rate, rate_in_units

if TYPE_CHECKING:
    from torch.nn import Module

    from hf_zero.planning.simulation import Machine, Measured, Simulation

NAMES = {"memory_rate": "memory", "node_link": "node"}  # fields of Machine with other names


@dataclass(frozen=True)
class Rates:
    """The machine that a step is simulated on; None: the machine of the ZeRO paper."""

    flops: Annotated[
        float | None,
        typer.Option(min=1, help="FLOP/s that a rank reaches in matrix products, 312e12 say."),
    ] = None
    memory_rate: Annotated[
        str | None, typer.Option(help="Bits a second of its memory: 7.2Tbit.")
    ] = None
    node_link: Annotated[
        str | None, typer.Option(help="Speed of a rank's link within its host: 1.2Tbit.")
    ] = None
    network: Annotated[
        str | None, typer.Option(help="Speed of a host's links to the others: 800Gbit.")
    ] = None
    host_link: Annotated[
        str | None,
        typer.Option(help="Speed between a rank's device and its host's memory: 200Gbit."),
    ] = None
    host_memory: Annotated[
        str | None,
        typer.Option(help="Bits a second of a host's memory, for all its ranks: 1.6Tbit."),
    ] = None
    disk: Annotated[
        str | None, typer.Option(help="Bits a second of a host's disks, for all its ranks: 80Gbit.")
    ] = None
    ranks_per_host: Annotated[int | None, typer.Option(min=1, help="Ranks of a host.")] = None
    latency: Annotated[
        float | None, typer.Option(min=0, help="Seconds of a message by doubling of its ranks.")
    ] = None
    store_rate: Annotated[
        float | None, typer.Option(min=1, help="Requests a second that the job's store answers.")
    ] = None

    def machine(self) -> Machine:
        """Return the machine with these rates. Raises ConfigError, which names the option, for a
        speed that cannot be read.
        """
        from hf_zero.planning.simulation import Machine

        values: JsonObject = {
            "flops": self.flops,
            "latency": self.latency,
            "store": self.store_rate,
            "ranks_per_host": self.ranks_per_host,
        }
        for name in ("memory_rate", "node_link", "network", "host_link", "host_memory", "disk"):
            if (text := getattr(self, name)) is not None:
                bits = parsed(f"--{name.replace('_', '-')}", parse_rate, text)
                values[NAMES.get(name, name)] = bits / 8
        values = {name: value for name, value in values.items() if value is not None}
        return Machine(**values, sources=dict.fromkeys(values, "given"))


@expanded
def simulate(
    job: Job,
    rates: Rates,
    ranks: Ranks = 1,
    stage: Annotated[
        int | None, typer.Option(help="0 to 3; default: that of --config, else 3, and 1 with --pp.")
    ] = None,
    replicas: Annotated[
        int | None, typer.Option(min=1, help="Copies of the shards: ranks / replicas share one.")
    ] = None,
    micro_batch: Annotated[
        int | None, typer.Option(min=1, help="Sequences of a micro-batch.")
    ] = None,
    micro_batches: Annotated[
        int | None, typer.Option(min=1, help="Micro-batches of a step: gradient accumulation.")
    ] = None,
    seq: Annotated[int, typer.Option("--seq", min=1, help="Tokens of a sequence.")] = 1024,
    rank: Annotated[int, typer.Option(min=0, help="The rank that is simulated.")] = 0,
    cpu: Annotated[bool, typer.Option("--cpu", help="Ranks compute on CPUs, over gloo.")] = False,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure",
            help="Measure the rates on the ranks at hand first: those of torchrun --no-python, or "
            "this process alone, which has no links.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Simulate a training step of one rank of any number of ranks: the engine's own plan, hooks and
    schedule run without memory and without the other ranks. Shows the most bytes in each tier and
    when, the collectives with their bytes and groups, and the seconds on a machine with the given
    rates; of a pipeline, each stage.

    Example: hf-zero simulate --params 7.5e9 --ranks 64 --stage 3
    """
    import torch

    from hf_zero.distributed.process_group import default_device
    from hf_zero.planning.simulation import simulate as compute
    from hf_zero.planning.simulation.simulating import module_of

    machine = rates.machine()
    name, model = module_of(job.model, job.params)
    measured = None
    if measure:
        cpu = cpu or default_device().type == "cpu"
        measured = _measured(model, job, ranks, micro_batch, seq)
        if measured is None:
            return
    simulation = compute(
        model,
        ranks,
        stage,
        cast("Any", job.precision),  # the function checks it
        job.optimizer,
        offload_optimizer=offload_section(job.offload_optimizer),
        offload_param=offload_section(job.offload_param),
        replicas=replicas,
        micro_batch=micro_batch,
        micro_batches=micro_batches,
        sequence_length=seq,
        rank=rank,
        device=torch.device("cpu") if cpu else None,
        machine=machine,
        measured=measured,
        **job.job_options(),
    )
    simulation = replace(simulation, model=name)
    if as_json:
        print_json(simulation.to_dict())
        return
    print_table(_bytes(simulation))
    if simulation.stages:
        print_table(_stages(simulation))
    print_table(_collectives(simulation))
    print_table(_seconds(simulation))
    print_table(_store(simulation))


def _measured(
    model: Module, job: Job, ranks: int, micro_batch: int | None, length: int
) -> Measured | None:
    """Return the rates of the ranks at hand for ``model``, in the precision and with the sequences
    of a micro-batch that are simulated; None on all ranks but the first, which have nothing else to
    do.
    """
    from hf_zero.distributed.init import init_distributed
    from hf_zero.distributed.process_group import destroy_process_group, get_rank
    from hf_zero.planning.estimate_job import asked_for
    from hf_zero.planning.simulation import measure
    from hf_zero.planning.simulation.measuring import refuse_parts
    from hf_zero.zero.layout.precision import COMPUTE

    precision = cast("Any", job.precision)  # the function checks it
    asked = asked_for(ranks, precision, job.optimizer, **job.job_options())
    refuse_parts(asked.dims)
    dtype = COMPUTE[asked.settings.precision]
    rows = micro_batch or asked.settings.train_micro_batch_size_per_gpu or 1
    init_distributed()
    try:
        measured = measure(model, rows, length, dtype)
        return measured if get_rank() == 0 else None
    finally:
        destroy_process_group()


def _bytes(run: Simulation) -> PrintableTable:
    bits = 32 if run.precision == "fp32" else 16
    table = PrintableTable(
        title=f"{run.model}: {run.parameters:,} parameters, rank {run.rank} of "
        f"{run.ranks}, stage {run.stage}, {run.precision}, {run.optimizer}; model states "
        f"{in_units(run.model_state_bytes)}",
        caption=f"Model states: parameters and gradients in {bits} bits and the optimizer's state, "
        "without offload. Bytes of the device include state as configured, gathered "
        "units, activations, gradients and messages.",
    )
    for name in ("tier", "most", "when"):
        table.add_column(name, justify="left" if name == "when" else "right")
    for phase in run.phases:
        table.add_row("device", in_units(phase.device), phase.at)
    for tier in ("ram", "disk"):
        if run.peak_bytes[tier]:
            table.add_row(tier, in_units(run.peak_bytes[tier]), "")
    return table


def _stages(run: Simulation) -> PrintableTable:
    table = PrintableTable(
        title="stages of the pipeline, by a rank of each",
        caption="Sent in a step: by this rank, to neighbors and in collectives. Waiting: for the "
        "other stages and for messages.",
    )
    peaks = [stage.peak_bytes for stage in run.stages]
    tiers = [tier for tier in ("ram", "disk") if any(peak[tier] for peak in peaks)]
    for name in ("stage", "rank", "parameters", "device", *tiers, "sent", "computing", "waiting"):
        table.add_column(name, justify="right")
    for stage in run.stages:
        spent = stage.seconds
        table.add_row(
            str(stage.stage),
            str(stage.rank),
            f"{stage.parameters:,}",
            *(in_units(stage.peak_bytes[tier]) for tier in ("device", *tiers)),
            in_units(stage.wire_bytes),
            *(f"{part:.4g} s" for part in (spent.compute, spent.exposed)),
        )
    return table


def _collectives(run: Simulation) -> PrintableTable:
    table = PrintableTable(
        title="collectives of a step",
        caption="Sent: bytes that this rank sends, assuming ring algorithms.",
        show_footer=True,
    )
    counts, nbytes, sent = (Counter[tuple[str, str, str]]() for _ in range(3))
    for collective in run.collectives:
        key = collective.phase, collective.operation, collective.group
        counts[key] += collective.count
        nbytes[key] += collective.nbytes
        sent[key] += collective.wire_bytes
    for name in ("phase", "operation", "group"):
        table.add_column(name)
    for name, footer in (("number", ""), ("bytes", ""), ("sent", in_units(sent.total()))):
        table.add_column(name, footer, justify="right")
    for key, count in counts.items():
        table.add_row(*key, str(count), in_units(nbytes[key]), in_units(sent[key]))
    return table


def _seconds(run: Simulation) -> PrintableTable:
    machine, spent = run.machine, run.seconds
    rates = {
        "flops": f"{machine.flops / 1e12:.3g} TFLOP/s",
        "memory": f"memory {rate_in_units(8 * machine.memory)}",
        "node": f"link within a host {rate_in_units(8 * machine.node)}",
        "network": f"of a host {rate_in_units(8 * machine.network)}",
        "ranks_per_host": f"{machine.ranks_per_host} ranks a host",
    }
    if run.peak_bytes["ram"] or run.peak_bytes["disk"]:
        rates |= {
            "host_link": f"link to the host {rate_in_units(8 * machine.host_link)}",
            "host_memory": f"memory of a host {rate_in_units(8 * machine.host_memory)}",
            "disk": f"disks of a host {rate_in_units(8 * machine.disk)}",
        }
    assumed = [text for name, text in rates.items() if name not in machine.sources]
    measured = [text for name, text in rates.items() if name in machine.sources]
    caption = f"Given or measured: {', '.join(measured)}. " if measured else ""
    if assumed:
        caption += (
            f"Assumed: {', '.join(assumed)}, the values of a DGX-2, the machine of the ZeRO paper."
        )
    table = PrintableTable(
        title=f"seconds of a step of {run.micro_batches} x {run.micro_batch} sequences of "
        f"{run.sequence_length} tokens",
        caption=caption,
    )
    for name in ("step", "computing", "waiting for messages", "messages", "FLOP/s reached"):
        table.add_column(name, justify="right")
    table.add_row(
        *(f"{value:.4g}" for value in (spent.step, spent.compute, spent.exposed, spent.messages)),
        f"{run.flops / spent.step / 1e12:.3g} T",
    )
    return table


def _store(run: Simulation) -> PrintableTable:
    load, rate = run.store, run.machine.store
    source = run.machine.sources.get("store", "")
    caption = "--store-rate gives its seconds."
    if rate:
        caption = f"At {rate:,.0f} requests a second ({source})."
    table = PrintableTable(
        title=f"requests of {run.ranks} ranks to the job's store",
        caption=f"{caption} Requests of launchers and of waits come on top.",
    )
    for name in ("of", "requests", "seconds"):
        table.add_column(name, justify="left" if name == "of" else "right")
    for name, number, seconds in (
        ("start", load.start, load.start_seconds),
        ("restart with a load", load.restart, load.restart_seconds),
        ("background save", load.save, load.save_seconds),
    ):
        table.add_row(name, f"{number:,}", "" if seconds is None else f"{seconds:.3g}")
    return table
