"""``deepspeed.accelerator``: the device of this process, under DeepSpeed's names.

On the CPU, :class:`CPUAccelerator` and this module replace ``torch.cuda``.
"""

from __future__ import annotations

import functools
import resource
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import psutil
import torch
from torch import get_rng_state as get_rng_state
from torch import initial_seed as initial_seed

from hf_zero.config.variables import positive_number
from hf_zero.deepspeed import accelerator as cpu_accelerator
from hf_zero.deepspeed import op_builders
from hf_zero.deepspeed.modules import LEFT_OUT
from hf_zero.device import kinds
from hf_zero.distributed.backends import native_backend
from hf_zero.distributed.process_group import default_device
from hf_zero.errors import ConfigError

if TYPE_CHECKING:
    from types import ModuleType

    from hf_zero.deepspeed.op_builders import OpBuilder

TENSORS = {
    "BFloat16Tensor": torch.bfloat16, "ByteTensor": torch.uint8, "DoubleTensor": torch.float64,
    "FloatTensor": torch.float32, "HalfTensor": torch.float16, "IntTensor": torch.int32,
    "LongTensor": torch.int64,
}  # fmt: skip


class DeepSpeedAccelerator:
    """The engine's device, CPU or accelerator; a class of your own may derive from it and be given
    to :func:`set_accelerator`.

    Other attributes are read from torch's module for the device, or from ``cpu_accelerator``.
    """

    _name = "cpu"  # of the class: copies, and classes with a constructor of their own, have it too

    def __init__(self, kind: str = "cpu") -> None:
        self._name = kind

    @property
    def _module(self) -> Any:
        return cpu_accelerator if self._name == "cpu" else kinds.module_of(self._name)

    def device_name(self, device_index: int | str | None = None) -> str:
        if self._name == "cpu" or device_index is None:
            return self._name
        return f"{self._name}:{device_index}"

    def current_device_name(self) -> str:
        return self.device_name(self.current_device())

    def current_device(self) -> int:
        return kinds.current_index(self._name)

    def device(self, device_index: int | None = None) -> torch.device:
        return torch.device(self.device_name(device_index))

    def set_device(self, device_index: int) -> None:
        kinds.set_device(torch.device(self._name, int(device_index)))

    def synchronize(self, device_index: int | None = None) -> None:
        kinds.synchronize(torch.device(self.device_name(device_index)))

    def communication_backend_name(self) -> str:
        return native_backend(self._name)

    def is_available(self) -> bool:
        return bool(self._name == "cpu" or self._module.is_available())

    def is_synchronized_device(self) -> bool:
        return kinds.is_synchronous(self._name)

    def is_triton_supported(self) -> bool:
        return kinds.runs_triton(self._name)

    def random(self) -> ModuleType:
        return torch.random

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

    def pin_memory(
        self, tensor: torch.Tensor, make_copy: bool = True, match_shape: bool = True
    ) -> torch.Tensor:
        """Return ``tensor`` in page-locked memory; on the CPU ``tensor`` itself. Without
        ``make_copy`` the memory has no values yet.
        """
        if self._name == "cpu":
            return tensor
        pinned = tensor.pin_memory() if make_copy else torch.empty_like(tensor, pin_memory=True)
        return pinned if match_shape else pinned.view(-1)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return self._name != "cpu" and tensor.is_pinned()

    def unpin_memory(self, tensor: torch.Tensor) -> None:
        """Do nothing: page-locked memory is freed with its tensor."""

    def total_memory(self, device_index: int | None = None) -> int:
        return int(self.mem_get_info(device_index)[1])

    def available_memory(self, device_index: int | None = None) -> int:
        return int(self.mem_get_info(device_index)[0])

    def empty_cache(self) -> None:
        if self._name != "cpu":
            self._module.empty_cache()

    def range_push(self, msg: str, domain: str | None = None, category: str | None = None) -> None:
        """Open a range for a profiler; ranges nest, and each ends with :meth:`range_pop`."""
        ranges = getattr(self._module, "nvtx", None)
        if ranges is not None:
            ranges.range_push(msg)

    def range_pop(self, domain: str | None = None) -> None:
        ranges = getattr(self._module, "nvtx", None)
        if ranges is not None:
            ranges.range_pop()

    def lazy_call(self, callback: Callable[[], object]) -> object:
        """Call ``callback`` at once: torch initializes the device itself."""
        return callback()

    def get_op_builder(self, class_name: str) -> type[OpBuilder]:
        builders = op_builders.BUILDERS
        return builders.get(class_name, builders["NotImplementedBuilder"])

    def create_op_builder(self, class_name: str) -> object:
        return self.get_op_builder(class_name)()

    def __getattr__(self, name: str) -> Any:
        if name in TENSORS:
            return functools.partial(torch.tensor, dtype=TENSORS[name], device=self._name)
        if reason := LEFT_OUT["DeepSpeedAccelerator"].get(name):
            raise AttributeError(f"the accelerator has no {name!r}: {reason}")
        return getattr(self._module, name)


