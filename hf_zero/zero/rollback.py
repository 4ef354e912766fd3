"""Rollback of the construction of an engine that an exception breaks off."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

# an engine hands these on: parameters stay in flat buffers, and buffers on the device
_KEPT = ("_parameters", "_buffers", "_modules")


class _Attributes:
    """The attributes of ``owner``, with the entries of its tables of hooks."""

    def __init__(self, owner: Any):
        self._owner, self._class = owner, type(owner)
        self._values = {key: value for key, value in vars(owner).items() if key not in _KEPT}
        self._hooks = [
            (table, table.copy())
            for key, table in self._values.items()
            if "_hooks" in key and isinstance(table, dict)
        ]

    def restore(self) -> None:
        """Set the attributes and the entries to these values."""
        live, self._owner.__class__ = vars(self._owner), self._class
        for key in [key for key in live if key not in self._values and key not in _KEPT]:
            del live[key]
        live.update(self._values)
        for table, entries in self._hooks:
            # the same table: handles of the script's own hooks refer to it
            table.clear()
            table.update(entries)


@contextmanager
def rolled_back(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Iterator[None]:
    """Context for the construction of an engine. If an exception leaves it, the modules of
    ``model`` and ``optimizer`` have the hooks, methods, groups and state from its begin, whichever
    lines have run, so that another engine can be constructed.
    """
    owners = [_Attributes(owner) for owner in (*model.modules(), optimizer) if owner is not None]
    groups = [] if optimizer is None else optimizer.param_groups
    contents = [(group, group | {"params": [*group["params"]]}) for group in groups]
    state = {} if optimizer is None else {**optimizer.state}
    try:
        yield
    except BaseException:
        for owner in owners:
            owner.restore()
        for group, content in contents:
            group.clear()
            group.update(content)
        if optimizer is not None:
            optimizer.state.clear()
            optimizer.state.update(state)
        raise
