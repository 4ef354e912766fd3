"""Regions on disk: what they hold, in which order, on how many paths, what is there when there is
no room, and what processes that end or are killed leave.
"""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import resource
import signal
import subprocess
import sys

import pytest
import torch

from hf_zero.errors import ConfigError, DiskSpaceError, OffloadError
from hf_zero.offload import nvme_files
from hf_zero.offload.nvme_files import PREFIX, NvmeFiles, remove_leftovers
from hf_zero.ops.files import ALIGNMENT, Priority, parse_faults
from tests.helpers.file_backends import BACKENDS

BLOCK = 8192


@pytest.fixture(params=BACKENDS)
def backend(request, monkeypatch):
    monkeypatch.setenv("HF_ZERO_IO", request.param)


@pytest.fixture
def files(tmp_path):
    files = NvmeFiles([tmp_path], 3, block_size=BLOCK, queue_depth=1, threads=1)
    yield files
    files.close()


def bytes_of(nbytes):
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8)


def content(extent):
    out = torch.full((extent.nbytes,), 255, dtype=torch.uint8)
    extent.read(0, out).wait()
    return out


def size(files):
    """Bytes of the file on the first path."""
    return os.fstat(files._files[0].descriptor).st_size


def inject(files, faults):
    files._queue.inject(parse_faults(faults))


def test_extents_hold_what_was_written_and_begin_as_zeros(backend, tmp_path):
    folders = [tmp_path / str(index) for index in range(3)]
    for folder in folders:
        folder.mkdir()
    files = NvmeFiles(folders, block_size=BLOCK, queue_depth=4)
    sizes = (0, 1, 511, 4095, 4096, 4097, BLOCK, 7 * BLOCK + 13, 100_000)
    extents = [files.allocate(str(size), size) for size in sizes]
    for extent in extents:
        assert not content(extent).any()
    data = [bytes_of(size) for size in sizes]
    for ticket in [extent.write(0, values) for extent, values in zip(extents, data)]:
        ticket.wait()
    for extent, values in zip(extents, data):
        assert torch.equal(content(extent), values)
    for start, stop in (
        (0, 1),
        (5, 4097),
        (BLOCK - 1, BLOCK + 1),
        (4096, 3 * BLOCK),
        (99_000, 100_000),
    ):
        data[-1][start:stop] = bytes_of(stop - start)
        extents[-1].write(start, data[-1][start:stop].clone())
        out = torch.empty(stop - start, dtype=torch.uint8)
        extents[-1].read(start, out).wait()
        assert torch.equal(out, data[-1][start:stop])
    for extent, values in zip(extents, data):
        assert torch.equal(content(extent), values), "a neighbor was written"
    files.close()


def test_a_read_asked_for_after_a_write_sees_it(files):
    extent = files.allocate("r", 10 * BLOCK)
    first, second = bytes_of(10 * BLOCK), bytes_of(3 * BLOCK)
    inject(files, "write:1:slow=100")
    extent.write(0, first, Priority.BEHIND)
    extent.write(BLOCK + 5, second, Priority.AHEAD)
    expected = first.clone()
    expected[BLOCK + 5 : 4 * BLOCK + 5] = second
    out = torch.empty_like(first)
    extent.read(0, out, Priority.NEEDED).wait()
    assert torch.equal(out, expected)
    inject(files, "read:1:slow=100")
    reading = extent.read(0, out, Priority.BEHIND)
    extent.write(0, bytes_of(10 * BLOCK), Priority.NEEDED).wait()
    reading.wait()
    assert torch.equal(out, expected), "nor does one see a write that was asked for after it"


def test_what_a_failed_write_should_have_replaced_is_not_read(files):
    extent, other = files.allocate("master of unit 4", 4 * BLOCK), files.allocate("other", BLOCK)
    kept = bytes_of(BLOCK)
    other.write(0, kept).wait()
    inject(files, "write:2:ENOSPC")
    writing = extent.write(0, bytes_of(4 * BLOCK))
    with pytest.raises(
        OSError, match="for 'master of unit 4' of rank 3; its values are still in memory"
    ) as caught:
        writing.wait()
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.filename.startswith(files.paths[0])
    with pytest.raises(OSError, match="No space left"):
        content(extent)
    assert torch.equal(content(other), kept)
    again = bytes_of(4 * BLOCK)
    writing = extent.write(0, again)
    assert torch.equal(content(extent), again)
    writing.wait()


