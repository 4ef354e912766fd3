"""Backends of torch.distributed under names that hf-zero does not know, so that it uses and assumes
what it does of any backend.

``plain`` is gloo: without point-to-point messages, codes and marks of the engine's, collectives of
different ranks meet unseen.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

PLAIN = "plain"
_made: list[Any] = []  # torch keeps the native part of a group alone


class _Plain(dist.ProcessGroupGloo):
    def abort(self) -> None:
        """Make what waits raise, as NCCL's does: gloo closes the connections of a message that
        has timed out.
        """
        for peer in range(self.size()):
            if peer != self.rank():
                try:
                    self.recv([torch.empty(1)], peer, 0x7FFFFFFE).wait(timedelta(milliseconds=1))
                except RuntimeError:
                    pass  # as wanted


def _plain(store: Any, rank: int, world: int, timeout: timedelta) -> Any:
    _made.append(_Plain(store, rank, world, timeout))
    return _made[-1]


def register() -> None:
    """Make the backends known in this process."""
    if PLAIN.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(PLAIN, _plain, devices=["cpu"])


def join_again(backend: str, name: str, seconds: float = 200.0) -> None:
    """Leave the process group and join one of ``backend``, over the same store under ``name``.

    Collective.
    """
    register()
    store, rank, world = (
        dist.distributed_c10d._get_default_store(),
        dist.get_rank(),
        dist.get_world_size(),
    )
    dist.destroy_process_group()
    own = dist.PrefixStore(name, store)
    dist.init_process_group(
        backend, store=own, rank=rank, world_size=world, timeout=timedelta(seconds=seconds)
    )
