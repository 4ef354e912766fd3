"""Faults put into hf_zero, one at a time, and what the device finds: ``python -m tests.late.faults
MODE``.

A fault leaves out a call of the device (a wait, a synchronisation) that comes from a function of
hf_zero, or puts another function in the place of one. Every rank has it. A line of
JSON says what was found.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from tests.late import device, training, ways_out

import hf_zero  # isort: skip
from hf_zero.activations import host_copies as transfers  # isort: skip
from torch.distributed.pipelining import schedules  # isort: skip
from hf_zero.zero.gather import schedule  # isort: skip
from hf_zero.zero.layout import unit  # isort: skip
from hf_zero.distributed import collectives  # isort: skip
from hf_zero.offload import update, update_gathers  # isort: skip
from hf_zero.device import streams  # isort: skip

Putting = Callable[[], AbstractContextManager[Callable[[], int]]]


@dataclass(frozen=True)
class Fault:
    """``put`` is a context in which the fault is there, and gives what counts how often it has
    struck; one of ``kinds`` must be reported. ``job``: of :data:`RUNS`, or of training.py.
    """

    job: str
    put: Putting
    kinds: frozenset[str]


def left_out(operation: str, function: str) -> Putting:
    """Calls of ``operation`` ("wait", "synchronize", "query", "record_stream") from ``function``
    ("unit.py finish_gather") do nothing.
    """

    @contextlib.contextmanager
    def put() -> Iterator[Callable[[], int]]:
        device.drop_nothing()
        device.drop(operation, function)
        yield device.drops
        device.drop_nothing()

    return put


def replaced(owner: Any, name: str, fault: Callable[..., Any]) -> Putting:
    """``fault`` in the place of ``owner.name``; it gets what it replaces as its first argument."""

    @contextlib.contextmanager
    def put() -> Iterator[Callable[[], int]]:
        plain, struck = getattr(owner, name), [0]

        def call(*args: Any, **kwargs: Any) -> Any:
            struck[0] += 1
            return fault(plain, *args, **kwargs)

        with mock.patch.object(owner, name, call):
            yield lambda: struck[0]

    return put


def unrecorded(function: str) -> Putting:
    """Events that ``function`` ("unit.py finish_gather") records are over at once."""
    file, _, name = function.partition(" ")

    def record(plain: Any, stream: streams.Stream) -> streams.Event:
        frame: Any = sys._getframe()
        while frame is not None:
            code, frame = frame.f_code, frame.f_back
            if code.co_name == name and Path(code.co_filename).name == file:
                struck[0] += 1
                return streams._new_event(stream.device.type)
        event: streams.Event = plain(stream)
        return event

    struck = [0]

    @contextlib.contextmanager
    def put() -> Iterator[Callable[[], int]]:
        struck[0] = 0
        with replaced(streams, "record_event", record)():
            yield lambda: struck[0]

    return put


def _nothing(plain: Any, *args: Any) -> None:
    """It is not called."""


def _swapped_on_one_rank(plain: Any, self: schedule.Schedule, *args: Any, **kwargs: Any) -> None:
    """Rank 1 gathers two units of two sizes the other way round; of one size they match."""
    plain(self, *args, **kwargs)
    under_way = self._pass
    if under_way is not None and under_way.plan and os.environ.get("RANK") == "1":
        plan = under_way.plan = list(under_way.plan)
        for at in range(1, len(plan)):
            if plan[at - 1].nbytes != plan[at].nbytes:
                plan[at - 1], plan[at] = plan[at], plan[at - 1]
                break


@contextlib.contextmanager
def _less_ahead() -> Iterator[Callable[[], int]]:
    """Rank 1 gathers one unit less ahead: it issues reductions where the others issue gathers."""
    late = os.environ.get("RANK") == "1"
    with mock.patch.object(schedule, "AHEAD", schedule.AHEAD - late):
        yield lambda: int(late)


def _finished_at_once(plain: Any, self: collectives.Handle, finish: Callable[[], None]) -> None:
    """What follows a collective runs as soon as it is issued."""
    finish()


@contextlib.contextmanager
def _updates_with_the_others() -> Iterator[Callable[[], int]]:
    """What was updated is gathered where the training thread issues its reductions."""
    groups: list[Any] = []

    def noted(plain: Any, self: update.Updater, updated: unit.Unit, future: Any) -> None:
        groups[:] = [updated.trainable[0].axis._reduce_group]
        plain(self, updated, future)

    def elsewhere(plain: Any, self: update_gathers.UpdateGathers, gather: Any) -> None:
        with contextlib.ExitStack() as others:
            for axis, _ in gather.messages:
                others.enter_context(mock.patch.object(axis, "_group", groups[0]))
            plain(self, gather)

    adds = replaced(update.Updater, "_add", noted)
    issues = replaced(update_gathers.UpdateGathers, "_issue", elsewhere)
    with adds(), issues() as struck:
        yield struck


COPIES = frozenset({"race", "reuse", "host"})
ENDED = frozenset({"unregistered"})
ORDER, THREADS = frozenset({"order"}), frozenset({"threads"})
INTERLEAVED = frozenset({"interleaved"})
HOST = "stage 2, optimizer on the host"
HOST_ONCE = "stage 2, optimizer on the host, one micro-batch"
ALL = "stage 3, all on the host"
ALL_ONCE = "stage 3, all on the host, one micro-batch"
ACTIVATIONS = "stage 3, activations on the host"
BETWEEN, READ, *_ = training.BETWEEN_STEPS
TWO_STREAMS = "stage 2, branches on two streams"
IN_A_UNIT = "stage 3, branches on two streams in a unit"
TWO_STREAMS_AWAY = "stage 3, activations on the host, branches on two streams"
ALONE = "stage 3, read by one rank between steps"
IN_MEMORY, *_ = training.IN_MEMORY
# The job, what puts the fault, and the kinds of which one must be reported.
FAULTS: dict[str, Fault] = {
    name: Fault(*each)
    for name, each in {
        "compute does not wait for a gather": (
            "stage 3", left_out("wait", "unit.py finish_gather"), COPIES),
        "a gather does not wait for the last reader": (
            ALL, left_out("wait", "unit.py launch_gather"), COPIES),
        "compute does not wait for a reduction": (
            "stage 2", left_out("wait", "collectives.py reduce_into"), COPIES),
        "a gradient is copied before it is complete": (
            HOST, left_out("wait", "gradient_offload.py send"), COPIES),
        "the host adds a gradient before it has come": (
            HOST, left_out("synchronize", "gradient_offload.py _finish_oldest"), COPIES),
        "the host updates before gradients have come": (
            HOST_ONCE, left_out("synchronize", "update.py _run"), COPIES),
        "the forward does not wait for new parameters": (
            HOST, left_out("wait", "update_gathers.py wait"), COPIES),
        "shards are written while they are brought": (
            ALL_ONCE, left_out("synchronize", "update.py _run"), COPIES),
        "an activation is copied before it is there": (
            ACTIVATIONS, left_out("wait", "host_copies.py send"), COPIES),
        "an activation is brought before its memory is free": (
            ACTIVATIONS, left_out("wait", "host_copies.py bring"), COPIES),
        "an activation is used before it is back": (
            ACTIVATIONS, left_out("wait", "host_copies.py use"), COPIES),
        "an activation is given back under its copy": (
            ACTIVATIONS, replaced(transfers.Streams, "leave", _nothing), COPIES),
        "one rank gathers in another order": (
            "stage 3", replaced(schedule.Schedule, "begin", _swapped_on_one_rank), ORDER),
        "the update gathers where gradients are reduced": (HOST, _updates_with_the_others, THREADS),
        "one rank prefetches one unit less": (
            "stage 3, one micro-batch", _less_ahead, INTERLEAVED),
        "a shard that is away is read, and written under its copy": (
            READ, left_out("synchronize", "flat_buffer.py _shard_as_it_is"), COPIES),
        "a generation is hashed under its copy": (
            IN_MEMORY, left_out("synchronize", "file_writer.py copy_to_memory"), COPIES),
        "weights are copied before they are gathered": (
            "weights are sent", left_out("wait", "rollout_weights.py follow"), COPIES),
        "weights are read before they come from the host": (
            "weights are sent", left_out("wait", "wholes.py _wait"), COPIES),
        "a script writes shards under their gather": (
            "a state dict is put", left_out("synchronize", "flat_buffer.py store_part"), COPIES),
        "a stage does not wait for what it receives": (
            "pipeline", replaced(schedules, "_wait_batch_p2p", _nothing), COPIES),
        "a pooled buffer passes from stream to stream": (
            TWO_STREAMS, left_out("wait", "streams.py acquire"), COPIES),
        "the second stream of a unit does not wait for its gather": (
            "stage 3, branches on two streams in a unit",
            left_out("wait", "unit.py runs_here"), COPIES),
        "the forward does not wait for parameters of other ranks": (
            "stage 2", left_out("wait", "sharded_model.py _finish"), COPIES),
        "a message is sent while another stream fills it": (
            "stage 2, branches on two streams that share messages",
            left_out("wait", "reductions.py flush"), COPIES),
        "gradients of another stream are reduced before they are complete": (
            IN_A_UNIT, left_out("wait", "unit.py await_gradients"), COPIES),
        "the second stream of a unit does not wait for parameters of other ranks": (
            "stage 2, branches on two streams in a unit",
            replaced(unit.Unit, "gathered_here", _nothing), COPIES),
        "the copies of an update are over before they begin": (
            HOST, unrecorded("update.py record"), COPIES),
        "an update does not wait for a forward before its step": (
            "stage 2, optimizer on the host, evaluated before steps",
            unrecorded("update.py _submit"), COPIES),
        "a gather does not wait for the update of its shard": (
            "stage 3, optimizer on the host", left_out("wait", "update.py finish"), COPIES),
        "an engine ends under the copies of its update": (
            "an engine ends", left_out("synchronize", "optimizer_step.py close"), ENDED),
        "an activation is given back under another stream": (
            TWO_STREAMS_AWAY, left_out("record_stream", "host_copies.py use"), COPIES),
        "shards are served before they are written": (
            ALONE, left_out("wait", "unit.py read"), COPIES),
        "the gradient norm is read before it is summed": (
            "stage 2", left_out("wait", "norm.py agree"), COPIES),
        "parts of matrices are used before they come": (
            "stage 3, Muon", left_out("wait", "sharded_model.py exchange"), COPIES),
        "sums over whole tensors are used before they are complete": (
            "stage 2, Adafactor, built again between steps",
            left_out("wait", "sharded_model.py add_up"), COPIES),
        "momenta in 1 bit are added before they come": (
            "stage 1, momenta in 1 bit after a step",
            left_out("wait", "one_bit_steps.py _update"), COPIES),
        "a message in few bits is decoded before it comes": (
            "stage 3, in few bits, errors fed back",
            replaced(collectives.Handle, "finish_with", _finished_at_once), COPIES),
    }.items()
}  # fmt: skip


def _ends(job: str, micros: int, again: bool, rank: int) -> None:
    """Destroy an engine whose last step, and a forward after it if ``again``, are yet to run."""
    config = training.config(job)
    engine, *_ = hf_zero.initialize(model=training.tower(), config=config)
    for values in training.batches(micros, rank, 2):
        loss = engine(values.pin_memory().to(engine.device, non_blocking=True))
        engine.backward(loss)
        engine.step()
    if again:
        loss = engine(values.to(engine.device))
    engine.destroy()
    del engine, loss
    gc.collect()
    device.synchronize_all()


RUNS: dict[str, Callable[[int], Any]] = {
    "pipeline": lambda rank: training.train_pipeline("1f1b"),
    "weights are sent": lambda rank: ways_out.sends_weights(ways_out.Job(ALL, rank)),
    "an engine ends": partial(_ends, HOST, 2, False),
    "a state dict is put": lambda rank: ways_out.is_under_way(ways_out.Job(ALL, rank)),
}


def run(name: str, fault: Fault, rank: int, world: int) -> dict[str, Any]:
    """Train with a fault: what was reported, and how often the fault has struck."""
    error = ""
    device.forget()
    with fault.put() as struck:
        try:
            if fault.job in RUNS:
                RUNS[fault.job](rank)
            else:
                training.train(fault.job, 2, rank, world)
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"[:300]
        count = struck()
    found = {"struck": count, "reports": device.reports(), "error": error}
    return {"fault": name, "rank": rank, "kinds": sorted(fault.kinds), **found}


def main() -> None:
    rank, world = device.begin(sys.argv[1]), int(os.environ.get("WORLD_SIZE", "1"))
    # the main thread has set its device by now, without a fault
    training.train("stage 3", 1, rank, world)
    for name, fault in FAULTS.items():
        device.tell(**run(name, fault, rank, world))


if __name__ == "__main__":
    main()
