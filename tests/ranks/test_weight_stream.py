"""``engine.iter_weights``: whole weights of one moment, in buckets, against the plain model's and
against ``safe_get_full_fp32_param``, which reads each parameter by itself.
"""

from __future__ import annotations

import re
from typing import Any

import peft
import pytest
import torch

import hf_zero
from hf_zero.errors import ConfigError, PartitionError
from tests.helpers.adapters import KINDS, llama
from tests.helpers.cells import in_turn
from tests.helpers.engines import config_of, full_weights, start
from tests.helpers.models import seeded
from tests.helpers.stacks import on_each_rank, on_ranks, run_steps, stack
from tests.helpers.training import Plan, adamw, plain_sgd, trainable
from tests.ranks.cases import values_of

RANKS = 2
DTYPES: dict[Any, Any] = {"bf16": torch.bfloat16, "fp32": torch.float32, None: None}
HOST = {"offload_optimizer": {"device": "cpu"}}


def sent(stream: Any) -> dict[str, torch.Tensor]:
    """All tensors of a stream, after a comparison with its list."""
    found: dict[str, torch.Tensor] = {}
    for bucket in stream:
        for name, value in bucket:
            assert name not in found
            found[name] = value.clone()
    listed = [(name, value.dtype, tuple(value.shape)) for name, value in found.items()]
    assert listed == [tuple(each) for each in stream.tensors]
    return found


@in_turn("stage, precision, place", [(0, "bf16", {}), (2, "fp32", HOST), (3, "bf16", HOST)])
@on_each_rank(RANKS)
def test_weights_are_those_of_the_model(rank, model, stage, precision, place):
    zero, own = {"stage": stage, **place}, Plan(precision=precision)
    engine = start(model, adamw(model), config_of(stage, own, zero_optimization=zero))
    for steps in range(2):
        run_steps(engine, rank, range(steps))
        want = full_weights(engine) if steps else values_of(stack())
        for dtype, given in DTYPES.items():
            for bucket in ("300B", 1 << 20):
                found = sent(engine.iter_weights(bucket, dtype))
                assert found.keys() == want.keys()
                for name, value in found.items():
                    assert value.dtype == (given or own.dtype)
                    assert torch.equal(value, want[name].to(value.dtype)), (name, dtype, bucket)
    run_steps(engine, rank, range(1, 2))  # training goes on


@in_turn("stage", (1, 3))
@on_each_rank(RANKS)
def test_buckets_hold_one_version(rank, model, stage):
    engine = start(model, plain_sgd(model), config_of(stage))
    run_steps(engine, rank, [0])
    stream = engine.iter_weights("300B")
    assert stream.step == 1
    buckets = iter(stream)
    next(buckets)
    run_steps(engine, rank, [1])
    with pytest.raises(PartitionError, match="are of step 1, and the engine is at step 2"):
        list(buckets)
    with pytest.raises(PartitionError, match="weights were written"):
        sent(stream)
    weight = model.blocks[0].up.weight
    buckets = iter(engine.iter_weights("300B"))
    next(buckets)
    with hf_zero.GatheredParameters([weight], modifier_rank=1), torch.no_grad():
        weight.zero_()
    with pytest.raises(PartitionError, match="weights were written"):
        list(buckets)
    assert not sent(engine.iter_weights())["blocks.0.up.weight"].any()


@on_each_rank(RANKS)
def test_weights_whose_members_a_script_writes_are_sent(rank, model):
    engine = start(model, plain_sgd(model), config_of(3))
    sent(engine.iter_weights(changed_only=True))
    if rank == 1:  # its part alone
        engine.optimizer.param_groups[0]["params"][0].fill_(7)
    found = sent(engine.iter_weights(changed_only=True))
    assert "enter.weight" in found.keys() < {name for name, _ in model.named_parameters()}
    assert 7 in found["enter.weight"]


@in_turn("stage", (1, 3))
@on_each_rank(RANKS)
def test_frozen_weights_are_sent_once_and_after_a_write(rank, model, stage):
    model.blocks[1].requires_grad_(False)
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    every = {name for name, _ in model.named_parameters()}
    engine = start(model, plain_sgd(model), config_of(stage))
    assert sent(engine.iter_weights(changed_only=True)).keys() == every
    assert not sent(engine.iter_weights(changed_only=True))
    run_steps(engine, rank, [0])
    assert sent(engine.iter_weights(changed_only=True)).keys() == every - frozen
    weight = model.blocks[1].up.weight
    with hf_zero.GatheredParameters([weight], modifier_rank=0), torch.no_grad():
        weight.zero_()
    found = sent(engine.iter_weights(changed_only=True))
    assert "blocks.1.up.weight" in found.keys() <= frozen
    assert not found["blocks.1.up.weight"].any()
    assert sent(engine.iter_weights()).keys() == every


