"""The state that an optimizer has for whole parameters before it is bound, read to be cut to this
rank's elements.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hf_zero.errors import UnsupportedOptimizerError
from hf_zero.ops.coded_arrays import CodedArray
from hf_zero.optim.segment_entries import is_elementwise, is_scalar, refuse_unknown, without_none
from hf_zero.optim.whole_tensor import tensor_state_names
from hf_zero.zero.layout.flat_layout import Slot


@dataclass(frozen=True, eq=False)
class Carried:
    """Existing state of an optimizer, by parameter: its ``scalars``, its ``per_element`` tensors
    (1-D), and its ``tensor_state``, of whole tensors.
    """

    scalars: dict[str, dict[str, float]] = field(default_factory=dict)
    per_element: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    tensor_state: dict[str, dict[str, Tensor]] = field(default_factory=dict)


def collect(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, Tensor],
    slots: Mapping[str, Slot],
    group_of: Mapping[str, int],
) -> Carried:
    """Read the state that ``optimizer`` already has for whole parameters. Nothing is changed.

    Args:
        optimizer: the user's optimizer, before its parameters are replaced.
        parameters: name -> the parameter object the optimizer holds.
        slots: name -> slot of every parameter that will be optimized here or on another rank.
        group_of: name -> index of its group.

    Raises:
        UnsupportedOptimizerError: state that belongs to no parameter, and state that is neither
            per element nor a scalar.
    """
    kind, known = type(optimizer).__name__, {id(parameter) for parameter in parameters.values()}
    # that of a live engine, which is built again, is not read: it is by member
    entries = dict(optimizer.state) if isinstance(optimizer.state, dict) else {}
    for owner, entry in entries.items():
        # A frozen parameter is not stepped, so its state (Adagrad creates it at once) is not
        # needed.
        is_tensor = isinstance(owner, Tensor)
        trains = is_tensor and owner.requires_grad
        if not (is_tensor and (id(owner) in known or not trains or not without_none(entry))):
            what = f"a tensor of shape {tuple(owner.shape)}" if is_tensor else repr(owner)
            raise UnsupportedOptimizerError(
                f"optimizer {kind} has state for {what}, which is not a parameter of the model; "
                "call optimizer.state.clear() before initialize to drop its state, or pass a new "
                "optimizer"
            )
    carried = Carried()
    for name in slots.keys() & group_of.keys() if entries else ():
        shape, state = slots[name].shape, without_none(entries.get(parameters[name], {}))
        scalars, per_element = dict[str, float](), dict[str, Tensor]()
        for key, value in state.items():
            if isinstance(value, CodedArray):
                per_element[key] = value.decode()
            elif key in tensor_state_names(optimizer):
                carried.tensor_state.setdefault(name, {})[key] = value
            elif is_scalar(key, value, shape):
                scalars[key] = float(value)
            elif is_elementwise(key, value, shape):
                per_element[key] = value.detach().reshape(-1)
            else:
                refuse_unknown(optimizer, key, value, f"parameter {name!r} of shape {shape}")
        if state:
            carried.scalars[name], carried.per_element[name] = scalars, per_element
    return carried
