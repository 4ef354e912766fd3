"""``hf-zero simulate``: a training step of one rank of any world, without its memory and without
the other ranks: bytes by tier and phase, collectives, seconds.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from hf_zero.cli.estimate import (
    ConfigFile,
    ExpertParallel,
    OffloadOptimizer,
    OffloadParam,
    Optimizer,
    Params,
    Precision,
    Ranks,
    TensorParallel,
    section,
)
from hf_zero.cli.printing import AsJson, PrintableTable, in_units, print_json, print_table
from hf_zero.logging import parse_rate, rate_in_units

if TYPE_CHECKING:
    from hf_zero.planning.simulation import Machine, Measured, Simulation

Model = Annotated[
    str | None,
    typer.Argument(
        help="A model folder, a config.json, or the name of a model in the local "
        "cache or on the hub."
    ),
]
Stage = Annotated[
    int | None,
    typer.Option(help="0 to 3; default: that of --config, else 3, and 1 with --pp."),
]
PipelineParallel = Annotated[
    int,
    typer.Option("--pp", min=1, help="Stages of a pipeline: one rank of each is recorded."),
]
Replicas = Annotated[
    int | None, typer.Option(min=1, help="Copies of the shards: ranks / replicas share one.")
]
SequenceParallel = Annotated[
    int | None, typer.Option("--sp", min=1, help="Ranks that share a sequence.")
]
ContextParallel = Annotated[
    int | None, typer.Option("--cp", min=1, help="Ranks of a ring that share a sequence.")
]
MicroBatch = Annotated[int | None, typer.Option(min=1, help="Sequences of a micro-batch.")]
MicroBatches = Annotated[
    int | None, typer.Option(min=1, help="Micro-batches of a step: gradient accumulation.")
]
Length = Annotated[int, typer.Option("--seq", min=1, help="Tokens of a sequence.")]
Rank = Annotated[int, typer.Option(min=0, help="The rank that is simulated.")]
Flops = Annotated[
    float | None, typer.Option(help="FLOP/s that a rank reaches in matrix products, 312e12 say.")
]
Memory = Annotated[
    str | None, typer.Option("--memory-rate", help="Bits a second of its memory: 7.2Tbit.")
]
NodeLink = Annotated[
    str | None, typer.Option(help="Speed of a rank's link within its host: 1.2Tbit.")
]
Network = Annotated[
    str | None, typer.Option(help="Speed of a host's links to the others: 800Gbit.")
]
HostLink = Annotated[
    str | None, typer.Option(help="Speed between a rank's device and its host's memory: 200Gbit.")
]
HostMemory = Annotated[
    str | None, typer.Option(help="Bits a second of a host's memory, for all its ranks: 1.6Tbit.")
]
Disk = Annotated[
    str | None, typer.Option(help="Bits a second of a host's disks, for all its ranks: 80Gbit.")
]
RanksPerHost = Annotated[int | None, typer.Option(min=1, help="Ranks of a host.")]
Latency = Annotated[
    float | None, typer.Option(min=0, help="Seconds of a message by doubling of its ranks.")
]


Cpu = Annotated[bool, typer.Option("--cpu", help="Ranks compute on CPUs, over gloo.")]
Measure = Annotated[
    bool,
    typer.Option(
        "--measure",
        help="Measure the rates on the ranks at hand first: those of torchrun --no-python, or this "
        "process alone, which has no links.",
    ),
]


def simulate(
    model: Model = None,
    params: Params = None,
    ranks: Ranks = 1,
    stage: Stage = None,
    precision: Precision = "bf16",
    optimizer: Optimizer = "AdamW",
    config: ConfigFile = None,
    offload_optimizer: OffloadOptimizer = None,
    offload_param: OffloadParam = None,
    replicas: Replicas = None,
    tp: TensorParallel = None,
    sp: SequenceParallel = None,
    cp: ContextParallel = None,
    ep: ExpertParallel = None,
    pp: PipelineParallel = 1,
    micro_batch: MicroBatch = None,
    micro_batches: MicroBatches = None,
    seq: Length = 1024,
    rank: Rank = 0,
    flops: Flops = None,
    memory_rate: Memory = None,
    node_link: NodeLink = None,
    network: Network = None,
    host_link: HostLink = None,
    host_memory: HostMemory = None,
    disk: Disk = None,
    ranks_per_host: RanksPerHost = None,
    latency: Latency = None,
    cpu: Cpu = False,
    measure: Measure = False,
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

    measured = None
    if measure:
        cpu = cpu or default_device().type == "cpu"
        measured = _measured(model, params, precision, micro_batch or 1, seq)
        if measured is None:
            return
    speeds = {
        "memory": memory_rate, "node": node_link, "network": network, "host_link": host_link,
        "host_memory": host_memory, "disk": disk,
    }  # fmt: skip
    machine = _machine(
        {name: parse_rate(text) / 8 for name, text in speeds.items() if text is not None},
        flops=flops,
        latency=latency,
        ranks_per_host=ranks_per_host,
    )
    found = compute(
        model,
        ranks,
        stage,
        cast("Any", precision),  # the function checks it
        optimizer,
        params=params,
        config=config,
        offload_optimizer=section(offload_optimizer, None),
        offload_param=section(offload_param, None),
        replicas=replicas,
        tensor_parallel=tp,
        sequence_parallel=sp,
        context_parallel=cp,
        expert_parallel=ep,
        pipeline_parallel=pp,
        micro_batch=micro_batch,
        micro_batches=micro_batches,
        sequence_length=seq,
        rank=rank,
        device=torch.device("cpu") if cpu else None,
        machine=machine,
        measured=measured,
    )
    if as_json:
        print_json(found.to_dict())
        return
    print_table(_bytes(found))
    if found.stages:
        print_table(_stages(found))
    print_table(_collectives(found))
    print_table(_seconds(found))


def _measured(
    model: str | None, params: float | None, precision: str, rows: int, length: int
) -> Measured | None:
    """Return the rates of the ranks at hand; None on all but the first, which has nothing else to
    do.
    """
    from hf_zero.distributed.init import init_distributed
    from hf_zero.distributed.process_group import destroy_process_group, get_rank
    from hf_zero.planning.estimate import PRECISIONS
    from hf_zero.planning.simulation import measure
    from hf_zero.planning.simulation.simulating import module_of
    from hf_zero.zero.layout.precision import COMPUTE

    module, dtype = module_of(model, params)[1], COMPUTE[PRECISIONS[precision]]
    init_distributed()
    try:
        found = measure(module, rows, length, dtype)
        return found if get_rank() == 0 else None
    finally:
        destroy_process_group()


def _machine(speeds: dict[str, float], **given: Any) -> Machine:
    from hf_zero.planning.simulation import Machine

    values: dict[str, Any] = {
        **speeds,
        **{name: value for name, value in given.items() if value is not None},
    }
    return Machine(**values, sources=dict.fromkeys(values, "given"))


def _bytes(found: Simulation) -> PrintableTable:
    bits = 32 if found.precision == "fp32" else 16
    table = PrintableTable(
        title=f"{found.model}: {found.parameters:,} parameters, rank {found.rank} of "
        f"{found.ranks}, stage {found.stage}, {found.precision}, {found.optimizer}; model states "
        f"{in_units(found.model_state_bytes)}",
        caption=f"Model states: parameters and gradients in {bits} bits and the optimizer's state, "
        "without offload. Bytes of the device include state as configured, gathered "
        "units, activations, gradients and messages.",
    )
    for name in ("tier", "most", "when"):
        table.add_column(name, justify="left" if name == "when" else "right")
    for each in found.phases:
        table.add_row("device", in_units(each.device), each.at)
    for tier in ("ram", "disk"):
        if found.peak_bytes[tier]:
            table.add_row(tier, in_units(found.peak_bytes[tier]), "")
    return table


def _stages(found: Simulation) -> PrintableTable:
    table = PrintableTable(
        title="stages of the pipeline, by a rank of each",
        caption="Sent in a step: by this rank, to neighbours and in collectives. Waiting: for the "
        "other stages and for messages.",
    )
    held = [each.peak_bytes for each in found.stages]
    tiers = [tier for tier in ("ram", "disk") if any(each[tier] for each in held)]
    for name in ("stage", "rank", "parameters", "device", *tiers, "sent", "computing", "waiting"):
        table.add_column(name, justify="right")
    for each in found.stages:
        spent = each.seconds
        table.add_row(
            str(each.stage),
            str(each.rank),
            f"{each.parameters:,}",
            *(in_units(each.peak_bytes[tier]) for tier in ("device", *tiers)),
            in_units(each.wire_bytes),
            *(f"{part:.4g} s" for part in (spent.compute, spent.exposed)),
        )
    return table


def _collectives(found: Simulation) -> PrintableTable:
    table = PrintableTable(
        title="collectives of a step",
        caption="Sent: bytes that this rank sends, assuming ring algorithms.",
        show_footer=True,
    )
    rows: Counter[tuple[str, str, str]] = Counter()
    sums: dict[tuple[str, str, str], list[int]] = {}
    for each in found.collectives:
        key = each.phase, each.operation, each.group
        rows[key] += each.count
        held = sums.setdefault(key, [0, 0])
        held[0] += each.nbytes
        held[1] += each.wire_bytes
    sent = sum(each[1] for each in sums.values())
    for name, footer in (
        ("phase", ""), ("operation", ""), ("group", ""), ("number", ""), ("bytes", ""),
        ("sent", in_units(sent)),
    ):  # fmt: skip
        right = name in ("number", "bytes", "sent")
        table.add_column(name, footer, justify="right" if right else "left")
    for key, number in rows.items():
        table.add_row(*key, str(number), *map(in_units, sums[key]))
    return table


def _seconds(found: Simulation) -> PrintableTable:
    machine, spent = found.machine, found.seconds
    rates = {
        "flops": f"{machine.flops / 1e12:.3g} TFLOP/s",
        "memory": f"memory {rate_in_units(8 * machine.memory)}",
        "node": f"link within a host {rate_in_units(8 * machine.node)}",
        "network": f"of a host {rate_in_units(8 * machine.network)}",
        **(
            {
                "host_link": f"link to the host {rate_in_units(8 * machine.host_link)}",
                "host_memory": f"memory of a host {rate_in_units(8 * machine.host_memory)}",
                "disk": f"disks of a host {rate_in_units(8 * machine.disk)}",
            }
            if found.peak_bytes["ram"] or found.peak_bytes["disk"]
            else {}
        ),
        "ranks_per_host": f"{machine.ranks_per_host} ranks a host",
    }
    assumed = [text for name, text in rates.items() if name not in machine.sources]
    known = [text for name, text in rates.items() if name in machine.sources]
    caption = f"Given or measured: {', '.join(known)}. " if known else ""
    if assumed:
        caption += (
            f"Assumed: {', '.join(assumed)}, the values of a DGX-2, the machine of the ZeRO paper."
        )
    table = PrintableTable(
        title=f"seconds of a step of {found.micro_batches} x {found.micro_batch} sequences of "
        f"{found.sequence_length} tokens",
        caption=caption,
    )
    for name in ("step", "computing", "waiting for messages", "messages", "FLOP/s reached"):
        table.add_column(name, justify="right")
    table.add_row(
        *(f"{each:.4g}" for each in (spent.step, spent.compute, spent.exposed, spent.messages)),
        f"{found.flops / spent.step / 1e12:.3g} T",
    )
    return table
