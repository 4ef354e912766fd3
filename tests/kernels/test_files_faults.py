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


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EACCES, errno.EROFS])
def test_an_error_is_raised_with_number_and_path(
    queue: FileQueue, file: OpenFile, number: int
) -> None:
    data = torch.rand(5 * BLOCK)
    queue.inject(parse_faults(f"write:3:{errno.errorcode[number]}"))
    ticket = queue.write(file, 0, data)
    for _ in range(2):  # whoever waits is told
        with pytest.raises(OSError, match="writing 65536 bytes at") as caught:
            ticket.wait()
        assert caught.value.errno == number
        assert caught.value.filename == file.path
        assert os.strerror(number) in str(caught.value)
    assert ticket.done() and ticket.failed()
    queue.inject([])
    out = torch.empty_like(data)
    queue.write(file, 0, data).wait()
    queue.read(file, 0, out).wait()
    assert torch.equal(out, data)


def test_permission_denied_is_pythons_own_class(queue: FileQueue, file: OpenFile) -> None:
    queue.inject(parse_faults("read:1:EACCES"))
    with pytest.raises(PermissionError):
        queue.read(file, 0, torch.empty(1)).wait()


def test_errors_of_several_transfers_stay_apart(queue: FileQueue, file: OpenFile) -> None:
    first, second = torch.rand(8 * BLOCK), torch.rand(100)
    queue.inject(parse_faults("write:1:EIO"))
    failing = queue.write(file, 0, first, Priority.NEEDED)
    with pytest.raises(OSError):
        failing.wait()
    queue.write(file, 0, second).wait()
    out = torch.empty_like(second)
    queue.read(file, 0, out).wait()
    assert torch.equal(out, second)


@pytest.mark.parametrize("misaligned", [0, 8])
@pytest.mark.parametrize(
    "faults",
    ["read:1:short", "write:1:short", "read:1+:short,write:1+:short", "read:2:short,write:3:short"],
)
def test_what_comes_short_is_continued(
    queue: FileQueue, file: OpenFile, faults: str, misaligned: int
) -> None:
    data = torch.randint(0, 256, (3 * BLOCK + 77 + misaligned,), dtype=torch.uint8)[misaligned:]
    direct = file.direct
    queue.inject(parse_faults(faults))
    queue.write(file, 0, data).wait()
    out = torch.zeros_like(data)
    queue.read(file, 0, out).wait()
    assert torch.equal(out, data)
    assert file.direct == direct, (
        "what was continued at an odd place was taken for a refusal of O_DIRECT"
    )
    assert Path(file.path).read_bytes() == data.numpy().tobytes()


@pytest.mark.parametrize("number", ["EINTR", "EAGAIN"])
def test_interruptions_are_tried_again(queue: FileQueue, file: OpenFile, number: str) -> None:
    data = torch.rand(BLOCK)
    queue.inject(parse_faults(f"write:1:{number},write:2:{number},read:1:{number}"))
    queue.write(file, 0, data).wait()
    out = torch.empty_like(data)
    queue.read(file, 0, out).wait()
    assert torch.equal(out, data)


def test_a_file_that_ends_inside_a_read(queue: FileQueue, file: OpenFile) -> None:
    queue.write(file, 0, torch.zeros(BLOCK + 100, dtype=torch.uint8)).wait()
    for offset in (0, BLOCK, 3 * BLOCK):
        with pytest.raises(
            OSError, match=r"the file ends too early \(reading \d+ bytes at \d+\)"
        ) as caught:
            queue.read(file, offset, torch.empty(3 * BLOCK + 17, dtype=torch.uint8)).wait()
        assert caught.value.errno == errno.EIO
        assert caught.value.filename == file.path


def test_a_file_system_that_refuses_o_direct_in_a_transfer(
    queue: FileQueue, tmp_path: Path
) -> None:
    path = str(tmp_path / "file")
    # Plain descriptors in both places: what refuses is injected, so that the file system of the
    # tests does not matter.
    file = OpenFile(path, os.open(path, os.O_RDWR | os.O_CREAT), os.open(path, os.O_RDWR))
    queue.inject(parse_faults("write:1:EINVAL"))
    assert file.direct
    data = torch.rand(3 * BLOCK)
    queue.write(file, 0, data).wait()
    assert not file.direct
    out = torch.empty_like(data)
    queue.read(file, 0, out).wait()
    assert torch.equal(out, data)


def test_a_file_system_that_refuses_o_direct_at_open(
    queue: FileQueue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def refusing(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), path)
        return real(path, flags, mode)

    monkeypatch.setattr(os, "open", refusing)
    file = OpenFile.open(tmp_path / "plain", create=True)
    assert not file.direct
    data, out = torch.rand(BLOCK), torch.empty(BLOCK)
    queue.write(file, 0, data).wait()
    queue.read(file, 0, out).wait()
    assert torch.equal(out, data)


def test_other_errors_at_open_are_raised(tmp_path: Path) -> None:
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


@pytest.mark.parametrize(
    "text", ["write", "write:x:EIO", "read:1:ENOTANERROR", "move:1:EIO", "read:1:slow"]
)
def test_faults_that_mean_nothing_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="write for example"):
        parse_faults(text)