@in_turn("stage, precision", [(1, "fp32"), (3, "bf16")])
@on_each_rank(RANKS)
def test_a_write_after_the_last_gather_is_refused(rank, model, stage, precision):
    """Buckets of whole parameters are views of them, so that a late write is seen in values."""
    zero, own = (
        {"stage": stage, "stage3_module_granularity_threshold": 0},
        Plan(precision=precision),
    )
    engine = start(model, plain_sgd(model), config_of(stage, own, zero_optimization=zero))
    count = sum(1 for _ in engine.iter_weights("300B", None))
    assert count > 3
    for read in (count - 1, count):
        buckets = iter(engine.iter_weights("300B", None))
        for _ in range(read):
            next(buckets)
        run_steps(engine, rank, [0])
        with pytest.raises(PartitionError, match="weights were written while they are read"):
            next(buckets)
    found = sent(engine.iter_weights(dtype=None, changed_only=True))
    assert found.keys() == full_weights(engine).keys()


@on_each_rank(RANKS)
def test_a_write_to_a_bucket_is_refused(rank, model):
    """Where each rank has whole parameters, a bucket is their memory."""
    engine = start(model, plain_sgd(model), config_of(2))
    buckets = iter(engine.iter_weights("300B", None))
    next(buckets)[0][1].mul_(2)
    with pytest.raises(PartitionError, match=r"weights were written.*clone a tensor"):
        next(buckets)
    name, value = next(iter(engine.iter_weights(1 << 20, None)))[0]
    held = dict(model.named_parameters())[name]
    assert value.data_ptr() == held.data_ptr() and torch.equal(value, full_weights(engine)[name])


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"names": "vllm"}, "names='vllm'"),
    ({"adapters": "both"}, "adapters='both'"),
    ({"dtype": "int4"}, "dtype='int4'"),
    ({"dtype": torch.int8}, r"dtype=torch.int8.*floating-point"),
    ({"dtype": 16}, r"dtype=16.*floating-point"),
    ({"bucket": "much"}, "not a number of bytes"),
    ({"bucket": None}, "bucket=None"),
    ({"bucket": True}, "bucket=True"),
    ({"bucket": 0}, "bucket=0"),
]
DIFFERENT: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "bucket": ({"bucket": "1KiB"}, {"bucket": "2KiB"}),
    "dtype": ({"dtype": "bf16"}, {"dtype": "fp32"}),
    "names and adapters": ({"names": "model"}, {}),
    "rank0_only": ({"rank0_only": True}, {}),
    "changed_only": ({"changed_only": True}, {}),
}


@on_each_rank(RANKS)
def test_arguments_memory_of_two_buckets_and_the_end(rank, model):
    """Wrong arguments and those that differ are refused; ranks without buckets take part."""
    engine = start(model, None, config_of(3))
    for given, message in WRONG:
        with pytest.raises(ConfigError, match=message):
            engine.iter_weights(**given)
    for name, each in DIFFERENT.items():
        with pytest.raises(ConfigError, match=f"given {name} = .*on different ranks"):
            engine.iter_weights(**each[rank])
    found = [name for bucket in engine.iter_weights(rank0_only=True) for name, _ in bucket]
    assert sorted(found) == (sorted(n for n, _ in model.named_parameters()) if rank == 0 else [])
    places, limit = set(), 2000
    largest = max(flat.layout.padded * 4 for flat in engine.flats)
    for bucket in engine.iter_weights(limit, "fp32"):
        (memory,) = {value.untyped_storage().data_ptr() for _, value in bucket}
        assert bucket[0][1].untyped_storage().nbytes() <= max(limit, largest)
        places.add(memory)
    assert len(places) == 2
    stream = engine.iter_weights()
    assert sent(stream)
    engine.destroy()
    for use in (engine.iter_weights, lambda: list(stream)):
        with pytest.raises(PartitionError, match="destroyed"):
            use()


def jolted(model: Any) -> Any:
    """``model`` with other values of the parameters that train."""
    with torch.no_grad():
        for p in trainable(model):
            p.add_(torch.linspace(-0.2, 0.2, p.numel()).view_as(p))
    return model


def adapted(kind: str) -> Any:
    return jolted(seeded(lambda: peft.get_peft_model(llama(), KINDS[kind]())))


def on_tied(*whole: str) -> Any:
    """LoRA on a model with tied embeddings, of which the modules ``whole`` are saved whole."""
    lora = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=[*whole])
    return jolted(seeded(lambda: peft.get_peft_model(llama(tied=True), lora)))


