"""The only file that calls torch.distributed: process groups, the collectives of one mesh axis, agreement between ranks.

What is counted are logical collectives (one all-gather or reduction a unit), whatever the backend sends for them. On
gloo, point-to-point exchange is faster than its reduce_scatter and overlaps better than its all_gather; elsewhere the
backend's own collectives are used.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hf_zero.core.agreement import Agreement
from hf_zero.core.watch import Watch

DEFAULT_TIMEOUT = 1800.0


def is_initialized() -> bool:
    return dist.is_available() and dist.is_initialized()


def get_rank(group: Any = None) -> int:
    return dist.get_rank(group) if is_initialized() else 0


def get_world_size(group: Any = None) -> int:
    return dist.get_world_size(group) if is_initialized() else 1


def get_local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", get_rank()))


def barrier(group: Any = None) -> None:
    if is_initialized() and dist.get_world_size(group) > 1:
        dist.barrier(group)


def broadcast(tensor: torch.Tensor, source: int) -> None:
    """Copy global rank ``source``'s ``tensor`` to every rank, in place."""
    if is_initialized() and dist.get_world_size() > 1 and tensor.numel():
        # As bytes: not every backend knows every dtype.
        dist.broadcast(tensor.reshape(-1).view(torch.uint8) if tensor.is_contiguous() else tensor, source)


def destroy_process_group() -> None:
    if is_initialized():
        dist.destroy_process_group()


def default_device() -> torch.device:
    """The device this rank computes on: its own GPU where the launcher has not forced the CPU, else the CPU."""
    forced = os.environ.get("ACCELERATE_USE_CPU", "false").lower() in ("1", "true", "yes")
    if torch.cuda.is_available() and not forced:
        return torch.device("cuda", get_local_rank() % torch.cuda.device_count())
    return torch.device("cpu")


