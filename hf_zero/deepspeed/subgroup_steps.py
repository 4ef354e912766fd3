"""Steps of single sub-groups and their reversal, as SuperOffload calls them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from hf_zero.errors import NotBuiltError, OffloadError, UnsupportedOptimizerError
from hf_zero.optim.cpu import CPUAdam
from hf_zero.optim.cpu_base import own_master, write_master


class SubGroupSteps(CPUAdam):
    """A CPUAdam whose ``state`` may also be kept by the number of a sub-group (SuperOffload): the
    parameter in its groups is the current part of that sub-group.
    """

    @torch.no_grad()
    def step_subgroup(self, subgroup_id: int, closure: Callable[[], float] | None = None) -> object:
        """Update the parameter that has a gradient, with ``state[subgroup_id]``; return the
        closure's loss, if there is a closure. Raises UnsupportedOptimizerError if several
        parameters have one: the sub-group has one state.
        """
        loss = _loss_of(closure)
        states: Any = self.state
        for group, param in self._one(subgroup_id):
            self.update_parameter(group, states[subgroup_id], param, subgroup_id + 1)
        return loss

    @torch.no_grad()
    def rollback_subgroup(
        self, sub_group_id: int, closure: Callable[[], float] | None = None
    ) -> object:
        """Undo the last :meth:`step_subgroup` of a sub-group, given the same parameter with the
        same gradient and settings: parameter, moments and count return to their previous values, up
        to rounding. Raises OffloadError if there was no step, and NotBuiltError with ``amsgrad``,
        whose step cannot be inverted.
        """
        loss = _loss_of(closure)
        states: Any = self.state
        state = states.get(sub_group_id)
        if not state:
            raise OffloadError(
                f"Cannot rollback optimizer state for sub_group_id {sub_group_id}: it has made no "
                "step; call step_subgroup() first"
            )
        if state["step"] <= 0:
            raise OffloadError(
                f"Cannot rollback sub_group_id {sub_group_id}: step count is {int(state['step'])}; "
                "each step_subgroup() can be taken back once"
            )
        for group, param in self._one(sub_group_id):
            _undo(group, state, param)
        return loss

    def _one(self, subgroup_id: int) -> Iterator[tuple[dict[str, object], Tensor]]:
        """Yield the parameter with a gradient, if there is one, and its group."""
        with_gradient = [
            (group, param)
            for group in self.param_groups
            for param in group["params"]
            if param.grad is not None
        ]
        if len(with_gradient) > 1:
            raise UnsupportedOptimizerError(
                f"step_subgroup({subgroup_id}) has the state of one tensor, and "
                f"{len(with_gradient)} parameters have gradients; set param_groups to the "
                "sub-group's one, or call step()"
            )
        yield from with_gradient


def _loss_of(closure: Callable[[], float] | None) -> float | None:
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def _undo(group: dict[str, Any], state: dict[str, Any], param: Tensor) -> None:
    """Invert the last step counted in ``state``."""
    if group["amsgrad"]:
        raise NotBuiltError("rollback_subgroup() with amsgrad is not built; set it to False")
    assert param.grad is not None
    beta1, beta2 = group["betas"]
    lr, decay, step = float(group["lr"]), float(group["weight_decay"]), int(state["step"])
    gradient = param.grad.float().view(-1) * (-1.0 if group["maximize"] else 1.0)
    flat = own_master(param, state)
    mean, square = state["exp_avg"].view(-1), state["exp_avg_sq"].view(-1)
    bound = (square.float() / (1 - beta2**step)).sqrt() + group["eps"]
    flat.add_(mean.float() / bound, alpha=lr / (1 - beta1**step))
    if group["decoupled_weight_decay"]:
        flat.div_(1 - lr * decay)
    else:
        gradient = gradient + decay * flat
    mean.copy_((mean.float() - (1 - beta1) * gradient) / beta1)
    square.copy_(((square.float() - (1 - beta2) * gradient**2) / beta2).clamp(min=0))
    state["step"] -= 1
    write_master(param, state, flat)
