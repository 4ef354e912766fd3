"""Checkpoints in the memory of hosts: how much of the training they take, and the seconds from a
kill to the next step, beside saves on disk. One JSON row a result on stdout.

    python scripts/bench/memory_checkpoints.py cost --rounds 3
    python scripts/bench/memory_checkpoints.py kill --rounds 2

Two ranks under torchrun, each a host of its own by name, so that copies travel over loopback; 167M
parameters at stage 3 with Adam's moments are 1.0 GB a rank. Both «hosts» share this machine's cores
and memory: hashes and copies beside the training take cores from it, which they do not where a host
has cores to spare.

``cost``: blocks of ten steps, the first of which ends with a save, and blocks without, in turns.
``stall`` is how long the call keeps the training; ``of_plain`` the median over the rounds of a
block's time beside that of the plain one of its round; ``left`` the seconds after a block until the
save was through. ``disk beside`` is the background save on disk, ``dcp``
torch.distributed.checkpoint.async_save of the same tensors.

``kill``: rank 1 kills itself after step 3, a save having ended with step 2. Seconds since then:
``noticing`` until rank 0 has an error or a signal of torchrun (``ended``: until the killed process
has ended: the system frees its memory before it closes its connections), ``restart`` until the new
process begins, ``import`` until the script runs, ``building`` until there is an engine,
``loading``, and ``step`` the first one; ``loading_cpu`` is the CPU time of a rank's process in
``loading``. ``lost`` takes the memory of rank 1's host away, too. Files on disk are dropped from
the page cache before.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import hf_zero
from hf_zero.checkpoint import memory

sys.path.append(str(Path(__file__).resolve().parent))
from saving import WIDTH, Stack, drop
from versions import versions

BLOCK = 10  # steps
KILLED_AFTER, EVERY = 3, 2
PHASES = ("noticing", "restart", "import", "building", "loading", "step")


def start(options: argparse.Namespace, **checkpoint: Any) -> tuple[Any, Any, Callable[[], None]]:
    """Return an engine, its optimizer, and a function that does one step."""
    os.environ["HF_ZERO_HOST"] = f"host-{os.environ['RANK']}"
    torch.manual_seed(0)
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // 2))
    model = Stack(options.parameters)
    engine, optimizer, *_ = hf_zero.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters()),
        config={
            "train_micro_batch_size_per_gpu": options.rows,
            "zero_optimization": {"stage": 3},
            "checkpoint": checkpoint,
        },
    )

    def step() -> None:
        loss = engine(torch.randn(options.rows, WIDTH)).square().mean()
        engine.backward(loss)
        engine.step()

    return engine, optimizer, step


def cost(options: argparse.Namespace) -> None:
    """A rank: blocks of steps with each kind of save in turns."""
    engine, optimizer, step = start(options, memory={"every": BLOCK, "copies": 2})
    engine.memory.by_route = True
    step()
    folder = str(options.folder / "disk")
    waits: list[Any] = []

    def disk(blocking: bool) -> None:
        engine.save_checkpoint(folder, tag="one", blocking=blocking)
        waits.append(engine.wait_for_checkpoint)

    def in_memory() -> None:
        before = engine.memory.newest_id

        def wait() -> None:
            engine.memory.wait()
            assert engine.memory.newest_id != before, "the save into memory failed"

        memory.save(engine)
        waits.append(wait)

    def dcp() -> None:
        from torch.distributed.checkpoint import async_save

        held = [flat.optimizer_shard.master for flat in engine.flats]
        held += [
            value
            for state in optimizer.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor) and value.numel() > 1
        ]
        state = {f"{dist.get_rank()}/{at}": tensor for at, tensor in enumerate(held)}
        where = options.folder / "dcp"
        if dist.get_rank() == 0:
            shutil.rmtree(where, ignore_errors=True)
        dist.barrier()
        saved: Any = async_save(state, checkpoint_id=where, process_group=group)
        waits.append(saved.result)

    group = dist.new_group(backend="gloo")
    kinds: dict[str, Callable[[], None]] = {
        "plain": lambda: None,
        "memory": in_memory,
        "disk": partial(disk, True),
        "disk beside": partial(disk, False),
        "dcp": dcp,
    }
    kinds = {name: kinds[name] for name in ("plain", *options.kinds.split(","))}
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in kinds}
    for number in range(-1, options.rounds):  # the first of each makes staging memory
        for name, save in kinds.items():
            dist.barrier()
            begun = time.perf_counter()
            step()
            called = time.perf_counter()
            save()
            stall = time.perf_counter() - called
            for _ in range(BLOCK - 1 if number >= 0 else 0):
                step()
            dist.barrier()
            ended = time.perf_counter()
            for wait in waits:
                wait()
            dist.barrier()
            waits.clear()
            if number >= 0:
                found[name].append((ended - begun, stall, time.perf_counter() - ended))
    held = list(engine.memory.folder(engine.memory.base).glob("slot-*/*.safetensors"))
    nbytes = max(path.stat().st_size for path in held) if held else None
    engine.destroy()
    if dist.get_rank() == 0:
        for name, rounds in found.items():
            ratios = [own[0] / plain[0] for own, plain in zip(rounds, found["plain"])]
            blocks, stalls, left = (list(column) for column in zip(*rounds))
            report(
                options,
                bench="cost",
                kind=name,
                bytes_of_a_rank=nbytes,
                seconds_a_step=rounded([statistics.median(blocks) / BLOCK])[0],
                of_plain=round(statistics.median(ratios), 4),
                stall=rounded([statistics.median(stalls)])[0],
                all_blocks=rounded(blocks),
                all_stalls=rounded(stalls),
                all_left=rounded(left),
            )
    dist.destroy_process_group()


def kill(options: argparse.Namespace) -> None:
    """A rank of one attempt, which notes times in a file."""
    ran, rank = time.time(), int(os.environ["RANK"])
    first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"

    def note(event: str, at: float | None = None) -> None:
        with (options.folder / f"events-{rank}.jsonl").open("a") as file:
            print(json.dumps([event, time.time() if at is None else at]), file=file, flush=True)

    def noticed(*_: Any) -> None:
        note("noticed")
        os.kill(os.getpid(), signal.SIGKILL)

    if first:
        signal.signal(signal.SIGTERM, noticed)
    on_disk = options.way == "disk"
    keys = {} if on_disk else {"memory": {"every": EVERY, "copies": 2}}
    engine, _, step = start(options, **keys)
    built, folder = time.time(), str(options.folder / "disk")
    if not first:
        used = time.process_time()
        engine.load_checkpoint(folder)
        used = time.process_time() - used
        assert engine.global_steps == EVERY, engine.global_steps
        loaded = time.time()
        step()
        for event, at in (
            ("began", process_began()), ("ran", ran), ("built", built),
            ("loaded", loaded), ("stepped", time.time()), ("loading_cpu", used),
        ):  # fmt: skip
            note(event, at)
        engine.destroy()
        return dist.destroy_process_group()
    try:
        for _ in range(KILLED_AFTER):
            step()
            if on_disk and engine.global_steps == EVERY:
                engine.save_checkpoint(folder)
        if on_disk:
            for path in Path(folder).rglob("*.safetensors"):
                drop(path)
        else:
            engine.memory.wait()
        pids: list[Any] = [None, None]
        dist.all_gather_object(pids, os.getpid())
        if rank == 0:
            other = os.pidfd_open(pids[1])
            ends = partial(select.select, [other], [], [])
            threading.Thread(target=lambda: ends() and note("ended"), daemon=True).start()
        dist.barrier()
        if rank == 1:
            if options.way == "memory, lost":
                shutil.rmtree(engine.memory.folder(engine.memory.base).parent)
            note("killed")
            os.kill(os.getpid(), signal.SIGKILL)
        while True:
            step()
    except BaseException:
        note("noticed")
        raise


def process_began() -> float:
    """Return the time at which this process began, in seconds since the epoch."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - age


