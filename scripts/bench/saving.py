"""Saving and loading beside the raw speed of the same disk, in the same run: one JSON row a
contender on stdout.

    python scripts/bench/saving.py                                  # 60M parameters with Adam's
    moments: 0.72 GB, one rank python scripts/bench/saving.py --ranks 4 --parameters 1e9 --folder
    /mnt/disk --device cuda

Ranks are processes. ``write`` is each rank writing a file of its size by O_DIRECT, 16 MiB at a
time, with an fsync, and no hash; ``save`` is ``engine.save_checkpoint``; ``stall`` is how long
``save_checkpoint(blocking=False)`` keeps training, the first time and later, with ``--memory``
right after a step whose generation in memory it takes; ``behind`` is the time until the files are
whole, with nothing else to do meanwhile. ``dcp`` is how long ``async_save`` of
torch.distributed.checkpoint keeps training, with the same tensors.
``read`` is each rank reading its file once, ``load`` is ``engine.load_checkpoint``, which compares
what it reads with the hashes of its blocks, ``trust`` the same with ``verify=False``; before each
the files are dropped from the page cache, and each is first as often as the others. ``of_trust`` is
the median over the rounds of a load's time beside that of one that trusts; ``cpu_seconds`` are the
CPU time of rank 0's process, which other programs change less. ``hash`` is that of the
rank's file alone. Seconds are those of the slowest rank, the best of the rounds; ``of_raw_speed``
compares the best with the best, ``of_raw_paired`` is the median over the rounds of one beside the
other. All rounds are in ``all_seconds``, and ``load_average`` tells whether other programs took
part in them. What was loaded is compared with what was saved before anything is reported.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

import hf_zero
from hf_zero.checkpoint.file_writer import aligned_buffer
from hf_zero.checkpoint.storage import BLOCK
from hf_zero.checkpoint.tensorfile import bytes_view, hash_of
from hf_zero.launch.hosts import free_port

WIDTH = 1024


class Stack(nn.Module):
    def __init__(self, parameters: float) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(max(1, round(parameters / WIDTH**2)))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


class Clock:
    """Seconds of the slowest rank, by contender and round."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}
        self.cpu: dict[str, list[float]] = {}  # of this process

    def time(self, name: str, action: Callable[[], Any]) -> None:
        dist.barrier()
        begun, cpu = time.perf_counter(), time.process_time()
        action()
        own, used = time.perf_counter() - begun, time.process_time() - cpu
        self.note(name, own)
        self.cpu.setdefault(name, []).append(used)

    def note(self, name: str, own: float) -> None:
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, own)
        self.seconds.setdefault(name, []).append(max(everyone))


