"""Regions on disk: what they hold, in which order, on how many paths, and what is there when
there is no room.
"""

from __future__ import annotations

import errno
import gc
import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hf_zero.errors import ConfigError, DiskSpaceError, OffloadError
from hf_zero.ops.files import FileQueue, Priority, parse_faults
from hf_zero.storage import tier as tier_module
from hf_zero.storage.tier import FileTier
from tests.helpers.file_backends import BACKENDS

BLOCK = 8192


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[FileTier]:
    tier = FileTier([tmp_path], 3, block_size=BLOCK, queue_depth=1, threads=1)
    yield tier
    tier.close()


def bytes_of(nbytes: int) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8)


def content(region: tier_module.Region) -> torch.Tensor:
    out = torch.full((region.nbytes,), 255, dtype=torch.uint8)
    region.read(0, out).wait()
    return out


def inject(tier: FileTier, faults: str) -> None:
    tier._queue.inject(parse_faults(faults))


@pytest.mark.parametrize("paths", [1, 2, 3])
def test_regions_hold_what_was_written_and_begin_as_zeros(
    backend: str, paths: int, tmp_path: Path
) -> None:
    folders = [tmp_path / str(index) for index in range(paths)]
    for folder in folders:
        folder.mkdir()
    tier = FileTier(folders, block_size=BLOCK, queue_depth=4, backend=backend)
    sizes = (0, 1, 511, 4095, 4096, 4097, BLOCK, 7 * BLOCK + 13, 100_000)
    regions = [tier.allocate(str(size), size) for size in sizes]
    for region in regions:
        assert not content(region).any()
    data = [bytes_of(size) for size in sizes]
    for region, values in zip(regions, data):
        region.write(0, values)
    tier.flush()
    for region, values in zip(regions, data):
        assert torch.equal(content(region), values)
    for start, stop in (
        (0, 1),
        (5, 4097),
        (BLOCK - 1, BLOCK + 1),
        (4096, 3 * BLOCK),
        (99_000, 100_000),
    ):
        data[-1][start:stop] = bytes_of(stop - start)
        regions[-1].write(start, data[-1][start:stop].clone())
        out = torch.empty(stop - start, dtype=torch.uint8)
        regions[-1].read(start, out).wait()
        assert torch.equal(out, data[-1][start:stop])
    for region, values in zip(regions, data):
        assert torch.equal(content(region), values), "a neighbour was written"
    tier.close()


