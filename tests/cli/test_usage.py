"""Command lines that cannot be read, and the help of each command on narrow terminals."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from hf_zero.cli import main
from hf_zero.cli.app import app
from hf_zero.cli.printing import PrintableTable, print_table
from tests.helpers.cells import in_one_item


def commands(command: Any, *words: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield words, command
    for name, below in getattr(command, "commands", {}).items():
        yield from commands(below, *words, name)


ALL = {" ".join(words): command for words, command in commands(typer.main.get_command(app))}


@in_one_item(ALL)
def test_help_cuts_no_name(command: str) -> None:
    os.environ["COLUMNS"] = "60"
    shown = CliRunner().invoke(app, [*command.split(), "-h"]).output
    usage, _, below = shown.partition("\n\n")
    assert "{" not in usage and not re.search(r"…|\.\.\.$", below, re.M)
    names = {name for each in ALL[command].params for name in each.opts if name[:2] == "--"}
    missing = {name for name in names if not re.search(rf"(?<![\w-]){name}(?![\w-])", shown)}
    assert missing == set()


CANNOT_BE_READ = [
    ("launch --ranks two x.py", "launch: --ranks two is not a whole number\n  --ranks: Ranks"),
    ("simulate --pp 0", "simulate: --pp 0 is not a whole number of at least 1\n  --pp: Stages"),
    ("simulate --params big", "simulate: --params: big is no number of parameters; write 350M"),
    ("launch --stage 5 x.py", "launch: --stage 5 is not a whole number of at most 3\n"),
    ("estimate m --ranks", "estimate: --ranks needs a value after it\n"),
    ("estimate m", "estimate: --ranks is missing\n  --ranks: Number of ranks"),
    ("convert-checkpoint", "convert-checkpoint: SRC and DST are missing\n  SRC: A checkpoint"),
    ("launch", "SCRIPT is missing\n  SCRIPT: The script and its arguments.\nusage: hf-zero"),
    ("launch --rank 2 x.py", "there is no option --rank; did you mean --ranks?\nusage:"),
    ("lanch x.py", "hf-zero: there is no command 'lanch'; did you mean launch?\nusage:"),
    ("recipe lst", "hf-zero recipe: there is no command 'lst'; did you mean list?\nusage:"),
    ("verify a b c", "hf-zero verify: more arguments than it takes: b c\nusage:"),
]


def test_a_command_line_that_cannot_be_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for given, says in CANNOT_BE_READ:
        monkeypatch.setattr(sys, "argv", ["hf-zero", *given.split()])
        with pytest.raises(SystemExit, match=r"^2$"):
            main()
        said = capsys.readouterr()
        assert says in said.err and said.out == "", given
        assert re.search(r"\n`hf-zero.* -h` shows all options\n$", said.err)
        command, *rest = given.split()
        if command != "recipe" and rest:
            monkeypatch.setattr(sys, "argv", ["hf-zero", command, "--json", *rest])
            with pytest.raises(SystemExit, match=r"^2$"):
                main()
            found = capsys.readouterr()
            error = json.loads(found.out)
            assert says in f"{error['error']}\n" and error["type"] == "UsageError"
            assert found.err == ""


def test_without_a_command_the_help_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for given in ("hf-zero", "hf-zero recipe"):
        monkeypatch.setattr(sys, "argv", given.split())
        with pytest.raises(SystemExit, match=r"^2$"):
            main()
        assert f"Usage: {given} [OPTIONS] COMMAND [ARGS]..." in capsys.readouterr().err


def test_underscores_are_read_as_dashes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    line = ["launch", "--num_gpus", "3", "--master_port=99", "--json", "train.py", "--my_own", "1"]
    shown = CliRunner().invoke(app, line)
    assert '"3"' in shown.output and '"99"' in shown.output and '"--my_own"' in shown.output


def test_a_table_does_not_control_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    table = PrintableTable("name", title="\x1b[2J", caption="\u202e")
    table.add_row("a\x1b[31mb")
    print_table(table)
    shown = capsys.readouterr().out
    assert "a\\x1b[31mb" in shown and not set("\x1b\u202e") & set(shown)
