"""``metrics.jsonl``: one line of figures for each optimizer step, in order and without repeats, and
lines of other records between them: "run", the header of each start (``run_record.py``); "warning";
"totals", collectives and bytes so far; "trace", a file; "planned_steps", those of the whole run;
"evaluation", its results by name; "ranks", the states of all ranks in a wait of rank 0
(``distributed/state_rows.py``); "ended", the end of the engine. A record has the number of steps
before it as "after_step".

A file that exceeds its size is renamed ``metrics.<number>.jsonl``, from 1 on, and another begins.
A run that resumes from step N continues behind the line of step N: later lines, of steps that it
repeats, move to ``metrics.replaced.jsonl``; earlier headers and warnings stay.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_zero.errors import ConfigError
from hf_zero.logging import JsonObject, finite, logger, parse_json

NAME = "metrics.jsonl"
REPLACED = "metrics.replaced.jsonl"
TAIL = 256  # bytes before the place to continue from, which tell the same file from another


def files_of(folder: Path) -> list[Path]:
    """Return the files of a run's figures, in the order of their steps."""
    numbered, last = _numbered(folder), folder / NAME
    return [*(numbered[number] for number in sorted(numbered)), *([last] if last.is_file() else [])]


def _numbered(folder: Path) -> dict[int, Path]:
    return {
        int(part): path
        for path in folder.glob("metrics.*.jsonl")
        if (part := path.name.split(".")[1]).isdecimal() and path.is_file()
    }


def read_metrics(folder: str | os.PathLike[str]) -> Iterator[dict[str, object]]:
    """Yield the figures of each step of the run in ``folder``, but for a line that was cut off."""
    return (row for row in read_rows(folder) if "step" in row)


def read_rows(folder: str | os.PathLike[str]) -> Iterator[JsonObject]:
    """Yield the figures and the other records of the run in ``folder``, line by line."""
    for path in files_of(Path(folder)):
        yield from _rows(path.read_bytes())


def _rows(content: bytes) -> Iterator[dict[str, object]]:
    for line in content.decode("utf-8", "replace").splitlines():
        if (row := _parsed(line)) is not None:
            yield row


@dataclass
class _ReadFile:
    """The rows of a file's first ``end`` bytes, and the last bytes before that place."""

    end: int = 0
    tail: bytes = b""
    rows: list[dict[str, object]] = field(default_factory=list)


class MetricsReader:
    """Reads the run in ``folder`` repeatedly, and parses each line once. A file that has become
    shorter, or that another one has replaced, is read from its beginning.

    ``check``: called with each new row.
    """

    def __init__(self, folder: Path, check: Callable[[Mapping[str, object]], None] | None = None):
        self.folder = folder
        self._check = check
        self._files: dict[int, _ReadFile] = {}  # by inode: a rotation renames a file
        self.updated = 0.0  # when the files were last written, in seconds since 1970

    def rows(self) -> list[JsonObject]:
        """Return the figures and the other records of the run so far, as :func:`read_rows`."""
        former, self._files = self._files, {}
        records: list[JsonObject] = []
        for path in files_of(self.folder):
            with suppress(FileNotFoundError):  # renamed by a rotation: the next call reads it
                records += self._read(path, former)
        return records

    def _read(self, path: Path, files: Mapping[int, _ReadFile]) -> list[dict[str, object]]:
        with open(path, "rb") as opened:
            status = os.fstat(opened.fileno())
            file = files.get(status.st_ino, _ReadFile())
            opened.seek(file.end - len(file.tail))
            if opened.read(len(file.tail)) != file.tail:
                file = _ReadFile()
                opened.seek(0)
            content = opened.read()
        whole = content[: content.rfind(b"\n") + 1]
        file.rows += self._checked(whole)
        file.end += len(whole)
        file.tail = (file.tail + whole)[-TAIL:]
        self._files[status.st_ino], self.updated = file, max(self.updated, status.st_mtime)
        return [*file.rows, *self._checked(content[len(whole) :])]

    def _checked(self, content: bytes) -> list[dict[str, object]]:
        rows = list(_rows(content))
        if self._check is not None:
            for row in rows:
                self._check(row)
        return rows


