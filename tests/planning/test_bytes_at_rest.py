"""Bytes at rest: what the plan of an engine foresees for each rank, kind and tier equals, to the
byte, what the engine of that rank holds. Rows that ``ranks/test_capabilities.py`` has not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hf_zero.distributed.parallel_dims import ParallelDims
from hf_zero.parallel.planned_cuts import planned_cuts
from hf_zero.planning.needs import state_bytes
from hf_zero.zero.state_bytes import held_bytes
from tests.helpers.cells import in_turn
from tests.helpers.engines import config_of, start
from tests.helpers.models import Stack, seeded
from tests.helpers.offloads import offload
from tests.helpers.plans import planned
from tests.helpers.ranks import run_ranks
from tests.helpers.stacks import squared
from tests.helpers.tensor_parallel import deepseek, llama, mixtral
from tests.helpers.training import At, Plan, trainable


def half_frozen() -> nn.Module:
    model = Stack(4, 40)
    model.blocks[1].requires_grad_(False)
    return model


@dataclass(frozen=True)
class Job:
    """``dims``: axes of parallelism of a decoder; other models are stacks."""

    stage: int
    precision: str = "bf16"
    ranks: int = 2
    build: Callable[[], nn.Module] = half_frozen
    place: dict[str, Any] = field(default_factory=dict)  # "way", and how
    accumulation: int = 1
    amsgrad: bool = False
    dims: dict[str, int] = field(default_factory=dict)
    keys: dict[str, Any] = field(default_factory=dict)

    def model(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = seeded(self.build)
        return model, torch.optim.AdamW(trainable(model), amsgrad=self.amsgrad)

    def held(self, rank: int, model: Any, optimizer: Any, config: dict[str, Any]) -> dict[Any, int]:
        """Bytes that an engine holds after a few steps."""
        engine = start(model, optimizer, config)
        ids = torch.randint(1, 32, (2, 8), generator=torch.Generator().manual_seed(0))
        for step in range(2 * self.accumulation):
            dtype = torch.float16 if self.precision == "fp16" else torch.bfloat16
            engine.backward(
                engine(input_ids=ids, labels=ids).loss
                if self.dims
                else squared(engine, At(step, 0, rank), dtype)
            )
            engine.step()
        if engine.updater.units:
            engine.updater.finish()
        found = held_bytes(engine)
        engine.destroy()
        return {key: nbytes for key, nbytes in found.items() if nbytes}

    def foreseen(self, rank: int, config: dict[str, Any]) -> dict[Any, int]:
        """Bytes that the plan of ``rank`` has, of a model that is not cut yet."""
        (model, optimizer), dims = self.model(), ParallelDims.over(self.ranks, **self.dims)
        tensor, expert = self.dims.get("tensor", 1), self.dims.get("expert", 1)
        cuts = planned_cuts(model, tensor, expert, dims, rank)
        found = state_bytes(planned(model, config, dims, optimizer, rank=rank, cuts=cuts), True)
        return {key: nbytes for key, nbytes in found.items() if nbytes}


TENSOR = {"tensor_parallel": {"autotp_size": 2}}
EXPERT = {"expert_parallel": {"enabled": True, "autoep_size": 2}}
PAIRS = {"tensor": 2}
JOBS = [
    Job(2, place={"way": "optimizer on cpu", "moments": "bf16"}),
    Job(3, place={"way": "all in files", "moments": "int8"}),
    Job(2, amsgrad=True, keys={"data_types": {"grad_accum_dtype": "bf16"}}),
    Job(3, build=partial(llama, key_value_heads=1), dims=PAIRS, keys=TENSOR),
    Job(3, ranks=4, build=mixtral, dims={**PAIRS, "expert": 2}, keys=TENSOR | EXPERT),
]
LONG_JOBS = [
    Job(2, "fp16", place={"way": "optimizer on cpu"}, accumulation=2),
    Job(2, keys={"communication_data_type": "fp16"}),
    Job(3, build=deepseek, dims=PAIRS, keys=TENSOR),
]


@in_turn("job", JOBS, long=LONG_JOBS)
def test_bytes_are_those_of_the_plan(job: Job, tmp_path: Path) -> None:
    plan = Plan(precision=job.precision, accumulation=job.accumulation)
    how = dict(job.place)
    section = offload(how.pop("way"), job.stage, tmp_path, **how) if how else {}
    config = config_of(
        job.stage, plan, zero_optimization={"stage": job.stage, **section}, **job.keys
    )
    models = [job.model() for _ in range(job.ranks)]
    found = run_ranks(job.ranks, lambda rank: job.held(rank, *models[rank], config))
    assert found == [job.foreseen(rank, config) for rank in range(job.ranks)]
