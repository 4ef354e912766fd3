"""Engines whose ranks share layers, against one plain process; models that come in shards inside
zero.Init; keys and values that enter from outside, as those of prefix tuning.
"""

from __future__ import annotations

import copy
from typing import Any

import deepspeed
import pytest
import torch
from peft import PrefixTuningConfig, get_peft_model
from transformers import LlamaForCausalLM

import hf_zero
from hf_zero.distributed.parallel_groups import get_parallel
from hf_zero.errors import ConfigError, PartitionError
from hf_zero.parallel import alike, cutting
from hf_zero.parallel.tensor import axis
from hf_zero.parallel.tensor import model as tensor_model
from hf_zero.zero.access.consolidate import whole_state_dict
from hf_zero.zero.layout.sharding import sharding_of
from tests.helpers.causal_zoo import batch_of, tiny
from tests.helpers.engines import STAGES, bytes_along, config_of, start
from tests.helpers.models import ROWS, seeded, tokens
from tests.helpers.oracle import (
    FP32_TOLERANCE,
    compare,
    compare_mixed,
    compare_tensors,
    kept,
    mixed,
)
from tests.helpers.ranks import RankFailed, run_ranks
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
from tests.helpers.training import Plan, plain_sgd
from tests.loading.counting import counting
from tests.parallel.expert_cases import keys
from tests.ranks.test_host_syncs import counted

CELLS = [(name, stage) for name in MODELS for stage in STAGES]
ONCE = [(name, (place + 1) % 4) for place, name in enumerate(MODELS)]

RECOMPUTED = {"activation_checkpointing": {"number_checkpoints": 2}}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("accumulation", (1, 2))
def test_two_ranks_share_the_layers(stage, accumulation):
    plan, job = Plan(accumulation=accumulation, steps=2, clip=0.5), TensorJob("llama", plain_sgd)
    compare(train_tensor_parallel(job, plan, 2, stage), kept(job, plan))


@pytest.mark.parametrize("stage", STAGES)
def test_groups_read_different_batches(stage):
    plan, job = Plan(ranks=2, accumulation=2, steps=2), TensorJob("qwen3", plain_sgd)
    compare(train_tensor_parallel(job, plan, 2, stage), kept(job, plan))


@pytest.mark.parametrize(
    ("name", "stage"),
    [pytest.param(*cell, marks=() if cell in ONCE else pytest.mark.long) for cell in CELLS],
)
def test_models(name, stage):
    plan, job = Plan(ranks=2, steps=2), TensorJob(name, plain_sgd)
    compare(train_tensor_parallel(job, plan, 2, stage), kept(job, plan), 2 * FP32_TOLERANCE)


@pytest.mark.parametrize("stage", (1, 3))
def test_bf16(stage):
    plan, job = Plan(ranks=2, steps=3, precision="bf16"), TensorJob("llama")
    got = train_tensor_parallel(job, plan, 2, stage)
    exact = kept(job, Plan(ranks=2, steps=3))
    compare_mixed(got, mixed(job, plan, stage), exact, torch.bfloat16)


@pytest.mark.parametrize(
    ("stage", "keys"),
    (
        (2, {"activation_checkpointing": {"blocks": True}}),
        (3, {"activation_checkpointing": {"blocks": True}}),
        (3, {"kernels": ["norms", "activations", "rotary", "qkv", "loss"]}),
        (1, {"compile": {"blocks": True, "backend": "aot_eager"}}),
        (3, {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"},
             "offload_param": {"device": "cpu"}}}),
    ),
)  # fmt: skip
def test_with_other_features(stage, keys):
    plan, job = Plan(ranks=2, accumulation=2, steps=2), TensorJob("llama", plain_sgd)
    if "zero_optimization" in keys:
        job = TensorJob("llama")  # AdamW, which has a host kernel
    compare(train_tensor_parallel(job, plan, 2, stage, **keys), kept(job, plan))


class _Adapted(TensorJob):
    def build(self):
        from peft import LoraConfig, get_peft_model

        settings = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
        return seeded(lambda: get_peft_model(llama(), settings))


@pytest.mark.parametrize("stage", (1, 3))
def test_adapters(stage):
    plan, job = Plan(steps=2), _Adapted("llama", plain_sgd)
    job.name = "tensor-lora"
    compare(train_tensor_parallel(job, plan, 2, stage), kept(job, plan))


