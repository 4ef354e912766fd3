"""Files of the converter: filled window by window from the chunks of a checkpoint, cast, and
written by several threads; a lock on the target folder; the journal from which an interrupted
conversion resumes; new folders that are complete or absent.

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
import secrets
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from hf_zero.checkpoint import find, storage
from hf_zero.checkpoint.convert.outputs import OutputTensor
from hf_zero.checkpoint.host_folders import FileLock
from hf_zero.checkpoint.progress import Tick
from hf_zero.checkpoint.reader import Checkpoint, Scratch
from hf_zero.checkpoint.storage import (
    AnyPath,
    fsync_path,
    is_remote,
    make_folder,
    rename_durably,
    write_all,
)
from hf_zero.checkpoint.tensorfile import DATA_ALIGNMENT, FilePlan
from hf_zero.errors import CheckpointError
from hf_zero.logging import JsonObject, logger, parse_json

LOCK = find.NEW + "lock"


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Hold the lock of ``folder`` for the ``with`` block.

    Raises CheckpointError if another conversion, in this or another process, holds it. On a file
    system without locks, other processes are not kept out, as a warning says.
    """
    try:
        lock = lock_if_supported(lambda: FileLock.on_current(folder / LOCK, fcntl.LOCK_EX))
    except BlockingIOError as error:
        raise CheckpointError(
            f"{folder} is being written by another conversion; wait until it ends, or "
            "choose another folder"
        ) from error
    try:
        yield
    finally:
        if lock is not None:
            lock.remove()


def lock_if_supported(take: Callable[[], FileLock]) -> FileLock | None:
    """Return the lock that ``take`` returns; None, with a warning, on a file system without locks:
    there, every conversion goes on without one.
    """
    try:
        return take()
    except CheckpointError as error:
        logger.warning("%s; this conversion goes on without a lock", error)
        return None


def refuse_link(folder: Path) -> None:
    """Raise CheckpointError if ``folder``, to be written to, is a link."""
    if folder.is_symlink():
        raise CheckpointError(
            f"{folder} is a link to {os.readlink(folder)}, and no link is written through; name "
            "the folder that it leads to, or a new one"
        )


