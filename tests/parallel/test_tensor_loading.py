"""Models that come in shards inside zero.Init, cut over tensor-parallel ranks before."""

from __future__ import annotations

import deepspeed
import pytest
import torch
from transformers import LlamaForCausalLM

import hf_zero
from hf_zero.zero.access.consolidate import whole_state_dict
from hf_zero.zero.layout.sharding import sharding_of
from tests.helpers.engines import config_of, start
from tests.helpers.models import seeded
from tests.helpers.ranks import run_ranks
from tests.helpers.tensor_parallel import llama
from tests.helpers.training import plain_sgd
from tests.loading.counting import counting


@pytest.mark.usefixtures("loads_at_once")
def test_each_rank_reads_its_shards_of_its_part(tmp_path):
    whole = seeded(llama)
    whole.save_pretrained(tmp_path)
    config = config_of(3, tensor_parallel={"autotp_size": 2})

    def rank(_):
        with deepspeed.zero.Init(config_dict_or_path=config):
            model = LlamaForCausalLM.from_pretrained(tmp_path)
        engine = start(model, plain_sgd(model), config)
        with hf_zero.GatheredParameters(list(model.parameters())):
            parts = {
                name: (p.detach().clone(), sharding_of(p).box)
                for name, p in model.named_parameters()
            }
        state = whole_state_dict(engine)
        engine.destroy()
        return parts, state

    with counting() as read:
        found = run_ranks(4, rank)
    # matrices that are cut along columns, which are short here, are read whole for each part
    assert read.bytes < 2 * sum(p.nbytes for p in whole.parameters())
    for parts, state in found:
        assert sum(box is not None for _, box in parts.values()) > 8
        for name, (value, box) in parts.items():
            own = whole.get_parameter(name)
            assert torch.equal(value, own if box is None else box.take(own)), name
            assert torch.equal(state[name], own), name
