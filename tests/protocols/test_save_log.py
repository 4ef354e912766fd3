"""Logs of saves, by which a job sees the checkpoints of other running jobs of its host."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hf_zero.checkpoint import save_log
from hf_zero.checkpoint.save_log import SaveLog
from tests.protocols.explore import Judge, explore
from tests.protocols.files import PerProcess, folder_of, scheduled
from tests.protocols.simulation import Process, Simulation, running

SETTINGS = {"delays": (0.1,), "deaths": 1, "seconds": 100.0}
# a process that is held up before it locks or removes a log
HELD = {"delays": (0.1, 0.3), "seconds": 100.0, "at": ("lock", "unlink")}
_folders = PerProcess("folder", Path)  # of the logs of a simulation


def jobs(writers: int, readers: int, simulation: Simulation) -> Judge:
    """Jobs that save and end, and others that look for their saves."""
    folder, faults, noted = folder_of(simulation), list[str](), dict[Process, str]()

    def write(process: Process) -> None:
        process.variables["folder"] = folder
        log = SaveLog()
        for number in range(2):
            log.note((f"save {number} of {process.rank}", "a place"))
            noted[process] = f"save {number} of {process.rank}"
        del noted[process]
        log.close()

    def read(process: Process) -> None:
        process.variables["folder"] = folder
        for _ in range(2):
            before = {writer: save for writer, save in noted.items() if writer.alive}
            found = SaveLog().others()
            for writer, save in before.items():
                if writer.alive and writer in noted and (save, "a place") not in found:
                    faults.append(f"{save} is not seen")

    for number in range(writers + readers):
        process = Process(number)
        call = partial(write if number < writers else read, process)
        simulation.spawn(f"job {number}", call, process)

    def judge(end: str) -> str:
        errors = [task.error for task in simulation.ended if task.error is not None]
        return end or "; ".join(faults) or (f"an error: {errors}" if errors else "")

    return judge


def job() -> str:
    simulation = running()
    assert simulation is not None and simulation.current is not None
    return f"job {simulation.current.process.rank}"


@pytest.fixture(autouse=True)
def files() -> Iterator[None]:
    with scheduled() as patch:
        patch.setattr(save_log, "_folder", lambda: _folders._value())
        patch.setattr(save_log, "_job", job)
        patch.setattr(save_log, "_is_related", lambda writer: writer.job == job())
        yield


@pytest.mark.parametrize(
    "size, few, settings", [(2, 100, SETTINGS), (1, 500, HELD)], ids=["anywhere", "held"]
)
def test_saves_of_running_jobs_are_seen(
    size: int, few: int, settings: Any, schedules: Callable[..., int]
) -> None:
    explore(partial(jobs, size, size), schedules(few, 2), **settings)