def test_bytes_of_each_axis():
    """At stage 3 over two groups of two ranks: what is cut travels between the groups, at half the
    size; what is whole travels among all four.
    """
    job, plan = TensorJob("llama", plain_sgd), Plan(ranks=2, steps=1)
    sent: list[Any] = []

    def look(engine):
        groups = get_parallel()
        assert groups is not None
        sent.append(dict(groups.stats["tensor"].bytes))
        assert bytes_along(engine, "tensor") == sent[-1]

    train_tensor_parallel(job, plan, 2, 3, observe=look, metrics={"enabled": True})
    words, fp32 = 2 * 9, 4
    compared = 4 * 8  # hashes of the first batch
    assert sent[0]["all_reduce"] == 10 * words * HIDDEN * fp32 + compared
    logits = words * 68 * fp32
    assert sent[0]["all_gather"] == logits
    assert len({tuple(sorted(each.items())) for each in sent}) == 1


@pytest.mark.parametrize(
    ("make", "section", "wanted"),
    (
        (llama, {}, {}),
        # seeds from the host's own generator, before attention and MLP of two layers
        (lambda: gpt2(0.1), {}, {"dropout.py: _local_scalar_dense": 8}),
        # how many rows go where, layer by layer
        pytest.param(mixtral, keys(2), {"dispatch.py: tolist": 4}, marks=pytest.mark.long),
        (mixtral, keys(2) | RECOMPUTED, {"dispatch.py: tolist": 4}),
    ),
    ids=("llama", "dropout", "experts", "experts, recomputed"),
)
def test_a_steady_step_reads_nothing_back(make, section, wanted, monkeypatch):
    """The third step of two micro-batches: between the forwards that compare batches, and the
    generators, of which threads have one for all.
    """
    monkeypatch.setattr(alike, "due", lambda count: False)
    models = [seeded(make) for _ in range(4)]
    plan = Plan(accumulation=2, clip=1.0)
    config = config_of(3, plan, tensor_parallel={"autotp_size": 2}, **section)

    def batch(step, micro, rank):
        return MODELS["llama"].batch(step, micro, rank // 2)

    for syncs in run_ranks(4, counted, models, batch, config):
        assert dict(syncs.of("hf_zero")) == wanted


def _partial_left_alone(patch):
    patch.setattr(tensor_model, "placements", lambda twin, found: dict.fromkeys(found, False))


def _first_part_for_all(patch):
    patch.setattr(cutting, "set_sharding", lambda parameter, sharding: None)


def _inputs_not_summed(patch):
    patch.setattr(axis, "copy_to", lambda x, axis, name, beside: x)
    patch.setattr(axis.SharedInputs, "_beside", lambda *_: None)


def _outputs_not_summed(patch):
    patch.setattr(axis.TensorAxis, "sum", lambda self, x, name: x)


@pytest.mark.parametrize(
    "fault", (_partial_left_alone, _first_part_for_all, _inputs_not_summed, _outputs_not_summed)
)
def test_faults_are_caught(fault, monkeypatch):
    job, plan = TensorJob("qwen3", plain_sgd), Plan(steps=1)
    expected = kept(job, plan)
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        compare(train_tensor_parallel(job, plan, 2, 1), expected)


@pytest.mark.parametrize("stage", (1, 3))
@pytest.mark.parametrize("name", ("llama-tied", "gpt2", "mixtral"))
def test_state_dicts_are_whole(name, stage):
    models = [MODELS[name].build() for _ in range(2)]
    wanted = {key: value.clone() for key, value in models[0].state_dict().items()}

    def save(rank):
        model = models[rank]
        config = config_of(stage, tensor_parallel={"autotp_size": 2})
        engine = start(model, plain_sgd(model), config)
        own = {key: value.clone() for key, value in model.state_dict().items()}
        whole = whole_state_dict(engine)
        with torch.no_grad():
            changed = {key: value + 1 for key, value in own.items()}
        model.load_state_dict(changed)
        again = model.state_dict()
        engine.destroy()
        return own, whole, again

    for own, whole, again in run_ranks(2, save):
        assert own.keys() == whole.keys() == wanted.keys()
        for key, value in wanted.items():
            assert torch.equal(own[key], value) and torch.equal(whole[key], value), key
            assert torch.equal(again[key], value + 1), key


@pytest.mark.parametrize("stage", (0, 3))
def test_each_rank_writes_its_own_part(stage):
    models = [seeded(llama) for _ in range(2)]
    name = "model.layers.0.mlp.down_proj.weight"
    wanted = seeded(llama).state_dict()[name] * 2

    def write(rank):
        model = hf_zero.tensor_parallel(models[rank], 2)
        weight = model.get_parameter(name)
        with pytest.raises(PartitionError, match="write its own part"):
            hf_zero.GatheredParameters([weight], modifier_rank=0)
        engine = start(model, plain_sgd(model), config_of(stage))
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


def test_sequences_that_were_shared_before_layers():
    models = [seeded(llama) for _ in range(4)]

    def make(rank):
        former = hf_zero.sequence_parallel(2)
        model = hf_zero.tensor_parallel(models[rank], 2)
        start(model, plain_sgd(model), config_of(1), mpu=former)

    with pytest.raises(RankFailed, match=r"call it afterwards, as after hf_zero.tensor_parallel"):
        run_ranks(4, make)


@pytest.mark.parametrize("stage", STAGES)
def test_the_estimate_is_what_a_rank_holds(stage):
    config = config_of(stage, tensor_parallel={"autotp_size": 2})
    row = hf_zero.estimate(seeded(llama), 4, config=config).at(stage)

    def held(rank, model):
        engine = start(model, plain_sgd(model), config)
        found = engine.state_bytes()["parameters"]
        engine.destroy()
        return found

    assert on_ranks(4, held, build=lambda: seeded(llama)) == [row.parameters] * 4


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
            model=model,
            optimizer=plain_sgd(model),
            config=written,
            training_data=data,
        )
        assert loader is not None
        found = engine.train_batch_size(), sorted(loader.sampler)
        engine.destroy()
        return found

    found = on_ranks(4, sizes, build=lambda: seeded(llama))
    assert [total for total, _ in found] == [12] * 4
    assert found[0] == found[1] and found[2] == found[3]
    assert sorted(found[0][1] + found[2][1]) == list(range(8))


