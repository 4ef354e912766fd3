"""A disk that stops: every system call that changes something is counted, and the process, or the
power, ends at one of them.

The process that ends leaves all that it has done. When the power goes, what was not flushed is gone
too: files keep no byte that was written since their last fsync, and renames, new files and removals
in a folder that was not flushed since are undone (as far as the file system is free to; new folders
stay). A checkpoint has to survive both.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CALLS = ("open", "write", "pwrite", "fsync", "rename", "replace", "mkdir", "unlink", "rmdir")
CALLS += ("remove", "truncate", "ftruncate")


class Killed(BaseException):
    """The process ends here: nothing after it runs, not even cleaning up."""


class Disk:
    """Counts the calls that change something, ends the process at the ``last`` of them, and knows
    what is not yet on the device.

    ``torn``: the write that is cut off has half of its bytes in the file.
    """

    def __init__(self, last: int, aside: Path, torn: bool = False) -> None:
        self.last, self.aside, self.torn = last, aside, torn
        self.made: list[str] = []
        self.ended = False
        self._originals = {call: getattr(os, call) for call in CALLS}
        self._paths: dict[int, Path] = {}
        self._unflushed: dict[Path, None] = {}
        self._undo: list[tuple[Path, Callable[[], None]]] = []

    @contextmanager
    def installed(self) -> Iterator[Disk]:
        with pytest.MonkeyPatch.context() as patch:
            for call in CALLS:
                patch.setattr(os, call, self._counted(call))
            yield self

    def run(self, action: Callable[[], Any]) -> bool:
        """Whether ``action`` came to its end."""
        with self.installed():
            try:
                action()
            except Killed:
                return False
        return not self.ended

    def _counted(self, call: str) -> Callable[..., Any]:
        original = self._originals[call]

        def counted(*args: Any, **kwargs: Any) -> Any:
            writes = call != "open" or args[1] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            if not writes:
                fd = original(*args, **kwargs)
                self._paths[fd] = Path(args[0])
                return fd
            if len(self.made) >= self.last:
                if self.torn and not self.ended and call in ("write", "pwrite"):
                    original(args[0], args[1][: len(args[1]) // 2], *args[2:])
                self.ended = True
                raise Killed
            self.made.append(call)
            before = getattr(self, f"_before_{call}", None)
            if before is not None and "dir_fd" not in kwargs:
                before(*args)
            result = original(*args, **kwargs)
            if call == "open":
                self._paths[result] = Path(args[0])
            return result

        return counted

    def _before_write(self, fd: int, data: Any) -> None:
        self._unflushed[self._paths[fd]] = None

    def _before_fsync(self, fd: int) -> None:
        path = self._paths[fd]
        if path.is_dir():
            self._undo = [(folder, undo) for folder, undo in self._undo if folder != path]
        else:
            self._unflushed.pop(path, None)

    def _before_rename(self, source: Any, target: Any) -> None:
        source, target = Path(source), Path(target)
        kept = self.aside / str(len(self.made))
        if target.is_file():
            shutil.copy(target, kept)
        moved = self._originals["rename"]

        def back() -> None:
            if target.exists() and not source.exists():
                moved(target, source)
            if kept.exists():
                moved(kept, target)

        self._undo.append((target.parent, back))
        self._unflushed = {_moved(path, source, target): None for path in self._unflushed}

    _before_replace = _before_rename

    def power_cut(self) -> None:
        """Simulate a power cut: discard all writes and changes of folders that were not flushed."""
        for path in self._unflushed:
            if path.exists():
                path.write_bytes(b"")
        for _, undo in reversed(self._undo):
            undo()


def _moved(path: Path, source: Path, target: Path) -> Path:
    return target / path.relative_to(source) if path.is_relative_to(source) else path
