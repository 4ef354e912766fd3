"""Rules by which the host kernels make an update in place of an optimizer's own, and the settings
that they support.

A rule is chosen by the listed class of an optimizer (see ``elementwise.py``). Its result equals the
class's own up to rounding; with a setting that the rule does not support, the class makes the
update.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hf_zero.offload.storage import MASTER
from hf_zero.offload.sub_group_update import Call, Rule
from hf_zero.optim.cpu import CPUSGD, CPUAdagrad, CPUAdam, CPULion
from hf_zero.optim.kernel_calls import adagrad, adam, lion, sgd
from hf_zero.optim.lion import Lion
from hf_zero.optim.whole_tensor import Parts, WholeTensorOptimizer


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


def of_rounds(cls: type[WholeTensorOptimizer], group: Mapping[str, Any]) -> Rule:
    """Return the rule of ``cls`` for ``group``: its own rounds and update."""
    names = cls.moments_of(group)

    def parts(held: Mapping[str, Any], grad: Tensor, call: Call) -> Parts:
        assert call.whole is not None
        found = Parts(
            [held[MASTER]],
            [grad],
            [[held[name]] for name in names],
            [call.step],
            [call.whole.factors],
            [call.whole.place],
            divisor=call.divisor,
        )
        found.results = [result.unsqueeze(0) for result in call.whole.results]
        return found

    def prepare(held: Mapping[str, Any], grad: Tensor, call: Call, at: int) -> Tensor:
        return cls.prepare(call.group, parts(held, grad, call), at)[0]

    def update(held: Mapping[str, Any], grad: Tensor, out: Tensor | None, call: Call) -> None:
        cls.apply(call.group, parts(held, grad, call))
        if out is not None:
            out.copy_(held[MASTER])

    return Rule(update, _usual, {}, prepare if cls.prepares(group) else None)


def rule_of(base: type | None, group: Mapping[str, Any]) -> Rule | None:
    """Return the rule for a group of an optimizer with the update of the listed class ``base``, or
    None.
    """
    if base is not None and issubclass(base, WholeTensorOptimizer):
        return of_rounds(base, group)
    for cls in base.__mro__ if base is not None else ():
        if cls in RULES:
            return RULES[cls] if RULES[cls].knows(group) else None
    return None
