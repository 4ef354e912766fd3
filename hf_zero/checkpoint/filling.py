"""The converter's files, window by window: each put together from the checkpoint's chunks, cast,
and written by one of several threads.

Windows begin and end at multiples of a page, so that they go to the device past the page cache:
there the bytes would be copied once more, and what they push out of it may be of use to others.
"""

from __future__ import annotations

import bisect
import errno
import fcntl
import mmap
import os
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from hf_zero.checkpoint.bar import Tick
from hf_zero.checkpoint.journal import Journal, temporary
from hf_zero.checkpoint.opened import Checkpoint
from hf_zero.checkpoint.outputs import Output, Scratch, read_cast
from hf_zero.checkpoint.tensorfile import DATA_ALIGNMENT, Plan, write_all

WINDOW = 8 << 20  # bytes, a multiple of DATA_ALIGNMENT; each worker holds one
# bytes after which what lies on the device is noted: as much is done again after a crash
NOTED = 256 << 20
DIRECT = getattr(os, "O_DIRECT", 0)


class _File:
    """A file as planned, opened to be written in windows; past the page cache where the file
    system lets it.
    """

    def __init__(self, path: Path, plan: Plan, part: Mapping[str, Output], fresh: bool) -> None:
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
        """Put bytes ``[start, start + WINDOW)`` of the file, as far as it goes, into ``buffer``;
        return how many they are.
        """
        header = self.plan.header
        stop = min(start + WINDOW, self.plan.size)
        buffer[: max(0, len(header) - start)] = header[start:stop]
        # The header's length and the windows' edges are multiples of every dtype's size: no element
        # is cut in two.
        place = bisect.bisect_right(self._ends, start - len(header))
        while place < len(self._entries) and len(header) + self._entries[place].begin < stop:
            entry, size = self._entries[place], self._entries[place].dtype.itemsize
            base = len(header) + entry.begin
            first, last = max(base, start), min(len(header) + entry.end, stop)
            out = torch.frombuffer(
                buffer, dtype=entry.dtype, count=(last - first) // size, offset=first - start
            )
            at = 0
            for source in self.part[entry.name].sources(
                checkpoint, (first - base) // size, (last - base) // size
            ):
                read_cast(source, out[at : at + source.length], scratch)
                at += source.length
            place += 1
        return stop - start

    def write(self, buffer: mmap.mmap, count: int, start: int) -> None:
        """Write the first ``count`` bytes of ``buffer``.

        Behind the file's end a page is filled up, which :meth:`finish` cuts off.
        """
        whole = memoryview(buffer)[: -(-count // DATA_ALIGNMENT) * DATA_ALIGNMENT]
        try:
            write_all(self.fd, whole, start)
        except OSError as error:
            # Some file systems take the flag and refuse the write, and one that was cut short goes
            # on at no page's edge.
            if error.errno != errno.EINVAL or not fcntl.fcntl(self.fd, fcntl.F_GETFL) & DIRECT:
                raise
            fcntl.fcntl(self.fd, fcntl.F_SETFL, fcntl.fcntl(self.fd, fcntl.F_GETFL) & ~DIRECT)
            write_all(self.fd, whole, start)

    def finish(self) -> None:
        os.ftruncate(self.fd, self.plan.size)
        os.fsync(self.fd)


class _Front:
    """How far a file is written without a gap, while its windows are finished out of order."""

    def __init__(self, at: int) -> None:
        self.at = self._noted = at
        self._done: set[int] = set()

    def finished(self, start: int) -> int | None:
        """Counts the window that begins at ``start``; the front, where it has moved far enough
        to be noted.
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
    plan: Plan,
    part: Mapping[str, Output],
    journal: Journal,
    workers: int,
    tick: Tick,
) -> None:
    """Write the temporary file of ``name``, as planned, behind what the journal says is there;
    flushed when this returns.
    """
    kept = journal.kept(name)
    if kept:
        tick(max(0, kept - len(plan.header)))
    if kept == plan.size:
        return
    kept -= kept % DATA_ALIGNMENT  # as every note is, but that is read from a file
    file = _File(temporary(target, name), plan, part, fresh=not kept)
    try:
        _fill(
            checkpoint,
            file,
            iter(range(kept, plan.size, WINDOW)),
            _Front(kept),
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
    file: _File,
    left: Iterator[int],
    front: _Front,
    name: str,
    journal: Journal,
    workers: int,
    tick: Tick,
) -> None:
    """The workers take windows from one iterator, so that nothing queues up."""
    lock, noting, failed = threading.Lock(), threading.Lock(), threading.Event()

    def work() -> None:
        # at a page's edge, as direct I/O wants it
        scratch, buffer = Scratch(), mmap.mmap(-1, WINDOW)
        try:
            while not failed.is_set():
                with lock:
                    start = next(left, None)
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
            failed.set()  # an interrupt comes to this thread, and the pool waits for the others
            raise
