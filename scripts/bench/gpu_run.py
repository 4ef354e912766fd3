"""The cells of scripts/gpu in the time there is, and the table of goals at the end.

    python scripts/bench/gpu_run.py --minutes 9 [--out FOLDER] [--deepspeed FOLDER]
    python scripts/bench/gpu_run.py --tiny --only "pinning"          # on the CPU: does it run?
    python scripts/bench/gpu_run.py --table FILE                     # the table of rows that are
    there

Cells run in the order of gpu_cells.py, each in a process of its own; one that is expected to take
more than is left is passed over, and one that takes three times what is expected is ended. Every
row goes to a new file as soon as it is there; so does what failed, is not installed, or found no
time. What a cell wrote to stderr is kept in the folder of the file's name. The native core is built
before the first cell that needs it. A run never goes on with another's file. SIGTERM ends the cell
under way and prints the table.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from gpu_cells import CELLS, Cell, here
from gpu_goals import table
from train_gpu import environment

SCRIPT = Path(__file__).with_name("gpu_cells.py")
MARGIN = 5.0  # seconds kept for the table
ERROR_LENGTH = 300  # characters of the last line that a failed cell wrote, in its row
HANGS = 3  # times what a cell is expected to take
BUILD_SECONDS = 120.0  # the most that the native core may take
COMPILERS = ("cc", "gcc", "clang")


class CellFailed(Exception):
    """A cell ended without success; its message says how."""


class Stopped(BaseException):
    """SIGTERM: the run ends with its table."""


Execute = Callable[[Cell, float], Iterator[dict[str, Any]]]


@dataclass
class Run:
    """``deadline`` is on ``clock``; ``execute(cell, limit)`` yields a cell's rows and raises
    CellFailed.
    """

    path: Path
    execute: Execute
    deadline: float
    installed: Callable[[str], bool] = here
    clock: Callable[[], float] = time.monotonic
    build: Callable[[float], str] = lambda limit: ""  # the native core; why it could not be
    built: bool = False
    rows: list[dict[str, Any]] = field(default_factory=list)

    def write(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def _build(self) -> None:
        begun, self.built = self.clock(), True
        failed = self.build(min(BUILD_SECONDS, self.deadline - MARGIN - begun))
        self.write({"native_core": failed or "built", "s": self.clock() - begun})
        print(f"native core: {failed or 'built'}", flush=True)

    def cells(self, cells: Iterable[Cell]) -> None:
        for cell in cells:
            if cell.native and not self.built:
                self._build()
            left = self.deadline - MARGIN - self.clock()
            if cell.needs and not self.installed(cell.needs):
                self._note(cell, missing=f"{cell.needs} is not installed")
            elif left < cell.seconds:
                self._note(
                    cell,
                    skipped=f"expected to take {cell.seconds} s, {max(left, 0):.0f} s are left",
                )
            else:
                self._one(cell, min(left, HANGS * cell.seconds))

    def _one(self, cell: Cell, limit: float) -> None:
        begun = self.clock()
        try:
            for row in self.execute(cell, limit):
                self.write(row)
                print(f"{self.clock() - begun:.0f} s: {summary(row)}", flush=True)
        except CellFailed as failure:
            self._note(cell, failed=str(failure))
            return
        print(f"{cell.name}: {self.clock() - begun:.0f} s", flush=True)

    def _note(self, cell: Cell, **why: str) -> None:
        self.write({"work": cell.work, "of": cell.of, **why})
        print(
            f"{cell.name}: {' '.join(f'{what}: {said}' for what, said in why.items())}", flush=True
        )


def summary(row: dict[str, Any]) -> str:
    """A row in a line: whose it is, its numbers, and what it does not count for."""
    numbers = [
        f"{name} {value:.4g}"
        for name, value in row.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    ]
    if row.get("replaced"):
        numbers.append(f"without the kernels {', '.join(row['replaced'])}")
    return f"{row.get('work', '')} {row.get('of', '')}: {', '.join(numbers)}"


def build_native_core(limit: float) -> str:
    """Build it in place; why that failed, or ""."""
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    try:
        done = subprocess.run(
            command, cwd=root, capture_output=True, text=True, timeout=max(limit, 1.0)
        )
    except subprocess.TimeoutExpired:
        return f"no end within {limit:.0f} s"
    said = [line for line in done.stderr.splitlines() if line.strip()]
    return "" if not done.returncode else (said[-1] if said else f"ended with {done.returncode}")


def compiler() -> str | None:
    """The C compiler that Triton would build its launchers with."""
    return next(filter(None, map(shutil.which, [os.environ.get("CC", ""), *COMPILERS])), None)


def in_a_process(
    tiny: bool, deepspeed: str | None, script: Path = SCRIPT, logs: Path | None = None
) -> Execute:
    """Cells in fresh processes, whose whole group is ended when the limit is over; what they write
    to stderr goes to a file of ``logs``.
    """

    def execute(cell: Cell, limit: float) -> Iterator[dict[str, Any]]:
        command = [sys.executable, str(script), cell.name, *(["--tiny"] if tiny else [])]
        env = environment("ds" if cell.needs == "deepspeed" else "", deepspeed)
        name = re.sub(r"[^\w.+-]+", "_", cell.name) + ".txt"
        if logs is not None:
            logs.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile("w+") if logs is None else (logs / name).open("w+") as errors:
            process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=env,
                start_new_session=True,
            )

            def end() -> None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)

            late = threading.Event()
            timer = threading.Timer(limit, lambda: (late.set(), end()))
            timer.start()
            try:
                assert process.stdout is not None
                for line in process.stdout:
                    if line.startswith("ROW "):
                        yield json.loads(line.removeprefix("ROW "))
                code = process.wait()
            finally:
                timer.cancel()
                end()
                process.wait()
            if late.is_set():
                raise CellFailed(f"no end within {limit:.0f} s")
            if code:
                errors.seek(0)
                said = [line.strip() for line in errors if line.strip()]
                raise CellFailed(
                    f"ended with {code}: {said[-1][-ERROR_LENGTH:] if said else 'nothing said'}"
                )

    return execute


def parser_of_parts(description: str | None, parts: str) -> argparse.ArgumentParser:
    """Return the parser of a call that measures one of its ``parts``, such as "1 to 4"."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", help=f"{parts}, or the name of one cell")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument(
        "--spent", type=float, default=0.0, help="seconds of the call that are gone"
    )
    return parser


