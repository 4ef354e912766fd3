"""What the core does without the feature that detects hangs and dead ranks."""

from __future__ import annotations

import pytest

from hf_zero.distributed.collective_log import CollectiveLog
from hf_zero.distributed.hang_detection import HangDetection
from hf_zero.distributed.pass_tracker import PassTracker
from hf_zero.errors import RankMismatchError


def tracker(ranks: int, log: CollectiveLog) -> PassTracker:
    detection = HangDetection(rank=1, world=ranks)
    return detection.tracker("engine 1", 1, range(ranks), {"gathers": log}, 5.0)


def broken(passes: PassTracker, log: CollectiveLog, joint: bool, issues: int) -> None:
    passes.begin("forward", "root", joint)
    for _ in range(issues):
        log.issue("gather of layer.1")
    passes.broke()


@pytest.mark.parametrize("joint, issues", [(True, 0), (False, 1)])
def test_a_pass_after_a_broken_one_is_refused(joint: bool, issues: int) -> None:
    log = CollectiveLog("gathers", range(2), 5.0)
    passes = tracker(2, log)
    passes.begin("forward", "root")
    passes.end()
    broken(passes, log, joint, issues)
    refusal = "rank 1 goes on with a {} after an exception in a forward 'root', .*; let the job end"
    with pytest.raises(RankMismatchError, match=refusal.format("backward")):
        passes.begin("backward", None)
    with pytest.raises(RankMismatchError, match=refusal.format("reduction of layer.2")):
        log.issue("reduction of layer.2")
    passes.close()
    passes.begin("forward", "root")


def test_a_broken_pass_that_no_rank_shares_is_none() -> None:
    log = CollectiveLog("gathers", range(2), 5.0)
    for ranks, joint, issues in ((2, False, 0), (1, True, 1)):
        passes = tracker(ranks, log)
        broken(passes, log, joint, issues)
        passes.broke()  # outside of passes
        passes.begin("forward", "root")


def test_a_failed_wait_ends_the_rank() -> None:
    watchdog = HangDetection(rank=1, world=2).watchdog
    pending = CollectiveLog("gathers", range(2), 5.0).issue("gather of layer.1")
    watchdog.check()
    raised = watchdog.conclude_failure(pending, RuntimeError("Connection closed by peer"))
    assert str(raised).startswith("rank 1 could not finish gather of layer.1 (number 0 of gathers)")
    assert "a connection was lost (Connection closed by peer)" in str(raised)
    assert "see the output of rank 0" in str(raised)
    assert str(watchdog.report_mismatch(pending)) == str(raised), "the first reason stays"
    with pytest.raises(RankMismatchError, match="could not finish gather"):
        watchdog.check()
    other = HangDetection(rank=1, world=2).watchdog.report_mismatch(pending)
    assert str(other).startswith("rank 1 is at gather of layer.1") and "elsewhere" in str(other)
