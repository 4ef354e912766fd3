"""Memory of the reference, in which each rank holds the whole model."""

from __future__ import annotations

import torch
from torch import nn

from hf_zero.config import ZeroConfig
from hf_zero.device.free_memory import free_bytes
from hf_zero.distributed import process_group
from hf_zero.errors import DoesNotFitError
from hf_zero.logging import in_units

MOMENT = 4  # bytes of an element of an optimizer's moment


def reference_bytes(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, config: ZeroConfig
) -> int:
    """Return the bytes of weights, master weights, gradients and moments on each rank."""
    groups = [] if optimizer is None else optimizer.param_groups
    moments = {
        id(parameter): _moments(group) * MOMENT for group in groups for parameter in group["params"]
    }
    in_16_bits = config.precision != "fp32"
    total = 0
    for parameter in model.parameters():
        if id(parameter) not in moments:
            size = 2 if in_16_bits and parameter.is_floating_point() else parameter.element_size()
        elif in_16_bits:
            size = 2 + 4 + 2 + 4 + moments[id(parameter)]  # also as masters; gradients likewise
        else:
            size = 2 * parameter.element_size() + moments[id(parameter)]
        total += size * parameter.numel()
    return total + sum(buffer.nbytes for buffer in model.buffers())


def _moments(group: dict[str, object]) -> int:
    """Return the number of moments of an optimizer with this group: two, unless it is SGD."""
    return 2 if "momentum" not in group else int(bool(group["momentum"]))


def refuse_too_large(needed: int) -> None:
    """Raise DoesNotFitError if a rank has no room for ``needed`` bytes of the reference."""
    free = free_bytes(process_group.default_device())
    if needed > free:
        raise DoesNotFitError(
            f"the reference holds the whole model on each rank, in {in_units(needed)}, and a rank "
            f"has {in_units(free)}: compare the script with a smaller model of the same kind, such "
            "as fewer layers, with fewer --ranks, or with an optimizer with less state"
        )
