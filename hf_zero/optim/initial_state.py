"""State before the first step. A throw-away twin of the optimizer shows it: its class alone knows
the names, dtypes and values.
"""

from __future__ import annotations

from collections.abc import Callable
from numbers import Number

import torch
from torch import Tensor

from hf_zero.device import kinds
from hf_zero.optim.probing import bare_step, bare_twin
from hf_zero.optim.segment_entries import (
    SCALARS,
    SegmentStateAccess,
    is_elementwise,
    is_scalar,
    refuse_unknown,
    scalar_like,
    without_none,
)
from hf_zero.optim.segments import ParamGroup, ParamState, current_settings, step_dtype
from hf_zero.optim.whole_tensor import tensor_state_names

InitialValues = Callable[[int, Tensor], ParamState]
"""(group, tensor) -> the initial state of one element of a parameter in that group with the dtype
and device of the tensor.
"""


class InitialStates:
    """The states before a first step in the groups of the optimizer that has ``entries``, in the
    form in which they are kept between steps.
    """

    def __init__(self, entries: SegmentStateAccess) -> None:
        self._optimizer, self._narrow_states = entries.optimizer, entries.bf16

    def of_group(self, group: int, like: Tensor, decoded: bool = False) -> ParamState:
        """Return the initial state, before a first step, of a parameter like ``like`` in ``group``;
        ``decoded``: as tensors, whatever its storage format.
        """
        settings: ParamGroup = self._optimizer.param_groups[group]
        if decoded:
            settings = _with_fp32_moments(settings)
        initial = initial_state(self._optimizer, settings, like)
        if self._narrow_states is None:
            return initial
        return self._narrow_states.cast_initial(initial, like)

    def cached(self, decoded: bool = False) -> InitialValues:
        """Return :meth:`of_group` as a function that remembers its results. It holds for one
        operation only, because a script may change the settings of groups after it.
        """
        known: dict[tuple[int, torch.dtype], ParamState] = {}

        def values(group: int, like: Tensor) -> ParamState:
            if (group, like.dtype) not in known:
                known[group, like.dtype] = self.of_group(group, like, decoded)
            return known[group, like.dtype]

        return values

    def some_group_keeps(self, name: str, like: Tensor) -> bool:
        """Return whether a group keeps a state ``name`` for a parameter like ``like``, or would
        with a momentum.
        """
        return any(
            name in self.of_group(group, like) or self.is_switched_off(group, name)
            for group in range(len(self._optimizer.param_groups))
        )

    def is_switched_off(self, group: int, name: str) -> bool:
        """Return whether ``group`` would keep a state ``name`` if its momentum were not 0."""
        settings = self._optimizer.param_groups[group]
        return not settings.get("momentum", 1.0) and name in moment_names(self._optimizer, settings)


def initial_state(
    optimizer: torch.optim.Optimizer, group: ParamGroup, like: Tensor
) -> dict[str, object]:
    """Return the initial state of a one-element parameter of ``group``, before its first step, as
    the class keeps it for the dtype and device of ``like``; on the CPU if ``like`` is on the meta
    device.
    """
    twin, probe = _twin(optimizer, group, like)
    bare_step(twin)
    state = without_none(twin.state[probe])
    for name, value in [*state.items()]:
        if name in tensor_state_names(optimizer):  # created by the first step
            del state[name]
        elif is_scalar(name, value, probe.shape):
            # ASGD's eta begins with the learning rate
            start = float(group["lr"]) if name == "eta" else SCALARS.get(name, float(value))
            state[name] = scalar_like(value, start)
        elif not is_elementwise(name, value, probe.shape):
            refuse_unknown(optimizer, name, value, "a parameter of shape (1,)")
    return state


def moment_names(optimizer: torch.optim.Optimizer, group: ParamGroup) -> set[str]:
    """Return the names of the per-element states that ``group`` keeps, or would with a momentum."""
    # also for classes without this setting, which ignore it
    settings = {**_with_fp32_moments(group), "momentum": group.get("momentum") or 0.5}
    state = initial_state(optimizer, settings, torch.zeros(1))
    return {name for name, value in state.items() if is_elementwise(name, value, (1,))}


def counted_elsewhere(optimizer: torch.optim.Optimizer, group: ParamGroup) -> list[str]:
    """Return the names of the scalars that a step changes in ``group`` or on the optimizer itself,
    rather than in the state of a parameter.
    """
    twin, _ = _twin(optimizer, group, torch.zeros(1))
    live = twin.param_groups[0], vars(twin)
    before = [*map(current_settings, live)]
    bare_step(twin)
    return [
        name
        for now, then in zip(live, before)
        for name, value in now.items()
        if _is_changed_number(value, then.get(name))
    ]


def _is_changed_number(now: object, before: object) -> bool:
    number = isinstance(now, Number) or (isinstance(now, Tensor) and now.numel() == 1)
    return number and (before is None or bool(now != before))


def _with_fp32_moments(group: ParamGroup) -> ParamGroup:
    """Return ``group`` with ``moments`` "fp32", if it has that setting."""
    return {**group, "moments": "fp32"} if "moments" in group else group


def _twin(
    optimizer: torch.optim.Optimizer, group: ParamGroup, like: Tensor
) -> tuple[torch.optim.Optimizer, Tensor]:
    """Return a throw-away twin of ``optimizer`` and its only parameter: one element in ``group``
    with a gradient of zero. The twin has neither the ``step`` attribute of the user's object (the
    engine's own, a scheduler's wrapper) nor its hooks, runs no collective, and keeps counters on
    the host where ``like`` is there.
    """
    device = "cpu" if like.is_meta else like.device
    begin = torch.zeros(1, dtype=step_dtype(like.dtype), device=device)
    probe = torch.nn.Parameter(begin, requires_grad=False)
    probe.grad = torch.zeros_like(probe)
    settings = current_settings(group)
    if kinds.is_synchronous(like.device) and settings.get("capturable"):
        settings["capturable"] = False  # counters on the device: torch refuses others
    twin = bare_twin(optimizer, [{**settings, "params": [probe]}])
    vars(twin).update(current_settings(vars(twin)))  # a step may write to tensors in place
    # without ``tensors``, no collective runs; the format of moments is that of a small parameter
    for name in ("tensors", "segment_format"):
        vars(twin).pop(name, None)
    if constructor_makes_state(optimizer):
        begun = float(settings["initial_accumulator_value"])
        twin.state = torch.optim.Adagrad(twin.param_groups, initial_accumulator_value=begun).state
    return twin, probe


def constructor_makes_state(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the constructor of a class, for the parameters it is given, makes state that
    no step makes: up to torch 2.12 that of Adagrad.
    """
    return isinstance(optimizer, torch.optim.Adagrad)
