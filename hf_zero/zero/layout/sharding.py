"""Which ranks hold a parameter, and which part of it, where a model is split over ranks by more
than ZeRO: by tensor or expert parallelism.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from hf_zero.zero.layout.box import Box

_ATTRIBUTE = "_hf_zero_sharding"


@dataclass(frozen=True)
class Sharding:
    """How a parameter is spread over the ranks of its pipeline stage.

    axes: along these ("tensor", "expert", or both) ranks hold different parts of it; all others
    hold the same values, which ZeRO shards or replicates among them. partial: the gradient of a
    rank is its part of a sum over the tensor-parallel ranks, as that of a weight that is whole but
    used by this rank's attention heads alone (a norm of queries, a bias that one rank adds); else
    all tensor-parallel ranks have the same gradient. box: which part of the whole tensor this
    rank holds, for checkpoints; None: all of it, or nobody needs to know. stages: of a pipeline,
    those that hold it, where there are several: each has a part of its gradient. names: where the
    ranks along the first axis hold parameters of different modules under one name, what each of
    these modules is called in the whole model, the first as here; the box is of the others.
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
        """How a parameter that is spread so, of ``shape`` on this rank, is spread once it is cut
        along ``axis``, too: rank ``rank`` of ``size`` keeps its part of dimension ``dim``.

        Raises ValueError where it cannot be cut evenly.
        """
        held = self.box or Box(shape, ())
        box = held.further(dim, rank, size, packed)
        return replace(self, axes=tuple(sorted((*self.axes, axis))), box=box)

    @property
    def key(self) -> str:
        """A word for the ranks and the average of its gradient; "" where all ranks of the stage
        hold it and have its gradient.
        """
        tied = ("tied",) if self.stages else ()
        return "+".join((*self.axes, *(("partial",) if self.partial else ()), *tied))


WHOLE = Sharding()  # of parameters that nothing was said of


def set_sharding(parameter: torch.Tensor, sharding: Sharding) -> None:
    """Say how ``parameter`` is spread over ranks, before an engine takes it.

    Raises ValueError where the shape is not that of its box.
    """
    if sharding.box is not None and tuple(parameter.shape) != sharding.box.shape:
        raise ValueError(
            f"a parameter of shape {tuple(parameter.shape)} is said to be a part of shape "
            f"{sharding.box.shape} of one of shape {sharding.box.whole}; cut the parameter first"
        )
    parameter.__dict__[_ATTRIBUTE] = sharding


def sharding_of(parameter: torch.Tensor) -> Sharding:
    """What :func:`set_sharding` was given; :data:`WHOLE` by default."""
    return parameter.__dict__.get(_ATTRIBUTE, WHOLE)
