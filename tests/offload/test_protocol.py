"""Storage of shards and of training state on the device, on the host and in files: stored values
are fetched, in the storage's dtype, as a whole and by sub-group.
"""

import itertools

import pytest
import torch

from hf_zero.offload.nvme import BufferPool, NvmeStorage
from hf_zero.offload.nvme_files import NvmeFiles
from hf_zero.offload.storage import (
    MASTER,
    PAGE,
    SHARD,
    CastStorage,
    DeviceStorage,
    HostStorage,
    StorageFormat,
    paged,
)
from hf_zero.ops.coded_arrays import decoded
from hf_zero.ops.files import ALIGNMENT
from hf_zero.ops.moment_blocks import Blocks, BlocksFormat
from tests.helpers.accelerators import play_streams

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8]
ROWS = ("device", "host", "files")


def test_sizes_in_files_are_those_of_direct_transfers():
    assert paged(1) == PAGE == ALIGNMENT and paged(PAGE) == PAGE


def zeros(numel, dtype):
    return torch.zeros(numel, dtype=dtype)


def filled(storage, dtype):
    storage.add(SHARD, StorageFormat(dtype))
    return storage


def on_host(numel, dtype):
    return filled(HostStorage(numel, [(0, numel)], zeros), dtype)


def in_files(key, numel, dtype, files, pool):
    return filled(NvmeStorage(key, numel, [(0, numel)], files, pool), dtype)


@pytest.fixture(params=ROWS)
def row(request, tmp_path):
    if request.param == "device":
        return lambda numel, dtype: DeviceStorage({SHARD: torch.zeros(numel, dtype=dtype)})
    if request.param == "host":
        return lambda numel, dtype: on_host(numel, dtype)
    files, pool, made = NvmeFiles([tmp_path], 0), BufferPool(2, zeros), itertools.count()
    return lambda numel, dtype: in_files(f"shard {next(made)}", numel, dtype, files, pool)


def test_it_starts_at_zero_and_gives_back_what_was_stored(row):
    """Cast to its dtype; nothing can be stored, too."""
    for dtype in DTYPES:
        storage = row(24, dtype)
        assert storage.dtype(SHARD) == dtype
        assert sum(storage.nbytes().values()) >= 24 * dtype.itemsize
        assert storage.fetch(SHARD)[0:24].tolist() == [0] * 24
        storage.store(SHARD, 8, torch.arange(1.0, 9.0))
        fetched = storage.fetch(SHARD)[0:24]
        assert fetched.tolist() == [0] * 8 + list(range(1, 9)) + [0] * 8
        assert fetched.dtype == dtype and fetched.device == CPU
        out = torch.full((3,), 5).to(dtype)
        storage.fetch_into(SHARD, 9, out)
        assert out.tolist() == [2, 3, 4]
    empty = row(0, torch.float32)
    empty.store(SHARD, 0, torch.empty(0))
    assert empty.fetch(SHARD).numel() == 0 and sum(empty.nbytes().values()) == 0


def test_the_host_writes_in_place_part_by_part(row):
    storage = row(8, torch.float32)
    storage.prefetch(0)  # what was read ahead must not be taken for what is written now
    for start in (0, 3):
        storage.acquire(0, overwrite=True)[SHARD][start : start + 3].fill_(start + 1)
        storage.prefetch(0)  # nor what is announced while it is written
    storage.acquire(0, overwrite=True)[SHARD][6:8].fill_(9)
    storage.release(0)
    assert storage.fetch(SHARD)[0:8].tolist() == [1, 1, 1, 4, 4, 4, 9, 9]


