"""Cases made of jobs and capabilities that ranks as threads train, too (tests/helpers)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers import oracle
from tests.helpers.capabilities import ROWS
from tests.helpers.engines import OnEngine, config_of, start
from tests.helpers.models import ARCHITECTURES
from tests.helpers.training import ArchitectureJob, Job, Plan, train
from tests.helpers.ways import WAYS
from tests.nccl.cases import (
    Answers,
    Case,
    Figures,
    OnDevice,
    Orders,
    Place,
    factor_of,
    merged,
    on_device,
    same_orders,
)
from tests.ranks.test_capabilities import Case as Capability
from tests.ranks.test_capabilities import equals_the_plain_loop

CPU = torch.device("cpu")

Keys = dict[str, Any]


def job_of(name: str) -> Job:
    return WAYS[name] if name in WAYS else ArchitectureJob(ARCHITECTURES[name])


def furthest(trace: Any, want: Any) -> Figures:
    """How far the losses and the weights are from those of the plain process."""
    off = [abs(a - b) / abs(b) for a, b in zip(trace.losses, want.losses, strict=True)]
    size = oracle.total_norm(want.weights)
    apart = {name: trace.weights[name] - value for name, value in want.weights.items()}
    return {"losses_off": max(off), "weights_off": oracle.total_norm(apart) / size}


def trained(name: str, stage: int, plan: Plan, keys: Keys | None = None, how: str = "") -> Case:
    """A job trained at ``stage`` beside the plain loop."""

    def run(place: Place) -> Any:
        job = OnDevice(job_of(name), place.device)
        model = job.build()
        with Orders() as orders:
            engine = start(model, job.optimizer(model), config_of(stage, plan, **(keys or {})))
            session = OnEngine(engine, plan)
            trace = train(session, job, plan, place.rank)
            session.close()
        return {"trace": on_device(trace, CPU), "orders": orders.of}

    def check(answers: Answers, device: torch.device) -> Figures:
        job, trace = OnDevice(job_of(name), device), merged(answers, device)
        exact = oracle.kept(job, replace(plan, precision="fp32"))
        if plan.precision == "fp32":
            oracle.compare(trace, exact)
        else:
            mixed = oracle.mixed(job, plan, stage)
            oracle.compare_mixed(trace, mixed, exact, plan.dtype, factor_of(plan, stage))
        return {**furthest(trace, exact), **same_orders(answers)}

    title = f"{name}, stage {stage}, {plan.precision}{how}"
    return Case(f"{title}, {plan.ranks} ranks", run, check, plan.ranks)


def capability(
    name: str, stage: int, folder: Path, device: torch.device, **changes: Any
) -> Capability:
    """A row of the table of capabilities at ``stage``, with ``changes``, whose jobs are on
    ``device``.
    """
    made, row = Capability(name, 0, folder), replace(ROWS[name], **changes)
    plain = OnDevice(row.plain, device) if row.plain is not None else None
    made.row = replace(row, job=OnDevice(row.job, device), plain=plain)
    made.first = row.stages.index(stage)
    return made


def of_row(name: str, stage: int, **changes: Any) -> Case:
    """A capability of the table at ``stage``, its row with ``changes``, beside the plain loop."""

    def run(place: Place) -> Any:
        case = capability(name, stage, place.folder, place.device, **changes)
        (place.folder / "files").mkdir(exist_ok=True)
        with pytest.MonkeyPatch.context() as patch, Orders() as orders:
            case.row.around(patch)
            session = case.opened(case.row.job, case.row.job.build(), stage, case.plan())
            reader = case.reader(place.rank, place.world)
            trace = train(session, case.row.job, case.plan(), reader)
            session.close()
        return {"trace": on_device(trace, CPU), "orders": orders.of}

    def check(answers: Answers, device: torch.device) -> Figures:
        case = capability(name, stage, Path(), device, **changes)
        equals_the_plain_loop(case, merged(answers, device))
        return same_orders(answers)

    count = replace(ROWS[name], **changes).ranks
    return Case(f"{name}, stage {stage}, {count} ranks", run, check, count)


def named(*cases: Case) -> dict[str, Case]:
    found = {case.name: case for case in cases}
    assert len(found) == len(cases), "two cases have one name"
    return found
