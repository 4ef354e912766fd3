"""``deepspeed.accelerator.get_accelerator()``: the device this process computes on, under DeepSpeed's method names."""

from __future__ import annotations

import functools
from typing import Any

import torch

from hf_zero.core.comm import default_device


class Device:
    """CPU or CUDA, whichever the engine uses here. Whatever is not listed is asked of ``torch.cpu`` or ``torch.cuda``."""

    def __init__(self, kind: str) -> None:
        self._name = kind

    def device_name(self, device_index: int | str | None = None) -> str:
        return self._name if self._name == "cpu" or device_index is None else f"{self._name}:{device_index}"

    def current_device_name(self) -> str:
        return self.device_name(self.current_device())

    def current_device(self) -> int:
        return torch.cuda.current_device() if self._name == "cuda" else 0

    def device(self, device_index: int | None = None) -> Any:
        return torch.device(self.device_name(device_index))

    def communication_backend_name(self) -> str:
        return "nccl" if self._name == "cuda" else "gloo"

    def is_available(self) -> bool:
        return self._name == "cpu" or torch.cuda.is_available()

    def is_bf16_supported(self) -> bool:
        return self._name == "cpu" or torch.cuda.is_bf16_supported()

    def is_fp16_supported(self) -> bool:
        return True

    def empty_cache(self) -> None:
        if self._name == "cuda":
            torch.cuda.empty_cache()

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda if self._name == "cuda" else torch.cpu, name)


@functools.cache
def _device(kind: str) -> Device:
    return Device(kind)


def get_accelerator() -> Device:
    return _device(default_device().type)
