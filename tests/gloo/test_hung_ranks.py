"""A rank that hangs within a forward: the others raise at the ``timeout`` of the configuration and
name it, along each axis on which a forward or a step of a pipeline meets other ranks.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hf_zero
from hf_zero.errors import RankMismatchError
from tests.helpers import tensor_parallel as models
from tests.helpers.processes import run_processes
from tests.parallel import expert_cases, pipelines

HANGS = 1
SECONDS = 3  # the timeout: groups made before the engine would wait for half an hour
TOLD = "the others have raised"
KEYS: dict[str, dict[str, Any]] = {
    "tensor": {"tensor_parallel": {"autotp_size": 2}},
    "sequence": {"sequence_parallel_size": 2},
    "expert": expert_cases.keys(2),
    "pipeline": {},
}


def _hang(*_: Any) -> None:
    if dist.get_rank() == HANGS:
        store = dist.distributed_c10d._get_default_store()
        store.wait([TOLD], timedelta(seconds=200))


def _train(rank: int, axis: str) -> str:
    staged = axis == "pipeline"
    built = {"expert": models.mixtral, "pipeline": lambda: pipelines.pipeline(2, 2)}
    model = built.get(axis, models.llama)()
    config = pipelines.config(2, 1, timeout=SECONDS, **KEYS[axis])
    engine, *_ = hf_zero.initialize(model=model, config=config, optimizer=pipelines.sgd)
    shares = hf_zero.sequence_parallel() if axis == "sequence" else None

    def step() -> None:
        if staged:
            engine.train_batch(iter(pipelines.batches(2)))
            return
        for _ in range(2):
            ids = torch.randint(3, 60, (2, 8), generator=torch.Generator().manual_seed(1))
            batch = {"input_ids": ids, "labels": ids}
            engine.backward(engine(**(shares.shard(batch) if shares else batch)).loss)
            engine.step()

    step()
    last = [module for module in model.modules() if isinstance(module, torch.nn.Linear)][-1]
    last.register_forward_pre_hook(_hang)
    try:
        step()
    except RankMismatchError as error:
        return str(error)
    finally:
        dist.distributed_c10d._get_default_store().set(TOLD, "")
    return "no error"


@pytest.mark.parametrize("axis", list(KEYS))
def test_the_timeout_of_the_configuration_holds_and_the_rank_that_hangs_is_named(axis):
    said = run_processes(2, _train, axis, timeout=200)[1 - HANGS]
    assert "which is the timeout" in said and f"rank {HANGS} on" in said, said
    assert f"{axis} " in said, said
