"""Faults of transfers: system errors, short transfers, files that end too early, file systems that
refuse.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hf_zero.errors import ConfigError
from hf_zero.ops.files import FileQueue, OpenFile, Priority, parse_faults
from tests.helpers.file_backends import BACKENDS

BLOCK = 1 << 16


@pytest.fixture(params=BACKENDS)
def queue(request: pytest.FixtureRequest) -> Iterator[FileQueue]:
    queue = FileQueue(BLOCK, 4, 3, request.param)
    yield queue
    queue.close()


@pytest.fixture
def file(tmp_path: Path) -> OpenFile:
    return OpenFile.open(tmp_path / "file", create=True)


def test_an_error_is_raised_with_number_and_path(queue: FileQueue, file: OpenFile) -> None:
    data = torch.rand(5 * BLOCK)
    for number in (errno.EIO, errno.ENOSPC, errno.EACCES, errno.EROFS):
        queue.inject(parse_faults(f"write:3:{errno.errorcode[number]}"))
        ticket = queue.write(file, 0, data)
        for _ in range(2):  # whoever waits is told
            with pytest.raises(OSError, match="writing 65536 bytes at") as caught:
                ticket.wait()
            assert (caught.value.errno, caught.value.filename) == (number, file.path)
            assert os.strerror(number) in str(caught.value)
            assert isinstance(caught.value, PermissionError) == (number == errno.EACCES)
        assert ticket.done() and ticket.failed()
        queue.inject([])
        is_written(queue, file, data)


def is_written(queue: FileQueue, file: OpenFile, data: torch.Tensor) -> None:
    out = torch.zeros_like(data)
    queue.write(file, 0, data).wait()
    queue.read(file, 0, out).wait()
    assert torch.equal(out, data)


def test_errors_of_several_transfers_stay_apart(queue: FileQueue, file: OpenFile) -> None:
    queue.inject(parse_faults("write:1:EIO"))
    failing = queue.write(file, 0, torch.rand(8 * BLOCK), Priority.NEEDED)
    with pytest.raises(OSError):
        failing.wait()
    is_written(queue, file, torch.rand(100))


def test_what_comes_short_or_is_interrupted_is_continued(queue: FileQueue, file: OpenFile) -> None:
    short = ("read:1:short", "write:1:short", "read:1+:short,write:1+:short")
    for faults in (*short, "read:2:short,write:3:short"):
        for misaligned in (0, 8):
            whole = torch.randint(0, 256, (3 * BLOCK + 77 + misaligned,), dtype=torch.uint8)
            data, direct = whole[misaligned:], file.direct
            queue.inject(parse_faults(faults))
            is_written(queue, file, data)
            assert file.direct == direct, "an odd place was taken for a refusal of O_DIRECT"
            assert Path(file.path).read_bytes()[: len(data)] == data.numpy().tobytes()
    for number in ("EINTR", "EAGAIN"):
        queue.inject(parse_faults(f"write:1:{number},write:2:{number},read:1:{number}"))
        is_written(queue, file, torch.rand(BLOCK))


def test_a_file_that_ends_inside_a_read(queue: FileQueue, file: OpenFile) -> None:
    queue.write(file, 0, torch.zeros(BLOCK + 100, dtype=torch.uint8)).wait()
    for offset in (0, BLOCK, 3 * BLOCK):
        said = r"the file ends too early \(reading \d+ bytes at \d+\)"
        with pytest.raises(OSError, match=said) as caught:
            queue.read(file, offset, torch.empty(3 * BLOCK + 17, dtype=torch.uint8)).wait()
        assert (caught.value.errno, caught.value.filename) == (errno.EIO, file.path)


def test_a_file_system_that_refuses_o_direct(
    queue: FileQueue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a transfer, where it is injected, and at open."""
    path, real = str(tmp_path / "file"), os.open
    file = OpenFile(path, os.open(path, os.O_RDWR | os.O_CREAT), os.open(path, os.O_RDWR))
    queue.inject(parse_faults("write:1:EINVAL"))
    assert file.direct
    is_written(queue, file, torch.rand(3 * BLOCK))
    assert not file.direct

    def refusing(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), path)
        return real(path, flags, mode)

    monkeypatch.setattr(os, "open", refusing)
    file = OpenFile.open(tmp_path / "plain", create=True)
    assert not file.direct
    is_written(queue, file, torch.rand(BLOCK))
    with pytest.raises(FileNotFoundError):
        OpenFile.open(tmp_path / "missing")


@pytest.mark.parametrize("backend", BACKENDS)
def test_faults_come_from_the_environment(
    backend: str, file: OpenFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ZERO_IO_FAULT", "write:2+:ENOSPC")
    queue = FileQueue(BLOCK, backend=backend)
    queue.write(file, 0, torch.zeros(1)).wait()
    for _ in range(2):
        with pytest.raises(OSError, match="No space left"):
            queue.write(file, 0, torch.zeros(1)).wait()
    queue.close()


def test_faults_that_mean_nothing_are_refused() -> None:
    for text in ("write", "write:x:EIO", "read:1:ENOTANERROR", "move:1:EIO", "read:1:slow"):
        with pytest.raises(ConfigError, match="write for example"):
            parse_faults(text)
