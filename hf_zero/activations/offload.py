"""Activation offload: tensors saved for the backward are kept in host memory until then (vDNN,
arXiv 1602.08124).

[Note: offload and prefetch]
The granularity is a storage: a tensor saved by three operations, or through different views, is
copied once. The copy starts when the tensor is saved. The newest ``in_flight`` bytes of device
memory under copy are kept; before an older source is released, the compute stream waits, on the
device, for its copy. Storages still kept when the forward ends stay on the device: the backward
needs them first, and reuse of their memory waits for the copy, which is not read. The backward uses
tensors in roughly reverse order; each use prefetches those saved before it, at most ``in_flight``
bytes.

Parameters and buffers are excluded: their owners manage them. With checkpointing, a forward saves
only the inputs of the checkpoints. A recomputation in the backward saves on the device, as usual.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from hf_zero.activations.host_copies import HostRegion, Reloaded, Sent, Slabs, Streams
from hf_zero.errors import OffloadError
from hf_zero.zero.layout.tree import transformed

IN_FLIGHT = 512 << 20  # bytes, until larger blocks have been observed
# a tensor smaller than this fraction of its storage stays: the whole storage would be copied with
# it
PART = 8


def _refuse_changed(shape: torch.Size, saved: int, now: int) -> None:
    if saved != now:
        raise OffloadError(
            f"a tensor of shape {tuple(shape)} that was saved for the backward has been changed in "
            f"place since (version {now}, saved at {saved}); "
            "change a copy (x = x + 1 in place of x += 1, or x.clone())"
        )


class _Record:
    """One saved storage."""

    def __init__(
        self,
        run: _OffloadedPass,
        position: int,
        source: torch.Tensor,
        nbytes: int,
        region: HostRegion,
        sent: Sent,
    ):
        self.run = run
        self.position = position
        self.nbytes = nbytes
        self.version = self.left_at = source._version
        self.shape, self.device = source.shape, source.device
        # Set while the storage is kept on the device. Detached: a node that saved its own result
        # would otherwise keep itself alive.
        self.source: torch.Tensor | None = source.detach()
        self.region: HostRegion | None = region
        self.sent = sent
        self.reloaded: Reloaded | None = None
        self.waiting = 0  # tickets not used yet

    def leave(self) -> None:
        """Release the device memory."""
        assert self.source is not None
        self.left_at = self.source._version  # later in-place changes do not affect the copy
        self.run.transfers.leave(self.sent)
        self.source = None

    def stay(self) -> None:
        """Keep the device memory until the backward, and release the host copy."""
        self.region = None

    def launch(self) -> bool:
        """Start the copy to the device unless the values are there or under way; return whether it
        was started.
        """
        if self.source is not None or self.reloaded is not None:
            return False
        assert self.region is not None
        self.reloaded = self.run.transfers.reload(self.region.memory)
        self.run.ahead += self.nbytes
        return True

    def storage(self) -> torch.UntypedStorage:
        """Return the storage on the device, for kernels launched from now on. Raises OffloadError
        if the tensor was changed in place after it was saved.
        """
        now = self.source._version if self.source is not None else self.left_at
        _refuse_changed(self.shape, self.version, now)
        if self.source is not None:
            return self.source.untyped_storage()
        self.launch()
        assert self.reloaded is not None
        return self.reloaded.use().untyped_storage()

    def drop(self) -> None:
        """Release the copy on the device; a later use copies again."""
        if self.reloaded is not None:
            self.reloaded = None
            self.run.ahead -= self.nbytes

    def __del__(self) -> None:
        self.drop()
        # it stayed on the device, but its copy may be under way: its memory may be reused only
        # afterwards
        if self.source is not None:
            self.run.transfers.leave(self.sent)


class _Ticket:
    """The packed form of a saved tensor whose storage was offloaded."""

    __slots__ = ("_dtype", "_first", "_offset", "_record", "_size", "_stride")

    def __init__(self, record: _Record, tensor: torch.Tensor):
        self._record = record
        self._dtype, self._offset = tensor.dtype, tensor.storage_offset()
        self._size, self._stride = tensor.size(), tensor.stride()
        self._first = True
        record.waiting += 1

    def tensor(self) -> torch.Tensor:
        record = self._record
        missing = record.launch()
        record.run.prefetch_before(record.position, missing)
        with torch.no_grad():
            values = torch.empty(0, dtype=self._dtype, device=record.device)
            layout = self._offset, self._size, self._stride
            values.set_(record.storage(), *layout)  # type: ignore[call-overload]
        self._done()
        return values

    def _done(self) -> None:
        if self._first:
            self._first = False
            self._record.waiting -= 1
        if self._record.waiting <= 0:
            self._record.drop()

    def __del__(self) -> None:
        self._done()


class _Stayed:
    """The packed form of a saved tensor that stays on the device."""

    __slots__ = ("_position", "_run", "_tensor", "_version")

    def __init__(self, run: _OffloadedPass, tensor: torch.Tensor):
        self._run, self._position = run, run.length
        # detached: see _Record
        self._tensor, self._version = tensor.detach(), tensor._version

    def tensor(self) -> torch.Tensor:
        self._run.prefetch_before(self._position)
        _refuse_changed(self._tensor.shape, self._version, self._tensor._version)
        return self._tensor


class _OffloadedPass:
    """One forward and its backward. It lives as long as its graph."""

    def __init__(self, offload: Offload, stays: Collection[int]):
        self.transfers = offload.transfers
        self.ahead = 0  # bytes copied back and not used yet
        self.keeps = False  # whether tensors saved from now on stay: the backward needs them first
        self.ended = False
        self._limit = offload.in_flight
        self._min_bytes, self._stays = offload.min_bytes, stays
        self._slabs, self._device = offload.slabs, offload.device
        self._records: list[weakref.ref[_Record]] = []
        self._cursor = 0  # records from here on were reloaded, or never left
        self._known: dict[int, tuple[StorageWeakRef, weakref.ref[_Record]]] = {}
        self._leaving: deque[_Record] = deque()
        self._leaving_bytes = 0
        self._block_bytes = 0  # sent since the current block began
        self.largest_block = 0

    @property
    def length(self) -> int:
        return len(self._records)

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        return torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)

    def pack(self, tensor: torch.Tensor) -> torch.Tensor | _Ticket | _Stayed:
        if (
            type(tensor) is not torch.Tensor
            or tensor.device != self._device
            or tensor.layout is not torch.strided
        ):
            return tensor
        storage = tensor.untyped_storage()
        if storage._cdata in self._stays:
            return tensor
        nbytes = storage.nbytes()
        small = nbytes < max(self._min_bytes, 1) or tensor.nbytes * PART < nbytes
        if small or tensor.is_conj() or tensor.is_neg():
            return _Stayed(self, tensor)
        record = self._find(storage, tensor._version)
        if record is None:
            if self.keeps:
                return _Stayed(self, tensor)
            record = self._send(tensor, storage, nbytes)
        return _Ticket(record, tensor)

    @staticmethod
    def unpack(packed: torch.Tensor | _Ticket | _Stayed) -> torch.Tensor:
        return packed if isinstance(packed, torch.Tensor) else packed.tensor()

    def _find(self, storage: torch.UntypedStorage, version: int) -> _Record | None:
        if storage._cdata not in self._known:
            return None
        alive, reference = self._known[storage._cdata]
        record = reference()
        if record is not None and not alive.expired() and record.version == version:
            return record
        return None

    @torch.no_grad()
    def _send(self, tensor: torch.Tensor, storage: torch.UntypedStorage, nbytes: int) -> _Record:
        self.ended = False  # the apparent backward was one inside the forward
        region = self._slabs.take(nbytes)
        whole = torch.empty(0, dtype=torch.uint8, device=self._device)
        whole.set_(storage, 0, (nbytes,), (1,))  # type: ignore[call-overload]
        record = _Record(
            self, self.length, tensor, nbytes, region, self.transfers.send(whole, region.memory)
        )
        self._records.append(weakref.ref(record))
        self._known[storage._cdata] = StorageWeakRef(storage), weakref.ref(record)
        self._leaving.append(record)
        self._leaving_bytes += nbytes
        self._block_bytes += nbytes
        while self._leaving_bytes > self._limit and len(self._leaving) > 1:
            first = self._leaving.popleft()
            self._leaving_bytes -= first.nbytes
            first.leave()
        return record

    def block(self) -> None:
        """Mark the beginning of a block."""
        self.largest_block, self._block_bytes = max(self.largest_block, self._block_bytes), 0

    def end(self) -> None:
        """End the forward: storages still under copy stay on the device. Idempotent."""
        if self.ended:
            return
        self.ended = True
        for record in self._leaving:
            record.stay()
        self._leaving.clear()
        self._leaving_bytes = 0
        self._known.clear()
        self._cursor = self.length

    def prefetch_before(self, position: int, missing: bool = False) -> None:
        """Prefetch the storages saved before ``position``, which the backward has reached.

        ``missing``: the storage at ``position`` itself had not been prefetched.
        """
        self.end()
        # a position above the cursor means a second backward
        self._cursor = position if missing else min(self._cursor, position)
        while self._cursor > 0 and self.ahead < self._limit:
            record = self._records[self._cursor - 1]()
            if record is not None and self.ahead and self.ahead + record.nbytes > self._limit:
                return
            self._cursor -= 1
            if record is not None:
                record.launch()


class Offload:
    """Offload of tensors saved on ``device``, of at least ``min_bytes`` each, with ``in_flight``
    bytes under copy in each direction.

    ``in_flight`` None: twice the bytes sent by the largest block of earlier forwards, at least
    :data:`IN_FLIGHT`. With less than a block, each block would wait for its own copies.
    """

    def __init__(
        self,
        device: torch.device,
        transfers: Streams,
        slabs: Slabs,
        min_bytes: int,
        in_flight: int | None,
    ):
        self.device = device
        self.transfers = transfers
        self.slabs = slabs
        self.min_bytes = min_bytes
        self._learns = in_flight is None
        self.in_flight = IN_FLIGHT if in_flight is None else in_flight
        # no copy may outlive the host memory that it reads or writes
        weakref.finalize(self, transfers.close).atexit = False
        self._run: _OffloadedPass | None = None
        self._hooks: list[torch.autograd.graph.saved_tensors_hooks] = []

    def begin(self, stays: Collection[int]) -> None:
        """Begin a forward. ``stays`` are the storages (``_cdata``) that are not activations."""
        self.end()
        if transformed():
            return  # torch does not apply saved-tensor hooks in such a forward
        self._run = _OffloadedPass(self, stays)
        self._hooks.append(self._run.hooks())
        self._hooks[-1].__enter__()

    def block(self) -> None:
        """Mark the beginning of a block."""
        if self._run is not None:
            self._run.block()

    def keep(self) -> None:
        """Keep tensors saved from now on on the device: the backward needs them first."""
        if self._run is not None:
            self._run.keeps = True

    def end(self) -> None:
        """End the current forward, if any."""
        if self._hooks:
            self._hooks.pop().__exit__()
        if self._run is not None:
            self._run.end()
            if self._learns:
                self.in_flight = max(self.in_flight, 2 * self._run.largest_block)
        self._run = None

    @contextmanager
    def part(self) -> Iterator[None]:
        """Offload in a part of a forward without marked begin and end; the forward is taken to have
        ended when its backward uses a saved tensor.
        """
        if transformed():
            yield
            return
        if self._run is None or self._run.ended:
            self._run = _OffloadedPass(self, ())
        with self._run.hooks():
            yield

    def close(self) -> None:
        """Wait for all copies, and release the host memory."""
        self.end()
        self.transfers.close()
        self.slabs.close()