def test_blocks_go_round_the_paths(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    tier = FileTier(folders, block_size=BLOCK)
    region = tier.allocate("r", 5 * BLOCK)
    data = bytes_of(5 * BLOCK)
    region.write(0, data).wait()
    blocks = data.view(5, BLOCK)
    for file, expected in zip(tier._files, (blocks[0::2], blocks[1::2])):
        kept = os.pread(file.descriptor, 1 << 20, 0)
        assert kept == expected.contiguous().numpy().tobytes()
    assert tier.nbytes == 5 * BLOCK
    tier.close()


def test_room_is_taken_when_a_region_is_allocated(tier: FileTier) -> None:
    tier.allocate("a", 1_000_001)
    state = os.fstat(tier._files[0].descriptor)
    assert state.st_size == tier.nbytes == 1_003_520
    assert state.st_blocks * 512 >= state.st_size
    tier.reserve(1 << 20)
    tier.allocate("b", 1 << 20)
    assert tier.nbytes == 1_003_520 + (1 << 20)


def test_a_read_asked_for_after_a_write_sees_it(tier: FileTier) -> None:
    region = tier.allocate("r", 10 * BLOCK)
    first, second = bytes_of(10 * BLOCK), bytes_of(3 * BLOCK)
    inject(tier, "write:1:slow=100")
    region.write(0, first, Priority.BEHIND)
    region.write(BLOCK + 5, second, Priority.AHEAD)
    expected = first.clone()
    expected[BLOCK + 5 : 4 * BLOCK + 5] = second
    out = torch.empty_like(first)
    region.read(0, out, Priority.NEEDED).wait()
    assert torch.equal(out, expected)


def test_a_write_asked_for_after_a_read_does_not_reach_it(tier: FileTier) -> None:
    region = tier.allocate("r", 4 * BLOCK)
    before = bytes_of(4 * BLOCK)
    region.write(0, before).wait()
    inject(tier, "read:1:slow=100")
    out = torch.empty_like(before)
    reading = region.read(0, out, Priority.BEHIND)
    region.write(0, bytes_of(4 * BLOCK), Priority.NEEDED).wait()
    reading.wait()
    assert torch.equal(out, before)


def test_a_read_elsewhere_overtakes_writes(tier: FileTier) -> None:
    region = tier.allocate("r", 40 * BLOCK)
    inject(tier, "write:1+:slow=10")
    writing = region.write(0, bytes_of(30 * BLOCK))
    region.read(30 * BLOCK, torch.empty(BLOCK, dtype=torch.uint8), Priority.NEEDED).wait()
    assert not writing.done()


def test_what_a_failed_write_should_have_replaced_is_not_read(tier: FileTier) -> None:
    region, other = tier.allocate("master of unit 4", 4 * BLOCK), tier.allocate("other", BLOCK)
    kept = bytes_of(BLOCK)
    other.write(0, kept).wait()
    inject(tier, "write:2:ENOSPC")
    region.write(0, bytes_of(4 * BLOCK))
    with pytest.raises(
        OSError, match="for 'master of unit 4' of rank 3; its values are still in memory"
    ) as caught:
        tier.flush()
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.filename.startswith(tier.paths[0])
    with pytest.raises(OSError, match="No space left"):
        content(region)
    assert torch.equal(content(other), kept)
    again = bytes_of(4 * BLOCK)
    region.write(0, again)
    assert torch.equal(content(region), again)
    tier.flush()


def test_a_failed_read_says_that_nothing_changed_and_can_be_repeated(tier: FileTier) -> None:
    region = tier.allocate("r", BLOCK)
    values = bytes_of(BLOCK)
    region.write(0, values)
    inject(tier, "read:1:EIO")
    with pytest.raises(OSError, match="what it holds was not changed"):
        content(region)
    assert torch.equal(content(region), values)


def test_flush_waits_for_writes_that_nobody_waits_for(tier: FileTier) -> None:
    region = tier.allocate("r", 6 * BLOCK)
    inject(tier, "write:1+:slow=10")
    tickets = [region.write(index * BLOCK, bytes_of(BLOCK)) for index in range(6)]
    tier.flush()
    assert all(ticket.done() for ticket in tickets)


def test_a_removed_folder_and_a_lost_permission_reach_nobody(backend: str, tmp_path: Path) -> None:
    folder = tmp_path / "nvme"
    folder.mkdir()
    tier = FileTier([folder], block_size=BLOCK, backend=backend)
    region = tier.allocate("r", 3 * BLOCK + 5)
    values = bytes_of(3 * BLOCK + 5)
    region.write(0, values)
    folder.chmod(0)
    assert torch.equal(content(region), values)
    folder.chmod(0o700)
    shutil.rmtree(folder)
    values = bytes_of(3 * BLOCK + 5)
    region.write(0, values).wait()
    later = tier.allocate("later", BLOCK)
    later.write(0, values[:BLOCK])
    tier.flush()
    assert torch.equal(content(region), values) and torch.equal(content(later), values[:BLOCK])
    tier.close()


def test_a_full_disk_is_an_error_at_once_with_path_need_and_free_space(
    tier: FileTier, tmp_path: Path
) -> None:
    with pytest.raises(
        DiskSpaceError,
        match=r"1152921504\.607 GB more are needed for 'huge' of rank 3, and \d+\.\d+ GB are free",
    ) as caught:
        tier.allocate("huge", 1 << 60)
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.filename == str(tmp_path)
    with pytest.raises(DiskSpaceError, match="offloaded state of rank 3"):
        tier.reserve(1 << 60)
    assert tier.nbytes == 0
    tier.allocate("huge", 100)


def test_a_limit_of_the_system_on_file_sizes(tier: FileTier) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        tier.allocate("small", 1 << 19)
        with pytest.raises(DiskSpaceError, match="RLIMIT_FSIZE") as caught:
            tier.allocate("large", 1 << 21)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.errno == errno.EFBIG
    assert os.fstat(tier._files[0].descriptor).st_size == tier.nbytes == 1 << 19
    tier.allocate("large", 1 << 21)


@pytest.mark.parametrize(
    ("number", "raised"),
    [(errno.ENOSPC, DiskSpaceError), (errno.EDQUOT, DiskSpaceError), (errno.EIO, OSError)],
)
def test_room_that_is_refused_in_the_act(
    tier: FileTier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, raised: type
) -> None:
    def refuse(descriptor: int, offset: int, length: int) -> None:
        os.ftruncate(descriptor, offset + length // 2)
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(raised) as caught:
        tier.allocate("r", 1 << 20)
    assert type(caught.value) is raised
    assert (caught.value.errno, caught.value.filename) == (number, str(tmp_path))
    assert os.fstat(tier._files[0].descriptor).st_size == 0


def test_paths_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "missing", tmp_path / "file"):
        with pytest.raises(ConfigError, match=f"nvme_path '{path}' is not a directory"):
            FileTier([path])
    with pytest.raises(ConfigError, match="needs nvme_path"):
        FileTier([])
    cases = [
        (errno.EACCES, ConfigError, "cannot be written"),
        (errno.EROFS, ConfigError, "cannot be written"),
    ]
    cases += [
        (errno.ENOSPC, DiskSpaceError, "needed for a file"),
        (errno.EIO, OSError, "Input/output"),
    ]
    for number, raised, text in cases:

        def refuse(prefix: str, dir: str, number: int = number) -> tuple[int, str]:
            raise OSError(number, os.strerror(number), dir)

        monkeypatch.setattr(tier_module.tempfile, "mkstemp", refuse)
        with pytest.raises(raised, match=text) as caught:
            FileTier([tmp_path])
        assert str(tmp_path) in str(caught.value)


def test_a_file_system_without_o_direct_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, heard: list[str]
) -> None:
    monkeypatch.setattr(tier_module, "open_direct", lambda path: -1)
    tier = FileTier([tmp_path], block_size=BLOCK)
    assert not tier.direct
    region, values = tier.allocate("r", 2 * BLOCK + 1), bytes_of(2 * BLOCK + 1)
    region.write(0, values)
    tier.flush()
    tier.flush()
    assert torch.equal(content(region), values)
    assert [message for message in heard if "O_DIRECT" in message] == [
        f"the file system of nvme_path {tmp_path} takes no O_DIRECT: transfers go "
        "through the page cache"
    ]
    tier.close()


