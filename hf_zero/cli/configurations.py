"""``hf-zero explain``: a configuration as hf-zero reads it, with the source of every value;
``schema``: the keys of a configuration, for editors; ``migrate``: a configuration for DeepSpeed or
FSDP as one for hf-zero.
"""

from __future__ import annotations

import difflib
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hf_zero.cli.completions import complete_preset_or_file
from hf_zero.cli.options import refuse_out
from hf_zero.cli.printing import AsJson, entry, print_json, printable
from hf_zero.config.sourced import shown
from hf_zero.errors import ConfigError

if TYPE_CHECKING:
    from hf_zero.config.explaining import ExplainRow
    from hf_zero.config.migrating import KeyFinding


def explain(
    file: Annotated[
        str,
        typer.Argument(
            help="A DeepSpeed JSON, an Accelerate YAML, or a preset: zero0, zero1, zero2, zero3.",
            autocompletion=complete_preset_or_file,
        ),
    ],
    other: Annotated[
        str | None,
        typer.Argument(
            help="Another one: show only the keys that differ.",
            autocompletion=complete_preset_or_file,
        ),
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(
            min=1, help="Also resolve the batch sizes for this number of ranks, unless one is auto."
        ),
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="Also the keys that have their defaults.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show the configuration as hf-zero reads it: every value that is written or computed, its
    source, and keys without effect; of two configurations the difference. Exit code 1 if
    a run refuses a value, 2 if the file cannot be read or has unknown keys.

    Example: hf-zero explain recipes/bert-mlm/zero3.yaml --ranks 2
    """
    from hf_zero.config import ZeroConfig
    from hf_zero.config.explaining import REFUSED
    from hf_zero.config.resolving import BATCH
    from hf_zero.config.summary import written
    from hf_zero.optim.build import refused

    rows = ZeroConfig.coerce(file, allow_auto=True, check=refused).explain(ranks, refused)
    wrong = [row.key for row in rows if row.note.startswith(REFUSED)]
    listed = rows if every else written(rows, *(() if ranks is None else BATCH))
    if other is not None:
        if every:
            raise ConfigError("--all lists the keys of one file; leave it or the second file out")
        others = ZeroConfig.coerce(other, allow_auto=True, check=refused).explain(ranks, refused)
        _compare(file, rows, other, others, as_json)
        wrong = [f"{key} of {file}" for key in wrong]
        wrong += [f"{row.key} of {other}" for row in others if row.note.startswith(REFUSED)]
    elif as_json:
        print_json([row._asdict() for row in listed])
    else:
        print(file, *(_line(row, file) for row in listed), sep="\n")
        if len(listed) < len(rows):
            print(f"{len(rows) - len(listed)} more keys have their defaults: --all shows them")
    if wrong:
        if not as_json:
            print(f"a run refuses {', '.join(wrong)}")
        raise typer.Exit(1)


def _line(row: ExplainRow, file: str) -> str:
    """Return key and value, and below them the note, and the source if not this key of ``file``."""
    source = row.source.removeprefix(f"config file {file}: ")
    return entry(
        f"{row.key} = {_text(row.value)}", row.note, "" if source == row.key else f"({source})"
    )


def _compare(
    file: str, rows: list[ExplainRow], other: str, others: list[ExplainRow], as_json: bool
) -> None:
    first = {row.key: row.value for row in rows}
    second = {row.key: row.value for row in others}
    keys = [key for key in first | second if first.get(key) != second.get(key)]
    if as_json:
        print_json([{"key": key, file: first.get(key), other: second.get(key)} for key in keys])
        return
    for key in keys:
        both = ((file, first), (other, second))
        print(entry(key, *(f"{name}: {_text(values.get(key))}" for name, values in both)))
    if not keys:
        print(f"{file} and {other} mean the same")


def _text(value: object) -> str:
    return "-" if value is None else shown(value)


def schema(
    table: Annotated[
        bool, typer.Option("--table", help="A Markdown table of the keys instead.")
    ] = False,
    training: Annotated[
        bool, typer.Option("--train", help="The schema of files of hf-zero train instead.")
    ] = False,
) -> None:
    """Print the JSON schema of a configuration, with which an editor checks and completes its keys.

    Example: hf-zero schema > hf-zero.schema.json
    """
    from hf_zero.config import schema as keys
    from hf_zero.config import training_file

    if table and training:
        raise ConfigError("--table lists the keys of a configuration; leave --train out")
    if training:
        print(training_file.json_schema(), end="")
        return
    print(keys.table() if table else keys.schema_text(), end="\n" if table else "")


INDENT = 12  # columns of an outcome
VALUE = 200  # letters of a value at most

File = Annotated[
    str,
    typer.Argument(
        help="A DeepSpeed JSON, or an Accelerate YAML for DeepSpeed, FSDP (1 or 2) or DDP."
    ),
]
Out = Annotated[
    Path | None,
    typer.Option("-o", "--out", help="The file to write, .json or .yaml; it must not exist."),
]


def migrate(file: File, out: Out = None, as_json: AsJson = False) -> None:
    """Translate a configuration for DeepSpeed or FSDP: show what becomes of each key, and the
    difference; with -o write the file. Exit code 1 if a key is left to fix by hand.

    Example: hf-zero migrate fsdp.yaml -o zero3.yaml
    """
    from hf_zero.config.files import dump, load_file, write_new
    from hf_zero.config.migrating import migrate
    from hf_zero.optim.build import refused

    migration = migrate(load_file(file), f"config file {file}", refused)
    if out is not None:
        refuse_out(out)
    suffix = Path(file).suffix if out is None else out.suffix
    text = dump(migration.after, suffix)
    if out is not None and migration.runs:
        write_new(out, text)
    if as_json:
        print_json(
            {
                "findings": [finding._asdict() for finding in migration.findings],
                "configuration": migration.after,
                "runs": migration.runs,
            }
        )
    else:
        print(file, *(_finding_line(finding) for finding in migration.findings), sep="\n")
        counted = Counter(finding.outcome for finding in migration.findings)
        print(", ".join(f"{count} {outcome}" for outcome, count in counted.items()))
        print(printable(_difference(dump(migration.before, suffix), text, file, out)))
        if out is None:
            print("nothing is written; pass -o FILE")
        elif migration.runs:
            print(f"written: {out}")
            print(
                "next: hf-zero parity --ranks 2 -- your_script.py, with this file, compares its "
                "training with the same script over untouched torch"
            )
        else:
            print(f"not written: {out}; change {file} where it says to fix")
    if not migration.runs:
        raise typer.Exit(1)


def _finding_line(finding: KeyFinding) -> str:
    value = "" if finding.value is None else shown(finding.value)
    value = value if len(value) <= VALUE else f"{value[: VALUE - 3]}..."
    file = "(added)" if finding.outcome == "translated" else "(the whole file)"
    head = f"{finding.key} = {value}" if value else finding.key or file
    return entry(head, finding.note, label=finding.outcome, indent=INDENT)


def _difference(before: str, after: str, file: str, out: Path | None) -> str:
    lines = difflib.unified_diff(
        before.splitlines(), after.splitlines(), file, str(out or "for hf-zero"), lineterm="", n=1
    )
    return "\n".join(lines) or "the files are equal"
