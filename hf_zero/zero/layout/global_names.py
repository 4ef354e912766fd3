"""What parameters are called in the whole model, where ranks hold different modules under one name:
the experts of a list, which each rank numbers from 0 on.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hf_zero.distributed.parallel_groups import get_parallel
from hf_zero.zero.layout.cut_parameters import join_named
from hf_zero.zero.layout.sharding import sharding_of


class WholeNames:
    """Names of parameters and buffers of ``module`` in the whole model (``Sharding.names``)."""

    def __init__(self, module: nn.Module):
        held = {sharding_of(parameter).names for parameter in module.parameters()} - {()}
        self._modules = {names[0]: names for names in held}
        groups = get_parallel()
        self._rank = groups.coordinate("expert") if held and groups is not None else 0

    def __bool__(self) -> bool:
        """Whether there are modules that differ between ranks."""
        return bool(self._modules)

    def every(self, name: str) -> tuple[str, ...]:
        """What ``name`` is called on each rank in turn; ``name`` alone where all hold the same."""
        module, dot, _ = name.rpartition(".")
        while dot and self._modules:
            if module in self._modules:
                return tuple(each + name[len(module) :] for each in self._modules[module])
            module, dot, _ = module.rpartition(".")
        return (name,)

    def own(self, name: str) -> str:
        """What this rank's ``name`` is called."""
        names = self.every(name)
        return names[self._rank] if len(names) > 1 else name

    def pairs(self, names: Mapping[str, str]) -> dict[str, str]:
        """``names``, of this rank on both sides, of each rank in turn."""
        found = (zip(self.every(one), self.every(other)) for one, other in names.items())
        return dict(itertools.chain.from_iterable(found))

    def wholes(self, parameter: torch.Tensor, value: torch.Tensor, name: str) -> Any:
        """(name, whole tensor) of what the ranks hold under ``name``, of ``value``, this rank's
        (collective where it is cut, or they differ).
        """
        return zip(self.every(name), join_named(sharding_of(parameter), value, name), strict=True)
