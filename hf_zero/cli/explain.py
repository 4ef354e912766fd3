"""``hf-zero explain``: a configuration as hf-zero reads it, with the source of every value, and
``hf-zero schema``: the keys of a configuration, for editors.
"""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from hf_zero.cli.printing import AsJson, print_json, print_table


def explain(
    file: Annotated[
        str,
        typer.Argument(
            help="A DeepSpeed JSON, an Accelerate YAML, or a preset: zero0, zero1, zero2, zero3."
        ),
    ],
    ranks: Annotated[
        int | None,
        typer.Option(
            help="Also resolve the batch sizes for this number of ranks; no value may then be auto."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the configuration as hf-zero reads it: every value, its source, and keys without effect.

    Example: hf-zero explain recipes/bert-mlm/zero3.yaml --ranks 2
    """
    from hf_zero.config import ZeroConfig

    config = ZeroConfig.coerce(file, allow_auto=True)
    if ranks is not None:
        config = config.resolve(ranks)
    rows = config.explain()
    if as_json:
        print_json([row._asdict() for row in rows])
        return
    table = Table("key", "value", "source", "note", title=file)
    for row in rows:
        table.add_row(row.key, "-" if row.value is None else str(row.value), row.source, row.note)
    print_table(table)


def schema(
    table: Annotated[
        bool, typer.Option("--table", help="A Markdown table of the keys instead.")
    ] = False,
) -> None:
    """Print the JSON schema of a configuration, with which an editor checks and completes its keys.

    Example: hf-zero schema > hf-zero.schema.json
    """
    from hf_zero.config import schema as keys

    if table:
        typer.echo(keys.table())
        return
    print_json(keys.json_schema())
