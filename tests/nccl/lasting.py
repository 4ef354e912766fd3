"""Part 4: training that goes on from a save on other ranks, and memory over many steps."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import psutil
import torch

from tests.helpers import oracle
from tests.helpers.capability import TWO_BLOCKS, Same
from tests.helpers.engines import OnEngine, config_of, start
from tests.helpers.stacks import stack
from tests.helpers.training import At, Plan, adamw, squared_output
from tests.nccl.cases import Answers, Case, Figures, Moving, OnDevice, Place, moved
from tests.nccl.rows import CPU, named

SAVED_AT = 2
PLAN = Plan(1, SAVED_AT + 1, clip=0.5)
STEPS, WARM = 200, 100
GROWTH = 8 << 20  # bytes of host memory that allocators and logs may take meanwhile


def saved(place: Place) -> Path:
    """Return the folder of checkpoints, one for all launches of a run."""
    return place.folder.parents[1] / "saved"


def session_of(place: Place, stage: int) -> tuple[Any, Any]:
    job = OnDevice(Same(TWO_BLOCKS), place.device)
    model = job.build()
    engine = start(model, job.optimizer(model), config_of(stage, PLAN))
    return job, OnEngine(engine, PLAN)


def step(job: Any, session: Any, number: int) -> None:
    session.backward(job.loss(session, At(number, 0, 0)))
    session.step()


def save() -> Case:
    def run(place: Place) -> Any:
        job, session = session_of(place, 3)
        for number in range(SAVED_AT):
            step(job, session, number)
        session.engine.save_checkpoint(str(saved(place)))
        session.close()
        return None

    return Case("save at stage 3, 2 ranks", run, lambda answers, device: {"steps": SAVED_AT})


def resume(count: int, stage: int) -> Case:
    def run(place: Place) -> Any:
        job, session = session_of(place, stage)
        session.engine.load_checkpoint(str(saved(place)))
        step(job, session, SAVED_AT)
        weights = moved(session.weights(), CPU)
        session.close()
        return weights

    def check(answers: Answers, device: torch.device) -> Figures:
        want = oracle.kept(OnDevice(Same(TWO_BLOCKS), device), PLAN).weights
        for weights in answers:
            got = moved(weights, device)
            oracle.compare_tensors("weights", got, want, floor=oracle.ADAM_ROUNDING)
        return {"steps": 1}

    return Case(f"resume at stage {stage} on {count} ranks", run, check, count)


def held(place: Place) -> dict[str, int]:
    gc.collect()
    process = psutil.Process()
    found = {
        "host": process.memory_info().rss,
        "threads": process.num_threads(),
        "files": len(os.listdir("/proc/self/fd")),
    }
    if place.on_card:
        torch.cuda.synchronize()
        found |= {"device": torch.cuda.memory_allocated(), "reserved": torch.cuda.memory_reserved()}
    return found


def flat_memory(stage: int) -> Case:
    def run(place: Place) -> Any:
        model = stack()
        engine = start(model, adamw(model), config_of(stage, Plan(clip=1.0), kernels="off"))
        session, seen = OnEngine(engine, Plan()), []
        net = Moving(session, place.device)
        for number in range(STEPS):
            session.backward(squared_output(net, At(number, 0, place.rank)))
            session.step()
            if number + 1 in (WARM, STEPS):
                seen.append(held(place))
        session.close()
        return seen

    def check(answers: Answers, device: torch.device) -> Figures:
        most: Figures = {}
        for rank, (first, last) in enumerate(answers):
            for what, value in last.items():
                grown = value - first[what]
                most[f"{what}_grown"] = max(most.get(f"{what}_grown", 0), grown)
                limit = GROWTH if what == "host" else 0
                assert grown <= limit, f"rank {rank}: {what} {first[what]}, later {value}"
        return most

    return Case(f"memory over {STEPS} steps, stage {stage}", run, check)


CASES = named(
    save(),
    *(flat_memory(stage) for stage in (1, 3)),
    *(resume(count, stage) for count, stage in ((1, 0), (2, 3), (4, 2))),
)
