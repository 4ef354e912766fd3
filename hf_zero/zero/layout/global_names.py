"""Parameter names in the whole model, for modules that differ between ranks under one name: the
experts of a list, which each rank numbers from 0.
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
    """Whole-model names of the parameters and buffers of ``module`` (``Sharding.names``)."""

    def __init__(self, module: nn.Module):
        held = {sharding_of(parameter).names for parameter in module.parameters()} - {()}
        self._modules = {names[0]: names for names in held}
        groups = get_parallel()
        self._rank = groups.coordinate("expert") if held and groups is not None else 0

    def __bool__(self) -> bool:
        """Whether any module differs between ranks."""
        return bool(self._modules)

    def every(self, name: str) -> tuple[str, ...]:
        """Return the whole-model names of ``name``, one a rank; a single one if all are equal."""
        module, dot, _ = name.rpartition(".")
        while dot and self._modules:
            if module in self._modules:
                return tuple(each + name[len(module) :] for each in self._modules[module])
            module, dot, _ = module.rpartition(".")
        return (name,)

    def own(self, name: str) -> str:
        """Return the whole-model name of this rank's ``name``."""
        names = self.every(name)
        return names[self._rank] if len(names) > 1 else name

    def pairs(self, names: Mapping[str, str]) -> dict[str, str]:
        """Return the mapping ``names`` of this rank's names for all ranks, in whole-model names."""
        found = (zip(self.every(one), self.every(other)) for one, other in names.items())
        return dict(itertools.chain.from_iterable(found))

    def wholes(self, parameter: torch.Tensor, value: torch.Tensor, name: str) -> Any:
        """Return (name, whole tensor) pairs for all parameters that ranks hold under ``name``;
        ``value`` is this rank's. Collective if it is cut, or the ranks' modules differ.
        """
        return zip(self.every(name), join_named(sharding_of(parameter), value, name), strict=True)
