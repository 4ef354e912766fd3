"""Registration of the commands, and the exit code 2 after bad input."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Annotated

import typer

from hf_zero.cli.analyze import analyze
from hf_zero.cli.checkpoints import clean, convert_checkpoint, verify
from hf_zero.cli.configurations import explain, migrate, schema
from hf_zero.cli.docs import docs
from hf_zero.cli.doctor import doctor, smoke
from hf_zero.cli.estimate import estimate
from hf_zero.cli.launch import launch
from hf_zero.cli.parity import parity
from hf_zero.cli.printing import print_json, printable, replace_unencodable
from hf_zero.cli.recipes import init, recipe
from hf_zero.cli.runs import report, top
from hf_zero.cli.simulate import simulate
from hf_zero.cli.train import train
from hf_zero.cli.usage import BAD_INPUT, Command, dashed, usage_error
from hf_zero.errors import HfZeroError

app = typer.Typer(
    name="hf-zero",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # whose tables cut names of options on narrow terminals
    context_settings={"help_option_names": ["-h", "--help"], "token_normalize_func": dashed},
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
    """ZeRO for Hugging Face: start runs and show them, estimate memory, check configurations, and
    verify and convert checkpoints. `hf-zero docs start` is the place to begin.
    """


COMMANDS: dict[str, tuple[Callable[..., None], str]] = {
    "init": (init, "Copy a recipe into a new folder."),
    "docs": (docs, "Show the documentation, a page or a section of it."),
    "doctor": (doctor, "Report versions, devices and kernels."),
    "smoke": (smoke, "Train a small model at each stage on this machine."),
    "train": (train, "Train as a YAML file says, without a script."),
    "launch": (launch, "Start the ranks of a script."),
    "parity": (parity, "Compare a script's training with torch's."),
    "top": (top, "Show a run in the terminal while it runs."),
    "report": (report, "Write one HTML page that shows a run."),
    "estimate": (estimate, "Estimate memory per rank, or find what fits."),
    "simulate": (simulate, "Simulate a step of one rank out of any number."),
    "explain": (explain, "Show a configuration and the source of each value."),
    "schema": (schema, "Print the JSON schema of configurations."),
    "migrate": (migrate, "Translate a configuration for DeepSpeed or FSDP."),
    "convert-checkpoint": (convert_checkpoint, "Write a checkpoint as a model folder."),
    "verify": (verify, "Check the files and hashes of checkpoints."),
    "clean": (clean, "List or remove checkpoints in memory."),
    "analyze": (analyze, "Measure how difficult samples are."),
}
"""Commands with their lines in the list of commands, in the order of that list."""

# All arguments after the script belong to the script, even those that look like options.
SETTINGS = {name: {"allow_interspersed_args": False} for name in ("launch", "parity")}

app.add_typer(recipe, name="recipe")
for name, (command, line) in COMMANDS.items():
    app.command(name, cls=Command, short_help=line, context_settings=SETTINGS.get(name))(command)


def main() -> None:
    """Run the command line.

    An HfZeroError, which names what the user has to change, ends it with code 2 and no traceback;
    so does a command line that cannot be read.
    """
    replace_unencodable()
    try:
        sys.exit(app(standalone_mode=False, prog_name="hf-zero"))
    except HfZeroError as error:
        print(f"hf-zero: {printable(str(error))}", file=sys.stderr)
        sys.exit(BAD_INPUT)
    except typer.Abort:
        sys.exit(1)
    except Exception as error:
        # typer has its own exceptions of the parser, or click's, by its version
        if not hasattr(error, "format_message"):
            raise
        helps = type(error).__name__ == "NoArgsIsHelpError"
        message = error.format_message() if helps else usage_error(error, sys.argv[1:])
        if "--json" in sys.argv and not helps:
            print_json({"error": message, "type": "UsageError"})
        else:
            print(printable(message), file=sys.stderr)
        sys.exit(BAD_INPUT)
