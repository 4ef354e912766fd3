"""``attn_implementation="hf_zero_sparse"``: block-sparse attention in unmodified models of
transformers; longer inputs for models with learned positions.

An attention function and a mask function are registered under that name, as transformers provides
for. The mask stays the [batch, keys] of padding, so no tensor of sequence × sequence is ever made.
The block layout is an attribute of each attention module, set by :func:`sparsify`; modules without
it use a BigBird-like pattern of blocks of 64.

Calls that a layout does not cover are dense: decoding with a cache (fewer queries than keys) and
cross-attention use ``sdpa``. Features that change the scores in a way the kernels do not support
raise KernelError: packed sequences, four-dimensional masks, sliding windows shorter than the
sequence, soft-capping, biases by position, attention sinks.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from hf_zero.distributed.parallel_dims import check_size
from hf_zero.errors import KernelError
from hf_zero.integrations.fused.replacement import Replacement
from hf_zero.ops.sparse_attention import (
    BigBirdSparsityConfig,
    SparsityConfig,
    from_section,
    sparse_attention,
)
from hf_zero.zero.transaction import on_rollback

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

M = TypeVar("M", bound="PreTrainedModel")
NAME = "hf_zero_sparse"
ATTRIBUTE = "hf_zero_sparsity"
_registering = threading.Lock()
_registered: Counter[str] = Counter()  # calls that have registered a name and are not undone
# arguments of attention functions that have no parts
REFUSED = {
    "softcap": "soft-capped scores",
    "position_bias": "a bias by relative position",
    "cache": "a paged cache",
}
# A layout of one head applies to any number of heads.
_BIDIRECTIONAL = BigBirdSparsityConfig(1, block=64, num_random_blocks=3)
_UNIDIRECTIONAL = BigBirdSparsityConfig(
    1, block=64, num_random_blocks=3, attention="unidirectional"
)


def register() -> None:
    """Register the implementation with transformers. Idempotent."""
    register_attention(NAME, attend, padding_mask)


def register_attention(
    name: str, function: Callable[..., object], mask: Callable[..., object]
) -> None:
    """Register an attention function and its mask function with transformers under ``name``. Undone
    with the transaction under way, unless another call has registered the name, too.
    """
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    with _registering:
        known = name in AttentionInterface._global_mapping
        _registered[name] = 1 + (_registered[name] if known else 0)
        AttentionInterface.register(name, function)
        AttentionMaskInterface.register(name, mask)
    on_rollback(_unregister, name)


def _unregister(name: str) -> None:
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    with _registering:
        _registered[name] -= 1
        if not _registered[name]:
            for interface in (AttentionInterface, AttentionMaskInterface):
                interface._global_mapping.pop(name, None)


def implementations_of(models: Iterable[PreTrainedModel]) -> list[tuple[PreTrainedConfig, str]]:
    """Return the configurations of ``models`` with the names of their attention."""
    return [*{id(m.config): (m.config, m.config._attn_implementation) for m in models}.values()]


def set_implementations(before: Iterable[tuple[PreTrainedConfig, str]]) -> None:
    """Set the attention of :func:`implementations_of` again."""
    for config, implementation in before:
        config._attn_implementation_internal = implementation


def sparsify(
    model: nn.Module, sparse_attention: SparsityConfig | Mapping[str, object]
) -> Replacement:
    """Set block-sparse attention for every self-attention of ``model``; the returned replacement
    undoes it.

    Args:
        model: a model of transformers whose attention goes through its AttentionInterface.
        sparse_attention: a SparsityConfig, or DeepSpeed's section ``{"mode": "bigbird", "block":
            64, …}``.

    Raises:
        KernelError: a model whose attention cannot be exchanged, or has biases by position.
        ConfigError: a section with an unknown key, mode or value.
    """
    from transformers import PreTrainedModel

    owner, layout = layout_of(model, sparse_attention)
    register()
    before = implementations_of(m for m in owner.modules() if isinstance(m, PreTrainedModel))
    marked = [module for module in owner.modules() if "Attention" in type(module).__name__]
    for module in marked:
        setattr(module, ATTRIBUTE, layout)
    owner.set_attn_implementation(NAME)

    def undo() -> None:
        set_implementations(before)
        for module in marked:
            module.__dict__.pop(ATTRIBUTE, None)

    return Replacement(NAME, "", undo)


def layout_of(
    model: nn.Module, sparse_attention: SparsityConfig | Mapping[str, object]
) -> tuple[PreTrainedModel, SparsityConfig]:
    """Return the model of transformers in ``model`` and the layout of its attention. Raises as
    :func:`sparsify`, and changes nothing.
    """
    from transformers import PreTrainedModel

    # also inside a model of PEFT
    owner = next(
        (module for module in model.modules() if isinstance(module, PreTrainedModel)), None
    )
    if owner is None:
        raise KernelError(
            f"sparse_attention needs a model of transformers, not {type(model).__name__}; call "
            "sparse_attention in its forward"
        )
    _refuse_model(owner)
    heads = getattr(owner.config.get_text_config(), "num_attention_heads", None)
    if not isinstance(sparse_attention, SparsityConfig):
        if not isinstance(sparse_attention, Mapping):
            raise KernelError(
                f"sparse_attention is {sparse_attention!r:.60}; pass a SparsityConfig, or a "
                'section such as {"mode": "bigbird"}'
            )
        if heads is None:
            raise KernelError(
                f"{type(owner).__name__}'s config names no num_attention_heads; "
                "pass a SparsityConfig"
            )
        sparse_attention = from_section(sparse_attention, heads)
    if heads is not None and sparse_attention.num_layout_heads not in (1, heads):
        raise KernelError(
            f"the layout has {sparse_attention.num_heads} heads, but {type(owner).__name__} has "
            f"{heads}; pass num_heads={heads}"
        )
    return owner, sparse_attention


def _refuse_model(model: PreTrainedModel) -> None:
    name, config = type(model).__name__, model.config.get_text_config()
    if not model._can_set_attn_implementation() or config.model_type in ("deberta", "deberta-v2"):
        raise KernelError(
            f"{name} computes attention itself and would ignore {NAME}; block-sparse attention "
            "is not for this model"
        )
    if getattr(config, "relative_attention_num_buckets", None):
        raise KernelError(
            f"{name} adds a bias by relative position to its scores, which block-sparse "
            "attention does not have"
        )
    if getattr(config, "attn_logit_softcapping", None):
        raise KernelError(
            f"{name} soft-caps its scores (attn_logit_softcapping); set it to None for "
            "block-sparse attention"
        )


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention function for transformers' AttentionInterface: query [B, H, S, D], key and value
    [B, Hkv, S, D] to [B, S, H, D]. Raises KernelError for features that the kernels do not support.
    """
    for name, what in {**REFUSED, "s_aux": "attention sinks"}.items():
        if kwargs.get(name) is not None:
            raise KernelError(
                f"{type(module).__name__} asks for {what} ({name}), which {NAME} does not have; "
                "use sdpa or eager for it"
            )
    if query.shape[2] != key.shape[2] or _crosses(module):
        options = {"dropout": dropout, "scaling": scaling, "is_causal": is_causal, **kwargs}
        return _dense(module, query, key, value, attention_mask, options)
    window = kwargs.get("sliding_window")
    if window is not None and window < key.shape[2]:
        raise KernelError(
            f"{type(module).__name__} has a sliding window of {window} in {key.shape[2]} tokens, "
            f"which {NAME} does not combine with a layout; set config.sliding_window to None, or "
            "use a LocalSlidingWindowSparsityConfig in its place"
        )
    if attention_mask is not None and attention_mask.dim() != 2:
        raise KernelError(
            f"{NAME} was given a mask of shape {list(attention_mask.shape)}; it takes only padding "
            "of [batch, keys]: pass a 2-D attention_mask to the model, and other masks as a layout"
        )
    causal = getattr(module, "is_causal", False) if is_causal is None else is_causal
    causal = (
        bool(causal) and getattr(getattr(module, "config", None), "is_causal", True) is not False
    )
    config = getattr(module, ATTRIBUTE, None)
    if config is None:
        config = _UNIDIRECTIONAL if causal else _BIDIRECTIONAL
    out = sparse_attention(
        query,
        key,
        value,
        config,
        causal=causal or config.attention == "unidirectional",
        key_padding_mask=attention_mask,
        scale=scaling,
        dropout=dropout,
    )
    return out.transpose(1, 2), None


