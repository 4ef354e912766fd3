"""``hf-zero parity``: whether a script trains with hf-zero as it does with untouched torch."""

from __future__ import annotations

import signal
import sys
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from hf_zero.cli.completions import one_of
from hf_zero.cli.launch import (
    Command,
    Configured,
    Module,
    Ranks,
    default_ranks,
    request_of_training,
    request_on_this_machine,
)
from hf_zero.cli.options import expanded
from hf_zero.cli.printing import AsJson, PrintableTable, entry, print_json, print_table
from hf_zero.errors import ConfigError
from hf_zero.launch.plan import Request, refuse_missing

if TYPE_CHECKING:
    from hf_zero.parity.answers import Answer

DIFFERENT = 1
TRAINING_FILES = (".yaml", ".yml")
REFERENCES = ("torch", "plain", "deepspeed")


@dataclass(frozen=True)
class Compared:
    """Options of a comparison: what the runs are, and how long."""

    steps: Annotated[
        int,
        typer.Option(
            min=0,
            help="Optimizer steps of each run; 0 lets the script end by itself, and compares what "
            "it has saved.",
        ),
    ] = 6
    reference: Annotated[
        str,
        typer.Option(
            help="What the script is compared with: torch (the engine is replaced), plain (the "
            "framework's own DDP, without hf-zero), or deepspeed, where it is installed.",
            autocompletion=one_of(*REFERENCES),
        ),
    ] = "torch"
    layers: Annotated[
        int | None,
        typer.Option(
            min=1, help="Make and load only this many blocks of models of Transformers in all runs."
        ),
    ] = None
    resume_at: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Also stop a run after this step, resume it, and compare the steps after it.",
        ),
    ] = None
    resume_ranks: Annotated[
        int | None, typer.Option(min=1, help="Ranks of the resumed run; default: the same.")
    ] = None
    keep: Annotated[
        bool,
        typer.Option(
            "--keep",
            help="Keep settings that change the training on purpose, such as few bits or layer "
            "drop, and show how far they lead.",
        ),
    ] = False


@expanded
def parity(
    command: Command,
    compared: Compared,
    options: Configured,
    ranks: Ranks = None,
    module: Module = False,
    as_json: AsJson = False,
) -> None:
    """Run a script twice on this machine, first with untouched torch in place of the engine, then
    with hf-zero as configured, and compare every loss, gradient norm, learning rate and weight of
    each step.

    Both runs have the same ranks, seeds and data. Where they differ by more than a few last bits, a
    third run measures what rounding does to the script, after a repetition of the first step.
    Checkpoints go to a temporary folder; other files that the script writes are written. Exit
    codes: 0 equal, 1 different, 2 could not run.

    SCRIPT may be a file of hf-zero train.

    Example: hf-zero parity --ranks 2 --steps 8 -- train.py --lr 1e-4
    """
    if compared.resume_ranks is not None and compared.resume_at is None:
        raise ConfigError(f"--resume-ranks {compared.resume_ranks} goes with --resume-at STEP")
    if compared.reference not in REFERENCES:
        raise ConfigError(
            f"--reference {compared.reference!r} is unknown; choose one of {', '.join(REFERENCES)}"
        )
    with ExitStack() as stack:
        script = command[0]
        if not module and Path(script).suffix in TRAINING_FILES:
            _refuse_beside_file(script, [*options.given, *command[1:]])
            request = _request_of_file(script, ranks, stack)
        else:
            request = request_on_this_machine(command, ranks, options, module)
        if not compare(request, compared, as_json):
            raise typer.Exit(DIFFERENT)


def compare(request: Request, options: Compared, as_json: bool = False) -> bool:
    """Compare the script of ``request``, print the answer, and return whether it is equal."""
    from hf_zero.parity.answers import as_json_object
    from hf_zero.parity.session import Resume, Session

    refuse_missing(request)
    if not as_json:
        print(
            "two runs of the script, whose checkpoints go to a temporary folder; other files that "
            "it writes are written twice",
            file=sys.stderr,
        )
    handler = signal.signal(signal.SIGTERM, _as_interrupt)
    resume = None
    if options.resume_at is not None:
        resume = Resume(options.resume_at, options.resume_ranks)
    fixed = {"steps": options.steps, "keep": options.keep, "layers": options.layers or 0}
    try:
        with _Progress(options.steps) as bar:
            session = Session(
                request, default_ranks, fixed, bar.report, bar.say, resume, options.reference
            )
            answer = session.compare()
    finally:
        signal.signal(signal.SIGTERM, handler)
    if as_json:
        print_json(as_json_object(answer))
    else:
        _print(answer)
    return answer.equal


def _refuse_beside_file(file: str, given: list[str]) -> None:
    """Raise ConfigError for options and arguments that the training file ``file`` has as keys."""
    if given:
        raise ConfigError(
            f"{file} is a file of hf-zero train, which has its own keys: write what "
            f"{' '.join(given)} says there"
        )


def _request_of_file(file: str, ranks: int | None, stack: ExitStack) -> Request:
    """Return the request for the script of a training file, in a temporary folder that ``stack``
    removes.
    """
    from hf_zero.config.training_file import read_training_file
    from hf_zero.launch.training_script import SCRIPT, resolved, training_script

    training = resolved(read_training_file(file))
    folder = stack.enter_context(TemporaryDirectory(prefix="hf-zero-parity-"))
    script = Path(folder, SCRIPT)
    script.write_text(training_script(training), encoding="utf-8")
    return request_of_training(
        training if ranks is None else replace(training, ranks=ranks), str(script)
    )


def _as_interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


class _Progress:
    """A bar of the steps of each run, on the standard error."""

    def __init__(self, steps: int):
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
        console = Console(stderr=True, markup=False, highlight=False)
        self._bar = Progress(*columns, console=console)
        self._steps = steps
        self._tasks: dict[str, object] = {}

    def __enter__(self) -> _Progress:
        self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._bar.stop()

    def report(self, name: str, steps: int) -> None:
        if name not in self._tasks:
            self._tasks[name] = self._bar.add_task(f"{name:9}", total=self._steps or None)
        self._bar.update(self._tasks[name], completed=steps)  # type: ignore[arg-type]

    def say(self, text: str) -> None:
        self._bar.console.print(text, soft_wrap=True)


def _print(answer: Answer) -> None:
    from hf_zero.parity.answers import details, sentence

    print(entry(sentence(answer)))
    for line in details(answer):
        print(entry(line, indent=2, label="  "))
    if not answer.outcome.largest:
        return
    table = PrintableTable("quantity", "largest difference", "allowed", "at step")
    for what, (size, allowed, step) in answer.outcome.largest.items():
        table.add_row(what, f"{size:.1e}" if size else "0", f"{allowed:.1e}", str(step))
    print_table(table)
