"""Pre-LN BERT with the parameters of a post-LN one: the formula, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForMaskedLM,
)

import hf_zero
from hf_zero.errors import KernelError
from hf_zero.integrations.fused import report
from hf_zero.integrations.fused.pre_layer_norm import plan
from hf_zero.integrations.fused.shells import calls
from tests.helpers.cells import in_one_item
from tests.integrations.fused.animals import BLOCKS, build, error, inputs, step


def pre(model: Any, kernels: Any = "off") -> Any:
    return hf_zero.optimize(model, kernels, pre_layer_norm=True)


def by_hand(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Return the last hidden states of a pre-LN encoder without dropout and padding, line by line
    from the paper.
    """
    base = model.roberta
    embeddings, heads = base.embeddings, base.config.num_attention_heads
    positions = torch.arange(2, 2 + ids.shape[1])
    x = embeddings.word_embeddings(ids) + embeddings.position_embeddings(positions)
    x = x + embeddings.token_type_embeddings.weight[0]
    for layer in base.encoder.layer:
        attention, output = layer.attention.self, layer.attention.output
        normed = output.LayerNorm(x)
        q, k, v = (
            f(normed).unflatten(-1, (heads, -1)).transpose(1, 2)
            for f in (attention.query, attention.key, attention.value)
        )
        found = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + output.dense(found)
        x = x + layer.output.dense(F.gelu(layer.intermediate.dense(layer.output.LayerNorm(x))))
    norm = embeddings.LayerNorm
    return F.layer_norm(x, x.shape[-1:], norm.weight, norm.bias, norm.eps)


def test_it_is_the_formula_with_and_without_kernels() -> None:
    """Every parameter is used, and none is new."""
    name = "roberta"  # whose positions start at 2
    batch, right = inputs(name), build(name)
    ids = batch["input_ids"][1:]
    model = pre(build(name))
    found = model.roberta(ids).last_hidden_state
    torch.testing.assert_close(found, by_hand(right, ids), rtol=1e-5, atol=1e-5)
    assert model.state_dict().keys() == right.state_dict().keys()
    right_loss, grads = step(model, batch)
    assert grads.keys() == dict(right.named_parameters()).keys()
    assert all(grad.norm() > 0 for grad in grads.values())
    loss, fused = step(pre(build(name), [*BLOCKS, "loss"]), batch)
    torch.testing.assert_close(loss, right_loss, rtol=1e-5, atol=0)
    assert max(error(fused, grads).values()) < 1e-5


@in_one_item(["bert", "deberta-v2", "distilbert"])
def test_no_name_of_a_class_matters(name: str) -> None:
    """A gradient reaches the embeddings through the sums alone: with branches of zero the encoder
    is the last norm of its input.
    """
    model = pre(build(name))
    assert {line.kernels for line in report(model).replaced} == {("pre_layer_norm",)}
    loss, grads = step(model, inputs(name))
    assert all(grad.norm() > 0 for key, grad in grads.items() if "norm" in key.lower())
    plain, _ = step(build(name), inputs(name))
    assert abs(float(loss - plain)) > 1e-3
    hf_zero.restore(model)
    assert torch.equal(step(model, inputs(name))[0], plain)


NOT_POST_LN = "does not end with a LayerNorm after a sum"
UNUSED = r"has a norm that a forward does not use, .*crossattention"


@in_one_item(
    [
        ("gpt2", {}, rf"transformer\.h\.0 \(GPT2Block\) {NOT_POST_LN}"),
        ("bert", {"is_decoder": True, "add_cross_attention": True}, UNUSED),
        ("bert", {"chunk_size_feed_forward": 4}, "pre_layer_norm: bert.encoder.layer.0"),
        ("vit", {}, NOT_POST_LN),
    ]
)
def test_what_is_refused(case: tuple[str, dict[str, Any], str]) -> None:
    name, options, message = case
    model = build(name, **options)
    with pytest.raises(KernelError, match=message):
        pre(model, BLOCKS)
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_an_encoder_and_a_decoder_are_refused() -> None:
    """The norm of the embeddings can be the last one of one stack alone."""
    config = BartConfig(
        vocab_size=16, d_model=8, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16,
        max_position_embeddings=16,
    )  # fmt: skip
    stacks = "BartForConditionalGeneration has several stacks of layers, model.decoder.layers, "
    with pytest.raises(KernelError, match=stacks):
        pre(BartForConditionalGeneration(config))


def test_a_model_without_layers_is_refused() -> None:
    with pytest.raises(KernelError, match="Linear has no layers that repeat; leave it out"):
        plan(nn.Linear(4, 4), [])


class ScaledNorm(nn.LayerNorm):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


class First(nn.Linear):
    """Reads the first of a tuple, or a tensor."""

    def forward(self, input: Any) -> torch.Tensor:
        return super().forward(input[0] if isinstance(input, tuple) else input)


class Block(nn.Module):
    def __init__(self, norm: type[nn.LayerNorm], in_tuple: bool) -> None:
        super().__init__()
        self.linear, self.norm, self.in_tuple = First(4, 4), norm(4), in_tuple

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.linear((x,) if self.in_tuple else x))


class Encoder(nn.Module):
    def __init__(
        self, embeddings: type[nn.LayerNorm], norm: type[nn.LayerNorm], in_tuple: bool
    ) -> None:
        super().__init__()
        self.norm = embeddings(4)
        self.layers = nn.ModuleList(Block(norm, in_tuple) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        for layer in self.layers:
            x = layer(x)
        return x


def planned(*settings: Any) -> Any:
    model = nn.Sequential(Encoder(*settings))
    with calls(model, outermost=False) as records:
        model(torch.zeros(1, 2, 4))
    return plan(model, records)


def test_norms_and_inputs_that_cannot_move_are_refused() -> None:
    """A subclass of LayerNorm may compute something else, and a hidden state in a tuple is no
    argument that a norm can replace.
    """
    assert planned(nn.LayerNorm, nn.LayerNorm, False).last == "0.norm"
    for settings, message in (
        ((nn.LayerNorm, nn.LayerNorm, True), "calls linear with hidden states inside a collection"),
        ((nn.LayerNorm, ScaledNorm, False), NOT_POST_LN),
        ((ScaledNorm, nn.LayerNorm, False), "has no LayerNorm of its embeddings"),
    ):
        with pytest.raises(KernelError, match=message):
            planned(*settings)


def test_a_model_of_few_positions() -> None:
    """Fewer than the tokens of the run that finds its sublayers."""
    config = BertConfig(
        vocab_size=16, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=16, max_position_embeddings=4,
    )  # fmt: skip
    model = pre(BertForMaskedLM(config))
    assert {line.kernels for line in report(model).replaced} == {("pre_layer_norm",)}


def test_a_decoder_that_keeps_keys_and_values() -> None:
    """A forward without the argument ``use_cache`` makes a cache of its own: the run that finds
    sublayers leaves none to their proof, and the configuration stays as it is.
    """
    model = pre(build("bert", is_decoder=True))
    assert model.config.use_cache and model.bert.config is model.config
    assert {line.kernels for line in report(model).replaced} == {("pre_layer_norm",)}
    loss, _ = step(model, inputs("bert"))
    without, _ = step(pre(build("bert", is_decoder=True, use_cache=False)), inputs("bert"))
    assert torch.equal(loss, without)
