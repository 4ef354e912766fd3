"""Tensors to and from files, on every backend this machine has."""

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
from tests.helpers.commands import completed
from tests.helpers.file_backends import BACKENDS
from tests.helpers.file_transfers import open_file, read, write

ROOT = Path(__file__).parents[2]
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


@pytest.fixture
def one_at_a_time(queue: FileQueue) -> Iterator[FileQueue]:
    with closing(FileQueue(BLOCK, 1, 1, queue.kind)) as single:
        yield single


def file_in(folder: Path, direct: bool = True) -> OpenFile:
    """A file, past the page cache where its file system allows, or as on one without O_DIRECT."""
    if direct:
        return open_file(folder / "file")
    return OpenFile(str(folder / "file"), os.open(folder / "file", os.O_RDWR | os.O_CREAT))


def test_what_is_written_is_read(queue: FileQueue, tmp_path: Path) -> None:
    """Of any size and place in memory and in the file, past the page cache and through it."""
    for direct, misaligned in ((True, 0), (False, 1), (True, 64)):
        file = file_in(tmp_path, direct)
        for offset in (0, 1, ALIGNMENT, BLOCK + 513):
            for nbytes in SIZES:
                data, out = tensor_at(nbytes, misaligned), tensor_at(nbytes, 64 - misaligned)
                write(queue, file, offset, data).wait()
                read(queue, file, offset, out).wait()
                assert torch.equal(out, data), (offset, nbytes)
                there = (tmp_path / "file").read_bytes()[offset : offset + nbytes]
                assert there == data.numpy().tobytes()
    for name in ("float64", "float32", "bfloat16", "float16", "int64", "int8", "bool"):
        data = torch.randint(0, 2, (3, 5, 7)).to(getattr(torch, name))
        out = torch.empty_like(data)
        write(queue, file, 24, data).wait()
        read(queue, file, 24, out).wait()
        assert torch.equal(out, data), name


