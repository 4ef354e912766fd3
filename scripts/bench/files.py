"""FileQueue beside plain loops in C++ over the same file: O_DIRECT, sequential, the same block size
and depth, in one run.

    python scripts/bench/files.py --folder /mnt/nvme [--rounds 9] [--gigabytes 1] [--block-size
    1048576] [--depth 32] [--out scripts/bench/results]

Each round reads a file from end to end, writes another, and does both at once, by every contender
in turn. The file is allocated and written before. The loops (`raw_files.cpp`, compiled here) have
no queue, no priorities and no tickets: what they reach, on io_uring or on threads, is what the disk
gives. A contender's figure is its best round.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from hf_zero.ops.files import FileQueue, OpenFile, Priority
from hf_zero.ops.host_memory import HostArena

HERE = Path(__file__).resolve().parent
WORK = ("read", "write", "both")


def build(folder: str) -> Any:
    """The plain loops as a library."""
    library = Path(folder) / "raw_files.so"
    ring = HERE.parents[1] / "kernels" / "cpu" / "ring.cpp"
    compiler = os.environ.get("CXX", "c++")
    subprocess.run(
        [
            compiler,
            "-std=c++17",
            "-O2",
            "-shared",
            "-fPIC",
            "-pthread",
            str(HERE / "raw_files.cpp"),
            str(ring),
            "-o",
            str(library),
        ],
        check=True,
    )
    raw = ctypes.CDLL(str(library)).raw
    raw.argtypes = [ctypes.c_int] * 3 + [
        ctypes.c_void_p,
        ctypes.c_int64,
        ctypes.c_int64,
        ctypes.c_int,
    ]
    return raw


class Files:
    """One file to read and one to write, each with its memory."""

    def __init__(self, folder: str, nbytes: int):
        self.nbytes = nbytes
        self.names = [os.path.join(folder, name) for name in ("read.bin", "write.bin")]
        arena = HostArena()
        self.memory = [arena.take(nbytes, torch.uint8) for _ in self.names]
        self.descriptors = []
        for name, memory in zip(self.names, self.memory):
            descriptor = os.open(name, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
            os.posix_fallocate(descriptor, 0, nbytes)
            memory.random_()
            view = memoryview(memory.numpy())
            for at in range(0, nbytes, 1 << 24):
                os.pwrite(descriptor, view[at : at + (1 << 24)], at)
            self.descriptors.append(descriptor)


def plain(raw: Any, io_uring: bool, files: Files, block: int, depth: int) -> Callable[[str], None]:
    def one(write: bool, depth: int) -> None:
        error = raw(
            io_uring,
            write,
            files.descriptors[write],
            files.memory[write].data_ptr(),
            files.nbytes,
            block,
            depth,
        )
        if error:
            raise OSError(error, os.strerror(error), files.names[write])

    def run(work: str) -> None:
        if work == "both":
            with ThreadPoolExecutor(2) as pool:
                list(pool.map(lambda write: one(write, max(1, depth // 2)), (False, True)))
        else:
            one(work == "write", depth)

    return run


def queued(queue: FileQueue, files: Files) -> Callable[[str], None]:
    reading, writing = (OpenFile.open(name) for name in files.names)
    assert reading.direct and writing.direct, "this file system takes no O_DIRECT"

    def run(work: str) -> None:
        tickets = []
        if work in ("read", "both"):
            tickets.append(queue.read(reading, 0, files.memory[0], Priority.AHEAD))
        if work in ("write", "both"):
            tickets.append(queue.write(writing, 0, files.memory[1], Priority.AHEAD))
        for ticket in tickets:
            ticket.wait()

    return run


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="on the disk to measure")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--gigabytes", type=float, default=1.0, help="size of each of the two files"
    )
    parser.add_argument("--block-size", type=int, default=1 << 20)
    parser.add_argument("--depth", type=int, default=32)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    nbytes = int(options.gigabytes * 1e9) // options.block_size * options.block_size
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        raw, files = build(folder), Files(folder, nbytes)
        contenders = {
            "loop io_uring": plain(raw, True, files, options.block_size, options.depth),
            "loop threads": plain(raw, False, files, options.block_size, options.depth),
            "queue io_uring": queued(
                FileQueue(options.block_size, options.depth, backend="io_uring"), files
            ),
            "queue threads": queued(
                FileQueue(options.block_size, options.depth, options.depth, "threads"), files
            ),
            "queue python": queued(
                FileQueue(options.block_size, options.depth, options.depth, "python"), files
            ),
        }
        rows: list[dict[str, Any]] = []
        names = list(contenders)
        for number in range(options.rounds + 1):  # round 0 warms up
            for work in WORK:
                for place in range(len(names)):
                    name = names[(place + number) % len(names)]
                    started = time.perf_counter()
                    contenders[name](work)
                    seconds = time.perf_counter() - started
                    moved = nbytes * (2 if work == "both" else 1)
                    if number:
                        rows.append(
                            {
                                "round": number,
                                "contender": name,
                                "work": work,
                                "seconds": seconds,
                                "gb_per_second": moved / seconds / 1e9,
                            }
                        )
            print(f"round {number} of {options.rounds}", file=sys.stderr, flush=True)

    best = {
        work: {
            name: max(
                row["gb_per_second"]
                for row in rows
                if row["contender"] == name and row["work"] == work
            )
            for name in names
        }
        for work in WORK
    }
    ceiling = {work: max(best[work]["loop io_uring"], best[work]["loop threads"]) for work in WORK}
    print(f"{'GB/s':16}" + "".join(f"{work:>16}" for work in WORK))
    for name in names:
        cells = [
            f"{best[work][name]:9.2f} ({best[work][name] / ceiling[work]:.2f})" for work in WORK
        ]
        print(f"{name:16}" + "".join(f"{cell:>16}" for cell in cells))
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        path = options.out / f"files-{datetime.date.today()}.jsonl"
        facts = {
            "versions": {name: importlib.metadata.version(name) for name in ("torch", "hf-zero")},
            "python": platform.python_version(),
            "kernel": platform.release(),
            "cores": os.cpu_count(),
            "bytes": nbytes,
            "block_size": options.block_size,
            "depth": options.depth,
            "best": best,
        }
        with path.open("w") as file:
            for row in [facts, *rows]:
                file.write(json.dumps(row) + "\n")
        print(f"rows: {path}")


if __name__ == "__main__":
    main()