def write_raw(path: Path, size: int) -> None:
    """``size`` bytes past the page cache, and no more work than that."""
    block = aligned_buffer(BLOCK).random_(256)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_DIRECT", 0), 0o666)
    try:
        for start in range(0, size, BLOCK):
            os.write(fd, bytes_view(block[: min(BLOCK, -(-(size - start) // 4096) * 4096)]))
        os.fsync(fd)
    finally:
        os.close(fd)


def drop(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def read_raw(path: Path, into: memoryview) -> None:
    with open(path, "rb", buffering=0) as file:
        at = 0
        while count := file.readinto(into[at : at + BLOCK]):
            at += count


def measure(rank: int, port: int, folder: Path, options: argparse.Namespace) -> None:
    place = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": options.ranks,
        "LOCAL_WORLD_SIZE": options.ranks,
    }
    os.environ.update(
        {name: str(value) for name, value in place.items()},
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    torch.manual_seed(0)
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // options.ranks))
    model = Stack(options.parameters)
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": options.stage}}
    if options.memory:
        config["checkpoint"] = {"memory": {"every": 1, "job": f"bench-{port}"}}
    device = torch.device(options.device, rank) if options.device == "cuda" else torch.device("cpu")
    engine, *_ = hf_zero.initialize(
        model=model, optimizer=torch.optim.AdamW(model.parameters()), config=config
    )

    def step() -> None:
        engine.backward(engine(torch.randn(2, WIDTH, device=device)).square().mean())
        engine.step()

    def masters() -> list[torch.Tensor]:
        return [flat.optimizer_shard.master.detach().clone() for flat in engine.flats]

    def tensors() -> dict[str, torch.Tensor]:
        """The tensors of this rank's file, under names that no other rank has."""
        return {
            f"{rank}/{flat.key}/{name}": each
            for flat in engine.flats
            for name, each in engine.bound.tensors(flat.optimizer_shard).items()
        }

    step()
    clock, written = Clock(), list[Any]()
    apart = dist.new_group(backend="gloo")  # its thread communicates beside this one
    save_by_dcp = partial(dcp.async_save, checkpoint_id=folder / "dcp", process_group=apart)
    run, mine = folder / "run", f"rank-{rank:05d}-of-{options.ranks:05d}.safetensors"
    for at in range(options.rounds):
        clock.time("save", lambda: engine.save_checkpoint(str(run), tag="waits"))
        size = (run / "waits" / mine).stat().st_size
        clock.time("write", partial(write_raw, folder / f"raw-{rank}", size))
        if engine.memory is not None:
            step()
            engine.memory.wait()
        begun = time.perf_counter()
        clock.time("stall", lambda: engine.save_checkpoint(str(run), tag="beside", blocking=False))
        staging = engine.async_saves.writer.nbytes
        engine.wait_for_checkpoint()
        clock.note("behind", time.perf_counter() - begun)
        clock.time("dcp", lambda: written.append(save_by_dcp(tensors())))
        written[-1].result()
        saved = masters()
        step()
        # its pages are there before the clock runs
        buffer = bytes_view(torch.zeros(size, dtype=torch.uint8))
        clock.time("hash", partial(hash_of, buffer))
        # what lies under a virtual disk may keep a file: then it does so for both
        read_raw(run / "beside" / mine, buffer)
        readers: dict[str, Callable[[], Any]] = {
            "read": partial(read_raw, run / "beside" / mine, buffer),
            "load": lambda: engine.load_checkpoint(str(run), tag="beside"),
            "trust": lambda: engine.load_checkpoint(str(run), tag="beside", verify=False),
        }
        names = sorted(readers)
        for turn in range(at, at + options.loads):
            for name in names[turn % 3 :] + names[: turn % 3]:
                drop(run / "beside" / mine)
                clock.time(name, readers[name])
        for before, after in zip(saved, masters()):
            assert torch.equal(before, after), "what was loaded is not what was saved"
    total: list[Any] = [None] * options.ranks
    dist.all_gather_object(total, size)
    engine.destroy()
    if rank == 0:
        report(clock, sum(total), staging, options)
    dist.destroy_process_group()


def report(clock: Clock, nbytes: int, staging: int, options: argparse.Namespace) -> None:
    best = {name: min(rounds) for name, rounds in clock.seconds.items()}
    first, *later = clock.seconds["stall"]
    best["stall"] = min(later, default=first)
    first_of = {name: clock.seconds[name][0] for name in ("stall", "dcp")}
    best["dcp"] = min(clock.seconds["dcp"][1:], default=first_of["dcp"])
    base = {"save": "write", "behind": "write", "load": "read", "trust": "read"}

    def paired(name: str) -> float:
        return round(
            statistics.median(
                raw / own for raw, own in zip(clock.seconds[base[name]], clock.seconds[name])
            ),
            3,
        )

    rounds = zip(clock.seconds["load"], clock.seconds["trust"])
    of_trust = round(statistics.median(load / trust for load, trust in rounds), 3)
    for name, seconds in best.items():
        row = {
            "bench": "saving", "contender": name, "ranks": options.ranks, "stage": options.stage,
            "device": options.device, "bytes": nbytes,
            "seconds": round(seconds, 4), "gb_per_s": round(nbytes / seconds / 1e9, 3),
            **({"of_raw_speed": round(best[base[name]] / seconds, 3),
            "of_raw_paired": paired(name)} if name in base else {}),
            **({"first_seconds": round(first_of[name], 4)} if name in first_of else {}),
            **({"of_save": round(seconds / best["save"], 3),
            "from_memory": options.memory, "staging_bytes": staging} if name == "stall" else {}),
            **({"of_trust": of_trust} if name == "load" else {}),
            **({"cpu_seconds": [round(each, 4) for each in clock.cpu[name]]}
            if name in clock.cpu else {}),
            "all_seconds": [round(second, 4) for second in clock.seconds[name]],
            "cores": len(os.sched_getaffinity(0)),
            "load_average": round(os.getloadavg()[0], 1),
            "machine": platform.machine(), "python": platform.python_version(),
            "versions": {"torch": torch.__version__, "hf-zero": hf_zero.__version__},
        }  # fmt: skip
        print(json.dumps(row), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parameters", type=float, default=60e6)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--memory", action="store_true", help="with checkpoints in memory")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--loads", type=int, default=1, help="loads of each kind in a round")
    parser.add_argument(
        "--folder",
        help="a folder on the disk to measure, with room for 36 bytes per parameter "
        "(default: the temporary one)",
    )
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="hf-zero-bench-", dir=options.folder))
    try:
        torch.multiprocessing.spawn(measure, (free_port(), folder, options), nprocs=options.ranks)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
