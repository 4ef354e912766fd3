"""Commands in this process: their output, or their refusal."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from hf_zero.cli.app import app
from hf_zero.errors import HfZeroError

ROOT = Path(__file__).resolve().parents[2]
ZERO3 = str(ROOT / "recipes" / "bert-mlm" / "zero3.yaml")


def invoke(*arguments: str, ends_with: int = 0) -> str:
    """The output of a command; an argument with blanks is several."""
    words = [word for argument in arguments for word in argument.split(" ")]
    result = CliRunner().invoke(app, words, catch_exceptions=False)
    assert result.exit_code == ends_with, result.output
    return result.stdout


def refusal(command: str) -> str:
    """The message with which ``command`` is refused."""
    found = CliRunner().invoke(app, command.split())
    assert isinstance(found.exception, HfZeroError), found.output
    return str(found.exception)