MERGED = [
    *((adapted, (kind,), (0, 3)[turn % 2]) for turn, kind in enumerate(KINDS)),
    (on_tied, ("lm_head",), 3),
    (on_tied, ("lm_head", "embed_tokens"), 0),
]


@in_turn("build, given, stage", MERGED)
def test_adapters_are_merged_as_peft_merges_them(build, given, stage):
    """Copies of tied modules leave the other its weights."""
    want = values_of(build(*given).merge_and_unload())
    assert build is adapted or want.keys() > dict(llama(tied=True).named_parameters()).keys()

    def run(rank, model):
        before = values_of(model)
        engine = start(model, torch.optim.SGD(trainable(model), 0.1), config_of(stage))
        found = sent(engine.iter_weights("2KiB", "fp32"))
        assert found.keys() == want.keys()
        for name, value in found.items():
            assert torch.allclose(value, want[name], atol=1e-6), name
        for name, value in sent(engine.iter_weights(dtype=None, names="model")).items():
            assert torch.equal(value, before[name]), name

    on_ranks(RANKS, run, build=lambda: build(*given))


OF_WRAPPERS = r"base_model\.model\.|base_layer\.|original_module\."


@in_turn("kind", ["LoRA and a module saved whole", "LoRA on the embedding"])
def test_adapters_apart(kind):
    want = values_of(llama())
    files = peft.get_peft_model_state_dict(adapted(kind), save_embedding_layers=False)
    base = {
        re.sub(OF_WRAPPERS, "", name): p
        for name, p in values_of(adapted(kind)).items()
        if "lora" not in name and "modules_to_save" not in name
    }

    def run(rank, model):
        engine = start(model, torch.optim.SGD(trainable(model), 0.1), config_of(3))
        found = sent(engine.iter_weights(dtype=None, adapters="apart"))
        assert found.keys() == files.keys() | want.keys()
        for name, value in found.items():
            assert torch.equal(value, files[name] if name in files else base[name]), name

    on_ranks(RANKS, run, build=lambda: adapted(kind))


def test_disabled_adapters_are_not_merged():
    kind = "LoRA and a module saved whole"
    base = values_of(adapted(kind).unload())
    base["lm_head.weight"] = seeded(llama).lm_head.weight.detach()

    def run(rank, model):
        engine = start(model, torch.optim.SGD(trainable(model), 0.1), config_of(3))
        assert sent(engine.iter_weights(changed_only=True))
        with model.disable_adapter():
            found = sent(engine.iter_weights("2KiB", "fp32", changed_only=True))
        assert found.keys() == base.keys()
        assert all(torch.equal(value, base[name]) for name, value in found.items())
        assert sent(engine.iter_weights(changed_only=True)).keys() == base.keys()

    on_ranks(RANKS, run, build=lambda: adapted(kind))


def rescale(model: Any) -> None:
    for module in model.modules():
        if hasattr(module, "set_scale"):
            module.set_scale("default", 0.5)


def activate(model: Any) -> None:
    model.set_adapter("second")


def two_adapters() -> Any:
    model = adapted("LoRA")
    model.add_adapter("second", peft.LoraConfig(r=2, init_lora_weights=False))
    return model


@in_turn("stage, switch", [(0, activate), (3, rescale)])
@on_each_rank(RANKS, build=lambda: seeded(two_adapters))
def test_changes_alone_follow_the_active_adapters_and_the_form(rank, model, stage, switch):
    engine = start(model, torch.optim.SGD(trainable(model), 0.1), config_of(stage))
    assert sent(engine.iter_weights(changed_only=True))
    assert not sent(engine.iter_weights(changed_only=True))
    switch(model)
    found = sent(engine.iter_weights(changed_only=True))
    for name, value in sent(engine.iter_weights()).items():
        assert torch.equal(found[name], value), name
    for other in ({"adapters": "apart"}, {"dtype": "fp32"}, {"names": "model"}):
        assert sent(engine.iter_weights(changed_only=True, **other)), other


def with_prompts() -> Any:
    given = {"num_virtual_tokens": 2, "encoder_hidden_size": 4, "task_type": "CAUSAL_LM"}
    return seeded(lambda: peft.get_peft_model(llama(), peft.PromptEncoderConfig(**given)))


@on_each_rank(1, build=with_prompts)
def test_adapters_whose_file_is_computed_are_refused_apart(rank, model):
    engine = start(model, None, config_of(3))
    with pytest.raises(ConfigError, match="adapter 'default'"):
        engine.iter_weights(adapters="apart")
    assert sent(engine.iter_weights()).keys() == dict(llama().named_parameters()).keys()
