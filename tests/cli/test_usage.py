"""Command lines that cannot be read, and the help of each command on narrow terminals."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from hf_zero.cli import main
from hf_zero.cli.app import app
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
    ("simulate --pp 0", "simulate: --pp 0 is not at least 1\n  --pp: Stages"),
    ("simulate --flops fast", "simulate: --flops fast is not a number\n  --flops: FLOP/s"),
    ("simulate --store-rate 0", "simulate: --store-rate 0 is not at least 1\n  --store-rate: Req"),
    ("explain zero1 --ranks 0", "explain: --ranks 0 is not at least 1\n  --ranks: Also"),
    ("launch --ssh-port 0 x.py", "launch: --ssh-port 0 is not "),
    ("simulate --params big", "simulate: --params: big is no number of parameters; write 350M"),
    ("launch --stage 5 x.py", "launch: --stage 5 is not "),
    (
        "convert-checkpoint a b --quantize int4_weight --group-size 0",
        "convert-checkpoint: --group-size 0 is not at least 1\n",
    ),
    ("estimate m --ranks 0 --fit --ram 1GB", "estimate: --ranks 0 is not at least 1\n  --ranks: N"),
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
