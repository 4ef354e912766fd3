"""Storages that raise for a use without a lease: a reader has to take ``OptimizerShard.reading()``,
a writer ``writing()``, which wait, and the update itself ``updating()``. A lease ends where the
next update, or the next copy of a save, begins.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial, wraps
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, ref

import pytest

from hf_zero.offload.nvme import NvmeStorage
from hf_zero.offload.storage import CastStorage, DeviceStorage, HostStorage
from hf_zero.optim.bound_optimizer import BoundOptimizer
from hf_zero.optim.device_state import DeviceState
from hf_zero.zero.layout.flat_buffer import FlatBuffer
from hf_zero.zero.layout.optimizer_shard import CopyGate, OptimizerShard

STORAGES = (DeviceStorage, CastStorage, HostStorage, NvmeStorage)
READS, WRITES = ("fetch", "fetch_into"), ("store", "add", "acquire")
LEASES = {"reading": READS, "writing": READS + WRITES, "updating": READS + WRITES}


class Lease:
    """``storage`` of ``shard`` under a lease of one kind, in place of the storage itself."""

    def __init__(self, shard: OptimizerShard, kind: str, storage: Any, using: threading.local):
        self._shard, self._kind, self._storage, self._using = shard, kind, storage, using
        # an update has its lease for as long as it lasts
        self._ended = {} if kind == "updating" else dict(_ends(shard, kind))

    def __getattr__(self, name: str) -> Any:
        given = getattr(self._storage, name)
        if name not in READS + WRITES:
            return given
        what = f"{self._shard.key}: {name} under the lease of {self._kind}()"
        assert name in LEASES[self._kind], f"{what}, which does not allow it"
        # an update that has begun waits for the copy of a save, which reads
        copies = self._kind == "reading" and self._shard.wait_until_copied is not None
        ends = _ends(self._shard, self._kind)
        assert copies or self._ended.items() <= ends.items(), f"{what}, which ended"
        return partial(self._call, given)

    def _call(self, method: Callable[..., Any], *given: Any, **more: Any) -> Any:
        outer, self._using.leased = getattr(self._using, "leased", False), True
        try:
            return method(*given, **more)
        finally:
            self._using.leased = outer


def _ends(shard: OptimizerShard, kind: str) -> dict[str, int]:
    """The number of beginnings that end a lease of ``kind``, by what begins."""
    counts = shard.__dict__.setdefault("_beginnings", {"begin_update": 0, "begin_copy": 0})
    return counts if kind == "writing" else {"begin_update": counts["begin_update"]}


def guard_storages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the storage of each optimizer shard raise AssertionError for a use without a lease, that
    of each parameter shard for one while an update on its own thread is under way, and writes of
    state on the device while a save copies it.
    """
    # a shard holds its storage
    owners: WeakKeyDictionary[Any, ReferenceType[Any]] = WeakKeyDictionary()
    using = threading.local()  # whether a call is under a lease

    def registering(keep: Callable[..., None]) -> Callable[..., None]:
        @wraps(keep)
        def call(owner: Any, storage: Any, *given: Any, **more: Any) -> None:
            owners[storage] = ref(owner)
            outer, using.leased = getattr(using, "leased", False), True
            keep(owner, storage, *given, **more)
            using.leased = outer

        return call

    def leasing(kind: str) -> Callable[..., Any]:
        take = vars(OptimizerShard)[kind]

        @wraps(take)
        def call(shard: OptimizerShard) -> Any:
            storage = take(shard)
            storage = storage._storage if isinstance(storage, Lease) else storage
            return Lease(shard, kind, storage, using)

        return call

    def counted(begin: Callable[..., None]) -> Callable[..., None]:
        @wraps(begin)
        def call(shard: Any, *given: Any) -> None:
            if isinstance(shard, OptimizerShard):
                _ends(shard, "writing")[begin.__name__] += 1
            begin(shard, *given)

        return call

    def checked(method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def call(storage: Any, *given: Any, **more: Any) -> Any:
            known = owners.get(storage)
            owner = None if known is None else known()
            if owner is not None and not getattr(using, "leased", False):
                what = f"{owner.key}: {method.__qualname__}{given[:1]} without a lease"
                assert isinstance(owner, FlatBuffer), what
                on_update_thread = threading.current_thread().name.startswith("hf-zero update")
                runs = owner.optimizer_shard.update_runs
                assert on_update_thread or not runs, f"{what}, while its update is under way"
            return method(storage, *given, **more)

        return call

    def writing(method: Callable[..., Any], flats_of: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def call(state: Any, *given: Any, **more: Any) -> Any:
            for flat in flats_of(*given):
                copied = getattr(flat, "wait_until_copied", None) is None
                assert copied, f"{flat.key}: {method.__qualname__} while a save copies it"
            return method(state, *given, **more)

        return call

    # both ways to step flat buffers begin with it
    put, begin = DeviceState.put, BoundOptimizer._separate_left_out
    of_segment = writing(put, lambda segment, *_: [part.flat for part in segment.parts])
    monkeypatch.setattr(DeviceState, "put", of_segment)
    on_device = writing(begin, lambda flats: [flat for flat in flats if not flat.offloaded])
    monkeypatch.setattr(BoundOptimizer, "_separate_left_out", on_device)
    monkeypatch.setattr(OptimizerShard, "keep_in", registering(OptimizerShard.keep_in))
    monkeypatch.setattr(FlatBuffer, "keep_shard_in", registering(FlatBuffer.keep_shard_in))
    for kind in LEASES:
        monkeypatch.setattr(OptimizerShard, kind, leasing(kind))
    monkeypatch.setattr(OptimizerShard, "begin_update", counted(OptimizerShard.begin_update))
    monkeypatch.setattr(CopyGate, "begin_copy", counted(CopyGate.begin_copy))
    for storage in STORAGES:
        for name in READS + WRITES:
            if name in vars(storage):
                monkeypatch.setattr(storage, name, checked(vars(storage)[name]))
