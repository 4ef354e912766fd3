"""``hf-zero estimate``: bytes of training state per rank and stage."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from hf_zero.cli.printing import AsJson, in_units, print_json, print_table

if TYPE_CHECKING:
    from hf_zero.estimate import MemoryEstimate


def estimate(
    model: Annotated[str, typer.Argument(help="A model folder, a config.json, or the name of a model in the local cache or on the hub.")],
    ranks: Annotated[int, typer.Option(help="Number of ranks, one per GPU.")],
    precision: Annotated[str, typer.Option(help="fp32, bf16 or fp16.")] = "bf16",
    optimizer: Annotated[str, typer.Option(help="AdamW, SGD, Lion, ... or any optimizer a configuration may name.")] = "AdamW",
    stage: Annotated[int | None, typer.Option(help="Only this stage, 0 to 3.")] = None,
    config: Annotated[
        str | None, typer.Option(help="Take precision, optimizer and replicas from this DeepSpeed JSON or Accelerate YAML.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Bytes of training state per rank at each ZeRO stage, without loading the model.

    Example: hf-zero estimate meta-llama/Llama-3.1-8B --ranks 8 --precision bf16
    """
    from hf_zero.estimate import estimate as compute

    result = compute(model, ranks, precision, optimizer, stage, config=config)
    if as_json:
        print_json(result.to_dict())
    else:
        print_table(_table(result))


def _table(result: MemoryEstimate) -> Table:
    frozen = result.total_parameters - result.trainable_parameters
    count = f"{result.total_parameters:,} parameters" + (f" ({frozen:,} frozen)" if frozen else "")
    over = f"{result.ranks} ranks" + (f" in {result.replicas} replicas" if result.replicas > 1 else "")
    table = Table(
        title=f"{result.model}: {count}, {over}, {result.precision}, {result.optimizer}",
        caption="Per rank, without activations. Largest unit: whole while it computes, with a neighbour or two ahead of it.",
    )
    table.add_column("stage", justify="right")
    for name in ("parameters", "gradients", "optimizer", "state", "gradient buffers", "largest unit"):
        table.add_column(name, justify="right")
    for row in result.stages:
        sizes = (row.parameters, row.gradients, row.optimizer, row.state, row.gradient_buffers)
        table.add_row(str(row.stage), *map(in_units, sizes), f"{in_units(row.largest_unit)}: {row.largest_unit_name}")
    return table
