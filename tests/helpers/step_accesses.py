"""Reads and writes of a script at a point of a step, each in plain torch and under an engine."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hf_zero
from hf_zero.checkpoint import get_fp32_state_dict_from_zero_checkpoint
from tests.helpers.models import floats, seeded

WIDTH, ROWS, STEPS, MICROS = 6, 4, 3, 2
RATE, DECAY, GAMMA = 0.1, 0.05, 0.9


class Net(nn.Sequential):
    """Two layers that train around one whose bias is frozen; its class is one of a model's."""

    def __init__(self) -> None:
        super().__init__(
            nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)
        )
        self[2].bias.requires_grad_(False)


def net() -> nn.Module:
    return seeded(Net)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Over all parameters, also the frozen one."""
    return torch.optim.SGD(model.parameters(), RATE, momentum=0.9, weight_decay=DECAY)


def schedule(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, GAMMA)


def batch(step: int, micro: int, rank: int) -> torch.Tensor:
    return floats(step, micro, rank, ROWS, WIDTH)


def squared(model: Any, x: torch.Tensor) -> torch.Tensor:
    return model(x).pow(2).mean() * 3


@dataclass
class Session:
    """The objects of a script on one rank. Without an ``engine`` it is in plain torch.

    ``limit`` sets the limit of clipping as scripts of the route do, where they can. ``norm``: of
    the last gradient, in plain torch.
    """

    model: nn.Module  # the bare one
    optimizer: Any
    call: Any  # what the script calls in the forward
    engine: Any = None
    limit: Callable[[float], None] | None = None
    norm: float = 0.0
    divides: bool = True  # the engine divides gradients by the micro-batches, not the script
    held: int = 0  # micro-batches of the window, in plain torch
    step_norm: float | None = None  # ``norm`` in the next step, where that is known before it
    folder: Path | None = None  # of checkpoints, of which there are ``saves``
    saves: int = 0

    @property
    def plain(self) -> bool:
        return self.engine is None

    @property
    def trained(self) -> dict[str, Any]:
        frozen = self.model.get_parameter("2.bias")
        return {n: p for n, p in self.model.named_parameters() if p is not frozen}


def in_hook(session: Session, register: str, call: Callable[[], None]) -> None:
    """Call ``call`` in the next step of the optimizer, in a hook that its method ``register``
    registers.
    """
    optimizer = session.optimizer
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer  # of Accelerate's and Lightning's wrappers

    def hook(*_: object) -> None:
        handle.remove()
        before = session.norm
        session.norm = before if session.step_norm is None else session.step_norm
        call()
        session.norm = before

    handle = getattr(optimizer, register)(hook)


@dataclass
class ScriptClipping:
    """The clipping of a script that calls ``clip`` with its ``limit``, unless that is 0. A limit
    that is set after a clipping clips again.
    """

    clip: Callable[[float], None]
    limit: float
    clipped: bool = False

    def __call__(self) -> None:
        if self.limit:
            self.clip(self.limit)
        self.clipped = True

    def set_limit(self, value: float) -> None:
        self.limit = value
        if self.clipped:
            self()


Value = Any


def _each(session: Session, plain: Callable[[Any], Value], ours: Callable[[Any], Value]) -> Value:
    read = plain if session.plain else ours
    return {name: _copied(read(parameter)) for name, parameter in session.trained.items()}


def _copied(value: Value) -> Value:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _gathered(session: Session) -> Value:
    with hf_zero.GatheredParameters(session.model.parameters()):
        return _each(session, _copied, _copied)


def _gradient(parameter: Any) -> Value:
    return parameter.grad


def _evaluated(session: Session) -> float:
    with torch.no_grad():
        return float(squared(session.call, batch(99, 0, 0)))


def _saved(session: Session) -> Value:
    """The weights in a checkpoint, as rank 0 reads them."""
    if session.plain:
        return {name: _copied(value) for name, value in session.model.named_parameters()}
    assert session.folder is not None
    tag = f"save{session.saves}"
    session.saves += 1
    session.engine.save_checkpoint(session.folder, tag=tag)
    if session.engine.global_rank:
        return None
    saved = get_fp32_state_dict_from_zero_checkpoint(session.folder, tag)
    return {name.removeprefix("net."): value for name, value in saved.items()}


READS: dict[str, Callable[[Session], Value]] = {
    "read weights": lambda s: _gathered(s) if not s.plain else _each(s, _copied, _copied),
    "read master weights": lambda s: _each(s, _copied, hf_zero.safe_get_full_fp32_param),
    "state dict": lambda s: {n: _copied(v) for n, v in s.model.state_dict().items()},
    "gradient": lambda s: _each(s, _gradient, hf_zero.safe_get_full_grad),
    "p.grad": lambda s: _each(s, _gradient, _gradient),
    "norm": lambda s: s.norm if s.plain else float(s.engine.get_global_grad_norm()),
    "rate": lambda s: [group["lr"] for group in s.optimizer.param_groups],
    "optimizer state": lambda s: _each(
        s,
        lambda p: s.optimizer.state[p]["momentum_buffer"],
        lambda p: hf_zero.safe_get_full_optimizer_state(p, "momentum_buffer"),
    ),
    "optimizer.state": lambda s: _each(
        s,
        lambda p: s.optimizer.state[p]["momentum_buffer"],
        lambda p: s.optimizer.state[p]["momentum_buffer"],
    ),
    "evaluation": _evaluated,
    "training forward": lambda s: float(squared(s.call, batch(99, 0, 0)).detach()),
    "save": _saved,
}


def _one(session: Session) -> Any:
    return session.model.get_parameter("2.weight")


def _write_weights(session: Session, modifier: int | None) -> None:
    parameter = _one(session)
    if session.plain:
        _write_in_place(session)
        return
    with hf_zero.GatheredParameters([parameter], modifier_rank=modifier), torch.no_grad():
        if modifier is None or session.engine.global_rank == modifier:
            parameter.mul_(0.9)


def _write_master(session: Session) -> None:
    parameter = _one(session)
    if session.plain:
        parameter.data.mul_(0.9)
    else:
        value = hf_zero.safe_get_full_fp32_param(parameter)
        hf_zero.safe_set_full_fp32_param(parameter, value * 0.9)


def _write_in_place(session: Session) -> None:
    with torch.no_grad():
        _one(session).mul_(0.9)


def _write_data(session: Session) -> None:
    _one(session).data.mul_(0.9)


def _new_gradient(parameter: Any) -> torch.Tensor:
    return torch.linspace(-0.1, 0.2, parameter.numel()).view(parameter.shape)


def _write_gradient(session: Session) -> None:
    parameter = _one(session)
    if session.plain:
        parameter.grad = _new_gradient(parameter)
    else:
        hf_zero.safe_set_full_grad(parameter, _new_gradient(parameter))


def _assign_grad(session: Session) -> None:
    parameter = _one(session)
    # where none is held yet, one of a micro-batch, whose loss the plain loop has divided
    of_backward = session.plain and session.divides and parameter.grad is None
    parameter.grad = _new_gradient(parameter) / (MICROS if of_backward else 1)


def _scale_grad(session: Session) -> None:
    _one(session).grad.mul_(0.5)


def _drop_one(session: Session) -> None:
    _one(session).grad = None


def _set(session: Session, key: str, value: float) -> None:
    for group in session.optimizer.param_groups:
        group[key] = value


def _write_state(session: Session) -> None:
    parameter, kind = _one(session), "momentum_buffer"
    if session.plain:
        session.optimizer.state[parameter][kind].mul_(0.5)
    else:
        value = hf_zero.safe_get_full_optimizer_state(parameter, kind)
        hf_zero.safe_set_full_optimizer_state(parameter, value * 0.5, kind)


def _limit(session: Session) -> None:
    assert session.limit is not None
    session.limit(0.02)


def _scale_states(session: Session) -> None:
    """Halve the state of all parameters, as scripts do that have the optimizer alone."""
    for state in session.optimizer.state.values():
        for value in state.values():
            value.mul_(0.5)


def _clip_parameters(session: Session) -> None:
    nn.utils.clip_grad_norm_(session.model.parameters(), 0.01)


def _clip_members(session: Session) -> None:
    for group in session.optimizer.param_groups:
        nn.utils.clip_grad_norm_(group["params"], 0.01)


def _write_members(session: Session) -> None:
    with torch.no_grad():
        for group in session.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.mul_(0.9)


def _clamp_members(session: Session) -> None:
    for group in session.optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad and parameter.grad is not None:
                parameter.grad.clamp_(-0.004, 0.003)


def _load_weights(session: Session) -> None:
    state = session.model.state_dict()
    session.model.load_state_dict({name: value * 0.9 for name, value in state.items()})


def _load_state(session: Session) -> None:
    """Load a state dict of the optimizer that was kept, with another rate."""
    kept = copy.deepcopy(session.optimizer.state_dict())
    for group in kept["param_groups"]:
        group["lr"] = 0.02
    session.optimizer.load_state_dict(kept)


WRITES: dict[str, Callable[[Session], None]] = {
    "weights": lambda s: _write_weights(s, 0),
    "equal weights": lambda s: _write_weights(s, None),
    "master weights": _write_master,
    "weights in place": _write_in_place,
    "p.data": _write_data,
    "set gradient": _write_gradient,
    "set p.grad": _assign_grad,
    "p.grad in place": _scale_grad,
    "remove p.grad": _drop_one,
    "set rate": lambda s: _set(s, "lr", 0.03),
    "decay": lambda s: _set(s, "weight_decay", 0.3),
    "limit": _limit,
    "set optimizer state": _write_state,
    "states": _scale_states,
    "clear state": lambda s: s.optimizer.state.clear(),
    "replace state": lambda s: s.optimizer.state.__setitem__(_one(s), {}),
    "load state": _load_state,
    "load weights": _load_weights,
    "members": _write_members,
    "member gradients": _clamp_members,
    "clip parameters": _clip_parameters,
    "clip members": _clip_members,
    "freeze": lambda s: s.model.get_parameter("0.weight").requires_grad_(False),
    "unfreeze": lambda s: s.model.get_parameter("2.bias").requires_grad_(True),
    "drop gradients": lambda s: s.optimizer.zero_grad(),
}
