"""The functions of ``torch.late``, which also replace those of the same names in ``torch.cuda``."""

from __future__ import annotations

import contextlib
import os
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from tests.late.device import NAME, C

_TYPE = 1 if NAME == "cuda" else 20  # of c10::DeviceType
BYTES = 16 << 30  # of each device
_initialized = True


def _index(device: Any = None) -> int:
    if device is None:
        return int(C.current_device())
    if isinstance(device, int):
        return device if device >= 0 else int(C.current_device())
    index = torch.device(device).index
    return int(C.current_device()) if index is None else index


class Stream(torch.Stream):
    """A stream of the device, as torch.cuda.Stream."""

    def __new__(cls, device: Any = None, priority: int = 0, **known: Any) -> Stream:
        if "stream_id" in known:
            return super().__new__(cls, priority=priority, **known)
        return super().__new__(cls, device=torch.device(NAME, _index(device)), priority=priority)


class Event(torch.Event):
    """An event of the device, as torch.cuda.Event; the time between two of them is simulated.

    ``_time``: an event recorded beside one with timing. torch refuses to compare events of a
    subclass.
    """

    _time: torch.Event | None

    def __new__(cls, enable_timing: bool = False, *_: Any, **unused: Any) -> Event:
        device = torch.device(NAME, _index())
        made = super().__new__(cls, device=device, enable_timing=enable_timing)
        made._time = torch.Event(device=device, enable_timing=True) if enable_timing else None
        return made

    def record(self, stream: Any = None) -> None:
        on = stream if stream is not None else current_stream()
        super().record(on)
        if self._time is not None:
            self._time.record(on)

    def wait(self, stream: Any = None) -> None:
        super().wait(stream if stream is not None else current_stream())

    def elapsed_time(self, end_event: Event) -> float:  # type: ignore[override]
        assert self._time is not None and end_event._time is not None, "an event without timing"
        return self._time.elapsed_time(end_event._time)


def _stream(stream_id: int, index: int) -> Stream:
    return Stream(stream_id=stream_id, device_index=index, device_type=_TYPE)


def current_stream(device: Any = None) -> Stream:
    index = _index(device)
    return _stream(C.current_stream(index), index)


def default_stream(device: Any = None) -> Stream:
    return _stream(0, _index(device))


def set_stream(stream: torch.Stream) -> None:
    C.set_device(stream.device_index)
    C.set_stream(stream.device_index, stream.stream_id)


@contextlib.contextmanager
def stream(stream: torch.Stream | None) -> Iterator[None]:
    """Send launches inside to ``stream``, on its device, like torch.cuda.stream."""
    if stream is None:
        yield
        return
    device, there = C.current_device(), stream.device_index
    before = C.current_stream(there)
    set_stream(stream)
    try:
        yield
    finally:
        C.set_stream(there, before)
        C.set_device(device)


_on_stream = stream  # where an argument has its name


class device:
    """Change the current device inside, like torch.cuda.device."""

    def __init__(self, device: Any):
        self.idx = _index(device)
        self._before = -1

    def __enter__(self) -> None:
        self._before = C.current_device()
        C.set_device(self.idx)

    def __exit__(self, *_: Any) -> None:
        C.set_device(self._before)


class device_of(device):
    def __init__(self, obj: torch.Tensor):
        super().__init__(obj.device if obj.device.type == NAME else None)


def is_available() -> bool:
    return True


is_initialized = is_available


device_count, current_device = C.device_count, C.current_device


def set_device(device: Any) -> None:
    if _index(device) >= 0:
        C.set_device(_index(device))


def synchronize(device: Any = None) -> None:
    C.use_device(_index(device), "synchronize")
    C.synchronize(_index(device))


def get_device_name(device: Any = None) -> str:
    return "simulated"


def get_device_capability(device: Any = None) -> tuple[int, int]:
    return (9, 0)


def get_device_properties(device: Any = None) -> Any:
    return types.SimpleNamespace(
        name=get_device_name(), total_memory=BYTES, multi_processor_count=1, major=9, minor=0,
        pci_domain_id=0, pci_bus_id=0xFF, pci_device_id=_index(device), uuid="simulated",
        warp_size=32, max_threads_per_multi_processor=2048, L2_cache_size=1 << 20, gcnArchName="",
    )  # fmt: skip


