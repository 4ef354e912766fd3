"""``hf-zero migrate``: a configuration for DeepSpeed or FSDP as one for hf-zero."""

from __future__ import annotations

import difflib
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hf_zero.cli.printing import AsJson, entry, print_json, printable
from hf_zero.config.files import shown

if TYPE_CHECKING:
    from hf_zero.config.migrating import KeyFinding

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
    from hf_zero.config.files import dump, load_file, refuse_existing, write_new
    from hf_zero.config.migrating import migrate
    from hf_zero.optim.build import refused

    migration = migrate(load_file(file), f"config file {file}", refused)
    if out is not None:
        refuse_existing(out)
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
        print(file, *(_line(finding) for finding in migration.findings), sep="\n")
        counted = Counter(finding.outcome for finding in migration.findings)
        print(", ".join(f"{count} {outcome}" for outcome, count in counted.items()))
        print(printable(_difference(dump(migration.before, suffix), text, file, out)))
        if out is None:
            print("nothing is written; pass -o FILE")
        elif migration.runs:
            print(f"written: {out}")
        else:
            print(f"not written: {out}; change {file} where it says to fix")
    if not migration.runs:
        raise typer.Exit(1)


def _line(finding: KeyFinding) -> str:
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
