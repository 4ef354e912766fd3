"""DeepSpeed's optimizer classes by name: the classes of the same update (torch's, and ours over
host kernels), with its arguments.

Scripts construct them themselves, with and without offload. None has an update of its own, so the
engine treats them as instances of their base classes. An optimizer made from a configuration has
the base class itself, as in checkpoints, and passes ``isinstance`` for the class here that
DeepSpeed would have made.
"""

from __future__ import annotations

import types
import weakref
from typing import TYPE_CHECKING, Any

import torch

from hf_zero.deepspeed.modules import refuse
from hf_zero.optim import CPUAdagrad, CPULion, Lamb
from hf_zero.optim.adam import Adam
from hf_zero.optim.lion import Lion

if TYPE_CHECKING:
    from hf_zero.config import ZeroConfig


from collections.abc import Callable, Iterator

from torch import Tensor
from torch.optim.optimizer import ParamsT

from hf_zero.errors import NotBuiltError, OffloadError, UnsupportedOptimizerError
from hf_zero.optim.cpu import CPUAdam
from hf_zero.optim.cpu_base import own_master, write_master


def _moments(fp32_optimizer_states: bool) -> str:
    return "fp32" if fp32_optimizer_states else "bf16"


class _Named(type):
    """A class whose ``isinstance`` also accepts optimizers that a configuration has made."""

    def __init__(cls, *args: object) -> None:
        super().__init__(*args)
        cls.made: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    def __instancecheck__(cls, instance: object) -> bool:
        if super().__instancecheck__(instance):
            return True
        return isinstance(instance, torch.optim.Optimizer) and instance in cls.made


class FusedAdam(Adam, metaclass=_Named):
    """Adam, or AdamW if ``adam_w_mode`` is set."""

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        self.adam_w_mode = adam_w_mode
        super().__init__(
            params,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
            decoupled_weight_decay=adam_w_mode,
            bias_correction=bias_correction,
        )


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


class DeepSpeedCPUAdam(SubGroupSteps, metaclass=_Named):
    """Adam, or AdamW if ``adamw_mode`` is set; moments in bf16 unless ``fp32_optimizer_states``."""

    def __init__(
        self,
        model_params: ParamsT,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        moments = _moments(fp32_optimizer_states)
        self.adam_w_mode = adamw_mode
        super().__init__(
            model_params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            adamw_mode=adamw_mode,
            bias_correction=bias_correction,
            moments=moments,
        )


class DeepSpeedCPUAdagrad(CPUAdagrad, metaclass=_Named):
    """Adagrad."""

    def __init__(
        self,
        model_params: ParamsT,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
    ) -> None:
        if not fp32_optimizer_states:
            refuse(
                "DeepSpeedCPUAdagrad(fp32_optimizer_states=False)",
                "leave it at True: a sum of squares is kept in fp32",
            )
        super().__init__(model_params, lr=lr, eps=eps, weight_decay=weight_decay)


class FusedLion(Lion, metaclass=_Named):
    """Lion."""

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, weight_decay=weight_decay)


class FusedLamb(Lamb, metaclass=_Named):
    """LAMB."""

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        amsgrad: bool = False,
    ) -> None:
        if amsgrad:
            refuse("FusedLamb(amsgrad=True)", "leave it at False, as in DeepSpeed")
        if max_grad_norm:
            refuse("FusedLamb(max_grad_norm=)", "write gradient_clipping in the configuration")
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            bias_correction=bias_correction,
            max_coeff=max_coeff,
            min_coeff=min_coeff,
            eps_inside_sqrt=eps_inside_sqrt,
        )


class DeepSpeedCPULion(CPULion, metaclass=_Named):
    """Lion; the moment in bf16 unless ``fp32_optimizer_states`` is set."""

    def __init__(
        self,
        model_params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        fp32_optimizer_states: bool = True,
    ) -> None:
        super().__init__(
            model_params,
            lr=lr,
            betas=betas,
            weight_decay=weight_decay,
            moments=_moments(fp32_optimizer_states),
        )


_ON_DEVICE = {"adam": FusedAdam, "adamw": FusedAdam, "lion": FusedLion, "lamb": FusedLamb}
_OFFLOADED = {
    "adam": DeepSpeedCPUAdam,
    "adamw": DeepSpeedCPUAdam,
    "lion": DeepSpeedCPULion,
    "adagrad": DeepSpeedCPUAdagrad,
    "lamb": FusedLamb,
}


def name_made(optimizer: torch.optim.Optimizer, config: ZeroConfig) -> None:
    """Make ``optimizer``, which ``config`` names, an instance of the class that DeepSpeed would
    have made: for "Adam" the fused one, with offload the CPU one, with ``torch_adam`` neither.
    """
    section = config.optimizer
    if section is None or section.params.get("torch_adam"):
        return
    classes = _OFFLOADED if config.offload_optimizer.on else _ON_DEVICE
    cls = classes.get(section.type.lower())
    if cls is None:
        return
    cls.made.add(optimizer)
    if section.type.lower().startswith("adam"):
        optimizer.adam_w_mode = bool(  # type: ignore[attr-defined]
            section.type.lower() == "adamw" or section.params.get("adam_w_mode", True)
        )


class _Absent:
    """An attribute that instances lack, whatever their ``__dict__`` holds."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        raise AttributeError(self._name)

    def __set__(self, instance: object, value: object) -> None:
        raise AttributeError(self._name)


def show_wrapped(optimizer: torch.optim.Optimizer) -> None:
    """Give ``optimizer`` the attribute of that name, by which DeepSpeed's have what they wrap.

    It equals ``optimizer`` and shares all of its attributes but this one: libraries unwrap by
    ``while hasattr(optimizer, "optimizer")``. An attribute that a script's own class has stays.
    """
    if hasattr(optimizer, "optimizer"):
        return
    base = type(optimizer)

    def equals(view: object, other: object) -> bool:
        return view is other or other is owner()

    owner = weakref.ref(optimizer)
    identity = hash(optimizer)
    members = {
        "optimizer": _Absent(),
        "__eq__": equals,
        "__hash__": lambda view: identity,
        "__module__": base.__module__,
        "__doc__": base.__doc__,
    }
    cls = types.new_class(base.__name__, (base,), {}, lambda body: body.update(members))
    view: Any = object.__new__(cls)
    view.__dict__ = vars(optimizer)
    vars(optimizer)["optimizer"] = view


def hide_wrapped(optimizer: torch.optim.Optimizer) -> None:
    """Undo :func:`show_wrapped`, whose cycle would keep ``optimizer`` alive."""
    shown = vars(optimizer).get("optimizer")
    if getattr(shown, "__dict__", None) is vars(optimizer):
        del vars(optimizer)["optimizer"]
