"""Refusals under tensor parallelism, each with its message; heads whose weight other code reads."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch
import transformers
from trl.trainer.utils import add_fused_lm_head

import hf_zero
from hf_zero.errors import ConfigError, PartitionError
from tests.helpers.engines import config_of, start
from tests.helpers.models import seeded
from tests.helpers.ranks import RankFailed, run_ranks
from tests.helpers.tensor_parallel import VOCAB, llama, mixtral
from tests.helpers.training import plain_sgd
from tests.parallel.expert_cases import keys

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
    models = [seeded(mixtral) for _ in range(2)]
    bits = {"enabled": True, "quantize_bits": {"start_bits": 8, "target_bits": 8}}
    config = config_of(3, quantize_training=bits, **section)

    def run(rank):
        start(models[rank], plain_sgd(models[rank]), config)

    with pytest.raises(RankFailed, match=r"scales of rounded weights are those of whole") as raised:
        run_ranks(2, run)
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
    models = [seeded(llama) for _ in range(2)]

    def run(rank):
        start(models[rank], plain_sgd(models[rank]), config_of(1, **TP, **section))

    with pytest.raises(RankFailed, match=r"of which each tensor-parallel rank has a part"):
        run_ranks(2, run)


@pytest.mark.parametrize("section", (TP, keys(2)), ids=("tensor", "expert"))
def test_blocks_that_each_rank_leaves_out_by_itself(section):
    models = [seeded(mixtral) for _ in range(2)]
    config = config_of(1, progressive_layer_drop={"enabled": True, "per_rank": True}, **section)

    def run(rank):
        start(models[rank], plain_sgd(models[rank]), config)

    with pytest.raises(RankFailed, match=r"parallel ranks compute each block together") as raised:
        run_ranks(2, run)
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
    models = [seeded(lambda: llama(tied=tied)) for _ in range(2)]
    lora = peft.LoraConfig(r=2, target_modules=["q_proj"], trainable_token_indices=[1, 5])

    def run(rank):
        hf_zero.tensor_parallel(peft.get_peft_model(models[rank], lora), 2)  # type: ignore[arg-type]

    said = r"embed_tokens has an adapter .* leave the layer out of .*trainable_token_indices"
    with pytest.raises(RankFailed, match=said) as raised:
        run_ranks(2, run)
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
