"""Muon: SGD with momentum and an orthogonalized update of each matrix (Jordan et al. 2024,
https://kellerjordan.github.io/posts/muon), with the settings and the arithmetic of torch.optim;
AdamW updates all parameters other than hidden matrices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import _muon
from torch.optim.adamw import adamw
from torch.optim.optimizer import ParamsT

from hf_zero.errors import ConfigError
from hf_zero.optim import ranges
from hf_zero.optim.segments import ParamGroup, ParamState
from hf_zero.optim.whole_tensor import Parts, WholeTensorOptimizer

_ADAMW = ("exp_avg", "exp_avg_sq")


class Muon(ranges.CheckedOptimizer, WholeTensorOptimizer):
    """Muon for the groups with ``use_muon``, AdamW for the others.

    Per matrix, with gradient ``g``, momentum ``b`` and weights ``w``::

        b <- momentum * b + (1 - momentum) * g
        u = momentum * b + (1 - momentum) * g   (without nesterov: b)
        w <- w * (1 - lr * weight_decay) - lr * a * NS(u)

    ``NS`` is ``ns_steps`` Newton-Schulz iterations with ``ns_coefficients``, in bf16, over the
    whole matrix; ``a`` is sqrt(max(1, rows / columns)), or 0.2 * sqrt(max(rows, columns)) with
    ``adjust_lr_fn="match_rms_adamw"``. Shards of a matrix are sent in bf16 to the one rank that
    computes its update, which sends them the result.

    Args:
        params: parameters or parameter groups; AdamW updates groups with ``"use_muon": False``,
            with the group's ``lr``, ``weight_decay``, ``betas`` and ``adam_eps``.
        lr: learning rate.
        weight_decay: decoupled, in both updates.
        momentum, nesterov, ns_coefficients, ns_steps, eps, adjust_lr_fn: as in torch.optim.Muon.
        betas, adam_eps: settings of AdamW.
        use_muon: default for groups that do not set it.

    Raises:
        ConfigError: a hyperparameter is out of range, or a parameter of a group with ``use_muon``
            is no matrix (a ValueError).
        UnsupportedOptimizerError: in ``step``, a gradient is sparse.
    """

    MOMENTS = ("momentum_buffer",)
    ADOPTED_SETTINGS: Mapping[str, object] = {"use_muon": True}
    RANGES = {
        **ranges.not_negative("lr", "weight_decay", "eps", "adam_eps"),
        "momentum": ranges.COEFFICIENT,
        "ns_coefficients": ranges.numbers(3, ranges.NUMBER, "three numbers"),
        "ns_steps": ranges.Range(
            lambda steps: type(steps) is int and 0 < steps < 100, "an integer below 100"
        ),
        "adjust_lr_fn": ranges.choice("original", "match_rms_adamw", None),
        "betas": ranges.BETAS,
    }

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        *,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        ns_steps: int = 5,
        eps: float = 1e-7,
        adjust_lr_fn: str | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
        adam_eps: float = 1e-8,
        use_muon: bool = True,
    ) -> None:
        defaults = {
            "lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov,
            "ns_coefficients": ns_coefficients, "ns_steps": ns_steps, "eps": eps,
            "adjust_lr_fn": adjust_lr_fn, "betas": betas, "adam_eps": adam_eps,
            "use_muon": use_muon,
        }  # fmt: skip
        super().__init__(params, defaults)

    def check_group(self, group: ParamGroup) -> None:
        super().check_group(group)
        _check_shapes(group, len(self.param_groups) - 1)

    @classmethod
    def moments_of(cls, group: ParamGroup) -> tuple[str, ...]:
        return cls.MOMENTS if group["use_muon"] else _ADAMW

    @classmethod
    def adopt_state(cls, state: ParamState) -> None:
        if state:  # torch's Muon keeps no step count: nothing depends on it
            state.setdefault("step", torch.tensor(0.0, dtype=torch.float32, device="cpu"))

    @classmethod
    def prepares(cls, group: ParamGroup) -> bool:
        return bool(group["use_muon"])

    @classmethod
    def prepare(cls, group: ParamGroup, parts: Parts, at: int) -> Sequence[Tensor]:
        (buffers,) = parts.moments
        return [_direction(group, *tensors) for tensors in zip(parts.gradients(), buffers)]

    def combine(
        self,
        at: int,
        groups: Sequence[ParamGroup],
        parts: Sequence[Sequence[Tensor]],
        prepared: Sequence[Sequence[Tensor]],
    ) -> Sequence[Sequence[Tensor]]:
        return [
            self.tensors.transformed(tensors, directions, _orthogonal(group))
            if group["use_muon"]
            else []
            for group, tensors, directions in zip(groups, parts, prepared)
        ]

    @staticmethod
    def apply(group: ParamGroup, parts: Parts) -> None:
        if not group["use_muon"]:
            _adamw(group, parts)
            return
        lr = float(group["lr"])
        for weight, update, shape in zip(parts.weights, parts.results[0], parts.shapes):
            weight.mul_(1 - lr * group["weight_decay"])
            if len(shape) == 2:  # not a stand-in
                adjusted = _muon._adjust_lr(lr, group["adjust_lr_fn"], torch.Size(shape))
                weight.add_(update, alpha=-adjusted)


def _check_shapes(group: ParamGroup, number: int) -> None:
    """Raise ConfigError if Muon is to update a parameter of ``group`` that is no matrix."""
    for index, parameter in enumerate(group["params"] if group["use_muon"] else ()):
        shape = getattr(parameter, "ds_shape", parameter.shape)
        if len(shape) != 2:
            raise ConfigError(
                f"Muon: parameter {index} of group {number} has shape {tuple(shape)}, and Muon "
                'updates matrices; put it into a group with "use_muon": False, which AdamW updates'
            )


def _orthogonal(group: ParamGroup) -> Callable[[Tensor], Tensor]:
    return partial(
        _muon._zeropower_via_newtonschulz,
        ns_coefficients=group["ns_coefficients"],
        ns_steps=group["ns_steps"],
        eps=group["eps"],
    )


def _direction(group: ParamGroup, grad: Tensor, buffer: Tensor) -> Tensor:
    """Update the momentum ``buffer``; return the direction in bf16, the dtype of the iteration."""
    momentum = group["momentum"]
    buffer.lerp_(grad, 1 - momentum)
    return (grad.lerp(buffer, momentum) if group["nesterov"] else buffer).bfloat16()


def _adamw(group: ParamGroup, parts: Parts) -> None:
    beta1, beta2 = group["betas"]
    averages, variances = parts.moments
    adamw(
        parts.weights,
        parts.gradients(),
        averages,
        variances,
        [],
        [torch.tensor(float(step) - 1, dtype=torch.float32, device="cpu") for step in parts.steps],
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["adam_eps"],
        maximize=False,
    )


def muon_groups(
    params: Any,
    model: torch.nn.Module | None,
    muon_lr: float | None = None,
    adam_lr: float | None = None,
) -> list[dict[str, Any]]:
    """Split parameters or parameter groups into groups for :class:`Muon`, each updated either by
    Muon or by AdamW.

    Args:
        params: as torch.optim takes them, with or without names. Raises ConfigError for others.
        model: Muon updates its :func:`hidden_matrices`. An attribute ``use_muon`` of a parameter
            takes precedence; without a model every parameter must have one, else ConfigError.
        muon_lr, adam_lr: learning rates of the two for groups without ``lr``; None: the
            optimizer's.
    """
    hidden = hidden_matrices(model) if model is not None else set()
    split_groups = []
    for group in _listed_groups(params):
        of_muon: list[object] = []
        of_adamw: list[object] = []
        members = group["params"]
        for member in [members] if isinstance(members, Tensor) else members:
            parameter = member[1] if isinstance(member, tuple) else member  # (name, parameter)
            if not isinstance(parameter, Tensor):
                raise ConfigError(
                    f"Muon: a parameter is a {type(parameter).__name__}; pass model.parameters()"
                )
            tagged = getattr(parameter, "use_muon", None)
            if tagged is None and model is None:
                raise ConfigError(
                    "Muon: a parameter has no attribute use_muon; set it to True for the hidden "
                    "matrices and to False for all others"
                )
            by_muon = parameter in hidden if tagged is None else tagged
            (of_muon if by_muon else of_adamw).append(member)
        for use_muon, chosen, lr in ((True, of_muon, muon_lr), (False, of_adamw, adam_lr)):
            if chosen:
                rate = {} if lr is None else {"lr": lr}
                split_groups.append({**rate, **group, "params": chosen, "use_muon": use_muon})
    return split_groups


def _listed_groups(params: object) -> list[dict[str, Any]]:
    """Return ``params``, parameters or groups of them, as groups; raise ConfigError for neither."""
    listed = list(params) if isinstance(params, Iterable) and not isinstance(params, Tensor) else []
    groups = listed if listed and isinstance(listed[0], dict) else [{"params": listed}]
    if not listed or not all(isinstance(group, dict) and "params" in group for group in groups):
        raise ConfigError(
            f"Muon: params is {params!r:.80}, without parameters; pass model.parameters(), or "
            "groups of them, dicts with 'params'"
        )
    return groups


def groups_of_dialect(
    params: Any, model: torch.nn.Module | None, given: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Return :func:`muon_groups` with the rates of ``given``, the parameters of a configuration."""
    return muon_groups(params, model, given.get("muon_lr"), given.get("adam_lr"))


def hidden_matrices(model: torch.nn.Module) -> set[Tensor]:
    """Return the matrices of ``model`` outside its embeddings and output embeddings."""
    modules = list(model.modules())
    embeddings: list[torch.nn.Module] = [
        module for module in modules if isinstance(module, torch.nn.Embedding)
    ]
    for module in modules:
        output = getattr(module, "get_output_embeddings", None)
        last = output() if callable(output) else None
        embeddings += [last] if isinstance(last, torch.nn.Module) else []
    others = {parameter for module in embeddings for parameter in module.parameters()}
    return {
        parameter
        for module in modules
        for parameter in module.parameters(recurse=False)
        if len(getattr(parameter, "ds_shape", parameter.shape)) == 2 and parameter not in others
    }
