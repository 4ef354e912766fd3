"""Part 2: the communicators of meshes and of scripts, branches on two streams, few bits, offload,
updates in the backward, float8 gathers and captured steps.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hf_zero.distributed.process_group import destroy_process_group
from tests.gpu import test_capture as captured
from tests.gpu import two_ranks as float8
from tests.helpers import oracle
from tests.helpers.engines import OnEngine, config_of, start
from tests.helpers.stacks import stack
from tests.helpers.training import Plan, train
from tests.helpers.ways import WAYS
from tests.late import training
from tests.nccl.cases import (
    Answers,
    Case,
    Figures,
    OnDevice,
    Orders,
    Place,
    merged,
    on_device,
    rejoin,
    same_orders,
)
from tests.nccl.rows import CPU, furthest, named, of_row

JOB = "weights tied across blocks, and a block's to the root's"
REPLICATED = {"replicate_size": 2}
CTAS = {"nccl": {"min_ctas": 1, "max_ctas": 2}}

# by name of a capability: the stages
FEW_BITS = {
    "4 bits both ways": (1, 2),
    "4 bits up, 8 down": (3,),
    "4 bits up, errors fed back": (3,),
    "4 bits both ways, replicated": (2,),
    "1-bit Adam, dense": (1,),
    "1-bit Adam": (1,),
}
MESHES = {
    "replicas": (1, 2, 3),
    "shards of a node": (3,),
    "secondary shards": (3,),
    "gathers in two hops": (3,),
}
PLACES = {
    "optimizer on cpu": (1, 2),
    "all on cpu": (3,),
    "optimizer in files": (2,),
    "all in files": (3,),
    "updates in the backward, device": (1, 3),
    "updates in the backward, half on cpu": (2,),
}

# jobs whose messages are made on the stream of one branch, and read on that of the other
BRANCHES = (
    "stage 2, branches on two streams that share messages",
    "stage 3, branches on two streams",
    "stage 2, in 4 bits, branches on two streams",
    "stage 3, weights in 8 bits, branches on two streams",
)


def join_by_script(place: Place, name: str, device_id: torch.device | None = None) -> None:
    """Leave the job's process group and make one as scripts do."""
    destroy_process_group()
    rejoin(name, "nccl" if place.on_card else "gloo", device_id)


def splits(place: Place) -> int:
    """Return how often the communicator of the job has been split."""
    world = dist.group.WORLD
    assert world is not None
    return world._get_backend(place.device).comm_split_count() if place.on_card else -1


class Stepping(OnEngine):
    """Calls ``before`` where a script calls ``engine.step()``."""

    def __init__(self, engine: Any, plan: Plan, before: Callable[[], None]) -> None:
        super().__init__(engine, plan)
        self.before = before

    def step(self) -> None:
        self.before()
        super().step()


def nothing() -> None:
    """A script that does nothing beside."""


def train_here(
    place: Place, stage: int, plan: Plan, between: Callable[[], None] = nothing, **keys: Any
) -> Any:
    """Train :data:`JOB` with an engine of ``keys``; ``between`` is called before each step."""
    job = OnDevice(WAYS[JOB], place.device)
    model, before = job.build(), splits(place)
    with Orders() as orders:
        engine = start(model, job.optimizer(model), config_of(stage, plan, **keys))
        session = Stepping(engine, plan, between)
        trace = train(session, job, plan, place.rank)
        counted, bound = splits(place) - before, dist.group.WORLD.bound_device_id  # type: ignore
        session.close()
    return {
        "trace": on_device(trace, CPU),
        "orders": orders.of,
        "splits": counted,
        "bound": bound is not None,
    }


def equals_plain(plan: Plan, answers: Answers, device: torch.device) -> Figures:
    trace, want = merged(answers, device), oracle.kept(OnDevice(WAYS[JOB], device), plan)
    oracle.compare(trace, want)
    told = {name: answers[0][name] for name in ("splits", "bound") if answers[0]["splits"] >= 0}
    return {**furthest(trace, want), **same_orders(answers), **told}


def of_script(name: str, bound: bool, count: int = 4) -> Case:
    """A job whose process group the script has made, with the backend of the device alone."""
    plan = Plan(count, 3, 2, clip=0.5)

    def run(place: Place) -> Any:
        join_by_script(place, name, place.device if bound and place.on_card else None)
        answer = train_here(place, 3, plan, **REPLICATED)
        destroy_process_group()
        return answer

    return Case(f"{name}, {count} ranks", run, partial(equals_plain, plan), count)


def of_keys(stage: int) -> Case:
    """The keys of the section ``nccl``, on each communicator of ZeRO."""
    plan = Plan(4, 3, 2, clip=0.5)
    keys: dict[str, Any] = {**REPLICATED, **CTAS}

    def run(place: Place) -> Any:
        return train_here(place, stage, plan, **keys)

    return Case(f"keys of nccl, stage {stage}, 4 ranks", run, partial(equals_plain, plan), 4)


