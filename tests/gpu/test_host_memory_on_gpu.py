"""Host memory pinned by a real CUDA; tests/ops/test_host_memory.py plays one."""

from __future__ import annotations

import torch

from hf_zero.ops import host_memory
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


def test_the_node_of_the_gpu_is_a_number_or_not_told() -> None:
    node = host_memory.numa_node(GPU)
    assert node is None or node >= 0
