"""``metrics.jsonl``: one line of figures for each optimizer step, in order and without repeats.

A file that exceeds its size is renamed ``metrics.<number>.jsonl``, from 1 on, and another begins.
A run that resumes from step N continues behind the line of step N: later lines, of steps that it
repeats, move to ``metrics.replaced.jsonl``.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_zero.errors import ConfigError

NAME = "metrics.jsonl"
REPLACED = "metrics.replaced.jsonl"


def files_of(folder: Path) -> list[Path]:
    """Return the files of a run's figures, in the order of their steps."""
    numbered = {
        int(part): path
        for path in folder.glob("metrics.*.jsonl")
        if (part := path.name.split(".")[1]).isdigit()
    }
    last = folder / NAME
    return [*(numbered[number] for number in sorted(numbered)), *([last] if last.exists() else [])]


def read_metrics(folder: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """Yield the figures of each step of the run in ``folder``; a line that a crash has cut off is
    skipped.
    """
    for path in files_of(Path(folder)):
        for line in path.read_text().splitlines():
            if (row := _parsed(line)) is not None:
                yield row


def _parsed(line: str) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


class MetricsFile:
    """Writes the lines of one run to ``folder`` once :meth:`keep_in` has named it, until then to
    memory.
    """

    def __init__(self, rotate_bytes: int):
        self.folder: Path | None = None
        self.waiting: list[str] = []  # lines without a file yet
        self._rotate_bytes = rotate_bytes
        self._after = 0  # the step that this run continues
        self._begun = False

    def keep_in(self, folder: str | os.PathLike[str]) -> None:
        """Write to ``folder`` from the next step on, unless it was named before. Raises ConfigError
        if it cannot be made.
        """
        if self.folder is not None:
            return
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"metrics: {folder} cannot be made ({error}); write metrics.path"
            ) from error
        self.folder = Path(folder)

    def resume_after(self, step: int) -> None:
        """Continue behind ``step``, from which the run goes on."""
        self._after, self._begun = step, False
        self.waiting = [line for line in self.waiting if json.loads(line)["step"] <= step]

    def write(self, figures: Mapping[str, Any]) -> None:
        """Append the line of one step. A number that is not finite is null."""
        self.waiting.append(json.dumps({k: _finite(value) for k, value in figures.items()}))
        if self.folder is not None and self._flush(self.folder) > self._rotate_bytes:
            self.sync()
            number = len(files_of(self.folder))
            (self.folder / NAME).rename(self.folder / f"metrics.{number}.jsonl")

    def sync(self) -> None:
        """Return when all lines are on disk."""
        if self.folder is not None and (self.waiting or (self.folder / NAME).exists()):
            self._flush(self.folder)
            with open(self.folder / NAME, "rb") as opened:
                os.fsync(opened.fileno())

    def _flush(self, folder: Path) -> int:
        """Write the lines that wait; return the bytes of the file."""
        if not self._begun:
            self._drop_repeats(folder)
            self._begun = True
        lines, self.waiting = self.waiting, []
        return _append(folder / NAME, lines)

    def _drop_repeats(self, folder: Path) -> None:
        """Move the lines of steps that this run repeats."""
        for path in reversed(files_of(folder)):
            text = path.read_text()
            rows = [(line, _parsed(line)) for line in text.splitlines()]
            whole = [(line, row["step"]) for line, row in rows if row is not None]
            repeated = [line for line, step in whole if step > self._after]
            if not repeated and len(whole) == len(rows) and text.endswith("\n"):
                break
            _append(folder / REPLACED, repeated)
            _replace(path, [line for line, step in whole if step <= self._after])


def _append(path: Path, lines: Sequence[str]) -> int:
    """Append ``lines`` to ``path``; return its size in bytes."""
    with open(path, "a") as opened:
        opened.writelines(f"{line}\n" for line in lines)
        return opened.tell()


def _replace(path: Path, lines: Sequence[str]) -> None:
    """Replace ``path`` by ``lines`` at once; remove it if there are none."""
    if not lines:
        path.unlink()
        return
    draft = path.with_suffix(".draft")
    with open(draft, "w") as opened:
        opened.writelines(f"{line}\n" for line in lines)
        opened.flush()
        os.fsync(opened.fileno())
    draft.replace(path)


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
