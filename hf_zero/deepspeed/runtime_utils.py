"""``deepspeed.runtime.utils``: small helpers that scripts import; a loader that begins again."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from operator import attrgetter
from typing import Any, Generic, TypeVar

import torch
from packaging.version import InvalidVersion, Version
from torch import nn

from hf_zero.deepspeed.comm import all_reduce
from hf_zero.deepspeed.modules import refuse
from hf_zero.distributed import process_group
from hf_zero.distributed.process_group import dist
from hf_zero.errors import ConfigError
from hf_zero.parallel.expert.marks import is_expert_parameter
from hf_zero.zero.layout.parameter import OwnedParameter
from hf_zero.zero.layout.tree import map_tensors

T = TypeVar("T")


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    mpu: object = None,
) -> torch.Tensor:
    """Clip gradients of parameters that no engine owns, like torch's function; the engine clips by
    ``gradient_clipping``.

    With expert parameters, which differ by rank, it is collective: all ranks clip by the mean of
    their norms. Raises NotBuiltError for an engine's parameters, whose gradients are sharded.
    """
    tensors = _tensors(parameters)
    if any(isinstance(parameter, OwnedParameter) for parameter in tensors):
        refuse(
            "clip_grad_norm_ of parameters that an engine owns",
            "write gradient_clipping into the configuration: engine.step() clips by the norm over "
            "all ranks",
        )
    if not any(map(is_expert_parameter, tensors)):
        return nn.utils.clip_grad_norm_(tensors, max_norm, norm_type)
    gradients = [parameter.grad for parameter in tensors if parameter.grad is not None]
    norm = nn.utils.get_total_norm(gradients, norm_type) / process_group.get_world_size()
    norm = norm.to(process_group.default_device())  # without gradients it is on the CPU
    all_reduce(norm)
    nn.utils.clip_grads_with_norm_(tensors, max_norm, norm)
    return norm


def _tensors(parameters: object) -> list[torch.Tensor]:
    """Return ``parameters``, one or several, as a list. Raises ConfigError for other objects."""
    several = isinstance(parameters, Iterable) and not isinstance(parameters, torch.Tensor)
    listed: list[Any] = list(parameters) if several else [parameters]  # type: ignore[call-overload]
    for parameter in listed:
        if not isinstance(parameter, torch.Tensor):
            raise ConfigError(f"{parameter!r:.60} is no parameter; pass tensors, or lists of them")
    return listed


class CheckOverflow:
    """Check whether a gradient of ``param_groups``, parameters or lists of them, is not finite: on
    this rank, or with expert parameters on any rank (then collective).
    """

    def __init__(
        self,
        param_groups: Iterable[object] | None = None,
        mpu: object = None,
        zero_reduce_scatter: bool = False,
        deepspeed: object = None,
    ) -> None:
        self.params = _of_groups(param_groups or ())

    def check(self, param_groups: Iterable[object] | None = None) -> bool:
        return self.has_overflow(self.params if param_groups is None else _of_groups(param_groups))

    def has_overflow(
        self, params: Iterable[torch.Tensor], has_moe_params: bool | None = None
    ) -> bool:
        parameters = _tensors(params)
        overflow = any(p.grad is not None and bool(has_inf_or_nan(p.grad)) for p in parameters)
        if has_moe_params is None:
            has_moe_params = any(map(is_expert_parameter, parameters))
        return _on_any_rank(overflow) if has_moe_params else overflow

    def check_using_norm(self, norm_group: Iterable[float], reduce_overflow: bool = True) -> bool:
        """Check gradients by their norms, -1 for one that is not finite; on any rank (collective),
        unless ``reduce_overflow`` is False and there are no experts.
        """
        overflow = any(norm == -1 or not math.isfinite(norm) for norm in norm_group)
        together = reduce_overflow or any(map(is_expert_parameter, self.params))
        return _on_any_rank(overflow) if together else overflow


def _of_groups(groups: Iterable[object]) -> list[torch.Tensor]:
    return [parameter for group in groups for parameter in _tensors(group)]


def _on_any_rank(local: bool) -> bool:
    """Return whether ``local`` is true on any rank (collective)."""
    if not process_group.is_initialized():
        return local
    flag = torch.tensor(float(local), device=process_group.default_device())
    all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag)


def get_weight_norm(
    parameters: torch.Tensor | Iterable[torch.Tensor], norm_type: float = 2.0, mpu: object = None
) -> float:
    """Return the norm of the values; -1 if it is not finite."""
    values = [p.detach().float() for p in _tensors(parameters)]
    return _finite(torch.nn.utils.get_total_norm(values, norm_type))


def _finite(norm: torch.Tensor) -> float:
    return float(norm) if torch.isfinite(norm) else -1.0


def has_inf_or_nan(x: torch.Tensor) -> torch.Tensor:
    """Return whether an element is not finite, as a tensor on its device."""
    values = x if x.is_complex() else x.float()
    return torch.logical_not(torch.isfinite(values)).any()


def move_to_device(
    item: object,
    device: torch.device | str,
    criterion_func: Callable[[torch.Tensor], bool] | None = None,
) -> object:
    """Return ``item`` with the tensors of its lists, tuples, dicts and dataclasses on ``device``;
    with ``criterion_func`` only those for which it is true.
    """

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device) if criterion_func is None or criterion_func(tensor) else tensor

    return map_tensors(item, moved)


def prefix_sum_inc(weights: Sequence[int]) -> list[int]:
    """Return the sums of the first 1, 2, … of ``weights``."""
    return [*accumulate(weights)]


def call_to_str(base: str, *args: object, **kwargs: object) -> str:
    """Return ``base(args, key=value)`` as text."""
    parts = [*map(repr, args), *(f"{key}={value!r}" for key, value in kwargs.items())]
    return f"{base}({', '.join(parts)})"


def recursive_getattr(model: object, module_name: str) -> object:
    """Return the attribute of ``model`` at a dotted name."""
    return attrgetter(module_name)(model)


def recursive_setattr(model: object, module_name: str, module: object) -> None:
    """Set the attribute of ``model`` at a dotted name."""
    owner, _, name = module_name.rpartition(".")
    setattr(recursive_getattr(model, owner) if owner else model, name, module)


def required_torch_version(
    min_version: float | None = None, max_version: float | None = None
) -> bool:
    """Return whether torch's version, as major.minor, is between the two, both included.

    Raises ConfigError if neither is given, and for what is no version.
    """
    if min_version is None and max_version is None:
        raise ConfigError("required_torch_version needs min_version or max_version; pass one")
    have = _pair(torch.__version__)
    return (min_version is None or have >= _pair(min_version)) and (
        max_version is None or have <= _pair(max_version)
    )


def _pair(version: object) -> tuple[int, int]:
    try:
        major, minor, *_ = (*Version(str(version)).release, 0)
    except InvalidVersion:
        raise ConfigError(f"{version!r} is no version of torch; write one, such as 2.4") from None
    return major, minor


class RepeatingLoader(Generic[T]):
    """Iterate over ``loader`` again and again.

    An endless stream of batches for loops that count steps.
    """

    def __init__(self, loader: Iterable[T]):
        self.loader = loader
        self.data_iter = iter(loader)

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        try:
            return next(self.data_iter)
        except StopIteration:
            self.data_iter = iter(self.loader)
            return next(self.data_iter)
