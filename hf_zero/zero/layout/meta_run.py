"""Runs of a model on the meta device, where operations compute shapes only: a copy without memory,
inputs for it, and answers for code that reads values.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hf_zero.errors import ConfigError

M = TypeVar("M", bound=nn.Module)
Answer = Callable[..., object]

META = torch.device("meta")
IMAGE_SIZE = 224  # of a configuration without one
aten = torch.ops.aten


def copy_on_meta(
    model: M,
    dtypes: Mapping[str, torch.dtype] = MappingProxyType({}),
    memo: dict[int, Any] | None = None,
) -> M:
    """Return a copy of ``model`` on the meta device.

    Args:
        dtypes: dtypes of parameters and buffers, by name; others keep theirs.
        memo: of ``copy.deepcopy``: by id, the copies of objects of ``model`` that exist already.
    """
    memo = {} if memo is None else memo
    for name, parameter in model.named_parameters():
        dtype = dtypes.get(name, parameter.dtype)
        empty = torch.empty(parameter.shape, dtype=dtype, device=META)
        memo.setdefault(id(parameter), nn.Parameter(empty, parameter.requires_grad))
    for name, buffer in model.named_buffers():
        empty = torch.empty_like(buffer, dtype=dtypes.get(name, buffer.dtype), device=META)
        memo.setdefault(id(buffer), empty)
    return copy.deepcopy(model, memo)


def inputs_on_meta(model: nn.Module, rows: int, tokens: int) -> dict[str, object]:
    """Return arguments of a training forward of ``model``: ``rows`` sequences of ``tokens`` token
    ids, or one image.

    Raises:
        ConfigError: ``model`` is not one of transformers, or its input has an unknown shape.
    """
    config, main = getattr(model, "config", None), getattr(model, "main_input_name", None)
    if config is None or main is None:
        raise ConfigError(
            f"{type(model).__name__} is not a model of transformers: it has no config or no "
            "main_input_name; pass one that has both"
        )
    accepted = inspect.signature(type(model).forward).parameters
    ids = torch.zeros(rows, tokens, dtype=torch.long, device=META)
    if main == "pixel_values":
        size = getattr(config, "image_size", None) or IMAGE_SIZE
        sides = (size, size) if isinstance(size, int) else tuple(size)
        shape = (1, getattr(config, "num_channels", 3), *sides)
        arguments: dict[str, object] = {main: torch.zeros(shape, device=META)}
    elif main == "input_ids" or "input_ids" in accepted:
        arguments = {"input_ids": ids}
    else:
        raise ConfigError(
            f"{type(model).__name__} takes {main}, of a shape that hf-zero does not know; pass a "
            "model of token ids or images"
        )
    if getattr(config, "is_encoder_decoder", False):
        arguments["decoder_input_ids"] = ids
    if "use_cache" in accepted:
        arguments["use_cache"] = False
    return arguments


class MetaAnswers(TorchDispatchMode):
    """Dispatch mode that answers operations of which meta tensors have no result, by ``answers``,
    functions of (operation, args, kwargs). Operations on other tensors are unchanged.
    """

    def __init__(self, answers: Mapping[object, Answer]):
        super().__init__()  # type: ignore[no-untyped-call]
        self._answers = answers

    def __torch_dispatch__(
        self, func: Any, types: object, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> object:
        answer = self._answers.get(func)
        kwargs = kwargs or {}
        return func(*args, **kwargs) if answer is None else answer(func, args, kwargs)


def _number(func: Any, args: Any, kwargs: Mapping[str, Any]) -> object:
    if not args[0].is_meta:
        return func(*args, **kwargs)
    return torch.zeros((), dtype=args[0].dtype, device="cpu").item()


def _copied(func: Any, args: Any, kwargs: Mapping[str, Any]) -> object:
    if args[1].is_meta and not args[0].is_meta:
        return args[0].zero_()
    return func(*args, **kwargs)


def _moved(func: Any, args: Any, kwargs: Mapping[str, Any]) -> object:
    device = kwargs.get("device")
    if args[0].is_meta and device is not None and torch.device(device).type != "meta":
        dtype = kwargs.get("dtype") or args[0].dtype
        return torch.zeros(args[0].shape, dtype=dtype, device="cpu")
    return func(*args, **kwargs)


def _grouped(func: Any, args: Any, kwargs: Mapping[str, Any]) -> object:
    """Answer a product of groups, of which torch has shapes in bf16 alone, and for widths that are
    multiples of eight.
    """
    rows, others, *more = args
    if not rows.is_meta:
        return func(*args, **kwargs)
    if rows.ndim == 2 and others.ndim == 3:
        return rows.new_empty(rows.shape[0], others.shape[-1])
    narrow = (tensor.to(torch.bfloat16) for tensor in (rows, others))
    return func(*narrow, *more, **kwargs).to(rows.dtype)


# Values that do not exist read as 0.
NUMBERS: Mapping[object, Answer] = {aten._local_scalar_dense.default: _number}
# The same for copies to other devices, which write into tensors that have values.
COPIES: Mapping[object, Answer] = {aten.copy_.default: _copied, aten._to_copy.default: _moved}
GROUPED: Mapping[object, Answer] = {aten._grouped_mm.default: _grouped}
