"""Bytes that each rank reads from disk at a load: the elements that it owns, once, and nothing
else.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hf_zero.checkpoint import tensorfile
from hf_zero.checkpoint.find import rank_file
from hf_zero.checkpoint.reader import Checkpoint
from hf_zero.zero.layout.sharding import persistent_buffers
from tests.checkpoint.setups import Setup, described, train

Spans = list[tuple[str, int, int]]  # file, first byte, end
Reads = dict[str, Spans]  # by rank
BLOCK = 64  # bytes that have a hash of their own


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[Reads]:
    """The ranges read from rank files as (file name, start, end), by the name of the thread."""
    seen: Reads = defaultdict(list)
    preadv, pread, read = os.preadv, os.pread, os.read

    def name_of(fd: int) -> str:
        return Path(os.readlink(f"/proc/self/fd/{fd}")).name

    def note(fd: int, at: int, count: int) -> None:
        if name_of(fd).startswith("rank-"):
            seen[threading.current_thread().name].append((name_of(fd), at, at + count))

    def noted_preadv(fd: int, buffers: Any, at: int, *flags: int) -> int:
        count = preadv(fd, buffers, at, *flags)
        note(fd, at, count)
        return count

    def noted_pread(fd: int, length: int, at: int) -> bytes:
        data = pread(fd, length, at)
        note(fd, at, len(data))
        return data

    def unexpected(fd: int, length: int) -> bytes:
        assert not name_of(fd).startswith("rank-"), "a read that is not counted"
        return read(fd, length)

    monkeypatch.setattr(os, "preadv", noted_preadv)
    monkeypatch.setattr(os, "pread", noted_pread)
    monkeypatch.setattr(os, "read", unexpected)
    yield seen


def headers(folder: Path) -> dict[str, int]:
    files = {path.name: path.read_bytes()[:8] for path in folder.glob("rank-*")}
    return {name: 8 + int.from_bytes(begin, "little") for name, begin in files.items()}


def owned_bytes(engine: Any, moments: int) -> int:
    """The bytes of this rank's masters, with ``moments`` fp32 states each, and of frozen values."""
    total = 0
    for flat in engine.flats:
        elements = sum(len(piece) for piece in flat.layout.pieces(*flat.owned))
        total += elements * (4 + 4 * moments if flat.trainable else flat.dtype.itemsize)
    return total


CASES = [
    (Setup(2, 1), Setup(4, 3, way="all in files"), {}),
    (Setup(2, 3, "bf16"), Setup(4, 2, "bf16", way="optimizer on cpu"), {"load_module_only": True}),
    (Setup(4, 2), Setup(1, 3), {"load_optimizer_states": False}),
    (Setup(2, 3), Setup(2, 0), {}),
]


@pytest.mark.parametrize(
    "before, after, asked",
    CASES,
    ids=lambda each: "" if isinstance(each, dict) else described(each),
)
def test_each_rank_reads_what_it_owns(before, after, asked, tmp_path, reads, monkeypatch):
    """And, to compare hashes, the rest of the blocks at the ends of what it owns: once."""
    monkeypatch.setattr(tensorfile, "MIN_BLOCK", BLOCK)
    before, after = (replace(each.at(tmp_path), frozen="h.0.attn") for each in (before, after))

    def save(engine: Any, rank: int) -> None:
        train(engine, rank, range(1))
        engine.save_checkpoint(str(tmp_path / "run"), tag="a")

    def load(engine: Any, rank: int) -> tuple[int, int]:
        owned = owned_bytes(engine, 0 if asked else 2)
        buffers = sum(buffer.nbytes for buffer in persistent_buffers(engine.module).values())
        engine.load_checkpoint(str(tmp_path / "run"), **asked, verify=verify)
        return owned, buffers

    before.run(save)
    begins = headers(tmp_path / "run" / "a")

    def data_of(rank: int) -> Spans:
        """Without the headers."""
        return [span for span in reads[f"rank-{rank}"] if span[1] >= begins[span[0]]]

    verify: bool | None = None
    after.run(load)
    compared = [data_of(rank) for rank in range(after.ranks)]
    reads.clear()
    verify = False
    for rank, (owned, buffers) in enumerate(after.run(load)):
        data = sorted(data_of(rank))
        assert sum(end - at for _, at, end in data) == owned + buffers, f"rank {rank}"
        more = sum(end - at for _, at, end in compared[rank]) - owned - buffers
        assert 0 <= more <= 2 * BLOCK * len(data), f"rank {rank}"
        for one, other in itertools.pairwise(data):
            assert one[0] != other[0] or one[2] <= other[1], "no byte twice"
        opened = {name for name, _, _ in reads[f"rank-{rank}"]}
        of_rank_0 = {rank_file(0, before.ranks)} if buffers else set()
        assert opened == {name for name, _, _ in data} | of_rank_0


def test_verifying_reads_each_file_once_over_all_ranks(tmp_path, monkeypatch):
    hashed, verify = [], Checkpoint.verify

    def noted(self: Checkpoint, entries: Any, *more: Any) -> None:
        hashed.extend(entry.name for entry in entries)
        verify(self, entries, *more)

    monkeypatch.setattr(Checkpoint, "verify", noted)

    def run(engine: Any, rank: int) -> None:
        engine.save_checkpoint(str(tmp_path), tag="a", client_state={"pair": (1, 2)})
        engine.load_checkpoint(str(tmp_path), verify=True)

    Setup().run(run)
    files = sorted(path.name for path in (tmp_path / "a").glob("rank-*"))
    # objects.pt by each rank, which reads it, and once more by one of them
    assert sorted(hashed) == ["objects.pt"] * 3 + files