def refuse_target(target: Path, source: AnyPath, may_hold: bool = False) -> None:
    """Raise CheckpointError for a ``target`` that is a link, that is the checkpoint ``source`` or
    is in it, or that holds it, unless it ``may_hold`` it.
    """
    refuse_link(target)
    if is_remote(source):
        return
    to, read = target.resolve(), source.resolve()
    how = "is" if to == read else "is in" if to.is_relative_to(read) else ""
    if not how and not may_hold and read.is_relative_to(to):
        how = "holds"
    if how:
        raise CheckpointError(
            f"{target} {how} the checkpoint that is read, {source}; name another folder, such as a "
            "new one beside it"
        )


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Yield an empty folder that is renamed to ``target`` if the ``with`` block succeeds, once all
    in it is on the device, else removed. Raises CheckpointError if ``target`` exists and is not an
    empty folder.
    """
    target = Path(os.path.abspath(target))
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"{target} exists; remove it, or name another folder")
    unfinished = target.with_name(f".{target.name}.{secrets.token_hex(8)}")
    make_folder(unfinished)
    try:
        yield unfinished
        for path in (*unfinished.rglob("*"), unfinished):
            fsync_path(path)
        rename_durably(unfinished, target)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def torch_save(value: object, path: Path) -> None:
    """Write ``value`` with torch.save. Raises OSError if the file cannot be written."""
    with open(path, "wb") as file:
        try:
            torch.save(value, file)
        except RuntimeError as error:
            raise file_error(error) from None


def file_error(error: BaseException) -> BaseException:
    """Return the OSError of the file behind an error of torch, which ends its archive while the
    former is raised, and fails again; ``error`` itself if there is none.
    """
    return error.__context__ if isinstance(error.__context__, OSError) else error


JOURNAL = find.NEW + "journal"


def temporary_path(target: Path, name: str) -> Path:
    """Return the path at which the file ``name`` of ``target`` is written until it is complete."""
    return (target / name).with_name(find.NEW + Path(name).name)


def remove_irregular(files: Iterable[Path]) -> None:
    """Remove links, pipes and devices in place of ``files``, which are to be written: a link leads
    elsewhere, and a pipe is waited for.
    """
    for path in files:
        if path.is_symlink() or (path.exists() and not path.is_file()):
            path.unlink()


class Journal:
    """Journal in ``target`` of the conversion ``identity`` into the files ``names``; ``resumes`` if
    the same conversion was interrupted there.

    Removes what another conversion left there.
    """

    def __init__(self, target: Path, identity: str, names: Sequence[str]) -> None:
        self._path, self._names = target / JOURNAL, tuple(names)
        self._target = target
        new = self._path.with_name(self._path.name + "-new")
        remove_irregular([self._path, new, *(temporary_path(target, name) for name in names)])
        noted = _read(self._path)
        self._kept: dict[str, int] = {}
        self.resumes = bool(noted) and noted[0].get("identity") == identity
        if self.resumes:
            self._kept = dict(_stretches(target, names, noted[1:]))
        else:
            _remove(target, noted)
        # Rewrite the file, so that new lines do not follow one that was cut off.
        lines = [
            {"identity": identity, "files": list(names)},
            *({"file": f, "bytes": n} for f, n in self._kept.items()),
        ]
        storage.write_file(new, "".join(json.dumps(line) + "\n" for line in lines).encode())
        os.replace(new, self._path)

    def kept(self, name: str) -> int:
        """Return how many leading bytes of the temporary file of ``name`` are already written."""
        return self._kept.get(name, 0)

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
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return []
    lines: list[dict[str, object]] = []
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


def _stretches(
    target: Path, names: Sequence[str], lines: Sequence[dict[str, object]]
) -> Iterator[tuple[str, int]]:
    """Yield (file, bytes) from ``lines`` for files that still exist and are that long."""
    for line in lines:
        name, nbytes = line.get("file"), line.get("bytes")
        if isinstance(name, str) and name in names and isinstance(nbytes, int):
            with suppress(FileNotFoundError):
                if temporary_path(target, name).stat().st_size >= nbytes:
                    yield name, nbytes


def _remove(target: Path, lines: Sequence[dict[str, object]]) -> None:
    listed = lines[0].get("files") if lines else None
    for name in listed if isinstance(listed, list) else ():
        # The journal is not trusted: remove files inside the target folder only.
        if (
            isinstance(name, str)
            and name
            and ".." not in Path(name).parts
            and not Path(name).is_absolute()
        ):
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
            write_all(self.fd, whole, start)
        except OSError as error:
            # Some file systems accept O_DIRECT and refuse the write, and the rest of a short write
            # does not start on a page boundary. Another thread may have cleared the flag since.
            if error.errno != errno.EINVAL:
                raise
            fcntl.fcntl(self.fd, fcntl.F_SETFL, fcntl.fcntl(self.fd, fcntl.F_GETFL) & ~DIRECT)
            write_all(self.fd, whole, start)

    def finish(self) -> None:
        os.ftruncate(self.fd, self.plan.size)
        os.fsync(self.fd)


class _WrittenPrefix:
    """Length of the contiguously written prefix of a file whose windows finish out of order."""

    def __init__(self, at: int) -> None:
        self.at = self._noted = at
        self._done: set[int] = set()

    def finished(self, start: int) -> int | None:
        """Record the finished window that starts at ``start``. Returns the length of the prefix if
        it has grown enough to be noted in the journal, else None.
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
    """Write the rest of the temporary file of ``name``, after the part that the journal has
    recorded, and flush it to the device.
    """
    written = journal.kept(name)
    if written:
        tick(max(0, written - len(plan.header)))
    if written == plan.size:
        return
    written -= written % DATA_ALIGNMENT  # every note is aligned, but the journal is not trusted
    file = _WindowedFile(temporary_path(target, name), plan, part, fresh=not written)
    try:
        _fill(
            checkpoint,
            file,
            iter(range(written, plan.size, WINDOW)),
            _WrittenPrefix(written),
            name,
            journal,
            workers,
            tick,
        )
        file.finish()
        journal.note(name, plan.size)
    finally:
        os.close(file.fd)


def _fill(
    checkpoint: Checkpoint,
    file: _WindowedFile,
    starts: Iterator[int],
    front: _WrittenPrefix,
    name: str,
    journal: Journal,
    workers: int,
    tick: Tick,
) -> None:
    """Run the workers, which take windows from one shared iterator so that none is queued."""
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
                    reached = front.finished(start)
                if reached is not None and reached < file.plan.size:
                    with noting:
                        os.fsync(file.fd)
                        journal.note(name, reached)
                tick(max(0, start + count - max(start, len(file.plan.header))))
        except BaseException:
            failed.set()
            raise

    with ThreadPoolExecutor(workers) as pool:
        running = [pool.submit(work) for _ in range(workers)]
        try:
            for worker in running:
                worker.result()
        except BaseException:
            failed.set()  # an interrupt reaches this thread alone; the pool waits for the others
            raise
