"""Overlap of the engine's work with the computation, by the cost model: ``python -m
tests.late.overlap``, one line of JSON per case.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

from tests.late import device, training

import hf_zero  # isort: skip
from hf_zero.activations import offload  # isort: skip
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
STEPS = 2
BLOCKS = 6  # deep enough for the first and the last to count little


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


def _brings_nothing(run: offload._OffloadedPass, position: int, missing: bool = False) -> None:
    """No activation is brought back before its use."""
    run.end()


GATHERED, ACTIVATIONS = "stage 3, one micro-batch", "stage 3, activations on the host"
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
        offload._OffloadedPass, "bring_before", _brings_nothing, ACTIVATIONS, 40_000, *of
    ),
}


def main() -> None:
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    device.configure("eager")
    for name, case in CASES.items():
        device.tell(case=name, rank=rank, **case(rank, world))


if __name__ == "__main__":
    main()
