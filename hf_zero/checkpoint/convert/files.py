"""Weight files of the converter: filled window by window from the chunks of a checkpoint, cast, and
written by several threads; and the journal from which a conversion that was killed resumes.

Windows start and end at multiples of a page, for direct I/O: the page cache would cost another copy
of the bytes, and would evict pages that others use.
"""

from __future__ import annotations

import bisect
import errno
import fcntl
import json
import mmap
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import torch

from hf_zero.checkpoint import find, storage
from hf_zero.checkpoint.convert.outputs import OutputTensor
from hf_zero.checkpoint.convert.targets import remove_irregular, temporary_path
from hf_zero.checkpoint.progress import Tick
from hf_zero.checkpoint.reader import Checkpoint, Scratch
from hf_zero.checkpoint.tensorfile import DATA_ALIGNMENT, FilePlan
from hf_zero.logging import JsonObject, parse_json

JOURNAL = find.NEW + "journal"


class Journal:
    """Journal in ``target`` of the conversion ``identity`` into the files ``names``. Its first line
    names these; each further one says how many bytes of a temporary file are on the device.

    ``resumes``: the same conversion was interrupted there. What another one left is removed.
    """

    def __init__(self, target: Path, identity: str, names: Sequence[str]) -> None:
        self._path, self._names = target / JOURNAL, tuple(names)
        self._target = target
        new = self._path.with_name(self._path.name + "-new")
        remove_irregular([self._path, new, *(temporary_path(target, name) for name in names)])
        lines_before = _read(self._path)
        self._written: dict[str, int] = {}
        self.resumes = bool(lines_before) and lines_before[0].get("identity") == identity
        if self.resumes:
            self._written = dict(_notes(target, names, lines_before[1:]))
        else:
            _remove(target, lines_before)
        # Rewrite the file, so that new lines do not follow one that was cut off.
        lines = [
            {"identity": identity, "files": list(names)},
            *({"file": name, "bytes": nbytes} for name, nbytes in self._written.items()),
        ]
        storage.write_file(new, "".join(json.dumps(line) + "\n" for line in lines).encode())
        os.replace(new, self._path)

    def written(self, name: str) -> int:
        """Return how many leading bytes of the temporary file of ``name`` are on the device, noted
        by the conversion that was interrupted.
        """
        return self._written.get(name, 0)

    def note(self, name: str, nbytes: int) -> None:
        """Record that the first ``nbytes`` of the temporary file of ``name`` are on the device."""
        with open(self._path, "ab") as file:
            file.write(json.dumps({"file": name, "bytes": nbytes}).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def clear(self) -> None:
        """Remove the journal and every temporary file of this conversion."""
        _remove(self._target, [{"files": list(self._names)}])


def _read(path: Path) -> list[JsonObject]:
    """Return the lines of a journal, up to the first that is damaged; [] without one."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return []
    lines: list[JsonObject] = []
    # The text after the last newline is empty, or a line that was cut off.
    for line in content.split(b"\n")[:-1]:
        try:
            read = parse_json(line)
        except ValueError:
            break
        if not isinstance(read, dict):
            break
        lines.append(read)
    return lines


def _notes(
    target: Path, names: Sequence[str], lines: Sequence[JsonObject]
) -> Iterator[tuple[str, int]]:
    """Yield (file, bytes) from ``lines`` for files that still exist and are that long."""
    for line in lines:
        name, nbytes = line.get("file"), line.get("bytes")
        if isinstance(name, str) and name in names and isinstance(nbytes, int) and nbytes > 0:
            with suppress(FileNotFoundError):
                if temporary_path(target, name).stat().st_size >= nbytes:
                    yield name, nbytes


def _remove(target: Path, lines: Sequence[JsonObject]) -> None:
    """Remove a journal of ``lines`` and the temporary files that it names."""
    names = lines[0].get("files") if lines else None
    for name in names if isinstance(names, list) else ():
        # The journal is not trusted: remove files inside the target folder only.
        if not isinstance(name, str) or not name:
            continue
        if ".." not in Path(name).parts and not Path(name).is_absolute():
            with suppress(FileNotFoundError):
                temporary_path(target, name).unlink()
    (target / JOURNAL).unlink(missing_ok=True)


WINDOW = 8 << 20  # bytes, a multiple of DATA_ALIGNMENT; each worker holds one
# bytes between two notes in the journal: at most this much is written again after a crash
NOTED = 256 << 20
DIRECT = getattr(os, "O_DIRECT", 0)


class _WindowedFile:
    """A planned file, written by windows, with direct I/O where the file system supports it."""

    def __init__(
        self, path: Path, plan: FilePlan, part: Mapping[str, OutputTensor], fresh: bool
    ) -> None:
        self.plan, self.part = plan, part
        self._entries = [entry for entry in plan.entries if entry.end > entry.begin]
        self._ends = [entry.end for entry in self._entries]
        flags = os.O_WRONLY | os.O_CREAT | (os.O_TRUNC if fresh else 0)
        try:
            self.fd = os.open(path, flags | DIRECT, 0o666)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self.fd = os.open(path, flags, 0o666)

    def fill(self, checkpoint: Checkpoint, start: int, buffer: mmap.mmap, scratch: Scratch) -> int:
        """Put bytes ``[start, start + WINDOW)`` of the file, up to its end, into ``buffer`` and
        return their number.
        """
        header = self.plan.header
        stop = min(start + WINDOW, self.plan.size)
        buffer[: max(0, len(header) - start)] = header[start:stop]
        # The header's length and the windows' edges are multiples of every dtype's size, so no
        # element is split between windows.
        index = bisect.bisect_right(self._ends, start - len(header))
        while index < len(self._entries) and len(header) + self._entries[index].begin < stop:
            entry, size = self._entries[index], self._entries[index].dtype.itemsize
            base = len(header) + entry.begin
            first, last = max(base, start), min(len(header) + entry.end, stop)
            out = torch.frombuffer(
                buffer, dtype=entry.dtype, count=(last - first) // size, offset=first - start
            )
            checkpoint.read(self.part[entry.name].held, (first - base) // size, out, scratch)
            index += 1
        return stop - start

    def write(self, buffer: mmap.mmap, count: int, start: int) -> None:
        """Write the first ``count`` bytes of ``buffer`` at ``start``.

        The last page is written whole; :meth:`finish` truncates the file.
        """
        whole = memoryview(buffer)[: -(-count // DATA_ALIGNMENT) * DATA_ALIGNMENT]
        try:
            storage.write_all(self.fd, whole, start)
        except OSError as error:
            # Some file systems accept O_DIRECT and refuse the write, and the rest of a short write
            # does not start on a page boundary. Another thread may have cleared the flag since.
            if error.errno != errno.EINVAL:
                raise
            fcntl.fcntl(self.fd, fcntl.F_SETFL, fcntl.fcntl(self.fd, fcntl.F_GETFL) & ~DIRECT)
            storage.write_all(self.fd, whole, start)

    def finish(self) -> None:
        os.ftruncate(self.fd, self.plan.size)
        os.fsync(self.fd)


class _WrittenPrefix:
    """Length of the contiguously written prefix of a file whose windows finish out of order."""

    def __init__(self, at: int) -> None:
        self.at = self._noted = at
        self._done: set[int] = set()

    def add(self, start: int) -> int | None:
        """Add the window that starts at ``start``, which is written. Return the length of the
        prefix if it has grown enough to be noted in the journal, else None.
        """
        self._done.add(start)
        while self.at in self._done:
            self._done.remove(self.at)
            self.at += WINDOW
        if self.at - self._noted < NOTED:
            return None
        self._noted = self.at
        return self.at


def write_part(
    checkpoint: Checkpoint,
    target: Path,
    name: str,
    plan: FilePlan,
    part: Mapping[str, OutputTensor],
    journal: Journal,
    workers: int,
    tick: Tick,
) -> None:
    """Write the rest of the temporary file of ``name``, after the bytes that the journal has noted,
    and flush it to the device. Each of the ``workers`` takes the next window when it has written
    one, so that none is queued.
    """
    written = journal.written(name)
    if written:
        tick(max(0, written - len(plan.header)))
    if written == plan.size:
        return
    written -= written % DATA_ALIGNMENT  # every note is aligned, but the journal is not trusted
    file = _WindowedFile(temporary_path(target, name), plan, part, fresh=not written)
    starts, prefix = iter(range(written, plan.size, WINDOW)), _WrittenPrefix(written)
    lock, noting, failed = threading.Lock(), threading.Lock(), threading.Event()

    def work() -> None:
        # anonymous mmap memory is page-aligned, as direct I/O requires
        scratch, buffer = Scratch(), mmap.mmap(-1, WINDOW)
        try:
            while not failed.is_set():
                with lock:
                    start = next(starts, None)
                if start is None:
                    return
                count = file.fill(checkpoint, start, buffer, scratch)
                file.write(buffer, count, start)
                with lock:
                    to_note = prefix.add(start)
                if to_note is not None and to_note < plan.size:
                    with noting:
                        os.fsync(file.fd)
                        journal.note(name, to_note)
                tick(max(0, start + count - max(start, len(plan.header))))
        except BaseException:
            failed.set()
            raise

    try:
        with ThreadPoolExecutor(workers) as pool:
            running = [pool.submit(work) for _ in range(workers)]
            try:
                for worker in running:
                    worker.result()
            except BaseException:
                failed.set()  # an interrupt reaches this thread alone; the pool waits for the rest
                raise
        file.finish()
        journal.note(name, plan.size)
    finally:
        os.close(file.fd)
