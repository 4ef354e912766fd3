"""Tensors to and from files, on every backend this machine has: sizes, addresses, order,
lifetimes.
"""

from __future__ import annotations

import errno
import gc
import os
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

from hf_zero.errors import ConfigError, OffloadError
from hf_zero.ops import files
from hf_zero.ops.files import ALIGNMENT, FileQueue, OpenFile, Priority, parse_faults
from tests.helpers import launched
from tests.helpers.commands import completed
from tests.helpers.file_backends import BACKENDS, NATIVE

BLOCK = 1 << 16
SIZES = (0, 1, 511, 4095, 4096, 4097, BLOCK - 1, BLOCK + 4096, 3 * BLOCK + 5)


def tensor_at(nbytes: int, misaligned: int) -> torch.Tensor:
    """Random bytes that begin ``misaligned`` bytes after a multiple of 4096."""
    whole = torch.randint(0, 256, (nbytes + 2 * ALIGNMENT,), dtype=torch.uint8)
    start = -whole.data_ptr() % ALIGNMENT + misaligned
    return whole[start : start + nbytes]


@pytest.fixture(params=BACKENDS)
def queue(request: pytest.FixtureRequest) -> Iterator[FileQueue]:
    queue = FileQueue(BLOCK, 4, 3, request.param)
    yield queue
    queue.close()


@pytest.fixture(params=BACKENDS)
def one_at_a_time(request: pytest.FixtureRequest) -> Iterator[FileQueue]:
    queue = FileQueue(BLOCK, 1, 1, request.param)
    yield queue
    queue.close()


def open_file(folder: Path, direct: bool = True) -> OpenFile:
    """A file, past the page cache where its file system allows, or as on one without O_DIRECT."""
    if direct:
        return OpenFile.open(folder / "file", create=True)
    return OpenFile(str(folder / "file"), os.open(folder / "file", os.O_RDWR | os.O_CREAT))


def test_what_is_written_is_read(queue: FileQueue, tmp_path: Path) -> None:
    """Of any size and place in memory and in the file, past the page cache and through it."""
    for direct, misaligned in ((True, 0), (False, 1), (True, 64)):
        file = open_file(tmp_path, direct)
        for offset in (0, 1, ALIGNMENT, BLOCK + 513):
            for nbytes in SIZES:
                data, out = tensor_at(nbytes, misaligned), tensor_at(nbytes, 64 - misaligned)
                queue.write(file, offset, data).wait()
                queue.read(file, offset, out).wait()
                assert torch.equal(out, data), (offset, nbytes)
                there = (tmp_path / "file").read_bytes()[offset : offset + nbytes]
                assert there == data.numpy().tobytes()
    for name in ("float64", "float32", "bfloat16", "float16", "int64", "int8", "bool"):
        data = torch.randint(0, 2, (3, 5, 7)).to(getattr(torch, name))
        out = torch.empty_like(data)
        queue.write(file, 24, data).wait()
        queue.read(file, 24, out).wait()
        assert torch.equal(out, data), name


@pytest.mark.parametrize("backend", BACKENDS)
def test_ten_megabytes_on_a_disk_and_in_memory(backend: str, tmp_path: Path) -> None:
    for folder in (tmp_path, Path("/dev/shm")):
        queue = FileQueue(backend=backend)
        path = folder / f"hf-zero-test-{os.getpid()}-{backend}"
        file = OpenFile.open(path, create=True)
        try:
            data, out = tensor_at((10 << 20) + 3, 0), tensor_at((10 << 20) + 3, 0)
            queue.write(file, 0, data).wait()
            queue.read(file, 0, out).wait()
            assert torch.equal(out, data) and queue.kind == backend
        finally:
            queue.close()
            path.unlink()


def test_writing_leaves_the_neighbours_of_a_block_alone(queue: FileQueue, tmp_path: Path) -> None:
    file = open_file(tmp_path)
    parts = [tensor_at(1500, 0) for _ in range(200)]
    for ticket in [queue.write(file, 1500 * index, part) for index, part in enumerate(parts)]:
        ticket.wait()
    assert (tmp_path / "file").read_bytes() == torch.cat(parts).numpy().tobytes()


