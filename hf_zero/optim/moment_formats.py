"""What an optimizer says of the place of its update and of the format of its moments."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from hf_zero.errors import UnsupportedOptimizerError
from hf_zero.ops.coded_arrays import ArrayCodec
from hf_zero.optim.segments import ParamGroup
from hf_zero.zero.layout.flat_layout import Slot

# settings of groups that say in which format moments are kept: no load changes them
FORMATS = ("moments", "optim_bits", "min_8bit_size", "whole_blocks_of")


class FormattedOptimizer(torch.optim.Optimizer):
    """An optimizer whose groups have settings of :data:`FORMATS`."""

    # the format of the moments of a segment, by an engine that has cut parameters into segments
    segment_format: Callable[[Tensor], str] | None = None

    def updates_in_host_memory(self, device: torch.device) -> bool:
        """Return whether the optimizer cannot update state on ``device``."""
        return False

    def keeps_in_8_bits(self, group: ParamGroup, param: Tensor, slot: Slot) -> bool:
        """Return whether the moments of ``param``, which is at ``slot`` and of ``group``, are kept
        in 8 bits.
        """
        return False

    def codec_of(self, name: str) -> ArrayCodec | None:
        """Return the format of state ``name`` of such parameters; None: that of others."""
        return None


def updates_in_host_memory(optimizer: torch.optim.Optimizer, device: torch.device) -> bool:
    """Return whether ``optimizer`` cannot update state on ``device``."""
    return isinstance(optimizer, FormattedOptimizer) and optimizer.updates_in_host_memory(device)


def codec_of(optimizer: torch.optim.Optimizer, name: str) -> ArrayCodec | None:
    """Return the format of state ``name`` of parameters with moments in 8 bits, if it has one."""
    return optimizer.codec_of(name) if isinstance(optimizer, FormattedOptimizer) else None


def refuse_on_device(optimizer: torch.optim.Optimizer, device: torch.device, key: str) -> None:
    """Raise UnsupportedOptimizerError if ``optimizer`` cannot update the state of the flat buffer
    ``key``, which is not offloaded.
    """
    if updates_in_host_memory(optimizer, device):
        raise UnsupportedOptimizerError(
            f"{type(optimizer).__name__} updates state in host memory, and that of {key!r} is on "
            f"{device.type!r} without offload; set zero_optimization.offload_optimizer to "
            '{"device": "cpu"}, without a ratio, or use the class of torch.optim, or moments in '
            "'fp32' or 'bf16' in place of 'int8'"
        )


def names_in_8_bits(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, Tensor],
    slots: Mapping[str, Slot],
    group_of: Mapping[str, int],
) -> frozenset[str]:
    """Return the names of parameters whose moments ``optimizer`` keeps in 8 bits.

    ``parameters``: name -> the object the optimizer holds; ``slots``: name -> its place.
    """
    if not isinstance(optimizer, FormattedOptimizer):
        return frozenset()
    groups = optimizer.param_groups
    return frozenset(
        name
        for name, slot in slots.items()
        if name in group_of
        and optimizer.keeps_in_8_bits(groups[group_of[name]], parameters[name], slot)
    )
