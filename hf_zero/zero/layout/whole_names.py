"""Names in the state dict of the whole model, where modules of an expert-parallel rank have others
than on that rank; and the tensors there beside the parameters.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping

import torch
from torch import nn
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX as EXTRA_STATE

from hf_zero.distributed.parallel_groups import get_parallel
from hf_zero.zero.layout.sharding import join_named, sharding_of


class WholeNames:
    """Whole-model names of the parameters and buffers of ``module`` (``Sharding.names``)."""

    def __init__(self, module: nn.Module):
        stacked = {sharding_of(parameter).names for parameter in module.parameters()} - {()}
        self._modules = {names[0]: names for names in stacked}
        groups = get_parallel() if stacked else None
        self._rank = groups.coordinate("expert") if groups is not None else 0

    def __bool__(self) -> bool:
        """Return whether any module differs between ranks."""
        return bool(self._modules)

    def every(self, name: str) -> tuple[str, ...]:
        """Return the whole-model names of ``name``, one a rank; a single one if all are equal."""
        module, dot, _ = name.rpartition(".")
        while dot and self._modules:
            if module in self._modules:
                return tuple(path + name[len(module) :] for path in self._modules[module])
            module, dot, _ = module.rpartition(".")
        return (name,)

    def own(self, name: str) -> str:
        """Return the whole-model name of this rank's ``name``."""
        names = self.every(name)
        return names[self._rank] if len(names) > 1 else name

    def every_of(self, names: Iterable[str]) -> dict[str, tuple[str, ...]]:
        """Return :meth:`every` by name."""
        return {name: self.every(name) for name in names}

    def own_of(self, names: Iterable[str]) -> dict[str, str]:
        """Return :meth:`own` by name."""
        return {name: self.own(name) for name in names}

    def pairs(self, names: Mapping[str, str]) -> dict[str, str]:
        """Return the mapping ``names`` of this rank's names for all ranks, in whole-model names."""
        renamed = (zip(self.every(one), self.every(other)) for one, other in names.items())
        return dict(itertools.chain.from_iterable(renamed))

    def wholes(
        self, parameter: torch.Tensor, value: torch.Tensor, name: str
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Return (name, whole tensor) pairs for all parameters that ranks hold under ``name``;
        ``value`` is this rank's. Collective if it is cut, or the ranks' modules differ.
        """
        return zip(self.every(name), join_named(sharding_of(parameter), value, name), strict=True)


def written(module: nn.Module) -> dict[str, object]:
    """Return the entries that ``module`` itself adds to a state dict, by its own names; a released
    parameter has only a shape there.
    """
    state: dict[str, object] = {}
    module._save_to_state_dict(state, "", keep_vars=True)
    return state


def persistent_buffers(module: nn.Module, without: Collection[str] = ()) -> dict[str, torch.Tensor]:
    """Return the tensors in ``state_dict`` that are not parameters, under every name they have
    there: buffers, the state of quantized weights.

    Tensors that accompany a parameter named in ``without`` are left out.
    """
    buffers = {}
    for prefix, child in module.named_modules(remove_duplicate=False):
        for name, value in written(child).items():
            if (
                name not in child._parameters
                and name != EXTRA_STATE
                and isinstance(value, torch.Tensor)
            ):
                buffers[f"{prefix}.{name}" if prefix else name] = value
    return {name: value for name, value in buffers.items() if not belongs(name, without)}


def belongs(name: str, parameters: Collection[str]) -> bool:
    """Return whether ``name`` is a tensor beside one of ``parameters``: ``layer.weight.absmax``
    beside ``layer.weight``.
    """
    parts = name.split(".")
    return any(".".join(parts[:length]) in parameters for length in range(1, len(parts)))