def test_a_full_disk_is_an_error_at_once_with_path_need_and_free_space(files, tmp_path):
    with pytest.raises(
        DiskSpaceError, match=r"1152921504\.607 GB more are needed for 'huge' of rank 3"
    ) as caught:
        files.allocate("huge", 1 << 60)
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.filename == str(tmp_path)
    with pytest.raises(DiskSpaceError, match="offloaded state of rank 3"):
        files.reserve(1 << 60)
    assert size(files) == 0
    files.allocate("huge", 100)


def test_a_limit_of_the_system_on_file_sizes(files):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        files.allocate("small", 1 << 19)
        with pytest.raises(DiskSpaceError, match="RLIMIT_FSIZE") as caught:
            files.allocate("large", 1 << 21)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.errno == errno.EFBIG
    assert size(files) == 1 << 19
    files.allocate("large", 1 << 21)


def test_room_that_is_refused_in_the_act(files, tmp_path, monkeypatch):
    kinds = {errno.ENOSPC: DiskSpaceError, errno.EDQUOT: DiskSpaceError, errno.EIO: OSError}
    for number, raised in kinds.items():

        def refuse(descriptor, offset, length, number=number):
            os.ftruncate(descriptor, offset + length // 2)
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "posix_fallocate", refuse)
        with pytest.raises(raised) as caught:
            files.allocate("r", 1 << 20)
        assert type(caught.value) is raised
        assert (caught.value.errno, caught.value.filename) == (number, str(tmp_path))
        assert size(files) == 0


