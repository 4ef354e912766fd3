"""The runs of one comparison: the reference, the engine as configured and, where rounding has to be
measured, the reference again; one after the other, with the same ranks.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hf_zero.errors import ParityError
from hf_zero.launch.plan import Request, plan
from hf_zero.logging import counted, in_units
from hf_zero.parity.answers import Answer, ResumeAnswer
from hf_zero.parity.causes import (
    OF_ENGINE,
    cause_of,
    cause_of_failure,
    cause_of_resume,
    is_repeated,
    of_kept_settings,
)
from hf_zero.parity.comparison import Comparison, ComparisonResult, RunRecord, same_inputs
from hf_zero.parity.rank_starts import start_of
from hf_zero.parity.real_deepspeed import refuse_missing
from hf_zero.parity.recorder import read
from hf_zero.parity.runs import BY_ITSELF, DEEPSPEED, ENGINE, PLAIN, TORCH, ComparedRun
from hf_zero.parity.saved_models import saved_differences
from hf_zero.parity.start import FULL_PRECISION, LAST_BITS

PROGRAM = "hf_zero.parity.rank"
POLL_SECONDS = 0.1
GRACE_SECONDS = 20.0
SILENT_SECONDS = 300.0  # without a step, before a message says so
LAST_LINES = 15
NO_TERMINAL = "EOF when reading a line"
# errors that end a rank, with a traceback or without
ERROR = re.compile(r"(?:hf_zero\.errors\.|hf-zero, rank \d+: |hf-zero: )(\w+): (.+)")
ANSWERS = ("ParityError", "DoesNotFitError")  # to the user's command
UNKNOWN = re.compile(r"AttributeError: (hf-zero parity does not .+)")
BEGINS_ERROR = re.compile(r"hf-zero(, rank \d+)?: |Traceback \(")
REPLACED_BY = {
    TORCH: "untouched torch in place of hf-zero",
    PLAIN: "the framework's own DDP in place of hf-zero",
    DEEPSPEED: "DeepSpeed in place of hf-zero",
}
Progress = Callable[[str, int], None]
MakeRun = Callable[..., RunRecord]  # of its name, ``ranks`` and the fields of ComparedRun


@dataclass(frozen=True)
class Resume:
    """Request for a run that is stopped after step ``at``, and resumed on ``ranks``, by default the
    same.
    """

    at: int
    ranks: int | None = None


@dataclass
class Session:
    """The runs of the script that ``request`` starts.

    fixed: fields of :class:`ComparedRun` that all runs share. report: called with the name of a run
    and its steps. say: called with sentences for the user. reference: :data:`TORCH`,
    :data:`PLAIN` or :data:`DEEPSPEED`.
    """

    request: Request
    default_ranks: Callable[[], int]
    fixed: Mapping[str, Any]
    report: Progress
    say: Callable[[str], None]
    resume: Resume | None = None
    reference: str = TORCH

    def compare(self) -> Answer:
        """Run and compare. Raises ParityError if a run cannot be compared."""
        if self.reference == DEEPSPEED:
            refuse_missing()
        with tempfile.TemporaryDirectory(prefix="hf-zero-parity-") as text:
            self._folder = Path(text)
            script = None if self.request.module else Path(self.request.script)
            layers = self.fixed["layers"]
            return compare(self._run, script, self.resume, self.say, self.reference, layers)

    def _run(self, name: str, ranks: int | None = None, **fields: Any) -> RunRecord:
        folder = self._folder / name
        folder.mkdir()
        fixed = {**self.fixed, "module": self.request.module}
        run = ComparedRun(**{"folder": str(folder), **fixed, **fields})
        run.write(folder / "run.json")
        words = (str(folder / "run.json"), self.request.script, *self.request.arguments)
        request = replace(self.request, script=PROGRAM, module=True, arguments=words)
        if ranks is not None:
            request = replace(request, num_procs=ranks)
        request, variables = start_of(request, run.engine)
        (start,) = plan(request, self.default_ranks).starts
        output = folder / "output.log"
        code = self._wait(name, start.command, {**start.environment, **variables}, output)
        record = RunRecord(folder)
        if code or not record.complete:
            self._fail(name, code, output)
        return record

    def _wait(
        self, name: str, command: Sequence[str], environment: dict[str, str], output: Path
    ) -> int:
        """Run ``command`` to its end, and report its steps. Whatever ends this process ends it."""
        # sets are iterated over alike in all runs; torchrun leaves its folder of logs behind
        fixed = {"PYTHONHASHSEED": "0", "PET_LOG_DIR": str(output.parent)}
        with open(output, "wb") as sink:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                env={**fixed, **os.environ, **environment},
                start_new_session=True,
            )
        record, steps, changed = output.parent / "rank0.jsonl", 0, time.monotonic()
        told = name != "reference" or self.reference != TORCH
        try:
            while process.poll() is None:
                time.sleep(POLL_SECONDS)
                if not told and record.exists() and (lines := read(record)):
                    told = True
                    self.say(
                        "each rank of the reference holds the whole model, its gradients and the "
                        f"optimizer's state: {in_units(lines[0].get('bytes', 0))}"
                    )
                made = record.read_bytes().count(b'"losses"') if record.exists() else 0
                made = min(made, self.fixed["steps"] or made)
                if made > steps:
                    steps, changed = made, time.monotonic()
                    self.report(name, steps)
                elif time.monotonic() - changed > SILENT_SECONDS:
                    changed = time.monotonic()
                    self.say(
                        f"the {name} run has made no step for {SILENT_SECONDS / 60:.0f} minutes: "
                        "Ctrl-C ends it, if the script waits for something"
                    )
        finally:
            _end(process)
        return process.returncode

    def _fail(self, name: str, code: int, output: Path) -> None:
        text = output.read_text(encoding="utf-8", errors="replace")
        lines = [line for line in text.splitlines() if line.strip()][-LAST_LINES:]
        begins = next((at for at, line in enumerate(lines) if BEGINS_ERROR.match(line)), 0)
        said = "\n".join(f"  {line}" for line in lines[begins:])
        if NO_TERMINAL in text:
            raise ParityError(
                "the script reads from a terminal, which it does not have here; pass what it asks "
                "for as arguments"
            )
        errors = ERROR.findall(text)
        answers = [said for kind, said in errors if kind in ANSWERS] + UNKNOWN.findall(text)
        if answers:
            raise ParityError(answers[0])
        if name == "reference" and errors:
            raise ParityError(
                f"with {REPLACED_BY[self.reference]} the script ended with {': '.join(errors[-1])}"
            )
        if name == "reference":
            why = f"with {REPLACED_BY[self.reference]} the script ended with code"
            todo = "so the difference is not hf-zero's; make it run alone first"
        else:
            why = f"the {name} run ended with code"
            todo = "where the reference trained"
        cause = None if self.request.module else cause_of_failure(text, Path(self.request.script))
        ending = "" if cause is None else f"\n  cause: {cause}"
        raise ParityError(f"{why} {code}, {todo}. Its last lines:\n{said}{ending}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the launcher, which ends its ranks, if it is not over."""
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def refuse_untrained(record: RunRecord) -> None:
    """Raise ParityError for the record of a script that has trained nothing."""
    if not record.engines:
        raise ParityError(
            "the script ended without an engine that trains: it calls neither hf_zero.initialize "
            "nor a trainer with ZeRO, or starts ranks of its own; pass the script that trains, and "
            "let --ranks start its ranks"
        )
    if not record.last_step:
        raise ParityError(
            "the script ended without a step of the optimizer: it trains nothing; pass it the "
            "arguments with which it trains"
        )


