"""A wait that lasts is warned about, by name, each minute; posts of waiting ranks, with the
conclusions that they prove and those that they do not; the report of a rank that ends.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from hf_zero.distributed import hang_detection
from hf_zero.distributed import rank_status as module
from hf_zero.distributed import watchdog as watching
from hf_zero.distributed.collective_log import CollectiveLog, PendingCollective
from hf_zero.distributed.hang_proofs import StatusPost, diagnose_hang
from hf_zero.distributed.rank_status import PostedStatus
from hf_zero.distributed.store import StoreSilent
from hf_zero.distributed.watchdog import PollingWatchdog
from hf_zero.errors import PartitionError, RankMismatchError
from tests.helpers.cells import in_one_item


class Clock:
    """Stands for the clock and for the event on which the watching thread sleeps: a sleep moves
    the clock.
    """

    def __init__(self) -> None:
        self.now = 1000.0
        self.last = 0.0
        self.at: dict[float, Callable[[], None]] = {}

    def wait(self, seconds: float) -> bool:
        assert 0 <= seconds <= 1.0, "the thread must poll often enough to warn in time"
        self.now += seconds
        for moment in sorted(moment for moment in self.at if moment <= self.now):
            self.at.pop(moment)()
        return self.now >= self.last

    def run(self, watchdog: PollingWatchdog, seconds: float) -> None:
        """Let the watching thread's loop run for ``seconds``, on this thread."""
        self.last = self.now + seconds
        watching._run(weakref.ref(watchdog), self)  # type: ignore[arg-type]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(watching, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(hang_detection, "time", watching.time)
    monkeypatch.setattr(PollingWatchdog, "start", lambda self: None)
    return clock


def test_a_silent_wait_is_warned_about_each_minute(clock: Clock, heard: list[str]) -> None:
    watchdog = PollingWatchdog()
    with watchdog.watching(PendingCollective("all-gather of layer.3")):
        clock.run(watchdog, 59)
        assert heard == []
        clock.run(watchdog, 200)
    said = [message.split(":")[0] for message in heard]
    waits = "still waiting for all-gather of layer.3 after"
    assert said == [f"{waits} {seconds} s" for seconds in (60, 120, 180, 240)]
    assert "another rank has not joined" in heard[0]
    heard.clear()
    for number in range(10):  # short waits
        with watchdog.watching(PendingCollective(f"wait {number}")):
            clock.run(watchdog, 30)
    with pytest.raises(KeyError), watchdog.watching(PendingCollective("broken")):
        raise KeyError
    clock.run(watchdog, 300)
    assert heard == [], "nobody waits after an end or an error"


def test_a_poll_that_fails_is_not_the_last(heard: list[str]) -> None:
    """A query of an event raises while another thread captures a CUDA graph."""
    watchdog, polls, again = PollingWatchdog(warn_after=1000.0), [0], threading.Event()

    def is_over() -> bool:
        if threading.current_thread() is not watchdog._thread:
            return False
        polls[0] += 1
        if polls[0] > 2:
            again.set()
        raise RuntimeError("operation not permitted when stream is capturing")

    log = CollectiveLog("gathers", (0, 1), 1000.0)
    watchdog.follow(PendingCollective("all-gather", log, 0, (0, 1)), is_over)
    try:
        assert again.wait(60)
        assert [each for each in heard if "failed, and goes on" in each] == heard[:1]
    finally:
        watchdog.close()


def two_ranks(monkeypatch: pytest.MonkeyPatch) -> tuple[list[PollingWatchdog], list[CollectiveLog]]:
    store, logs, watches = dist.HashStore(), [], []
    for rank in range(2):
        rank_status = PostedStatus(store, rank, 2)
        logs.append(
            rank_status.register(
                CollectiveLog("gathers", range(2), 1000.0, reports_dead_peers=False)
            )
        )
        watches.append(PollingWatchdog(rank_status=rank_status))
        monkeypatch.setattr(watches[-1], "start", lambda: None)
    return watches, logs


