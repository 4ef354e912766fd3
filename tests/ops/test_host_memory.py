"""Host memory of offloaded state: as much as was asked for, there from the start, gone with the
last tensor; pinned by a CUDA that is played.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_zero.device import pinned
from hf_zero.device.host_limits import MemoryLimit
from hf_zero.errors import HostMemoryError
from hf_zero.ops import host_memory
from hf_zero.ops.host_memory import HostArena
from tests.helpers.cells import in_turn

MB = 1 << 20
GPU = torch.device("cuda", 0)


def mapping_of(address: int) -> dict[str, str] | None:
    """The smaps entry of the mapping of ``address``, if children do not inherit it."""
    entry: dict[str, str] | None = None
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if head:
            if entry is not None:
                break
            entry = {} if int(head[1], 16) <= address < int(head[2], 16) else None
        elif entry is not None:
            key, _, value = line.partition(":")
            entry[key] = value.strip()
    return entry if entry is not None and "dc" in entry["VmFlags"].split() else None


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@in_turn("populate", [host_memory._POPULATE_WRITE, 9999])
def test_memory_is_what_was_asked_for_and_there(populate, monkeypatch):
    """Children do not inherit it, and large memory is in huge pages."""
    monkeypatch.setattr(host_memory, "_POPULATE_WRITE", populate)
    for nbytes in (5000, 3 * MB + 1, 30 * MB + 12345):
        arena, before = HostArena(), resident()
        tensor = arena.take(nbytes, torch.uint8)
        grown = resident() - before
        mapping = mapping_of(tensor.data_ptr())
        assert mapping is not None
        assert nbytes <= arena.nbytes < nbytes + os.sysconf("SC_PAGE_SIZE")
        # the kernel shows the memory of neighboring arenas, which is resident too, as one mapping
        size, there = (int(mapping[key].split()[0]) * 1024 for key in ("Size", "Rss"))
        assert arena.nbytes <= size == there
        assert abs(grown - nbytes) <= max(0.05 * nbytes, MB)
        assert not tensor.any()
        del tensor, arena
    assert "hg" in mapping["VmFlags"].split()
    brief = HostArena().take(nbytes, torch.uint8, huge_pages=False)
    mapping = mapping_of(brief.data_ptr())
    assert mapping is not None and "hg" not in mapping["VmFlags"].split()


def test_memory_of_a_file_keeps_its_content_on_older_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_memory, "_POPULATE_WRITE", 9999)
    (tmp_path / "slots").write_bytes(b"\x07" * 8192)
    with open(tmp_path / "slots", "r+b") as file:
        assert (HostArena().take(8192, torch.uint8, file.fileno()) == 7).all()
    assert (tmp_path / "slots").read_bytes() == b"\x07" * 8192


def test_memory_is_not_counted_once_it_may_be_given_to_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arena, seen, release = HostArena(), list[int](), host_memory._release
    monkeypatch.setattr(
        host_memory, "_release", lambda *given: (seen.append(arena.nbytes), release(*given))
    )
    tensor = arena.take(4096, torch.uint8)
    del tensor
    assert seen == [0]


def test_a_device_without_a_bus_has_no_node() -> None:
    assert host_memory.numa_node(torch.device("cpu")) is None


def test_tensors_of_every_dtype_stand_on_pages_of_their_own() -> None:
    arena, names = HostArena(pin=True), ("float32", "bfloat16", "float16", "uint8", "int64")
    tensors = [arena.take(1001, getattr(torch, name)) for name in names]
    for index, tensor in enumerate(tensors):
        assert tensor.shape == (1001,) and tensor.is_contiguous() and tensor.data_ptr() % 4096 == 0
        tensor.fill_(index)
    assert [int(each.double().sum()) for each in tensors] == [1001 * n for n in range(len(names))]
    assert arena.take(0, torch.float32).shape == (0,)
    assert not arena.pinned, "without CUDA pin does nothing"


def test_memory_goes_with_the_last_tensor_on_it() -> None:
    arena = HostArena()
    tensor = arena.take(40 * MB, torch.uint8)
    address, before = tensor.data_ptr(), resident()
    view = tensor[20 * MB :].view(torch.float32)
    del tensor, arena
    assert mapping_of(address) is not None
    view.fill_(1.0)
    del view
    assert mapping_of(address) is None
    assert before - resident() > 35 * MB
    arena = HostArena()
    first, second = arena.take(4096, torch.uint8), arena.take(4097, torch.uint8)
    assert arena.nbytes == 3 * 4096
    del first
    assert arena.nbytes == 2 * 4096
    del second
    assert arena.nbytes == 0


def test_what_the_system_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(HostMemoryError, match=r"1125899\.91 GB .* \d+\.\d+ GB are free") as caught:
        HostArena().take(1 << 50, torch.uint8)
    assert isinstance(caught.value, MemoryError)
    monkeypatch.setattr(host_memory, "free_ram", lambda: MemoryLimit(1 << 62, "a test", True))
    with pytest.raises(HostMemoryError, match="Cannot allocate memory"):
        HostArena().take(1 << 60, torch.uint8)
    seen: list[int] = []
    monkeypatch.setattr(
        host_memory, "_bring_in", lambda address, nbytes, **_: seen.append(address) or errno.ENOMEM
    )
    arena = HostArena()
    with pytest.raises(HostMemoryError, match="Cannot allocate memory"):
        arena.take(10 * MB, torch.uint8)
    assert arena.nbytes == 0 and mapping_of(seen[0]) is None


class Cuda:
    """CUDA's registration of host memory, played; ``answer`` is what it says."""

    def __init__(self, answer: int = 0):
        self.answer = answer
        self.registered: dict[int, int] = {}
        self.current: torch.device | None = None  # where a call opens a context

    @contextlib.contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        before, self.current = self.current, device
        yield
        self.current = before

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        assert flags == 1 and self.current == GPU
        if self.answer == 0:
            self.registered[address] = nbytes
        return self.answer

    def cudaHostUnregister(self, address: int) -> int:
        assert mapping_of(address) is not None, "unregistered after it was unmapped"
        assert self.current == GPU, "a context on the device of the thread in which it dies"
        self.registered.pop(address)
        return 0


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Cuda:
    played = Cuda()
    properties = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x1B, pci_device_id=0)
    for owner, name, value in (
        (torch.cuda, "cudart", lambda: played),
        (torch.cuda, "get_device_properties", lambda device: properties),
        (torch.cuda, "device", played.device),
        (pinned, "_forget_error", lambda device: None),
        (host_memory, "_PCI", tmp_path),
    ):
        monkeypatch.setattr(owner, name, value)
    (tmp_path / "0000:1b:00.0").mkdir()
    return played


