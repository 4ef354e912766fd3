"""Ways to end an engine, and measures of what remains afterwards: memory, threads, file
descriptors, process groups, keys of the ranks' store, files.
"""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hf_zero.distributed.mesh import release_all
from hf_zero.distributed.world_group import get_world_group
from tests.helpers.broken_stacks import Armed
from tests.helpers.models import seeded
from tests.helpers.stacks import squared
from tests.helpers.training import At


def large() -> nn.Module:
    """2.3 MiB of weights: one engine of ten that stays behind is seen."""
    return seeded(lambda: Armed(depth=4, width=128))


def live_bytes() -> int:
    """Bytes of the storages of all tensors that the interpreter can reach, each once."""
    gc.collect()
    storages = {}
    for each in gc.get_objects():
        if issubclass(type(each), torch.Tensor) and not each.is_meta:
            with torch._C.DisableTorchFunctionSubclass():
                storage = each.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


def keys_in_the_store() -> int:
    """Keys of hf-zero's own; torch keeps some for each process group it has ever made."""
    return sum(
        key.startswith("hf_zero/") for key in dist.distributed_c10d._get_default_store().list_keys()
    )


def working() -> set[threading.Thread]:
    """Threads that serve other ranks, update, or issue gathers."""
    return {each for each in threading.enumerate() if each.name.startswith(("hf_zero", "hf-zero"))}


def held_files(folder: Path) -> list[str]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # closed meanwhile
            found.append(os.readlink(f"/proc/self/fd/{name}"))
    return [target for target in found if str(folder) in target]


def settle() -> None:
    """Give back what engines have left that nobody has destroyed, as the making of the next one
    does.
    """
    release_all(get_world_group().unreleased)


def held_of_the_job() -> dict[str, int]:
    """File descriptors and threads of this process, process groups, logs of communicators, and
    hf-zero's keys in the store.
    """
    status = get_world_group().watchdog.rank_status
    return {
        "file descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "process groups": len(dist.distributed_c10d._world.pg_map),
        "logs": len(status.logs) if status is not None else 0,
        "keys": keys_in_the_store(),
    }


def await_threads(others: set[threading.Thread]) -> None:
    """Return when the threads of engines that are garbage have ended: they look at their engine at
    least once a second, and one that updates holds it.
    """
    for _ in range(1200):
        gc.collect()
        if not working() - others:
            break
        time.sleep(0.05)


def broken(engine: Any, at: At, where: str) -> None:
    """A pass that breaks at ``where`` of :class:`Armed`, which the script survives."""
    engine.module.at = where
    with pytest.raises(engine.module.error, match="user's own"):
        engine.backward(squared(engine, at))
    engine.module.at = ""


def broken_off(engine: Any, kind: type[BaseException]) -> None:
    """Dropped after a forward that has failed while an update was under way."""
    engine.module.error = kind
    broken(engine, At(2, 0, 0), "forward")


def destroyed(engine: Any) -> None:
    engine.destroy()
    engine.destroy()


ENDINGS: dict[str, Callable[[Any], None]] = {
    "gathered": lambda engine: engine.destroy(gather=True),
    "destroyed": destroyed,
    "dropped": lambda engine: None,
    "exception": lambda engine: broken_off(engine, ValueError),
    "interrupt": lambda engine: broken_off(engine, KeyboardInterrupt),
}
