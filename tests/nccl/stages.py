"""Part 1: stages 0 to 3 on two and four ranks, beside one plain process."""

from __future__ import annotations

from typing import Any

import torch

from tests.helpers.engines import STAGES, OnEngine, config_of, start
from tests.helpers.host_syncs import HostSyncs
from tests.helpers.models import ARCHITECTURES
from tests.helpers.stacks import stack
from tests.helpers.training import At, Plan, adamw, squared_output
from tests.nccl.cases import Answers, Case, Figures, Moving, Orders, Place, same_orders
from tests.nccl.rows import named, trained

NAMES = tuple(ARCHITECTURES)
WITHOUT_GRADIENT = "a parameter of a used block that gets no gradient"
TIED = "weights tied across blocks, and a block's to the root's"
SKIPPED = "each rank skips another block, by step"
FROZEN = "frozen parameters inside blocks, and a block frozen whole"
FEW = {"zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": 2000}}
STEPS, WARM = 6, 3
OF_GLOO = "collectives.py"  # codes that gloo's messages have, in host memory


def plan(ranks: int, **more: Any) -> Plan:
    return Plan(**{"ranks": ranks, "steps": 3, "accumulation": 2, "clip": 0.5, **more})


def waits(stage: int, ranks: int) -> Case:
    """Count what the host waits for in a step, once orders are recorded and state is made."""

    def run(place: Place) -> Any:
        model = stack()
        config = config_of(stage, Plan(clip=1.0, precision="bf16"), kernels="off")
        session = OnEngine(start(model, adamw(model), config), Plan(precision="bf16"))
        net, found = Moving(session, place.device), dict[str, int]()
        data = [At(step, 0, place.rank) for step in range(STEPS)]
        with Orders() as orders:
            for step, at in enumerate(data):
                with HostSyncs(place.device) as syncs:
                    session.backward(squared_output(Ready(net, place.device), at))
                    session.step()
                if step >= WARM:
                    for what, times in syncs.of("hf_zero").items():
                        if place.on_card or not what.startswith(OF_GLOO):
                            found[what] = found.get(what, 0) + times
        norm = session.norm()
        session.close()
        return {"waits": found, "norm": norm, "orders": orders.of}

    def check(answers: Answers, device: torch.device) -> Figures:
        for rank, answer in enumerate(answers):
            assert not answer["waits"], f"rank {rank} waits for {answer['waits']}"
            assert answer["norm"] > 0
        return {"steps": STEPS - WARM, **same_orders(answers)}

    return Case(f"no wait of the host, stage {stage}, {ranks} ranks", run, check, ranks)


class Ready(Moving):
    """``net`` whose inputs come from pinned memory without a wait, as a loader's do."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.device.type == "cpu":
            return super().__call__(*args, **kwargs)
        sent = [each.pin_memory().to(self.device, non_blocking=True) for each in args]
        return self.net(*sent, **kwargs)


def of(ranks: int) -> list[Case]:
    cases = [trained(name, stage, plan(ranks)) for stage, name in zip(STAGES, NAMES, strict=True)]
    turned = zip(STAGES, NAMES[1:] + NAMES[:1], strict=True)
    cases += [trained(name, stage, plan(ranks, precision="bf16")) for stage, name in turned]
    for way, stages in {WITHOUT_GRADIENT: (1, 3), TIED: (2, 3), FROZEN: (3,)}.items():
        cases += [trained(way, stage, plan(ranks)) for stage in stages]
    cases += [trained(SKIPPED, stage, plan(ranks, clip=0.0)) for stage in (2, 3)]
    cases += [waits(stage, ranks) for stage in STAGES]
    return cases


PREFETCHED = trained("llama", 3, plan(2, steps=4), FEW, ", two units prefetched")
CASES = named(*of(2), PREFETCHED, *of(4))
