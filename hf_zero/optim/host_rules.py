"""The rules by which host kernels update offloaded state, and the formats in which that is stored.

A rule is chosen by the listed class of an optimizer (``elementwise.py``). Its result equals the
class's own up to rounding; with a setting that the rule does not support, the class makes the
update.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from hf_zero.errors import ConfigError, UnsupportedOptimizerError
from hf_zero.offload.storage import MASTER, StorageFormat
from hf_zero.offload.sub_group_update import Call, Rule
from hf_zero.ops.moment_blocks import BlocksFormat
from hf_zero.optim.cpu import CPUSGD, CPUAdagrad, CPUAdam, CPULion, adagrad, adam, lion, sgd
from hf_zero.optim.elementwise import update_base
from hf_zero.optim.initial_state import counted_elsewhere
from hf_zero.optim.lion import Lion
from hf_zero.optim.moment_formats import codec_of
from hf_zero.optim.segment_entries import SegmentStateAccess
from hf_zero.optim.segments import ParamGroup, StateArrays
from hf_zero.optim.whole_tensor import Parts, WholeTensorOptimizer


def _has_no_special_mode(group: ParamGroup) -> bool:
    return not group.get("differentiable") and not group.get("capturable")


def _has_plain_betas(group: ParamGroup) -> bool:
    return _has_no_special_mode(group) and not any(
        isinstance(value, torch.Tensor) for value in group["betas"]
    )


ADAM = Rule(adam, _has_plain_betas, {"exp_avg": True, "exp_avg_sq": False})
LION = Rule(lion, _has_plain_betas, {"exp_avg": True})
ADAGRAD = Rule(adagrad, _has_no_special_mode, {})
SGD = Rule(sgd, _has_no_special_mode, {})
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


def rule_of(base: type | None, group: ParamGroup) -> Rule | None:
    """Return the rule for a group of an optimizer that updates as the listed ``base``, or None."""
    if base is not None and issubclass(base, WholeTensorOptimizer):
        return _whole_tensor_rule(base, group)
    for cls in base.__mro__ if base is not None else ():
        if cls in RULES:
            return RULES[cls] if RULES[cls].knows(group) else None
    return None


def _whole_tensor_rule(cls: type[WholeTensorOptimizer], group: ParamGroup) -> Rule:
    """Return the rule by which a whole-tensor optimizer ``cls`` updates ``group`` in rounds."""
    names = cls.moments_of(group)

    def parts(arrays: StateArrays, grad: Tensor, call: Call) -> Parts:
        assert call.whole is not None
        round_parts = Parts(
            [arrays[MASTER]],
            [grad],
            [[arrays[name]] for name in names],
            [call.step],
            [call.whole.tensor_state],
            [call.whole.place],
            divisor=call.divisor,
        )
        round_parts.results = [result.unsqueeze(0) for result in call.whole.results]
        return round_parts

    def prepare(arrays: StateArrays, grad: Tensor, call: Call, at: int) -> Tensor:
        return cls.prepare(call.group, parts(arrays, grad, call), at)[0]

    def update(arrays: StateArrays, grad: Tensor, out: Tensor | None, call: Call) -> None:
        cls.apply(call.group, parts(arrays, grad, call))
        if out is not None:
            out.copy_(arrays[MASTER])

    return Rule(update, _has_no_special_mode, {}, prepare if cls.prepares(group) else None)


def compressible(optimizer: torch.optim.Optimizer, group: ParamGroup) -> Mapping[str, bool]:
    """Return the states of ``group`` that offload in fewer bits, with whether they have signs."""
    rule = rule_of(update_base(type(optimizer)), group)
    return {} if rule is None else rule.compressible


def stored_format(
    entries: SegmentStateAccess,
    moments: str,
    group: int,
    name: str,
    dtype: torch.dtype,
    unquantized_sub_groups: frozenset[int] | None,
) -> StorageFormat:
    """Return the storage format of state ``name``, of ``dtype`` on the device, of group ``group``
    under the configured ``moments``. ``unquantized_sub_groups``: indices of the sub-groups none of
    whose parameters has 8-bit moments; None: all.

    Raises ConfigError for a state that is kept in fp32 only.
    """
    optimizer, settings = entries.optimizer, entries.groups[group]
    moments = settings.get("moments", "fp32") if moments == "fp32" else moments
    narrow = entries.bf16 is not None and entries.bf16.moments
    if moments == "fp32" or dtype != torch.float32 or narrow:
        return StorageFormat(dtype)
    if moments == "dynamic8":
        codec = codec_of(optimizer, name)
        if unquantized_sub_groups is None or codec is None:
            return StorageFormat(dtype)
        return StorageFormat(dtype, codec, unquantized_sub_groups)
    signs = compressible(optimizer, settings)
    if name not in signs:
        raise ConfigError(
            f"offload_optimizer.moments = {moments!r}: state {name!r} of "
            f"{type(optimizer).__name__} is kept in fp32 only; use Adam, AdamW or Lion, or write "
            '"moments": "fp32"'
        )
    if moments == "bf16":
        return StorageFormat(torch.bfloat16)
    return StorageFormat(dtype, BlocksFormat(signs[name]))


def refuse_offload(optimizer: torch.optim.Optimizer) -> None:
    """Raise UnsupportedOptimizerError for an optimizer that the user vouches for and that counts
    its steps outside the state of its parameters.
    """
    if update_base(type(optimizer)) is not None:
        return
    counted = [
        name for group in optimizer.param_groups for name in counted_elsewhere(optimizer, group)
    ]
    if counted:
        raise UnsupportedOptimizerError(
            f"optimizer {type(optimizer).__name__} changes {sorted(set(counted))} of its groups or "
            "of itself in each step(), and offloaded state is stepped sub-group by sub-group: keep "
            "that number in the state of each parameter, or do not offload the optimizer"
        )
