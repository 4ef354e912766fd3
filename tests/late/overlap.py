"""Overlap of the engine's work with the computation, by the cost model: ``python -m
tests.late.overlap``, one line of JSON per case.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from tests.late import device, families, timeline, training

import torch  # isort: skip
import hf_zero  # isort: skip
from hf_zero.offload import update, update_gathers  # isort: skip
from hf_zero.offload import sub_group_update  # isort: skip
from hf_zero.parallel.tensor import axis  # isort: skip

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
STEPS = 3
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
    submit = update.Updater._submit
    run = update.Updater._run
    finish = update.Updater.finish
    apply = sub_group_update.Update.run

    def submit_at(self: Any, chosen: Any, units: Any) -> None:
        begun.update(dict.fromkeys(units, timeline.host_now()))
        submit(self, chosen, units)
        if chosen is self.early:
            futures.wait([self._pending[unit][0] for unit in units])
        if waits:
            self.finish()

    def run_on_lane(self: Any, chosen: Any, unit: Any, ready: Any) -> Any:
        gathers = [gather for _, gather in list(self._pending.values()) if gather is not None]
        own = self._pending[unit][1]
        before = [gather for gather in gathers if gather.number < own.number] if own else []
        while unit not in wanted and not all(gather.issued.done() for gather in before):
            time.sleep(0.001)
        with timeline.host_lane(1, begun[unit]):
            copied = run(self, chosen, unit, ready)
            over[unit] = timeline.host_now()
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
            (update.Updater, "_submit", submit_at),
            (update.Updater, "_run", run_on_lane),
            (update.Updater, "finish", finish_at),
            (sub_group_update.Update, "run", apply_at),
            # the forward alone issues gathers, also where the machine lets it come late
            (update_gathers, "GRACE_SECONDS", math.inf),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


def train(job: str, zero: dict[str, Any], rank: int, world: int) -> list[list[timeline.Ran]]:
    """Return the tasks of each of a few steps and of the forward after it."""
    config = training.config(job)
    config["zero_optimization"] |= zero
    micros = config["gradient_accumulation_steps"]
    engine, *_ = hf_zero.initialize(model=training.tower(BLOCKS), config=config)
    steps: list[list[timeline.Ran]] = []
    with timeline.traced(**RATES) as ran:
        for number, values in enumerate(training.batches((STEPS + 1) * micros, rank, world)):
            loss = engine(values.to(engine.device))
            if number and number % micros == 0:
                loss.item()  # nothing of the step before is under way any more
                steps.append(ran()[sum(map(len, steps)) :])
            engine.backward(loss)
            engine.step()
    engine.destroy()
    return steps


def computed(ran: list[timeline.Ran], forward: bool | None = None) -> list[timeline.Ran]:
    """The tasks of the computing stream: all, those that a forward has launched, or the others."""
    each, host = device.C.STREAMS_EACH, timeline.HOST
    own = [task for task in ran if task.stream < host and task.stream % each == 0]
    return [task for task in own if forward is None or (" forward" in task.site) == forward]


Tasks = list[timeline.Ran]


def gathers(prefetch: int, rank: int, world: int, job: str = "one micro-batch") -> dict[str, Any]:
    """Stage 3: the part of the gathers' time during which the computation waits."""
    ran = train(f"stage 3, {job}", {"stage3_prefetch_bucket_size": prefetch}, rank, world)[-1]
    found = [task for task in ran if task.what == "all_gather"]
    exposed = timeline.total(found) - timeline.beside(found, computed(ran))
    return {"gathers": len(found), "seconds": timeline.total(found), "exposed": exposed}


def sums(rank: int, world: int) -> dict[str, Any]:
    """Parts of matrices: how much of the time of the sums in the backward the device computes."""
    config = training.config("stage 1") | families.TENSOR | training.ONCE
    engine, *_ = hf_zero.initialize(model=families.build("llama", False), config=config)
    ids = torch.arange(64, device=engine.device).view(4, 16)
    with timeline.traced(**RATES) as ran:
        for _ in range(2):
            loss = engine(input_ids=ids, labels=ids).loss
            loss.item()
            before = len(ran())
            engine.backward(loss)
            engine.step()
            device.synchronize_all()
        tasks = ran()[before:]
    engine.destroy()
    found = [task for task in tasks if "axis.py:" in task.site and task.what == "all_reduce"]
    beside = timeline.beside(found, computed(tasks))
    return {"sums": len(found), "seconds": timeline.total(found), "beside": beside}


def sums_alone(rank: int, world: int) -> dict[str, Any]:
    """The same where no gradient of a weight is computed beside them."""
    with mock.patch.object(axis.SharedInputs, "_beside", lambda *_: None):
        return sums(rank, world)


def updates(job: str, waits: bool, rank: int, world: int) -> dict[str, Any]:
    """Offload: how much of the host's update lies beside the device's work, in the last step."""
    with update_on_its_own_lane(waits):
        ran = train(job, {}, rank, world)[-1]
    found = [task for task in ran if task.stream == timeline.HOST + 1]
    return {
        "updates": len(found),
        "seconds": timeline.total(found),
        "beside forward": timeline.beside(found, computed(ran, forward=True)),
        "beside backward": timeline.beside(found, computed(ran, forward=False)),
    }


HOPS = "gathers in two hops, one micro-batch"
CLIPPED = "stage 2, optimizer on the host"
AT_ONCE = "stage 3, all on the host, updated in the backward"
# of a rank and the number of ranks
CASES: dict[str, dict[str, Callable[[int, int], dict[str, Any]]]] = {
    "over hosts": {
        "in two hops, prefetched": lambda *of: gathers(40_000, *of, HOPS),
        "in two hops, not prefetched": lambda *of: gathers(0, *of, HOPS),
    },
    "sums": {
        "sums of gradients": sums,
        "sums of gradients, nothing beside them": sums_alone,
    },
    "gathers": {
        "gathers, prefetched": lambda *of: gathers(40_000, *of),
        "gathers, not prefetched": lambda *of: gathers(0, *of),
    },
    "updates": {
        "updates beside the next forward": lambda *of: updates(CLIPPED, False, *of),
        "updates beside the backward": lambda *of: updates(AT_ONCE, False, *of),
        "updates that a step waits for": lambda *of: updates(CLIPPED, True, *of),
    },
}


def main() -> None:
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    device.configure("eager")
    for job in sys.argv[1:]:
        for name, case in CASES[job].items():
            device.tell(case=name, rank=rank, **case(rank, world))


if __name__ == "__main__":
    main()
