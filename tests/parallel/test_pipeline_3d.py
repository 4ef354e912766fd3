"""Two pipeline stages x two data-parallel x two tensor-parallel ranks, on eight gloo processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

import hf_zero
from hf_zero.distributed.parallel_dims import ParallelDims
from hf_zero.distributed.parallel_groups import init_parallel
from tests.helpers.processes import run_processes, say
from tests.parallel.causal import batches_of, model_of
from tests.parallel.pipelines import CLIP, config, plain, sgd

pytestmark = pytest.mark.long
RANKS, MICRO = 8, 2


def _rank(rank: int) -> list[Any]:
    found = []
    for zero in (0, 1):
        say(f"stage {zero}")
        init_parallel(ParallelDims.over(RANKS, tensor=2))
        cut = hf_zero.tensor_parallel(model_of("qwen3"), 2)
        stages = hf_zero.pipeline_stages(cut, 2, partition_method="uniform")
        written = config(MICRO, zero, kernels="off")
        engine, _, _, _ = hf_zero.initialize(model=stages, config=written, optimizer=sgd)
        reader = rank % 4 // 2  # tensor-parallel ranks, and the stages, read the same
        data = iter(batches_of(4 * MICRO)[reader::2])
        told = [(float(engine.train_batch(data)), engine.get_global_grad_norm()) for _ in range(2)]
        found.append(told)
        engine.destroy()
    dist.barrier()
    return found


def test_three_ways_at_once() -> None:
    data = batches_of(4 * MICRO)
    expected, _ = plain(
        model_of("qwen3"),
        [data[: 2 * MICRO], data[2 * MICRO :]],
        lambda model, batch: model(**batch, use_cache=False).loss,
    )
    answers = run_processes(RANKS, _rank)
    assert all(answer == answers[0] for answer in answers)  # to the bit, on all ranks
    for told in answers[0]:
        for (loss, norm), (want, of) in zip(told, expected):
            assert loss == pytest.approx(want, rel=1e-5)
            assert norm == pytest.approx(of, rel=1e-5) and norm > CLIP
