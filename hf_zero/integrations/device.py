"""``deepspeed.accelerator.get_accelerator()``: the device this process computes on, under DeepSpeed's method names."""

from __future__ import annotations

import functools
from typing import Any

import torch

from hf_zero.core.comm import default_device
from hf_zero.integrations import cpu_device


class Device:
    """CPU or CUDA, whichever the engine uses here. Whatever is not listed is asked of ``torch.cuda``, or of ``cpu_device``."""

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

    def supported_dtypes(self) -> list[torch.dtype]:
        return [torch.float, *([torch.half] if self.is_fp16_supported() else []), *([torch.bfloat16] if self.is_bf16_supported() else [])]

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == self._name

    def pin_memory(self, tensor: torch.Tensor, align_bytes: int = 1) -> torch.Tensor:
        return tensor.pin_memory() if self._name == "cuda" else tensor

    def total_memory(self, device_index: int | None = None) -> int:
        return int(self.mem_get_info(device_index)[1])

    def available_memory(self, device_index: int | None = None) -> int:
        return int(self.mem_get_info(device_index)[0])

    def empty_cache(self) -> None:
        if self._name == "cuda":
            torch.cuda.empty_cache()

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda if self._name == "cuda" else cpu_device, name)


@functools.cache
def _device(kind: str) -> Device:
    return Device(kind)


def get_accelerator() -> Device:
    return _device(default_device().type)
