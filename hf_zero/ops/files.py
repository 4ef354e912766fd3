"""Tensors to and from files, asynchronously: a queue of bounded depth, priorities, O_DIRECT where
the file system supports it.

The native core uses io_uring, or threads if the kernel refuses that. Without the native core the
same queue runs in Python (``files_reference``). ``HF_ZERO_IO`` chooses: ``io_uring``, ``threads``,
``python``; unset, the first that works.

``HF_ZERO_IO_FAULT`` injects faults, for tests: ``write:3:ENOSPC`` fails the third block written,
``read:2+:short`` returns less than requested from the second read on, ``read:1:slow=50`` delays it
by 50 ms. Several are separated by commas.
"""

from __future__ import annotations

import enum
import errno
import importlib
import os
import re
import threading
import weakref
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch

from hf_zero.device.spans import span
from hf_zero.errors import ConfigError, OffloadError
from hf_zero.logging import logger

ALIGNMENT = 4096  # bytes: offsets, lengths and addresses of O_DIRECT transfers
BACKENDS = ("io_uring", "threads", "python")


class Priority(enum.IntEnum):
    """The urgency of a transfer: a thread waits; it is needed soon; no thread waits."""

    NEEDED = 0
    AHEAD = 1
    BEHIND = 2


class Fault(NamedTuple):
    """A fault of the ``first``-th to ``last``-th attempt (from 1) to write or to read a block."""

    write: bool
    first: int
    last: int
    error: int
    shorten: bool
    milliseconds: int


_FAULT = re.compile(r"(read|write):(\d+)(\+?):(?:(short)|slow=(\d+)|(E[A-Z0-9]+))")


def parse_faults(text: str) -> list[Fault]:
    """Parse the faults of ``HF_ZERO_IO_FAULT``. Raises ConfigError for other text."""
    faults = []
    for item in filter(None, text.split(",")):
        match = _FAULT.fullmatch(item.strip())
        if match is None or (match[6] and not hasattr(errno, match[6])):
            raise ConfigError(
                f"HF_ZERO_IO_FAULT: {item!r} is not a fault; write for example write:3:ENOSPC, "
                "read:2+:short or read:1:slow=50"
            )
        first = int(match[2])
        error = getattr(errno, match[6]) if match[6] else 0
        faults.append(
            Fault(
                match[1] == "write",
                first,
                1 << 62 if match[3] else first,
                error,
                bool(match[4]),
                int(match[5] or 0),
            )
        )
    return faults


def _native() -> ModuleType | None:
    try:
        core = importlib.import_module("hf_zero._cpu")
    except ImportError:
        return None
    return core if hasattr(core, "FileQueue") else None


class OpenFile:
    """A file open for reading and writing, also with O_DIRECT if its file system supports that.

    It owns ``descriptor``, which is closed when this object and the last transfer that uses it are
    gone. ``direct`` is a second descriptor of the same file with O_DIRECT, or -1.
    """

    def __init__(self, path: str, descriptor: int, direct: int = -1):
        self.path = path
        self.descriptor = descriptor
        self._direct = direct
        self._made: Any = None
        self._close = weakref.finalize(self, _close_both, descriptor, direct)

    def handle(self, file_class: type) -> Any:
        """Return this file as an object of ``file_class``, which then owns the descriptors."""
        if self._made is None:
            self._close.detach()
            self._made = file_class(self.path, self.descriptor, self._direct)
        elif not isinstance(self._made, file_class):
            raise OffloadError(
                f"{self.path} is open in a queue of another kind; open it again for this one"
            )
        return self._made

    @property
    def direct(self) -> bool:
        """Return whether transfers bypass the page cache."""
        return bool(self._made.direct) if self._made is not None else self._direct >= 0


def _close_both(descriptor: int, direct: int) -> None:
    os.close(descriptor)
    if direct >= 0:
        os.close(direct)


def open_direct(path: str) -> int:
    """Return a descriptor of ``path`` with O_DIRECT, or -1 if its file system (or the operating
    system) does not support it.
    """
    try:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT)
    except AttributeError:
        return -1
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            return -1
        raise


class TransferPart(NamedTuple):
    """``bytes`` bytes of ``file`` from ``offset``, at byte ``at`` of the tensor's memory."""

    file: OpenFile
    offset: int
    at: int
    bytes: int


class Ticket:
    """A transfer in progress.

    The tensor's memory stays alive until it is done, also if the ticket is dropped.
    """

    __slots__ = ("_context", "_name", "_queue", "_transfer")

    def __init__(self, queue: FileQueue, transfer: Any, context: str, name: str = ""):
        self._queue = queue
        self._transfer = transfer
        self._context = context
        self._name = name

    def done(self) -> bool:
        """Return whether the transfer has ended, successfully or not."""
        return bool(self._transfer.finished)

    def failed(self) -> bool:
        """Return whether the transfer has failed; ``wait`` raises the error."""
        return bool(self._transfer.finished and self._transfer.failed)

    def wait(self) -> None:
        """Wait until the transfer is done; it gets the highest priority.

        Raises OSError with errno and path if it failed.
        """
        what = "wait_write_file" if self._transfer.write else "wait_read_file"
        with span(what, self._name):
            failure = self._queue.settle(self._transfer)
        if failure is not None:
            number, path, offset, nbytes, at_end = failure
            text = "the file ends too early" if at_end else os.strerror(number)
            verb = "writing" if self._transfer.write else "reading"
            raise OSError(
                number, f"{text} ({verb} {nbytes} bytes at {offset}{self._context})", path
            )


