"""Going on after a pass that an exception broke: ranks are threads that share a store."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial

import pytest
import torch.distributed as dist

from hf_zero.distributed import watchdog as watching
from hf_zero.distributed.collective_log import CollectiveLog, PendingCollective
from hf_zero.distributed.rank_status import RankStatus
from hf_zero.distributed.recovery import PassTracker, RecoveryBoard
from hf_zero.distributed.watchdog import Watchdog
from hf_zero.errors import RankMismatchError
from tests.distributed.threads import on_threads

Logs = dict[str, CollectiveLog]


def broken_in_a_forward(passes: PassTracker, logs: Logs, breaks: bool = True) -> None:
    passes.begin("forward", "f")
    logs["gathers"].issue("gather 0")
    passes.broke() if breaks else passes.end()


def alike(rank: int, passes: PassTracker, logs: Logs) -> None:
    broken_in_a_forward(passes, logs)
    passes.begin("forward", "f")


def with_different_passes(rank: int, passes: PassTracker, logs: Logs) -> None:
    broken_in_a_forward(passes, logs, rank == 0)
    passes.begin("forward", "g" if rank else "f")
    logs["gathers"].issue("gather 1")


def alike_outside_any_pass(rank: int, passes: PassTracker, logs: Logs) -> None:
    broken_in_a_forward(passes, logs)
    logs["agreements"].issue("saves")


def at_its_end(rank: int, passes: PassTracker, logs: Logs) -> None:
    """Rank 0's forward breaks when it has issued all that it had to."""
    broken_in_a_forward(passes, logs, rank == 0)
    logs["agreements"].issue("saves")


def before_anything_is_issued(rank: int, passes: PassTracker, logs: Logs) -> None:
    passes.begin("backward", None)
    if rank:
        logs["reductions"].issue("reduction 0")
    passes.end() if rank else passes.broke()
    logs["agreements"].issue("norm")


def again_alone(rank: int, passes: PassTracker, logs: Logs) -> None:
    """Rank 0 repeats the backward that has broken before anything was issued."""
    if rank == 0:
        passes.begin("backward", None)
        passes.broke()
    passes.begin("backward", None)
    logs["reductions"].issue("reduction 0")
    passes.end()
    logs["agreements"].issue("norm")


def apart_where_nothing_is_shared(rank: int, passes: PassTracker, logs: Logs) -> None:
    """A backward without collectives, in the middle of a window, breaks on rank 0."""
    passes.begin("backward", None, joint=False)
    passes.end() if rank else passes.broke()
    logs["agreements"].issue("norm")


def go_on(script: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Run ``script`` on two ranks; return the outcome of each: "went on", or the text of
    the error.
    """
    monkeypatch.setattr(watching, "LOOK_SECONDS", 0.02)
    store, answers = dist.HashStore(), ["hangs", "hangs"]
    ended = [threading.Event(), threading.Event()]

    def run(rank: int) -> None:
        status, board = RankStatus(store, rank, 2), RecoveryBoard(store, rank)
        watchdog = Watchdog(rank_status=status, poll=board.answer_statements)
        logs = {
            name: status.register(CollectiveLog(name, (0, 1), 60.0))
            for name in ("agreements", "gathers", "reductions")
        }
        passes = PassTracker("engine", rank, range(2), logs, watchdog, 60.0, board)
        try:
            script(rank, passes, logs)
            ended[rank].set()
            limit = time.monotonic() + 60
            with watchdog.watching(PendingCollective("the other rank")):
                while not ended[1 - rank].wait(0.01) and time.monotonic() < limit:
                    watchdog.check()
            answers[rank] = "went on"
        except RankMismatchError as error:
            answers[rank] = str(error)
        finally:
            watchdog.close()
            watching._watches.discard(watchdog)

    on_threads([partial(run, rank) for rank in range(2)])
    return answers


def test_an_engine_that_ends_takes_its_broken_pass_with_it() -> None:
    """The next one issues on communicators that both share; the other ranks have nobody who would
    answer for the first.
    """
    store = dist.HashStore()
    status = RankStatus(store, 0, 2)
    watchdog = Watchdog(enabled=False, rank_status=status)
    shared = CollectiveLog("sequence", (0, 1), 60.0)
    logs = {"sequence": shared}
    first, second = (
        PassTracker(name, 0, range(2), logs, watchdog, 60.0, RecoveryBoard(store, 0))
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


ALIKE = [alike, alike_outside_any_pass, at_its_end, again_alone, apart_where_nothing_is_shared]


def test_ranks_that_go_on_alike_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    for script in ALIKE:
        assert go_on(script, monkeypatch) == ["went on", "went on"], script


APART = {
    with_different_passes: ("another forward after an exception", "rank 1 has issued gather 1"),
    # the next collective of that rank is on another communicator, where its number is the same
    before_anything_is_issued: (
        "another norm after an exception",
        "reduction 0 (number 0 of reductions)",
    ),
}


def test_ranks_that_go_on_apart_raise_on_both(
    monkeypatch: pytest.MonkeyPatch, heard: list[str]
) -> None:
    for script, (goes_on, other) in APART.items():
        for answer in go_on(script, monkeypatch):
            assert f"rank 0 goes on with {goes_on}" in answer and other in answer
