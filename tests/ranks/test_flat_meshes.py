"""Models that are split over ranks by hand, tensor and expert parallel: losses, norms, gradients
and weights of one process, at every stage.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hf_zero
from hf_zero.distributed.parallel_dims import ParallelDims
from hf_zero.distributed.parallel_groups import init_parallel
from hf_zero.parameters.sharding import sharding_of
from tests.helpers.engines import full_weights, start
from tests.helpers.models import seeded
from tests.helpers.ranks import run_ranks
from tests.helpers.split import Record, Split, batches, config_of_split, plain, split
from tests.helpers.training import adamw, plain_sgd

TP2 = {"tensor": 2}
EP2 = {"expert": 2}
BOTH = {"tensor": 2, "expert": 2}
CLIP = 0.05


def train(rank: int, whole: nn.Module, data: Tensor, sizes: Any, made: Any, optimizer: Any) -> Any:
    """A run of one rank: its record, with its parts of gradients and weights, and their boxes."""
    dims = ParallelDims.over(4, **sizes)
    groups = init_parallel(dims)
    model = split(copy.deepcopy(whole), groups)
    boxes = {name: sharding_of(p).box for name, p in model.named_parameters()}
    engine = start(model, optimizer(model), made)
    record, own = Record(), dims.coordinate(rank, "data")
    for step in data:
        losses = []
        for place, micro in enumerate(step):
            loss = engine(micro[own])
            engine.backward(loss)
            losses.append(loss.item())
            if place < len(step) - 1:
                engine.step()
        record.grads.append(
            {n: hf_zero.safe_get_full_grad(p).clone() for n, p in model.named_parameters()}
        )
        engine.step()
        record.losses.append(sum(losses) / len(losses))
        record.norms.append(engine.get_global_grad_norm())
    record.weights = full_weights(engine)
    engine.destroy()
    return record, boxes


def check(
    sizes: Any, stage: int, accumulation: int, optimizer: Any, clip: float = 0.0, **zero: Any
) -> None:
    dims = ParallelDims.over(4, **sizes)
    whole = seeded(lambda: Split(experts=dims.expert > 1))
    data = batches(3, accumulation, dims.data)
    want = plain(whole, optimizer, data, clip)
    made = config_of_split(stage, accumulation, clip, **zero)
    got = run_ranks(4, train, whole, data, sizes, made, optimizer)
    assert len({tuple(record.norms) for record, _ in got}) == 1, "norms differ between ranks"
    tensor = dims.tensor
    for step, loss in enumerate(want.losses):
        mean = sum(record.losses[step] for record, _ in got[::tensor]) / dims.data
        assert mean == pytest.approx(loss, rel=1e-5), f"loss of step {step}"
    for record, boxes in got:
        assert record.norms == pytest.approx(want.norms, rel=1e-5), "norm"
        pairs = [(record.weights, want.weights, "weights")]
        pairs += [(own, all_, "gradient") for own, all_ in zip(record.grads, want.grads)]
        for own, all_, what in pairs:
            assert own.keys() == all_.keys()
            for name, value in own.items():
                box = boxes[name]
                part = all_[name] if box is None else box.take(all_[name])
                torch.testing.assert_close(
                    value, part, rtol=1e-5, atol=1e-5, msg=partial(_named, f"{what} {name}")
                )


def _named(what: str, difference: str) -> str:
    return f"{what}: {difference}"


@pytest.mark.turns
@pytest.mark.parametrize("sizes", [TP2, EP2, BOTH], ids=["tp2", "ep2", "tp2 ep2"])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("optimizer", [plain_sgd, adamw])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_split_model_trains_as_one_process(
    stage: int, optimizer: Any, accumulation: int, sizes: Any
) -> None:
    check(sizes, stage, accumulation, optimizer, CLIP)
