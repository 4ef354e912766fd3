"""Memory of the reference, in which each rank holds the whole model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import zip_longest
from typing import Any

import torch
from torch import nn

from hf_zero.config import ZeroConfig
from hf_zero.device.free_memory import free_bytes
from hf_zero.distributed import process_group
from hf_zero.errors import DoesNotFitError
from hf_zero.logging import in_units
from hf_zero.optim.build import canonical_name
from hf_zero.parity.fewer_layers import block_lists
from hf_zero.setup.request import SetupRequest

MOMENT = 4  # bytes of an element of an optimizer's moment


def reference_bytes(
    parameters: Iterable[torch.Tensor], groups: Iterable[Mapping[str, Any]], config: ZeroConfig
) -> int:
    """Return the bytes of ``parameters``, and of the master weights, gradients and moments of those
    in ``groups`` of an optimizer, on each rank.
    """
    moments = {
        id(parameter): _moments(group) * MOMENT for group in groups for parameter in group["params"]
    }
    in_16_bits = config.precision != "fp32"
    total = 0
    for parameter in parameters:
        if id(parameter) not in moments:
            size = 2 if in_16_bits and parameter.is_floating_point() else parameter.element_size()
        elif in_16_bits:
            size = 2 + 4 + 2 + 4 + moments[id(parameter)]  # also as masters; gradients likewise
        else:
            size = 2 * parameter.element_size() + moments[id(parameter)]
        total += size * parameter.numel()
    return total


def _moments(group: Mapping[str, Any]) -> int:
    """Return the number of moments of an optimizer with this group: two, unless it is SGD."""
    return 2 if "momentum" not in group else int(bool(group["momentum"]))


def groups_of(request: SetupRequest[Any]) -> list[dict[str, Any]]:
    """Return the groups of the optimizer of ``request``, or such as one that is made later has."""
    if request.user_optimizer is not None:
        return request.user_optimizer.param_groups
    config = request.config.optimizer
    if config is None and request.optimizer is None:
        return []
    options = {} if config is None else dict(config.params)
    if config is not None and canonical_name(config.type) == "SGD":
        options.setdefault("momentum", 0)
    given = request.model_parameters or [p for p in request.model.parameters() if p.requires_grad]
    groups = [of if isinstance(of, dict) else {"params": [of]} for of in given]
    return [{**options, **group} for group in groups]


def refuse_too_large(request: SetupRequest[Any]) -> int:
    """Return the bytes of the reference of ``request`` on each rank. Raises DoesNotFitError if a
    rank has no room for them, with the number of blocks of the model for which it has.
    """
    model, config, groups = request.model, request.config, groups_of(request)
    needed = reference_bytes(model.parameters(), groups, config)
    needed += sum(buffer.nbytes for buffer in model.buffers())
    free = free_bytes(process_group.default_device())
    if needed <= free:
        return needed
    blocks = [
        reference_bytes((p for of in same for p in of.parameters()), groups, config)
        for same in zip_longest(*block_lists(model), fillvalue=nn.Identity())
    ]
    layers, rest = len(blocks), needed
    while layers and rest > free:
        layers -= 1
        rest -= blocks[layers]
    todo = "compare the script with a smaller model of the same kind"
    if layers and rest <= free:
        todo = f"pass --layers {layers}, which makes and loads {layers} of {len(blocks)} blocks"
    raise DoesNotFitError(
        f"the reference holds the whole model on each rank, in {in_units(needed)}, and a rank has "
        f"{in_units(free)}: {todo}, or compare with fewer --ranks, or with an optimizer with less "
        "state"
    )
