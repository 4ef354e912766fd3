"""Adam, Lion, Adagrad and SGD on the host kernels: one pass over CPU memory, with the names and
state of torch.optim.

``moments`` is the storage format of Adam's and Lion's moments: ``"fp32"`` (4 bytes each),
``"bf16"`` (2 bytes, rounded stochastically), ``"int8"`` or ``"dynamic8"`` (1 byte and a scale per
256, see ``ops/moment_blocks.py``). With the last, moments of small parameters are fp32, and the
update runs on any device (``eight_bit.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from hf_zero.errors import ConfigError
from hf_zero.offload.storage import MASTER
from hf_zero.offload.sub_group_update import Call
from hf_zero.ops import host
from hf_zero.optim import ranges
from hf_zero.optim.cpu_base import CPUOptimizer
from hf_zero.optim.segments import ParamGroup, ParamState, StateArrays

MOMENTS = ranges.choice("fp32", "bf16", "int8", "dynamic8")


class CPUAdam(CPUOptimizer):
    """AdamW, or Adam where ``adamw_mode`` is false.

    Args:
        params: parameters in CPU memory, in fp32 or 16 bits, or groups of them.
        lr, betas, eps, weight_decay, amsgrad, maximize: as in torch.optim.AdamW, except that
            ``weight_decay`` defaults to 0.
        adamw_mode: whether weight decay is decoupled from the gradient.
        moments: ``"fp32"``, ``"bf16"``, ``"int8"`` or ``"dynamic8"``.
        bias_correction: whether to correct the moments for their start at zero.

    Raises:
        ConfigError: a setting out of range.
    """

    moment_names = {"exp_avg": True, "exp_avg_sq": False}
    RANGES = {
        **ranges.not_negative("lr", "eps", "weight_decay"),
        "betas": ranges.BETAS,
        "moments": MOMENTS,
    }

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        adamw_mode: bool = True,
        bias_correction: bool = True,
        maximize: bool = False,
        moments: str = "fp32",
    ) -> None:
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay,
            "amsgrad": amsgrad, "maximize": maximize, "bias_correction": bias_correction,
        }  # fmt: skip
        super().__init__(
            params, {**defaults, "decoupled_weight_decay": adamw_mode, "moments": moments}
        )

    def update(
        self,
        group: ParamGroup,
        state: ParamState,
        param: Tensor,
        master: Tensor,
        grad: Tensor,
        seed: int,
    ) -> None:
        if not state:
            state["step"] = torch.tensor(0.0, dtype=torch.float32, device="cpu")
            for name in self.moment_names:
                state[name] = self.new_moment(group, name, param)
        if group["amsgrad"] and "max_exp_avg_sq" not in state:
            state["max_exp_avg_sq"] = torch.zeros(
                param.shape, dtype=torch.float32, device=param.device
            )
        state["step"] += 1
        adam(self.arrays(state, master), grad, None, _call(group, int(state["step"]), seed))


class CPULion(CPUOptimizer):
    """Lion (Chen et al. 2023, arXiv:2302.06675).

    Args:
        params: parameters in CPU memory, in fp32 or 16 bits, or groups of them.
        lr, betas, weight_decay, maximize: as in :class:`hf_zero.optim.Lion`.
        moments: ``"fp32"``, ``"bf16"``, ``"int8"`` or ``"dynamic8"``.

    Raises:
        ConfigError: a setting out of range.
    """

    moment_names = {"exp_avg": True}
    RANGES = {
        **ranges.not_negative("lr", "weight_decay"),
        "betas": ranges.BETAS,
        "moments": MOMENTS,
    }

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        moments: str = "fp32",
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "maximize": maximize, "moments": moments})

    def update(
        self,
        group: ParamGroup,
        state: ParamState,
        param: Tensor,
        master: Tensor,
        grad: Tensor,
        seed: int,
    ) -> None:
        if "exp_avg" not in state:
            state["exp_avg"] = self.new_moment(group, "exp_avg", param)
        # The update does not use the count; it seeds stochastic rounding.
        state["step"] = state.get("step", torch.tensor(0.0, dtype=torch.float32, device="cpu")) + 1
        step = int(state["step"])
        lion(self.arrays(state, master), grad, None, _call(group, step, (seed << 32) + step))


class CPUAdagrad(CPUOptimizer):
    """Adagrad (Duchi et al. 2011).

    Args:
        params: parameters in CPU memory, in fp32 or 16 bits, or groups of them.
        lr, lr_decay, weight_decay, initial_accumulator_value, eps, maximize: as in
            torch.optim.Adagrad. Gradients may be sparse if there is no weight decay.

    Raises:
        ConfigError: a setting out of range.
    """

    RANGES = ranges.not_negative(
        "lr", "lr_decay", "weight_decay", "initial_accumulator_value", "eps"
    )

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        *,
        maximize: bool = False,
    ) -> None:
        settings = {"lr": lr, "lr_decay": lr_decay, "weight_decay": weight_decay, "eps": eps}
        settings["initial_accumulator_value"] = initial_accumulator_value
        super().__init__(params, {**settings, "maximize": maximize})

    def leaves_zeros(self, group: ParamGroup) -> bool:
        return not group["weight_decay"] and group["eps"] > 0

    def update(
        self,
        group: ParamGroup,
        state: ParamState,
        param: Tensor,
        master: Tensor,
        grad: Tensor,
        seed: int,
    ) -> None:
        if not state:
            state["step"] = torch.tensor(0.0, dtype=torch.float32, device="cpu")
            initial, device = float(group["initial_accumulator_value"]), param.device
            state["sum"] = torch.full(param.shape, initial, dtype=torch.float32, device=device)
        state["step"] += 1
        adagrad(self.arrays(state, master), grad, None, _call(group, int(state["step"]), seed))


class CPUSGD(CPUOptimizer):
    """Stochastic gradient descent, with momentum.

    Args:
        params: parameters in CPU memory, in fp32 or 16 bits, or groups of them.
        lr, momentum, dampening, weight_decay, nesterov, maximize: as in torch.optim.SGD.

    Raises:
        ConfigError: a setting out of range, or ``nesterov`` without momentum or with dampening.
    """

    RANGES = {
        **ranges.not_negative("lr", "momentum", "weight_decay"),
        "dampening": ranges.NUMBER,
    }

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
    ) -> None:
        rates = {"lr": lr, "momentum": momentum, "dampening": dampening}
        rates["weight_decay"] = weight_decay
        super().__init__(params, {**rates, "nesterov": nesterov, "maximize": maximize})

    def check_group(self, group: ParamGroup) -> None:
        super().check_group(group)
        if group.get("nesterov") and (group["momentum"] <= 0 or group["dampening"] != 0):
            raise ConfigError(
                f"{type(self).__name__}: nesterov needs momentum and no dampening, and they are "
                f"{group['momentum']} and {group['dampening']}; set them above 0 and to 0"
            )

    def update(
        self,
        group: ParamGroup,
        state: ParamState,
        param: Tensor,
        master: Tensor,
        grad: Tensor,
        seed: int,
    ) -> None:
        moving = group["momentum"] != 0
        first = moving and state.get("momentum_buffer") is None
        if first:
            state["momentum_buffer"] = self.new_moment(group, "momentum_buffer", param)
        sgd(self.arrays(state, master), grad, None, _call(group, 0, seed, first))


def _call(group: ParamGroup, step: int, seed: int, first: bool = False) -> Call:
    """Return the arguments of an update by the optimizer itself, whose gradients have no scale."""
    return Call(group, step, 1.0, seed, first)


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


def _anywhere(call: Call) -> bool:
    """Return whether the update takes tensors of any device."""
    return call.group.get("moments") == "dynamic8"


def _betas(call: Call) -> dict[str, Any]:
    beta1, beta2 = call.group["betas"]
    return {"beta1": float(beta1), "beta2": float(beta2)}


def adam_of_dialect(
    cls: type[CPUAdam], params: Mapping[str, object], settings: dict[str, object]
) -> tuple[type[CPUAdam], dict[str, object]]:
    """Return class and settings of the checked parameters ``params`` of a configuration."""
    mode = params.get("adam_w_mode", params.get("adamw_mode", True))
    return cls, {**settings, "adamw_mode": mode}


def adam(arrays: StateArrays, grad: Tensor, out: Tensor | None, call: Call) -> None:
    """Make one step of Adam or AdamW."""
    host.adam(
        arrays[MASTER],
        grad,
        arrays["exp_avg"],
        arrays["exp_avg_sq"],
        step=call.step,
        eps=float(call.group["eps"]),
        decoupled=bool(call.group["decoupled_weight_decay"]),
        corrected=bool(call.group.get("bias_correction", True)),
        max_exp_avg_sq=arrays["max_exp_avg_sq"] if call.group["amsgrad"] else None,
        seed=call.seed,
        on_host=not _anywhere(call),
        **_betas(call),
        **_shared(out, call),
    )


def lion(arrays: StateArrays, grad: Tensor, out: Tensor | None, call: Call) -> None:
    """Make one step of Lion."""
    host.lion(
        arrays[MASTER], grad, arrays["exp_avg"], seed=call.seed, on_host=not _anywhere(call),
        **_betas(call), **_shared(out, call)
    )  # fmt: skip


def adagrad(arrays: StateArrays, grad: Tensor, out: Tensor | None, call: Call) -> None:
    """Make one step of Adagrad."""
    host.adagrad(
        arrays[MASTER], grad, arrays["sum"], step=call.step, lr_decay=float(call.group["lr_decay"]),
        eps=float(call.group["eps"]), **_shared(out, call)
    )  # fmt: skip


def sgd(arrays: StateArrays, grad: Tensor, out: Tensor | None, call: Call) -> None:
    """Make one step of SGD."""
    host.sgd(
        arrays[MASTER],
        grad,
        arrays["momentum_buffer"] if call.group["momentum"] else None,
        first_step=call.is_first_step,
        momentum=float(call.group["momentum"]),
        dampening=float(call.group["dampening"]),
        nesterov=bool(call.group["nesterov"]),
        on_host=not _anywhere(call),
        **_shared(out, call),
    )
