"""hf_zero_sparse in transformers' models: a dense layout is their own attention, a sparse one a
masked one; what it cannot be is refused.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as hf

from hf_zero.errors import KernelError
from hf_zero.integrations.fused.positions import extend_position_embedding
from hf_zero.integrations.fused.sparse_attention import ATTRIBUTE, NAME, attend, sparsify
from hf_zero.ops.sparse_attention import (
    BigBirdSparsityConfig,
    DenseSparsityConfig,
    FixedSparsityConfig,
    SparsityConfig,
)

SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 32,
    "vocab_size": 60,
    "max_position_embeddings": 130,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2: dict[str, Any] = {
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "vocab_size": 60,
    "n_positions": 130,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODELS: dict[str, Any] = {
    "bert": lambda: hf.BertForMaskedLM(hf.BertConfig(**SMALL)),
    "roberta": lambda: hf.RobertaForMaskedLM(
        hf.RobertaConfig(**{**SMALL, "max_position_embeddings": 132, "pad_token_id": 1})
    ),
    "distilbert": lambda: hf.DistilBertForMaskedLM(
        hf.DistilBertConfig(
            dim=32, n_layers=2, n_heads=4, hidden_dim=32, vocab_size=60, max_position_embeddings=130
        )
    ),
    "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**GPT2)),
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SMALL, num_key_value_heads=2)),
    "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**SMALL, num_key_value_heads=2)),
}
CAUSAL = ("gpt2", "llama", "qwen3")


@pytest.fixture(autouse=True)
def by_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ZERO_TRITON", "0")


def batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 59, (2, 100))
    mask = torch.ones_like(ids)
    mask[1, 70:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def loss_and_gradients(model: Any, given: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    model.zero_grad()
    loss = model(**given).loss
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("name", MODELS)
def test_a_dense_layout_is_the_models_own_attention(name: str) -> None:
    model, given = MODELS[name]().eval(), batch()
    before, own = model.config._attn_implementation, loss_and_gradients(model, given)
    replacement = sparsify(model, DenseSparsityConfig(4, block=16))
    assert model.config._attn_implementation == NAME
    for ours, theirs in zip(loss_and_gradients(model, given), own, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=1e-4)
    replacement.undo()
    replacement.undo()
    assert model.config._attn_implementation == before
    assert not any(hasattr(module, ATTRIBUTE) for module in model.modules())
    for ours, theirs in zip(loss_and_gradients(model, given), own, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_a_sparse_layout_is_masked_attention(name: str) -> None:
    model, given = MODELS[name]().eval(), batch()
    config = FixedSparsityConfig(
        4,
        block=16,
        different_layout_per_head=True,
        num_local_blocks=2,
        num_different_global_patterns=2,
    )
    mask = (
        config.make_layout(112)
        .bool()
        .repeat_interleave(16, 1)
        .repeat_interleave(16, 2)[None, :, :100, :100]
    )
    mask = mask & given["attention_mask"].bool()[:, None, None, :]
    if name in CAUSAL:
        mask = mask.tril()
    model.set_attn_implementation("eager")
    biases = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    masked = loss_and_gradients(model, {**given, "attention_mask": biases})
    sparsify(model, config)
    for ours, theirs in zip(loss_and_gradients(model, given), masked, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=1e-4)


def test_dropout_of_attention_trains_and_replays() -> None:
    model, given = MODELS["bert"]().train(), batch()
    sparsify(model, {"mode": "bigbird", "block": 16})
    losses = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        losses.append(loss_and_gradients(model, given))
    assert all(torch.equal(a, b) for a, b in zip(losses[0], losses[1]))
    assert not torch.equal(losses[0][0], losses[2][0])
    model.gradient_checkpointing_enable()
    torch.manual_seed(1)
    for ours, plain in zip(loss_and_gradients(model, given), losses[0], strict=True):
        torch.testing.assert_close(ours, plain)


def test_without_a_layout_of_its_own_a_model_gets_a_bigbird_one() -> None:
    model, given = MODELS["llama"]().eval(), batch()
    own = model(**given).loss
    sparsify(model, DenseSparsityConfig(4)).undo()
    model.set_attn_implementation(NAME)
    torch.testing.assert_close(
        model(**given).loss, own, msg="two blocks of 64: every pattern is whole"
    )


def test_generation_decodes_densely() -> None:
    model = MODELS["gpt2"]().eval()
    ids = batch()["input_ids"][:, :40]
    given = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "max_new_tokens": 4,
        "do_sample": False,
        "pad_token_id": 2,
    }
    own = model.generate(**given)
    sparsify(model, DenseSparsityConfig(4))
    assert torch.equal(model.generate(**given), own)


def test_blocks_compile_whole() -> None:
    model, given = MODELS["llama"]().eval(), batch()
    sparsify(model, BigBirdSparsityConfig(4, 16, attention="unidirectional"))
    own = model(**given).loss
    for layer in model.model.layers:
        layer.compile(fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(model(**given).loss, own)


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda: torch.nn.Linear(2, 2), "a model of transformers"),
        (lambda: hf.DebertaV2Model(hf.DebertaV2Config(**SMALL)), "computes attention itself"),
        (
            lambda: hf.T5EncoderModel(
                hf.T5Config(d_model=32, d_kv=8, num_heads=4, d_ff=32, num_layers=1, vocab_size=60)
            ),
            "relative position",
        ),
        (
            lambda: hf.Gemma2Model(hf.Gemma2Config(**SMALL, num_key_value_heads=2, head_dim=8)),
            "soft-caps",
        ),
    ],
)
def test_models_it_is_not_for_are_refused(made: Any, said: str) -> None:
    with pytest.raises(KernelError, match=said):
        sparsify(made(), {"mode": "dense"})


def test_a_layout_for_other_heads_is_refused() -> None:
    config: SparsityConfig = FixedSparsityConfig(
        8, different_layout_per_head=True, num_different_global_patterns=2
    )
    with pytest.raises(KernelError, match="pass num_heads=4"):
        sparsify(MODELS["bert"](), config)


def test_masks_that_padding_cannot_say_are_refused() -> None:
    model, given = MODELS["llama"]().eval(), batch()
    sparsify(model, DenseSparsityConfig(4))
    with pytest.raises(KernelError, match="takes only padding"):
        model(input_ids=given["input_ids"], attention_mask=torch.zeros(2, 1, 100, 100))
    packed = torch.arange(100).remainder(50).expand(2, -1)
    with pytest.raises(KernelError, match="packed sequences"):
        model(input_ids=given["input_ids"], position_ids=packed, use_cache=False)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"softcap": 30.0}, "soft-capped"),
        ({"position_bias": torch.ones(1)}, "bias by relative"),
        ({"sliding_window": 3}, "sliding window of 3"),
    ],
)
def test_scores_it_does_not_know_are_refused(given: dict[str, Any], said: str) -> None:
    q = torch.randn(1, 2, 16, 8)
    with pytest.raises(KernelError, match=said):
        attend(torch.nn.Module(), q, q, q, None, **given)


@pytest.mark.parametrize("name", ["bert", "roberta", "distilbert", "gpt2", "llama"])
def test_positions_are_extended(name: str) -> None:
    model = MODELS[name]().eval()
    ids = torch.randint(3, 59, (1, 300))
    short = model(input_ids=ids[:, :130]).logits
    parameters = [id(p) for p in model.parameters()]
    assert extend_position_embedding(model, 300) is model
    assert [id(p) for p in model.parameters()] == parameters
    torch.testing.assert_close(model(input_ids=ids[:, :130]).logits, short)
    assert model(input_ids=ids).logits.shape == (1, 300, 60)
    assert model.config.max_position_embeddings == 300 + 2 * (name == "roberta")
    if name != "llama":
        table = next(
            m for n, m in model.named_modules() if n.endswith(("position_embeddings", "wpe"))
        )
        before = 2 * (name == "roberta")
        assert torch.equal(
            table.weight[before + 130 : before + 260], table.weight[before : before + 130]
        )
        with pytest.raises(KernelError, match="positions already"):
            extend_position_embedding(model, 20)


def test_a_model_without_positions_is_told_so() -> None:
    model = torch.nn.Linear(2, 2)
    model.config = SimpleNamespace(get_text_config=SimpleNamespace)  # type: ignore[assignment]
    with pytest.raises(KernelError, match="nothing to extend"):
        extend_position_embedding(model, 10)


def test_a_sharded_table_is_refused() -> None:
    model = MODELS["bert"]()
    model.bert.embeddings.position_embeddings.weight.data = torch.empty(0)
    with pytest.raises(KernelError, match=r"before hf_zero\.initialize"):
        extend_position_embedding(model, 300)


def test_deepspeeds_module_and_helpers() -> None:
    from deepspeed.ops import sparse_attention as facade

    q, k, v = (torch.randn(2, 4, 50, 8) for _ in range(3))
    keep = torch.ones(2, 50)
    keep[1, 30:] = 0
    expected = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=keep.bool()[:, None, None, :]
    )
    config = facade.DenseSparsityConfig(num_heads=4)
    for mode, mask in (("mul", keep), ("add", (1 - keep) * -10_000.0)):
        torch.testing.assert_close(
            facade.SparseSelfAttention(config, mode)(q, k, v, key_padding_mask=mask[:, None, None]),
            expected,
        )
    with pytest.raises(KernelError, match="takes no rpe"):
        facade.SparseSelfAttention(config)(q, k, v, attn_mask=torch.ones(50, 50))
    with pytest.raises(KernelError, match="'both'"):
        facade.SparseSelfAttention(config, "both")

    model = MODELS["bert"]().eval()
    replaced = facade.SparseAttentionUtils.replace_model_self_attention_with_sparse_self_attention(
        model, 200, config
    )
    assert replaced is model and model.config._attn_implementation == NAME
    assert model(input_ids=torch.randint(3, 59, (1, 200))).logits.shape == (1, 200, 60)
    tokenizer = SimpleNamespace(init_kwargs={})
    assert (
        facade.SparseAttentionUtils.update_tokenizer_model_max_length(
            tokenizer, 200
        ).model_max_length
        == 200
    )
    assert tokenizer.init_kwargs == {"model_max_length": 200}
