"""``hf-zero schema``: the keys of a configuration, for editors."""

from __future__ import annotations

from typing import Annotated

import typer

from hf_zero.cli.printing import print_json


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