def _parsed(line: str) -> dict[str, object] | None:
    try:
        row = parse_json(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(_place(row), int) else None


def _place(row: JsonObject) -> Any:
    return row.get("step", row.get("after_step"))


class MetricsFile:
    """Writes the lines of one run to ``folder`` once :meth:`keep_in` has named it, until then to
    memory. ``header``: the record "run", written before the first line, and again after a load.

    Lines that cannot be written wait, too, and a warning says so once: a full disk under one rank
    must not end a training of all.
    """

    def __init__(self, rotate_bytes: int, header: Mapping[str, object] | None = None):
        self.folder: Path | None = None
        self.waiting: list[JsonObject] = []  # lines without a file yet
        self._header = header
        self._last = 0  # the last step that was written
        self._rotate_bytes = rotate_bytes
        self._after = 0  # the step that this run continues
        self._begun = False
        self._failed: set[str] = set()  # kinds of failures, of which one warning each is given
        self._untold: list[str] = []  # those warnings until the lock is released
        # Warnings come from other threads, too, which hold the lock of their handler: none is given
        # under this one.
        self._lock = threading.RLock()

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
        """Continue behind ``step``, from which the run goes on: so do records since this start."""
        with self._lock:
            self._after, self._begun, self._last = step, False, step
            self.waiting = [
                row if "step" in row else row | {"after_step": max(step, row["after_step"])}
                for row in self.waiting
                if row.get("step", 0) <= step
            ]

    def write(self, figures: JsonObject) -> None:
        """Append the line of one step. A number that is not finite is null."""
        with self._writing():
            self._last = figures["step"]
            self.waiting.append({k: finite(value) for k, value in figures.items()})
            folder = self.folder
            if folder is not None and self._flush(folder) > self._rotate_bytes and self._sync():
                number = 1 + max(_numbered(folder), default=0)
                try:
                    (folder / NAME).rename(folder / f"metrics.{number}.jsonl")
                except OSError as error:
                    self._fail(
                        "renamed", f"{folder / NAME} cannot be renamed ({error}); it grows on"
                    )

    def note(self, kind: str, value: object) -> None:
        """Append a record, from any thread, after the first figures: a load may precede them."""
        with self._writing():
            row = {kind: value, "after_step": self._last, "time": round(time.time(), 3)}
            self.waiting.append(row)
            if self._begun and self.folder is not None:
                self._flush(self.folder)

    @property
    def lost_steps(self) -> int:
        """Steps whose figures are in no file."""
        return sum("step" in row for row in self.waiting)

    def sync(self) -> bool:
        """Return when all lines are on disk, and whether they could be written."""
        with self._writing():
            return self._sync()

    def _sync(self) -> bool:
        if self.folder is not None and (self.waiting or (self.folder / NAME).exists()):
            self._flush(self.folder)
            try:
                with open(self.folder / NAME, "rb") as opened:
                    os.fsync(opened.fileno())
            except OSError as error:
                self._fail_to_write(error)
                return False
        return not self.waiting

    def _flush(self, folder: Path) -> int:
        """Write the lines that wait; return the bytes of the file."""
        rows, self.waiting = self.waiting, []
        try:
            if not (folder / NAME).exists() and not _numbered(folder):
                self._begun = False  # somebody has removed them: another file begins
                folder.mkdir(parents=True, exist_ok=True)
            first: list[JsonObject] = []
            if not self._begun:
                repeated = self._drop_repeats(folder)
                if self._header is not None:
                    start = {"after_step": self._after, "repeated_steps": repeated}
                    first = [{"run": self._header, **start, "time": round(time.time(), 3)}]
            size = _append(folder / NAME, [json.dumps(row) for row in (*first, *rows)])
            self._begun = True
            return size
        except OSError as error:
            self.waiting = rows
            self._fail_to_write(error)
            return 0

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Context that holds the lock; warns of new failures once it has released it."""
        with self._lock:
            yield
            untold, self._untold = self._untold, []
        for text in untold:
            logger.warning("metrics: %s", text)

    def _fail_to_write(self, error: OSError) -> None:
        self._fail(
            "written", f"{self.folder} cannot be written ({error}); its lines wait in memory"
        )

    def _fail(self, kind: str, text: str) -> None:
        """Have a warning say ``text``, once for each ``kind``."""
        if kind not in self._failed:
            self._failed.add(kind)
            self._untold.append(text)

    def _drop_repeats(self, folder: Path) -> int:
        """Move the lines of steps that this run repeats; return the number of these steps. A run
        from the beginning has no earlier records.
        """
        steps = 0
        for path in reversed(files_of(folder)):
            text = path.read_bytes().decode("utf-8", "replace")
            rows = [(line, _parsed(line)) for line in text.splitlines()]
            whole = [(line, row) for line, row in rows if row is not None]
            repeated = [line for line, row in whole if self._repeats(row)]
            if not repeated and len(whole) == len(rows) and text.endswith("\n"):
                break
            steps += sum("step" in row for _, row in whole if self._repeats(row))
            _append(folder / REPLACED, repeated)
            _replace(path, [line for line, row in whole if not self._repeats(row)])
        return steps

    def _repeats(self, row: JsonObject) -> bool:
        replaced = "step" in row or "totals" in row or "evaluation" in row
        return not self._after or (replaced and _place(row) > self._after)


def _append(path: Path, lines: Sequence[str]) -> int:
    """Append ``lines`` to ``path``, all or none; return its size in bytes. Raises OSError."""
    content = "".join(f"{line}\n" for line in lines).encode()
    with open(path, "ab", buffering=0) as opened:
        begin = opened.tell()
        try:
            while content:
                content = content[opened.write(content) :]
        except OSError:
            opened.truncate(begin)
            raise
        return opened.tell()


def _replace(path: Path, lines: Sequence[str]) -> None:
    """Replace ``path`` by ``lines`` at once; remove it if there are none."""
    if not lines:
        path.unlink()
        return
    draft = path.with_suffix(".draft")
    with open(draft, "w", encoding="utf-8") as opened:
        opened.writelines(f"{line}\n" for line in lines)
        opened.flush()
        os.fsync(opened.fileno())
    draft.replace(path)