def report(options: argparse.Namespace, **row: Any) -> None:
    facts = {
        "parameters": options.parameters,
        "rows": options.rows,
        "ranks": 2,
        "cores": len(os.sched_getaffinity(0)),
        "load_average": round(os.getloadavg()[0], 1),
        "versions": versions("torch", "hf-zero"),
    }
    print(json.dumps({**row, **facts}), flush=True)


def rounded(seconds: list[float]) -> list[float]:
    return [round(each, 4) for each in seconds]


def launch(options: argparse.Namespace, folder: Path, *more: str) -> None:
    """Run this script on two ranks under torchrun."""
    own = ["--folder", str(folder), "--parameters", str(options.parameters)]
    own += ["--rows", str(options.rows), "--rounds", str(options.rounds), "--kinds", options.kinds]
    subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2",
            "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1",
            "--rdzv-id", f"bench-{os.getpid()}", "--max-restarts", "1",
            "--monitor-interval", "0.1", __file__, options.what, "--work", *own, *more,
        ],
        check=True,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "HF_ZERO_LOG_LEVEL": "ERROR"},
    )  # fmt: skip


def kills(options: argparse.Namespace, folder: Path) -> None:
    for number in range(options.rounds):
        for way in ("memory", "memory, lost", "disk"):
            inner = folder / f"{number} {way}"
            inner.mkdir()
            launch(options, inner, "--way", way)
            lines = [path.read_text().splitlines() for path in sorted(inner.glob("*.jsonl"))]
            of_ranks = [[json.loads(line) for line in each] for each in lines]
            at = {name: when for each in of_ranks for name, when in each}  # the slower rank's
            for name in ("ran", "built", "loaded", "stepped"):
                at[name] = max(dict(each)[name] for each in of_ranks)
            at["noticed"] = dict(reversed(of_ranks[0]))["noticed"]  # the first of them
            times = [
                at[name]
                for name in ("killed", "noticed", "began", "ran", "built", "loaded", "stepped")
            ]
            phases = [after - before for before, after in pairwise(times)]
            seconds = dict(zip(PHASES, rounded(phases)))
            seconds["seconds"] = round(times[-1] - times[0], 4)
            if "ended" in at:  # else rank 0 ended first
                seconds["ended"] = round(at["ended"] - at["killed"], 4)
            used = [dict(each)["loading_cpu"] for each in of_ranks]
            report(options, bench="kill", way=way, **seconds, loading_cpu=rounded([max(used)])[0])
            shutil.rmtree(inner)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["cost", "kill"])
    parser.add_argument("--parameters", type=float, default=167e6)
    parser.add_argument("--rows", type=int, default=128, help="of a batch of one rank")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--kinds", default="memory,disk,disk beside,dcp")
    parser.add_argument("--folder", type=Path, help="a folder on the disk to measure")
    parser.add_argument("--way", default="memory", help=argparse.SUPPRESS)
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        return cost(options) if options.what == "cost" else kill(options)
    folder = Path(tempfile.mkdtemp(prefix="hf-zero-bench-", dir=options.folder))
    try:
        launch(options, folder) if options.what == "cost" else kills(options, folder)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
