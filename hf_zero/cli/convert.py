"""``hf-zero convert-checkpoint``: a sharded checkpoint into a folder that ``from_pretrained`` loads."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from hf_zero.cli.printing import AsJson, in_units, print_json, print_table


def convert_checkpoint(
    src: Annotated[Path, typer.Argument(help="What save_checkpoint was given, one checkpoint in it, or a Trainer's checkpoint-N.")],
    dst: Annotated[Path, typer.Argument(help="The model folder to write.")],
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16; default: what each parameter had before training.")
    ] = None,
    max_shard_size: Annotated[str, typer.Option(help="Largest size of one file, such as 5GB or 500MB.")] = "5GB",
    tag: Annotated[str | None, typer.Option(help="Which checkpoint in SRC; default: the latest.")] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Compare the hashes of the checkpoint's files first.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write a sharded checkpoint as safetensors that from_pretrained loads, with its config, tokenizer and model card.

    Example: hf-zero convert-checkpoint runs/bert-mlm/step_600 my-model --dtype bfloat16
    """
    from hf_zero import convert_checkpoint as convert

    done = convert(src, dst, dtype, max_shard_size, tag, False if as_json else None, verify=verify)
    if as_json:
        print_json(dataclasses.asdict(done))
        return
    table = Table(title=f"{src} -> {done.folder}", show_header=False)
    table.add_row("weights", f"{done.tensors} tensors, {done.parameters:,} parameters, {in_units(done.nbytes)}: {', '.join(done.files)}")
    table.add_row("carried along", ", ".join(done.carried) or "nothing: no config.json or tokenizer lies beside the checkpoint")
    print_table(table)
