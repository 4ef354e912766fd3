"""What plain PyTorch does to a model, made right or refused where parameters are owned: state_dict, load_state_dict, ``.to``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from hf_zero.core.parameter import OwnedParameter, name_of, owner_of
from hf_zero.core.schedule import Schedule
from hf_zero.core.unit import Unit
from hf_zero.errors import PartitionError


class ModuleGuards:
    """Hooks on every module that owns parameters of an engine, or wraps a unit.

    ``state_dict`` gathers and returns copies (on the CPU where parameters are sharded); ``load_state_dict`` gathers, lets
    torch copy, and takes the values over into shards and master weights. Both are collective at stage 3. ``.to`` and its
    kin move buffers and refuse to change parameters.
    """

    def __init__(self, model: nn.Module, units: Sequence[Unit], schedule: Schedule):
        self._schedule = schedule
        self._copies: dict[int, torch.Tensor] = {}
        self._depth = 0
        self._removable: list[Any] = []
        self._patched: list[nn.Module] = []
        wraps = {unit.module: unit for unit in units}
        for module in model.modules():
            own = [p for p in module._parameters.values() if isinstance(p, OwnedParameter)]
            touched = {owner_of(p).unit for p in own} | ({wraps[module]} if module in wraps else set())
            if not touched:
                continue
            pinned = sorted((unit for unit in touched if unit.sharded), key=lambda unit: unit.index)
            self._removable += [
                module.register_state_dict_pre_hook(partial(self._before_state_dict, pinned)),
                module._register_state_dict_hook(partial(self._after_state_dict, pinned)),
                module.register_load_state_dict_pre_hook(partial(self._before_load, pinned)),
                module.register_load_state_dict_post_hook(partial(self._after_load, pinned)),
            ]
            if own:
                module._apply = partial(self._apply, module)  # type: ignore[method-assign]
                self._patched.append(module)

    def remove(self) -> None:
        for handle in self._removable:
            handle.remove()
        for module in self._patched:
            module.__dict__.pop("_apply", None)
        self._removable, self._patched = [], []

    def _before_state_dict(self, pinned: list[Unit], module: nn.Module, prefix: str, keep_vars: bool) -> None:
        self._depth += 1
        for unit in pinned:
            self._schedule.pin(unit)

    def _after_state_dict(self, pinned: list[Unit], module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        for name, parameter in module._parameters.items():
            key = prefix + name
            if isinstance(parameter, OwnedParameter) and key in state and owner_of(parameter).sharded:
                # One copy a parameter, so that tied names still share memory and are saved once.
                if id(parameter) not in self._copies:
                    self._copies[id(parameter)] = torch.empty(parameter.shape, dtype=parameter.dtype).copy_(parameter.detach())
                state[key] = self._copies[id(parameter)]
        for unit in pinned:
            self._schedule.unpin(unit)
        self._depth -= 1
        if self._depth <= 0:
            self._depth = 0
            self._copies = {}

    def _before_load(self, pinned: list[Unit], module: nn.Module, *args: Any) -> None:
        for unit in pinned:
            self._schedule.pin(unit)

    @torch.no_grad()
    def _after_load(self, pinned: list[Unit], module: nn.Module, incompatible: Any) -> None:
        for parameter in module._parameters.values():
            if isinstance(parameter, OwnedParameter):
                flat = owner_of(parameter)
                if parameter.data_ptr() != flat.views[name_of(parameter)].data_ptr() and parameter.numel():
                    raise PartitionError(
                        f"load_state_dict(assign=True) cannot replace {name_of(parameter)}, which lives in a flat buffer; use assign=False"
                    )
                flat.adopt(name_of(parameter))
        for unit in pinned:
            self._schedule.unpin(unit)

    def _apply(self, module: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        for child in module.children() if recurse else ():
            child._apply(fn)
        for parameter in module._parameters.values():
            if isinstance(parameter, OwnedParameter):
                probe = fn(torch.empty(0, dtype=parameter.dtype, device=parameter.device))
                if probe.dtype != parameter.dtype or probe.device != parameter.device:
                    raise PartitionError(
                        f"{name_of(parameter)} is {parameter.dtype} on {parameter.device} and cannot become {probe.dtype} on {probe.device} after "
                        "hf_zero.initialize; move or cast the model before it, and choose bf16 or fp16 in the config"
                    )
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = fn(buffer)
        return module


def refuse_foreign_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Raise if ``optimizer`` was made over parameters that an engine owns: it would see no gradients and train nothing."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if isinstance(parameter, OwnedParameter) and owner_of(parameter) is not None:
                raise PartitionError(
                    f"{type(optimizer).__name__} holds {name_of(parameter)}, which an hf-zero engine owns and trains; pass the optimizer to "
                    "hf_zero.initialize, or step the one it returned"
                )
            break
