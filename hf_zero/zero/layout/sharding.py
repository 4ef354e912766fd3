"""The ranks that hold a parameter, and their parts of it, for a model split by tensor or expert
parallelism besides ZeRO.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from hf_zero.zero.layout.box import Box

_ATTRIBUTE = "_hf_zero_sharding"


@dataclass(frozen=True)
class Sharding:
    """The distribution of a parameter over the ranks of its pipeline stage.

    axes: ranks hold different parts along these ("tensor", "expert", or both); all other ranks hold
    the same values, which ZeRO shards or replicates among them. partial: a rank's gradient is one
    term of a sum over the tensor-parallel ranks, as for a whole weight that only this rank's
    attention heads use (a norm of queries, a bias that one rank adds); else all tensor-parallel
    ranks have the same gradient. box: this rank's part of the whole tensor, for checkpoints; None:
    all of it, or not needed. stages: the pipeline stages that hold it, if several: each has a part
    of its gradient. names: for ranks along the first axis that hold parameters of different modules
    under one name, the whole-model names of these modules, the first as on this rank; the box is
    for the other axes.
    """

    axes: tuple[str, ...] = ()
    partial: bool = False
    box: Box | None = None
    stages: tuple[int, ...] = ()
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.axes not in ((), ("tensor",), ("expert",), ("expert", "tensor")):
            raise ValueError(
                f"a parameter cannot be sharded along {self.axes}; name ('tensor',), ('expert',) "
                "or ('expert', 'tensor')"
            )
        if self.partial and "tensor" in self.axes:
            raise ValueError(
                "the gradient of a parameter that is cut along 'tensor' is complete on its rank; "
                "leave partial out"
            )

    def further(
        self, shape: tuple[int, ...], axis: str, dim: int, rank: int, size: int, packed: int = 1
    ) -> Sharding:
        """Return the sharding of this parameter, of ``shape`` on this rank, after another cut along
        ``axis``: rank ``rank`` of ``size`` keeps its part of dimension ``dim``.

        Raises ValueError if it cannot be cut evenly.
        """
        held = self.box or Box(shape, ())
        box = held.further(dim, rank, size, packed)
        return replace(self, axes=tuple(sorted((*self.axes, axis))), box=box)

    @property
    def key(self) -> str:
        """An identifier of the ranks and the average of the gradient; "" if all ranks of the stage
        hold the parameter and its whole gradient.
        """
        tied = ("tied",) if self.stages else ()
        return "+".join((*self.axes, *(("partial",) if self.partial else ()), *tied))


WHOLE = Sharding()  # the default


def set_sharding(parameter: torch.Tensor, sharding: Sharding) -> None:
    """Set the sharding of ``parameter``, before an engine takes it.

    Raises ValueError if its shape is not that of the box.
    """
    if sharding.box is not None and tuple(parameter.shape) != sharding.box.shape:
        raise ValueError(
            f"a parameter of shape {tuple(parameter.shape)} is said to be a part of shape "
            f"{sharding.box.shape} of one of shape {sharding.box.whole}; cut the parameter first"
        )
    parameter.__dict__[_ATTRIBUTE] = sharding


def sharding_of(parameter: torch.Tensor) -> Sharding:
    """Return the sharding given to :func:`set_sharding`; :data:`WHOLE` by default."""
    return parameter.__dict__.get(_ATTRIBUTE, WHOLE)
