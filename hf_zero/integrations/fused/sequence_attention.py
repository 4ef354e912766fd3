"""Sequence parallelism in unmodified models of transformers, as the attention implementation
``hf_zero_sequence_<core>``.

An attention function and a mask function are registered under that name, as transformers provides
for. In a forward over parts of sequences the mask is a list of the documents in them
(:class:`hf_zero.parallel.sequence.documents.Documents`), which also identifies the model of the
forward. Every other forward (evaluation, a copy of the model, another model with the same
configuration) gets the masks of the core, which then computes alone.

The core computes whole sequences if there is no ring; :func:`ring_attention` computes rings,
windows and attention sinks, and all parts of a model that has no core but its own eager attention,
such as gpt-oss, which then computes whole sequences. Computation across tokens outside this
interface cannot be split, and is refused: layers with a state or a convolution along the sequence,
biases by position, bidirectional attention.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import nn

from hf_zero.errors import ConfigError, KernelError
from hf_zero.integrations.fused import sparse_attention as sparse
from hf_zero.integrations.fused.replacement import Replacement
from hf_zero.logging import log_rank0
from hf_zero.ops.sparse_attention.layouts import HeadsOf
from hf_zero.parallel.sequence.attention import attend, check_heads
from hf_zero.parallel.sequence.batches import are_counted, is_part
from hf_zero.parallel.sequence.division import Division
from hf_zero.parallel.sequence.documents import Documents, knows_positions
from hf_zero.parallel.sequence.exchanges import all_gather
from hf_zero.parallel.sequence.sequence_parallel import SequenceParallel
from hf_zero.zero.gather.model_patches import Attached, outside_graphs

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

PREFIX = "hf_zero_sequence_"
DEFAULT, EAGER = "sdpa", "eager"
_LAYERS = {"full_attention", "sliding_attention"}
_ROPES = ("dynamic", "longrope")  # their angles depend on the length that a rank sees
_under_way = threading.local()  # .documents: of this thread's current forward


Attention = Callable[..., tuple[torch.Tensor, object]]


@runtime_checkable
class CountsPositions(Protocol):
    """Embeddings that compute positions starting after ``padding_idx``."""

    padding_idx: int

    def create_position_ids_from_input_ids(
        self, input_ids: torch.Tensor, padding_idx: int
    ) -> torch.Tensor: ...


def check(model: nn.Module, division: Division, tensor: int = 1) -> None:
    """Raise ConfigError for a model whose attention cannot be split by ``division`` and among
    ``tensor`` tensor-parallel ranks, which share its heads.
    """
    _check(_inside(model, division.key)[0], division, tensor)


def _inside(model: nn.Module, key: str) -> list[PreTrainedModel]:
    from transformers import PreTrainedModel

    inside = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    if not inside:
        raise ConfigError(
            f"{key} needs a model of transformers, whose attention can be exchanged, not "
            f"{type(model).__name__}; set {key} to 1"
        )
    return inside


def install(model: nn.Module, sequence: SequenceParallel) -> Replacement:
    """Make the attention of ``model``, which :func:`check` has accepted, read the tokens of all
    ranks of ``sequence``; the returned replacement undoes it.
    """
    inside = _inside(model, sequence.division.key)
    owner = inside[0]
    before = sparse.implementations_of(inside)
    core = _core(owner, sequence)
    if owner.config._attn_implementation != core:
        owner.set_attn_implementation(core)
    _register(core)
    owner.set_attn_implementation(PREFIX + core)
    configs = [config for config, _ in before]
    forward = _Forward(sequence, core, _counts(model), configs)
    handles = [
        hook
        for m in inside
        for hook in (
            m.register_forward_pre_hook(Attached(forward.begin), prepend=True, with_kwargs=True),
            m.register_forward_hook(Attached(forward.end), always_call=True),
        )
    ]

    def undo() -> None:
        for handle in handles:
            handle.remove()
        sparse.set_implementations(before)

    return Replacement(PREFIX + core, "", undo)


def _counts(model: nn.Module) -> CountsPositions | None:
    """Return the embeddings of ``model`` that compute positions starting after ``padding_idx``
    (RoBERTa and similar); None if positions start at 0.
    """
    return next((m for m in model.modules() if isinstance(m, CountsPositions)), None)


def _core(model: PreTrainedModel, sequence: SequenceParallel) -> str:
    kernel, key = model.config._attn_implementation.removeprefix(PREFIX), sequence.division.key
    if kernel == sparse.NAME:
        if sequence.division.context > 1:
            raise ConfigError(
                f"{key} cannot split sparse_attention, whose blocks are of whole sequences; remove "
                f"that section, or write sequence_parallel_size in place of {key}"
            )
        return kernel
    core = sequence.attention or kernel
    if core in (EAGER, None):
        core = DEFAULT if model._supports_sdpa else EAGER
        by = DEFAULT if model._supports_sdpa else "torch's flash kernels"
        log_rank0(f"{key}: attention is computed by {by}, for eager attention has no interface")
    if core == "flex_attention":
        raise ConfigError(
            f"{key} cannot split flex_attention, whose masks are of whole sequences; load the "
            f"model with attn_implementation={DEFAULT!r}, or name it as sp_attn_implementation"
        )
    return str(core)


def _check(model: PreTrainedModel, division: Division, tensor: int) -> None:
    name, config = type(model).__name__, model.config.get_text_config()

    def refuse(what: str, remedy: str) -> None:
        raise ConfigError(f"{division} cannot split {name}: {what}; {remedy}")

    alone = f"set {division.key} to 1"
    if config.is_encoder_decoder:
        refuse("it attends across two sequences", alone)
    layer_types = {*(getattr(config, "layer_types", None) or ())} - _LAYERS
    if layer_types:
        refuse(
            f"it has layers of {', '.join(sorted(layer_types))}",
            f"use a model of full or sliding attention, or {alone}",
        )
    if getattr(config, "attn_logit_softcapping", None):
        refuse("it soft-caps its scores", f"set attn_logit_softcapping to None, or {alone}")
    ropes = getattr(config, "rope_parameters", None) or {}
    kind = ropes.get("rope_type")
    if kind in _ROPES:
        refuse(
            f"its rotary embedding is {kind}, which follows the length that one rank sees",
            f"write a rope_type such as 'yarn' or 'linear', or {alone}",
        )
    mixes = next((key for key, m in model.named_modules() if isinstance(m, nn.Conv1d)), None)
    if mixes is not None:
        refuse(f"{mixes} is a convolution along the sequence", alone)
    both = next(
        (key for key, m in model.named_modules() if getattr(m, "is_causal", None) is False), None
    )
    if both is not None:
        refuse(f"{both} attends in both directions, which needs the masks that are dropped", alone)
    names = (key for key, m in model.named_modules() if hasattr(m, "prepare_dynamic_mask"))
    masks = next(names, None)
    if masks is not None:
        refuse(f"{masks} computes a mask of its own from the values of all tokens", alone)
    if not model._can_set_attn_implementation():
        refuse("it computes attention outside transformers' AttentionInterface", alone)
    if not (model._supports_sdpa or model._supports_flash_attn):
        refuse("it has eager attention alone, or none", alone)
    heads = getattr(config, "num_attention_heads", None)
    if heads is not None:
        shared = getattr(config, "num_key_value_heads", None) or heads
        check_heads(heads // tensor, max(1, shared // tensor), division.sequence, tensor)


class _Forward:
    """Hooks around the forwards of one model, which record the documents of forwards over parts of
    sequences.
    """

    def __init__(
        self,
        sequence: SequenceParallel,
        core: str,
        counts: CountsPositions | None,
        configs: list[PreTrainedConfig],
    ):
        self._sequence, self._name, self._counts = sequence, PREFIX + core, counts
        self._configs = configs if core == EAGER else []
        # configurations that have eager attention for one forward
        self._lent: list[PreTrainedConfig] = []
        self._key = sequence.division.key
        self._depth = threading.local()
        self._attended = False  # in one forward at least: later ones may leave all blocks out

    def begin(
        self, module: PreTrainedModel, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]] | None:
        depth = self._depth.__dict__.setdefault("value", 0)
        self._depth.value = depth + 1
        if depth:
            return None
        name, sequence, key = type(module).__name__, self._sequence, self._key
        if not (module.training or sequence.in_evaluation):
            if is_part(kwargs):
                raise ConfigError(
                    f"{name} in eval() was given a part of a batch under {key}, where it evaluates "
                    "whole sequences and would attend only within the part; give it the whole "
                    "batch (in Accelerate prepare its loader in a call without the model), or pass "
                    "in_evaluation=True to hf_zero.sequence_parallel"
                )
            self._lent = [c for c in self._configs if c._attn_implementation == self._name]
            for config in self._lent:
                config._attn_implementation_internal = EAGER
            return None
        if module.config._attn_implementation != self._name:
            raise ConfigError(
                f"the attention of {name} was {self._name} at initialize and is "
                f"{module.config._attn_implementation} now, which leaves each rank with its own "
                f"tokens; leave it, or destroy() the engine and set {key} to 1"
            )
        if kwargs.get("attention_mask") is not None:
            raise ConfigError(
                f"{name} was given an attention_mask in training under {key}, where masks are "
                "dropped; cut the batch with hf_zero.sequence_parallel().shard(batch), which looks "
                "at it and leaves it out"
            )
        positions = kwargs.get("position_ids")
        if not isinstance(positions, torch.Tensor) or positions.dim() != 2:
            raise ConfigError(
                f"{name} was called in training under {key} without position_ids of [rows, "
                "tokens], and would count each rank's tokens from 0; pass those of the whole "
                "sequence, as hf_zero.sequence_parallel().shard(batch) makes them, and call "
                "model.eval() for whole sequences"
            )
        inputs = _named(args, kwargs)
        documents = sequence.agreement.compare(sequence.dim, sequence.division, positions, inputs)
        if sequence.length not in (None, documents.length):
            raise ConfigError(
                f"{name} was given sequences of {documents.length} tokens, and sp_seq_length is "
                f"{sequence.length}; set sp_seq_length_is_variable, or pad them to that"
            )
        _under_way.documents = replace(documents, number=sequence.number)
        _under_way.read = False
        if self._counts is None or not are_counted(positions):
            return None
        return args, {**kwargs, "position_ids": self._counted(self._counts, positions, inputs)}

    def _counted(
        self, embeddings: CountsPositions, positions: torch.Tensor, inputs: dict[str, object]
    ) -> torch.Tensor:
        """Return positions as the model's embeddings compute them, for ``positions`` from 0."""
        tokens, padding = inputs.get("input_ids"), embeddings.padding_idx
        if not isinstance(tokens, torch.Tensor):
            return positions + padding + 1
        dim, division = self._sequence.dim, self._sequence.division
        parts = all_gather(dim, "padding of rows", tokens.ne(padding).to(torch.uint8))
        whole = division.whole(parts.unbind()) + padding  # as tokens: padding, and others
        position_ids: torch.Tensor = embeddings.create_position_ids_from_input_ids(whole, padding)
        return division.part(position_ids, dim.rank).contiguous()

    def end(self, module: PreTrainedModel, args: object, output: object) -> None:
        self._depth.value -= 1
        if not self._depth.value:
            for config in self._lent:
                config._attn_implementation_internal = self._name
            self._lent = []
        if self._depth.value or getattr(_under_way, "documents", None) is None:
            return
        _under_way.documents = None
        self._attended |= _under_way.read
        if not self._attended and output is not None:
            raise ConfigError(
                f"{type(module).__name__} has attended without {self._name}: each rank saw only "
                f"its own tokens; set {self._key} to 1 for this model"
            )


