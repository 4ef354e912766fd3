"""Tensors that a forward saves for its backward, in host memory until then (activation offload;
vDNN, arXiv 1602.08124).

[Note: what leaves and what comes back]
The unit is a storage: a tensor saved by three operations, or through different views, leaves once.
Its copy starts when it is saved. Of the device memory under copy the newest ``in_flight`` bytes are
kept; the computing stream waits, on the device, for a copy whose source has to go. What is still
kept when the forward ends stays: the backward needs it first, and what uses its memory afterwards
waits for the copy, which is not read. The backward asks for tensors in about the reverse order;
with each one asked for, those saved before it are brought back ahead, ``in_flight`` bytes at most.

Parameters and buffers are no activations: who owns them knows when they are needed. With
checkpointing, what a forward saves is the inputs of the checkpoints. A recomputation in the
backward saves on the device, as always.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from hf_zero.activations.host_buffers import HostRegion, Slabs
from hf_zero.activations.streams import Brought, Transfers
from hf_zero.errors import OffloadError
from hf_zero.zero.layout.tree import transformed

IN_FLIGHT = 512 << 20  # bytes, until blocks are seen that save more
# a tensor that is less than this part of its storage stays: the rest of the storage would travel
# with it
PART = 8


def _refuse_changed(shape: torch.Size, saved: int, now: int) -> None:
    if saved != now:
        raise OffloadError(
            f"a tensor of shape {tuple(shape)} that was saved for the backward has been changed in "
            f"place since (version {now}, saved at {saved}); "
            "change a copy (x = x + 1 in place of x += 1, or x.clone())"
        )


class _Record:
    """One storage that was saved."""

    def __init__(
        self,
        run: _OffloadedPass,
        position: int,
        source: torch.Tensor,
        nbytes: int,
        region: HostRegion,
        sent: Any,
    ):
        self.run = run
        self.position = position
        self.nbytes = nbytes
        self.version = self.left_at = source._version
        self.shape, self.device = source.shape, source.device
        # On the device, as long as it is kept there. Without its graph: a node that saved its own
        # result would keep itself.
        self.source: torch.Tensor | None = source.detach()
        self.region: HostRegion | None = region
        self.sent = sent
        self.brought: Brought | None = None
        self.waiting = 0  # tickets that have not been used

    def leave(self) -> None:
        """Let go of the device memory."""
        assert self.source is not None
        self.left_at = self.source._version  # what is changed later changes no copy
        self.run.transfers.leave(self.sent)
        self.source = None

    def stay(self) -> None:
        """Keep the device memory until the backward."""
        self.region = None

    def launch(self) -> bool:
        """Have it come, if it is neither here nor on its way: then True."""
        if self.source is not None or self.brought is not None:
            return False
        assert self.region is not None
        self.brought = self.run.transfers.bring(self.region.memory)
        self.run.ahead += self.nbytes
        return True

    def storage(self) -> torch.UntypedStorage:
        """The values on the device, for what is launched from now on."""
        now = self.source._version if self.source is not None else self.left_at
        _refuse_changed(self.shape, self.version, now)
        if self.source is not None:
            return self.source.untyped_storage()
        self.launch()
        assert self.brought is not None
        return self.brought.use().untyped_storage()

    def drop(self) -> None:
        """Let go of the copy on the device, which comes again if it has to."""
        if self.brought is not None:
            self.brought = None
            self.run.ahead -= self.nbytes

    def __del__(self) -> None:
        self.drop()
        # it has stayed, and its copy may still be under way: its memory is used again after that
        if self.source is not None:
            self.run.transfers.leave(self.sent)


class _Ticket:
    """What autograd keeps of a tensor whose storage has left."""

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
        record.run.bring_before(record.position, missing)
        with torch.no_grad():
            values = torch.empty(0, dtype=self._dtype, device=record.device)
            place = self._offset, self._size, self._stride
            values.set_(record.storage(), *place)  # type: ignore[call-overload]
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
    """What autograd keeps of a tensor that is on the device."""

    __slots__ = ("_position", "_run", "_tensor", "_version")

    def __init__(self, run: _OffloadedPass, tensor: torch.Tensor):
        self._run, self._position = run, run.length
        # without its graph: see _Record
        self._tensor, self._version = tensor.detach(), tensor._version

    def tensor(self) -> torch.Tensor:
        self._run.bring_before(self._position)
        _refuse_changed(self._tensor.shape, self._version, self._tensor._version)
        return self._tensor


class _OffloadedPass:
    """One forward and its backward. It lives as long as its graph."""

    def __init__(self, offload: Offload, stays: Collection[int]):
        self.transfers = offload.transfers
        self.ahead = 0  # bytes brought back and not used yet
        self.keeps = False  # what is saved from now on is needed first
        self.ended = False
        self._limit = offload.in_flight
        self._min_bytes, self._slabs, self._device = (
            offload.min_bytes,
            offload.slabs,
            offload.device,
        )
        self._stays = stays
        self._records: list[weakref.ref[_Record]] = []
        self._cursor = 0  # records from here on are here, or were
        self._known: dict[int, tuple[StorageWeakRef, weakref.ref[_Record]]] = {}
        self._leaving: deque[_Record] = deque()
        self._leaving_bytes = 0
        self._block_bytes = 0  # sent since the block under way began
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
        alive, known = self._known[storage._cdata]
        record = known()
        return (
            record
            if record is not None and not alive.expired() and record.version == version
            else None
        )

    @torch.no_grad()
    def _send(self, tensor: torch.Tensor, storage: torch.UntypedStorage, nbytes: int) -> _Record:
        self.ended = False  # what looked like the backward was one inside the forward
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
        """A block begins."""
        self.largest_block, self._block_bytes = max(self.largest_block, self._block_bytes), 0

    def end(self) -> None:
        """The forward is over. Idempotent."""
        if self.ended:
            return
        self.ended = True
        for record in self._leaving:
            record.stay()
        self._leaving.clear()
        self._leaving_bytes = 0
        self._known.clear()
        self._cursor = self.length

    def bring_before(self, position: int, missing: bool = False) -> None:
        """The backward has come to ``position``: what was saved before is needed soon.

        ``missing``: that itself was not on its way.
        """
        self.end()
        # above the cursor, it is a second backward
        self._cursor = position if missing else min(self._cursor, position)
        while self._cursor > 0 and self.ahead < self._limit:
            record = self._records[self._cursor - 1]()
            if record is not None and self.ahead and self.ahead + record.nbytes > self._limit:
                return
            self._cursor -= 1
            if record is not None:
                record.launch()


class Offload:
    """Offload of what is saved on ``device``: at least ``min_bytes`` each, with ``in_flight`` bytes
    under copy in each direction.

    ``in_flight`` None: what the two largest blocks of the forward before have sent, and
    :data:`IN_FLIGHT` at least. Less than a block would have each block wait for its own copies.
    """

    def __init__(
        self,
        device: torch.device,
        transfers: Transfers,
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
        # no copy may outlive the host memory that it reads or fills
        weakref.finalize(self, transfers.close).atexit = False
        self._run: _OffloadedPass | None = None
        self._hooks: list[torch.autograd.graph.saved_tensors_hooks] = []

    def begin(self, stays: Collection[int]) -> None:
        """A forward begins. ``stays`` are the storages (``_cdata``) that are no activations."""
        self.end()
        if transformed():
            return  # torch has no hooks on what such a forward saves
        self._run = _OffloadedPass(self, stays)
        self._hooks.append(self._run.hooks())
        self._hooks[-1].__enter__()

    def block(self) -> None:
        """A block of the forward begins."""
        if self._run is not None:
            self._run.block()

    def keep(self) -> None:
        """What the forward saves from now on, the backward needs first: it stays."""
        if self._run is not None:
            self._run.keeps = True

    def end(self) -> None:
        """The forward is over, if one is under way."""
        if self._hooks:
            self._hooks.pop().__exit__()
        if self._run is not None:
            self._run.end()
            if self._learns:
                self.in_flight = max(self.in_flight, 2 * self._run.largest_block)
        self._run = None

    @contextmanager
    def part(self) -> Iterator[None]:
        """A part of a forward whose begin and end are not marked: it is taken to be over when
        its backward asks for something.
        """
        if transformed():
            yield
            return
        if self._run is None or self._run.ended:
            self._run = _OffloadedPass(self, ())
        with self._run.hooks():
            yield

    def close(self) -> None:
        """Wait for copies that are under way, and hold no memory."""
        self.end()
        self.transfers.close()
        self.slabs.close()
