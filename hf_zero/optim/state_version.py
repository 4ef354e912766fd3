"""Whether optimizer state has changed between two moments, without a copy of it."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import ref

from torch import Tensor

from hf_zero.ops.coded_arrays import CodedArray

if TYPE_CHECKING:
    from hf_zero.optim.optimizer_state import OptimizerState


class TensorVersion:
    """A tensor as it is now: equal to another one of the same tensor without a write in place in
    between. It keeps no tensor alive, and equals none of a freed tensor, whose id another may have.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._writes = ref(tensor), tensor._version

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TensorVersion):
            return False
        tensor = self._tensor()
        return tensor is not None and (tensor is other._tensor() and self._writes == other._writes)


def state_version(state: OptimizerState) -> tuple[object, ...]:
    """Return a value that differs after every load, write in place to or replacement of optimizer
    state. After a step it may be equal. Stores what a script has written to ``optimizer.state``.
    """
    state.members.shown.take()
    versions = list[object]()
    # lists: an update on another thread may add entries
    for entry in [*state.table.entries.states.values()]:
        for name, value in [*entry.items()]:
            value = value.codes if isinstance(value, CodedArray) else value
            versions += name, TensorVersion(value) if isinstance(value, Tensor) else value
    return state.scalars.loads, state.writes, *versions
