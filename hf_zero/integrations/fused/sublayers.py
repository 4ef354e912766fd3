"""Forwards of norms, feed-forward layers and residual sums, for modules of any class that compute
these expressions.

An expression names the parameters and submodules of a module by their role. Forwards read the
parameters of plain linear layers, and call every other submodule. Where dtypes differ, or under
autocast, which casts for each operation of torch, the module's own code runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TypeGuard, TypeVar

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from hf_zero.integrations.fused.shells import attributes, is_constant
from hf_zero.ops import activations, norms
from hf_zero.ops.packed_linear import packed_linear
from hf_zero.ops.residual import dropout_add

Forward = Callable[..., torch.Tensor]
Part = TypeVar("Part", bound=nn.Module)
OURS = __name__.rpartition(".")[0]
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "none": F.gelu,
    "tanh": functools.partial(F.gelu, approximate="tanh"),
}
"""SiLU, and GELU by its approximation."""


def takes(x: torch.Tensor, *parameters: torch.Tensor) -> bool:
    """Return whether our operations compute the same as the module's own: one dtype, except
    quantized weights, not fp64, no autocast, no transform of torch.func, and no DTensors.
    """
    return (
        x.dtype != torch.float64
        and all(p.dtype == x.dtype or not p.is_floating_point() for p in parameters)
        and not any(is_traceable_wrapper_subclass(tensor) for tensor in (x, *parameters))
        and not torch.is_autocast_enabled(x.device.type)
        and not torch._C._are_functorch_transforms_active()  # custom operations have no rules there
    )


def plain(module: nn.Module, kind: type[Part]) -> TypeGuard[Part]:
    """Return whether ``module`` is exactly a ``kind``, so that its parameters determine its
    forward.

    An adapter, a quantized layer or weight, or a module with hooks (also the engine's, if the
    module is gathered by itself) must be called.
    """
    if (
        type(module) is not kind
        or module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or any(is_traceable_wrapper_subclass(p) for p in module._parameters.values())
    ):
        return False
    return replaced(module) or "forward" not in module.__dict__


def replaced(module: nn.Module) -> bool:
    """Return whether the forward of ``module`` is one of ours."""
    function = getattr(module.__dict__.get("forward"), "__func__", None)
    return function is not None and (
        function.__module__.startswith(OURS) or hasattr(function, "_hf_zero_rotates")
    )


def whole(x: torch.Tensor, linears: Sequence[nn.Module]) -> torch.Tensor | None:
    """Return the outputs of all ``linears`` for ``x``, concatenated, from one GEMM; None unless
    each is a plain matrix and bias of x's dtype.
    """
    weights, biases = [], []
    for linear in linears:
        if not plain(linear, nn.Linear) or linear.weight.dtype != x.dtype:
            return None
        weights.append(linear.weight)
        biases.append(linear.bias)
    return packed_linear(x, weights, None if all(bias is None for bias in biases) else biases)


def while_unchanged(
    fused: Forward, module: nn.Module, expression: Expression, dims: Collection[int]
) -> Forward:
    """Return a forward that calls ``fused`` while the numbers, flags and functions among the
    attributes of ``module``, its class's forward, and the submodules that ``fused`` does not call,
    are those of now. Otherwise, and for inputs of other than ``dims`` dimensions, keywords and
    further arguments, it calls the module's own code.
    """
    arity = 2 if isinstance(expression, Sum) and expression.norm else 1
    skipped = expression.skipped if isinstance(expression, Mlp) else ()
    constants_of_module, own = _constants(module), type(module).forward
    parts = [(name, type(part := getattr(module, name)), _constants(part)) for name in skipped]

    def forward(module: torch.nn.Module, *args: torch.Tensor, **kwargs: object) -> torch.Tensor:
        proved = len(args) == arity and not kwargs and args[0].dim() in dims
        if proved and type(module).forward is own and _has(module, constants_of_module):
            for name, kind, constants in parts:
                part = getattr(module, name)
                if not plain(part, kind) or not _has(part, constants):
                    break
            else:
                return fused(module, *args)
        return type(module).forward(module, *args, **kwargs)  # type: ignore[no-any-return]

    return forward


def _constants(module: nn.Module) -> tuple[tuple[str, object], ...]:
    return tuple((key, value) for key, value in attributes(module) if is_constant(value))


def _has(module: nn.Module, constants: tuple[tuple[str, object], ...]) -> bool:
    return all(getattr(module, key, None) == value for key, value in constants)


def _takes_linears(self: nn.Module, x: torch.Tensor, names: Sequence[str]) -> bool:
    weights = (getattr(getattr(self, name), "weight", None) for name in names)
    return takes(
        x,
        *(
            weight
            for weight in weights
            if isinstance(weight, torch.Tensor) and not is_traceable_wrapper_subclass(weight)
        ),
    )


def _through(self: nn.Module, names: Sequence[str], x: torch.Tensor) -> torch.Tensor:
    for name in names:
        x = getattr(self, name)(x)
    return x


@dataclass(frozen=True)
class Norm:
    """RMSNorm, ``x (offset + weight) / sqrt(mean(x²) + eps)``, or ``centered``, LayerNorm; "" if
    there is no weight or no bias. ``eps`` is a number or the attribute that holds it.
    """

    weight: str
    bias: str
    eps: str | float
    offset: float = 0.0
    centered: bool = False

    def forward(self) -> Forward:
        def forward(module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
            parameters = [getattr(module, name) for name in (self.weight, self.bias) if name]
            if not takes(x, *parameters):
                return type(module).forward(module, x)  # type: ignore[no-any-return]
            return self.apply(module, x)

        return forward

    def apply(self, module: object, x: torch.Tensor) -> torch.Tensor:
        weight = getattr(module, self.weight) if self.weight else x.new_ones(x.shape[-1])
        eps = getattr(module, self.eps) if isinstance(self.eps, str) else self.eps
        if self.centered:
            return norms.layer_norm(
                x, weight, getattr(module, self.bias) if self.bias else None, eps
            )
        return norms.rms_norm(x, weight, eps, offset=self.offset)


@dataclass(frozen=True)
class Mlp:
    """``after(act(first(x)) · second(x))``, or ``after(act(first(x)))`` without ``second``.

    ``halves``: gate and up are the two halves of ``first(x)``, the gate first, or last if it is -1;
    0: they are no halves. ``after`` are submodules that are called one after the other; those of
    ``skipped``, as an activation, are not called.
    """

    act: str
    first: str
    second: str = ""
    halves: int = 0
    after: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()

    def forward(self, packed: bool) -> Forward:
        """Return the forward, with one GEMM for gate and up if ``packed``."""
        linears = tuple(filter(None, (self.first, self.second, *self.after)))

        def forward(module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
            if not _takes_linears(module, x, linears):
                return type(module).forward(module, x)  # type: ignore[no-any-return]
            first = getattr(module, self.first)
            if self.second:
                hidden = self._of_two(x, first, getattr(module, self.second), packed)
            elif self.halves:
                hidden = self._of_halves(first(x))
            else:
                hidden = self._of_one(x, first)
            return _through(module, self.after, hidden)

        return forward

    def _of_two(
        self, x: torch.Tensor, gate: nn.Module, up: nn.Module, packed: bool
    ) -> torch.Tensor:
        if packed and gate.out_features == up.out_features:
            together = whole(x, (gate, up))
            if together is not None:
                return self._of_halves(together)
        return self._gated(gate(x), up(x))

    def _of_halves(self, both: torch.Tensor) -> torch.Tensor:
        if self.halves < 0:
            up, gate = both.chunk(2, dim=-1)
            return self._gated(gate, up)
        if self.act == "silu":
            return activations.swiglu_packed(both)
        return activations.geglu_packed(both, approximate=self.act)

    def _gated(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        if self.act == "silu":
            return activations.swiglu(gate, up)
        return activations.geglu(gate, up, approximate=self.act)

    def _of_one(self, x: torch.Tensor, linear: nn.Linear) -> torch.Tensor:
        """Return gelu(linear(x)); the kernel adds the bias of a plain matrix and bias."""
        bias = getattr(linear, "bias", None)
        if bias is not None and takes(x, linear.weight, bias):
            if plain(linear, nn.Linear):
                return activations.gelu(F.linear(x, linear.weight), bias, approximate=self.act)
            from transformers.pytorch_utils import Conv1D  # late: models of torch have none

            if plain(linear, Conv1D):  # GPT-2: the weight is [in, out]
                return activations.gelu(x @ linear.weight, bias, approximate=self.act)
        return activations.gelu(linear(x), approximate=self.act)


def _drops(module: nn.Module) -> bool:
    """Return whether our operations drop as ``module`` does."""
    return plain(module, nn.Dropout) and module.p < 1


@dataclass(frozen=True)
class Sum:
    """``norm(dropout(branch(x)) + residual)`` (post-LN), or without ``norm`` ``dropout(branch(x)) +
    x``. ``branch`` are submodules that are called one after the other.
    """

    branch: tuple[str, ...]
    dropout: str
    norm: str = ""

    def forward(self) -> Forward:
        return self._normed() if self.norm else self._added()

    def _added(self) -> Forward:
        def forward(module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
            dropout = getattr(module, self.dropout)
            if not _drops(dropout) or not takes(x):
                return type(module).forward(module, x)  # type: ignore[no-any-return]
            out = _through(module, self.branch, x)
            if out.dtype != x.dtype or out.shape != x.shape:
                return x + dropout(out)
            return dropout_add(out, x, dropout=dropout.p, training=dropout.training)

        return forward

    def _normed(self) -> Forward:
        def forward(
            module: torch.nn.Module, x: torch.Tensor, residual: torch.Tensor
        ) -> torch.Tensor:
            norm = getattr(module, self.norm)
            dropout = getattr(module, self.dropout) if self.dropout else None
            if (
                not plain(norm, nn.LayerNorm)
                or not (dropout is None or _drops(dropout))
                or not takes(x, residual, *(p for p in (norm.weight, norm.bias) if p is not None))
                or norm.weight is None
            ):
                return type(module).forward(module, x, residual)  # type: ignore[no-any-return]
            out = _through(module, self.branch, x)
            if out.shape != residual.shape:
                return norm((out if dropout is None else dropout(out)) + residual)
            p, training = (0.0, False) if dropout is None else (dropout.p, dropout.training)
            return norms.layer_norm_of_sum(
                out, residual, norm.weight, norm.bias, norm.eps, dropout=p, training=training
            )

        return forward


Expression = Norm | Mlp | Sum