def test_a_copy_to_the_device_is_not_waited_for_and_its_buffer_is_used_again_after_it(
    tmp_path, monkeypatch
):
    played, asked = play_streams(monkeypatch, prompt=False), []
    files, pool = NvmeFiles([tmp_path], 0), BufferPool(2, zeros)
    shards = [in_files(str(i), 5000, torch.float32, files, pool) for i in range(3)]
    for i, shard in enumerate(shards):
        shard.store(SHARD, 0, torch.full((5000,), float(i)))
    pool.flush()
    copy = torch.Tensor.copy_

    def copied(out, source, non_blocking=False):
        asked.append(non_blocking)
        return copy(out, source, non_blocking)

    monkeypatch.setattr(torch.Tensor, "copy_", copied)
    outs = [torch.zeros(5000) for _ in shards]
    for shard, out in zip(shards[:2], outs):
        shard.fetch_into(SHARD, 0, out)
    assert asked == [True, True] and len(played.events) == 2 and played.log == []
    shards[2].prefetch(0)  # no buffer is free, and nobody waits to read ahead
    assert played.log == []
    shards[2].fetch_into(SHARD, 0, outs[2])
    assert (
        played.log == [("host waits", "compute")]
        and played.events[0].over
        and not played.events[1].over
    )
    assert [float(out[0]) for out in outs] == [0.0, 1.0, 2.0]
    # the host writes a buffer only when no copy from it is under way
    shards[0].acquire(0, overwrite=True)
    assert played.events[1].over


def test_what_was_read_ahead_and_not_acquired_is_not_released(tmp_path):
    """Its buffer is free for others, and a later acquisition is not taken for a read ahead."""
    files, pool = NvmeFiles([tmp_path], 0), BufferPool(2, zeros)
    shards = [in_files(key, 4096, torch.float32, files, pool) for key in "abc"]
    for number, shard in enumerate(shards):
        shard.store(SHARD, 0, torch.full((4096,), float(number)))
    pool.flush()
    first, second, third = shards
    first.prefetch(0)
    first.release(0)
    decoded(first.acquire(0, overwrite=True)[SHARD]).fill_(7.0)
    second.acquire(0, overwrite=True)
    with pytest.raises(AssertionError, match="more sub-groups are acquired"):
        third.fetch(SHARD)
    second.release(0)
    first.release(0)
    pool.flush()
    assert torch.equal(first.fetch(SHARD), torch.full((4096,), 7.0))


def test_what_another_thread_acquires_before_a_prefetch_has_the_lock_is_not_read_again(tmp_path):
    class Late:
        """A lock that another thread takes first, to acquire and change a sub-group."""

        taken = False

        def __enter__(self):
            if not self.taken:
                self.taken = True
                decoded(storage.acquire(0, overwrite=True)[SHARD]).fill_(7.0)
            return lock.__enter__()

        def __exit__(self, *raised):
            return lock.__exit__(*raised)

    files, pool = NvmeFiles([tmp_path], 0), BufferPool(3, zeros)
    storage = in_files("a", 4096, torch.float32, files, pool)
    storage.store(SHARD, 0, torch.zeros(4096))
    pool.flush()
    lock, pool.lock = pool.lock, Late()
    storage.prefetch(0)
    assert torch.equal(decoded(storage.acquire(0)[SHARD]), torch.full((4096,), 7.0))
    storage.release(0)


def test_a_write_keeps_masters_that_round_to_it():
    master = torch.tensor([1.0001, -0.0, 2.0, float("nan"), 3.0])
    shard = CastStorage(master, torch.bfloat16)
    values = master.to(torch.bfloat16)
    shard.store(SHARD, 0, values)
    assert torch.equal(master[:3], torch.tensor([1.0001, -0.0, 2.0])) and master[1].signbit()
    shard.store(SHARD, 1, torch.tensor([0.0, 5.0]).bfloat16())
    assert not master[1].signbit() and master[2] == 5.0 and master[4] == 3.0
    out = torch.empty(2, dtype=torch.bfloat16)
    shard.fetch_into(SHARD, 0, out)
    assert torch.equal(out, torch.tensor([1.0001, 0.0]).bfloat16())
    assert set(shard.nbytes().values()) == {0} and shard.dtype(SHARD) == torch.bfloat16


SUB_GROUPS = [(0, 4096), (4096, 8192), (8192, 8201), (8201, 9001)]
NUMEL = 9001


def state_in_files(folder, count=3, **how):
    pool = BufferPool(count, zeros, **how)
    return NvmeStorage(
        "layer|trainable|float32", NUMEL, SUB_GROUPS, NvmeFiles([folder], 0), pool
    ), pool


@pytest.fixture(params=["memory", "files", "files, one buffer", "files, nothing ahead or behind"])
def storage(request, tmp_path):
    if request.param == "memory":
        return HostStorage(NUMEL, SUB_GROUPS, zeros)
    if request.param == "files, one buffer":
        return state_in_files(tmp_path, 1)[0]
    if "nothing" in request.param:
        return state_in_files(tmp_path, prefetches=False, write_behind=False)[0]
    return state_in_files(tmp_path)[0]