def refuse_part(part: str, parts: str, cells: Iterable[str]) -> NoReturn:
    """Exit with one line: ``part`` is none of ``parts`` and names none of ``cells``."""
    raise SystemExit(f"{part!r} is neither a part, {parts}, nor one of {', '.join(cells)}")


def part_run(script: Path, name: str, out: Path, tiny: bool, seconds: float) -> Run:
    """Return a run of cells of ``script`` within ``seconds``; rows go to a new file in ``out``."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{name}-{datetime.datetime.now():%Y-%m-%d-%H%M%S}.jsonl"
    execute = in_a_process(tiny, None, script, path.with_suffix(""))
    return Run(path, execute, time.monotonic() + seconds)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60.0, help="for the cells and the table")
    parser.add_argument(
        "--spent", type=float, default=0.0, help="seconds of them that are gone already"
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--only", default="", help="cells whose name has this in it")
    parser.add_argument(
        "--deepspeed",
        metavar="FOLDER",
        help="what `pip install --target FOLDER --no-deps deepspeed hjson …` made",
    )
    parser.add_argument("--tiny", action="store_true", help="on the CPU, tiny: does it run?")
    parser.add_argument(
        "--table",
        type=Path,
        metavar="FILE",
        help="print the table of these rows and measure nothing",
    )
    chosen = parser.parse_args()
    if chosen.table:
        print(table(read(chosen.table)))
        return
    deadline = time.monotonic() + 60 * chosen.minutes - chosen.spent

    def stop(*_: object) -> None:
        raise Stopped

    signal.signal(signal.SIGTERM, stop)
    chosen.out.mkdir(parents=True, exist_ok=True)
    path = (
        chosen.out
        / f"gpu-{datetime.datetime.now():%Y-%m-%d-%H%M%S}{'-tiny' if chosen.tiny else ''}.jsonl"
    )
    found = compiler()
    if found is None:
        print(
            "no C compiler is on the path: Triton cannot launch kernels, so their references run "
            "and no figure counts as hf-zero's, and the native core is not built; install gcc",
            flush=True,
        )
    run = Run(
        path,
        in_a_process(chosen.tiny, chosen.deepspeed, logs=path.with_suffix("")),
        deadline,
        lambda package: (
            bool(chosen.deepspeed) or here(package) if package == "deepspeed" else here(package)
        ),
        build=build_native_core,
    )
    run.write(
        {
            "minutes": chosen.minutes,
            "spent": chosen.spent,
            "only": chosen.only,
            "cores": os.cpu_count(),
            "compiler": found,
        }
    )
    try:
        run.cells(cell for cell in CELLS if chosen.only in cell.name)
    except (Stopped, KeyboardInterrupt):
        run.write({"stopped": "asked to end"})
        print("asked to end")
    print(f"rows in {path}\n\n{table(run.rows)}", flush=True)


if __name__ == "__main__":
    main()
