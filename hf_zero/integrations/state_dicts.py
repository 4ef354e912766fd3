"""State dicts under DeepSpeed's names: copies for saving, and whole weights out of a sharded checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def clone_tensors_for_torch_save(item: Any, device: str | torch.device = "cpu") -> Any:
    """Copies of the tensors in ``item`` (nested dicts, lists, tuples) on ``device``.

    Saving a view of a large buffer would write the buffer. What shared memory shares it again in the copy: tied weights
    stay tied, and are written once.
    """
    return _clone(item, torch.device(device), {})


def _clone(item: Any, device: torch.device, copies: dict[tuple[Any, ...], torch.Tensor]) -> Any:
    if isinstance(item, torch.Tensor):
        place = (item.untyped_storage().data_ptr(), item.storage_offset(), item.shape, item.stride(), item.dtype, item.device)
        if place not in copies or not item.numel():
            copies[place] = item.detach().to(device, copy=True)
        return copies[place]
    if isinstance(item, Mapping):
        return type(item)((key, _clone(value, device, copies)) for key, value in item.items())  # type: ignore[call-arg]
    if isinstance(item, (list, tuple)):
        return type(item)(_clone(value, device, copies) for value in item)
    return item
