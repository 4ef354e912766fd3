"""Results of deferred tensors that were computed in chunks, and how they are computed again for
gradients with respect to such a tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from hf_zero.errors import KernelError
from hf_zero.ops.dispatch import version_of

SELF = object()  # stands for the deferred tensor among arguments


@dataclass(frozen=True, eq=False)
class History:
    """The way to the value of a deferred tensor; it keeps no deferred tensor alive."""

    compute: Callable[[], torch.Tensor]
    replay: Callable[..., torch.Tensor]  # the value from those of its parents
    parents: tuple[History, ...]

    def value(self, of: History, value: torch.Tensor) -> torch.Tensor:
        """Return the value if that of ``of``, which it may be made of, was ``value``."""
        if self is of:
            return value
        if not self.parents:
            return self.compute()
        return self.replay(*(parent.value(of, value) for parent in self.parents))


@dataclass(frozen=True, eq=False)
class ChunkedUse:
    """A loss or another result that was computed in chunks: ``function`` of a deferred tensor."""

    result: torch.Tensor
    history: History
    function: Any
    args: Any
    kwargs: object
    versions: list[int | None] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "versions", self._versions())

    def _versions(self) -> list[int | None]:
        tensors = tree_leaves((self.args, self.kwargs))
        return [version_of(one) for one in tensors if isinstance(one, torch.Tensor)]

    def recomputed(self, of: History, value: torch.Tensor) -> torch.Tensor:
        """Return the result if the value of ``of`` was ``value``.

        Raises KernelError if an argument has changed since.
        """
        if self._versions() != self.versions:
            raise KernelError(
                f"an argument of {self.function.__name__} of deferred logits was changed in place "
                "before torch.autograd.grad; give it a copy, or leave the kernel loss out"
            )
        whole = self.history.value(of, value)
        args, kwargs = tree_map(lambda one: whole if one is SELF else one, (self.args, self.kwargs))
        return self.function(*args, **kwargs)  # type: ignore[no-any-return]
