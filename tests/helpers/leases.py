"""Storages that raise where they are read or written while an update or a copy of a save is under
way: a reader has to take ``OptimizerShard.reading()``, a writer ``writing()``, which wait.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, ref

import pytest

from hf_zero.offload.nvme import NvmeStorage
from hf_zero.offload.storage import CastStorage, DeviceStorage, HostStorage
from hf_zero.zero.layout.training_state import OptimizerShard

STORAGES = (DeviceStorage, CastStorage, HostStorage, NvmeStorage)
READS, WRITES = ("fetch", "fetch_into"), ("store", "add")


def guard_storages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the storage of each shard raise AssertionError for a use without a lease. The update
    itself, on its own thread, is the holder of one.
    """
    # a shard holds its storage
    shards: WeakKeyDictionary[Any, ReferenceType[OptimizerShard]] = WeakKeyDictionary()
    keep_in = OptimizerShard.keep_in

    def kept(shard: OptimizerShard, storage: Any, separate_master: bool) -> None:
        shards[storage] = ref(shard)
        keep_in(shard, storage, separate_master)

    def checked(method: Callable[..., Any], writes: bool) -> Callable[..., Any]:
        @wraps(method)
        def call(storage: Any, *given: Any, **more: Any) -> Any:
            known = shards.get(storage)
            shard = None if known is None else known()
            if shard is not None and not threading.current_thread().name.startswith("hf-zero"):
                what = f"{shard.key}: {method.__qualname__}{given[:1]} without a lease, "
                assert shard.finish_update is None, what + "while its update is under way"
                copied = not writes or shard.wait_until_copied is None
                assert copied, what + "while a save copies it"
            return method(storage, *given, **more)

        return call

    monkeypatch.setattr(OptimizerShard, "keep_in", kept)
    for names, writes in ((READS, False), (WRITES, True)):
        for kind in STORAGES:
            for name in names:
                if name in vars(kind):
                    monkeypatch.setattr(kind, name, checked(vars(kind)[name], writes))
