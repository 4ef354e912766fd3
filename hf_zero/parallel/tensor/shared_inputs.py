"""One sum in the backward for layers that read the same input: queries, keys and values; gate and
up.
"""

from __future__ import annotations

from typing import Any

import torch

from hf_zero.parallel.tensor.axis import TensorAxis, copy_to


class SharedInputs:
    """What the sharded layers of one module read: each input is copied to them once, so that its
    gradient is summed over the ranks once.

    A copy is kept until each layer has run, or one of them runs again (another forward: an
    exception, or a recomputation that stops early, has broken the one before).
    """

    def __init__(self, name: str):
        self.name = name
        self._members = 0
        self._ran: list[int] = []
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedInputs:
        copied = SharedInputs(self.name)
        copied._members = self._members
        memo[id(self)] = copied
        return copied

    def join(self) -> int:
        """The number of one more layer."""
        self._members += 1
        return self._members - 1

    def copy(self, x: torch.Tensor, member: int, axis: TensorAxis) -> torch.Tensor:
        """``x`` for layer ``member``."""
        if not (torch.is_grad_enabled() and x.requires_grad):
            return x
        if self._members == 1:
            return copy_to(x, axis, self.name)
        if member in self._ran:
            self._ran, self._copies = [], []
        self._ran.append(member)
        made = None
        for given, copy in self._copies:
            if given is x:
                made = copy
        if made is None:
            made = copy_to(x, axis, self.name)
            self._copies.append((x, made))
        if len(self._ran) == self._members:
            self._ran, self._copies = [], []
        return made
