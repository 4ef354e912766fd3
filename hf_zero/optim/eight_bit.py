"""Adam, AdamW, Lion and SGD with moments in bitsandbytes' block-wise 8 bits, on any device.

Moments of a parameter with at least ``min_8bit_size`` elements take a byte an element and an fp32
scale for each 256. A smaller parameter has fp32 moments, and so has one with the attribute
``optim_bits = 32``. Blocks begin with each parameter. Under an engine they are the same on any
number of ranks: layouts align parameters and chunks to whole blocks (``flat_layout.py``).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT, StateDict

from hf_zero.errors import ConfigError, UnsupportedOptimizerError
from hf_zero.ops import dynamic_map
from hf_zero.ops.moment_blocks import Blocks
from hf_zero.optim import ranges
from hf_zero.optim.cpu import CPUSGD, CPUAdam, CPULion
from hf_zero.optim.cpu_base import CPUOptimizer
from hf_zero.optim.segments import ParamState
from hf_zero.zero.layout.flat_layout import LARGE


def keep_8_bits(optimizer: torch.optim.Optimizer, optim_bits: int, min_8bit_size: int) -> None:
    """Have ``optimizer`` keep its moments in ``optim_bits``, in groups that set nothing else.

    Raises:
        ConfigError: other bits than 8 and 32, or a size below that from which layouts align
            parameters.
    """
    kind = type(optimizer).__name__
    settings = {"moments": "dynamic8", "optim_bits": optim_bits, "min_8bit_size": min_8bit_size}
    optimizer.defaults |= settings
    for group in optimizer.param_groups:
        for name, value in settings.items():
            group.setdefault(name, value)
        if group["optim_bits"] not in (8, 32):
            raise ConfigError(
                f"{kind}: optim_bits is {group['optim_bits']!r}; write 8, or 32 for moments in fp32"
            )
        size = group["min_8bit_size"]
        if not ranges.is_number(size) or not size >= LARGE:
            raise ConfigError(
                f"{kind}: min_8bit_size is {size!r}, and moments of parameters of "
                f"fewer than {LARGE} elements stay in fp32: write {LARGE} or more"
            )


WRAPPED = "__bnb_optimizer_quant_state__"  # entry of bitsandbytes' state dicts with tensors


def convert_state(state: ParamState, signed_names: Mapping[str, bool]) -> None:
    """Convert a parameter's 8-bit state of bitsandbytes or torchao in place to ``Blocks`` under
    this package's state names (the keys of ``signed_names``; value: whether signed). Other state
    keeps its values.

    Raises:
        UnsupportedOptimizerError: codes of another map than the dynamic one.
    """
    state |= state.pop(WRAPPED, {})
    for number, (name, signed) in enumerate(signed_names.items(), 1):
        value = state.pop(f"state{number}", state.get(name))
        codes, scales = value, state.pop(f"absmax{number}", None)
        qmap = state.pop(f"qmap{number}", None)
        if all(hasattr(value, part) for part in ("codes", "scale", "qmap")):  # torchao's
            codes, scales, qmap = value.codes, value.scale, value.qmap
        if scales is None:
            if value is not None:
                state[name] = value
            continue
        if qmap is not None and not torch.equal(qmap.cpu(), dynamic_map.values(signed)):
            raise UnsupportedOptimizerError(
                f"state {name!r} of an 8-bit optimizer has a map of its own, and hf-zero knows the "
                "dynamic map of bitsandbytes; load the weights without the optimizer's state"
            )
        state[name] = Blocks(codes.reshape(-1).clone(), scales.clone(), signed, dynamic=True)
    for name in ("max_exp_avg_sq", "unorm_vec"):
        if state.get(name) is None:
            state.pop(name, None)
    if isinstance(state.get("step"), int):
        state["step"] = torch.tensor(float(state["step"]), dtype=torch.float32, device="cpu")


def decoded_state_dict(state_dict: StateDict, signed: Mapping[str, bool]) -> StateDict:
    """Return ``state_dict``, of bitsandbytes or this package, with 8-bit states decoded to tensors
    of the parameter's shape, under this package's names.
    """
    states = {}
    for index, saved in state_dict["state"].items():
        state = dict(saved)
        shape = _shape_of(state)
        convert_state(state, signed)
        states[index] = {
            name: value.decode().view(shape) if isinstance(value, Blocks) else value
            for name, value in state.items()
        }
    return {**state_dict, "state": states}


def _shape_of(state: ParamState) -> tuple[int, ...]:
    value: Tensor | None = {**state, **state.get(WRAPPED, {})}.get("state1")
    return (-1,) if value is None else tuple(value.shape)


class _EightBit(CPUOptimizer):
    """An optimizer that also loads what bitsandbytes has saved."""

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load a state dict of this class, of the torch class of the same update or of
        bitsandbytes' class.

        Raises:
            UnsupportedOptimizerError: codes of another map than the dynamic one.
        """
        super().load_state_dict(decoded_state_dict(state_dict, self.moment_names))


class AdamW8bit(_EightBit, CPUAdam):
    """AdamW with moments in 8 bits.

    Args:
        params: parameters, in fp32 or 16 bits, or groups of them.
        lr, betas, eps, weight_decay: as in torch.optim.AdamW.
        min_8bit_size: least number of elements of a parameter whose moments are kept in 8 bits.
        optim_bits: 8, or 32 for moments in fp32.

    Raises:
        ConfigError: a setting out of range.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        min_8bit_size: int = LARGE,
        optim_bits: int = 8,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, moments="dynamic8")
        keep_8_bits(self, optim_bits, min_8bit_size)


class Adam8bit(_EightBit, CPUAdam):
    """Adam with moments in 8 bits: ``weight_decay`` is added to the gradient. The rest as in
    :class:`AdamW8bit`.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        min_8bit_size: int = LARGE,
        optim_bits: int = 8,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, adamw_mode=False, moments="dynamic8")
        keep_8_bits(self, optim_bits, min_8bit_size)


class Lion8bit(_EightBit, CPULion):
    """Lion with its moment in 8 bits.

    Args:
        params, lr, betas, weight_decay: as in :class:`hf_zero.optim.Lion`.
        min_8bit_size, optim_bits: as in :class:`AdamW8bit`.

    Raises:
        ConfigError: a setting out of range.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        min_8bit_size: int = LARGE,
        optim_bits: int = 8,
    ) -> None:
        super().__init__(params, lr, betas, weight_decay, moments="dynamic8")
        keep_8_bits(self, optim_bits, min_8bit_size)


class SGD8bit(_EightBit, CPUSGD):
    """Stochastic gradient descent with its momentum in 8 bits.

    Args:
        params, lr, momentum, dampening, weight_decay, nesterov: as in torch.optim.SGD.
        min_8bit_size, optim_bits: as in :class:`AdamW8bit`.

    Raises:
        ConfigError: a setting out of range.
    """

    moment_names = {"momentum_buffer": True}

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        min_8bit_size: int = LARGE,
        optim_bits: int = 8,
    ) -> None:
        super().__init__(params, lr, momentum, dampening, weight_decay, nesterov)
        keep_8_bits(self, optim_bits, min_8bit_size)
