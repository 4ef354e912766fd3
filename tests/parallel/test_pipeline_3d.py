"""Two pipeline stages x two tensor-parallel ranks, tied over the stages, on four gloo processes; on
eight with two data-parallel ranks.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import hf_zero
from hf_zero.distributed.parallel_dims import ParallelDims
from hf_zero.distributed.parallel_groups import init_parallel
from tests.helpers.cells import fast
from tests.helpers.processes import run_processes, say
from tests.parallel.causal import batches_of, model_of
from tests.parallel.pipelines import CLIP, LR, config, plain

MICRO = 2
MODELS = {4: "llama", 8: "qwen3"}  # by ranks; the first is tied over the stages


def grouped(parameters):
    """Matrices, which decay, and vectors, in groups of their own."""
    given = list(parameters)
    groups = [{"params": [p for p in given if (p.dim() > 1) == decays]} for decays in (True, False)]
    return torch.optim.SGD([{**groups[0], "weight_decay": 0.1}, groups[1]], lr=LR)


def _rank(rank):
    found, ranks = [], dist.get_world_size()
    for zero in (0, 1):
        say(f"stage {zero}")
        init_parallel(ParallelDims.over(ranks, tensor=2))
        cut = hf_zero.tensor_parallel(model_of(MODELS[ranks]), 2)
        stages = hf_zero.pipeline_stages(cut, 2, partition_method="uniform")
        written = config(MICRO, zero, kernels="off")
        engine, _, _, _ = hf_zero.initialize(model=stages, config=written, optimizer=grouped)
        readers = ranks // 4
        reader = rank // 2 % readers  # tensor-parallel ranks, and the stages, read the same
        data = iter(batches_of(2 * readers * MICRO)[reader::readers])
        told = [(float(engine.train_batch(data)), engine.get_global_grad_norm()) for _ in range(2)]
        found.append(told)
        engine.destroy()
    dist.barrier()
    return found


@pytest.mark.parametrize("ranks", fast(MODELS, lambda ranks: ranks == 4))
def test_three_ways_at_once(ranks):
    data = batches_of(ranks // 2 * MICRO)
    half = len(data) // 2
    expected, _ = plain(
        model_of(MODELS[ranks]),
        [data[:half], data[half:]],
        lambda model, batch: model(**batch, use_cache=False).loss,
        grouped,
    )
    answers = run_processes(ranks, _rank)
    assert all(answer == answers[0] for answer in answers)  # to the bit, on all ranks
    for told in answers[0]:
        for (loss, norm), (want, of) in zip(told, expected):
            assert loss == pytest.approx(want, rel=1e-5)
            assert norm == pytest.approx(of, rel=1e-5) and norm > CLIP
