"""What a plan of an engine has read, to see whether a later step has changed it."""

from __future__ import annotations

from collections.abc import Mapping
from operator import is_
from typing import Any

import torch
from torch import nn

from hf_zero.zero.layout.walk import buffers_of, modules_of, parameters_with
from hf_zero.zero.transaction import config_of_module

_TABLES = ("_parameters", "_buffers", "_modules")


class PlanInputs:
    """Modules, tensors and groups as a plan of an engine has read them.

    All attributes count, whether a plan reads them or not. Objects are compared by identity. The
    record keeps them alive, so that none of them can be mistaken for a later one at its address.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None):
        self._objects: list[object] = [optimizer]
        self._values: list[object] = []
        configs: dict[int, Any] = {}
        for module in modules_of(model):
            attributes = module.__dict__
            self._add(module, attributes)
            for table in _TABLES:
                if attributes[table]:
                    self._add(None, attributes[table])
            if "config" in attributes:
                config = config_of_module(module)
                configs.setdefault(id(config), config)
        for config in filter(None, configs.values()):
            self._add(config, vars(config))
        for tensor in (*parameters_with(model, optimizer), *buffers_of(model)):
            self._add(tensor, vars(tensor))
            self._values.append((tensor.shape, tensor.dtype, tensor.requires_grad, tensor.device))
        if optimizer is not None:
            self._add(optimizer, vars(optimizer))
            self._objects += optimizer.state
            for group in optimizer.param_groups:
                self._add(group, {**group, "params": None})
                self._objects += group["params"]

    def _add(self, owner: object, attributes: Mapping[str, object]) -> None:
        self._objects += (owner, type(owner), *attributes.values())
        self._values += attributes

    def same(self, other: PlanInputs) -> bool:
        """Return whether nothing has changed between both."""
        return (
            len(self._objects) == len(other._objects)
            and all(map(is_, self._objects, other._objects))
            and self._values == other._values
        )
