"""``hf-zero verify``: verification of checkpoints, file by file and hash by hash."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer
from rich.text import Text

from hf_zero.cli.printing import AsJson, PrintableTable, in_units, print_json, print_table

DAMAGED = 1


def verify(
    src: Annotated[
        str,
        typer.Argument(
            help="A checkpoint, a model folder, or a folder or URL with "
            "checkpoints in it at any depth."
        ),
    ],
    tag: Annotated[
        str | None,
        typer.Option(help="Which checkpoint in SRC; default: the latest, or the newest."),
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="Every checkpoint and model folder in SRC.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check sizes, headers, hashes, and that each element of each parameter is stored exactly once.
    Exit code 1 if something is damaged.

    A model folder has no hashes: the headers, sizes and index of its safetensors are checked.

    Example: hf-zero verify runs/bert-mlm --all
    """
    from hf_zero.checkpoint import verify_all, verify_checkpoint
    from hf_zero.errors import ConfigError

    if every and tag is not None:
        raise ConfigError(
            f"--all and --tag {tag}: one asks for every checkpoint, the other for one; "
            "leave one of them out"
        )
    progress = False if as_json else None
    verdicts = verify_all(src, progress) if every else [verify_checkpoint(src, tag, progress)]
    if as_json:
        print_json([asdict(verdict) | {"whole": verdict.whole} for verdict in verdicts])
    else:
        table = PrintableTable("checkpoint", "verdict", "files", "read", "parameters", "elements")
        for checked in verdicts:
            text = (
                Text("whole" if checked.kind == "checkpoint" else "whole model", style="green")
                if checked.whole
                else Text("damaged", style="red")
            )
            table.add_row(
                str(checked.folder),
                text,
                str(checked.files),
                in_units(checked.nbytes) if checked.kind == "checkpoint" else "headers",
                f"{checked.parameters:,}",
                f"{checked.elements:,}",
            )
        print_table(table)
        for problem in (problem for checked in verdicts for problem in checked.problems):
            typer.echo(problem, err=True)
    if not all(checked.whole for checked in verdicts):
        raise typer.Exit(DAMAGED)