def test_memory_is_registered_as_long_as_it_lives(cuda: Cuda) -> None:
    arena = HostArena(pin=True, device=GPU)
    assert arena.pinned
    tensor = arena.take(3 * MB, torch.uint8)
    assert cuda.registered == {tensor.data_ptr(): 3 * MB}
    del tensor
    assert cuda.registered == {}
    unpinned = HostArena(pin=False, device=GPU)
    kept = unpinned.take(MB, torch.uint8)
    assert cuda.registered == {} and kept.numel() == MB and not unpinned.pinned


def test_a_refusal_to_pin_is_said_once_and_memory_is_had(cuda, heard, monkeypatch):
    cuda.answer = 2
    for limit in (8192, -1):
        heard.clear()
        limits = {host_memory.resource.RLIMIT_MEMLOCK: (limit, limit)}
        monkeypatch.setattr(
            host_memory.resource, "getrlimit", lambda which, of=limits: of.get(which, (-1, -1))
        )
        arena = HostArena(pin=True, device=GPU)
        tensors = [arena.take(MB, torch.float32) for _ in range(3)]
        assert not arena.pinned and all(tensor.numel() == MB for tensor in tensors)
        (message,) = heard
        assert "does not pin 4194304 bytes" in message and "error 2" in message
        assert ("RLIMIT_MEMLOCK is 8192 bytes" in message) == (limit == 8192)


def test_cudas_last_error_is_taken_away(monkeypatch: pytest.MonkeyPatch) -> None:
    for answers in ([RuntimeError("out of memory"), None], [None]):

        def zeros(numel: int, device: torch.device, answers: Any = answers) -> None:
            answer = answers.pop(0)
            if answer is not None:
                raise answer

        monkeypatch.setattr(torch, "zeros", zeros)
        pinned._forget_error(GPU)
        assert not answers


def test_memory_is_put_on_the_node_of_its_gpu(cuda, tmp_path, monkeypatch, heard_in_full):
    assert host_memory.numa_node(GPU) is None
    for text, node in (("1\n", 1), ("0\n", 0), ("-1\n", None), ("1", 1)):
        (tmp_path / "0000:1b:00.0" / "numa_node").write_text(text)
        assert host_memory.numa_node(GPU) == node
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(
        host_memory,
        "_prefer_node",
        lambda address, nbytes, node: asked.append((nbytes, node)) is not None,
    )
    arena = HostArena(pin=True, device=GPU)
    for _ in range(2):
        assert arena.take(MB, torch.uint8).numel() == MB
    assert asked == [(MB, 1)]
    (said,) = heard_in_full
    assert "NUMA node 1 of cuda:0" in said


def test_pages_of_a_file_follow_the_policy_of_its_memory(cuda, tmp_path, monkeypatch):
    """A policy moves no page that was allocated before it."""
    (tmp_path / "0000:1b:00.0" / "numa_node").write_text("0")
    blocks: list[int] = []
    with (tmp_path / "image").open("w+b") as file:
        file.truncate(MB)

        def place(address: int, nbytes: int, node: int) -> bool:
            blocks.append(os.fstat(file.fileno()).st_blocks)
            return True

        monkeypatch.setattr(host_memory, "_prefer_node", place)
        tensor = HostArena(pin=True, device=GPU).take(MB, torch.uint8, file.fileno())
        blocks.append(os.fstat(file.fileno()).st_blocks)
        tensor.fill_(7)
    assert blocks[0] == 0 and blocks[1] * 512 >= MB
    assert (tmp_path / "image").read_bytes() == b"\7" * MB
    image = tmp_path / "full"

    def full(descriptor: int, begin: int, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with image.open("w+b") as file, pytest.raises(OSError, match="No space"):
        file.truncate(MB)
        HostArena().take(MB, torch.uint8, file.fileno())
    assert str(image) not in Path("/proc/self/maps").read_text()


def test_the_system_is_told_the_node() -> None:
    tensor = HostArena().take(MB, torch.uint8)
    placed = host_memory._prefer_node(tensor.data_ptr(), MB, 0)
    maps = Path("/proc/self/numa_maps")
    lines = maps.read_text().splitlines() if maps.exists() else []
    (policy,) = [
        line.split()[1] for line in lines if int(line.split()[0], 16) == tensor.data_ptr()
    ] or ["default"]
    assert (policy in ("prefer:0", "prefer=static:0")) == placed