def test_sizes_that_differ():
    models = [seeded(llama) for _ in range(2)]

    def differ(rank):
        model = hf_zero.tensor_parallel(models[rank], 2)
        start(model, plain_sgd(model), config_of(1, tensor_parallel={"autotp_size": 1}))

    with pytest.raises(RankFailed, match="is cut among 2 ranks already") as raised:
        run_ranks(2, differ)
    assert isinstance(raised.value.__cause__, ConfigError)


def test_models_of_one_job_are_cut_into_different_sizes():
    """Each engine goes by the size of its own model: one made after others, one made anew."""
    ids = tokens(0, 0, 0)
    batch, wanted = {"input_ids": ids, "labels": ids}, seeded(lambda: llama(4))
    state = {key: value.clone() for key, value in wanted.state_dict().items()}
    wanted(**batch).loss.backward()
    norm = float(torch.nn.utils.get_total_norm([p.grad for p in wanted.parameters()]))
    sizes = (2, 4, 1, 2)
    models = [{size: seeded(lambda: llama(4)) for size in sizes} for _ in range(4)]

    def run(rank):
        for size, model in models[rank].items():
            hf_zero.tensor_parallel(model, size)
        norms, batches, states = [], [], []
        for size in sizes:
            model = models[rank][size]
            still = torch.optim.SGD(model.parameters(), lr=0.0)
            engine = start(model, still, config_of(1, gradient_clipping=1e6))
            engine.backward(engine(**batch).loss)
            engine.step()
            norms.append(float(engine.get_global_grad_norm()))
            batches.append(engine.train_batch_size())
            states += [each.state_dict() for each in models[rank].values()]
            engine.destroy()
        return norms, batches, states

    for norms, batches, states in run_ranks(4, run):
        assert norms == pytest.approx([norm] * 4, rel=1e-5)
        assert batches == [ROWS * 4 // size for size in sizes]
        for each in states:
            for key, value in state.items():
                assert torch.equal(each[key], value), key


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


def _gradients(model):
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


@pytest.mark.parametrize(
    "shared", [{"tensor_parallel": {"autotp_size": 2}}, {"sequence_parallel_size": 2}], ids=str
)
def test_batch_sizes_count_ranks_with_batches_of_their_own(shared):
    def run(rank, models):
        engine = start(models[rank], None, config_of(1, **shared))
        assert engine.data_ranks == 1
        engine.set_train_batch_size(3 * ROWS)
        assert (engine.gradient_accumulation_steps(), engine.train_batch_size()) == (3, 3 * ROWS)
        engine.destroy()

    run_ranks(2, run, [seeded(llama) for _ in range(2)])
