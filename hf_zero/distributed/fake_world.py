"""A job of which only one rank exists: torch's fake process group, whose collectives return at once
and send nothing, on the meta device, whose tensors have shapes and no memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from hf_zero.distributed.backends import simulate_backend
from hf_zero.distributed.process_group import (
    choose_device,
    chosen_device,
    destroy_process_group,
    is_initialized,
)
from hf_zero.errors import ConfigError

LOCAL = "LOCAL_WORLD_SIZE"
META = torch.device("meta")


@contextmanager
def ranks_of_a_host(ranks: int) -> Iterator[None]:
    """Let plans made inside the block be of a job with so many ``ranks`` on each host."""
    before = os.environ.get(LOCAL)
    os.environ[LOCAL] = str(ranks)
    try:
        yield
    finally:
        if before is None:
            del os.environ[LOCAL]
        else:
            os.environ[LOCAL] = before


@contextmanager
def fake_world(
    world: int, rank: int = 0, backend: str = "nccl", ranks_per_host: int | None = None
) -> Iterator[None]:
    """Make this process ``rank`` of ``world`` ranks inside the block, computing on the meta device.
    ``backend``: the one whose messages, and buffers for them, this rank issues. ``ranks_per_host``:
    None if all ranks share a host.

    Raises ConfigError if this process is in a job already, and for a rank that the job lacks.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if is_initialized():
        raise ConfigError(
            "a simulation needs a process without a process group, and this one is in a job of "
            f"{dist.get_world_size()} ranks; run it in a process of its own (`hf-zero simulate`)"
        )
    if not 0 <= rank < world:
        raise ConfigError(f"rank {rank} is none of {world} ranks; choose one from 0 to {world - 1}")
    before = chosen_device()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    choose_device(META)
    simulate_backend(backend)
    try:
        with ranks_of_a_host(min(world, ranks_per_host or world)):
            yield
    finally:
        simulate_backend(None)
        choose_device(before)
        destroy_process_group()