def test_communicators_are_aborted_together(caplog: pytest.LogCaptureFixture) -> None:
    """NCCL's abort of one returns when the device is idle: when the others are aborted, too. One
    that cannot be aborted keeps no other from it.
    """

    def fails() -> None:
        raise RuntimeError("no such group")

    here, idle = PostedStatus(dist.HashStore(), 0, 2), threading.Barrier(3)
    off = partial(idle.wait, 10.0)
    for name, call in (("gathers", off), ("broken", fails), ("reductions", off), ("updates", off)):
        here.register(CollectiveLog(name, range(2), 60.0, call))  # type: ignore[arg-type]
    watchdog = PollingWatchdog(rank_status=here)
    watchdog.end("rank 1 has failed")
    watchdog.close()
    assert caplog.text.count("could not abort") == 1 and "could not abort broken" in caplog.text
    assert not idle.broken
    with pytest.raises(RankMismatchError, match="rank 1 has failed"):
        watchdog.check()


class Record:
    """The record of a run, which gets the states of all ranks."""

    def __init__(self) -> None:
        self.states: list[Any] = []

    def note(self, kind: str, states: Any) -> None:
        assert kind == "ranks"
        self.states.append([(row["ranks"], row["state"], row["what"]) for row in states])


def test_the_states_of_all_ranks_are_noted_in_a_long_wait(
    clock: Clock, heard: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once for each change, and when the wait is over; a short one is none of a record's."""
    watches, logs = two_ranks(monkeypatch)
    record = Record()
    watches[0].records.add(record)
    status: Any = watches[1].rank_status
    for log in logs:
        pending = log.issue("all-gather of layer.0")
    status.publish("waits", pending=pending)  # it has gone on since
    with watches[0].watching(logs[0].issue("all-gather of layer.1")):
        clock.run(watches[0], watching.NOTED_SECONDS - 1)
        assert record.states == []
        clock.run(watches[0], 20)
        waits = "all-gather of layer.1 (number 1 of gathers)"
        assert record.states == [[([0], "waits", waits), ([1], "runs", "")]]
        status.publish("waits", pending=logs[1].issue("all-gather of layer.1"))
        clock.run(watches[0], 20)
        assert record.states[1:] == [[([0, 1], "waits", waits)]]
    clock.run(watches[0], 20)
    assert record.states[2:] == [[([0, 1], "runs", "")]]
    with watches[0].watching(logs[0].issue("all-gather of layer.2")):
        status.publish("failed", "ValueError: bad batch")
        clock.run(watches[0], 4)
    assert record.states[3:] == [
        [
            ([0], "broken", "rank 1 has failed: ValueError: bad batch"),
            ([1], "failed", "ValueError: bad batch"),
        ]
    ]
    del record
    assert not watches[0].records


WORLD = range(3)


def post(
    pending: tuple[Any, ...] | None = None,
    state: str = "waits",
    why: str = "",
    closed: str = "",
    **issued: list[str],
) -> StatusPost:
    """A post whose logs have the collectives ``issued``; ``wait`` is (log, number,
    needs).
    """
    logs = {log: [len(names), names, closed] for log, names in issued.items()}
    made: StatusPost = {"state": state, "why": why, "logs": logs}
    if pending is not None:
        log, number, *needs = pending
        needed = list(needs[0] if needs else WORLD)
        made["wait"] = [log, number, issued[log][number], needed]
    return made


OWN = post(("a", 1), a=["gather 1", "gather 2"], b=["sum 1"])


def told(own: StatusPost, others: dict[int, StatusPost], *parts: str) -> None:
    """There is a proof, which says all ``parts``."""
    verdict = diagnose_hang(0, own, others)
    assert verdict is not None and all(part in verdict.text for part in parts), verdict


SAME = ["gather 1", "gather 2"]
ENDED = {"state": "ended", "why": "its script is over"}
NO_PROOF: dict[str, tuple[StatusPost, dict[int, StatusPost]]] = {
    "silence": (OWN, {}),
    "it computes": (OWN, {1: post(None, "here", a=["gather 1"])}),
    "the same collective is slow": (OWN, {1: post(("a", 1), a=SAME, b=["sum 1"])}),
    # it waited for what rank 0 has issued by now: it has gone on, and may be computing
    "its wait has ended since": (OWN, {1: post(("b", 0), a=["gather 1"], b=["sum 1"])}),
    "its part is on the wire": (OWN, {1: post(None, **ENDED, a=SAME)}),
    "it is not needed": (post(("a", 1, (0, 2)), a=["x", "y"]), {1: post(None, "ended", "over")}),
    "another engine takes it over": (
        post(("a", 1), closed="destroyed its engine", a=SAME),
        {1: post(None, "here", closed="destroyed its engine", a=["gather 1"])},
    ),
}


@in_one_item(NO_PROOF)
def test_what_is_no_proof(name: str) -> None:
    own, others = NO_PROOF[name]
    assert diagnose_hang(0, own, others) is None


def test_what_is_a_proof() -> None:
    parted = post(("a", 1), a=["gather 1", "gather 9"], b=["sum 1"])
    told(OWN, {1: parted}, "rank 0 is at gather 2, rank 1 at gather 9 (both number 1 of a)")
    other = {1: post(("b", 1), a=["gather 1"], b=["sum 1", "sum 2"])}
    said = "rank 0 waits for gather 2 (number 1 of a), which rank 1 has not issued: it waits for "
    told(OWN, other, f"{said}sum 2 (number 1 of b)")
    verdict = diagnose_hang(0, OWN, other)
    assert verdict is not None
    assert "which rank 1 has not issued. Every rank must" in verdict.cause, "rank 1 says the rest"
    ended = post(None, **ENDED, a=["gather 1"])
    told(OWN, {1: ended}, "which rank 1 will never join: it has ended (its script is over)")
    closed = post(None, "here", closed="destroyed its engine", a=["gather 1"])
    told(OWN, {1: closed}, "rank 1 will never join: it has destroyed its engine")
    verdict = diagnose_hang(0, OWN, {1: post(None, "broken", "rank 2 exited")})
    assert verdict is not None and verdict.cause == "rank 2 exited", "the first cause"
    failed = {1: post(None, "here"), 2: post(None, "failed", "ValueError: bad batch")}
    for pending in (("a", 1), None):
        verdict = diagnose_hang(0, post(pending, a=SAME), failed)
        assert verdict is not None and verdict.text.startswith("rank 0 waits for")
        assert verdict.cause == "rank 2 has failed: ValueError: bad batch"
        assert verdict.text.endswith(verdict.cause)


def test_three_that_wait_in_a_ring_are_stuck_and_two_of_them_are_not() -> None:
    own = post(("a", 0, (0, 1)), a=["x"])
    second = post(("b", 0, (1, 2)), b=["y"])
    third = post(("c", 0, (2, 0)), c=["z"])
    told(own, {1: second, 2: third}, "which rank 1 has not issued: it waits for y")
    assert diagnose_hang(0, own, {1: second}) is None, "rank 2 may still come"
    alone = {1: second, 2: post(("c", 0, (2,)), c=["z"])}
    assert diagnose_hang(0, own, alone) is None, "what rank 2 waits for needs nobody else"


class Rank:
    """A rank on this thread: logs that wait on an event in place of a backend."""

    def __init__(self, store: Any, rank: int, timeout: float = 60.0):
        self.rank_status = PostedStatus(store, rank, 2)
        self.watchdog = PollingWatchdog(rank_status=self.rank_status)
        self.broken = threading.Event()
        log = CollectiveLog("gathers", (0, 1), timeout, self.broken.set)
        self.log = self.rank_status.register(log)

    def wait(self, what: str) -> None:
        pending = self.log.issue(what)
        try:
            with self.watchdog.watching(pending):
                assert self.broken.wait(120), "nobody breaks it off"
                raise RuntimeError("connection closed")
        except RuntimeError as error:
            raise self.watchdog.conclude_failure(pending, error) from error


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(watching, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(watching, "_take_time_to_speak", lambda: None)
    store = dist.HashStore()
    ranks = [Rank(store, 0), Rank(store, 1)]
    yield ranks
    for rank in ranks:
        rank.watchdog.close()
        watching.watchdogs.discard(rank.watchdog)


def test_a_lost_connection_of_the_script_itself_is_explained(pair: Any, heard: list[str]) -> None:
    """A rank that has finished its loop gets the error in a barrier of its own."""
    lost, explain = RuntimeError("Connection closed by peer"), watching._explain_lost_connection
    for others in (ValueError("Connection closed"), RuntimeError("out of memory")):
        assert explain(others) is None
    pair[0].log.timeout = 0.1
    said = r"rank 0 has waited .*, which is the timeout, for gather of x .*; rank 1 has not j"
    with pytest.raises(RankMismatchError, match=said) as raised:
        pair[0].wait("gather of x")
    assert "a loop of fewer steps than the others" in str(raised.value)
    watching.watchdogs.discard(pair[0].watchdog)
    said = str(explain(lost))
    assert said.startswith("rank 1 lost a connection in a collective of the script's own: rank 0")
    assert "gather of x" in said and "a loop of fewer steps than the others" in said
    assert pair[1].rank_status.publish_exit() is None, "it is said once"


def failing(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    monkeypatch.setattr(sys, "last_exc", error, raising=False)
    monkeypatch.setattr(sys, "last_value", error, raising=False)
    monkeypatch.setattr(module, "WAIT_FOR_PEERS_SECONDS", 0.2)


def test_an_exception_that_ends_a_rank_ends_the_other_by_its_first_line(
    pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, ValueError("bad batch\nof many lines"))
    assert pair[1].rank_status.publish_exit() is None
    said = r"rank 0 waits for gather of x .* rank 1 has failed: ValueError: bad batch$"
    with pytest.raises(RankMismatchError, match=said):
        pair[0].wait("gather of x")


def test_a_rank_that_fails_because_of_another_is_not_the_cause(
    pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own collective, not hf-zero's, has lost the connection to a rank that failed before."""
    failing(monkeypatch, ValueError("bad batch"))
    pair[1].rank_status.publish_exit()
    failing(monkeypatch, RuntimeError("Connection closed by peer"))
    assert pair[0].rank_status.publish_exit() == "rank 1 has failed: ValueError: bad batch"
    assert pair[1].rank_status.read()[0]["state"] == "broken"


def rank_of(process: int, store: Any, rank: int, monkeypatch: pytest.MonkeyPatch) -> PostedStatus:
    """A rank whose process is another one."""
    with monkeypatch.context() as patch:
        patch.setattr(module, "_identity", lambda _, find=module._identity: find(process))
        return PostedStatus(store, rank, 3)


SAID = "rank 1 exited without reporting why"
STATES = ("here", "waits", "follows")  # what a rank has posted last, perhaps long before


def test_a_process_that_is_killed_is_known_to_be_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """On its own host at once, and on others because a rank of its host says so."""
    pairs = []
    with subprocess.Popen("cat", stdin=subprocess.PIPE) as child:
        for state in STATES:
            store = dist.HashStore()
            here = PostedStatus(store, 0, 3)
            with monkeypatch.context() as patch:
                patch.setattr(module, "_identity", lambda _: "another-host 1 1")
                far = PostedStatus(store, 2, 3)
            rank_of(child.pid, store, 1, monkeypatch).publish(state)
            assert not here._dead(1) and here.failure_cause(0.0) is None
            pairs.append((here, far))
        child.kill()
        # a zombie, as long as nobody asks for its end
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        for here, far in pairs:
            assert here._dead(1) and not far._dead(1) and not far._dead(0)
            assert far.failure_cause(0.0) is None, "nothing is known of other hosts"
            verdicts = []
            for status in (here, far):
                assert str(status.failure_cause(0.0)).startswith(SAID)
                log = status.register(
                    CollectiveLog("gathers", range(3), 60.0, reports_dead_peers=False)
                )
                verdicts.append(status.diagnose(log.issue("gather 1"), ()))
                native = CollectiveLog("gathers", range(3), 60.0)
                assert status.diagnose(native.issue("gather 1"), ()) is None
            assert all(each and SAID in each.text for each in verdicts)


class Gone:
    """A store whose host is dead."""

    calls = 0

    def set(self, key: str, value: str) -> None:
        self.calls += 1
        raise RuntimeError("Connection reset by peer")

    def add(self, key: str, amount: int) -> int:
        raise AssertionError("asked again")

    check = get = add


def test_a_store_that_is_gone_is_asked_once_and_its_rank_named() -> None:
    store = Gone()
    rank_status = PostedStatus(store, 1, 2, store_host=0)
    rank_status.publish("waits")
    assert store.calls == 1
    log = CollectiveLog("agreements", (0, 1), 60.0, reports_dead_peers=False)
    verdict = rank_status.diagnose(PendingCollective("agreement", log, 0, (0, 1)))
    assert verdict is not None
    assert verdict.text.startswith("rank 0, which hosts the ranks' store, cannot be reached")
    assert verdict.text.endswith("saves in the same order, and the same number of them")
    native = PendingCollective("gather", CollectiveLog("gathers", (0, 1), 60.0), 0, (0, 1))
    assert rank_status.diagnose(native) is None, "the backend tells of that"
    said = "the launcher, which hosts the ranks' store, is gone or cannot be reached"
    assert PostedStatus(store, 1, 2).failure_cause(0.0) == said


def test_a_store_that_is_silent_proves_nothing() -> None:
    store: Any = dist.HashStore()
    answers = [True]

    class Stopped:
        def __getattr__(self, name: str) -> Any:
            if not answers[0]:
                raise StoreSilent("the ranks' store has not answered for 5 s")
            return getattr(store, name)

    here, there = PostedStatus(Stopped(), 0, 2), PostedStatus(store, 1, 2)
    log = here.register(CollectiveLog("agreements", (0, 1), 60.0, reports_dead_peers=False))
    pending = log.issue("agreement")
    answers[0] = False
    here.publish("waits", pending=pending)
    assert here.diagnose(pending) is None and not here.exit_reasons([1])
    said = "the launcher, which hosts the ranks' store, is gone or cannot be reached"
    assert here.failure_cause(0.0) == said, "of a connection that is lost as well"
    there.publish("failed", "ValueError: it")
    answers[0] = True
    verdict = here.diagnose(pending)
    assert verdict is not None and "rank 1 has failed: ValueError: it" in verdict.text


def test_a_rank_is_gone_once_its_interpreter_has_ended_and_not_before() -> None:
    store = dist.HashStore()
    here, there = PostedStatus(store, 0, 2), PostedStatus(store, 1, 2)
    # a thread of a rank that gives up may still say something
    for state in ("here", "waits", "broken"):
        there.publish(state, "it lost a connection") if state != "waits" else there.publish(state)
        assert not here.exit_reasons([0, 1]), state
    ended = PostedStatus(dist.PrefixStore("other", store), 1, 2)
    other = PostedStatus(dist.PrefixStore("other", store), 0, 2)
    assert not other.exit_reasons([1])
    ended.publish("ended", "its script is over")
    assert "rank 1 has ended (its script is over)" in other.exit_reasons([1])[1]
    reasons = PostedStatus(Gone(), 1, 2, store_host=0).exit_reasons([0])
    assert reasons[0].startswith("rank 0, which hosts the ranks' store, cannot be reached")


def test_two_communicators_in_use_differ_in_their_names(pair: Any) -> None:
    status = pair[0].rank_status
    first, second = (CollectiveLog("calls of engine 1", (0, 1), 60.0) for _ in range(2))
    assert status.register(first) is status.register(first) is first
    with pytest.raises(PartitionError, match=r"named 'calls of engine 1'.* close the first, or"):
        status.register(second)
    first.close()
    assert status.register(second) is second


def test_a_wait_in_an_engine_that_all_have_left_is_over(pair: Any) -> None:
    """Rank 1 has posted it, has gone on since, and is silent now; the digest that rank 0 reads is
    from before.
    """
    first, second = (rank.rank_status for rank in pair)
    logs = [rank.register(CollectiveLog("engine 1", (0, 1), 60.0)) for rank in (first, second)]
    second.publish("waits", pending=logs[1].issue("gather"))
    second.read()  # it leads, and writes the digest
    logs[0].issue("gather")
    waits = pair[0].log.issue("backward")
    for rank, log in zip((first, second), logs):
        rank.publish("here")
        rank.unregister([log])
    assert first.diagnose(waits) is None
    assert first.missing_ranks(waits) == [1]
