"""Overlap of the engine's work with the computation, by the cost model: ``python -m
tests.late.overlap``, one line of JSON per case.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest import mock

from tests.late import device, training

import hf_zero  # isort: skip
from hf_zero.offload import update, update_gathers  # isort: skip
from hf_zero.activations import offload  # isort: skip
from hf_zero.offload import sub_group_update  # isort: skip
from hf_zero.zero.reduce import reductions  # isort: skip

HOST = device.C.HOST


class Ran(NamedTuple):
    """A task, in simulated seconds. ``stream``: by number; HOST + n is lane n of the host."""

    stream: int
    what: str
    site: str
    start: float
    end: float
    nbytes: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


@contextmanager
def traced(**rates: float) -> Iterator[Callable[[], list[Ran]]]:
    """Inside, tasks are noted; what it gives returns them.

    ``rates``: flops, memory, to_device, to_host, network (a second each), launch, shortest.
    """
    device.C.set_rates(rates)
    device.forget()
    device.C.set_tracing(True)
    try:
        yield lambda: [Ran(*row) for row in device.C.trace()]
    finally:
        device.C.set_tracing(False)


@contextmanager
def host_lane(lane: int, not_before: float = 0.0) -> Iterator[None]:
    """This thread's work counts on a clock of its own, beside the thread that launches."""
    before = device.C.set_lane(lane)
    device.C.host_not_before(not_before)
    try:
        yield
    finally:
        device.C.set_lane(before)


def host_now() -> float:
    """The time of this thread's lane."""
    return float(device.C.host_work(0.0, ""))


def total(tasks: Sequence[Ran]) -> float:
    """Seconds in which at least one of ``tasks`` runs."""
    return sum(end - start for start, end in _merged(tasks))


def beside(tasks: Sequence[Ran], others: Sequence[Ran]) -> float:
    """Seconds in which one of ``tasks`` and one of ``others`` run."""
    theirs = _merged(others)
    both = (
        (max(start, low), min(end, high)) for start, end in _merged(tasks) for low, high in theirs
    )
    return sum(max(0.0, high - low) for low, high in both)


def _merged(tasks: Sequence[Ran]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for task in sorted(tasks, key=lambda task: task.start):
        if merged and task.start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], task.end)
        elif task.seconds > 0:
            merged.append((task.start, task.end))
    return merged


# A block computes for about twenty times as long as its gather, its copies or its update take. The
# host launches at no cost.
RATES = {
    "memory": 2e8,
    "flops": 1e15,
    "network": 2e9,
    "to_device": 2e9,
    "to_host": 2e9,
    "launch": 0.0,
    "shortest": 0.0,
}
UPDATE_RATE = 4e9  # bytes a second that the host's update reads and writes
STATES = 28  # bytes of an element: gradient, master and two moments read, three of them written
STEPS = 2
BLOCKS = 6  # deep enough for the first and the last to count little