def compare(
    make_run: MakeRun,
    script: Path | None,
    resume: Resume | None = None,
    say: Callable[[str], None] | None = None,
    kind: str = TORCH,
    layers: int = 0,
) -> Answer:
    """Return the answer of the runs that ``make_run`` makes: the reference of this ``kind``, the
    engine as it is configured, the reference twice again if rounding has to be measured, and with
    ``resume`` one that is stopped and resumed; ``layers``: of the blocks of its models. Raises
    ParityError if the script cannot be compared.
    """
    reference = make_run("reference", engine=kind)
    refuse_untrained(reference)
    if layers and not any(reference.about(of)["blocks"] for of in range(reference.engines)):
        raise ParityError(
            f"--layers {layers}: the script makes no model of Transformers whose configuration "
            f"counts more than {counted(layers, 'block')}; leave the option out"
        )
    last = reference.last_step
    if resume is not None and not 0 < resume.at < last:
        raise ParityError(
            f"--resume-at {resume.at} leaves no step to compare after it: the runs have {last} "
            f"steps; pass 1 to {last - 1}, or more --steps"
        )
    run = make_run(ENGINE, engine=ENGINE)
    measured, repeats, outcome = None, True, _outcome(reference, run)
    if outcome.first is not None and run.engines == reference.engines:
        third = {"engine": kind, "variant": FULL_PRECISION if reference.mixed else LAST_BITS}
        if kind == PLAIN and reference.mixed:  # by autocast, which rounds less than a cast model
            third = {"engine": TORCH}
        try:
            repeats = is_repeated(reference, make_run("repeat", engine=kind, steps=1))
            if repeats:
                measured = make_run("rounding", **third, skipped=tuple(reference.skipped))
        except ParityError as error:
            if say is not None:
                say(f"what rounding does could not be measured: {error}")
    if measured is not None:
        # a model in full precision may generate other tokens
        repeats = reference.mixed or same_inputs(reference, measured, last) is None
        if repeats:
            outcome = _outcome(reference, run, measured)
    first, cause, log = outcome.first, None, list[str]()
    if first is not None:
        cause = cause_of(first, reference, run, repeats, script)
        if cause == OF_ENGINE and (kept := run.about(first.engine).get("kept")):
            cause = of_kept_settings(kept)
        for line in run.steps.get((first.engine, first.step), []):
            log += [message for message in line["log"] if message not in log]
    resumed = None
    if resume is not None and first is None:
        resumed = _resumed(make_run, reference, measured, resume)
    about = [run.about(engine) for engine in range(run.engines)]
    own = [{of.about(n)["own_update"] for n in range(of.engines)} for of in (reference, run)]
    return Answer(
        outcome,
        int(about[0]["world"]),
        str(reference.about(0)["precision"]),
        measured is not None,
        sorted({name for of in about for name in of["left_out"]}),
        sorted(own[0] & own[1] - {None}),
        cause,
        log,
        resumed,
        kind,
    )


