"""Protocols of ranks over the store: the meeting of an attempt, messages of background threads, the
agreement on the next gather, and reports of an error that ends all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from hf_zero.distributed import attempts, uncaught
from hf_zero.distributed.collective_log import CollectiveLog
from hf_zero.distributed.consensus import Consensus, GatherAgreement
from hf_zero.distributed.hang_detection import RankStatus, Watchdog
from hf_zero.distributed.mesh import MeshResources
from hf_zero.distributed.store import StoreMessages, StoreWait
from hf_zero.errors import CheckpointError, LaunchError, PartitionError, RankMismatchError
from tests.protocols import store
from tests.protocols.explore import Judge, explore, find, seed_fault
from tests.protocols.files import PerProcess
from tests.protocols.ranks import CollectiveFailed, World, run_attempts
from tests.protocols.simulation import START, Process, Simulation, running
from tests.protocols.store import Client, Server

WAIT, ROUNDS = 20.0, 2
OF_MESSAGES = {"delays": (0.3, 2.0, 50.0), "deaths": 1, "seconds": 600.0}
SIZES = (2, 3)


def messages(size: int, simulation: Simulation) -> Judge:
    """Each rank sends its outcome of two saves to rank 0, which tells the verdict to all."""

    def exchange(world: World, rank: int) -> None:
        def gone(ranks: Sequence[int]) -> dict[int, str]:
            dead = [process.rank for process in world.processes if not process.alive]
            return {each: "it died" for each in ranks if each in dead}

        mail = StoreMessages(world.store(), rank, WAIT, gone)
        for save in range(1, ROUNDS + 1):
            if rank:
                mail.send("wrote", save, f"{rank} wrote {save}")
                verdict = mail.receive("verdict", save, 0)
            else:
                others = range(1, size)
                outcomes = mail.receive_all("wrote", save, others)
                mail.forget("wrote", save)
                for each, outcome in outcomes.items():
                    if isinstance(outcome, RankMismatchError):
                        if each in gone(others) or simulation.delayed > WAIT / 2:
                            continue
                        world.fault = f"no outcome of rank {each}, which lives"
                    elif outcome != f"{each} wrote {save}":
                        world.fault = f"{outcome!r} instead of the outcome of {each} in {save}"
                verdict = f"verdict {save}"
                mail.send("verdict", save, verdict)
            if verdict != f"verdict {save}":  # receive() raises if it was replaced
                world.fault = f"{verdict!r} instead of verdict {save}"

    def run(world: World, rank: int) -> None:
        try:
            exchange(world, rank)
        except RuntimeError as error:  # a store that does not answer for a minute counts as gone
            raise CollectiveFailed(f"{error}, says rank {rank} to ranks 0, 1") from error

    return World(simulation, size, run, WAIT).judge


@pytest.mark.parametrize("size", SIZES)
def test_messages_arrive(size: int, schedules: Callable[..., int]) -> None:
    explore(partial(messages, size), schedules(150, len(SIZES)), **OF_MESSAGES)


def test_a_later_message_is_taken_for_an_earlier_one(monkeypatch: pytest.MonkeyPatch) -> None:
    seed_fault(
        monkeypatch, StoreMessages, "receive_all", ("if sent != str(sequence):", "if False:")
    )
    assert "instead of" in find(partial(messages, 2), 1000, **OF_MESSAGES).text


def requests(size: int, simulation: Simulation) -> Judge:
    """Each rank asks for another number, the last one most; every number that a rank has asked for
    stays below the one that all ranks read from then on.
    """

    def ask(world: World, rank: int) -> None:
        mail = StoreMessages(world.store(), rank, WAIT, lambda ranks: {})
        for number in (rank + 1, size + rank + 1):
            try:
                if mail.asked("issued") < number:
                    mail.ask("issued", number)
                asked = mail.asked("issued")
            except RuntimeError:  # the store does not answer
                return
            if asked < number:
                world.fault = f"{asked} is left of {number}, which rank {rank} asked for"

    return World(simulation, size, ask, WAIT).judge


@pytest.mark.parametrize("size", SIZES)
def test_a_request_for_less_never_replaces_one_for_more(
    size: int, schedules: Callable[..., int]
) -> None:
    explore(partial(requests, size), schedules(150, len(SIZES)), **OF_MESSAGES)


def test_a_request_for_less_replaces_one_for_more(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = 'before = self._store.compare_set(f"asked/{topic}", before, str(sequence)).decode()'
    before = 'before = str(sequence); self._store.set(f"asked/{topic}", before)'
    seed_fault(monkeypatch, StoreMessages, "ask", (compared, before))
    assert "is left of" in find(partial(requests, 2), 1000, **OF_MESSAGES).text


LONG, ATTEMPTS = 30.0, 2
OF_REPORTS = {"delays": (0.5, 5.0), "deaths": 1, "seconds": 300.0}
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
        return World(simulation, size, partial(report, attempt), LONG, name=f"{attempt} rank")

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
    explore(partial(reports, 2, met), schedules(200, 2), **OF_REPORTS)


def test_an_error_was_reported_in_an_earlier_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    edits = (("if attempt:", "if False:"), ('return f"{key}/{self._rounds[key]}"', "return key"))
    seed_fault(monkeypatch, uncaught._PrintedTexts, "_key", *edits)
    assert "says nothing" in find(partial(reports, 2, True), 10, **OF_REPORTS).text


UNITS = 2
OF_GATHERS = {"delays": (0.3, 1.5, 45.0), "deaths": 1, "seconds": 600.0}


def gathers(size: int, asking: tuple[int, ...], simulation: Simulation) -> Judge:
    """All ranks gather two units; those ``asking`` may leave, and take the last rank for one that
    is elsewhere, as an old post may say.
    """

    def gather(world: World, rank: int) -> None:
        key_store = world.store()
        watchdog = Watchdog()
        status: Any = SimpleNamespace(
            world=size, elsewhere=lambda ranks: [each for each in ranks if each == size - 1]
        )
        watchdog.rank_status = status
        waits = StoreWait(key_store, rank, WAIT, watchdog)
        log = CollectiveLog("agreements", range(size), WAIT, reports_dead_peers=False)
        agreement = GatherAgreement(key_store, rank, range(size), waits, log)
        agreement._left = rank in asking  # it gave up before: it looks at once
        issued, number = set[int](), 0
        for unit in range(UNITS):
            while unit not in issued:
                agree: Any = agreement.agree_or_leave if rank in asking else agreement.agree
                agreed = agree("outside passes", (0, unit), "gather of {0[1]}".format)
                if agreed is None:  # it fetches the values alone
                    world.simulation.sleep(0.01)
                    issued.add(unit)
                    agreement.end_asking()
                    continue
                number += 1
                issued.add(agreed[1])
                said = world.collective("gathers", rank, f"unit {agreed[1]}")
                if len(set(said)) > 1:
                    world.fault = f"different gathers under number {number}: {said}"

    world = World(simulation, size, gather, WAIT)

    def judge(end: str) -> str:
        errors = world.errors()
        if end or world.fault or not asking:
            return world.judge(end)
        # Ranks may wait in vain for one that has left and does not ask again. The only one that
        # asks gets the outcome, or leaves; a gather that was agreed on is joined by all.
        vain = {
            name: error
            for name, error in errors.items()
            if asking == (int(name.split()[1]),) or "have not come" in str(error)
        }
        return f"a rank waits in vain: {vain}" if vain and simulation.untroubled(10.0) else ""

    return judge


ASKING: Mapping[str, tuple[int, tuple[int, ...]]] = {
    "all agree": (3, ()),
    "one of two may leave": (2, (0,)),
    "two of three may leave": (3, (0, 1)),
}


@pytest.mark.parametrize("case", ASKING)
def test_ranks_issue_the_same_gathers(case: str, schedules: Callable[..., int]) -> None:
    explore(partial(gathers, *ASKING[case]), schedules(150, len(ASKING)), **OF_GATHERS)


def test_ranks_are_held_up_as_they_withdraw(schedules: Callable[..., int]) -> None:
    held = {"delays": (0.3,), "seconds": 600.0, "at": "/0/n -1"}
    explore(partial(gathers, *ASKING["two of three may leave"]), schedules(300), **held)


ENGINES = 2
OF_ENDINGS = {"delays": (0.3, 1.5), "deaths": 1, "seconds": 600.0}


def endings(size: int, simulation: Simulation) -> Judge:
    """Ranks make an engine, agree on gathers of it and leave it, one after the other; then they
    read through it, which fails at once, and make the next one.
    """

    def train(world: World, rank: int) -> None:
        for engine in range(ENGINES):
            key_store = world.store(f"engine {engine}")
            resources = MeshResources(RankStatus(), [])
            resources.join(key_store, size if rank == 0 else 0)  # type: ignore[arg-type]
            world.collective("making", rank, f"engine {engine}")
            consensus = Consensus(
                key_store,  # type: ignore[arg-type]
                rank,
                range(size),
                WAIT,
                Watchdog(),
            )
            for unit in range(UNITS):
                consensus.gathers.agree("a pass", (0, unit), "gather of {0[1]}".format)
            consensus.close()
            resources.leave()
            for ask in (consensus.gathers.agree, consensus.gathers.agree_or_leave):
                try:
                    ask("outside passes", (0, 0), "gather of {0[1]}".format)
                except PartitionError:
                    continue
                world.fault = "an engine that was destroyed has gathered"

    world = World(simulation, size, train, WAIT)

    def result() -> str:
        left = [key for key in world.server.data if "engine" in key]
        whole = not (world.errors() or simulation.killed)
        return f"keys are left: {left}" if left and whole else ""

    return partial(world.judge, result=result)


@pytest.mark.parametrize("size", SIZES)
def test_ranks_leave_an_engine(size: int, schedules: Callable[..., int]) -> None:
    explore(partial(endings, size), schedules(150, len(SIZES)), **OF_ENDINGS)


def test_a_read_through_a_destroyed_engine_starts_an_agreement(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seed_fault(monkeypatch, GatherAgreement, "_agree", ("if self.closed:", "if False:"))
    assert find(partial(endings, 2), 50, **OF_ENDINGS).text


LIMIT = 8.0  # seconds
OF_A_MEETING = {"delays": (0.1, 0.6, 3.0, 12.0), "deaths": 1, "seconds": 100.0}
# what an earlier attempt has left: nothing; all it wrote; the answers of some ranks
LEFT = {
    "none": {},
    "whole": {"token": b"old|", "old/1": b"", "old/2": b""},
    "late": {"token": b"old|rank 0 has waited", "old/1": b""},
    "cut": {"token": b"old", "old/1": b""},
}
LEFTOVERS = [(2, "none"), (2, "whole"), (3, "none"), (3, "whole"), (3, "late"), (3, "cut")]


def meeting(world: int, left: str, simulation: Simulation) -> Judge:
    """All ranks of a second attempt meet, or raise at the timeout."""
    server = store.Server(simulation)
    server.data |= {f"{attempts.PREFIX}/{key}": value for key, value in LEFT[left].items()}
    found: dict[int, str] = {}

    def rank(own: int) -> None:
        limit = timedelta(seconds=LIMIT)
        made = attempts.store_of_attempt(store.Client(server), own, world, limit)
        found[own] = made.prefix

    processes = [Process(own) for own in range(world)]
    for process in processes:
        simulation.spawn(f"rank {process.rank}", partial(rank, process.rank), process)

    def judge(end: str) -> str:
        if end:
            return end
        errors = [task.error for task in simulation.ended if task.error is not None]
        if not all(isinstance(error, LaunchError) for error in errors):
            return f"another error: {errors}"
        if errors and simulation.untroubled(LIMIT / 2):
            return f"an error though all have come: {errors}"
        if len(set(found.values())) > 1:
            return "the ranks have different stores"
        if "old" in found.values():
            return "a rank has the store of an earlier attempt"
        late = simulation.now - START > 2 * LIMIT + simulation.delayed + 1.0
        return "a rank ends late" if late else ""

    return judge


@pytest.fixture(autouse=True)
def simulated_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "dist", store.DIST)


@pytest.mark.parametrize("world, left", LEFTOVERS)
def test_ranks_meet(world: int, left: str, schedules: Callable[..., int]) -> None:
    explore(partial(meeting, world, left), schedules(600, len(LEFTOVERS)), **OF_A_MEETING)