def test_paths_that_cannot_be_used(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    for path in (tmp_path / "missing", tmp_path / "file"):
        with pytest.raises(ConfigError, match=f"nvme_path '{path}' is not a directory"):
            NvmeFiles([path])
    with pytest.raises(ConfigError, match="needs nvme_path"):
        NvmeFiles([])
    cases = [
        (errno.EACCES, ConfigError, "cannot be written"),
        (errno.EROFS, ConfigError, "cannot be written"),
        (errno.ENOSPC, DiskSpaceError, "needed for a file"),
        (errno.EIO, OSError, "Input/output"),
    ]
    for number, raised, text in cases:

        def refuse(prefix, dir, number=number):
            raise OSError(number, os.strerror(number), dir)

        monkeypatch.setattr(nvme_files.tempfile, "mkstemp", refuse)
        with pytest.raises(raised, match=text) as caught:
            NvmeFiles([tmp_path])
        assert str(tmp_path) in str(caught.value)


def test_a_file_system_without_o_direct_is_said_once(tmp_path, monkeypatch, heard):
    monkeypatch.setattr(nvme_files, "open_direct", lambda path: -1)
    files = NvmeFiles([tmp_path], block_size=BLOCK)
    extent, values = files.allocate("r", 2 * BLOCK + 1), bytes_of(2 * BLOCK + 1)
    extent.write(0, values).wait()
    files.warn_of_buffering()
    assert torch.equal(content(extent), values)
    assert [message for message in heard if "O_DIRECT" in message] == [
        f"the file system of nvme_path {tmp_path} takes no O_DIRECT: transfers go "
        "through the page cache"
    ]
    files.close()


def test_asking_for_what_is_not_there(files):
    extent = files.allocate("r", 100)
    for offset, nbytes in ((0, 101), (-1, 1), (100, 1)):
        with pytest.raises(OffloadError, match="extent 'r', which has 100"):
            extent.read(offset, torch.empty(nbytes, dtype=torch.uint8))
    with pytest.raises(OffloadError, match="allocate each once"):
        files.allocate("r", 1)
    files.close()
    for call in (
        lambda: files.allocate("s", 1),
        lambda: extent.read(0, torch.empty(1)),
        lambda: extent.write(0, torch.empty(1)),
    ):
        with pytest.raises(OffloadError, match="closed"):
            call()
    files.close()


def descriptors():
    links = []
    for name in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{name}"))
        except FileNotFoundError:
            continue  # the listing's own
    return links


@pytest.mark.parametrize("how", ["close", "forget"])
def test_the_disk_is_given_back(backend, tmp_path, how):
    files = NvmeFiles([tmp_path], block_size=BLOCK)
    extent = files.allocate("r", 1 << 20)
    ticket = extent.write(0, bytes_of(1 << 20))
    assert sum(str(tmp_path) in link for link in descriptors()) >= 1
    if how == "close":
        files.close()
    del files, extent, ticket
    gc.collect()
    assert not any(str(tmp_path) in link for link in descriptors())
    assert os.listdir(tmp_path) == []


LIVING = """
import os, signal, sys, torch
from hf_zero.offload import nvme_files
files = nvme_files.NvmeFiles([sys.argv[1]], 0, block_size=8192)
extent = files.allocate("r", 1 << 22)
values = torch.arange(1 << 20, dtype=torch.int32)
extent.write(0, values).wait()
print("ready", flush=True)
sys.stdin.readline()
out = torch.zeros_like(values)
extent.read(0, out).wait()
print("same" if torch.equal(out, values) else "other", flush=True)
sys.stdin.readline()
nvme_files.open_direct = lambda path: os.kill(os.getpid(), signal.SIGKILL)
nvme_files.NvmeFiles([sys.argv[1]])
"""


def test_processes_side_by_side_and_one_that_is_killed(tmp_path, heard_in_full):
    """The next run removes the file that a killed one was about to make."""
    process = subprocess.Popen(
        [sys.executable, "-c", LIVING, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    for _ in range(3):
        files = NvmeFiles([tmp_path], 0, block_size=8192)
        files.allocate("r", 1 << 22).write(0, torch.zeros(1 << 20)).wait()
        files.close()
    process.stdin.write("go\n")
    process.stdin.flush()
    assert process.stdout.readline() == "same\n"
    assert os.listdir(tmp_path) == []
    process.communicate("end\n", timeout=300)
    assert process.returncode == -signal.SIGKILL
    (left,) = os.listdir(tmp_path)
    NvmeFiles([tmp_path]).close()
    assert os.listdir(tmp_path) == []
    assert heard_in_full == [f"removed {tmp_path / left}, which a run that was killed had left"]


def test_what_is_not_a_leftover_stays(tmp_path):
    leftover, locked = tmp_path / f"{PREFIX}a", tmp_path / f"{PREFIX}b"
    full, folder, link, foreign = (
        tmp_path / f"{PREFIX}c",
        tmp_path / f"{PREFIX}d",
        tmp_path / f"{PREFIX}e",
        tmp_path / "model.bin",
    )
    for path in (leftover, locked, full, foreign):
        path.touch()
    full.write_text("somebody's")
    folder.mkdir()
    link.symlink_to(foreign)
    holder = os.open(locked, os.O_RDWR)
    fcntl.flock(holder, fcntl.LOCK_EX)
    assert remove_leftovers(str(tmp_path)) == [str(leftover)]
    assert {path.name for path in tmp_path.iterdir()} == {
        path.name for path in (locked, full, folder, link, foreign)
    }
    os.close(holder)
    assert remove_leftovers(str(tmp_path)) == [str(locked)]


def test_a_file_that_another_rank_took_for_a_leftover_is_made_again(tmp_path, monkeypatch):
    real, taken = fcntl.flock, []

    def late(descriptor, how):
        if not taken:
            taken.extend(os.listdir(tmp_path))
            assert remove_leftovers(str(tmp_path)) == [str(tmp_path / taken[0])]
        real(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", late)
    files = NvmeFiles([tmp_path])
    assert len(taken) == 1
    extent = files.allocate("r", 8)
    extent.write(0, torch.ones(8, dtype=torch.uint8)).wait()
    assert size(files) == ALIGNMENT
    assert os.listdir(tmp_path) == []
    files.close()
