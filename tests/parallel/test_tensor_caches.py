"""Keys and values that enter a model that ranks share, as those of prefix tuning."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from peft import PrefixTuningConfig, get_peft_model

import hf_zero
from hf_zero.errors import ConfigError
from tests.helpers.causal_zoo import batch_of, tiny
from tests.helpers.models import seeded
from tests.helpers.oracle import compare_tensors
from tests.helpers.ranks import RankFailed, run_ranks
from tests.helpers.tensor_parallel import llama, qwen3


def _gradients(model: Any) -> tuple[float, dict[str, torch.Tensor]]:
    loss = model(**batch_of()).loss
    loss.backward()
    named = model.named_parameters()
    return float(loss.detach()), {name: p.grad for name, p in named if p.grad is not None}


@pytest.mark.parametrize(
    "make",
    (lambda: llama(key_value_heads=1), lambda: llama(key_value_heads=2), qwen3),
    ids=("one head of keys", "two", "norms of heads"),
)
def test_prefix_tuning(make):
    settings = PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    model: Any = seeded(lambda: get_peft_model(make(), settings)).train()
    models = [copy.deepcopy(model) for _ in range(2)]
    loss, gradients = _gradients(model)

    def run(rank):
        cut = hf_zero.tensor_parallel(models[rank], 2)
        got, found = _gradients(cut)
        assert got == pytest.approx(loss, rel=1e-5)
        compare_tensors("gradient", found, gradients)

    run_ranks(2, run)


@pytest.mark.parametrize(
    ("make", "heads", "words"),
    (
        (lambda: seeded(llama), 3, r"has 3 heads, and tensor_parallel.autotp_size = 2 cannot"),
        (lambda: tiny("deepseek_v2"), 4, r"prefix tuning, or set tensor_parallel.autotp_size"),
        (lambda: seeded(llama), 0, r"past_key_values is a tuple"),
    ),
    ids=("heads", "latent", "tuple"),
)
def test_caches_that_cannot_be_cut(make, heads, words):
    from transformers import DynamicCache

    models = [make() for _ in range(2)]

    def run(rank):
        model: Any = hf_zero.tensor_parallel(models[rank], 2)
        cache: Any = DynamicCache()
        for layer in range(2):
            cache.update(torch.zeros(2, heads, 3, 8), torch.zeros(2, heads, 3, 8), layer)
        model(**batch_of(), past_key_values=cache if heads else ((),))

    with pytest.raises(RankFailed, match=words) as raised:
        run_ranks(2, run)
    assert isinstance(raised.value.__cause__, ConfigError)
