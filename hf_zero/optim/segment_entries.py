"""State by segment, and by kind. A parameter, or a segment of several, has *per-element* tensors
(moments), *scalars* (a step count), and, for an update over whole tensors, state of its whole
tensor; any other kind is refused. ``SegmentStateAccess`` has the entries of segments,
``NarrowStates`` is their form in fewer bits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, MutableMapping, Sequence
from contextlib import AbstractContextManager
from numbers import Number
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor

from hf_zero.errors import UnsupportedOptimizerError
from hf_zero.ops.coded_arrays import CodedArray, StateArray
from hf_zero.optim.segments import ParamState, Segment, StateArrays
from hf_zero.optim.whole_tensor import tensor_state_names

# Numbers that torch.optim keeps beside the tensors, with their values before the first step.
SCALARS: dict[str, float] = {"step": 0.0, "mu_product": 1.0, "mu": 1.0, "eta": 0.0}
View = Callable[["Segment", str], object]
"""Memory of a state of a segment."""


def is_scalar(name: str, value: object, shape: Sequence[int]) -> bool:
    """Return whether state ``name`` of a parameter of ``shape`` is one number for all of it."""
    if isinstance(value, Tensor):
        if value.numel() != 1:
            return False
        return name in SCALARS or tuple(value.shape) != tuple(shape)
    return isinstance(value, Number)


def is_elementwise(name: str, value: object, shape: Sequence[int]) -> bool:
    """Return whether state ``name`` of a parameter of ``shape`` is a tensor with one value per
    element of it.
    """
    return (
        isinstance(value, Tensor)
        and tuple(value.shape) == tuple(shape)
        and not is_scalar(name, value, shape)
    )


def without_none(state: StateArrays) -> ParamState:
    """Return the entries of one parameter's state that hold a value (SGD may keep
    ``momentum_buffer: None``).
    """
    return {name: value for name, value in state.items() if value is not None}


def refuse_unknown(
    optimizer: torch.optim.Optimizer, name: str, value: object, where: str
) -> NoReturn:
    what = f"a {type(value).__name__}"
    if isinstance(value, Tensor):
        what = f"a tensor of shape {tuple(value.shape)}"
    raise UnsupportedOptimizerError(
        f"optimizer {type(optimizer).__name__} keeps state {name!r} for {where} as {what}; a "
        "sharded optimizer can keep one number per "
        "element or one number per group. Use an optimizer whose state is element-wise."
    )


def scalar_like(value: Any, number: float) -> Any:
    """Return ``number`` in the form of ``value``: a tensor of its dtype, shape and device, or a
    Python number of its type.
    """
    if isinstance(value, Tensor):
        return torch.full_like(value, number)
    return type(value)(number)


def copy_of(value: Any) -> Any:
    """Return a copy of ``value``, a number or the state of a whole tensor."""
    return value.clone() if isinstance(value, Tensor) else value


def nothing() -> None:
    """Wait for nothing: no state is offloaded."""


class NarrowStates(Protocol):
    """The state of an optimizer in fewer bits between steps, in which it is in fp32: ``masters``
    and ``moments``, its per-element states; ``kahan``: with rounding errors of the former.
    """

    @property
    def masters(self) -> bool: ...
    @property
    def moments(self) -> bool: ...
    @property
    def kahan(self) -> bool: ...
    @property
    def most_widened(self) -> int:
        """The most elements on the device that are in fp32 together."""

    def cast_initial(self, state: ParamState, like: Tensor) -> ParamState:
        """Return the initial ``state`` in the dtypes in which it is kept."""

    def widen(self, arrays: StateArrays) -> ParamState:
        """Return ``arrays``, master weights and states by name, in fp32."""

    def narrow(
        self, segment: Segment, arrays: StateArrays, wide: StateArrays, steps_before: int
    ) -> None:
        """Round the arrays of ``segment`` in ``wide`` into those of ``arrays``."""

    def batches(self, segments: Sequence[Segment]) -> Sequence[Sequence[Segment]]:
        """Return ``segments`` in batches to be widened together; at least one."""

    def widened(
        self,
        segments: Sequence[Segment],
        states: MutableMapping[Tensor, ParamState],
        steps_before: int,
    ) -> AbstractContextManager[Callable[[Callable[[], None]], None]]:
        """Context in which ``segments`` and their ``states`` are in fp32. Yields a function that
        runs hooks, which may write to the weights in bf16.
        """


class SegmentStateAccess:
    """The optimizer's state by segment: ``states``, which ``optimizer.state`` is in a step of its
    own, with views of the arrays, placeholders and scalars. ``wait`` waits for the update of
    offloaded state. ``names_in_8_bits``: the parameters with moments in 8 bits.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        bf16: NarrowStates | None = None,
        names_in_8_bits: frozenset[str] = frozenset(),
    ) -> None:
        self.optimizer, self.bf16, self.names_in_8_bits = optimizer, bf16, names_in_8_bits
        self.of_wholes = tensor_state_names(optimizer)  # state of whole tensors
        self.states = defaultdict[Tensor, ParamState](dict)
        self.wait: Callable[[], object] = nothing

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The optimizer's live ``param_groups``."""
        return self.optimizer.param_groups

    def is_in_8_bits(self, segment: Segment) -> bool:
        """Return whether the moments of ``segment`` are in 8 bits."""
        return not self.names_in_8_bits.isdisjoint(segment.names)

    def of(self, segment: Segment) -> ParamState:
        """Return the state of ``segment`` by name; empty if it has none."""
        self.wait()
        state = self.states.get(segment.tensor)
        return without_none(state) if state else {}

    def is_unstepped(self, segment: Segment) -> bool:
        """Return whether ``segment`` was never stepped: torch would have no entry for it.

        ``not segment.begun`` says less: that the next step is a first one. On the device a load of
        a state at step 0 creates entries and does not begin them; a script may remove the entries
        of a segment that has begun. Offloaded, entries exist from the bind on.
        """
        if segment.offloaded:
            return not segment.begun
        return segment.tensor not in self.states

    def of_whole(self, segment: Segment) -> ParamState:
        """Return the live entries of ``segment``, which must have been stepped or be stepped now,
        with the state of its whole tensor; empty if there can be none.
        """
        return self.states[segment.tensor] if self.of_wholes else {}

    def elementwise(self, segment: Segment) -> dict[str, StateArray]:
        """Return the per-element states of ``segment``."""
        shape = segment.tensor.shape
        return {
            name: value
            for name, value in self.of(segment).items()
            if isinstance(value, CodedArray)
            or (is_elementwise(name, value, shape) and name not in self.of_wholes)
        }

    def checked_elementwise(self, segment: Segment) -> dict[str, StateArray]:
        """Return :meth:`elementwise`. Raises UnsupportedOptimizerError for state of no known kind:
        neither per element nor a scalar nor of the whole tensor.
        """
        states, shape = self.elementwise(segment), segment.tensor.shape
        for name, value in self.of(segment).items():
            if not (name in states or name in self.of_wholes or is_scalar(name, value, shape)):
                key = segment.parts[0].flat.key if segment.parts else "no parameter"
                refuse_unknown(self.optimizer, name, value, f"a segment of {key!r}")
        return states

    def carry(self, former: Segment, segment: Segment, view: View) -> None:
        """Create the entries of ``segment``, cut from the same span as ``former``: views of the
        same states, and copies of its scalars.
        """
        own = self.elementwise(former)
        segment.begun = former.begun
        entries = {
            name: view(segment, name) if name in own else copy_of(value)
            for name, value in self.of(former).items()
        }
        if entries:
            self.states[segment.tensor] = entries

    def scalars(self, segment: Segment) -> dict[str, float]:
        """Return the scalar states of ``segment``."""
        shape = segment.tensor.shape
        return {
            name: float(value)
            for name, value in self.of(segment).items()
            if is_scalar(name, value, shape) and name not in self.of_wholes
        }
