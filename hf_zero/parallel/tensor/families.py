"""Tensor-parallel plans for model families without one in transformers: Megatron's placement (arXiv
1909.08053, section 3), by the ends of module names. ``*`` is a number.
"""

from __future__ import annotations

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
    "vit": _VIT,
}

# Attributes of the parents of planned layers that count heads or their width: each is divided.
COUNTS = ("split_size", "n_heads", "inner_dim")