def test_asking_for_what_is_not_there(tier: FileTier) -> None:
    region = tier.allocate("r", 100)
    for offset, nbytes in ((0, 101), (-1, 1), (100, 1)):
        with pytest.raises(OffloadError, match="region 'r', which has 100"):
            region.read(offset, torch.empty(nbytes, dtype=torch.uint8))
    with pytest.raises(OffloadError, match="allocate each once"):
        tier.allocate("r", 1)
    tier.close()
    for call in (
        lambda: tier.allocate("s", 1),
        lambda: region.read(0, torch.empty(1)),
        lambda: region.write(0, torch.empty(1)),
    ):
        with pytest.raises(OffloadError, match="closed"):
            call()
    tier.close()


def descriptors() -> list[str]:
    links = []
    for name in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{name}"))
        except FileNotFoundError:
            continue  # the listing's own
    return links


@pytest.mark.parametrize("how", ["close", "forget"])
def test_the_disk_is_given_back(backend: str, tmp_path: Path, how: str) -> None:
    tier = FileTier([tmp_path], block_size=BLOCK, backend=backend)
    region = tier.allocate("r", 1 << 20)
    ticket = region.write(0, bytes_of(1 << 20))
    assert sum(str(tmp_path) in link for link in descriptors()) >= 1
    if how == "close":
        tier.close()
    del tier, region, ticket
    gc.collect()
    assert not any(str(tmp_path) in link for link in descriptors())
    assert os.listdir(tmp_path) == []


def test_what_is_queued_is_dropped_at_the_end(tmp_path: Path) -> None:
    tier = FileTier([tmp_path], block_size=BLOCK, queue_depth=1)
    region = tier.allocate("r", 100 * BLOCK)
    inject(tier, "write:1+:slow=50")
    ticket = region.write(0, bytes_of(100 * BLOCK))
    tier.close()
    assert ticket.done() and ticket.failed()


def test_the_queue_is_shared_by_regions_of_all_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[FileQueue] = []

    class Counted(FileQueue):
        def __init__(self, *arguments: object) -> None:
            super().__init__(*arguments)  # type: ignore[arg-type]
            made.append(self)

    monkeypatch.setattr(tier_module, "FileQueue", Counted)
    tier = FileTier([tmp_path, tmp_path], block_size=BLOCK, queue_depth=7)
    tier.allocate("a", 1)
    tier.allocate("b", 1)
    assert [(queue.block_size, queue.queue_depth) for queue in made] == [(BLOCK, 7)]
    tier.close()
