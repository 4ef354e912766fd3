"""Registration of the commands, and their error handling: the message on stderr and exit code 2."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from hf_zero.cli.analyze import analyze
from hf_zero.cli.clean import clean
from hf_zero.cli.convert import convert_checkpoint
from hf_zero.cli.docs import docs
from hf_zero.cli.doctor import doctor, smoke
from hf_zero.cli.estimate import estimate
from hf_zero.cli.explain import explain, schema
from hf_zero.cli.launch import launch
from hf_zero.cli.migrate import migrate
from hf_zero.cli.recipes import init, recipe
from hf_zero.cli.report import report
from hf_zero.cli.simulate import simulate
from hf_zero.cli.verify import verify
from hf_zero.errors import HfZeroError

BAD_INPUT = 2

app = typer.Typer(
    name="hf-zero",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",  # which joins the lines of a docstring
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(asked: bool) -> None:
    if asked:
        from hf_zero import __version__

        print(f"hf-zero {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """ZeRO for Hugging Face: look at an installation, a configuration or a model's memory; start
    runs and show them; verify and convert checkpoints; measure how difficult samples are.
    """


app.add_typer(recipe, name="recipe")
app.command("init")(init)
app.command("docs")(docs)
app.command("doctor")(doctor)
app.command("smoke")(smoke)
app.command("estimate")(estimate)
app.command("simulate")(simulate)
app.command("explain")(explain)
app.command("schema")(schema)
app.command("migrate")(migrate)
app.command("analyze")(analyze)
app.command("convert-checkpoint")(convert_checkpoint)
app.command("verify")(verify)
app.command("clean")(clean)
app.command("report")(report)
# All arguments after the script belong to the script, even those that look like options.
app.command("launch", context_settings={"allow_interspersed_args": False})(launch)


def main() -> None:
    """Run the command line.

    An HfZeroError, which names what the user has to change, ends it with code 2 and no traceback.
    """
    try:
        app()
    except HfZeroError as error:
        print(f"hf-zero: {error}", file=sys.stderr)
        sys.exit(BAD_INPUT)
