"""Styles of tensor-parallel plans: the dimension of a parameter that a style cuts, and the mixin
that runs the layer. Names are those of transformers, so that its models' plans can be read
unchanged.

:data:`FAMILIES` are plans for model families without one in transformers: Megatron's placement
(arXiv 1909.08053, section 3), by the ends of module names. ``*`` is a number.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from hf_zero.errors import NotBuiltError
from hf_zero.parallel.tensor import layers
from hf_zero.parallel.tensor.layers import Sharded
from hf_zero.parallel.tensor.shared_inputs import is_conv1d

_BERT = {
    "embeddings.word_embeddings": "embedding_rowwise",
    "attention.self.query": "colwise",
    "attention.self.key": "colwise",
    "attention.self.value": "colwise",
    "attention.output.dense": "rowwise",
    "crossattention.self.query": "colwise",
    "crossattention.self.key": "colwise",
    "crossattention.self.value": "colwise",
    "crossattention.output.dense": "rowwise",
    "encoder.layer.*.intermediate.dense": "colwise",
    "encoder.layer.*.output.dense": "rowwise",
    "cls.predictions.decoder": "colwise_gather_output",
    "cls.predictions.bias": "colwise",
}
_ROBERTA = {
    **{name: style for name, style in _BERT.items() if not name.startswith("cls.")},
    "lm_head.decoder": "colwise_gather_output",
    "lm_head.bias": "colwise",
}
_GPT2 = {
    "wte": "embedding_rowwise",
    "h.*.attn.c_attn": "packed_colwise_3",
    "h.*.attn.c_proj": "rowwise",
    "h.*.crossattention.q_attn": "colwise",
    "h.*.crossattention.c_attn": "packed_colwise",
    "h.*.crossattention.c_proj": "rowwise",
    "h.*.mlp.c_fc": "colwise",
    "h.*.mlp.c_proj": "rowwise",
    "lm_head": "colwise_gather_output",
}
_T5 = {
    "shared": "embedding_rowwise",
    "encoder.embed_tokens": "embedding_rowwise",
    "decoder.embed_tokens": "embedding_rowwise",
    **{
        f"{attention}.{layer}": style
        for attention in ("SelfAttention", "EncDecAttention")
        for layer, style in (
            ("q", "colwise"),
            ("k", "colwise"),
            ("v", "colwise"),
            ("o", "rowwise"),
            ("relative_attention_bias", "embedding_of_heads"),
        )
    },
    "DenseReluDense.wi": "colwise",
    "DenseReluDense.wi_0": "colwise",
    "DenseReluDense.wi_1": "colwise",
    "DenseReluDense.wo": "rowwise",
    "lm_head": "colwise_gather_output",
}
_OPT = {
    "decoder.embed_tokens": "embedding_rowwise",
    "self_attn.q_proj": "colwise",
    "self_attn.k_proj": "colwise",
    "self_attn.v_proj": "colwise",
    "self_attn.out_proj": "rowwise",
    "decoder.layers.*.fc1": "colwise",
    "decoder.layers.*.fc2": "rowwise",
    "lm_head": "colwise_gather_output",
}
_VIT = {
    "attention.q_proj": "colwise",
    "attention.k_proj": "colwise",
    "attention.v_proj": "colwise",
    "attention.o_proj": "rowwise",
    "mlp.fc1": "colwise",
    "mlp.fc2": "rowwise",
}

# By config.model_type.
FAMILIES = {
    "bert": _BERT,
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "camembert": _ROBERTA,
    "gpt2": _GPT2,
    "t5": _T5,
    "mt5": _T5,
    "opt": _OPT,
    "vit": _VIT,
}

# Attributes of the parents of planned layers that count heads or their width: each is divided.
# A view by a whole count, (batch, -1, heads, width), would take two tokens for one, in silence.
COUNTS = (
    *("n_head", "n_heads", "num_heads", "num_attention_heads", "num_key_value_heads"),
    *("split_size", "inner_dim"),
)


@dataclass(frozen=True)
class LayerStyle:
    """``runs``: mixin before the layer's class; None: none. ``cuts``: "outputs", "inputs", "rows"
    or "columns" (of an embedding), or "". ``packed``: number of matrices side by side along the
    dimension that is cut. ``partial``: the gradients of the whole parameters are partial sums over
    the ranks. ``takes``: kind of layers that the style supports.
    """

    runs: type[Sharded] | None = None
    cuts: str = ""
    packed: int = 1
    partial: bool = False
    takes: str = "linear"


def packed(style: LayerStyle, matrices: int) -> LayerStyle:
    """Return ``style`` for a layer that holds ``matrices`` side by side."""
    return LayerStyle(style.runs, style.cuts, matrices, style.partial, style.takes)


COLWISE = LayerStyle(layers.Colwise, "outputs")
COLWISE_GATHERED = LayerStyle(layers.ColwiseGathered, "outputs")
KEY_VALUE_HEADS = LayerStyle(layers.KeyValueHeads, partial=True)
ROWWISE = LayerStyle(layers.Rowwise, "inputs")
ROWWISE_SPLIT = LayerStyle(layers.RowwiseSplit, "inputs")
EMBEDDING_COLWISE = LayerStyle(layers.EmbeddingColwise, "columns", takes="embedding")
WHOLE = LayerStyle(takes="any")

STYLES = {
    "colwise": COLWISE,
    "colwise_gather_output": COLWISE_GATHERED,
    "colwise_rep": COLWISE_GATHERED,
    "rowwise": ROWWISE,
    "rowwise_split_input": ROWWISE_SPLIT,
    "rowwise_rep": ROWWISE_SPLIT,
    "embedding_rowwise": LayerStyle(layers.EmbeddingRowwise, "rows", takes="embedding"),
    "embedding_colwise": EMBEDDING_COLWISE,
    # a bias of attention scores: a column for each head
    "embedding_of_heads": LayerStyle(None, "columns", takes="embedding"),
    "packed_colwise": packed(COLWISE, 2),
    "packed_colwise_3": packed(COLWISE, 3),
    "packed_rowwise": packed(ROWWISE, 2),
    "replicated_with_grad_allreduce": LayerStyle(None, partial=True, takes="any"),
    "moe_tp_experts": LayerStyle(layers.ExpertParts, takes="any"),
    "moe_identity_expert": LayerStyle(layers.Scaled, takes="any"),
    "mla_kv_a_proj": LayerStyle(layers.LatentKeyValue),
    "all_reduce": LayerStyle(layers.Summed, takes="any"),
    # all parameters are plain local tensors, so the next two styles are equal
    "local_params": WHOLE,
    "replicate": WHOLE,
}


def style_of(name: str, where: str) -> LayerStyle:
    """Return the style ``name`` of ``where`` in a plan. Raises NotBuiltError if unknown."""
    if name not in STYLES:
        raise NotBuiltError(
            f"the tensor-parallel plan gives {where} the style {name!r}, which is not built; give "
            f"it one of {', '.join(STYLES)} by hf_zero.tensor_parallel(model, size, "
            f"plan={{{where!r}: ...}}), or set tensor_parallel.autotp_size to 1"
        )
    return STYLES[name]


def takes(style: LayerStyle, module: nn.Module) -> bool:
    """Return whether ``style`` supports ``module``; also its subclasses, whose forward may scale or
    normalize inputs or outputs but is linear in its weight. Options of an embedding that read or
    change whole rows, or the counts of all tokens, are not supported.
    """
    if style.takes == "any" or style.runs is None:
        return True
    if style.takes == "embedding":
        return isinstance(module, nn.Embedding) and not (
            module.max_norm is not None or module.scale_grad_by_freq or module.sparse
        )
    plain = type(module).forward is nn.Linear.forward or is_conv1d(module)
    # with a bias, Rowwise computes the product itself and so bypasses a subclass's own forward
    if issubclass(style.runs, layers.Rowwise):
        return plain or (isinstance(module, nn.Linear) and module.bias is None)
    return plain or isinstance(module, nn.Linear)


def dimension(style: LayerStyle, module: nn.Module, name: str, dims: int) -> int | None:
    """Return the dimension, of ``dims``, along which a style cuts a parameter; None: whole."""
    if not style.cuts:
        return None
    if style.cuts in ("rows", "columns"):
        return 0 if style.cuts == "rows" else 1
    outputs, inputs = (dims - 2, dims - 1) if not is_conv1d(module) else (dims - 1, dims - 2)
    if dims == 1:  # a bias, or a number for each head
        return 0 if style.cuts == "outputs" else None
    return outputs if style.cuts == "outputs" else inputs