def test_many_in_flight_from_several_threads(queue: FileQueue, tmp_path: Path) -> None:
    file, wrong = file_in(tmp_path), list[int]()
    neighbors = [tensor_at(1500, 0) for _ in range(200)]
    for ticket in [write(queue, file, 1500 * at, part) for at, part in enumerate(neighbors)]:
        ticket.wait()
    assert (tmp_path / "file").read_bytes() == torch.cat(neighbors).numpy().tobytes()
    parts = [torch.full((20_000 + index,), index % 256, dtype=torch.uint8) for index in range(240)]

    def work(start: int) -> None:
        mine = {index: torch.empty_like(parts[index]) for index in range(start, 240, 4)}
        for move, tensors in ((write, parts), (read, mine)):
            tickets = [
                move(queue, file, index * 24_576, tensors[index], Priority(index % 3))
                for index in mine
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
def test_what_somebody_waits_for_becomes_urgent(backend: str, tmp_path: Path) -> None:
    """A read overtakes the rest of a long write; what is to come after another does not."""
    file, out = file_in(tmp_path), fill(7)
    for how in ("wait", "read"):
        queue = FileQueue(BLOCK, 1, 1, backend)
        write(queue, file, 0, fill(0, LONG)).wait()
        queue.inject(SLOW)
        write(queue, file, 0, fill(1, LONG), Priority.BEHIND if how == "read" else Priority.AHEAD)
        if how == "read":
            read(queue, file, LAST.start, out, Priority.NEEDED).wait()
            assert int(out.max()) == 0, "the read came after the last block of the write"
        else:
            late = write(queue, file, LAST.start, fill(2), Priority.BEHIND)
            late.wait()
        queue.inject(AT_ONCE)
        queue.close()
        assert last_of(tmp_path) == bytes([1]) * BLOCK, how
    queue = FileQueue(BLOCK, 1, 1, backend)
    queue.inject(parse_faults("write:1:slow=100"))
    first = write(queue, file, 0, fill(1), Priority.BEHIND)
    part = files.TransferPart(file, 0, 0, BLOCK)
    queue.transfer(True, [part], fill(2), Priority.NEEDED, [first]).wait()
    assert first.done()
    assert (tmp_path / "file").read_bytes()[:BLOCK] == bytes([2]) * BLOCK
    queue.close()


def test_memory_and_file_live_as_long_as_their_transfer(one_at_a_time, tmp_path):
    file = file_in(tmp_path)
    descriptor, data = file.descriptor, fill(5, LONG)
    seen = weakref.ref(data)
    one_at_a_time.inject(SLOW)
    # else the next, which is waited for, may overtake it
    write(one_at_a_time, file, 0, data, Priority.NEEDED)
    del data
    gc.collect()
    assert seen() is not None
    one_at_a_time.inject(AT_ONCE)
    write(one_at_a_time, file, LAST.stop, fill(6)).wait()
    write(one_at_a_time, file, LAST.stop, fill(6)).wait()
    assert seen() is None and last_of(tmp_path) == bytes([5]) * BLOCK
    one_at_a_time.inject(SLOW)
    ticket = write(one_at_a_time, file, 0, fill(1, LONG))
    del file
    os.fstat(descriptor)
    one_at_a_time.inject(AT_ONCE)
    one_at_a_time.close()
    gc.collect()
    assert ticket.done()
    with pytest.raises(OSError):
        os.fstat(descriptor)


def test_closing_finishes_what_was_asked_for_or_drops_what_has_not_begun(
    queue: FileQueue, one_at_a_time: FileQueue, tmp_path: Path
) -> None:
    file = file_in(tmp_path)
    tickets = [write(queue, file, BLOCK * index, fill(index)) for index in range(20)]
    queue.close()
    assert all(ticket.done() and not ticket.failed() for ticket in tickets)
    with pytest.raises(OffloadError, match="closed"):
        read(queue, file, 0, fill(0))
    queue.close()
    one_at_a_time.inject(SLOW)
    tickets = [
        write(one_at_a_time, file, BLOCK * index, fill(1), Priority.NEEDED) for index in range(LONG)
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
    file = file_in(tmp_path)
    for tensor in (torch.zeros(4, 4).t(), torch.zeros(4, device="meta")):
        with pytest.raises(OffloadError, match="contiguous CPU memory"):
            write(queue, file, 0, tensor)
    write(queue, file, 0, fill(0)).wait()
    with pytest.raises(OffloadError, match="another kind"):
        file.handle(type("Other", (), {}))
    for sizes in ((4095,), (0,), (1 << 31,), (BLOCK, 0), (BLOCK, 5000), (BLOCK, 4, 0)):
        with pytest.raises(ConfigError, match="needed"):
            FileQueue(*sizes)


PROCESS = """
import ctypes, os, struct, sys, torch
from hf_zero.errors import ConfigError, OffloadError
from hf_zero.ops.files import FileQueue, parse_faults
from tests.helpers.file_transfers import open_file, read, write
path, backends = sys.argv[1], sys.argv[2:]


def forked(child):
    process = os.fork()
    if process == 0:
        child()
        sys.exit(0)  # through the interpreter's exit: nothing may wait for threads not there
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    assert code == 0, (child.__name__, code)


def refused(call):
    # A filter of the kernel's that answers a call of io_uring with EPERM, as containers do.
    program = struct.pack("HBBI", 0x20, 0, 0, 0) + struct.pack("HBBI", 0x15, 0, 1, call)
    program += struct.pack("HBBI", 6, 0, 0, 0x00050001) + struct.pack("HBBI", 6, 0, 0, 0x7FFF0000)
    kept = ctypes.create_string_buffer(program)
    fprog = struct.pack("HxxxxxxP", 4, ctypes.addressof(kept))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0
    assert libc.prctl(22, 2, ctypes.c_char_p(fprog), 0, 0) == 0
    print(FileQueue().kind)
    try:
        FileQueue(backend="io_uring")
    except ConfigError as error:
        print(error)


for call in (425, 426):
    forked(lambda: refused(call))

queues = [FileQueue(backend=backend) for backend in backends]
files = [open_file(path + backend) for backend in backends]
for queue, file in zip(queues, files):
    write(queue, file, 0, torch.ones(1 << 20)).wait()


def parents():
    for queue, file in zip(queues, files):
        try:
            read(queue, file, 0, torch.empty(4))
        except OffloadError as error:
            assert "forked" in str(error)
        else:
            sys.exit(3)
        queue.close()


def forgotten():
    parents()
    queues.clear(), files.clear()


for child in (parents, forgotten):
    forked(child)
    for queue, file in zip(queues, files):
        out = torch.empty(1 << 20)
        read(queue, file, 0, out).wait()
        assert int(out.sum()) == 1 << 20, queue.kind

if "io_uring" in backends:
    queue = FileQueue(1 << 12, 4, 1, "io_uring")
    file = open_file(path)
    data = torch.randint(0, 256, (64, 3 << 12), dtype=torch.uint8)
    out = torch.zeros_like(data)

    def move(call, rows):
        return [call(queue, file, at * data[0].nbytes, rows[at]) for at in range(len(rows))]

    writes = move(write, data)
    for name in os.listdir("/proc/self/fd"):
        place = f"/proc/self/fd/{name}"
        if os.path.islink(place) and "io_uring" in os.readlink(place):
            os.dup2(os.open("/dev/null", os.O_RDONLY), int(name))  # refused from now on
    for ticket in writes:
        ticket.wait()
    for ticket in move(read, out):
        ticket.wait()
    assert torch.equal(out, data)
    again = move(write, data.flip(0))
    queue.close()
    assert all(ticket.done() and not ticket.failed() for ticket in again)

queues = [FileQueue(1 << 16, 1, 1, backend) for backend in backends]
for queue in queues:
    queue.inject(parse_faults("write:1:slow=50"))
    file = open_file(path + queue.kind)
    for _ in range(50):
        write(queue, file, 0, torch.ones(1 << 20))
print("the end")
"""


def test_what_a_process_sees(tmp_path: Path) -> None:
    """Threads do it where the kernel refuses io_uring, from the start or later; forked children are
    refused and end; a process ends with transfers under way.
    """
    environment = {**os.environ, "HF_ZERO_LOG_LEVEL": "INFO"}
    environment.pop("HF_ZERO_IO", None)
    command = [sys.executable, "-c", PROCESS, str(tmp_path / "file"), *BACKENDS]
    done = completed(command, timeout=300, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert said[0] == said[2] == "threads" and said[4:] == ["the end"], done.stdout
    for call in ("io_uring_setup", "io_uring_enter"):
        refusal = f"({call}: Operation not permitted)"
        assert f"the kernel refuses {refusal}" in done.stdout
        assert f"the kernel refuses io_uring {refusal}" in done.stderr
    assert "Traceback" not in done.stderr and "Error" not in done.stderr


@pytest.fixture
def file(tmp_path: Path) -> OpenFile:
    return open_file(tmp_path / "file")


def test_an_error_is_raised_with_number_and_path(queue: FileQueue, file: OpenFile) -> None:
    data = torch.rand(5 * BLOCK)
    for number in (errno.EIO, errno.ENOSPC, errno.EACCES, errno.EROFS):
        queue.inject(parse_faults(f"write:3:{errno.errorcode[number]}"))
        ticket = write(queue, file, 0, data)
        for _ in range(2):  # whoever waits is told
            with pytest.raises(OSError, match="writing 65536 bytes at") as caught:
                ticket.wait()
            assert (caught.value.errno, caught.value.filename) == (number, file.path)
            assert os.strerror(number) in str(caught.value)
            assert isinstance(caught.value, PermissionError) == (number == errno.EACCES)
        assert ticket.done() and ticket.failed()
        queue.inject([])
        is_written(queue, file, data)
    queue.inject(parse_faults("write:1:EIO"))
    failing = write(queue, file, 0, torch.rand(8 * BLOCK), Priority.NEEDED)
    with pytest.raises(OSError):
        failing.wait()
    is_written(queue, file, torch.rand(100))  # each transfer has its own error
    write(queue, file, 0, torch.zeros(BLOCK + 100, dtype=torch.uint8)).wait()
    os.truncate(file.path, BLOCK + 100)
    for offset in (0, BLOCK, 3 * BLOCK):
        said = r"the file ends too early \(reading \d+ bytes at \d+\)"
        with pytest.raises(OSError, match=said) as caught:
            read(queue, file, offset, torch.empty(3 * BLOCK + 17, dtype=torch.uint8)).wait()
        assert (caught.value.errno, caught.value.filename) == (errno.EIO, file.path)


def is_written(queue: FileQueue, file: OpenFile, data: torch.Tensor) -> None:
    out = torch.zeros_like(data)
    write(queue, file, 0, data).wait()
    read(queue, file, 0, out).wait()
    assert torch.equal(out, data)


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


def test_a_file_system_that_refuses_o_direct(queue, tmp_path, monkeypatch):
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
    file = open_file(tmp_path / "plain")
    assert not file.direct
    is_written(queue, file, torch.rand(BLOCK))


def test_faults_come_from_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_ZERO_IO_FAULT", "write:2+:ENOSPC")
    for backend in BACKENDS:
        queue = FileQueue(BLOCK, backend=backend)
        file = open_file(tmp_path / backend)
        write(queue, file, 0, torch.zeros(1)).wait()
        for _ in range(2):
            with pytest.raises(OSError, match="No space left"):
                write(queue, file, 0, torch.zeros(1)).wait()
        queue.close()
    for text in ("write", "write:x:EIO", "read:1:ENOTANERROR", "move:1:EIO", "read:1:slow"):
        with pytest.raises(ConfigError, match="write for example"):
            parse_faults(text)