@contextmanager
def update_on_its_own_lane(waits: bool) -> Iterator[None]:
    """The update's thread has a clock of its own, which hands over where threads do.

    However late the machine lets a thread run, the device gets its work in the order of simulated
    time: what is updated in the backward is updated before the backward goes on, and a unit of the
    step after the gathers of the units before it, which are issued as soon as the forward comes to
    them. ``waits``: a step returns when all is updated.
    """
    wanted: set[Any] = set()
    begun: dict[Any, float] = {}
    over: dict[Any, float] = {}
    submit = update.OffloadedUpdater._submit
    run = update.OffloadedUpdater._run
    finish = update.OffloadedUpdater.finish
    apply = sub_group_update.SubGroupUpdate.run

    def submit_at(self: Any, chosen: Any, units: Any) -> None:
        begun.update(dict.fromkeys(units, host_now()))
        submit(self, chosen, units)
        if chosen is self.backward_update:
            futures.wait([self._pending[unit][0] for unit in units])
        if waits:
            self.finish()

    def run_on_lane(self: Any, chosen: Any, unit: Any, ready: Any) -> Any:
        gathers = [gather for _, gather in list(self._pending.values()) if gather is not None]
        own = self._pending[unit][1]
        before = [gather for gather in gathers if gather.number < own.number] if own else []
        while unit not in wanted and not all(gather.issued.done() for gather in before):
            time.sleep(0.001)
        with host_lane(1, begun[unit]):
            copied = run(self, chosen, unit, ready)
            over[unit] = host_now()
        return copied

    def finish_at(self: Any, unit: Any = None) -> None:
        waited = [unit] if unit is not None else list(self._pending)
        wanted.update(waited)
        finish(self, unit)
        wanted.difference_update(waited)
        for each in waited:
            device.C.host_not_before(over.get(each, 0.0))

    def apply_at(self: Any, flat: Any, *args: Any, **kwargs: Any) -> Any:
        device.C.host_work((flat.owned[1] - flat.owned[0]) * STATES / UPDATE_RATE, "update")
        return apply(self, flat, *args, **kwargs)

    with ExitStack() as stack:
        for owner, name, value in (
            (update.OffloadedUpdater, "_submit", submit_at),
            (update.OffloadedUpdater, "_run", run_on_lane),
            (update.OffloadedUpdater, "finish", finish_at),
            (sub_group_update.SubGroupUpdate, "run", apply_at),
            # the forward alone issues gathers, also where the machine lets it come late
            (update_gathers, "GRACE_SECONDS", math.inf),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


def train(job: str, zero: dict[str, Any], rank: int, world: int) -> list[list[Ran]]:
    """Return the tasks of each of a few steps and of the forward after it."""
    config = training.config(job)
    config["zero_optimization"] |= zero
    micros = config["gradient_accumulation_steps"]
    engine, *_ = hf_zero.initialize(model=training.tower(BLOCKS), config=config)
    steps: list[list[Ran]] = []
    with traced(**RATES) as ran:
        for number, values in enumerate(training.batches((STEPS + 1) * micros, rank, world)):
            loss = engine(values.to(engine.device))
            if number and number % micros == 0:
                loss.item()  # nothing of the step before is under way any more
                steps.append(ran()[sum(map(len, steps)) :])
            engine.backward(loss)
            engine.step()
    engine.destroy()
    return steps


def computed(ran: list[Ran], forward: bool | None = None) -> list[Ran]:
    """The tasks of the computing stream: all, those that a forward has launched, or the others."""
    each, host = device.C.STREAMS_EACH, HOST
    own = [task for task in ran if task.stream < host and task.stream % each == 0]
    return [task for task in own if forward is None or (" forward" in task.site) == forward]


def exposed(job: str, prefetch: int, rank: int, world: int) -> dict[str, Any]:
    """The parts of the time of gathers, reductions and copies to the device during which the
    computation waits.
    """
    ran = train(job, {"stage3_prefetch_bucket_size": prefetch}, rank, world)[-1]
    own, shares = computed(ran), dict[str, Any]()
    begin = computed(ran, forward=True)[0].start
    before = max((task.end for task in own if task.start < begin), default=0.0)
    # nothing computes beside the first gathers of a forward
    ran = [task for task in ran if task.what != "all_gather" or not before <= task.start < begin]
    for what in ("all_gather", "reduce_scatter", "copy from host, not waited for"):
        found = [task for task in ran if task.what == what and task not in own]
        if found:
            share = 1.0 - beside(found, own) / total(found)
            shares |= {what: share, f"{what}, tasks": len(found)}
    return shares


def with_fault(owner: Any, name: str, fault: Any, *of: Any) -> dict[str, Any]:
    """:func:`exposed` with ``fault`` in the place of ``owner.name``."""
    with mock.patch.object(owner, name, fault):
        return exposed(*of)


def _prefetches_nothing(run: offload._OffloadedPass, position: int, missing: bool = False) -> None:
    """No activation is reloaded before its use."""
    run.end()


def updates(job: str, waits: bool, rank: int, world: int) -> dict[str, Any]:
    """Offload: how much of the host's update lies beside the device's work, in the last step."""
    with update_on_its_own_lane(waits):
        ran = train(job, {}, rank, world)[-1]
    found = [task for task in ran if task.stream == HOST + 1]
    return {
        "updates": len(found),
        "seconds": total(found),
        "beside forward": beside(found, computed(ran, forward=True)),
        "beside backward": beside(found, computed(ran, forward=False)),
    }


GATHERED, ACTIVATIONS = "stage 3, one micro-batch", "stage 3, activations on the host"
CLIPPED = "stage 2, optimizer on the host"
AT_ONCE = "stage 3, all on the host, updated in the backward"
# of a rank and the number of ranks
CASES: dict[str, Callable[[int, int], dict[str, Any]]] = {
    "gathers, prefetched": lambda *of: exposed(GATHERED, 40_000, *of),
    "gathers, not prefetched": lambda *of: exposed(GATHERED, 0, *of),
    "reductions, each awaited at once": lambda *of: with_fault(
        reductions, "IN_FLIGHT", 0, GATHERED, 40_000, *of
    ),
    "gathers of updated parameters": lambda *of: exposed("stage 2", 0, *of),
    "activations, prefetched": lambda *of: exposed(ACTIVATIONS, 40_000, *of),
    "activations, not prefetched": lambda *of: with_fault(
        offload._OffloadedPass, "prefetch_before", _prefetches_nothing, ACTIVATIONS, 40_000, *of
    ),
    "updates beside the next forward": lambda *of: updates(CLIPPED, False, *of),
    "updates beside the backward": lambda *of: updates(AT_ONCE, False, *of),
    "updates that a step waits for": lambda *of: updates(CLIPPED, True, *of),
}


def main() -> None:
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    device.configure("eager")
    for name, case in CASES.items():
        device.tell(case=name, rank=rank, **case(rank, world))


if __name__ == "__main__":
    main()
