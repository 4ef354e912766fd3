"""What an engine asks about parameters with a class of their own. The core lays out none of them; a
row of ``config/features.toml`` provides the class that knows some.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import nn

from hf_zero.config.feature_rows import provided
from hf_zero.zero.layout.parameter import given_class

if TYPE_CHECKING:
    from hf_zero.distributed.mesh import Mesh
    from hf_zero.zero.layout.initial_values import FormerValues, Source


class ParameterClasses:
    """The interface, and the answers without such a row."""

    def refusal(self, parameter: torch.Tensor, device: torch.device) -> str | None:
        """Return the reason and the remedy if the class of ``parameter`` cannot be laid out on
        ``device``; None if it can.
        """
        kind = type(parameter)
        if kind is nn.Parameter:
            return None
        return (
            f"is a {kind.__name__}, whose memory cannot be laid out flat; pass a model of plain "
            "nn.Parameters"
        )

    def describe(self, parameter: torch.Tensor) -> str:
        """Return the class of ``parameter``, to compare ranks; "" for a plain one."""
        kind = given_class(parameter)
        return "" if kind is nn.Parameter else kind.__qualname__

    def register(self, model: nn.Module, push_inverse: Callable[..., object] | None = None) -> None:
        """Make further tensors that parameters of ``model`` consist of, or refer to, parameters of
        the same module. ``push_inverse`` is called with a function that undoes a change, and its
        arguments.
        """

    def drop(self, optimizer: torch.optim.Optimizer) -> None:
        """Remove parameters that :meth:`register` replaces from the groups of ``optimizer``."""

    def read(self, parameters: Iterable[torch.Tensor], mesh: Mesh, former: FormerValues) -> None:
        """Read the tensors of ``parameters`` that no flat buffer has; ``former`` keeps errors."""

    def broadcast(self, parameters: Iterable[torch.Tensor], mesh: Mesh) -> None:
        """Broadcast the tensors of ``parameters`` that no flat buffer has (collective)."""

    def make_pending(
        self, weight: torch.Tensor | None, source_of: Callable[[torch.Tensor], Source | None]
    ) -> None:
        """Make the parts of ``weight`` pending of which ``source_of`` returns a source."""

    def join_in_state(self, module: nn.Module, state: dict[str, object], prefix: str) -> None:
        """Put weights of ``module`` in place of their parts into its state dict ``state``."""

    def part_in_state(self, module: nn.Module, state: dict[str, object], prefix: str) -> None:
        """Undo :meth:`join_in_state`, before ``state`` is loaded."""


@cache
def parameter_classes() -> ParameterClasses:
    """Return the object that knows parameters with a class of their own."""
    classes: ParameterClasses = provided("parameter_classes", ParameterClasses)()
    return classes


def is_cast(parameter: torch.Tensor) -> bool:
    """Return whether ``module.to(dtype)`` casts ``parameter``."""
    return parameter.is_floating_point() or parameter.is_complex()
