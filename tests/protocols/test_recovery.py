"""Ranks that go on after an exception in a pass: at the same place, or with an error on all."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from hf_zero.distributed.collective_log import CollectiveLog
from hf_zero.distributed.pass_tracker import PassTracker
from hf_zero.distributed.rank_status import PostedStatus
from hf_zero.distributed.recovery import RecoverablePasses, RecoveryBoard
from hf_zero.distributed.store import TimeoutStore
from hf_zero.distributed.watchdog import PollingWatchdog
from tests.protocols.explore import Judge, explore, find, seed_fault
from tests.protocols.ranks import World
from tests.protocols.simulation import Simulation

TIMEOUT = 30.0
SETTINGS: dict[str, Any] = {"delays": (0.3, 2.0, 70.0), "deaths": 1, "seconds": 900.0}
Passes = list[tuple[str, int, bool]]  # kind ("": none), collectives, whether an exception ends it
WHOLE: Passes = [("forward", 2, False), ("forward", 2, False)]
STEP: Passes = [("backward", 1, False), ("norm", 1, False)]
# the passes of each rank, and whether they go on alike
CASES: dict[str, tuple[list[Passes], bool]] = {
    "all break alike": ([[("forward", 1, True), ("forward", 2, False)]] * 3, True),
    "all go on outside any pass": ([[("forward", 1, True), ("", 1, False)]] * 3, True),
    "one breaks after its collectives": ([[("forward", 2, True), WHOLE[0]], WHOLE], True),
    "one breaks early": ([[("forward", 1, True), WHOLE[0]], WHOLE], False),
    "one breaks before its first collective": (
        [[("backward", 0, True), STEP[1]], STEP],
        False,
    ),
    "one repeats a pass that broke before its first collective": (
        [[("backward", 0, True), *STEP], STEP],
        True,
    ),
    "into different passes": (
        [[("forward", 1, True), ("evaluation", 1, False)], [("forward", 1, True), WHOLE[0]]],
        False,
    ),
}


def run_passes(scripts: list[Passes], alike: bool, simulation: Simulation) -> Judge:
    def run(world: World, rank: int) -> None:
        def gone(ranks: list[int]) -> dict[int, str]:
            dead = [process.rank for process in world.processes if not process.alive]
            return {each: f"rank {each} died" for each in ranks if each in dead}

        watchdog = PollingWatchdog(enabled=False)
        status: Any = SimpleNamespace(
            exit_reasons=gone,
            post_logs=lambda: None,
            last_error="",
            logs={},
            rank=rank,
            failure_cause=lambda: "rank 9, which hosts the store, does not answer",
        )
        watchdog.rank_status = status
        board = RecoveryBoard(TimeoutStore(world.store()), rank)
        log = CollectiveLog("gathers", range(world.size), TIMEOUT, reports_dead_peers=False)
        names = range(world.size)
        logs = {"gathers": log}
        tracker = RecoverablePasses("engine", rank, names, logs, watchdog, TIMEOUT, board)
        world.kept.append(tracker)

        def watch() -> None:  # as the watchdog's thread does while its rank waits
            store = TimeoutStore(world.store())
            while not watchdog.verdict:
                simulation.sleep(0.25)
                try:
                    stated = int(store.get("resumes")) if store.check(["resumes"]) else 0
                    board.answer_statements(stated, watchdog.end)
                except RuntimeError:
                    return  # the store does not answer

        simulation.spawn(f"watch of {rank}", watch, daemon=True)
        for kind, collectives, breaks in scripts[rank]:
            if kind:
                tracker.begin(kind, kind)
            for number in range(collectives):
                what = log.issue(f"{kind} {number}").what
                said = world.collective("gathers", rank, what, lambda: bool(watchdog.verdict))
                if len(set(said)) > 1:
                    world.fault = f"different collectives have matched: {said}"
                watchdog.check()
            if kind:
                tracker.broke() if breaks else tracker.end()
        world.results[rank] = "over"  # its watchdog answers until the others are over, too
        simulation.wait(lambda: len(world.results) == world.size, 2 * TIMEOUT, "the others")

    def script(world: World, rank: int) -> None:
        try:
            run(world, rank)
        finally:
            world.results[rank] = "over"

    world = World(simulation, len(scripts), script, TIMEOUT)
    return partial(world.judge, grace=2 * TIMEOUT, ends_well=alike)


@pytest.mark.parametrize("case", CASES)
def test_ranks_go_on_alike(case: str, schedules: Callable[..., int]) -> None:
    explore(partial(run_passes, *CASES[case]), schedules(30, len(CASES)), **SETTINGS)


def test_a_rank_that_issues_during_its_answer_is_asked_again() -> None:
    log = CollectiveLog("gathers", range(2), TIMEOUT, reports_dead_peers=False)
    watchdog = PollingWatchdog(enabled=False)
    tracker = RecoverablePasses("engine", 0, range(2), {"gathers": log}, watchdog, TIMEOUT)

    class Busy(deque[str]):
        """Issues another collective as its length is read, as the training thread may."""

        def __len__(self) -> int:
            log.recent = deque(self)
            log.issue("third")
            return len(log.recent)

    tracker.begin("forward", "kind")
    log.issue("first")
    tracker.end()
    log.issue("second")
    broken = ["forward 'kind'", {"gathers": 0}, {"gathers": 1}]
    statement = {"at": {"gathers": 1}, "kind": "", "first": ["gathers", 1, "second"]}
    statement |= {"what": "second", "broken": broken, "last": "first"}
    log.recent = Busy(log.recent)
    assert tracker.answer_to(1, statement) is None
    assert tracker.answer_to(1, statement) == ""
    answer = tracker.answer_to(1, statement | {"first": ["gathers", 1, "another"]})
    assert answer is not None and "rank 1 goes on with another second" in answer


def test_a_rank_goes_on_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    seed_fault(monkeypatch, PassTracker, "broke", ("broken is not None", "False"))
    fault = find(partial(run_passes, *CASES["into different passes"]), 100, **SETTINGS)
    assert "different collectives" in fault.text


def test_an_engine_that_ends_takes_its_broken_pass_with_it() -> None:
    """The next engine issues on communicators that both share."""
    store = dist.HashStore()
    watchdog = PollingWatchdog(enabled=False, rank_status=PostedStatus(store, 0, 2))
    shared = CollectiveLog("sequence", (0, 1), 60.0)
    first, second = (
        RecoverablePasses(
            name, 0, range(2), {"sequence": shared}, watchdog, 60.0, RecoveryBoard(store, 0)
        )
        for name in ("engine 1", "engine 2")
    )
    for passes in (first, second):
        passes.begin("forward", "f")
        passes.broke()
    first.close()
    assert shared.before_issue == second._resume_with, "that of another engine stays"
    second.close()
    assert shared.issue("sizes of batches").number == 0
    assert store.add("resumes", 0) == 0, "nothing was stated"
