"""The host kernels of optimizers, called with a parameter group's settings: by the CPU classes and
for offloaded state.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from hf_zero.offload.storage import MASTER
from hf_zero.offload.sub_group_update import Call
from hf_zero.ops import host


def _shared(out: Tensor | None, call: Call) -> dict[str, Any]:
    """Return the arguments that all kernels take."""
    group = call.group
    return {
        "lr": float(group["lr"]),
        "weight_decay": float(group["weight_decay"]),
        "maximize": bool(group["maximize"]),
        "divisor": call.divisor,
        "out": out,
    }


def _betas(call: Call) -> dict[str, Any]:
    beta1, beta2 = call.group["betas"]
    return {"beta1": float(beta1), "beta2": float(beta2)}


def adam(held: Mapping[str, Any], grad: Tensor, out: Tensor | None, call: Call) -> None:
    """Make one step of Adam or AdamW."""
    host.adam(
        held[MASTER],
        grad,
        held["exp_avg"],
        held["exp_avg_sq"],
        step=call.step,
        eps=float(call.group["eps"]),
        decoupled=bool(call.group["decoupled_weight_decay"]),
        corrected=bool(call.group.get("bias_correction", True)),
        max_exp_avg_sq=held["max_exp_avg_sq"] if call.group["amsgrad"] else None,
        seed=call.seed,
        **_betas(call),
        **_shared(out, call),
    )


def lion(held: Mapping[str, Any], grad: Tensor, out: Tensor | None, call: Call) -> None:
    """Make one step of Lion."""
    host.lion(
        held[MASTER], grad, held["exp_avg"], seed=call.seed, **_betas(call), **_shared(out, call)
    )


def adagrad(held: Mapping[str, Any], grad: Tensor, out: Tensor | None, call: Call) -> None:
    """Make one step of Adagrad."""
    host.adagrad(
        held[MASTER],
        grad,
        held["sum"],
        step=call.step,
        lr_decay=float(call.group["lr_decay"]),
        eps=float(call.group["eps"]),
        **_shared(out, call),
    )


def sgd(held: Mapping[str, Any], grad: Tensor, out: Tensor | None, call: Call) -> None:
    """Make one step of SGD."""
    host.sgd(
        held[MASTER],
        grad,
        held["momentum_buffer"] if call.group["momentum"] else None,
        first_step=call.fresh,
        momentum=float(call.group["momentum"]),
        dampening=float(call.group["dampening"]),
        nesterov=bool(call.group["nesterov"]),
        **_shared(out, call),
    )
