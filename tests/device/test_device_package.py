"""hf_zero/device: the one way to streams, events, pinned memory and memory counters, whatever
kind of device torch drives.
"""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from hf_zero.device import free_memory, kinds, pinned, streams
from hf_zero.distributed.backends import native_backend
from hf_zero.errors import HostMemoryError
from hf_zero.ops.host_memory import HostArena, numa_node

ROOT = Path(__file__).resolve().parents[2]
MACHINES = [
    path
    for folder in ("hf_zero", "kernels")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if "hf_zero/device/" not in str(path) and "triton_kernels" not in str(path)
]
NAMES = {"cuda", "is_cuda", "xpu", "hip"}
# A table of what "auto" means by kind of device; the attributes that a parameter hands through.
TABLES = {"hf_zero/config/kernels.py"}


def bound_to_a_kind(source: str) -> Iterator[str]:
    """Yield the places where ``source`` names one kind of accelerator."""
    for node in ast.walk(ast.parse(source)) if any(name in source for name in NAMES) else ():
        if isinstance(node, ast.Attribute):
            name = ast.unparse(node) if node.attr in NAMES else ""
            if name and name != "torch.backends.cuda":  # switches of numerics
                yield f"{node.lineno}: {name}"
        elif isinstance(node, ast.Constant) and node.value in NAMES:
            yield f"{node.lineno}: {node.value!r}"


def test_no_kind_of_accelerator_is_named_outside_the_package() -> None:
    compared = 'if d.type == "cuda":\n    pass'
    others = ("torch.cuda.Stream(d)", "x.is_cuda", "torch.device('cuda', 0)", "torch.version.hip")
    assert [len(list(bound_to_a_kind(source))) for source in (compared, *others)] == [1] * 5
    found = {
        path: named
        for path in MACHINES
        if str(path.relative_to(ROOT)) not in TABLES
        and (named := list(bound_to_a_kind(path.read_text())))
    }
    assert not found, "go through hf_zero.device"


def test_the_host_has_no_streams_and_torch_says_what_is_here(monkeypatch):
    streams_alone = SimpleNamespace(Stream=1, Event=1, stream=1, current_stream=1)
    monkeypatch.setattr(torch, "streams_alone", streams_alone, raising=False)
    for kind in ("cpu", "meta", "mps", "streams_alone"):
        assert kinds.is_synchronous(kind)
    host = torch.device("cpu")
    assert streams.shard_stream(host) is None and streams.record_here(host) is None
    assert kinds.current_index(host) == 0 and native_backend(host) == "gloo"
    with kinds.device_guard(host), streams.on_stream(None):
        kinds.set_device(host)
        kinds.synchronize(host)
    tensor = torch.ones(2)
    assert pinned.upload(tensor, host) is tensor and not pinned.registers(host)

    def here(kind: str | None) -> None:
        found = None if kind is None else torch.device(kind)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: found)

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    for kind in (None, "mps"):  # the second has no streams
        here(kind)
        assert (
            kinds.accelerator() is None
            and kinds.initialized_accelerator() is None
            and kinds.device_count() == 0
        )
    here("cuda")
    assert (
        kinds.accelerator() == "cuda"
        and kinds.initialized_accelerator() is None
        and kinds.device_count() == 3
    )
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert kinds.initialized_accelerator() == "cuda"


class _Device(NamedTuple):
    type: str
    index: int


class _Played(ModuleType):
    """``torch.<kind>`` of a made-up kind; ``calls`` in their order."""

    def __init__(self, name: str, calls: list[Any]):
        super().__init__(name)
        self.calls = calls

        class Stream:
            def __init__(stream, device: Any):
                stream.device = device
                calls.append(("Stream", device))

        class Event:
            def record(event, stream: Any) -> None:
                calls.append(("record", stream))

        self.Stream, self.Event = Stream, Event
        self.current = Stream(SimpleNamespace(type=name, index=1))
        calls.clear()
        self.current_stream = lambda device: self.current
        self.set_device = lambda device: calls.append(("set_device", device.index))
        self.mem_get_info = lambda device: (100, 200)
        self.memory_reserved = lambda device: 50
        self.memory_allocated = lambda device: 30
        self.max_memory_allocated = lambda device: 45
        self.get_device_properties = lambda device: SimpleNamespace(name="made up")

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        self.calls.append("in")
        yield
        self.calls.append("out")


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[_Played, Any]]:
    played = _Played("made_up", [])
    monkeypatch.setattr(torch, "made_up", played, raising=False)
    monkeypatch.setattr(torch, "get_device_module", lambda device: played)
    yield played, _Device("made_up", 1)
    for cached in (kinds.drives_streams, streams._options, streams._side_streams):
        cached.cache_clear()


