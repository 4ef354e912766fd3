"""Host memory pinned by a real CUDA; tests/ops/test_host_memory.py plays one."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from hf_zero.ops.host_memory import HostArena

GPU = torch.device("cuda", 0)


def test_memory_is_pinned_and_copies_run_beside_the_host() -> None:
    arena = HostArena(pin=True, device=GPU)
    tensor = arena.take(1 << 26, torch.float32)
    others = [arena.take(numel, torch.float32) for numel in (1 << 20, 3_000_001)]
    asked = sum(each.nbytes for each in (tensor, *others))
    assert arena.pinned and asked <= arena.nbytes <= 1.05 * asked
    assert all(each.is_pinned() for each in (tensor, *others))
    tensor.copy_(torch.arange(1 << 26))
    on_gpu = tensor.to(GPU, non_blocking=True)
    back = arena.take(1 << 26, torch.float32)
    back.copy_(on_gpu, non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(back, tensor)
    part = tensor[5:]
    del tensor
    assert part.is_pinned()


def test_a_refusal_is_no_error_of_later_kernels(heard: list[str]) -> None:
    arena = HostArena(pin=True, device=GPU)
    tensor = arena.take(1 << 20, torch.float32)
    assert arena._register(tensor.data_ptr(), tensor.nbytes) is None, "memory is registered once"
    assert not arena.pinned and len(heard) == 1
    assert int(torch.ones(10, device=GPU).sum()) == 10


def test_a_file_in_memory_is_pinned_and_keeps_what_is_copied(tmp_path: Path) -> None:
    """What a generation in the memory of hosts is copied into."""
    folder = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else tmp_path
    path, size = folder / f"hf-zero-gpu-{os.getpid()}", 1 << 24
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.ftruncate(fd, size)
        image = HostArena(pin=True, device=torch.device("cuda", 0)).take(size, torch.uint8, fd)
        values = torch.arange(size, device="cuda").to(torch.uint8)
        torch.cuda._sleep(100_000_000)
        image.copy_(values, non_blocking=True)
        has_waited = torch.cuda.current_stream().query()
        torch.cuda.synchronize()
        assert image.is_pinned() and not has_waited
        assert path.read_bytes() == values.cpu().numpy().tobytes()
        del image
    finally:
        os.close(fd)
        path.unlink()