def _named(args: tuple[object, ...], kwargs: dict[str, object]) -> dict[str, object]:
    """Return a forward's inputs by name; transformers' models take the tokens first."""
    return {"input_ids": args[0], **kwargs} if args else kwargs


def _register(core: str) -> None:
    """Register the implementation for ``core`` with transformers. Idempotent."""
    attend_by, mask_by = functools.partial(_attend, core), functools.partial(_mask, core)
    sparse.register_attention(PREFIX + core, attend_by, mask_by)


def _mask(core: str, *args: object, **kwargs: object) -> object:
    """Mask function for transformers' AttentionMaskInterface."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    documents = getattr(_under_way, "documents", None)
    if documents is not None:
        if not knows_positions():  # one process would not separate documents here either
            spans = Documents.one_a_row(documents.length).spans
            documents = replace(documents, spans=spans)
        return replace(documents, window=kwargs.get("local_size") or 0).as_mask()
    return ALL_MASK_ATTENTION_FUNCTIONS[core](*args, **kwargs)


@outside_graphs
def _attend(
    core: str,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, object]:
    """Attention function for transformers' AttentionInterface: [B, H, s, D] to [B, s, H, D]."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    documents = Documents.from_mask(attention_mask)
    compute: Attention | None = None if core == EAGER else ALL_ATTENTION_FUNCTIONS[core]
    if documents is None:
        if compute is None:
            raise ConfigError(
                f"{type(module).__name__} attends to a whole sequence by {PREFIX}{core}, which "
                "computes parts alone; call the model in eval(), and another model or a copy after "
                "set_attn_implementation('eager')"
            )
        return compute(module, query, key, value, attention_mask, **kwargs)
    sequence = SequenceParallel.numbered(documents.number)
    division, sinks = sequence.division, kwargs.get("s_aux")
    for name, what in sparse.REFUSED.items():
        if kwargs.get(name) is not None:
            raise ConfigError(
                f"{type(module).__name__} asks for {what} ({name}), which cannot be had under "
                f"{division.key}; set {division.key} to 1 for this model"
            )
    if documents.packed and core == sparse.NAME:
        raise KernelError(
            f"{sparse.NAME} does not know packed sequences (position_ids that restart within a "
            "row); use dense attention for them, or one sequence a row"
        )
    _under_way.read = True
    scale = kwargs.get("scaling")
    if compute is None or division.context > 1 or documents.windowed or sinks is not None:
        _check_ring(module, division.key, **kwargs)
        whole = attend(sequence.axes, None, query, key, value, documents, scale, sinks)
        return whole, None
    # position_ids cover whole sequences, or this rank's tokens: they are not needed any more
    passed = {name: value for name, value in kwargs.items() if name != "position_ids"}

    def of_a_document(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        proxy: object = _WithHeads(module, q.shape[1], k.shape[1], sequence.axes.heads.rank)
        attended: torch.Tensor = compute(proxy, q, k, v, None, **passed)[0]
        return attended

    return attend(sequence.axes, of_a_document, query, key, value, documents), None


def _check_ring(
    module: nn.Module,
    key: str,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **kwargs: object,
) -> None:
    """Raise ConfigError for arguments of attention that :func:`ring_attention` lacks."""
    name = type(module).__name__
    if dropout:
        raise ConfigError(
            f"{name} drops out {dropout} of its attention, which rings, windows and attention "
            f"sinks under {key} lack; set attention_dropout (attn_pdrop) of the model to 0"
        )
    if is_causal is False:
        raise ConfigError(
            f"{name} asks for attention in both directions (is_causal), which cannot be had under "
            f"{key}; set {key} to 1 for this model"
        )


class _WithHeads:
    """Proxy of an attention module for its core, with this rank's heads."""

    def __init__(self, module: nn.Module, heads: int, shared: int, rank: int):
        self._module = module
        self.num_key_value_groups = heads // shared
        layout = getattr(module, sparse.ATTRIBUTE, None)
        if layout is not None and layout.num_layout_heads > 1:
            layout = HeadsOf(layout, rank * heads, heads)
        setattr(self, sparse.ATTRIBUTE, layout)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)