def update(storage, order):
    for at, sub_group in enumerate(order):
        held = storage.acquire(sub_group)
        if at + 1 < len(order):
            storage.prefetch(order[at + 1])
        for name, array in held.items():
            if isinstance(array, Blocks):
                array.encode(array.decode() + 1)
            else:
                array += 1 if name == MASTER else 2
        storage.release(sub_group)


def test_sub_groups_are_changed_in_place_and_read_as_a_whole(storage):
    storage.add(MASTER, StorageFormat(torch.float32))
    storage.add("exp_avg", StorageFormat(torch.bfloat16))
    storage.add("sum", StorageFormat(torch.float32))
    storage.store("sum", 0, torch.full((NUMEL,), 0.5))
    storage.store(MASTER, 0, torch.arange(NUMEL).float())
    for order in ([0, 1, 2, 3], [3, 1, 0, 2], [2, 3, 0, 1]):
        update(storage, order)
    assert storage.names() == [MASTER, "exp_avg", "sum"]
    assert torch.equal(storage.fetch(MASTER), torch.arange(NUMEL).float() + 3)
    assert storage.fetch("exp_avg").eq(6).all() and storage.fetch("exp_avg").dtype == torch.bfloat16
    assert storage.fetch("sum").eq(6.5).all()


def test_a_range_over_sub_groups_is_overwritten(storage):
    storage.add(MASTER, StorageFormat(torch.float32))
    update(storage, [0, 1, 2, 3])
    storage.prefetch(1)  # and must not come back with the old values
    storage.store(MASTER, 4090, torch.full((4200,), -1.0))
    want = torch.ones(NUMEL)
    want[4090:8290] = -1
    assert torch.equal(storage.fetch(MASTER), want)
    update(storage, [1, 2])
    want[4096:8201] += 1
    assert torch.equal(storage.fetch(MASTER), want)


def test_moments_in_eight_bits_take_a_quarter_and_a_scale(storage):
    storage.add(MASTER, StorageFormat(torch.float32))
    storage.add("exp_avg_sq", StorageFormat(torch.float32, BlocksFormat(signed=False)))
    values = torch.rand(NUMEL)
    storage.store("exp_avg_sq", 0, values)
    got = storage.fetch("exp_avg_sq")
    assert got.dtype == torch.float32 and (got - values).abs().max() < 0.05
    storage.store("exp_avg_sq", 0, got)
    assert torch.equal(storage.fetch("exp_avg_sq"), got), "what was decoded is encoded as it was"
    held = storage.acquire(2)["exp_avg_sq"]
    assert isinstance(held, Blocks) and torch.equal(held.decode(), got[8192:8201])
    storage.release(2)


def test_a_sub_group_that_cannot_be_written_stays_in_memory(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_ZERO_IO_FAULT", "write:3+:ENOSPC")
    storage, pool = state_in_files(tmp_path)
    storage.add(MASTER, StorageFormat(torch.float32))
    for _ in range(3):
        update(storage, [0, 1, 2, 3])
    assert storage.fetch(MASTER).eq(3).all()
    assert isinstance(pool.write_error, OSError) and "No space left" in str(pool.write_error)
    storage.store(MASTER, 8190, torch.zeros(4))
    storage.acquire(3, overwrite=True)[MASTER].fill_(7.0)
    storage.release(3)
    assert storage.fetch(MASTER)[8188:8203].tolist() == [3, 3, 0, 0, 0, 0, *[3] * 7, 7, 7]


def test_a_read_that_fails_raises_with_the_path(tmp_path, monkeypatch):
    """It can be repeated: its buffer is free again, and there are no more of them than three."""
    monkeypatch.setenv("HF_ZERO_IO_FAULT", "read:1:EIO,read:2:EIO,read:3:EIO")
    storage, _ = state_in_files(tmp_path)
    storage.add(MASTER, StorageFormat(torch.float32))
    for _ in range(3):
        with pytest.raises(OSError, match="Input/output error") as raised:
            storage.acquire(1)
        assert str(tmp_path) in str(raised.value.filename)
    update(storage, [1])
    assert storage.fetch(MASTER)[4096:8192].eq(1).all()