def test_a_kind_that_nobody_has_heard_of_has_streams_and_events(made_up):
    played, device = made_up
    assert not kinds.is_synchronous(device)
    stream = streams.side_stream(device, streams.Use.GRADIENTS)
    with streams.on_stream(stream):
        # though its streams know no ``priority``, and its events no ``blocking``
        assert isinstance(streams.record_event(stream), played.Event)
    assert isinstance(streams.record_here(device), played.Event)
    kinds.set_device(device)
    kinds.set_device(SimpleNamespace(type="made_up", index=None))  # type: ignore[arg-type]
    assert played.calls == [
        *[("Stream", device)] * len(streams.Use),
        "in",
        ("record", stream),
        "out",
        ("record", played.current),
        ("set_device", 1),
    ]
    assert free_memory.free_on_device(device) == 120
    assert free_memory.free_at_the_peak(device) == 105
    assert free_memory.allocated(device) == 30


def test_side_streams_are_made_once_of_high_priority(made_up: tuple[_Played, Any]) -> None:
    """Each use has one stream for good, whichever thread or engine asks."""
    played, device = made_up
    priorities: list[int] = []
    given: list[dict[str, Any]] = []

    class Stream:
        def __init__(self, device: Any, priority: int = 0):
            priorities.append(priority)

    class Event:
        def __init__(self, **options: Any):
            given.append(options)

        def record(self, stream: Any) -> None:
            pass

    played.Stream, played.Event = Stream, Event
    streams.record_event(played.current)
    assert given[-1] == {"blocking": True}, "a thread that waits sleeps"
    with ThreadPoolExecutor(4) as pool:
        asked = [use for use in streams.Use for _ in range(40)]
        found = list(pool.map(partial(streams.side_stream, device), asked))
    assert priorities == [streams.HIGH] * len(streams.Use) and streams.HIGH < 0
    assert len({(use, id(stream)) for use, stream in zip(asked, found)}) == len(streams.Use)
    assert len(set(map(id, found))) == len(streams.Use)
    assert streams.shard_stream(device) is streams.side_stream(device, streams.Use.SHARDS)


def test_host_memory_is_pinned_by_torch_where_pages_cannot_be_registered(made_up, monkeypatch):
    _, device = made_up
    asked: list[int] = []

    def empty(numel: int, dtype: torch.dtype) -> torch.Tensor:
        asked.append(numel)
        return torch.full((numel,), 7, dtype=dtype)

    monkeypatch.setattr(pinned, "empty", empty)
    assert numa_node(device) is None and not pinned.registers(device)
    arena = HostArena(pin=True, device=device)
    tensor = arena.take(5000, torch.float32)
    assert arena.pinned
    assert tensor.shape == (5000,)
    assert not tensor.any()
    assert tensor.data_ptr() % 4096 == 0
    assert arena.nbytes == 20480 and asked[0] >= 20480
    part = tensor[10:20]
    del tensor
    assert arena.nbytes == 20480 and part.sum() == 0
    del part
    assert arena.nbytes == 0

    def refused(numel: int, dtype: torch.dtype) -> torch.Tensor:
        raise RuntimeError("no pages left\nelsewhere")

    monkeypatch.setattr(pinned, "empty", refused)
    with pytest.raises(HostMemoryError, match=r"torch says: no pages left\. Offload to nvme"):
        HostArena(pin=True, device=device).take(10, torch.float32)