def is_bf16_supported(including_emulation: bool = True) -> bool:
    return True


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16, torch.float32]


def _is_in_bad_fork() -> bool:
    return False


def _lazy_init() -> None:
    """There is nothing to initialize."""


init = _lazy_init


def _lazy_call(call: Any, **_: Any) -> None:
    call()


def ipc_collect() -> None:
    """Nothing is shared between processes."""


def _sleep(cycles: int) -> None:
    C.sleep(max(1, int(cycles) // 2000))


def set_sync_debug_mode(mode: int | str) -> None:
    C.sync_debug(mode not in (0, "default"))


class CUDAGraph:
    """Captured work, as torch.cuda.CUDAGraph; named as torch's for every kind of device."""

    def __init__(self, keep_graph: bool = False):
        self._graph: Any = C.Graph()

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        self._graph.begin(pool)

    def capture_end(self) -> None:
        self._graph.end()

    def replay(self) -> None:
        if self._graph is None:
            raise RuntimeError("late: a graph is launched that was reset")
        self._graph.launch()

    def reset(self) -> None:
        self._graph = None

    def pool(self) -> Any:
        return self._graph.memory()


class graph:
    """Capture what is launched inside, like torch.cuda.graph."""

    def __init__(
        self,
        cuda_graph: CUDAGraph,
        pool: Any = None,
        stream: Any = None,
        capture_error_mode: str = "global",
    ):
        self._captured, self._pool = cuda_graph, pool
        self._on = _on_stream(stream if stream is not None else Stream())

    def __enter__(self) -> None:
        synchronize()
        self._on.__enter__()
        self._captured.capture_begin(self._pool)

    def __exit__(self, *raised: Any) -> None:
        self._captured.capture_end()
        self._on.__exit__(*raised)


def is_current_stream_capturing() -> bool:
    return bool(C.is_capturing())


def empty_cache() -> None:
    """Do nothing: freed memory stays with its stream."""


def _bytes(kind: str) -> Callable[..., int]:
    return lambda device=None: int(C.stats()[kind][_index(device)])


memory_allocated, max_memory_allocated = _bytes("allocated"), _bytes("peak")
memory_reserved = max_memory_reserved = _bytes("reserved")


def reset_peak_memory_stats(device: Any = None) -> None:
    C.reset_peak(_index(device))


def mem_get_info(device: Any = None) -> tuple[int, int]:
    C.use_device(_index(device), "mem_get_info")
    return BYTES - memory_reserved(device), BYTES


def memory_stats(device: Any = None) -> dict[str, int]:
    found = {"num_ooms": 0, "num_alloc_retries": 0}
    found["allocated_bytes.all.current"] = memory_allocated(device)
    found["allocated_bytes.all.peak"] = max_memory_allocated(device)
    for each in ("current", "peak"):
        found[f"reserved_bytes.all.{each}"] = memory_reserved(device)
    return found


class _Runtime:
    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        return int(C.host_register(address, nbytes))

    def cudaHostUnregister(self, address: int) -> int:
        return int(C.host_unregister(address))


def cudart() -> _Runtime:
    # as torch.cuda's: torch takes no memory for pinned before the device is in use
    torch.empty(1, pin_memory=True)
    return _Runtime()


def manual_seed(seed: int) -> None:
    C.seed(_index(), int(seed) & (2**64 - 1))


def manual_seed_all(seed: int) -> None:
    for index in range(device_count()):
        C.seed(index, int(seed) & (2**64 - 1))


def initial_seed() -> int:
    return int(C.initial_seed(_index()))


def seed() -> None:
    manual_seed(int.from_bytes(os.urandom(8), "little"))


def seed_all() -> None:
    manual_seed_all(int.from_bytes(os.urandom(8), "little"))


def get_rng_state(device: Any = None) -> torch.Tensor:
    state: torch.Tensor = C.get_rng_state(_index(device))
    return state


def get_rng_state_all() -> list[torch.Tensor]:
    return [get_rng_state(index) for index in range(device_count())]


def set_rng_state(new_state: torch.Tensor, device: Any = None) -> None:
    C.set_rng_state(_index(device), new_state.cpu())


def set_rng_state_all(new_states: Iterable[torch.Tensor]) -> None:
    for index, state in enumerate(new_states):
        set_rng_state(state, index)