class FileQueue:
    """Transfers between CPU tensors and files: ``queue_depth`` blocks of ``block_size`` bytes at
    once, in the order of priorities.

    Two requests for the same bytes are ordered only through ``after``. May be called from several
    threads, not from a forked child.

    block_size: bytes, a multiple of 4096.
    queue_depth: blocks in flight at once.
    threads: number of threads of that backend; at most ``queue_depth`` of them are used.
    backend: one of BACKENDS; None takes HF_ZERO_IO, else the first that works.
    """

    def __init__(
        self,
        block_size: int = 1 << 20,
        queue_depth: int = 32,
        threads: int = 8,
        backend: str | None = None,
    ):
        if block_size < ALIGNMENT or block_size % ALIGNMENT or block_size > 1 << 30:
            raise ConfigError(
                f"block_size {block_size} of file transfers: a multiple of {ALIGNMENT} up to "
                "2^30 bytes is needed"
            )
        if not 1 <= queue_depth <= 4096 or threads < 1:
            raise ConfigError(
                f"queue_depth {queue_depth} and threads {threads} of file transfers: 1 to 4096, "
                "and at least 1, are needed"
            )
        chosen = backend or os.environ.get("HF_ZERO_IO") or ""
        if chosen not in ("", *BACKENDS):
            raise ConfigError(
                f"HF_ZERO_IO={chosen!r} is not known; use one of "
                f"{', '.join(BACKENDS)}, or leave it unset"
            )
        core = None if chosen == "python" else _native()
        if core is None:
            if chosen not in ("", "python"):
                raise ConfigError(
                    f"HF_ZERO_IO={chosen} needs the native core, which was not built; see hf-zero "
                    "doctor, or leave it unset"
                )
            reference = importlib.import_module("hf_zero.ops.files_reference")
            self._file_class, queue_class = reference.File, reference.ReferenceFileQueue
        else:
            self._file_class, queue_class = core.File, core.FileQueue
        self.block_size = block_size
        self.queue_depth = queue_depth
        try:
            self.backend: Any = queue_class(block_size, queue_depth, chosen or "auto", threads)
        except RuntimeError as error:  # io_uring, asked for by name
            raise ConfigError(
                f"HF_ZERO_IO={chosen}: the kernel refuses ({error}); leave it unset, "
                "and threads do the work"
            ) from error
        if self.backend.refusal:
            logger.info(
                "file transfers run on threads: the kernel refuses io_uring (%s)",
                self.backend.refusal,
            )
        if os.environ.get("HF_ZERO_IO_FAULT"):
            self.inject(parse_faults(os.environ["HF_ZERO_IO_FAULT"]))
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._alive: dict[int, tuple[Any, torch.Tensor]] = {}  # memory of transfers in progress
        self._cancel = weakref.finalize(self, self.backend.close, True)

    @property
    def kind(self) -> str:
        """The name of the backend in use."""
        return str(self.backend.engine)

    def inject(self, faults: Iterable[Fault]) -> None:
        """Inject these faults from now on, for tests; counting restarts."""
        self.backend.inject([tuple(fault) for fault in faults])

    def transfer(
        self,
        write: bool,
        pieces: Sequence[TransferPart],
        tensor: torch.Tensor,
        priority: Priority,
        after: Sequence[Ticket] = (),
        context: str = "",
        name: str = "",
    ) -> Ticket:
        """Submit ``pieces`` of ``tensor`` as one transfer, begun when those of ``after`` are done;
        it fails if one of them fails.

        ``context`` ends the message of an error, ``name`` names the transfer in a profile.
        """
        self._check_process()
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            raise OffloadError(
                f"a tensor of shape {tuple(tensor.shape)} on {tensor.device}, strides "
                f"{tensor.stride()}, cannot be moved to or from a "
                "file: copy it to contiguous CPU memory first"
            )
        base = tensor.data_ptr()
        described = [
            (piece.file.handle(self._file_class), piece.offset, base + piece.at, piece.bytes)
            for piece in pieces
        ]
        with self._lock:
            if not self._cancel.alive:
                raise OffloadError("this file queue is closed; make a new one")
            with span("write_file" if write else "read_file", name, tensor.nbytes):
                transfer = self.backend.submit(
                    write, described, int(priority), [ticket._transfer for ticket in after]
                )
            self._alive = {key: pair for key, pair in self._alive.items() if not pair[0].finished}
            self._alive[id(transfer)] = (transfer, tensor)
        return Ticket(self, transfer, context, name)

    def settle(self, transfer: object) -> tuple[int, str, int, int, bool] | None:
        """Wait for a transfer of the backend. Return None, or errno, path, offset and bytes of the
        failed part, and whether the file ended there.
        """
        self._check_process()
        failure: tuple[int, str, int, int, bool] | None = self.backend.wait(transfer)
        with self._lock:
            self._alive.pop(id(transfer), None)
        return failure

    def _check_process(self) -> None:
        """Raise OffloadError in a forked child: the queue's threads exist in the parent only."""
        if os.getpid() != self._process:
            raise OffloadError(
                f"files of process {self._process} were asked for in its forked child "
                f"{os.getpid()}; read them in the parent, or start children with the spawn method"
            )

    def close(self, cancel: bool = False) -> None:
        """Wait until all transfers are done; with ``cancel`` those that have not begun fail with
        ECANCELED.

        May be called again, and from a forked child, where it does nothing.
        """
        if os.getpid() != self._process:
            return
        with self._lock:
            if self._cancel.detach() is not None:
                self.backend.close(cancel)
                self._alive.clear()
