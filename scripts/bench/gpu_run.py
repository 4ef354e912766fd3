"""The cells of scripts/gpu in the time there is, and the table of goals at the end.

    python scripts/bench/gpu_run.py --minutes 9 [--out FOLDER] [--deepspeed FOLDER]
    python scripts/bench/gpu_run.py --tiny --only "pinning"          # on the CPU: does it run?
    python scripts/bench/gpu_run.py --table FILE                     # the table of rows that are
    there

Cells run in the order of gpu_cells.py, each in a process of its own; one that is expected to take
more than is left is passed over. Every row goes to a new file as soon as it is there; so does what
failed, is not installed, or found no time. A run never goes on with another's file. SIGTERM ends
the cell under way and prints the table.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu_cells import CELLS, Cell, here
from gpu_goals import table
from train_gpu import environment

SCRIPT = Path(__file__).with_name("gpu_cells.py")
MARGIN = 5.0  # seconds kept for the table
ERROR_LENGTH = 300  # characters kept of the last line that a failed cell wrote


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
    rows: list[dict[str, Any]] = field(default_factory=list)

    def write(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def cells(self, cells: Iterable[Cell]) -> None:
        for cell in cells:
            left = self.deadline - MARGIN - self.clock()
            if cell.needs and not self.installed(cell.needs):
                self._note(cell, missing=f"{cell.needs} is not installed")
            elif left < cell.seconds:
                self._note(
                    cell,
                    skipped=f"expected to take {cell.seconds} s, {max(left, 0):.0f} s are left",
                )
            else:
                self._one(cell, left)

    def _one(self, cell: Cell, limit: float) -> None:
        begun = self.clock()
        try:
            for row in self.execute(cell, limit):
                self.write(row)
        except CellFailed as failure:
            self._note(cell, failed=str(failure))
            return
        print(f"{cell.name}: {self.clock() - begun:.0f} s", flush=True)

    def _note(self, cell: Cell, **why: str) -> None:
        self.write({"work": cell.work, "of": cell.of, **why})
        print(
            f"{cell.name}: {' '.join(f'{what}: {said}' for what, said in why.items())}", flush=True
        )


def in_a_process(tiny: bool, deepspeed: str | None, script: Path = SCRIPT) -> Execute:
    """Cells in fresh processes, whose whole group is ended when the limit is over."""

    def execute(cell: Cell, limit: float) -> Iterator[dict[str, Any]]:
        command = [sys.executable, str(script), cell.name, *(["--tiny"] if tiny else [])]
        env = environment("ds" if cell.needs == "deepspeed" else "", deepspeed)
        with tempfile.TemporaryFile("w+") as errors:
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
    run = Run(
        path,
        in_a_process(chosen.tiny, chosen.deepspeed),
        deadline,
        lambda package: (
            bool(chosen.deepspeed) or here(package) if package == "deepspeed" else here(package)
        ),
    )
    run.write(
        {
            "minutes": chosen.minutes,
            "spent": chosen.spent,
            "only": chosen.only,
            "cores": os.cpu_count(),
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
