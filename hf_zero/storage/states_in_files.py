"""The training state of a flat in files: read ahead and written behind, through a bounded number of
buffers.

[Note: a disk that fails]
A piece that cannot be written stays in memory, and the update goes on: after it, every piece is of
the same step and can still be saved. :attr:`Buffers.trouble` then tells the engine not to begin
another one.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch

from hf_zero.ops.files import ALIGNMENT, Priority
from hf_zero.ops.host import BLOCK, Blocks, Moment
from hf_zero.storage.states import Form, Piece, Take, put


def paged(nbytes: int) -> int:
    """``nbytes``, up to a multiple of what direct transfers take."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def size_in_file(form: Form, numel: int) -> int:
    """Bytes that a piece of ``numel`` elements takes."""
    if form.blocks:
        return paged(numel) + paged(4 * -(-numel // BLOCK))
    return paged(numel * form.dtype.itemsize)


@dataclass(eq=False)
class _Held:
    """A buffer and what is in it.

    ``tickets`` are of the read it waits for, or of the write that has begun.
    """

    owner: StatesInFiles
    piece: int
    memory: torch.Tensor
    arrays: dict[str, Moment]
    tickets: list[Any] = field(default_factory=list)

    def wait(self) -> None:
        while self.tickets:
            self.tickets[0].wait()
            self.tickets.pop(0)


class Buffers:
    """The buffers that the flats of one engine share. Safe to be used from two threads."""

    def __init__(self, count: int, take: Take, read_ahead: bool = True, write_behind: bool = True):
        self.lock = threading.RLock()
        self.read_ahead, self.write_behind = read_ahead and count > 1, write_behind
        self.trouble: OSError | None = None  # the first write that failed
        self._count = count
        self._take = take
        self._size = 0
        self._free: list[torch.Tensor] | None = None
        self._writing: list[_Held] = []

    @property
    def nbytes(self) -> int:
        return self._count * self._size

    def grow(self, size: int) -> None:
        """Make room for pieces of ``size`` bytes. Before the first of them is held."""
        if size > self._size:
            self.flush()
            self._size, self._free = size, None

    def borrow(self, must: bool) -> torch.Tensor | None:
        """A free buffer; one that is being written is waited for, if it must be."""
        with self.lock:
            if self._free is None:
                self._free = [self._take(self._size, torch.uint8) for _ in range(self._count)]
            if not self._free:
                self._reap(must)
            return self._free.pop() if len(self._free) > (0 if must else 1) else None

    def give_back(self, memory: torch.Tensor) -> None:
        with self.lock:
            assert self._free is not None
            self._free.append(memory)

    def write(self, held: _Held) -> None:
        """``held`` is being written; its buffer comes back later."""
        with self.lock:
            self._writing.append(held)
            if not self.write_behind:
                self._end(held)

    def flush(self) -> None:
        """Wait for everything that is being written."""
        with self.lock:
            while self._writing:
                self._end(self._writing[0])

    def being_written(self, owner: StatesInFiles) -> list[_Held]:
        return [held for held in self._writing if held.owner is owner]

    def _reap(self, must: bool) -> None:
        for held in [
            held for held in self._writing if all(ticket.done() for ticket in held.tickets)
        ]:
            self._end(held)
        if must and not self._free and self._writing:
            self._end(self._writing[0])

    def _end(self, held: _Held) -> None:
        try:
            held.wait()
        except OSError as error:
            self.trouble = self.trouble or error
            held.owner.keep(held.piece, held.arrays)
            for ticket in held.tickets:
                let_end(ticket)
        self._writing.remove(held)
        self.give_back(held.memory)


def let_end(ticket: Any) -> None:
    """Wait for a transfer whose outcome no longer matters, because the buffer must not be used
    under it.
    """
    try:
        ticket.wait()
    except OSError:
        return


class StatesInFiles:
    """Arrays of one flat in files of ``tier``; each piece of each array begins at a page."""

    def __init__(self, key: str, numel: int, pieces: Sequence[Piece], tier: Any, buffers: Buffers):
        self.pieces = list(pieces)
        self._key = key
        self._numel = numel
        self._tier = tier
        self._buffers = buffers
        self._forms: dict[str, Form] = {}
        self._regions: dict[str, Any] = {}
        self._offsets: dict[str, list[int]] = {}  # of the pieces in each region
        self._here: dict[int, _Held] = {}  # read ahead, or held
        self._kept: dict[int, dict[str, Moment]] = {}  # pieces that could not be written

    def names(self) -> list[str]:
        return list(self._forms)

    def add(self, name: str, like: Form) -> None:
        self._drop_ahead()
        self._forms[name] = like
        self._offsets[name] = [0, *accumulate(self._sizes(name))]
        self._regions[name] = self._tier.allocate(f"{self._key}.{name}", self._offsets[name][-1])
        self._buffers.grow(
            max((self._piece_bytes(piece) for piece in range(len(self.pieces))), default=0)
        )

    def _size(self, name: str, piece: int) -> int:
        start, stop = self.pieces[piece]
        return size_in_file(self._forms[name], stop - start)

    def _offset(self, name: str, piece: int) -> int:
        return self._offsets[name][piece]

    def _sizes(self, name: str) -> list[int]:
        return [self._size(name, piece) for piece in range(len(self.pieces))]

    def _piece_bytes(self, piece: int) -> int:
        return sum(self._size(name, piece) for name in self._forms)

    def _array(self, name: str, piece: int, memory: torch.Tensor) -> Moment:
        """The array of ``piece`` that lies at the beginning of ``memory`` (bytes)."""
        start, stop = self.pieces[piece]
        numel, form = stop - start, self._forms[name]
        if form.blocks:
            scales, at = -(-numel // BLOCK), paged(numel)
            return Blocks(
                memory[:numel], memory[at : at + 4 * scales].view(torch.float32), form.signed
            )
        return memory[: numel * form.dtype.itemsize].view(form.dtype)

    def _read(self, piece: int, memory: torch.Tensor, priority: Priority) -> _Held:
        held, at = _Held(self, piece, memory, {}), 0
        for name, region in self._regions.items():
            size = self._size(name, piece)
            held.arrays[name] = self._array(name, piece, memory[at : at + size])
            held.tickets.append(
                region.read(self._offset(name, piece), memory[at : at + size], priority)
            )
            at += size
        return held

    def ahead(self, piece: int) -> None:
        if not self._buffers.read_ahead or piece in self._here or piece in self._kept:
            return
        with self._buffers.lock:
            if any(held.piece == piece for held in self._buffers.being_written(self)):
                return
            memory = self._buffers.borrow(must=False)
            if memory is not None:
                self._here[piece] = self._read(piece, memory, Priority.AHEAD)

    def hold(self, piece: int) -> dict[str, Moment]:
        if piece not in self._here:
            with self._buffers.lock:
                self._await_writes(piece)
                if piece in self._kept:
                    return self._kept[piece]
                memory = self._buffers.borrow(must=True)
                assert memory is not None, "more pieces are held than there are buffers"
                self._here[piece] = self._read(piece, memory, Priority.NEEDED)
        self._here[piece].wait()
        return self._here[piece].arrays

    def release(self, piece: int) -> None:
        held = self._here.pop(piece, None)
        if held is None:
            return  # it is kept in memory
        at = 0
        for name, region in self._regions.items():
            size = self._size(name, piece)
            held.tickets.append(
                region.write(
                    self._offset(name, piece), held.memory[at : at + size], Priority.BEHIND
                )
            )
            at += size
        self._buffers.write(held)

    def keep(self, piece: int, arrays: dict[str, Moment]) -> None:
        """Hold a copy of ``arrays`` in memory from now on."""
        self._kept[piece] = {
            name: Blocks(array.codes.clone(), array.scales.clone(), array.signed)
            if isinstance(array, Blocks)
            else array.clone()
            for name, array in arrays.items()
        }

    def _await_writes(self, piece: int | None = None) -> None:
        with self._buffers.lock:
            for held in self._buffers.being_written(self):
                if piece is None or held.piece == piece:
                    self._buffers._end(held)

    def _drop_ahead(self) -> None:
        for piece in list(self._here):
            held = self._here.pop(piece)
            for ticket in held.tickets:
                let_end(ticket)
            self._buffers.give_back(held.memory)

    def _one(self, name: str, piece: int, fill: bool = True) -> Moment:
        """The array ``name`` of ``piece`` in memory of its own; without ``fill`` it is to be
        overwritten whole.
        """
        if piece in self._kept:
            return self._kept[piece][name]
        memory = torch.empty(self._size(name, piece) + ALIGNMENT, dtype=torch.uint8)
        memory = memory[-memory.data_ptr() % ALIGNMENT :][: self._size(name, piece)]
        if fill:
            self._regions[name].read(self._offset(name, piece), memory, Priority.NEEDED).wait()
        return self._array(name, piece, memory)

    def dtype(self, name: str) -> torch.dtype:
        form = self._forms[name]
        return torch.float32 if form.blocks else form.dtype

    def fetch(self, name: str) -> torch.Tensor:
        self._await_writes()
        out = torch.empty(self._numel, dtype=self.dtype(name))
        for piece, (start, stop) in enumerate(self.pieces):
            array = self._one(name, piece)
            out[start:stop] = array.decode() if isinstance(array, Blocks) else array
        return out

    def store(self, name: str, start: int, values: torch.Tensor) -> None:
        self._drop_ahead()
        self._await_writes()
        for piece, (begin, end) in enumerate(self.pieces):
            first, last = max(begin, start), min(end, start + values.numel())
            if first >= last:
                continue
            array = self._one(name, piece, fill=(first, last) != (begin, end))
            put(array, first - begin, values[first - start : last - start])
            if piece not in self._kept:
                memory = array.codes if isinstance(array, Blocks) else array.view(torch.uint8)
                whole = memory.as_strided((self._size(name, piece),), (1,))
                self._regions[name].write(self._offset(name, piece), whole, Priority.NEEDED).wait()

    def entry(self, name: str) -> torch.Tensor:
        return torch.zeros(1, dtype=self._forms[name].dtype).expand(self._numel)

    def nbytes(self) -> dict[str, int]:
        return {"ram": 0, "disk": sum(offsets[-1] for offsets in self._offsets.values())}

    def close(self) -> None:
        self._drop_ahead()
        self._await_writes()
        self._regions.clear()
        self._offsets.clear()
        self._forms.clear()
        self._kept.clear()
