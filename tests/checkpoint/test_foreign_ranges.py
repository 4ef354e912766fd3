"""Ranges of what others saved, out of mappings and out of the middle of files: the same values
however they are come by.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from hf_zero.checkpoint.foreign import torch_files
from hf_zero.checkpoint.foreign.assembled import Table, Widened
from hf_zero.checkpoint.foreign.torch_files import MappedFiles, SavedTensor
from hf_zero.errors import CheckpointError

VALUES = torch.arange(5000.0)


@pytest.fixture
def loaded(tmp_path: Path) -> torch.Tensor:
    torch.save({"before": torch.ones(7), "values": VALUES}, tmp_path / "a.pt")
    return torch.load(tmp_path / "a.pt", mmap=True)["values"]


def read(
    files: MappedFiles, values: torch.Tensor, start: int = 11, count: int = 4000
) -> tuple[bool, torch.Tensor]:
    out = torch.full((count,), float("nan"), dtype=values.dtype)
    return files.read(values, start, out), out


def test_a_mapped_tensor_is_read_from_its_file(tmp_path: Path, loaded: torch.Tensor) -> None:
    files = MappedFiles()
    done, out = read(files, loaded)
    assert done and torch.equal(out, VALUES[11:4011])
    # that it was the file: what stands there now is what is read
    with open(tmp_path / "a.pt", "r+b") as file:
        content = file.read()
        at = content.index(VALUES[11:4011].numpy().tobytes())
        file.seek(at)
        file.write(torch.full((1,), -1.0).numpy().tobytes())
    assert read(files, loaded)[1][0] == -1.0
    files.close()


def test_what_lies_in_no_file_is_left_to_memory(tmp_path: Path, loaded: torch.Tensor) -> None:
    files, another = MappedFiles(), MappedFiles()
    assert not read(files, VALUES)[0]
    assert not files.read(loaded, 0, torch.empty(4, dtype=torch.float64))
    assert not files.read(loaded[::2], 0, torch.empty(4))
    assert not files.read(loaded, 0, torch.empty(0))
    assert not files.read(loaded, 4990, torch.empty(1 << 20)), "beyond the mapping"
    os.rename(tmp_path / "a.pt", tmp_path / "b.pt")
    assert not read(files, loaded)[0], "nothing stands at that path"
    (tmp_path / "a.pt").write_bytes(bytes(30000))
    assert not read(another, loaded)[0], "another file stands at that path"
    table = Table(tmp_path / "a.pt", {"x": loaded}, files)
    out = torch.empty(3)
    table.read_into("x", 5, out)
    assert out.tolist() == [5.0, 6.0, 7.0]


def test_where_the_system_does_not_tell(
    tmp_path: Path, loaded: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_files, "MAPS", tmp_path / "none")
    assert not read(MappedFiles(), loaded)[0]


def test_a_mapped_file_that_is_cut_short(tmp_path: Path, loaded: torch.Tensor) -> None:
    files = MappedFiles()
    os.truncate(tmp_path / "a.pt", 4096)
    with pytest.raises(OSError, match=r"a\.pt was cut short while it was read"):
        read(files, loaded)


def test_16_bits_are_widened_as_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_zero.checkpoint.foreign.assembled.CAST_AT_ONCE", 7)
    table = Table(Path("x"), {"x": Widened(torch.float32, VALUES.bfloat16())}, MappedFiles())
    out = torch.empty(100)
    table.read_into("x", 3, out)
    assert table.entries["x"].dtype == torch.float32
    assert torch.equal(out, VALUES.bfloat16().float()[3:103])


def saved(tmp_path: Path, tensor: object) -> SavedTensor:
    torch.save(tensor, tmp_path / "alone.pt")
    content = (tmp_path / "alone.pt").read_bytes()
    (tmp_path / "several").write_bytes(b"x" * 77 + content + b"y" * 99)
    return SavedTensor("w", tmp_path / "several", 77, len(content), torch.float32, 5000)


@pytest.mark.parametrize(
    "tensor",
    [VALUES, VALUES.view(50, 100), VALUES.view(100, 50).t(), torch.cat([VALUES[:9], VALUES])[9:]],
    ids=["flat", "rows", "turned", "part"],
)
def test_a_tensor_in_the_middle_of_a_file(tmp_path: Path, tensor: torch.Tensor) -> None:
    out = torch.empty(40)
    held = saved(tmp_path, tensor)
    held.read(123, out)
    assert torch.equal(out, tensor.reshape(-1)[123:163])
    whole = torch.empty(5000)
    held.read(0, whole)
    assert torch.equal(whole, tensor.reshape(-1))


def test_only_the_range_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held, bytes_read, preadv = saved(tmp_path, VALUES), [0], os.preadv
    held.read(0, torch.empty(1))

    def counted(fd: int, views: list[memoryview], at: int) -> int:
        count = preadv(fd, views, at)
        bytes_read[0] += count
        return count

    monkeypatch.setattr(os, "preadv", counted)
    held.read(7, torch.empty(10))
    assert bytes_read[0] == 40


@pytest.mark.parametrize("tensor", [VALUES[:7], VALUES.double(), [1, 2]])
def test_what_is_another_tensor_than_it_should_be(tmp_path: Path, tensor: object) -> None:
    with pytest.raises(
        CheckpointError,
        match=r"several is damaged or missing \('w' at byte 77 is not 5000 "
        r"elements of torch.float32\)",
    ):
        saved(tmp_path, tensor).read(0, torch.empty(1))


def test_a_file_that_is_cut_short_after_it_was_opened(tmp_path: Path) -> None:
    held = saved(tmp_path, VALUES)
    held.read(0, torch.empty(1))
    os.truncate(tmp_path / "several", 200)
    with pytest.raises(
        CheckpointError, match=r"cut short to \d+ bytes while it was read.*restore it"
    ):
        held.read(4000, torch.empty(900))


def test_a_tensor_that_reaches_beyond_its_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = saved(tmp_path, VALUES)
    shell = torch.empty(5000, device="meta")
    shell.untyped_storage()._checkpoint_offset = held.length - 8  # type: ignore[attr-defined]
    monkeypatch.setattr("hf_zero.checkpoint.foreign.torch_files.load", lambda *_: shell)
    with pytest.raises(CheckpointError, match=r"'w' at byte 77 reaches beyond its record"):
        held.read(0, torch.empty(1))
