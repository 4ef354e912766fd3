"""Kernels that apply to a module, or the reason why none does, from what the module computes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Container, Iterator
from dataclasses import dataclass

from torch import nn

from hf_zero.integrations.fused.recognition import Recognition, verdict_on
from hf_zero.integrations.fused.rotations import other_rotation, rotating_forward
from hf_zero.integrations.fused.sublayers import Mlp, Norm, Sum, while_unchanged
from hf_zero.logging import log_rank0

Forward = Callable[..., object]
KERNEL = {Norm: "norms", Mlp: "activations", Sum: "residual"}


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


def candidates(
    module: nn.Module, kernels: Collection[str], moved: Container[nn.Module] = ()
) -> Iterator[FusionCandidate]:
    """Yield the candidates for ``module`` among ``kernels``; norms ``moved`` apply elsewhere."""
    if any(kernel in kernels for kernel in KERNEL.values()):
        verdict = verdict_on(module)
        expression = verdict.expression
        if verdict.disagrees:
            _warn(module, verdict)
        elif expression is None:
            yield from _left(module, kernels, verdict.why_not)
        elif KERNEL[type(expression)] in kernels:
            if isinstance(expression, Mlp):
                packs = bool(expression.second) and "qkv" in kernels
                yield FusionCandidate(
                    ("activations", "qkv") if packs else ("activations",),
                    while_unchanged(expression.forward(packs), module, expression, verdict.dims),
                    packs=(expression.first, expression.second) if packs else (),
                )
                return
            if not (
                isinstance(expression, Sum) and getattr(module, expression.norm, None) in moved
            ):
                fused = while_unchanged(expression.forward(), module, expression, verdict.dims)
                yield FusionCandidate((KERNEL[type(expression)],), fused)
            return
    if "rotary" in kernels:
        forward = rotating_forward(type(module))
        if forward is not None:
            yield FusionCandidate(("rotary",), forward)
        elif other_rotation(type(module)):
            yield FusionCandidate(
                ("rotary",), why_not="it does not rotate the two halves of a head"
            )


def _left(module: nn.Module, kernels: Collection[str], why_not: str) -> Iterator[FusionCandidate]:
    """Yield why a module that is called a norm or an MLP has no kernel; names are hints here."""
    name = type(module).__name__
    if "norms" in kernels and name.endswith("Norm"):
        yield FusionCandidate(("norms",), why_not="it is neither an RMSNorm nor a LayerNorm")
    elif "activations" in kernels and name.endswith("Experts"):
        reason = "experts run through transformers' grouped matrix products"
        yield FusionCandidate(("activations",), why_not=reason)
    elif "activations" in kernels and (why_not or name.endswith("MLP")):
        reason = why_not or "it is neither act(gate) · up nor a GELU between linear layers"
        yield FusionCandidate(("activations",), why_not=reason)


_warned: set[type] = set()


def _warn(module: nn.Module, verdict: Recognition) -> None:
    from transformers import __version__

    if type(module) not in _warned:
        _warned.add(type(module))
        log_rank0(
            f"{type(module).__name__} of transformers {__version__} stays as it is: "
            f"{verdict.disagrees}. Please report it with the output of hf-zero doctor",
            logging.WARNING,
        )
