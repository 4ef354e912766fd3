"""``deepspeed.OnDevice``: modules and tensors made on a device and in a dtype."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

# functions that make a tensor without being given another one
CONSTRUCTORS = frozenset(
    {torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn}
)


class _InDtype(TorchFunctionMode):
    """Convert floating-point tensors of constructors to ``dtype``."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def __torch_function__(
        self,
        func: Any,
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        result = func(*args, **(kwargs or {}))
        if func in CONSTRUCTORS and result.is_floating_point():
            return result.to(self._dtype)
        return result


class OnDevice:
    """Context that makes modules and tensors on ``device``, floating-point ones in ``dtype``; on
    "meta" they have no memory.
    """

    def __init__(
        self, dtype: torch.dtype, device: str | torch.device = "meta", enabled: bool = True
    ) -> None:
        self.dtype, self.device, self.enabled = dtype, device, enabled
        self._stack = ExitStack()

    def __enter__(self) -> None:
        if self.enabled:
            self._stack.enter_context(torch.device(self.device))
            self._stack.enter_context(_InDtype(self.dtype))

    def __exit__(self, *exc: object) -> None:
        self._stack.close()