def _outcome(
    reference: RunRecord, run: RunRecord, measured: RunRecord | None = None
) -> ComparisonResult:
    """Return the outcome of all steps and, of scripts that have ended by themselves, of what they
    have saved.
    """
    comparison = Comparison(reference, run, measured)
    outcome = comparison.outcome()
    if outcome.first is None and {*reference.ends, *run.ends} == {BY_ITSELF}:
        for difference in saved_differences(reference, run, measured, comparison.mixed):
            if difference is not None:
                outcome.first = difference
                break
            outcome.saved += 1
    return outcome


def _resumed(
    make_run: MakeRun, reference: RunRecord, measured: RunRecord | None, resume: Resume
) -> ResumeAnswer:
    """Return the answer about a run that is stopped and resumed."""
    stopped = make_run("stopped", engine=ENGINE, stop_at=resume.at)
    folder = str(stopped.folder)
    run = make_run("resumed", ranks=resume.ranks, engine=ENGINE, resume=folder)
    refuse_untrained(run)
    after = run.about(0)["resumed_at"] or resume.at
    outcome = Comparison(reference, run, measured, after).outcome()
    ranks = int(run.about(0)["world"])
    first, cause = outcome.first, None
    if first is not None:
        cause = cause_of_resume(first, reference, run, after)
    return ResumeAnswer(outcome, after, ranks, cause)
