"""The simulated device in the place of CUDA: what Python asks ``torch.cuda``, this answers."""

from __future__ import annotations

import types
from typing import Any

import torch
import torch.cuda

from tests.late.device import C

# torch.cuda has them, and they differ
ALWAYS = ("Stream", "Event", "stream", "device", "device_of")
NOT_OURS = ("C", "NAME", "BYTES", "Any", "Callable", "Iterable", "Iterator", "annotations")


def pose(module: types.ModuleType) -> None:
    """Put what ``module`` defines where ``torch.cuda`` and its modules have the same name."""
    import torch.cuda.memory
    import torch.cuda.random
    import torch.cuda.streams

    ours = {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("__")
        and name not in NOT_OURS
        and not isinstance(value, types.ModuleType)
    }
    for place in (torch.cuda, torch.cuda.memory, torch.cuda.random, torch.cuda.streams):
        for name, value in ours.items():
            if hasattr(place, name) or (place is torch.cuda and name in ALWAYS):
                setattr(place, name, value)
    _take_storages()


def _take_storages() -> None:
    """Storages of CUDA tensors, whose allocator torch knows only where built with CUDA."""
    plain_resize, plain_new = torch.UntypedStorage.resize_, torch.UntypedStorage.__new__

    def resize_(self: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        if self.device.type != "cuda":
            return plain_resize(self, size)
        C.resize_storage(torch.empty(0, dtype=torch.uint8, device=self.device).set_(self), size)
        return self

    def new(cls: type, *args: Any, device: Any = None, **kwargs: Any) -> Any:
        if device is None or torch.device(device).type != "cuda":
            if device is not None:
                kwargs["device"] = device
            return plain_new(cls, *args, **kwargs)
        size = args[0] if args else kwargs.get("size", 0)
        return torch.empty(size, dtype=torch.uint8, device=device).untyped_storage()

    torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
    torch.UntypedStorage.__new__ = new  # type: ignore[method-assign, assignment]