_set: DeepSpeedAccelerator | None = None


@functools.cache
def _device(kind: str) -> DeepSpeedAccelerator:
    return DeepSpeedAccelerator(kind)


def get_accelerator() -> DeepSpeedAccelerator:
    """Return the accelerator given to :func:`set_accelerator`, else that of the engine's device."""
    return _device(default_device().type) if _set is None else _set


def set_accelerator(accel_obj: DeepSpeedAccelerator | None) -> None:
    """Set the result of :func:`get_accelerator`; None restores that of the engine's device. The
    engine still computes on the device that its launcher chose. Raises ConfigError for an object
    of another class.
    """
    global _set
    if not isinstance(accel_obj, DeepSpeedAccelerator | None):
        raise ConfigError(
            f"set_accelerator({accel_obj!r:.60}): it is no DeepSpeedAccelerator; derive its class "
            "from that"
        )
    _set = accel_obj


def is_current_accelerator_supported() -> bool:
    return get_accelerator().device_name() in ("cpu", kinds.accelerator())


NODES = Path("/sys/devices/system/node")
Event = None  # timers use the host's clock
default_stream = torch.cpu.current_stream


def device_count() -> int:
    """Return this host's ranks (LOCAL_SIZE); without a launcher its NUMA nodes with cores."""
    lists = [path.read_text().strip() for path in NODES.glob("node[0-9]*/cpulist")]
    return positive_number("LOCAL_SIZE") or sum(map(bool, lists)) or 1


def default_generator(device_index: int | None = None) -> torch.Generator:
    return torch.default_generator


def manual_seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)


manual_seed_all = manual_seed


def set_rng_state(new_state: torch.Tensor, device_index: int | None = None) -> None:
    torch.set_rng_state(new_state)


def memory_allocated(device_index: int | None = None) -> int:
    """Return the resident bytes of this process, libraries included."""
    resident: int = psutil.Process().memory_info().rss
    return resident


def max_memory_allocated(device_index: int | None = None) -> int:
    """Return the peak of :func:`memory_allocated` since the process began."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return max(peak, memory_allocated())  # the kernel updates the peak a little late


memory_reserved = memory_allocated
max_memory_reserved = max_memory_allocated


def memory_stats(device_index: int | None = None) -> dict[str, int]:
    """Return current and peak bytes under the keys of torch.cuda.memory_stats."""
    return {
        "allocated_bytes.all.current": memory_allocated(),
        "allocated_bytes.all.peak": max_memory_allocated(),
    }


def reset_peak_memory_stats(device_index: int | None = None) -> None:
    """Do nothing: the system does not reset a process's peak."""


def mem_get_info(device_index: int | None = None) -> tuple[int, int]:
    """Return the free bytes and all bytes of this machine's memory."""
    memory = psutil.virtual_memory()
    return memory.available, memory.total


def __getattr__(name: str) -> object:
    return getattr(torch.cpu, name)


F = TypeVar("F", bound=Callable[..., object])


def instrument_w_nvtx(func: F) -> F:
    """Wrap ``func`` in a range of its name in a profile of the device."""

    @functools.wraps(func)
    def call(*args: object, **kwargs: object) -> object:
        get_accelerator().range_push(func.__qualname__)
        try:
            return func(*args, **kwargs)
        finally:
            get_accelerator().range_pop()

    return call  # type: ignore[return-value]
