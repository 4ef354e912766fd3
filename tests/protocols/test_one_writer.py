"""Processes that write one folder at once: one of them writes, and the others wait or refuse."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path

import pytest

from hf_zero.checkpoint.convert.files import LOCK, lock_folder
from hf_zero.deepspeed import state_dicts
from hf_zero.errors import CheckpointError
from tests.protocols.explore import Judge, explore
from tests.protocols.files import folder_of, scheduled
from tests.protocols.simulation import Process, Simulation

SETTINGS = {"delays": (0.3,), "deaths": 1, "seconds": 100.0}
Entry = Callable[[Path], AbstractContextManager[object]]


@contextmanager
def converting(folder: Path) -> Iterator[bool]:
    with lock_folder(folder):
        yield True


ENTRIES: dict[str, tuple[Entry, str]] = {
    "one writes for all": (lambda folder: state_dicts._one_writer(folder), ".fp32.lock"),
    "others are refused": (converting, LOCK),
}


def writers(enter: Entry, lock: str, size: int, simulation: Simulation) -> Judge:
    """Processes that come one after the other or at once, and write a file in two parts."""
    folder, writing, faults = folder_of(simulation), list[Process](), list[str]()
    written: list[Process] = []

    def come(process: Process) -> None:
        with enter(folder) as writes:
            if writes:
                if any(each.alive for each in writing):
                    faults.append("two write at once")
                writing.append(process)
                for part in ("half", "whole"):
                    (folder / "model").write_text(part)
                writing.remove(process)
                written.append(process)
            elif not written:
                faults.append("one goes on without the files")

    for number in range(size):
        process = Process(number)
        simulation.spawn(f"process {number}", partial(come, process), process)

    def judge(end: str) -> str:
        wrong = simulation.wrong(end, faults, CheckpointError)
        if wrong:
            return wrong
        left = (folder / lock).exists() and not simulation.killed
        return "the lock is left" if left else ""

    return judge


@pytest.fixture(autouse=True)
def files() -> Iterator[None]:
    with scheduled():
        yield


@pytest.mark.parametrize("entry", ENTRIES)
def test_one_writes(entry: str, schedules: Callable[..., int]) -> None:
    explore(partial(writers, *ENTRIES[entry], 3), schedules(400, len(ENTRIES)), **SETTINGS)
