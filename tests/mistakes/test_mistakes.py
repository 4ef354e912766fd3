"""Mistakes as people make them, each with the report in full: at most eight lines of a terminal
that name the offender and the remedy, and say nothing twice.
"""

from __future__ import annotations

import copy
import os
import re
import shlex
import socket
import sys
import textwrap
from collections.abc import Iterator
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hf_zero
from hf_zero.cli import main
from hf_zero.distributed import uncaught
from hf_zero.errors import HfZeroError
from tests.helpers.cells import in_one_item
from tests.helpers.commands import completed
from tests.helpers.launched import environment, python
from tests.helpers.ranks import run_ranks
from tests.helpers.stacks import stack

FOLDER = Path(__file__).parent
COLUMNS, LINES = 80, 8
TWICE = 4  # words that may not stand in a message twice
HINT = re.compile(rf"  \((hf-zero docs \w+; )?{uncaught.SWITCH}=1 shows the traceback\)$")
REMEDY = re.compile(
    r"(?:[;:,.]|\bor|\band)\s(?:or )?(?:then )?(?:pass|write|remove|set|use|build|change|keep|"
    r"choose|call|reduce|compute|cast|freeze|fix|leave|make|export|unset|start|drop|end|add|"
    r"unfreeze|did you mean|Did you mean)\b",
    re.IGNORECASE,
)


class Mistake:
    """One row: ``typed``, whose faulty part is between « and », and the ``report``."""

    def __init__(self, block: str):
        first, *said = block.strip().splitlines()
        self.marked, self.report = first, " ".join(" ".join(said).split())
        self.typed = re.sub("[«»]", "", first)
        self.offenders = [part.strip("\"'") for part in re.findall("«(.+?)»", first)]

    def __repr__(self) -> str:
        return self.marked

    def check(self, said: str, *known: tuple[str, str]) -> None:
        """Compare what was ``said`` with this row; ``known`` are texts with their placeholders."""
        for text, placeholder in known:
            said = said.replace(text, placeholder)
        lines = [piece for line in said.splitlines() for piece in textwrap.wrap(line, COLUMNS)]
        assert len(lines) <= LINES, f"{len(lines)} lines: {said}"
        message = HINT.sub("", said).strip()
        assert " ".join(message.split()) == self.report, said
        assert self.offenders and all(each in message for each in self.offenders), message
        assert REMEDY.search(message), f"no remedy: {message}"
        words = [word.strip(".,:;()'\"`") for word in message.split()]
        runs = [tuple(words[at : at + TWICE]) for at in range(len(words) - TWICE + 1)]
        twice = {run for run in runs if runs.count(run) > 1}
        assert not twice, f"twice: {twice}"


def table(name: str) -> list[Mistake]:
    blocks = re.split(r"^(?=>>> |\$ )", (FOLDER / name).read_text(), flags=re.MULTILINE)[1:]
    return [Mistake(block.split(" ", 1)[1]) for block in blocks]


SCRIPTS, COMMANDS = table("scripts.txt"), table("commands.txt")


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder to make mistakes in."""
    path, before = tmp_path_factory.mktemp("mistakes"), Path.cwd()
    (path / "broken.json").write_text('{"stage": 3, "bf16": {"enabled": true}')
    (path / "broken.yaml").write_text("stage: 3\n  bf16: [\n")
    (path / "stage5.json").write_text('{"zero_optimization": {"stage": 5}}')
    (path / "zero3.json").write_text('{"zero_optimization": {"stage": 3}}')
    (path / "disk").write_text("a file, and no folder")
    (path / "train.py").write_text(
        "import hf_zero, torch\nhf_zero.initialize(torch.nn.Linear(2, 2), 'zero3')\n"
    )
    (path / "tensor.py").write_text(
        "import hf_zero, torch\nhf_zero.tensor_parallel(torch.nn.Linear(2, 2), 2)\n"
    )
    os.chdir(path)
    yield path
    os.chdir(before)


def make(rank: int, mistake: Mistake, model: nn.Module) -> Exception:
    """Return the error of ``mistake``, made on this rank."""
    engines: list[Any] = []

    def trained(**more: Any) -> Any:
        engines.append(
            hf_zero.initialize(
                model=copy.deepcopy(model),
                config={"stage": 3, "optimizer": {"type": "AdamW"}, **more},
            )[0]
        )
        return engines[-1]

    names: dict[str, Any] = {"torch": torch, "nn": nn, "hf_zero": hf_zero, "model": model}
    names |= {"rank": rank, "x": torch.ones(3, 7), "data": torch.ones(8, 7)}
    try:
        if "engine" in mistake.typed:
            names["engine"] = trained()
            names["loss"] = names["engine"](names["x"]).square().mean()
        if "bf16_engine" in mistake.typed:
            names["bf16_engine"] = trained(bf16={"enabled": True})
        exec(mistake.typed, names)
    except Exception as error:
        return error
    finally:
        for engine in reversed(engines):
            engine.destroy()
    return AssertionError("nothing is said")


def reported(error: Exception) -> str:
    """Return what a process that ends with ``error`` prints, without places in files."""
    if isinstance(error, HfZeroError):
        return uncaught.described(error, None)
    with redirect_stderr(StringIO()) as said:  # Python adds the name that was meant
        sys.__excepthook__(type(error), error.with_traceback(None), None)
    return said.getvalue().strip()


@in_one_item(SCRIPTS)
def test_mistakes_in_a_script_on_two_ranks(mistake: Mistake) -> None:
    torch.manual_seed(0)
    models = [stack()]
    models.append(copy.deepcopy(models[0]))
    made = run_ranks(2, lambda rank: make(rank, mistake, models[rank]))
    first, second = map(reported, made)
    assert first == second
    mistake.check(first, (str(Path.cwd()), "DIR"))


def ended(typed: str) -> tuple[int, str]:
    """The exit code and the error output of a command; in this process if it starts no other."""
    words = shlex.split(typed)
    given = [word for word in words if re.fullmatch(r"[A-Z_]+=.*", word)]
    program, *arguments = words[len(given) :]
    if program == "hf-zero" and "--master-port" not in words:
        with pytest.MonkeyPatch.context() as patch, redirect_stderr(StringIO()) as said:
            patch.setattr(sys, "argv", [program, *arguments])
            with pytest.raises(SystemExit) as raised:
                main()
        return int(raised.value.code or 0), said.getvalue()
    if program == "hf-zero":
        arguments = [str(Path(sys.executable).with_name(program)), *arguments]
    env = environment() | dict(each.split("=", 1) for each in given)
    done = completed([python(), *arguments], env=env, timeout=200)
    return done.returncode, done.stderr


@in_one_item(COMMANDS)
def test_mistakes_in_a_command(mistake: Mistake) -> None:
    with socket.socket() as held:
        held.bind(("", 0))
        held.listen()
        port = str(held.getsockname()[1])
        code, printed = ended(mistake.typed.replace("TAKEN", port))
    assert code, f"{mistake} ended well"
    # torchrun's words on threads, and triton's of a process forked from one that has compiled
    lines = printed.partition("nanobind: ")[0].splitlines()
    said = "\n".join(each for each in lines if "OMP_NUM" not in each and set(each) != {"*"})
    mistake.check(said.strip("\n"), (str(Path.cwd()), "DIR"), (port, "TAKEN"))


def test_there_are_forty() -> None:
    typed = [each.typed for each in SCRIPTS + COMMANDS]
    assert len(set(typed)) == len(typed) >= 40
