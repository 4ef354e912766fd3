"""Reports of an error that ends all ranks: once in each attempt, in a store that outlives it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from hf_zero.distributed import uncaught
from hf_zero.errors import CheckpointError
from tests.protocols.explore import Judge, explore, find, seed_fault
from tests.protocols.files import PerProcess
from tests.protocols.ranks import World, run_attempts
from tests.protocols.simulation import Simulation, running
from tests.protocols.store import Client, Server

TIMEOUT, ATTEMPTS = 30.0, 2
SETTINGS = {"delays": (0.5, 5.0), "deaths": 1, "seconds": 300.0}
_stores = PerProcess("store", lambda: None)


def reports(size: int, met: bool, simulation: Simulation) -> Judge:
    """All ranks of two attempts end with the same error, after they have ``met`` or before. The
    agent counts both attempts as one, as where a host has joined.
    """
    server, printed = Server(simulation), dict[int, list[int]]()

    def report(attempt: int, world: World, rank: int) -> None:
        process = world.processes[rank]
        process.variables |= {
            "attempt": f"token {attempt}" if met else "",
            "environ": {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size)},
            "store": Client(server),
            "print": lambda *_, **__: printed[attempt].append(rank),
        }
        uncaught._print_once(CheckpointError("the file latest is missing"), None)
        simulation.exit(process)

    def start(attempt: int) -> World:
        printed[attempt] = []
        return World(simulation, size, partial(report, attempt), TIMEOUT, name=f"{attempt} rank")

    run_attempts(simulation, ATTEMPTS, start, lambda: None)

    def judge(end: str) -> str:
        errors = [task.error for task in simulation.ended if task.error is not None]
        if end or errors:
            return end or f"an error: {errors}"
        few, many = min(map(len, printed.values())), max(map(len, printed.values()))
        if not few and not simulation.killed:
            return f"an attempt says nothing: {printed}"
        return f"said twice: {printed}" if many > 1 and simulation.untroubled(1.0) else ""

    return judge


def printing(*texts: Any, **options: Any) -> None:
    simulation = running()
    assert simulation is not None and simulation.current is not None
    simulation.current.process.variables["print"](*texts)


@pytest.fixture(autouse=True)
def simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    environ = SimpleNamespace(environ=PerProcess("environ", dict))
    monkeypatch.setattr(uncaught, "os", environ)
    monkeypatch.setattr(uncaught, "attempt", PerProcess("attempt", str))
    monkeypatch.setattr(uncaught, "connect_to_agent_store", lambda limit: _stores._value())
    monkeypatch.setattr(uncaught, "print", printing, raising=False)


@pytest.mark.parametrize("met", [True, False])
def test_an_error_is_reported(met: bool, schedules: Callable[..., int]) -> None:
    explore(partial(reports, 2, met), schedules(200, 2), **SETTINGS)


def test_an_error_was_reported_in_an_earlier_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    edits = (("if attempt:", "if False:"), ('return f"{key}/{self._rounds[key]}"', "return key"))
    seed_fault(monkeypatch, uncaught._Said, "_key", *edits)
    assert "says nothing" in find(partial(reports, 2, True), 10, **SETTINGS).text
