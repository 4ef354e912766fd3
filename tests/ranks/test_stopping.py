"""A job that is told to end: all ranks stop after the same step, whoever was told and when, and
no other step pays for it.
"""

import os
import re
import signal
import time

import pytest
from torch.utils.data._utils import signal_handling

from hf_zero.distributed import process_group, shard_fetches
from hf_zero.errors import ConfigError, NotBuiltError, PartitionError, RankMismatchError
from hf_zero.zero.step import preemption
from hf_zero.zero.step.preemption import _Handler
from hf_zero.zero.step.step_interfaces import StopRequests
from tests.helpers import oracle
from tests.helpers.cells import in_turn
from tests.helpers.engines import config_of, full_weights, start
from tests.helpers.ranks import RankFailed
from tests.helpers.stacks import by_hand, on_ranks, run_steps, squared, stack
from tests.helpers.training import At, plain_sgd

LIMIT = 50  # steps after which nobody waits any longer


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(shard_fetches, "IDLE_SECONDS", 0.02)


@pytest.fixture
def one_process():
    yield
    process_group.destroy_process_group()


def train(engine, rank, number, told=""):
    """One step; ``told`` is when in it this rank is told to stop."""
    if told == "before":
        engine.request_stop()
    assert not engine.stop_requested, "it changes in a step, and nowhere else"
    loss = squared(engine, At(number, 0, rank))
    if told == "forward":
        engine.request_stop()
    engine.backward(loss)
    if told == "backward":
        engine.request_stop()
    engine.step()


@in_turn("stage, ranks, when", [(1, 1, "backward"), (2, 2, "before"), (3, 2, "forward")])
def test_all_ranks_stop_after_the_same_step(quick, stage, ranks, when):
    """One rank is told in its third step; others may be in the next by then."""

    def run(rank, model):
        engine = start(model, plain_sgd(model), config_of(stage))
        engine.stop_on()
        for number in range(LIMIT):
            train(engine, rank, number, when if (number, rank) == (2, ranks - 1) else "")
            if engine.stop_requested:
                return number + 1, full_weights(engine)
        raise AssertionError("nobody stopped")

    answers = on_ranks(ranks, run)
    (steps,) = {steps for steps, _ in answers}
    assert steps == 3 if ranks == 1 else steps in (3, 4)
    want, _ = by_hand(plain_sgd, [[(1.0, 0)]] * steps, ranks)
    for _, weights in answers:
        oracle.compare_tensors("weights", weights, want)


def test_steps_in_which_nobody_is_told_cost_nothing(quick):
    """The same collectives as without listening, and nothing in the store."""

    def run(rank, model, listen):
        engine = start(model, plain_sgd(model), config_of(3))
        if listen:
            engine.stop_on()
        engine.mesh.stats.keep_log = True
        run_steps(engine, rank, range(3))
        return list(engine.mesh.stats.log), engine.mesh.consensus.steps._store.check(["fetch/n"])

    plain, listening = on_ranks(2, run, False), on_ranks(2, run, True)
    assert plain == listening and not listening[0][1]


def test_a_rank_that_does_not_listen_is_named(quick):
    def run(rank, model):
        engine = start(model, plain_sgd(model), config_of(1))
        with pytest.raises(
            PartitionError, match=r"request_stop\(\) reaches only ranks that listen"
        ):
            engine.request_stop()
        with pytest.raises(PartitionError, match="stop_on with signals needs the main thread"):
            engine.stop_on(signal.SIGTERM)
        engine.mesh.consensus.steps._waits.timeout = 0.3
        if rank == 0:
            engine.stop_on()
            engine.request_stop()
        train(engine, rank, 0)

    with pytest.raises(RankFailed, match="for ranks 1 to hear that the job is to stop") as caught:
        on_ranks(2, run)
    assert isinstance(caught.value.__cause__, RankMismatchError)


def listening(number):
    model = stack()
    engine = start(model, plain_sgd(model), config_of(2))
    engine.stop_on(number)
    return engine


@pytest.fixture
def heard_before():
    """A handler that the program has already."""
    heard = []

    def handler(number, frame):
        heard.append(number)

    before = signal.signal(signal.SIGUSR1, handler)
    yield heard, handler
    signal.signal(signal.SIGUSR1, before)