def init_distributed(
    backend: str | None = None,
    timeout: float | timedelta | None = None,
    init_method: str | None = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Join the process group of the launcher; without a launcher, make a group of this one process.

    ``timeout`` in seconds is how long a silent wait lasts before it is an error. Does nothing if a group exists.
    """
    if is_initialized():
        return
    limit = timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout or DEFAULT_TIMEOUT)
    device = default_device()
    backend = backend or ("nccl" if device.type == "cuda" else "gloo")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if os.environ.get("MASTER_ADDR", "127.0.0.1") in ("127.0.0.1", "localhost") and os.path.exists("/sys/class/net/lo"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if init_method is not None:
        dist.init_process_group(backend, init_method=init_method, rank=rank, world_size=world_size, timeout=limit)
    elif "RANK" in os.environ and "WORLD_SIZE" in os.environ and "MASTER_ADDR" in os.environ:
        dist.init_process_group(backend, timeout=limit)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=limit)


def _backend_of(device: torch.device) -> str:
    """The backend that serves ``device``: "gloo", "nccl", "threaded", "fake"."""
    for entry in str(dist.get_backend_config()).split(","):
        kind, _, name = entry.strip().rpartition(":")
        if kind in ("", device.type):
            return name
    return str(dist.get_backend())


@dataclass
class Ledger:
    """Logical collectives issued by this rank: numbers and bytes by operation, and their order when ``record`` is set."""

    counts: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)
    record: bool = False
    log: list[tuple[str, str, int]] = field(default_factory=list)

    def note(self, operation: str, key: str, size: int) -> None:
        self.counts[operation] += 1
        self.bytes[operation] += size
        if self.record:
            self.log.append((operation, key, size))


class Handle:
    """A collective in flight."""

    def __init__(
        self, works: Sequence[Any], watch: Watch, what: str, parts: Sequence[torch.Tensor] = (), free: Callable[[], None] | None = None
    ):
        self._works = list(works)
        self._watch = watch
        self._what = what
        self._parts = list(parts)
        self._free = free

    def wait(self) -> None:
        """Block (on a GPU: make the current stream wait) until the collective is done."""
        if self._works:
            with self._watch.over(self._what):
                for work in self._works:
                    work.wait()
            self._works = []

    def reduce_into(self, out: torch.Tensor, accumulate: bool, scale: float) -> None:
        """Wait, then ``out = scale * sum`` or, accumulating, ``out += scale * sum``; ``out`` sets the precision of the sum."""
        self.wait()
        first, *rest = self._parts
        if accumulate:
            for part in self._parts:
                out.add_(part, alpha=scale)
        else:
            if rest and first.dtype == out.dtype == rest[0].dtype:
                torch.add(first, rest[0], out=out)
                rest = rest[1:]
            elif first.data_ptr() != out.data_ptr() or first.dtype != out.dtype:
                out.copy_(first)
            for part in rest:
                out.add_(part)
            if scale != 1.0:
                out.mul_(scale)
        self._give_back()

    def drop(self) -> None:
        """Wait, and use nothing of the result: the peers wait for what this rank sends."""
        self.wait()
        self._give_back()

    def _give_back(self) -> None:
        self._parts = []
        if self._free is not None:
            self._free()
            self._free = None


class Axis:
    """One axis of the mesh: the ranks that share (shard axis) or repeat (replicate axis) state with this one."""

    def __init__(self, ranks: Sequence[int], rank: int, group: Any, second: Any, backend: str, ledger: Ledger, watch: Watch):
        self.ranks = list(ranks)
        self.size = len(self.ranks)
        self.rank = self.ranks.index(rank)
        self._group = group
        # Reductions have a communicator of their own: their order and the order of gathers then need not interleave alike.
        self._reduce_group = second
        self._point_to_point = backend == "gloo"
        self._ledger = ledger
        self._watch = watch
        self._spare: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}

    def _peers(self) -> list[int]:
        return [(self.rank + step) % self.size for step in range(1, self.size)]

    def all_gather(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], key: str, tag: int) -> Handle:
        """Gather each ``(full, chunk)``: [size * n] from everybody's [n]. The pairs travel as one logical message."""
        if self.size > 1:
            self._ledger.note("all_gather", key, sum(full.nbytes for full, _ in pairs))
        works: list[Any] = []
        for full, chunk in pairs:
            own = full.narrow(0, self.rank * chunk.numel(), chunk.numel())
            if own.data_ptr() != chunk.data_ptr():
                own.copy_(chunk)
            if self.size == 1 or not chunk.numel():
                continue
            if self._point_to_point and full.device.type == "cpu":
                flat = full.view(torch.uint8).chunk(self.size)
                for peer in self._peers():
                    works.append(dist.irecv(flat[peer], self.ranks[peer], self._group, tag))
                for peer in self._peers():
                    works.append(dist.isend(flat[self.rank], self.ranks[peer], self._group, tag))
            else:
                works.append(_all_gather_into(full, own, self._group))
        return Handle(works, self._watch, f"all-gather of {key}")

    def reduce_scatter(self, full: torch.Tensor, key: str, tag: int) -> Handle:
        """Sum ``full`` [size * n] over the axis; the handle reduces this rank's chunk [n] into its destination."""
        n = full.numel() // self.size
        own = full.narrow(0, self.rank * n, n)
        if self.size == 1:
            return Handle([], self._watch, key, [full])
        self._ledger.note("reduce_scatter", key, full.nbytes)
        if self._point_to_point and full.device.type == "cpu":
            received = [self._borrow(n, full.dtype, full.device) for _ in self._peers()]
            raw = full.view(torch.uint8).chunk(self.size) if full.numel() else [full] * self.size
            works = []
            for buffer, peer in zip(received, self._peers()):
                works.append(dist.irecv(buffer.view(torch.uint8), self.ranks[peer], self._reduce_group, tag))
            for peer in self._peers():
                works.append(dist.isend(raw[peer], self.ranks[peer], self._reduce_group, tag))
            return Handle(works, self._watch, f"reduce-scatter of {key}", [own, *received], lambda: self._give_back(received))
        out = self._borrow(n, full.dtype, full.device)
        work = _reduce_scatter_into(out, full, self._reduce_group)
        return Handle([work], self._watch, f"reduce-scatter of {key}", [out], lambda: self._give_back([out]))

    def all_reduce(self, tensor: torch.Tensor, key: str, maximum: bool = False) -> Handle:
        """Sum (or maximum) over the axis, in place."""
        if self.size == 1:
            return Handle([], self._watch, key, [tensor])
        self._ledger.note("all_reduce", key, tensor.nbytes)
        operation = dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM
        work = dist.all_reduce(tensor, operation, self._reduce_group, async_op=True)
        return Handle([work], self._watch, f"all-reduce of {key}", [tensor])

    def close(self) -> None:
        """Give the communicators and spare buffers back."""
        self._spare.clear()
        for group in (self._group, self._reduce_group):
            if group is not None and is_initialized():
                dist.destroy_process_group(group)
        self._group = self._reduce_group = None

    def _borrow(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        spare = self._spare.get((numel, dtype))
        return spare.pop() if spare else torch.empty(numel, dtype=dtype, device=device)

    def _give_back(self, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            spare = self._spare.setdefault((tensor.numel(), tensor.dtype), [])
            if len(spare) < self.size:
                spare.append(tensor)


def _all_gather_into(full: torch.Tensor, own: torch.Tensor, group: Any) -> Any:
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(full, own.clone() if dist.get_backend(group) == "threaded" else own, group=group, async_op=True)


def _reduce_scatter_into(out: torch.Tensor, full: torch.Tensor, group: Any) -> Any:
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return scatter(out, full, group=group, async_op=True)


class Comm:
    """The ranks of one engine as a mesh of ``shards`` × replicas, and the store in which they agree."""

    def __init__(self, shards: int, device: torch.device, timeout: float = DEFAULT_TIMEOUT):
        self.rank, self.world = get_rank(), get_world_size()
        self.ledger = Ledger()
        self.timeout = timeout
        backend = _backend_of(device)
        self.blocks = device.type == "cpu"  # waiting for a collective blocks the host, not a stream
        self.watch = Watch(enabled=self.world > 1 and backend not in ("threaded", "fake"))
        rows = [list(range(start, start + shards)) for start in range(0, self.world, shards)]
        columns = [list(range(start, self.world, shards)) for start in range(shards)]
        self.shard = self._axis(rows, backend, timeout)
        self.replicate = self._axis(columns, backend, timeout)
        self.agreement: Agreement | None = None
        if self.world > 1 and backend != "fake":
            store = dist.distributed_c10d._get_default_store()
            number = store.add(f"hf_zero/engines/{self.rank}", 1)
            self.agreement = Agreement(dist.PrefixStore(f"hf_zero/{number}", store), self.rank, self.world, timeout)

    def _axis(self, sets: list[list[int]], backend: str, timeout: float) -> Axis:
        mine, groups = next(ranks for ranks in sets if self.rank in ranks), [None, None]
        if len(mine) > 1:
            for place in range(2):
                for ranks in sets:
                    made = dist.new_group(ranks, timeout=timedelta(seconds=timeout))
                    if self.rank in ranks:
                        groups[place] = made
        return Axis(mine, self.rank, groups[0], groups[1], backend, self.ledger, self.watch)

    def close(self, groups: bool = True) -> None:
        """Let go of threads and, with ``groups``, of the process groups; collectives of this mesh end here."""
        self.watch.close()
        if self.agreement is not None:
            self.agreement.close()
        if groups:
            for axis in (self.shard, self.replicate):
                axis.close()

    def barrier(self) -> None:
        barrier()

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Copy global rank ``source``'s ``tensor`` to every rank, in place."""
        if self.world > 1 and tensor.numel():
            self.ledger.note("broadcast", "", tensor.nbytes)
            broadcast(tensor, source)

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        if self.world == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, source)
        return box[0]

    def all_gather_object(self, value: Any) -> list[Any]:
        if self.world == 1:
            return [value]
        box: list[Any] = [None] * self.world
        dist.all_gather_object(box, value)
        return box
