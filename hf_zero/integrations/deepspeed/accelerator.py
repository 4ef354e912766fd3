"""``deepspeed.accelerator.get_accelerator()``: the device this process computes on, under
DeepSpeed's method names.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from hf_zero.device import kinds
from hf_zero.distributed.process_group import backend_for, default_device
from hf_zero.integrations.deepspeed import cpu_accelerator


class Device:
    """CPU or accelerator, whichever the engine uses here.

    Whatever is not listed is asked of torch's module for it, or of ``cpu_accelerator``.
    """

    def __init__(self, kind: str) -> None:
        self._name = kind
        self._module: Any = cpu_accelerator if kind == "cpu" else kinds.module_of(kind)

    def device_name(self, device_index: int | str | None = None) -> str:
        return (
            self._name
            if self._name == "cpu" or device_index is None
            else f"{self._name}:{device_index}"
        )

    def current_device_name(self) -> str:
        return self.device_name(self.current_device())

    def current_device(self) -> int:
        return kinds.current_index(self._name)

    def device(self, device_index: int | None = None) -> Any:
        return torch.device(self.device_name(device_index))

    def communication_backend_name(self) -> str:
        return backend_for(self._name)

    def is_available(self) -> bool:
        return bool(self._name == "cpu" or self._module.is_available())

    def is_bf16_supported(self) -> bool:
        return bool(self._name == "cpu" or self._module.is_bf16_supported())

    def is_fp16_supported(self) -> bool:
        return True

    def supported_dtypes(self) -> list[torch.dtype]:
        return [
            torch.float,
            *([torch.half] if self.is_fp16_supported() else []),
            *([torch.bfloat16] if self.is_bf16_supported() else []),
        ]

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == self._name

    def pin_memory(self, tensor: torch.Tensor, align_bytes: int = 1) -> torch.Tensor:
        return tensor if self._name == "cpu" else tensor.pin_memory()

    def total_memory(self, device_index: int | None = None) -> int:
        return int(self.mem_get_info(device_index)[1])

    def available_memory(self, device_index: int | None = None) -> int:
        return int(self.mem_get_info(device_index)[0])

    def empty_cache(self) -> None:
        if self._name != "cpu":
            self._module.empty_cache()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


@functools.cache
def _device(kind: str) -> Device:
    return Device(kind)


def get_accelerator() -> Device:
    return _device(default_device().type)