def beside_groups(stage: int) -> Case:
    """Collectives of the script on a group of its own, between those of the engine."""
    plan = Plan(2, 3, 2, clip=0.5)

    def run(place: Place) -> Any:
        own, seen = dist.new_group(list(range(place.world))), []

        def between() -> None:
            value = torch.full((1000,), place.rank + 1.0, device=place.device)
            dist.all_reduce(value, group=own)
            seen.append(float(value.mean()))

        answer = train_here(place, stage, plan, between)
        dist.destroy_process_group(own)
        return {**answer, "seen": seen}

    def check(answers: Answers, device: torch.device) -> Figures:
        for answer in answers:
            assert set(answer["seen"]) == {3.0}, answer["seen"]
        return equals_plain(plan, answers, device)

    return Case(f"groups of the script beside, stage {stage}", run, check)


def again() -> Case:
    """Two engines in one job, and a third one in the next job of the same processes."""
    plan = Plan(2, 3, 2, clip=0.5)

    def run(place: Place) -> Any:
        answers = [train_here(place, stage, plan) for stage in (3, 2)]
        join_by_script(place, "next job")
        return [*answers, train_here(place, 3, plan)]

    def check(answers: Answers, device: torch.device) -> Figures:
        figures: Figures = {}
        for engine in zip(*answers, strict=True):
            figures = equals_plain(plan, list(engine), device)
        return {"engines": len(answers[0]), **figures}

    return Case("engines and jobs one after another", run, check)


def of_branches(job: str) -> Case:
    """A model whose branches are on two streams of a card, which sleep at random."""

    def run(place: Place) -> Any:
        return float8.losses_of_branches(job)

    def check(answers: Answers, device: torch.device) -> Figures:
        close, off = 0.03 if job in training.IN_FEW_BITS else 1e-4, 0.0
        for rank, found in enumerate(answers):
            want = training.plain(job, float8.STEPS, rank, len(answers))
            assert found == pytest.approx(want, rel=close), f"rank {rank}: {found}, plain {want}"
            off = max(off, *(abs(a - b) / abs(b) for a, b in zip(found, want, strict=True)))
        return {"losses_off": off}

    return Case(job, run, check)


def of_float8() -> Case:
    """Weights that are gathered in float8: the losses of gathers in bf16, and fewer bytes."""

    def run(place: Place) -> Any:
        return [
            float8.float8_losses(stack(), float8.float8_config(gathers, 32))
            for gathers in (False, True)
        ]

    def check(answers: Answers, device: torch.device) -> Figures:
        ratio = 1.0
        for rank, ((dense, sent), (losses, fewer)) in enumerate(answers):
            assert losses == dense, f"rank {rank}: {losses}, in bf16 {dense}"
            ratio = fewer / sent
            assert ratio < 0.7, f"rank {rank} sends {fewer} bytes, in bf16 {sent}"
        return {"bytes_of_bf16": ratio}

    return Case("float8 gathers, stage 3", run, check, needs="torchao")


def of_graphs(stage: int, case: str) -> Case:
    """Steps that are captured in graphs equal the same steps as they are, bit for bit."""

    def run(place: Place) -> Any:
        found = []
        for capture in (False, True):
            engine = captured.build(stage, capture, **captured.CASES[case])
            micros = captured.CASES[case].get("micros", 1)
            data = captured.batches(captured.STEPS * micros, seed=3 + place.rank)
            losses = captured.train(engine, data)
            found.append((losses, captured.weights(engine)))
            engine.destroy()
        return found

    def check(answers: Answers, device: torch.device) -> Figures:
        for plain, graphs in answers:
            assert graphs[0] == plain[0], f"losses {graphs[0]}, without graphs {plain[0]}"
            captured.assert_equal(graphs[1], plain[1])
        captured.assert_equal(answers[0][1][1], answers[1][1][1])
        return {"steps": captured.STEPS}

    return Case(f"captured step, stage {stage}, {case}", run, check, on_cpu=False)


def table(chosen: dict[str, tuple[int, ...]]) -> list[Case]:
    return [of_row(name, stage) for name, stages in chosen.items() for stage in stages]


CASES = named(
    *table(MESHES),
    of_script("a group of the script, bound to its device", bound=True),
    of_script("a group of the script, not bound", bound=False),
    of_keys(1),
    of_keys(3),
    *(beside_groups(stage) for stage in (1, 3)),
    again(),
    *map(of_branches, BRANCHES),
    *table(FEW_BITS),
    *table(PLACES),
    of_float8(),
    *(of_graphs(stage, case) for stage in (1, 2) for case in ("as it is", "bf16")),
)
