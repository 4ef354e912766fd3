"""Further features on parts of sequences: adapters, checkpoints with offload, heads without logits,
sparse attention, offloaded state, MLPs in stretches, 16 bits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import peft
import pytest
import torch
from torch import nn

from tests.helpers import oracle
from tests.helpers.engines import STAGES
from tests.helpers.sequences import (
    Ranks,
    SequenceJob,
    gpt2,
    half_labelled,
    llama,
    mixtral,
    packed,
    qwen3,
    train_on_threads,
)
from tests.helpers.training import Plan
from tests.parallel.expert_cases import OnSpreadExperts, keys

SP2 = Ranks(2)


def adapted() -> nn.Module:
    """LoRA on every linear layer; both matrices are drawn, so that all have gradients."""
    config = peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    return peft.get_peft_model(llama(), config)  # type: ignore[arg-type, return-value]


def checkpointed(reentrant: bool) -> nn.Module:
    model: Any = llama(use_cache=False)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    return model  # type: ignore[no-any-return]


BLOCKS = {"activation_checkpointing": {"blocks": True, "cpu_checkpointing": True}}
SPARSE = {"mode": "fixed", "block": 16, "attention": "unidirectional"}
OFFLOAD = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "adapters": (adapted, {}),
    "recomputed blocks, offloaded": (llama, BLOCKS),
    "recomputed by transformers": (partial(checkpointed, False), {}),
    "recomputed, reentrant": (partial(checkpointed, True), {}),
    "no logits": (llama, {"kernels": ["loss"]}),
    "all kernels, tied": (qwen3, {"kernels": ["loss", "norms", "rotary", "qkv", "activations"]}),
    "offload": (llama, {"zero_optimization": {"stage": 3, **OFFLOAD}}),
    "MLPs in three stretches": (llama, {"tiled_mlp": {"enabled": True, "shards": 3}}),
    "MLPs in stretches": (gpt2, {"tiled_mlp": {"enabled": True}}),
}


def check(make: Any, stage: int, config: dict[str, Any], accumulation: int = 1) -> list[Any]:
    job, plan = SequenceJob(make), Plan(ranks=1, steps=2, accumulation=accumulation)
    if "zero_optimization" in config:
        config = config | {"zero_optimization": {**config["zero_optimization"], "stage": stage}}
    found, stats = train_on_threads(job, plan, SP2, stage, **config)
    oracle.compare(found, oracle.run(job, plan))
    return stats


@pytest.mark.parametrize("case", CASES)
def test_as_in_one_process(case):
    make, config = CASES[case]
    check(make, 3, config)


@pytest.mark.long
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("case", CASES)
def test_every_stage(case, stage):
    make, config = CASES[case]
    if case == "offload" and stage < 3:
        config = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
    if case == "offload" and stage == 0:
        pytest.skip("stage 0 keeps its optimizer on the device")
    check(make, stage, config, 2)


def test_recomputed_blocks_exchange_once_more():
    plain = check(llama, 3, {})
    again = check(llama, 3, BLOCKS)
    for before, after in zip(plain, again):
        assert after.counts["all_to_all"] == before.counts["all_to_all"] * 3 // 2


def test_recomputed_documents_are_those_of_their_forward():
    job = SequenceJob(partial(llama, use_cache=False), packed)
    plan = Plan(ranks=1, steps=2, accumulation=2)
    found, _ = train_on_threads(job, plan, SP2, 2, **BLOCKS)
    oracle.compare(found, oracle.run(job, plan))


@pytest.mark.parametrize("differ", [False, True])
def test_sparse_attention(differ):
    """The layout of a rank's heads is theirs, where heads differ."""
    section = SPARSE | {"different_layout_per_head": differ, "num_local_blocks": 1}
    from hf_zero.integrations import fused

    make = partial(llama, max_position_embeddings=256)

    def sparse():
        model = make()
        fused.prepare(model, "off", dict(section), False, ())
        return model

    job, plan = SequenceJob(sparse, long_rows), Plan(ranks=1, steps=1)
    expected = oracle.run(job, plan)
    found, _ = train_on_threads(
        SequenceJob(make, long_rows), plan, SP2, 1, sparse_attention=section
    )
    oracle.compare(found, expected, 1e-5)


@pytest.mark.parametrize("stage", (1, 3))
def test_experts_of_ranks_that_share_sequences(stage):
    """Two groups of two, whose four ranks have the experts among them by twos."""
    job, ranks = SequenceJob(mixtral), Ranks(2, 2)
    plan = Plan(ranks=2, steps=2)
    found, _ = train_on_threads(job, plan, ranks, stage, OnSpreadExperts, **keys(2))
    oracle.compare(found, oracle.run(job, plan))


@pytest.mark.parametrize("stage", (1, 3))
def test_a_rank_without_labels_and_without_logits(stage):
    job, plan = SequenceJob(llama, half_labelled), Plan(ranks=1, steps=2, accumulation=2)
    found, _ = train_on_threads(job, plan, SP2, stage, kernels=["loss"])
    oracle.compare(found, oracle.run(job, plan))


def long_rows(at: Any) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(3, 60, (2, 128), generator=generator)
    return {"input_ids": ids, "labels": ids.clone()}


@pytest.mark.parametrize("precision", ["bf16"])
def test_in_16_bits(precision):
    """Sums over the tokens of two ranks are rounded before they are added, as over two batches."""
    job, plan = SequenceJob(llama), Plan(ranks=1, steps=2, precision=precision)
    found, _ = train_on_threads(job, plan, SP2, 2)
    exact = oracle.run(job, Plan(ranks=1, steps=2))
    oracle.compare_mixed(found, oracle.run(job, plan), exact, plan.dtype, 1.5)


def test_stretches_need_mlps():
    import hf_zero
    from hf_zero.errors import ConfigError
    from tests.helpers.models import Stack

    config = {"tiled_mlp": {"enabled": True}, "train_micro_batch_size_per_gpu": 1}
    with pytest.raises(ConfigError, match=r"no block of Stack has a module .* remove the section"):
        hf_zero.initialize(model=Stack(), config=config)
