"""Faults put into hf_zero, one at a time, and what the device finds: ``python -m tests.late.faults
MODE [FAULT ...]``.

A fault leaves out a call of the device (a wait, a synchronization) that comes from a function of
hf_zero, or puts another function in the place of one. Every rank of the group has it. A line of
JSON says what was found.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from tests.late import checkpoints, device, training, ways_out

import torch  # isort: skip
import torch.distributed as dist  # isort: skip
import hf_zero  # isort: skip
from hf_zero.activations import host_copies as transfers  # isort: skip
from torch.distributed.pipelining import schedules  # isort: skip
from hf_zero.zero.gather import schedule  # isort: skip
from hf_zero.zero.gather import unit, unit_streams  # isort: skip
from hf_zero.checkpoint import file_writer  # isort: skip
from hf_zero.checkpoint.memory import saving  # isort: skip
from hf_zero.distributed import handle, world_group  # isort: skip
from hf_zero.offload import gradient_offload, update, update_gathers  # isort: skip
from hf_zero.zero.access import wholes  # isort: skip
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


def _none(plain: Any, *args: Any) -> list[None]:
    """It finds nothing."""
    return []


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
    with mock.patch.object(schedule, "MAX_PREFETCHED_UNITS", schedule.MAX_PREFETCHED_UNITS - late):
        yield lambda: int(late)


def _copied_early(plain: Any, *args: Any) -> None:
    """A generation is copied on a stream of its own, which has not waited for the update."""
    with streams.on_stream(torch.cuda.Stream()):
        plain(*args)


def _on_the_computing_stream(
    plain: Any, self: update_gathers.UpdateGathers, gather: update_gathers.Gather
) -> None:
    """Updated parameters are gathered on the stream that computes, not on that of their copies."""
    gather.stream = None
    plain(self, gather)


def _without_values(plain: Any, gradient: Any, values: torch.Tensor, *args: Any) -> Any:
    """A copy to the host keeps the form of its source alone, not its memory."""
    return plain(gradient, values.to("meta"), *args)


def _leaves_here(plain: Any, self: transfers.Streams, sent: Any) -> None:
    """The current stream waits for a copy, whichever stream has the memory of its source."""
    streams.current_stream(self._device).wait_event(sent[0])


def _finished_at_once(
    plain: Any, self: handle.Handle, finish: Callable[[], None], repeats: bool = True
) -> None:
    """What follows a collective runs as soon as it is issued."""
    finish()


def _in_the_background(plain: Any, place: Any, values: Any, wait: bool = True) -> None:
    """No copy to a block of a file is awaited."""
    plain(place, values, wait=False)


def _ended_loop(plain: Any, gathering: Any) -> None:
    """The end of a loop over weights does not wait for the gathers under way."""
    if sys._getframe(2).f_code.co_name != "whole_groups":
        plain(gathering)


@contextlib.contextmanager
def _updates_with_the_others() -> Iterator[Callable[[], int]]:
    """What was updated is gathered where the training thread issues its reductions."""
    groups: list[Any] = []

    def noted(plain: Any, self: update.OffloadedUpdater, updated: unit.Unit, future: Any) -> None:
        groups[:] = [updated.trainable_flats[0].mesh.shard._reduce_group]
        plain(self, updated, future)

    def elsewhere(plain: Any, self: update_gathers.UpdateGathers, gather: Any) -> None:
        with contextlib.ExitStack() as others:
            for dim, _ in gather.messages:
                others.enter_context(mock.patch.object(dim, "_group", groups[0]))
            plain(self, gather)

    adds = replaced(update.OffloadedUpdater, "_add", noted)
    issues = replaced(update_gathers.UpdateGathers, "_issue", elsewhere)
    with adds(), issues() as struck:
        yield struck


COPIES = frozenset({"race", "reuse", "host"})
ENDED = frozenset({"unregistered"})
ORDER, THREADS = frozenset({"order"}), frozenset({"threads"})
INTERLEAVED = frozenset({"interleaved"})
HOST = "stage 2, optimizer on the host"
HOST_ONCE = "stage 2, optimizer on the host, one micro-batch"
PIECES = "stage 2, optimizer on the host, small pieces"
ALL = "stage 3, all on the host"
ALL_ONCE = "stage 3, all on the host, one micro-batch"
ACTIVATIONS = "stage 3, activations on the host"
BETWEEN, READ, *_ = training.BETWEEN_STEPS
TWO_STREAMS = "stage 2, branches on two streams"
IN_A_UNIT = "stage 3, branches on two streams in a unit"
TWO_STREAMS_AWAY = "stage 3, activations on the host, branches on two streams"
ALONE = "stage 3, read by one rank between steps"
IN_MEMORY, *_ = training.IN_MEMORY
SAVED = "stage 3, saved beside steps"
# The job, what puts the fault, and the kinds of which one must be reported.
FAULTS: dict[str, Fault] = {
    name: Fault(*each)
    for name, each in {
        "compute does not wait for a gather": (
            "stage 3", left_out("wait", "unit.py finish_gather"), COPIES),
        "a gather does not wait for the last reader": (
            ALL, left_out("wait", "unit.py launch_gather"), COPIES),
        "compute does not wait for a reduction": (
            "stage 2", left_out("wait", "handle.py reduce_into"), COPIES),
        "a gradient is copied before it is complete": (
            HOST, left_out("wait", "gradient_offload.py send"), COPIES),
        "the host adds a gradient before it has come": (
            HOST, left_out("synchronize", "gradient_offload.py _finish_oldest"), COPIES),
        "the host updates before gradients have come": (
            HOST_ONCE, left_out("synchronize", "update.py _run"), COPIES),
        "the forward does not wait for new parameters": (
            HOST, left_out("wait", "update_gathers.py wait"), COPIES),
        "a pinned buffer is refilled under its copy": (
            PIECES, left_out("synchronize", "update.py output_for"), COPIES),
        "shards are written while they are brought": (
            ALL_ONCE, left_out("synchronize", "update.py _run"), COPIES),
        "an activation is copied before it is there": (
            ACTIVATIONS, left_out("wait", "host_copies.py send"), COPIES),
        "an activation is reloaded before its memory is free": (
            ACTIVATIONS, left_out("wait", "host_copies.py reload"), COPIES),
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
            READ, left_out("synchronize", "flat_buffer.py read_shard"), COPIES),
        "updated parameters are gathered on another stream": (
            BETWEEN,
            replaced(update_gathers.UpdateGathers, "_issue", _on_the_computing_stream),
            COPIES),
        "a generation is copied before the update": (
            IN_MEMORY, replaced(saving, "copy_to_memory", _copied_early), COPIES),
        "a generation is hashed under its copy": (
            IN_MEMORY, left_out("synchronize", "file_writer.py copy_to_memory"), COPIES),
        "a part of a save is written under its copy": (
            SAVED, left_out("synchronize", "file_writer.py copy_to_memory"), COPIES),
        "weights are copied before they are gathered": (
            "weights are sent", left_out("wait", "rollout_weights.py follow"), COPIES),
        "weights are read before they come from the host": (
            "weights are sent", left_out("wait", "wholes.py _wait"), COPIES),
        "a script writes shards under their gather": (
            "a state dict is put", left_out("synchronize", "flat_buffer.py store_shard"), COPIES),
        "a stage does not wait for what it receives": (
            "pipeline", replaced(schedules, "_wait_batch_p2p", _nothing), COPIES),
        "a pooled buffer passes from stream to stream": (
            TWO_STREAMS, left_out("wait", "streams.py acquire"), COPIES),
        "a unit is released under another stream": (
            "stage 3, branches on two streams",
            replaced(unit.streams, "record_use", _nothing), COPIES),
        "the second stream of a unit does not wait for its gather": (
            "stage 3, branches on two streams in a unit",
            left_out("wait", "unit_streams.py record_compute"), COPIES),
        "the forward does not wait for parameters of other ranks": (
            "stage 2", left_out("wait", "shared_shards.py finish"), COPIES),
        "a message is sent while another stream fills it": (
            "stage 2, branches on two streams that share messages",
            left_out("wait", "reductions.py flush"), COPIES),
        "another stream of a unit does not wait for its update": (
            "stage 2, optimizer on the host, branches on two streams in a unit",
            left_out("wait", "unit_streams.py record_compute"), COPIES),
        "a gradient of another stream is given back while it is read": (
            "stage 3, branches on two streams in a unit",
            replaced(unit_streams, "raw_grads", _none), COPIES),
        "gradients of another stream are reduced before they are complete": (
            IN_A_UNIT, left_out("wait", "unit_streams.py wait_for_gradients"), COPIES),
        "the second stream of a unit does not wait for parameters of other ranks": (
            "stage 2, branches on two streams in a unit",
            replaced(unit_streams.UnitStreams, "record_gather", _nothing), COPIES),
        "the copy of a gradient is over before it begins": (
            HOST_ONCE, unrecorded("gradient_offload.py send"), COPIES),
        "a gradient is given back under its copy": (
            HOST, replaced(gradient_offload, "GradientCopy", _without_values), COPIES),
        "the copies of an update are over before they begin": (
            HOST, unrecorded("update.py record"), COPIES),
        "an update does not wait for a forward before its step": (
            "stage 2, optimizer on the host, evaluated before steps",
            unrecorded("update.py _submit"), COPIES),
        "an update writes shards that a forward before its step copies": (
            "stage 3, all on the host, evaluated before steps",
            unrecorded("update.py _submit"), COPIES),
        "a gather does not wait for the update of its shard": (
            "stage 3, optimizer on the host", left_out("wait", "update.py finish"), COPIES),
        "an engine ends under the copies of its update": (
            "an engine ends", left_out("synchronize", "optimizer_step.py close"), ENDED),
        "an activation has left before its copy begins": (
            ACTIVATIONS, unrecorded("host_copies.py send"), COPIES),
        "an activation is back before its copy begins": (
            ACTIVATIONS, unrecorded("host_copies.py reload"), COPIES),
        "an activation without a use is given back under its copy": (
            "stage 3, activations on the host, some without a use",
            replaced(transfers.Reloaded, "__del__", _nothing), COPIES),
        "an activation is given back under another stream": (
            TWO_STREAMS_AWAY, left_out("record_stream", "host_copies.py use"), COPIES),
        "another stream than its own waits for the copy of an activation": (
            TWO_STREAMS_AWAY, replaced(transfers.Streams, "leave", _leaves_here), COPIES),
        "shards are served before they are written": (
            ALONE, left_out("wait", "shared_shards.py read"), COPIES),
        "the write of shards is over before it begins": (
            ALONE, unrecorded("shared_shards.py writing"), COPIES),
        "shards are served under the copy of their update": (
            "stage 3, optimizer on the host, read by one rank between steps",
            left_out("synchronize", "optimizer_shard.py synchronize_update"), COPIES),
        "the gradient norm is read before it is summed": (
            "stage 2", left_out("wait", "step_agreement.py agree"), COPIES),
        "parts of matrices are used before they come": (
            "stage 3, Muon", left_out("wait", "sharded_model.py exchange"), COPIES),
        "sums over whole tensors are used before they are complete": (
            "stage 2, Adafactor, built again between steps",
            left_out("wait", "sharded_model.py add_up"), COPIES),
        "momenta in 1 bit are added before they come": (
            "stage 1, momenta in 1 bit after a step",
            left_out("wait", "one_bit_steps.py _update"), COPIES),
        "steps in 1 bit begin before denominators come": (
            "stage 1, momenta in 1 bit after a step",
            left_out("wait", "one_bit_steps.py _gather_all"), COPIES),
        "a packed message is unpacked before it comes": (
            "stage 2, units that share messages",
            replaced(handle.Handle, "finish_with", _finished_at_once), COPIES),
        "a message in few bits is given back while another stream decodes it": (
            "stage 3, weights in 8 bits, branches on two streams",
            left_out("record_stream", "handle.py wait"), COPIES),
        "a message in few bits is decoded before it comes": (
            "stage 3, in few bits, errors fed back",
            replaced(handle.Handle, "finish_with", _finished_at_once), COPIES),
        "weights are gathered into memory that is still read": (
            "weights are sent", left_out("wait", "wholes.py _launch"), COPIES),
        "a loop over weights ends under its gathers": (
            "weights are sent", replaced(wholes, "_wait", _ended_loop), COPIES),
        "a block of a file is hashed under its copy": (
            "a checkpoint is saved", replaced(file_writer, "copy_bytes", _in_the_background),
            COPIES),
    }.items()
}  # fmt: skip
# In the lazy order alone: in others the copies may be over by themselves.
IN_LAZY: dict[str, Fault] = {
    "an engine ends under the copies of activations": Fault(
        "an engine with activations on the host ends",
        left_out("synchronize", "host_copies.py close"), ENDED),
}  # fmt: skip
TWO_HOPS = "stage 3, gathers in two hops"
# On four ranks of two hosts.
OVER_HOSTS: dict[str, Fault] = {
    name: Fault(job, put, COPIES)
    for name, job, put in (
        ("a second hop does not wait for the first",
         TWO_HOPS, left_out("wait", "two_hops.py wait_for_first_hop")),
        ("a first hop does not wait for what it gathers",
         f"{TWO_HOPS}, all on the host", left_out("wait", "two_hops.py gather")),
        ("what is gathered is freed under the first hop",
         "stage 3, weights in 8 bits, gathers in two hops",
         left_out("record_stream", "two_hops.py gather")),
        ("parameters that other ranks use are read before their number comes",
         "stage 3, replicas, updated in the backward, parts of a block",
         left_out("wait", "step_agreement.py receive")),
    )
}  # fmt: skip
# On one rank, where no collective orders streams.
ON_ONE_RANK: dict[str, Fault] = {
    name: Fault(job, put, COPIES)
    for name, job, put in (
        ("shards are on the device before their copy begins",
         ALL, unrecorded("unit.py launch_gather")),
        ("a branch does not wait for a unit that the other one prefetches",
         "stage 3, branches on two streams, a unit prefetched",
         unrecorded("unit.py launch_gather")),
        ("a forward does not wait for the copies of an update",
         HOST, left_out("wait", "update.py finish")),
        ("the gradient norm is reported under its copy",
         "stage 2, in the most adverse order", left_out("query", "norm.py check")),
    )
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


def _runs_late(rank: int) -> None:
    """Train while nothing runs that nobody waits for."""
    device.configure("lazy")
    try:
        training.train("stage 2", 3, rank, 1)
    finally:
        device.configure("eager")


def _saves(rank: int) -> None:
    with tempfile.TemporaryDirectory() as own:
        folder = [own]
        dist.broadcast_object_list(folder)
        checkpoints.sums_are_loaded(rank, Path(folder[0]))
        world_group.barrier()


RUNS: dict[str, Callable[[int], Any]] = {
    "pipeline": lambda rank: training.train_pipeline("1f1b"),
    "weights are sent": lambda rank: ways_out.sends_weights(ways_out.Job(ALL, rank)),
    "an engine ends": partial(_ends, HOST, 2, False),
    "an engine with activations on the host ends": partial(_ends, ACTIVATIONS, 2, True),
    "stage 2, in the most adverse order": _runs_late,
    "a checkpoint is saved": _saves,
    "a state dict is put": lambda rank: ways_out.is_under_way(ways_out.Job(ALL, rank)),
}


def run(name: str, rank: int, world: int) -> dict[str, Any]:
    """Train with a fault: what was reported, and how often the fault has struck."""
    fault, error = (FAULTS | IN_LAZY | OVER_HOSTS | ON_ONE_RANK)[name], ""
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
    for name in sys.argv[2:] or FAULTS:
        device.tell(**run(name, rank, world))


if __name__ == "__main__":
    main()
