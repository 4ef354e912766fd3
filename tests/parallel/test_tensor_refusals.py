"""Refusals under tensor parallelism, each with its message; heads whose weight other code reads;
``tensor_parallel.verify``, silent where a plan fits the model.
"""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch
import transformers
from torch import nn
from trl.trainer.utils import add_fused_lm_head

import hf_zero
from hf_zero.errors import ConfigError, DoesNotFitError, PartitionError, VerificationError
from hf_zero.parallel.tensor import verification
from hf_zero.parallel.tensor.layers import Rowwise
from hf_zero.zero.layout.sharding import Sharding, set_sharding
from tests.helpers.causal_zoo import batch_of, by_model_type, tiny
from tests.helpers.engines import config_of, start
from tests.helpers.models import seeded
from tests.helpers.ranks import RankFailed, run_ranks
from tests.helpers.stacks import on_ranks
from tests.helpers.tensor_parallel import VOCAB, gpt2, llama, mixtral, qwen3
from tests.helpers.training import plain_sgd
from tests.parallel.expert_cases import keys
from tests.parallel.test_tensor_placements import REFUSED

TP: dict[str, Any] = {"tensor_parallel": {"autotp_size": 2}}


@pytest.mark.parametrize("tied", (False, True))
def test_a_vocabulary_in_parts_keeps_its_size(tied):
    models = [seeded(lambda: llama(tied=tied)) for _ in range(2)]

    def run(rank):
        model = hf_zero.tensor_parallel(models[rank], 2)
        embeddings: Any = model.get_input_embeddings()
        for asked in ({"new_num_tokens": VOCAB}, {"pad_to_multiple_of": 2}, {}):
            assert model.resize_token_embeddings(**asked) is embeddings
        for asked in ({"new_num_tokens": VOCAB + 2}, {"pad_to_multiple_of": 64}):
            with pytest.raises(PartitionError, match="resize the whole model before it is cut"):
                model.resize_token_embeddings(**asked)
        assert embeddings.weight.shape[0] == VOCAB // 2

    run_ranks(2, run)


@pytest.mark.parametrize("section", (TP, keys(2)), ids=("tensor", "expert"))
def test_scales_of_weights_in_few_bits_are_of_whole_tensors(section):
    bits = {"enabled": True, "quantize_bits": {"start_bits": 8, "target_bits": 8}}
    config = config_of(3, quantize_training=bits, **section)

    def run(rank, model):
        start(model, plain_sgd(model), config)

    with pytest.raises(RankFailed, match=r"scales of rounded weights are those of whole") as raised:
        on_ranks(2, run, build=lambda: seeded(mixtral))
    assert isinstance(raised.value.__cause__, ConfigError)


@pytest.mark.parametrize(
    "section",
    (
        {"quantization_aware_training": {"config": "int8_weight"}},
        {"float8_training": {"recipe": "tensorwise"}},
    ),
    ids=("aware", "float8"),
)
def test_layers_of_torchao(section):

    def run(rank, model):
        start(model, plain_sgd(model), config_of(1, **TP, **section))

    with pytest.raises(RankFailed, match=r"of which each tensor-parallel rank has a part"):
        on_ranks(2, run, build=lambda: seeded(llama))


@pytest.mark.parametrize("section", (TP, keys(2)), ids=("tensor", "expert"))
def test_blocks_that_each_rank_leaves_out_by_itself(section):
    config = config_of(1, progressive_layer_drop={"enabled": True, "per_rank": True}, **section)

    def run(rank, model):
        start(model, plain_sgd(model), config)

    with pytest.raises(RankFailed, match=r"parallel ranks compute each block together") as raised:
        on_ranks(2, run, build=lambda: seeded(mixtral))
    assert isinstance(raised.value.__cause__, ConfigError)


@pytest.mark.parametrize("before", (False, True), ids=("cut first", "adapted first"))
@pytest.mark.parametrize(
    "section, said",
    ((TP, r"leave the layer out of .*target_parameters"), (keys(2), r"experts out of target_para")),
    ids=("tensor", "expert"),
)
def test_adapters_of_the_parameters_of_experts(section, said, before):
    models = [seeded(mixtral) for _ in range(2)]
    cut = hf_zero.tensor_parallel if section is TP else hf_zero.expert_parallel
    lora = peft.LoraConfig(r=2, target_parameters=["mlp.experts.down_proj"], target_modules=[])

    def run(rank):
        model: Any = models[rank] if before else cut(models[rank], 2)
        adapted = peft.get_peft_model(model, lora)  # type: ignore[arg-type]
        start(adapted, plain_sgd(adapted), config_of(1, **section if before else {}))

    with pytest.raises(RankFailed, match=said) as raised:
        run_ranks(2, run)
    assert isinstance(raised.value.__cause__, ConfigError)


