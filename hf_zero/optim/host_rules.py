"""Which updates the host kernels make in the place of an optimizer's own, and with which of its
settings.

A rule is chosen by the listed class that an optimizer is (see ``elementwise.py``). Its result is
the class's own up to rounding; a setting that it does not know leaves the update to the class.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_zero.ops.host import Moment
from hf_zero.optim.cpu import CPUSGD, CPUAdagrad, CPUAdam, CPULion
from hf_zero.optim.kernel_calls import Call, adagrad, adam, lion, sgd
from hf_zero.optim.lion import Lion


@dataclass(frozen=True)
class Rule:
    """``update(arrays by state name, gradient, values to write, call)``; ``compressible`` are
    the states that may be kept in 16 or 8 bits.
    """

    update: Callable[[Mapping[str, Moment], Tensor, Tensor | None, Call], None]
    knows: Callable[[Mapping[str, Any]], bool]
    compressible: Mapping[str, bool]  # name: signed


def _usual(group: Mapping[str, Any]) -> bool:
    return not group.get("differentiable") and not group.get("capturable")


def _numbers(group: Mapping[str, Any]) -> bool:
    return _usual(group) and not any(isinstance(value, torch.Tensor) for value in group["betas"])


ADAM = Rule(adam, _numbers, {"exp_avg": True, "exp_avg_sq": False})
LION = Rule(lion, _numbers, {"exp_avg": True})
ADAGRAD, SGD = Rule(adagrad, _usual, {}), Rule(sgd, _usual, {})
RULES: dict[type, Rule] = {
    torch.optim.Adam: ADAM,
    CPUAdam: ADAM,
    Lion: LION,
    CPULion: LION,
    torch.optim.Adagrad: ADAGRAD,
    CPUAdagrad: ADAGRAD,
    torch.optim.SGD: SGD,
    CPUSGD: SGD,
}


def rule_of(base: type | None, group: Mapping[str, Any]) -> Rule | None:
    """The rule for a group of an optimizer whose update is that of the listed class ``base``;
    None where there is none.
    """
    for cls in base.__mro__ if base is not None else ():
        if cls in RULES:
            return RULES[cls] if RULES[cls].knows(group) else None
    return None
