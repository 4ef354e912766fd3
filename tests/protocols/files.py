"""Files of simulated processes: real ones in a temporary folder. A call that opens, lists, changes
or locks files is an operation: a process gives way before it, or dies there.

The calls are those of the module ``os``, which pathlib and shutil call, too. A lock of ``flock``
belongs to an open file, so that two tasks of one real process exclude each other like processes.
"""

from __future__ import annotations

import builtins
import fcntl
import io
import itertools
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hf_zero.checkpoint import file_lock
from tests.protocols.simulation import Simulation, running

CALLS = ("open", "mkdir", "rmdir", "rename", "replace", "unlink", "write")
MEMORY = Path("/dev/shm")
CLOSE = os.close
NULL = os.open(os.devnull, os.O_RDONLY)


def _giving_way(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def operation(*args: Any, **options: Any) -> Any:
        simulation = running()
        if simulation is not None and simulation.current is not None:
            simulation.point(f"{name} {args[0] if args else ''}")
        return call(*args, **options)

    return operation


class Entries:
    """What ``os.scandir`` returns, in the order of names in place of that of a file system."""

    def __init__(self, found: Iterable[Any]) -> None:
        self._found = iter(sorted(found, key=lambda entry: entry.name))

    def __iter__(self) -> Entries:
        return self

    def __next__(self) -> Any:
        return next(self._found)

    def __enter__(self) -> Entries:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def close(self) -> None:
        pass


def _scanned(call: Callable[..., Any]) -> Callable[..., Any]:
    def scan(*args: Any) -> Any:
        with call(*args) as found:
            return Entries(found)

    return scan


def _opening(call: Callable[..., Any]) -> Callable[..., Any]:
    """A file that was opened to be written is empty until the process goes on."""

    def operation(file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
        simulation = running()
        if simulation is None or simulation.current is None or isinstance(file, int):
            return call(file, mode, *args, **options)
        simulation.point(f"open {file}")
        opened = call(file, mode, *args, **options)
        if mode[0] != "r":
            try:
                simulation.point(f"write {file}")
            except BaseException:
                opened.close()
                raise
        return opened

    return operation


class Locks:
    """The module ``fcntl``: a wait for a lock is one of the simulation."""

    def __init__(self) -> None:
        self.closed = 0  # calls of close

    def __getattr__(self, name: str) -> Any:
        return getattr(fcntl, name)

    def flock(self, descriptor: int, how: int) -> None:
        simulation = running()
        if simulation is None or simulation.current is None:
            fcntl.flock(descriptor, how)
            return
        simulation.point("lock")
        while True:
            try:
                fcntl.flock(descriptor, how | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if how & fcntl.LOCK_NB:
                    raise
            simulation.wait(self._another_close(), None, "a lock of a file")
        simulation.point("locked")

    def _another_close(self) -> Callable[[], bool]:
        before = self.closed
        return lambda: self.closed != before

    def close(self, descriptor: int, close: Callable[[int], object] = CLOSE) -> None:
        close(descriptor)
        self.closed += 1


LOCKS = Locks()


class PerProcess:
    """A variable of a module: ``make()`` in each simulated process."""

    def __init__(self, name: str, make: Callable[[], Any]) -> None:
        self._name, self._make = name, make
        self._outside: dict[str, Any] = {}

    def _value(self) -> Any:
        simulation = running()
        task = None if simulation is None else simulation.current
        variables = self._outside if task is None else task.process.variables
        if self._name not in variables:
            variables[self._name] = self._make()
        return variables[self._name]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._value(), name)

    def __getitem__(self, key: Any) -> Any:
        return self._value()[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._value()[key] = value

    def __bool__(self) -> bool:
        return bool(self._value())

    def __contains__(self, key: Any) -> bool:
        return key in self._value()

    def __str__(self) -> str:
        return str(self._value())


def _descriptors() -> set[int]:
    """Return the set of the descriptors of locks of a process, whose files are closed at its end:
    the numbers stay taken, so that objects which outlive their process close nothing.
    """
    found, simulation = set[int](), running()
    if simulation is not None and simulation.current is not None:
        task, at_close = simulation.current, simulation.at_close

        def end() -> None:
            for descriptor in found:
                LOCKS.close(descriptor, lambda each: os.dup2(NULL, each))
                at_close.append(partial(CLOSE, descriptor))

        task.process.at_exit.append(end)
    return found


def folder_of(simulation: Simulation) -> Path:
    """Return a new folder for the files of ``simulation``, which goes with it."""
    made = tempfile.mkdtemp(dir=MEMORY if os.access(MEMORY, os.W_OK) else None, prefix="hf-zero-")
    simulation.at_close.append(lambda: shutil.rmtree(made, ignore_errors=True))
    return Path(made)


@contextmanager
def scheduled() -> Iterator[pytest.MonkeyPatch]:
    """Make calls for files operations of the simulation; yield the patch, for more of them."""
    with pytest.MonkeyPatch.context() as patch:
        for name in CALLS:
            patch.setattr(os, name, _giving_way(name, getattr(os, name)))
        listed, scanned = _giving_way("list", os.listdir), _giving_way("scan", _scanned(os.scandir))
        patch.setattr(os, "listdir", lambda *args: sorted(listed(*args)))
        patch.setattr(os, "scandir", scanned)
        patch.setattr(os, "fsync", lambda descriptor: None)
        patch.setattr(os, "close", LOCKS.close)
        patch.setattr(file_lock, "_open", PerProcess("_open", _descriptors))
        opening = _opening(io.open)
        patch.setattr(io, "open", opening)
        patch.setattr(builtins, "open", opening)
        yield patch


def numbers() -> Callable[[], str]:
    """Return a function that numbers its calls: identities of simulated processes."""
    count = itertools.count()
    return lambda: f"process-{next(count)}"