@pytest.mark.parametrize("tied", (False, True))
def test_tokens_that_train_in_an_adapter(tied):
    """PEFT keeps the layer under the name of what ``modules_to_save`` keeps."""
    lora = peft.LoraConfig(r=2, target_modules=["q_proj"], trainable_token_indices=[1, 5])

    def run(rank, model):
        hf_zero.tensor_parallel(peft.get_peft_model(model, lora), 2)  # type: ignore[arg-type]

    said = r"embed_tokens has an adapter .* leave the layer out of .*trainable_token_indices"
    with pytest.raises(RankFailed, match=said) as raised:
        on_ranks(2, run, build=lambda: seeded(lambda: llama(tied=tied)))
    assert isinstance(raised.value.__cause__, ConfigError)


@pytest.mark.parametrize("tied", (False, True))
def test_a_head_whose_weight_trl_reads(tied):
    models = [seeded(lambda: llama(tied=tied)) for _ in range(3)]
    ids = torch.randint(3, VOCAB, (2, 9), generator=torch.Generator().manual_seed(1))

    def loss_of(model):
        return model(input_ids=ids, labels=ids, fused_lm_head=True).loss  # type: ignore[no-any-return]

    for model in models:
        add_fused_lm_head(model)
    whole: Any = models[2]
    loss_of(whole).backward()

    def run(rank):
        model: Any = hf_zero.tensor_parallel(models[rank], 2)
        loss = loss_of(model)
        loss.backward()
        torch.testing.assert_close(loss, loss_of(whole))
        torch.testing.assert_close(model.lm_head.weight.grad, whole.lm_head.weight.grad)

    run_ranks(2, run)


@pytest.mark.turns
@pytest.mark.parametrize("stage", (0, 1, 2, 3))
@pytest.mark.parametrize("tied", (False, True))
def test_a_head_that_was_cut_before_trl_reads_its_weight(tied, stage):
    """The model is loaded under the configuration like TRL's reference model; here it
    trains, too.
    """
    models = [seeded(lambda: llama(tied=tied)) for _ in range(3)]
    draw = torch.Generator().manual_seed(1)
    batches = [torch.randint(3, VOCAB, (2, 9), generator=draw) for _ in range(3)]

    def losses(model, train):
        found = []
        for ids in batches:
            given = {"input_ids": ids, "labels": ids}
            for more in ({"fused_lm_head": True}, {}):
                loss = model(**given, **more).loss
                found.append(float(loss.detach()))
                train(loss)
        return found

    plain: Any = models[2]
    add_fused_lm_head(plain)
    optimizer = plain_sgd(plain)

    def train(loss):
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    want = losses(plain, train)

    def run(rank):
        model: Any = hf_zero.tensor_parallel(models[rank], 2)
        add_fused_lm_head(model)
        engine = start(model, plain_sgd(model), config_of(stage, **TP))

        def train(loss):
            engine.backward(loss)
            engine.step()

        return losses(engine, train)

    for found in run_ranks(2, run):
        assert found == pytest.approx(want, rel=1e-5)


def test_a_class_in_place_of_a_model():
    with pytest.raises(ConfigError, match=r"got LlamaForCausalLM, .* pass the model itself"):
        hf_zero.tensor_parallel(transformers.LlamaForCausalLM, 2)  # type: ignore[arg-type]


VERIFIED_TP: dict[str, Any] = {"tensor_parallel": {"autotp_size": 2, "verify": True}}


def _train(model_of, prepare=lambda model: None, steps=2, **config):
    """Steps on two ranks that share a model; what the comparisons said."""
    models = [seeded(model_of) for _ in range(2)]
    said: list[str] = []
    written = config_of(config.pop("stage", 1), **{**VERIFIED_TP, **config})

    def run(rank):
        model: Any = models[rank]
        engine = start(model, plain_sgd(model), written)
        prepare(model)
        for step in range(steps):
            engine.backward(engine(**batch_of(seed=step)).loss)
            engine.step()
        engine.destroy()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verification, "log_rank0", said.append)
        run_ranks(2, run)
    return said


