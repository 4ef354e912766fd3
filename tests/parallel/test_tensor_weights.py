"""Whole weights of models that tensor parallelism has cut: ``iter_weights``, and the parts of them
that ``torch.distributed.checkpoint.state_dict`` gives on each rank.
"""

from __future__ import annotations

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_state_dict

from tests.helpers.tensor_parallel import TensorJob, train_tensor_parallel
from tests.helpers.training import Plan

SIZE = 2


@pytest.mark.parametrize("name, stage", [("llama", 3), ("phi3", 1)])
def test_whole_weights_and_parts(name, stage):
    sent, parts = [], []

    def observe(engine):
        sent.append({n: v.clone() for b in engine.iter_weights("4KiB", "fp32") for n, v in b})
        parts.append(get_state_dict(engine.module, engine.optimizer))

    plan = Plan(ranks=2, steps=1)
    want = train_tensor_parallel(TensorJob(name), plan, SIZE, stage, observe=observe).weights
    assert len(sent) == len(parts) == plan.ranks * SIZE
    for each in sent:
        assert each.keys() == want.keys()
        assert all(torch.equal(each[key], value) for key, value in want.items())
    for key, value in want.items():
        whole = torch.full_like(value, torch.nan)
        moment = torch.full_like(value, torch.nan)
        for weights, states in parts:
            for held, into in ((weights[key], whole), (states["state"][key]["exp_avg"], moment)):
                assert held.shape == value.shape
                for offsets, view in held.pieces:
                    into[tuple(slice(o, o + n) for o, n in zip(offsets, view.shape))] = view
        assert torch.equal(whole, value), key
        assert not moment.isnan().any(), key
