"""Engines whose ranks share layers, against one plain process."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from peft import LoraConfig, PrefixTuningConfig, get_peft_model

import hf_zero
from hf_zero.errors import PartitionError
from hf_zero.parallel import alike
from tests.helpers.causal_zoo import batch_of
from tests.helpers.cells import in_one_item, in_turn
from tests.helpers.engines import config_of, start
from tests.helpers.host_syncs import HostSyncs
from tests.helpers.models import seeded
from tests.helpers.oracle import (
    FP32_TOLERANCE,
    compare,
    compare_mixed,
    compare_tensors,
    kept,
    mixed,
)
from tests.helpers.ranks import run_ranks
from tests.helpers.stacks import on_ranks
from tests.helpers.tensor_parallel import (
    HIDDEN,
    MODELS,
    TensorJob,
    gpt2,
    llama,
    mixtral,
    qwen3,
    train_tensor_parallel,
)
from tests.helpers.training import Plan, adamw, plain_sgd
from tests.parallel.expert_cases import keys
from tests.parallel.test_tensor_layers import loss_and_gradients

RECOMPUTED = {"activation_checkpointing": {"number_checkpoints": 2}}
WINDOWS = Plan(ranks=2, accumulation=2, steps=2, clip=0.5)  # two groups
# those with plans of our own, fewer heads of keys than ranks, experts beside a shared one
CELLS = [
    ("llama-mqa", 3, WINDOWS),
    *((name, at, Plan(steps=1)) for at, name in enumerate(("bert", "t5", "deepseek"))),
]


@in_one_item(CELLS, str)
def test_models(cell):
    name, stage, plan = cell
    job = TensorJob(name, plain_sgd)
    compare(train_tensor_parallel(job, plan, 2, stage), kept(job, plan), 2 * FP32_TOLERANCE)


def test_bf16():
    plan, job = Plan(steps=3, precision="bf16"), TensorJob("llama")
    got = train_tensor_parallel(job, plan, 2, 3)
    exact = kept(job, Plan(steps=3))
    compare_mixed(got, mixed(job, plan, 3), exact, torch.bfloat16)


OFFLOADED = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}


FEATURES = (
    (3, {"kernels": ["norms", "activations", "rotary", "qkv", "loss"]}),
    (1, {"compile": {"blocks": True, "backend": "aot_eager"}}),
    (3, {"zero_optimization": OFFLOADED}),
)


@in_one_item(FEATURES)
def test_with_other_features(case):
    stage, keys = case
    # AdamW has a host kernel
    job = TensorJob("llama", None if "zero_optimization" in keys else plain_sgd)
    plan = Plan(accumulation=2, steps=2)
    compare(train_tensor_parallel(job, plan, 2, stage, **keys), kept(job, plan))


class _Adapted(TensorJob):
    def build(self):
        settings = LoraConfig(
            r=4, target_modules="all-linear", init_lora_weights=False, modules_to_save=["lm_head"]
        )
        return seeded(lambda: get_peft_model(llama(), settings))


class _PartlyFrozen(TensorJob):
    """Recomputed by reentrant checkpoints; some layers that read one input are frozen."""

    def build(self):
        model = super().build()
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.requires_grad_(False)
            layer.mlp.up_proj.weight.requires_grad_(False)
        model.gradient_checkpointing_enable({"use_reentrant": True})
        return model


@in_one_item((_Adapted, _PartlyFrozen))
def test_weights_that_do_not_train(kind):
    plan, job = Plan(steps=2), kind("llama", plain_sgd)
    job.name = kind.__name__
    compare(train_tensor_parallel(job, plan, 2, 3), kept(job, plan))


STEADY = (
    # seeds from the host's own generator, before attention and MLP of two layers
    (lambda: gpt2(0.1), {}, {"dropout.py: _local_scalar_dense": 8}),
    # how many rows go where, layer by layer
    (mixtral, keys(2) | RECOMPUTED, {"dispatch.py: tolist": 4}),
)


@in_turn("make, section, wanted", STEADY)
def test_a_steady_step_reads_nothing_back(make, section, wanted, monkeypatch):
    """Between the forwards that compare batches."""
    monkeypatch.setattr(alike, "due", lambda count: False)
    models = [seeded(make) for _ in range(4)]
    plan = Plan(accumulation=2, clip=1.0)
    config = config_of(3, plan, tensor_parallel={"autotp_size": 2}, **section)

    def run(rank):
        engine = start(models[rank], adamw(models[rank]), config)
        for step in range(3):
            with HostSyncs() if step == 2 else nullcontext() as syncs:
                for micro in range(2):
                    batch = MODELS["llama"].batch(step, micro, rank // 2)
                    engine.backward(engine(**batch).loss)
                    engine.step()
        engine.destroy()
        return syncs

    for syncs in run_ranks(4, run):
        assert dict(syncs.of("hf_zero")) == wanted


def test_each_rank_writes_its_own_part():
    models = [seeded(llama) for _ in range(2)]
    name = "model.layers.0.mlp.down_proj.weight"
    wanted = seeded(llama).state_dict()[name] * 2

    def write(rank):
        model = hf_zero.tensor_parallel(models[rank], 2)
        weight = model.get_parameter(name)
        with pytest.raises(PartitionError, match="write its own part"):
            hf_zero.GatheredParameters([weight], modifier_rank=0)
        engine = start(model, plain_sgd(model), config_of(3))
        with pytest.raises(PartitionError, match=r"is cut over ranks by tensor parallelism"):
            hf_zero.GatheredParameters(model, modifier_rank=1)
        norm = model.get_parameter("model.norm.weight")
        with hf_zero.GatheredParameters([norm], modifier_rank=1), torch.no_grad():
            norm.fill_(rank)
        with hf_zero.summon_full_params(model, writeback=True), torch.no_grad():
            weight.mul_(2)
        state = model.state_dict()
        engine.destroy()
        assert torch.equal(state["model.norm.weight"], torch.ones(HIDDEN))
        return state[name]

    for state in run_ranks(2, write):
        assert torch.equal(state, wanted)


def test_batch_sizes_count_groups():
    written = {
        "tensor_parallel": {"autotp_size": 2},
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": 2,
        "train_batch_size": 24,  # as Accelerate and the Trainer count, every rank
        "zero_optimization": {"stage": 1},
    }

    def sizes(rank, model):
        data = list(range(8))
        engine, _, loader, _ = hf_zero.initialize(
            model=model, optimizer=plain_sgd(model), config=written, training_data=data
        )
        assert loader is not None and engine.data_ranks == 2
        found = engine.train_batch_size(), sorted(loader.sampler)
        engine.set_train_batch_size(18)
        assert (engine.gradient_accumulation_steps(), engine.train_batch_size()) == (3, 18)
        engine.destroy()
        return found

    found = on_ranks(4, sizes, build=lambda: seeded(llama))
    assert [total for total, _ in found] == [12] * 4
    assert found[0] == found[1] and found[2] == found[3]
    assert sorted(found[0][1] + found[2][1]) == list(range(8))


CACHES = {
    "one head of keys": lambda: llama(key_value_heads=1),
    "two heads": llama,
    "norms of heads": qwen3,
}


@in_one_item(CACHES)
def test_prefix_tuning(kind):
    settings = PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    model: Any = seeded(lambda: get_peft_model(CACHES[kind](), settings)).train()
    models = [copy.deepcopy(model) for _ in range(2)]
    loss, gradients = loss_and_gradients(model, batch_of())

    def run(rank):
        model = hf_zero.tensor_parallel(models[rank], 2)
        got, found = loss_and_gradients(model, batch_of())
        assert got == pytest.approx(loss, rel=1e-5)
        compare_tensors("gradient", found, gradients)

    run_ranks(2, run)