def _crosses(module: nn.Module) -> bool:
    return bool(getattr(module, "is_cross_attention", False)) or "Cross" in type(module).__name__


def _dense(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    options: dict[str, Any],
) -> tuple[torch.Tensor, None]:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if attention_mask is not None and attention_mask.dim() == 2:
        attention_mask = attention_mask.to(torch.bool)[:, None, None, :]
    out: tuple[torch.Tensor, None] = sdpa_attention_forward(
        module, query, key, value, attention_mask, **options
    )
    return out


def padding_mask(
    batch_size: int,
    kv_length: int,
    q_length: int | None = None,
    kv_offset: int = 0,
    mask_function: Callable[..., object] | None = None,
    attention_mask: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor | None:
    """Mask function for transformers' AttentionMaskInterface: return the padding [B, keys]
    unchanged, or sdpa's mask if there are fewer queries than keys.

    Transformers before 5.4 gives ``cache_position`` [queries] in place of ``q_length`` and
    ``q_offset``.
    """
    from transformers.masking_utils import (
        bidirectional_mask_function,
        causal_mask_function,
        sdpa_mask,
    )

    queries = len(kwargs["cache_position"]) if q_length is None else q_length
    if queries != kv_length:
        if q_length is not None:
            kwargs["q_length"] = q_length
        if mask_function is not None:
            kwargs["mask_function"] = mask_function
        mask: torch.Tensor | None = sdpa_mask(
            batch_size=batch_size, kv_length=kv_length, kv_offset=kv_offset,
            attention_mask=attention_mask, **kwargs,
        )  # fmt: skip
        return mask
    if mask_function not in (None, causal_mask_function, bidirectional_mask_function):
        raise KernelError(
            f"{NAME} knows causal and bidirectional attention with padding; this model or batch "
            "asks for another mask (packed sequences in position_ids, a sliding window, image "
            "tokens). Pass attention_mask so that position_ids are not taken for packed sequences, "
            "set config.sliding_window to None, and outside torch.compile make the masks before "
            "the compiled blocks"
        )
    return attention_mask


_TABLES = ("position_embeddings", "wpe")


def extend_position_embedding(model: M, max_position: int) -> M:
    """Extend ``model`` to ``max_position`` tokens: tile its position table, and adapt its buffers
    over positions and its config, as for Longformer (Beltagy et al., arXiv:2004.05150, section 5).
    Returns ``model``.

    For BERT, RoBERTa and similar models (whose table has rows before position 0: they stay in
    front, and the config counts them), GPT-2, DistilBERT. Rotary models have no table; only their
    config changes. Call it before the optimizer is made.

    Raises:
        KernelError: fewer positions than the model has, a sharded table, or a model without
            positions.
        ConfigError: no number of positions.
    """
    check_size(max_position, "max_position", "positions")
    config = getattr(model, "config", None)
    text = None if config is None else config.get_text_config()
    tables = [
        (module, name)
        for module in model.modules()
        for name in _TABLES
        if isinstance(getattr(module, name, None), nn.Embedding)
    ]
    if text is None or not (tables or hasattr(text, "max_position_embeddings")):
        raise KernelError(
            f"{type(model).__name__} has neither a table of positions nor max_position_embeddings "
            "in a configuration; there is nothing to extend"
        )
    if not tables:
        _refuse_fewer(max_position, text.max_position_embeddings)
    extra = 0
    for module, name in tables:
        table = getattr(module, name)
        before = 0 if table.padding_idx is None else table.padding_idx + 1
        _tile(table, before, max_position)
        _lengthen(module, before + max_position)
        extra = before
    text.max_position_embeddings = max_position + extra
    return model


def _tile(table: nn.Embedding, before: int, positions: int) -> None:
    rows = table.weight.data
    if rows.dim() != 2 or rows.shape[0] != table.num_embeddings:
        raise KernelError(
            "the table of positions is sharded; call extend_position_embedding "
            "before hf_zero.initialize"
        )
    rows_of_model = rows.shape[0] - before
    _refuse_fewer(positions, rows_of_model)
    source = torch.arange(positions, device=rows.device) % rows_of_model + before
    table.weight.data = torch.cat([rows[:before], rows[source]])
    table.num_embeddings = before + positions


def _refuse_fewer(positions: int, of_model: int) -> None:
    if positions < of_model:
        raise KernelError(
            f"max_position is {positions}, but the model has {of_model} positions already"
        )


def _lengthen(module: nn.Module, length: int) -> None:
    """Lengthen buffers [1, positions] that number positions or hold token type 0."""
    for name in ("position_ids", "token_type_ids"):
        buffer = module._buffers.get(name)
        if buffer is not None:
            ids = torch.arange(length, device=buffer.device)
            module._buffers[name] = (ids if name == "position_ids" else torch.zeros_like(ids)).to(
                buffer.dtype
            )[None]
