"""hf_zero_sparse in transformers' models: a dense layout is their own attention, a sparse one a
masked one; what it cannot be is refused.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as hf

from hf_zero.errors import ConfigError, KernelError
from hf_zero.integrations.fused.sparse_attention import (
    ATTRIBUTE,
    NAME,
    attend,
    extend_position_embedding,
    sparsify,
)
from hf_zero.ops.sparse_attention import (
    DenseSparsityConfig,
    FixedSparsityConfig,
    SparsityConfig,
)
from tests.helpers.cells import in_one_item
from tests.integrations.fused.animals import VOCABULARY, build, error, inputs, step

POSITIONS = {"gpt2": {"n_positions": 130}, "roberta": {"max_position_embeddings": 132}}
DENSE = {"mode": "dense"}


def made(name: str, **more: Any) -> Any:
    """Return a model of the zoo with 130 positions."""
    return build(name, **POSITIONS.get(name, {"max_position_embeddings": 130}), **more).eval()


def batch() -> dict[str, torch.Tensor]:
    made = inputs("bert", tokens=100, rows=2)
    made["attention_mask"][1, 70:] = 0
    made["labels"][1, 70:] = -100
    return made


def assert_equal(found: Any, right: Any) -> None:
    torch.testing.assert_close(found[0], right[0], atol=2e-6, rtol=1e-4)
    assert max(error(found[1], right[1]).values()) < 1e-5


@in_one_item(["bert", "distilbert", "gpt2", "llama"])
def test_a_dense_layout_is_the_models_own_attention(name: str) -> None:
    model = made(name)
    before, own = model.config._attn_implementation, step(model, batch())
    replacement = sparsify(model, DenseSparsityConfig(4, block=16))
    assert model.config._attn_implementation == NAME
    assert_equal(step(model, batch()), own)
    replacement.undo()
    replacement.undo()
    assert model.config._attn_implementation == before
    assert not any(hasattr(module, ATTRIBUTE) for module in model.modules())
    loss, grads = step(model, batch())
    assert torch.equal(loss, own[0])
    assert all(torch.equal(grad, own[1][key]) for key, grad in grads.items())


@in_one_item(["bert", "llama"])
def test_a_sparse_layout_is_masked_attention(name: str) -> None:
    model, given = made(name), batch()
    patterns = {"different_layout_per_head": True, "num_different_global_patterns": 2}
    config = FixedSparsityConfig(4, block=16, num_local_blocks=2, **patterns)
    mask = config.make_layout(112).bool().repeat_interleave(16, 1).repeat_interleave(16, 2)
    mask = mask[None, :, :100, :100] & given["attention_mask"].bool()[:, None, None, :]
    if name == "llama":
        mask = mask.tril()
    model.set_attn_implementation("eager")
    biases = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    masked = step(model, {**given, "attention_mask": biases})
    sparsify(model, config)
    assert_equal(step(model, given), masked)


def test_generation_decodes_densely_and_the_layout_of_a_model_without_one() -> None:
    """That is a BigBird one, of two blocks of 64: every pattern is whole."""
    model = made("gpt2")
    own, ids = model(**batch()).loss, batch()["input_ids"][:, :40]
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pad_token_id": 2}
    given |= {"max_new_tokens": 4, "do_sample": False}
    generated = model.generate(**given)
    replacement = sparsify(model, DenseSparsityConfig(4))
    assert torch.equal(model.generate(**given), generated)
    replacement.undo()
    model.set_attn_implementation(NAME)
    torch.testing.assert_close(model(**batch()).loss, own)


T5 = {"d_model": 32, "d_kv": 8, "num_heads": 4, "d_ff": 32, "num_layers": 1, "vocab_size": 60}
PACKED = torch.arange(100).remainder(50).expand(2, -1)
EIGHT_HEADS: SparsityConfig = FixedSparsityConfig(
    8, different_layout_per_head=True, num_different_global_patterns=2
)


def scores(**given: Any) -> None:
    q = torch.randn(1, 2, 16, 8)
    attend(torch.nn.Module(), q, q, q, None, **given)


def sparse_llama(**given: Any) -> None:
    model = made("llama")
    sparsify(model, DenseSparsityConfig(4))
    model(input_ids=batch()["input_ids"], use_cache=False, **given)


def without_positions() -> None:
    model = torch.nn.Linear(2, 2)
    model.config = SimpleNamespace(get_text_config=SimpleNamespace)  # type: ignore[assignment]
    extend_position_embedding(model, 10)


def sharded_table() -> None:
    model = made("bert")
    model.bert.embeddings.position_embeddings.weight.data = torch.empty(0)
    extend_position_embedding(model, 300)


REFUSED: dict[str, Any] = {
    "a model of transformers": lambda: sparsify(torch.nn.Linear(2, 2), DENSE),
    "computes attention itself": lambda: sparsify(made("deberta-v2"), DENSE),
    # T5 of Transformers 5.3 has no interface for attention.
    "relative position|T5EncoderModel computes": lambda: sparsify(
        hf.T5EncoderModel(hf.T5Config(**T5)), DENSE
    ),
    "soft-caps": lambda: sparsify(made("gemma2"), DENSE),
    "pass num_heads=4": lambda: sparsify(made("bert"), EIGHT_HEADS),
    "takes only padding": lambda: sparse_llama(attention_mask=torch.zeros(2, 1, 100, 100)),
    "packed sequences": lambda: sparse_llama(position_ids=PACKED),
    "soft-capped": lambda: scores(softcap=30.0),
    "bias by relative": lambda: scores(position_bias=torch.ones(1)),
    "sliding window of 3": lambda: scores(sliding_window=3),
    "nothing to extend": without_positions,
    r"before hf_zero\.initialize": sharded_table,
    "20, but the model has 130 positions": lambda: extend_position_embedding(made("gpt2"), 20),
    "21, but the model has 130 positions": lambda: extend_position_embedding(made("llama"), 21),
    "in a configuration; there": lambda: extend_position_embedding(torch.nn.Linear(2, 2), 9),
    "sparse_attention is 5; pass": lambda: sparsify(made("bert"), 5),  # type: ignore[arg-type]
}


@in_one_item(REFUSED)
def test_what_is_refused(said: str) -> None:
    with pytest.raises(KernelError, match=said):
        REFUSED[said]()


@in_one_item([0, -5, 2.5, None, "7B"])
def test_positions_are_counted(count: Any) -> None:
    with pytest.raises(ConfigError, match=f"max_position = {count!r} is not a number of positions"):
        extend_position_embedding(made("llama"), count)


@in_one_item(["roberta", "distilbert", "gpt2", "llama"])
def test_positions_are_extended(name: str) -> None:
    model = made(name)
    ids = torch.randint(3, 59, (1, 300))
    short = model(input_ids=ids[:, :130]).logits
    parameters = [id(p) for p in model.parameters()]
    assert extend_position_embedding(model, 300) is model
    assert [id(p) for p in model.parameters()] == parameters
    torch.testing.assert_close(model(input_ids=ids[:, :130]).logits, short)
    assert model(input_ids=ids).logits.shape == (1, 300, VOCABULARY)
    before = 2 * (name == "roberta")
    assert model.config.max_position_embeddings == 300 + before
    if name != "llama":
        ends = ("position_embeddings", "wpe")
        table = next(m.weight for n, m in model.named_modules() if n.endswith(ends))
        first, second = table[before:].split([130, len(table) - before - 130])
        assert torch.equal(second[:130], first)


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
        found = facade.SparseSelfAttention(config, mode)(
            q, k, v, key_padding_mask=mask[:, None, None]
        )
        torch.testing.assert_close(found, expected)
    with pytest.raises(KernelError, match="takes no rpe"):
        facade.SparseSelfAttention(config)(q, k, v, attn_mask=torch.ones(50, 50))
    with pytest.raises(KernelError, match="'both'"):
        facade.SparseSelfAttention(config, "both")

    model, utils = made("bert"), facade.SparseAttentionUtils
    replace = utils.replace_model_self_attention_with_sparse_self_attention
    assert replace(model, 200, config) is model and model.config._attn_implementation == NAME
    assert model(input_ids=torch.randint(3, 59, (1, 200))).logits.shape == (1, 200, VOCABULARY)
    tokenizer = SimpleNamespace(init_kwargs={})
    longer = utils.update_tokenizer_model_max_length(tokenizer, 200)
    assert longer.model_max_length == 200
    assert tokenizer.init_kwargs == {"model_max_length": 200}
