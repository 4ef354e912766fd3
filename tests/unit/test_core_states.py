"""Offloaded training state by piece and as a whole, in memory and in files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hf_zero.ops.host import Blocks
from hf_zero.storage.states import MASTER, Form, States, StatesInMemory
from hf_zero.storage.states_in_files import Buffers, StatesInFiles
from hf_zero.storage.tier import FileTier

PIECES = [(0, 4096), (4096, 8192), (8192, 8201), (8201, 9001)]
NUMEL = 9001
Open = Callable[[], States]


def zeros(numel: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(numel, dtype=dtype)


def in_files(folder: Path, count: int = 3, **how: bool) -> tuple[StatesInFiles, Buffers]:
    buffers = Buffers(count, zeros, **how)
    return StatesInFiles(
        "layer|trainable|float32", NUMEL, PIECES, FileTier([folder], 0), buffers
    ), buffers


@pytest.fixture(params=["memory", "files", "files, one buffer", "files, nothing ahead or behind"])
def states(request: pytest.FixtureRequest, tmp_path: Path) -> States:
    if request.param == "memory":
        return StatesInMemory(NUMEL, PIECES, zeros)
    if request.param == "files, one buffer":
        return in_files(tmp_path, 1)[0]
    if "nothing" in request.param:
        return in_files(tmp_path, read_ahead=False, write_behind=False)[0]
    return in_files(tmp_path)[0]


def update(states: States, order: list[int]) -> None:
    for at, piece in enumerate(order):
        held = states.hold(piece)
        if at + 1 < len(order):
            states.ahead(order[at + 1])
        for name, array in held.items():
            if isinstance(array, Blocks):
                array.encode(array.decode() + 1)
            else:
                array += 1 if name == MASTER else 2
        states.release(piece)


def test_pieces_are_changed_in_place_and_read_as_a_whole(states: States) -> None:
    states.add(MASTER, Form(torch.float32))
    states.add("exp_avg", Form(torch.bfloat16))
    states.add("sum", Form(torch.float32))
    states.store("sum", 0, torch.full((NUMEL,), 0.5))
    states.store(MASTER, 0, torch.arange(NUMEL).float())
    for order in ([0, 1, 2, 3], [3, 1, 0, 2], [2, 3, 0, 1]):
        update(states, order)
    assert states.names() == [MASTER, "exp_avg", "sum"]
    assert torch.equal(states.fetch(MASTER), torch.arange(NUMEL).float() + 3)
    assert states.fetch("exp_avg").eq(6).all() and states.fetch("exp_avg").dtype == torch.bfloat16
    assert states.fetch("sum").eq(6.5).all()


def test_a_range_over_pieces_is_overwritten(states: States) -> None:
    states.add(MASTER, Form(torch.float32))
    update(states, [0, 1, 2, 3])
    states.ahead(1)  # and must not come back with the old values
    states.store(MASTER, 4090, torch.full((4200,), -1.0))
    want = torch.ones(NUMEL)
    want[4090:8290] = -1
    assert torch.equal(states.fetch(MASTER), want)
    update(states, [1, 2])
    want[4096:8201] += 1
    assert torch.equal(states.fetch(MASTER), want)


def test_moments_in_eight_bits_take_a_quarter_and_a_scale(states: States) -> None:
    states.add(MASTER, Form(torch.float32))
    states.add("exp_avg_sq", Form(torch.float32, blocks=True, signed=False))
    values = torch.rand(NUMEL)
    states.store("exp_avg_sq", 0, values)
    got = states.fetch("exp_avg_sq")
    assert got.dtype == torch.float32 and (got - values).abs().max() < 0.05
    states.store("exp_avg_sq", 0, got)
    assert torch.equal(states.fetch("exp_avg_sq"), got), "what was decoded is encoded as it was"
    held = states.hold(2)["exp_avg_sq"]
    assert isinstance(held, Blocks) and torch.equal(held.decode(), got[8192:8201])
    states.release(2)


def test_bytes_by_tier(tmp_path: Path) -> None:
    memory, (files, buffers) = StatesInMemory(NUMEL, PIECES, zeros), in_files(tmp_path)
    for states in (memory, files):
        states.add(MASTER, Form(torch.float32))
        states.add("exp_avg", Form(torch.bfloat16))
    assert memory.nbytes() == {"ram": NUMEL * 6, "disk": 0}
    # of the two long pieces, four and two pages each; the short ones take a page for each array
    pages = 6 * 4096
    assert files.nbytes() == {"ram": 0, "disk": 2 * pages + 4 * 4096}
    assert buffers.nbytes == 3 * pages


def test_a_piece_that_cannot_be_written_stays_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ZERO_IO_FAULT", "write:3+:ENOSPC")
    states, buffers = in_files(tmp_path)
    states.add(MASTER, Form(torch.float32))
    for _ in range(3):
        update(states, [0, 1, 2, 3])
    assert states.fetch(MASTER).eq(3).all()
    assert isinstance(buffers.trouble, OSError) and "No space left" in str(buffers.trouble)
    states.store(MASTER, 8190, torch.zeros(4))
    assert states.fetch(MASTER)[8188:8196].tolist() == [3, 3, 0, 0, 0, 0, 3, 3]


def test_a_read_that_fails_raises_with_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ZERO_IO_FAULT", "read:2+:EIO")
    states, _ = in_files(tmp_path)
    states.add(MASTER, Form(torch.float32))
    states.hold(0)
    states.release(0)
    with pytest.raises(OSError, match="Input/output error") as raised:
        states.hold(1)
    assert str(tmp_path) in str(raised.value.filename)
    states.close()
