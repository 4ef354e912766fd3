"""The host kernels of optimizers, called with a parameter group's settings: by the CPU classes and for what is offloaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hf_zero.ops import host

MASTER = "master"


@dataclass(frozen=True)
class Call:
    """What a kernel is given beside the arrays: the optimizer's ``group`` as it was when the step began, and the step's number from 1 on."""

    group: Mapping[str, Any]
    step: int
    divisor: float  # of the gradient
    seed: int  # of stochastic rounding
    fresh: bool  # no step has been made yet


def adam(held: Mapping[str, Any], grad: Tensor, out: Tensor | None, call: Call) -> None:
    """One step of Adam, AdamW."""
    group = call.group
    beta1, beta2 = group["betas"]
    host.adam(
        held[MASTER],
        grad,
        held["exp_avg"],
        held["exp_avg_sq"],
        step=call.step,
        lr=float(group["lr"]),
        beta1=float(beta1),
        beta2=float(beta2),
        eps=float(group["eps"]),
        weight_decay=float(group["weight_decay"]),
        decoupled=bool(group["decoupled_weight_decay"]),
        maximize=bool(group["maximize"]),
        max_exp_avg_sq=held["max_exp_avg_sq"] if group["amsgrad"] else None,
        divisor=call.divisor,
        out=out,
        seed=call.seed,
    )


def lion(held: Mapping[str, Any], grad: Tensor, out: Tensor | None, call: Call) -> None:
    """One step of Lion."""
    group = call.group
    beta1, beta2 = group["betas"]
    host.lion(
        held[MASTER],
        grad,
        held["exp_avg"],
        lr=float(group["lr"]),
        beta1=float(beta1),
        beta2=float(beta2),
        weight_decay=float(group["weight_decay"]),
        maximize=bool(group["maximize"]),
        divisor=call.divisor,
        out=out,
        seed=call.seed,
    )


def adagrad(held: Mapping[str, Any], grad: Tensor, out: Tensor | None, call: Call) -> None:
    """One step of Adagrad."""
    group = call.group
    host.adagrad(
        held[MASTER],
        grad,
        held["sum"],
        step=call.step,
        lr=float(group["lr"]),
        lr_decay=float(group["lr_decay"]),
        eps=float(group["eps"]),
        weight_decay=float(group["weight_decay"]),
        maximize=bool(group["maximize"]),
        divisor=call.divisor,
        out=out,
    )


def sgd(held: Mapping[str, Any], grad: Tensor, out: Tensor | None, call: Call) -> None:
    """One step of SGD."""
    group = call.group
    host.sgd(
        held[MASTER],
        grad,
        held["momentum_buffer"] if group["momentum"] else None,
        first_step=call.fresh,
        lr=float(group["lr"]),
        momentum=float(group["momentum"]),
        dampening=float(group["dampening"]),
        nesterov=bool(group["nesterov"]),
        weight_decay=float(group["weight_decay"]),
        maximize=bool(group["maximize"]),
        divisor=call.divisor,
        out=out,
    )
