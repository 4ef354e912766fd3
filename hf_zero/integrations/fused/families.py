"""Rules of replacement: from the fingerprint of a module's class to its fused forward, or to the
reason why there is none.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from torch import nn

from hf_zero.integrations.fused import attentions, residuals, sublayers
from hf_zero.integrations.fused.recognition import gelu_of, is_silu, name_of, of_class

Forward = Callable[..., Any]


@dataclass(frozen=True)
class FusionCandidate:
    """A module to which kernels of ``names`` apply: the forward that uses them, or the reason why
    there is none. ``packs`` are the submodules whose weights one GEMM uses, ideally adjacent in
    memory.
    """

    names: tuple[str, ...]
    forward: Forward | None = None
    why_not: str = ""
    packs: tuple[str, ...] = ()


def look(module: nn.Module, wanted: Collection[str]) -> FusionCandidate | None:
    """Return the candidate for ``module`` among the ``wanted`` kernels; None if none applies."""
    for rule in (_norm, _residual, _mlp, _attention):
        found = rule(module, wanted)
        if found is not None:
            return found
    return None


def _norm(module: nn.Module, wanted: Collection[str]) -> FusionCandidate | None:
    if "norms" not in wanted or not type(module).__name__.endswith("Norm"):
        return None
    if sublayers.is_layer_norm(module):
        return FusionCandidate(("norms",), sublayers.layer_norm)
    code = of_class(type(module))
    forwards = {
        sublayers.LLAMA: sublayers.rms_norm,
        sublayers.T5: sublayers.rms_norm,
        sublayers.GEMMA: sublayers.gemma_norm,
    }
    if code in forwards:
        return FusionCandidate(("norms",), forwards[code])
    return FusionCandidate(
        ("norms",), why_not="no weight or no bias" if isinstance(module, nn.LayerNorm) else UNKNOWN
    )


UNKNOWN = "its code is not one that hf-zero knows"

_RESIDUALS: dict[str, Forward] = {
    "3799d79263d3": residuals.bert_output,
    "1a8125909341": residuals.llama_layer,
    "df580f10cfd4": residuals.phi3_layer,
    "d4699009e63a": residuals.mixtral_layer,
    "d099670e6973": residuals.gpt2_block,
    "a462ca28ad99": residuals.vit_layer,
    "557d3ea40ca8": residuals.distilbert_block,
    "fad1fde0acba": residuals.t5_feed_forward,
    "270378299246": residuals.t5_self_attention,
    "5990ff2e4075": residuals.t5_cross_attention,
}
_RESIDUALS_LEFT = {
    "eb03c623c021": "norms stand before both sums (Gemma2, Gemma3)",
    "866e043de2ac": "attention and MLP are added at once (Phi)",
}


def _residual(module: nn.Module, wanted: Collection[str]) -> FusionCandidate | None:
    if "residual" not in wanted:
        return None
    code = of_class(type(module))
    if code in _RESIDUALS:
        return FusionCandidate(("residual",), _RESIDUALS[code])
    return (
        FusionCandidate(("residual",), why_not=_RESIDUALS_LEFT[code])
        if code in _RESIDUALS_LEFT
        else None
    )


@dataclass(frozen=True)
class _Mlp:
    """``activation``: the attribute of the module's activation. ``make``: the forward, with packed
    gate and up or without.
    """

    activation: str
    make: Callable[[bool], Forward]
    gated: bool = False
    packs: tuple[str, ...] = ()


_MLPS = {
    "7d2027d4464e": _Mlp("act_fn", sublayers.gated_mlp, True, ("gate_proj", "up_proj")),
    "e8d404cbecb9": _Mlp("activation_fn", lambda packed: sublayers.packed_gate_up, True),
    "95b63e5ccb21": _Mlp("act", sublayers.t5_gated, True, ("wi_0", "wi_1")),
    "0711daaf9810": _Mlp("act", lambda packed: sublayers.t5_plain),
    "ab3f9454469b": _Mlp("intermediate_act_fn", lambda packed: sublayers.bert_intermediate),
    "13885f42f2bb": _Mlp("activation_fn", lambda packed: sublayers.two_layers),
    "b3995b24651e+caf28119c4da": _Mlp("activation", lambda packed: sublayers.distilbert),
    "41ab05398d2a": _Mlp("act", lambda packed: sublayers.gpt2),
}


def _mlp(module: nn.Module, wanted: Collection[str]) -> FusionCandidate | None:
    if "activations" not in wanted:
        return None
    rule = _MLPS.get(of_class(type(module)))
    if rule is None:
        experts = type(module).__name__.endswith("Experts")
        unknown = type(module).__name__.endswith("MLP")
        if experts:
            return FusionCandidate(
                ("activations",),
                why_not="experts run through transformers' grouped matrix products",
            )
        return FusionCandidate(("activations",), why_not=UNKNOWN) if unknown else None
    activation = getattr(module, rule.activation)
    if gelu_of(activation) is None and not (rule.gated and is_silu(activation)):
        return FusionCandidate(("activations",), why_not=f"its activation is {name_of(activation)}")
    if rule.make(False) is sublayers.packed_gate_up and not is_silu(activation):
        return FusionCandidate(("activations",), why_not=f"its activation is {name_of(activation)}")
    if getattr(module, "chunk_size_feed_forward", 0):
        return FusionCandidate(("activations",), why_not="chunk_size_feed_forward is set")
    packs = rule.packs if "qkv" in wanted else ()
    return FusionCandidate(
        ("activations", "qkv") if packs else ("activations",), rule.make(bool(packs)), packs=packs
    )


def _attention(module: nn.Module, wanted: Collection[str]) -> FusionCandidate | None:
    asked = tuple(name for name in ("qkv", "rotary") if name in wanted)
    name = type(module).__name__
    if not asked or "Attention" not in name:
        return None
    style = attentions.STYLES.get(of_class(type(module)))
    if style is None:
        return (
            FusionCandidate(asked, why_not=UNKNOWN)
            if hasattr(module, "is_causal") or "SelfAttention" in name
            else None
        )
    if getattr(module, "qk_layernorm", False):
        return FusionCandidate(asked, why_not="qk_layernorm is set (Phi)")
    packed = "qkv" in wanted and len(style.projections) > 1
    rotated = "rotary" in wanted and style.rotates and attentions.known_rotation(type(module))
    if not packed and not rotated:
        if "rotary" in wanted and style.rotates:
            return FusionCandidate(asked, why_not="its rotation is not one that hf-zero knows")
        return None
    used = tuple(name for name, use in (("qkv", packed), ("rotary", rotated)) if use)
    cls: Any = type(module)  # mypy considers a type of Module unhashable
    forward = attentions.attention(cls, style, packed, rotated)
    return FusionCandidate(used, forward, packs=style.projections if packed else ())
