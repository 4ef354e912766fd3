"""The user's optimizer under an engine: its steps are the engine's, its groups stay live."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from copy import deepcopy
from functools import partial
from typing import Any

import torch

from hf_zero.errors import PartitionError
from hf_zero.optim.adoption import give_back
from hf_zero.optim.bound_optimizer import BoundOptimizer
from hf_zero.optim.group_member import GroupMember
from hf_zero.optim.own_step import taken_hooks
from hf_zero.optim.segment_entries import nothing
from hf_zero.optim.state_by_member import StateUses
from hf_zero.optim.whole_tensor import WholeTensorOptimizer
from hf_zero.zero.layout.flat_buffer import owner_of
from hf_zero.zero.layout.parameter import name_of
from hf_zero.zero.state_entries import transfer
from hf_zero.zero.step.saved_segments import SavedSegments

# with this attribute GradScaler.step passes itself to an optimizer's step, as grad_scaler
_SUPPORTS_AMP = "_step_supports_amp_scaling"
_MISSING = object()


def _refuse_parameter(key: Any) -> None:
    """Raise PartitionError if ``key`` of ``optimizer.state`` is a parameter of the model that
    trains.
    """
    flat = owner_of(key) if isinstance(key, torch.Tensor) else None
    if flat is not None and flat.trainable:
        raise PartitionError(
            f"optimizer.state[{name_of(key)}]: the state is sharded over the ranks; the "
            "members of optimizer.param_groups have entries, of this rank's parts. Read it with "
            "hf_zero.safe_get_full_optimizer_state(parameter, name) and write it with "
            "hf_zero.safe_set_full_optimizer_state(parameter, value, name), on all ranks; "
            "optimizer.state.clear() resets the state of all parameters"
        )


def patch_optimizer(optimizer: Any, owner: Any, installed: ExitStack) -> None:
    """Replace ``step`` and other methods of ``optimizer`` by methods of the engine ``owner``, to
    which only a weak reference is kept. ``installed`` gets the inverse operations, which give the
    groups their parameters back, for another engine, and drop the state.

    Its state dict has an entry for each parameter, with this rank's part of its state, in any tier.
    """
    methods = _EngineMethods(optimizer, owner)
    installed.callback(give_back, optimizer)
    installed.callback(_return_parameters, optimizer, owner.group_parameters)
    methods.watch_state(owner.bound)
    attributes = {
        "step": methods.step,
        "zero_grad": methods.zero_grad,
        "add_param_group": methods.add_param_group,
        "state_dict": methods.state_dict,
        "load_state_dict": methods.load_state_dict,
        "overflow": False,
        _SUPPORTS_AMP: True,
    }
    # the engine sets the two scales (``set_scale_on_optimizer``)
    for name in (*attributes, "cur_scale", "loss_scale"):
        installed.callback(_set_attribute, optimizer, name, vars(optimizer).get(name, _MISSING))
    for name, value in attributes.items():
        setattr(optimizer, name, value)


class _EngineMethods:
    """The methods of ``optimizer`` under the engine ``owner``."""

    def __init__(self, optimizer: Any, owner: Any):
        self._optimizer, self._engine = optimizer, weakref.ref(owner)
        self._offloads = bool(owner.updater.units)

    def step(self, closure: Callable[[], float] | None = None, grad_scaler: object = None) -> None:
        self._optimizer._opt_called = True  # torch's schedulers check this
        if grad_scaler is not None:
            raise PartitionError(
                "torch.amp.GradScaler cannot step under ZeRO: it looks for gradients on "
                'parameters, and the engine has taken them in; write "fp16": {"enabled": true} in '
                "the configuration and call engine.backward(loss) and engine.step(), which scale "
                "and unscale, or make it with enabled=False"
            )
        if closure is not None:
            raise PartitionError(
                "optimizer.step(closure) cannot run under ZeRO: the closure would need a second "
                "backward; call step() without it"
            )
        alive = self._engine()
        if alive is not None:
            alive.step()

    # keeps schedulers from wrapping it as a method
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]

    def zero_grad(self, set_to_none: bool = True) -> None:
        alive = self._engine()
        if alive is None:
            return
        lost = alive.pass_runner.reducer.gradients_lost
        if lost or not alive.accumulation.keeps_at_zero_grad():
            alive.zero_grad(set_to_none)

    def add_param_group(self, group: dict[str, object]) -> None:
        alive = self._engine()
        if alive is None:
            type(self._optimizer).add_param_group(self._optimizer, group)
        else:
            alive.add_param_group(group)

    def state_dict(self) -> dict[str, object]:
        alive = self._engine()
        if alive is None:
            plain: dict[str, object] = type(self._optimizer).state_dict(self._optimizer)
            return plain
        alive.changes.refuse("optimizer.state_dict()")
        alive.bound.members.check()
        with (
            alive.optimizer_step.counted_state() as changed,
            taken_hooks(self._optimizer, "_optimizer_state_dict_post_hooks") as hooks,
        ):
            packed = alive.bound.state_dicts.packed(
                partial(type(self._optimizer).state_dict, self._optimizer)
            )
            packed = deepcopy(packed) if changed else packed
        return _through(hooks, self._optimizer, packed)

    def load_state_dict(self, state_dict: Mapping[str, object]) -> None:
        alive = self._engine()
        if alive is None:
            type(self._optimizer).load_state_dict(self._optimizer, state_dict)
            return
        alive.changes.refuse_until_step("optimizer.load_state_dict()")
        alive.bound.members.check()
        alive.updater.finish()
        alive.rebuild_if_unfrozen(loads=True)
        names = "_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks"
        # those after belong after what the engine adds to torch's method
        with (
            taken_hooks(self._optimizer, names[0]) as before,
            taken_hooks(self._optimizer, names[1]) as after,
        ):
            state_dict = _through(before, self._optimizer, dict(state_dict))
            state_dict = alive.bound.state_dicts.with_parts(state_dict)
            source = SavedSegments(state_dict, alive)
            settings = alive.bound.state_dicts.settings_of(state_dict)
            with alive.changes.change("optimizer.load_state_dict()"):
                type(self._optimizer).load_state_dict(self._optimizer, settings)
                alive.bound.state.drop()
                transfer(source, alive, weights=False)
        for hook in after:
            hook(self._optimizer)

    def _wait(self) -> None:
        alive = self._engine()
        if alive is not None and not alive.optimizer_step.updates_state:
            alive.updater.finish()

    def _restart(self) -> None:
        if (alive := self._engine()) is not None:
            alive.optimizer_step.forget_state()

    def _finish(self) -> None:
        if (alive := self._engine()) is not None:
            alive.updater.finish()

    def _refuse_until_step(self) -> None:
        if (alive := self._engine()) is not None:
            alive.changes.refuse_until_step("a write to optimizer.state")

    def watch_state(self, bound: BoundOptimizer) -> None:
        """Let uses of the state of ``bound`` call the engine."""
        wait = self._finish if self._offloads else nothing
        bound.members.shown.by_member.watch(
            StateUses(self._restart, _refuse_parameter, wait, self._refuse_until_step)
        )
        if self._offloads:
            bound.state.wait_with(self._wait)


def _through(
    hooks: Iterable[Callable[..., Any]],
    optimizer: torch.optim.Optimizer,
    state_dict: dict[str, Any],
) -> dict[str, Any]:
    """Return ``state_dict`` as ``hooks`` change or replace it."""
    for hook in hooks:
        changed = hook(optimizer, state_dict)
        state_dict = state_dict if changed is None else changed
    return state_dict


def _set_attribute(optimizer: torch.optim.Optimizer, name: str, value: object) -> None:
    vars(optimizer).pop(name, None)
    if value is not _MISSING:
        setattr(optimizer, name, value)


def _return_parameters(
    optimizer: torch.optim.Optimizer, parameters: Sequence[Sequence[torch.Tensor]]
) -> None:
    """Put the ``parameters`` back into the groups. The state of segments, and their memory, were
    freed with the engine.
    """
    # they refer to segments; a user's class may have "tensors" and "norms" of its own
    ours = ("tensors", "norms") if isinstance(optimizer, WholeTensorOptimizer) else ()
    for name in ("segment_format", *ours):
        vars(optimizer).pop(name, None)
    optimizer.state = defaultdict(dict)
    for group, members in zip(optimizer.param_groups, parameters):
        for member in group["params"]:
            if isinstance(member, GroupMember):
                member.move(member.new_empty(0))
        group["params"] = list(members)
