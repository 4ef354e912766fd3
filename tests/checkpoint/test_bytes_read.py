"""Bytes that each rank reads from disk at a load: the elements that it owns, once, and nothing
else.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import threading
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hf_zero.checkpoint import tensorfile
from hf_zero.checkpoint.find import rank_file
from hf_zero.zero.layout.sharding import persistent_buffers
from tests.checkpoint.test_offloaded import Away, described, train

Spans = list[tuple[str, int, int]]  # file, first byte, end
Reads = dict[str, Spans]  # by rank
BLOCK = 64  # bytes that have a hash of their own


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[Reads]:
    """Record the ranges read from rank files as (file name, start, end), by the name of the
    thread.
    """
    seen: Reads = defaultdict(list)
    preadv, pread, read = os.preadv, os.pread, os.read

    def note(fd: int, at: int, count: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        if path.name.startswith("rank-"):
            seen[threading.current_thread().name].append((path.name, at, at + count))

    def noted_preadv(fd: int, buffers: Any, at: int, *flags: int) -> int:
        count = preadv(fd, buffers, at, *flags)
        note(fd, at, count)
        return count

    def noted_pread(fd: int, length: int, at: int) -> bytes:
        data = pread(fd, length, at)
        note(fd, at, len(data))
        return data

    def unexpected(fd: int, length: int) -> bytes:
        assert not Path(os.readlink(f"/proc/self/fd/{fd}")).name.startswith("rank-"), (
            "a read that is not counted"
        )
        return read(fd, length)

    monkeypatch.setattr(os, "preadv", noted_preadv)
    monkeypatch.setattr(os, "pread", noted_pread)
    monkeypatch.setattr(os, "read", unexpected)
    yield seen


def headers(folder: Path) -> dict[str, int]:
    return {
        path.name: 8 + int.from_bytes(path.read_bytes()[:8], "little")
        for path in folder.glob("rank-*")
    }


def data_of(spans: Spans, begins: dict[str, int]) -> Spans:
    """``spans`` without the headers."""
    return [(name, at, end) for name, at, end in spans if at >= begins[name]]


def owned_bytes(engine: Any, moments: int) -> int:
    """Return the bytes that this rank owns: the masters of trainable flat buffers with ``moments``
    fp32 states each, and the values of frozen ones.
    """
    total = 0
    for flat in engine.flats:
        elements = sum(len(piece) for piece in flat.layout.pieces(*flat.owned))
        total += elements * (4 + 4 * moments if flat.trainable else flat.dtype.itemsize)
    return total


CASES = [
    (Away(ranks=4, stage=3), Away(ranks=2, stage=3)),
    (Away(ranks=2, stage=1), Away(ranks=4, stage=3, way="all in files")),
    (
        Away(ranks=2, stage=3, precision="bf16"),
        Away(ranks=4, stage=2, precision="bf16", way="optimizer on cpu"),
    ),
    (Away(ranks=4, stage=2), Away(ranks=1, stage=3)),
    (Away(ranks=2, stage=3), Away(ranks=2, stage=0)),
]


@pytest.mark.turns
@pytest.mark.parametrize(
    "asked, moments",
    [({}, 2), ({"load_module_only": True}, 0), ({"load_optimizer_states": False}, 0)],
    ids=str,
)
@pytest.mark.parametrize("before, after", CASES, ids=described)
def test_each_rank_reads_what_it_owns(
    before: Away,
    after: Away,
    asked: dict[str, bool],
    moments: int,
    tmp_path: Path,
    reads: Reads,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And, to compare hashes, the rest of the blocks at the ends of what it owns: once."""
    monkeypatch.setattr(tensorfile, "MIN_BLOCK", BLOCK)
    (tmp_path / "disk").mkdir()
    before, after = (
        dataclasses.replace(setup, folder=tmp_path / "disk", frozen="h.0.attn")
        for setup in (before, after)
    )

    def save(engine: Any, rank: int) -> None:
        train(engine, rank, range(1))
        engine.save_checkpoint(str(tmp_path / "run"), tag="a")

    def load(engine: Any, rank: int) -> tuple[int, int]:
        owned = owned_bytes(engine, moments)
        buffers = sum(buffer.nbytes for buffer in persistent_buffers(engine.module).values())
        engine.load_checkpoint(str(tmp_path / "run"), **asked, verify=verify)
        return owned, buffers

    before.run(save)
    begins = headers(tmp_path / "run" / "a")
    verify: bool | None = None
    after.run(load)
    compared = {rank: data_of(spans, begins) for rank, spans in reads.items()}
    reads.clear()
    verify = False
    expected = after.run(load)
    for rank, (owned, buffers) in enumerate(expected):
        data = data_of(reads[f"rank-{rank}"], begins)
        assert sum(end - at for _, at, end in data) == owned + buffers, f"rank {rank}"
        more = sum(end - at for _, at, end in compared[f"rank-{rank}"]) - owned - buffers
        assert 0 <= more <= 2 * BLOCK * len(data), f"rank {rank}"
        ends = sorted(data)
        assert all(
            one[0] != other[0] or one[2] <= other[1] for one, other in itertools.pairwise(ends)
        ), "no byte twice"
        opened = {name for name, _, _ in reads[f"rank-{rank}"]}
        assert opened == {name for name, _, _ in data} | (
            {rank_file(0, before.ranks)} if buffers else set()
        )


def test_verifying_reads_each_file_once_over_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hf_zero.checkpoint.reader import Checkpoint

    setup, hashed = Away(ranks=2, stage=3), []
    verify = Checkpoint.verify

    def noted(self: Checkpoint, entries: Any, *more: Any) -> None:
        hashed.extend(entry.name for entry in entries)
        verify(self, entries, *more)

    monkeypatch.setattr(Checkpoint, "verify", noted)

    def run(engine: Any, rank: int) -> None:
        engine.save_checkpoint(str(tmp_path), tag="a", client_state={"pair": (1, 2)})
        engine.load_checkpoint(str(tmp_path), verify=True)

    setup.run(run)
    assert sorted(name for name in hashed if name != "objects.pt") == sorted(
        path.name for path in (tmp_path / "a").glob("rank-*")
    )
    assert hashed.count("objects.pt") == 3, (
        "by each rank, which reads it, and once more by one of them"
    )