@in_turn("end", ["destroy", "stop_on"])
def test_a_signal_is_seen_after_the_step_and_handlers_come_back(one_process, heard_before, end):
    heard, handler = heard_before
    heard.clear()
    engine = listening(signal.SIGUSR1)
    train(engine, 0, 0)
    assert not engine.stop_requested
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGUSR1)
    assert heard == [signal.SIGUSR1] * 2
    train(engine, 0, 1)
    assert engine.stop_requested
    getattr(engine, end)()
    assert signal.getsignal(signal.SIGUSR1) is handler


def test_an_engine_that_was_destroyed_cannot_be_told(one_process, heard_before):
    _, handler = heard_before
    engine = listening(signal.SIGUSR1)
    engine.destroy()
    engine.stop_on()
    for call in (lambda: engine.stop_on(signal.SIGUSR1), engine.request_stop):
        with pytest.raises(PartitionError, match="engine that was destroyed"):
            call()
    assert signal.getsignal(signal.SIGUSR1) is handler and not engine.stop_requested


def test_a_signal_that_cannot_be_handled_leaves_the_handlers(one_process, heard_before):
    heard, handler = heard_before
    heard.clear()
    engine = listening(signal.SIGUSR1)
    ours = signal.getsignal(signal.SIGUSR1)
    before = signal.getsignal(signal.SIGTERM)
    for wrong in (signal.SIGKILL, signal.SIGSTOP, 999, 0, -1, "SIGTERM", None, [signal.SIGTERM]):
        with pytest.raises(ConfigError, match=re.escape(repr(wrong))):
            engine.stop_on(signal.SIGTERM, wrong)
        assert signal.getsignal(signal.SIGTERM) is before, wrong
        assert signal.getsignal(signal.SIGUSR1) is ours, wrong
    os.kill(os.getpid(), signal.SIGUSR1)
    train(engine, 0, 0)
    assert engine.stop_requested, "it listens still"
    engine.destroy()
    assert signal.getsignal(signal.SIGUSR1) is handler


def test_a_handler_outlives_no_engine(heard_before):
    class Engine:
        def request_stop(self):
            raise AssertionError

    heard, handler = heard_before
    engine = Engine()
    _Handler(signal.SIGUSR1, engine.request_stop)
    del engine
    os.kill(os.getpid(), signal.SIGUSR1)
    assert heard == [signal.SIGUSR1] and signal.getsignal(signal.SIGUSR1) is handler


def test_two_engines_that_listen(one_process, heard_before, monkeypatch):
    """Each one ends alone: its handler goes, and the other one's signals stay those of workers."""
    workers = []
    monkeypatch.setattr(preemption, "_begin", lambda: None)
    monkeypatch.setattr(preemption.native, "end_by_parent_only", workers.append)

    def told_to_workers():
        workers.clear()
        signal_handling._set_worker_signal_handlers()
        return [sorted(signals) for signals in workers]

    _, handler = heard_before
    for order in (0, 1), (1, 0):
        engines = [listening(signal.SIGUSR1), listening(signal.SIGUSR1)]
        engines[order[0]].destroy()
        assert told_to_workers() == [[signal.SIGUSR1]]
        os.kill(os.getpid(), signal.SIGUSR1)
        train(engines[order[1]], 0, 0)
        assert engines[order[1]].stop_requested
        assert not engines[order[0]].stop_requests.asked
        engines[order[1]].destroy()
        assert signal.getsignal(signal.SIGUSR1) is handler and not told_to_workers()


def test_a_child_that_was_forked_ends_as_it_would(one_process):
    engine = listening(signal.SIGTERM)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, b"!")
        time.sleep(60)
        os._exit(0)
    os.read(reading, 1)  # a signal that comes while Python forks is lost
    os.kill(child, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    train(engine, 0, 0)
    assert not engine.stop_requested
    engine.destroy()


def test_a_package_without_the_feature_refuses_to_listen() -> None:
    requests = StopRequests(None, None)  # type: ignore[arg-type]
    requests.listen()
    for ask in (requests.request, lambda: requests.listen(signal.SIGTERM)):
        with pytest.raises(NotBuiltError, match="install hf-zero with the row stop_requests"):
            ask()
    assert not requests.asked and not requests.agreed and requests.received == []