def test_many_in_flight_from_several_threads(queue: FileQueue, tmp_path: Path) -> None:
    file, wrong = open_file(tmp_path), list[int]()
    parts = [torch.full((20_000 + index,), index % 256, dtype=torch.uint8) for index in range(240)]

    def work(start: int) -> None:
        mine = {index: torch.empty_like(parts[index]) for index in range(start, 240, 4)}
        for move, tensors in ((queue.write, parts), (queue.read, mine)):
            tickets = [
                move(file, index * 24_576, tensors[index], Priority(index % 3)) for index in mine
            ]
            for ticket in reversed(tickets):
                ticket.wait()
        wrong.extend(index for index, out in mine.items() if not torch.equal(out, parts[index]))

    threads = [threading.Thread(target=work, args=(start,)) for start in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def fill(value: int, blocks: int = 1) -> torch.Tensor:
    return torch.full((blocks * BLOCK,), value, dtype=torch.uint8)


LONG = 200  # blocks, each of which takes 50 ms while writes are SLOW: nobody comes too late
SLOW, AT_ONCE = parse_faults("write:1+:slow=50"), parse_faults("")
LAST = slice((LONG - 1) * BLOCK, LONG * BLOCK)


def last_of(folder: Path) -> bytes:
    return (folder / "file").read_bytes()[LAST]


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_urgent_goes_first(backend: str, tmp_path: Path) -> None:
    """Both write the last block, so what is there in the end tells which of them came last; equally
    urgent ones keep their order.
    """
    behind, ahead, needed = Priority.BEHIND, Priority.AHEAD, Priority.NEEDED
    for first, second in ((behind, ahead), (behind, needed), (ahead, needed)):
        file, queue = open_file(tmp_path), FileQueue(BLOCK, 1, 1, backend)
        queue.inject(SLOW)
        tickets = [
            queue.write(file, 0, fill(1, LONG), first),
            queue.write(file, LAST.start, fill(2), second),
        ]
        queue.inject(AT_ONCE)
        queue.close()  # a wait would make urgent
        assert all(ticket.done() for ticket in tickets)
        assert last_of(tmp_path) == bytes([1]) * BLOCK, (first, second)
    queue = FileQueue(BLOCK, 1, 1, backend)
    for value in range(20):
        queue.write(file, 0, fill(value))
    queue.close()
    assert (tmp_path / "file").read_bytes()[:BLOCK] == bytes([19]) * BLOCK


@pytest.mark.parametrize("how", ["wait", "promote"])
def test_what_somebody_waits_for_becomes_urgent(
    one_at_a_time: FileQueue, tmp_path: Path, how: str
) -> None:
    file = open_file(tmp_path)
    one_at_a_time.inject(SLOW)
    one_at_a_time.write(file, 0, fill(1, LONG), Priority.AHEAD)
    late = one_at_a_time.write(file, LAST.start, fill(2), Priority.BEHIND)
    if how == "promote":
        late.promote(Priority.NEEDED)
    else:
        late.wait()
    one_at_a_time.inject(AT_ONCE)
    one_at_a_time.close()
    assert last_of(tmp_path) == bytes([1]) * BLOCK


def test_an_urgent_read_overtakes_the_rest_of_a_long_write(
    one_at_a_time: FileQueue, tmp_path: Path
) -> None:
    file = open_file(tmp_path)
    one_at_a_time.write(file, 0, fill(0, LONG)).wait()
    one_at_a_time.inject(SLOW)
    writing = one_at_a_time.write(file, 0, fill(1, LONG), Priority.BEHIND)
    out = fill(7)
    one_at_a_time.read(file, LAST.start, out, Priority.NEEDED).wait()
    one_at_a_time.inject(AT_ONCE)
    assert int(out.max()) == 0, "the read came after the last block of the write"
    writing.wait()


def test_one_after_the_other_whatever_the_priorities(
    one_at_a_time: FileQueue, tmp_path: Path
) -> None:
    file = open_file(tmp_path)
    one_at_a_time.inject(parse_faults("write:1:slow=100"))
    first = one_at_a_time.write(file, 0, fill(1), Priority.BEHIND)
    second = one_at_a_time.transfer(
        True, [files.TransferPart(file, 0, 0, BLOCK)], fill(2), Priority.NEEDED, [first]
    )
    second.wait()
    assert first.done()
    assert (tmp_path / "file").read_bytes() == bytes([2]) * BLOCK


def test_memory_and_file_live_as_long_as_their_transfer(
    one_at_a_time: FileQueue, tmp_path: Path
) -> None:
    file = open_file(tmp_path)
    descriptor, data = file.descriptor, fill(5, LONG)
    seen = weakref.ref(data)
    one_at_a_time.inject(SLOW)
    # else the next, which is waited for, may overtake it
    one_at_a_time.write(file, 0, data, Priority.NEEDED)
    del data
    gc.collect()
    assert seen() is not None
    one_at_a_time.inject(AT_ONCE)
    one_at_a_time.write(file, LAST.stop, fill(6)).wait()
    one_at_a_time.write(file, LAST.stop, fill(6)).wait()
    assert seen() is None and last_of(tmp_path) == bytes([5]) * BLOCK
    one_at_a_time.inject(SLOW)
    ticket = one_at_a_time.write(file, 0, fill(1, LONG))
    del file
    os.fstat(descriptor)
    one_at_a_time.inject(AT_ONCE)
    one_at_a_time.close()
    gc.collect()
    assert ticket.done()
    with pytest.raises(OSError):
        os.fstat(descriptor)


def test_closing_finishes_what_was_asked_for_and_refuses_more(
    queue: FileQueue, tmp_path: Path
) -> None:
    file = open_file(tmp_path)
    tickets = [queue.write(file, BLOCK * index, fill(index)) for index in range(20)]
    queue.close()
    assert all(ticket.done() and not ticket.failed() for ticket in tickets)
    with pytest.raises(OffloadError, match="closed"):
        queue.read(file, 0, fill(0))
    queue.close()


def test_cancelling_drops_what_has_not_begun(one_at_a_time: FileQueue, tmp_path: Path) -> None:
    file = open_file(tmp_path)
    one_at_a_time.inject(SLOW)
    tickets = [
        one_at_a_time.write(file, BLOCK * index, fill(1), Priority.NEEDED) for index in range(LONG)
    ]
    one_at_a_time.close(cancel=True)
    with pytest.raises(OSError) as caught:
        tickets[-1].wait()
    assert caught.value.errno == errno.ECANCELED
    assert all(ticket.done() for ticket in tickets)


def test_the_environment_chooses_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    for backend in BACKENDS:
        monkeypatch.setenv("HF_ZERO_IO", backend)
        with closing(FileQueue()) as queue:
            assert queue.kind == backend
    monkeypatch.setenv("HF_ZERO_IO", "aio")
    with pytest.raises(ConfigError, match="aio"):
        FileQueue()
    monkeypatch.delenv("HF_ZERO_IO")
    monkeypatch.setattr(files, "_native", lambda: None)
    with closing(FileQueue()) as queue:
        assert queue.kind == "python", "without the native core"
    with pytest.raises(ConfigError, match="native core"):
        FileQueue(backend="threads")


def test_what_a_queue_cannot_take_is_refused(queue: FileQueue, tmp_path: Path) -> None:
    file = open_file(tmp_path)
    for tensor in (torch.zeros(4, 4).t(), torch.zeros(4, device="meta")):
        with pytest.raises(OffloadError, match="contiguous CPU memory"):
            queue.write(file, 0, tensor)
    queue.write(file, 0, fill(0)).wait()
    with pytest.raises(OffloadError, match="another kind"):
        file.handle(type("Other", (), {}))
    for sizes in ((4095,), (0,), (1 << 31,), (BLOCK, 0), (BLOCK, 5000), (BLOCK, 4, 0)):
        with pytest.raises(ConfigError, match="needed"):
            FileQueue(*sizes)


CHILD = """
import os, sys, torch
from hf_zero.errors import OffloadError
from hf_zero.ops.files import FileQueue, OpenFile
backends, path = sys.argv[2:], sys.argv[1]
queues = [FileQueue(backend=backend) for backend in backends]
files = [OpenFile.open(path + backend, create=True) for backend in backends]
for queue, file in zip(queues, files):
    queue.write(file, 0, torch.ones(1 << 20)).wait()
for forgets in (False, True):
    child = os.fork()
    if child == 0:
        for queue, file in zip(queues, files):
            try:
                queue.read(file, 0, torch.empty(4))
            except OffloadError as error:
                assert "forked" in str(error)
            else:
                sys.exit(3)
            queue.close()
        if forgets:
            del queues, files, queue, file
        # through the interpreter's exit: nothing may wait for threads that are not there
        sys.exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    for queue, file in zip(queues, files):
        out = torch.empty(1 << 20)
        queue.read(file, 0, out).wait()
        assert code == 0 and int(out.sum()) == 1 << 20, (code, queue.kind)
"""


def test_forked_children_are_refused_and_end(tmp_path: Path) -> None:
    command = [launched.python(), "-c", CHILD, str(tmp_path / "file"), *BACKENDS]
    done = completed(command, timeout=300)
    assert done.returncode == 0, done.stderr


EXIT = """
import sys, torch
from hf_zero.ops.files import FileQueue, OpenFile, parse_faults
queues = [FileQueue(1 << 16, 1, 1, backend) for backend in sys.argv[2:]]
for queue in queues:
    queue.inject(parse_faults("write:1:slow=50"))
    file = OpenFile.open(sys.argv[1] + queue.kind, create=True)
    for _ in range(50):
        queue.write(file, 0, torch.ones(1 << 20))
"""


def test_a_process_ends_with_transfers_under_way(tmp_path: Path) -> None:
    command = [sys.executable, "-c", EXIT, str(tmp_path / "file"), *BACKENDS]
    done = completed(command, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


SECCOMP = """
import ctypes, struct, sys
# A filter of the kernel's that answers a call of io_uring with EPERM, as containers do.
program = struct.pack("HBBI", 0x20, 0, 0, 0) + struct.pack("HBBI", 0x15, 0, 1, int(sys.argv[1]))
program += struct.pack("HBBI", 0x06, 0, 0, 0x00050001) + struct.pack("HBBI", 0x06, 0, 0, 0x7FFF0000)
kept = ctypes.create_string_buffer(program)
fprog = struct.pack("HxxxxxxP", 4, ctypes.addressof(kept))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, ctypes.c_char_p(fprog), 0, 0) == 0
from hf_zero.errors import ConfigError
from hf_zero.ops.files import FileQueue
print(FileQueue().kind)
try:
    FileQueue(backend="io_uring")
except ConfigError as error:
    print(error)
"""
REFUSED = {"io_uring_setup": 425, "io_uring_enter": 426}


@pytest.mark.skipif(not NATIVE, reason="no native core here")
@pytest.mark.parametrize("call", REFUSED)
def test_threads_do_it_where_the_kernel_refuses_io_uring(call: str) -> None:
    environment = {**os.environ, "HF_ZERO_LOG_LEVEL": "INFO"}
    environment.pop("HF_ZERO_IO", None)
    command = [sys.executable, "-c", SECCOMP, str(REFUSED[call])]
    done = completed(command, timeout=300, env=environment)
    assert done.stdout.splitlines()[0] == "threads", done.stderr
    assert f"the kernel refuses ({call}: Operation not permitted)" in done.stdout
    assert f"the kernel refuses io_uring ({call}: Operation not permitted)" in done.stderr


LOST = """
import os, sys
import torch
from hf_zero.ops.files import FileQueue, OpenFile
queue = FileQueue(1 << 12, 4, 1, "io_uring")
file = OpenFile.open(sys.argv[1], create=True)
data = torch.randint(0, 256, (64, 3 << 12), dtype=torch.uint8)
out = torch.zeros_like(data)
def move(call, rows):
    return [call(file, at * data[0].nbytes, rows[at]) for at in range(len(rows))]
writes = move(queue.write, data)
for name in os.listdir("/proc/self/fd"):
    place = f"/proc/self/fd/{name}"
    if os.path.islink(place) and "io_uring" in os.readlink(place):
        os.dup2(os.open("/dev/null", os.O_RDONLY), int(name))  # the kernel refuses it from now on
for ticket in writes:
    ticket.wait()
for ticket in move(queue.read, out):
    ticket.wait()
assert torch.equal(out, data)
again = move(queue.write, data.flip(0))
queue.close()
assert all(ticket.done() and not ticket.failed() for ticket in again)
print("all is there")
"""


@pytest.mark.skipif(not NATIVE, reason="no native core here")
def test_transfers_go_on_where_the_kernel_refuses_the_ring_later(tmp_path: Path) -> None:
    """The thread that uses it raised, which ended the process."""
    done = completed([sys.executable, "-c", LOST, str(tmp_path / "file")], timeout=300)
    assert done.returncode == 0 and done.stdout == "all is there\n", done.stderr