@pytest.mark.parametrize("make", (llama, qwen3, gpt2), ids=("llama", "qwen3", "gpt2"))
@pytest.mark.parametrize("stage", (0, 1, 2, 3))
def test_a_model_that_is_right(make, stage):
    said = _train(make, stage=stage)
    assert len(said) == 2  # one of each rank, once
    assert "are those of the whole model, on 2 ranks" in said[0]


@pytest.mark.parametrize(
    "more",
    (
        {"bf16": {"enabled": True}},
        {"gradient_accumulation_steps": 2},
        {"activation_checkpointing": {"blocks": True}},
    ),
    ids=("bf16", "accumulation", "recomputed"),
)
def test_with_other_sections(more):
    assert len(_train(llama, stage=3, **more)) == 2


def _loses_a_sum(model):
    for layer in model.model.layers:
        set_sharding(layer.self_attn.q_norm.weight, Sharding())


def _doubles(model):
    down = model.model.layers[1].mlp.down_proj
    assert isinstance(down, Rowwise)
    down.register_forward_hook(lambda module, args, output: 2 * output)


def _doubles_a_gradient(model):
    model.model.norm.weight.register_hook(lambda gradient: 2 * gradient)


@pytest.mark.parametrize(
    ("prepare", "words"),
    (
        (_loses_a_sum, r"gradients differ .*q_norm.weight \(off by"),
        (_doubles, r"outputs differ .*output 0"),
        (_doubles_a_gradient, r"1 of \d+ gradients differ .*model.norm.weight"),
    ),
)
def test_what_differs(prepare, words):
    with pytest.raises(RankFailed, match=words) as raised:
        _train(qwen3, prepare)
    assert isinstance(raised.value.__cause__, VerificationError)


@pytest.mark.parametrize(
    ("make", "more", "words"),
    (
        (lambda: gpt2(dropout=0.1), {}, r"the model draws some \(dropout\)"),
        (llama, {"sequence_parallel_size": 2}, r"verify with sequence_parallel_size = 1"),
        (mixtral, {"expert_parallel": {"enabled": True, "autoep_size": 2}}, r"autoep_size = 1"),
    ),
    ids=("dropout", "sequence", "expert"),
)
def test_refused(make, more, words):

    def run(rank, model):
        start(model, plain_sgd(model), config_of(1, **VERIFIED_TP, **more))

    with pytest.raises(RankFailed, match=words) as raised:
        on_ranks(4, run, build=lambda: seeded(make))
    assert isinstance(raised.value.__cause__, ConfigError)


def test_a_model_that_was_cut_before():
    models = [seeded(llama) for _ in range(2)]

    def run(rank):
        model = hf_zero.tensor_parallel(models[rank], 2)
        start(model, plain_sgd(model), config_of(1, **VERIFIED_TP))

    with pytest.raises(RankFailed, match=r"pass verify=True to the call") as raised:
        run_ranks(2, run)
    assert isinstance(raised.value.__cause__, ConfigError)


def test_adapters_that_came_between():
    from peft import LoraConfig, get_peft_model

    models = [seeded(llama) for _ in range(2)]

    def run(rank):
        model = hf_zero.tensor_parallel(models[rank], 2, verify=True)
        adapted: nn.Module = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
        adapted.train()(**batch_of())

    with pytest.raises(RankFailed, match=r"add adapters before the model is cut") as raised:
        run_ranks(2, run)
    assert isinstance(raised.value.__cause__, ConfigError)


def test_a_whole_model_that_does_not_fit(monkeypatch):
    monkeypatch.setattr(verification, "free_bytes", lambda device: 1000)
    with pytest.raises(RankFailed, match=r"verify a smaller model") as raised:
        _train(llama)
    assert isinstance(raised.value.__cause__, DoesNotFitError)


pytest_generate_tests = by_model_type((), without=REFUSED, with_plan=True)


@pytest.mark.long
def test_every_model_type_that_has_a_plan(model_type):
    assert len(_train(lambda: tiny(model_type), steps=1, stage=2)) == 2
