"""Parts of hf_zero that pass memory from stream to stream, as programs of the device: ``python -m
tests.late.parts MODE ...`` runs these and those of programs.py.

Each is right, and broken without one of its waits.
"""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

from tests.late import device, programs
from tests.late.programs import BROKEN, NAME, N, Program, current, ones, right, side_stream, total

import torch  # isort: skip
from hf_zero.device import pinned, streams  # isort: skip
from hf_zero.offload.nvme import BufferPool  # isort: skip
from hf_zero.ops.masked_rows import RowCount  # isort: skip
from hf_zero.zero.layout.gradients import GradientMemory  # isort: skip

HERE = torch.device(NAME, 0)


def without(operations: str, function: str, kind: str) -> Callable[[Program], Program]:
    """Add the program without the calls of ``operations``, words, from ``function``: it must report
    ``kind``.
    """

    def add(program: Program) -> Program:
        def broken() -> float:
            for operation in operations.split():
                device.drop(operation, function)
            try:
                return program()
            finally:
                assert device.drops(), f"{function} has no {operations}"
                device.drop_nothing()

        BROKEN[f"{program.__name__}, {operations} left out"] = (broken, kind)
        return program

    return add


def pooled(most: int) -> tuple[streams.TensorPool, torch.Tensor]:
    """A pool, and a tensor of it that the current stream fills."""
    pool = streams.TensorPool(most)
    return pool, pool.acquire(N, torch.float32, HERE).fill_(1)


@without("record_stream", "streams.py acquire", "reuse")
@without("wait", "streams.py acquire", "race")
@right
def a_pooled_tensor_is_used_on_another_stream() -> float:
    pool, tensor = pooled(1)
    side = streams.side_stream(HERE, streams.Use.COUNTS)
    read = tensor * 2
    pool.release(tensor)
    del tensor
    with streams.on_stream(side):
        again = pool.acquire(N, torch.float32, HERE).fill_(3)
        found = again * 2
        del again
    ones()
    current().wait_stream(side)
    return total(read) + total(found)


@without("record_stream", "streams.py release", "reuse")
@right
def a_full_pool_frees_what_another_stream_uses() -> float:
    pool, tensor = pooled(0)
    side = side_stream()
    with streams.on_stream(side):
        found = tensor * 2
        pool.release(tensor)
        del tensor
    ones()
    current().wait_stream(side)
    return total(found)


@without("record_stream", "streams.py clear", "reuse")
@right
def a_pool_is_cleared_after_another_stream() -> float:
    pool, tensor = pooled(1)
    side = side_stream()
    with streams.on_stream(side):
        found = tensor * 2
        pool.release(tensor)
        del tensor
    pool.clear()
    ones()
    current().wait_stream(side)
    return total(found)


@without("record_stream", "gradients.py set_allocated", "reuse")
@without("wait", "gradients.py set_allocated", "reuse")
@right
def gradients_of_two_streams_share_memory() -> float:
    numel = N + 4096  # a size of its own in the allocator
    memory = GradientMemory([numel], torch.float32, HERE)
    whole = memory._elements
    memory.set_allocated(False)
    gradient, side = ones(numel), side_stream()
    read = gradient.sum()
    del gradient
    memory.set_allocated(True)  # in the memory of what is still read
    with streams.on_stream(side):
        memory.set_allocated(True)
        whole.fill_(1)
        found = whole * 2
    memory.set_allocated(False)
    ones()
    current().wait_stream(side)
    return float(read.item()) + total(found)


def upcast_on(side: streams.Stream) -> GradientMemory:
    """Gradients in 16 bits, of the current stream, cast to fp32 on ``side``."""
    memory, held = GradientMemory([N], torch.bfloat16, HERE), mock.Mock(holds_gradient=True)
    memory.take(held).fill_(1)
    side.wait_stream(current())
    with streams.on_stream(side):
        memory.upcast()
    held.reset_mock()  # it has views of the memory
    return memory


@without("record_stream", "gradients.py upcast", "reuse")
@right
def gradients_in_16_bits_are_freed_under_their_cast() -> float:
    side = streams.side_stream(HERE, streams.Use.COUNTS)
    memory = upcast_on(side)
    torch.zeros(N, dtype=torch.bfloat16, device=HERE)
    current().wait_stream(side)
    return total(memory._elements)


@without("wait", "gradients.py set_allocated", "race")
@right
def gradients_are_added_after_their_cast() -> float:
    memory = upcast_on(streams.side_stream(HERE, streams.Use.COUNTS))
    memory.set_allocated(True)
    return total(memory._elements.add_(1))


@without("record_stream", "masked_rows.py __init__", "reuse")
@without("synchronize", "masked_rows.py read", "host")
@without("wait", "masked_rows.py __init__", "race")
@right
def labels_are_counted_beside_the_model() -> float:
    labels = torch.arange(N, device=HERE).remainder_(3)
    count = RowCount(labels, 0)
    del labels
    ones()
    return float(count.read())


@without("query synchronize", "nvme.py acquire", "host")
@right
def a_buffer_of_files_is_filled_again() -> float:
    pool = BufferPool(1, pinned.empty)
    pool.grow(4 * N)
    memory = pool.acquire(must=True)
    assert memory is not None
    brought = memory.view(torch.float32).fill_(1).to(HERE, non_blocking=True)
    pool.release(memory, streams.record_here(HERE))
    again = pool.acquire(must=True)
    assert again is not None
    again.fill_(0)
    return total(brought)


if __name__ == "__main__":
    programs.main()
