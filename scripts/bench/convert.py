"""The converter on a synthetic checkpoint: peak memory and time, one JSON row a contender on
stdout.

    python scripts/bench/convert.py                       # 427M parameters, fp32 with Adam's
    moments, two ranks python scripts/bench/convert.py --parameters 50e6 --dtype bfloat16 python
    scripts/bench/convert.py --deepspeed FOLDER    # beside it DeepSpeed's own script, on a
    checkpoint that it wrote

The checkpoint is written by hf-zero's own writer (threads play the ranks). The conversion runs in a
process of its own, as ``python zero_to_fp32.py`` would, and its result is compared with what was
saved before anything is reported. ``peak_mb`` is that process's highest resident set, Python and
torch included; ``import_mb`` is what it had after ``import torch``. A save writes past the page
cache, so that the first round reads from the disk. ``seconds`` is the best round, after
``import_seconds`` for the modules that the script needs beside torch; ``of_it_fsync`` is what it
waited for the device to take the written files. In turns with it a plain loop writes as many bytes
to the same folder, past the page cache where the file system lets it, and flushes them: ``of_disk``
is the converter's speed over that of the loop beside it, the median of the rounds.

FOLDER is what ``pip install --target FOLDER deepspeed`` made. Its ranks save the same parameters at
stage 3, and its ``convert_zero_checkpoint_to_fp32_state_dict`` writes safetensors, in rounds that
take turns with ours.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import mmap
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

import hf_zero
from hf_zero.checkpoint import save
from hf_zero.hosts.reaching import free_port
from hf_zero.parameters.layout import FlatLayout

MEASURED = """
import json, os, sys, time
import torch
def peak():
    # getrusage would count the parent's pages, too
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return int(status["VmHWM"].split()[0]) / 1024
imported, begun = peak(), time.perf_counter()
IMPORT
flush, waited, importing = os.fsync, [0.0], time.perf_counter() - begun
def timed(fd):
    begun = time.perf_counter()
    flush(fd)
    waited[0] += time.perf_counter() - begun
os.fsync = timed
started = time.perf_counter()
source, target, dtype, size = sys.argv[1:]
CONVERT
files = [entry for entry in os.scandir(target) if entry.name.endswith(".safetensors")]
print("@" + json.dumps({"seconds": time.perf_counter() - started, "import_seconds": importing,
    "of_it_fsync": waited[0], "import_mb": imported, "peak_mb": peak(), "files": len(files),
    "output_bytes": sum(entry.stat().st_size for entry in files)}))
"""
OURS = (
    "import huggingface_hub.serialization; from hf_zero.checkpoint import convert_checkpoint",
    "convert_checkpoint(source, target, dtype or None, size, workers=WORKERS)",
)
THEIRS = (
    "from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict",
    "convert_zero_checkpoint_to_fp32_state_dict(source, target, max_shard_size=size, "
    "safe_serialization=True)",
)
DEEPSPEED_RANK = """
import json, os, sys
import deepspeed, torch
from torch import nn
deepspeed.init_distributed("gloo")
model = nn.Module()
for name, shape in json.loads(sys.argv[1]):
    *path, leaf = name.split(".")
    module = model
    for part in path:
        if part not in module._modules:
            module.add_module(part, nn.Module())
        module = module._modules[part]
    module.register_parameter(leaf, nn.Parameter(torch.empty(shape).uniform_()))
optimizer = torch.optim.AdamW(model.parameters())
config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3},
          "zero_force_ds_cpu_optimizer": False, "zero_allow_untested_optimizer": True}
engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
engine.save_checkpoint(sys.argv[2])
torch.distributed.barrier()
os._exit(0)  # its threads would abort the process on the way out
"""

BLOCK = 16 << 20  # bytes

Shapes = list[tuple[str, tuple[int, ...]]]


def model_shapes(parameters: float, width: int, vocabulary: int) -> list[Shapes]:
    """Units of a Llama-like model: the embedding, then blocks until ``parameters`` is reached."""
    units: list[Shapes] = [[("model.embed_tokens.weight", (vocabulary, width))]]
    count = vocabulary * width
    while count < parameters:
        block: Shapes = [(f"self_attn.{name}_proj.weight", (width, width)) for name in "qkvo"]
        block += [(f"mlp.{name}_proj.weight", (4 * width, width)) for name in ("gate", "up")]
        block += [
            ("mlp.down_proj.weight", (width, 4 * width)),
            ("input_layernorm.weight", (width,)),
        ]
        units.append([(f"model.layers.{len(units) - 1}.{name}", shape) for name, shape in block])
        count += sum(prod(shape) for _, shape in block)
    return units


@dataclass
class Flat:
    """A rank's chunk: random masters; the moments are zeros, which cost no memory until they are
    written.
    """

    key: str
    layout: FlatLayout
    owned: tuple[int, int]
    master: torch.Tensor = field(init=False)
    trainable: bool = True
    dtype: torch.dtype = torch.float32
    writes: bool = True
    raw: bool = False
    states: Any = None

    def __post_init__(self) -> None:
        self.master = torch.empty(self.owned[1] - self.owned[0]).uniform_()


class Adam:
    """An optimizer as far as the writer looks at it."""

    optimizer = SimpleNamespace()
    group_of: dict[str, int] = {}

    def tensors(self, flat: Flat) -> dict[str, torch.Tensor]:
        zeros = torch.zeros(1).expand(flat.master.numel())
        return {"master": flat.master, "exp_avg": zeros, "exp_avg_sq": zeros}

    def scalars(self) -> list[dict[str, float]]:
        return [{"step": 1.0}]

    def hyperparameters(self) -> list[dict[str, Any]]:
        return [{"lr": 1e-3}]


class Comm:
    """Object collectives over threads."""

    def __init__(self, world: int) -> None:
        self._barrier, self._slots, self._rank = (
            threading.Barrier(world),
            [None] * world,
            threading.local(),
        )

    def enter(self, rank: int) -> None:
        self._rank.value = rank

    def all_gather_object(self, obj: Any) -> list[Any]:
        self._slots[self._rank.value] = obj
        self._barrier.wait()
        gathered = list(self._slots)
        self._barrier.wait()
        return gathered


@dataclass
class Counters:
    global_steps: int = 1


def engine(rank: int, world: int, mesh: Comm, units: list[Shapes]) -> Any:
    layouts = [FlatLayout.build(unit, world) for unit in units]
    flats = [
        Flat(f"unit{index}|trainable|float32", layout, layout.rank_range(rank))
        for index, layout in enumerate(layouts)
    ]
    names = [name for unit in units for name, _ in unit]
    return SimpleNamespace(
        flats=flats, mesh=mesh, world_size=world, shard_world=world, global_rank=rank, stage=3,
        module=nn.Module(), bound=Adam(),
        counters=Counters(), config=SimpleNamespace(precision="fp32"), aliases={},
        param_dtypes=dict.fromkeys(names, "float32"),
        lr_scheduler=None, scaler=None,
    )  # fmt: skip


def write_checkpoint(folder: Path, world: int, units: list[Shapes]) -> list[Any]:
    mesh = Comm(world)
    engines = [engine(rank, world, mesh, units) for rank in range(world)]

    def on_rank(rank: int) -> None:
        mesh.enter(rank)
        save(engines[rank], folder)

    with ThreadPoolExecutor(world) as pool:
        list(pool.map(on_rank, range(world)))
    return engines


def check(folder: Path, engines: list[Any], dtype: torch.dtype) -> None:
    """Compare every element of the converted folder with the masters.

    Raises AssertionError naming the first parameter that differs.
    """
    files = [safe_open(path, "pt") for path in sorted(folder.glob("*.safetensors"))]
    tensors = {name: file for file in files for name in file.keys()}  # noqa: SIM118 (it is no dict)
    for one in engines:
        for flat in one.flats:
            for piece in flat.layout.pieces(*flat.owned):
                whole = tensors[piece.name].get_tensor(piece.name).reshape(-1)
                at = piece.offset - flat.owned[0]
                assert torch.equal(
                    whole[piece.start : piece.stop], flat.master[at : at + len(piece)].to(dtype)
                ), piece.name


def in_deepspeed(folder: str) -> dict[str, str]:
    """The environment of a process in which ``import deepspeed`` is the one in ``folder``."""
    return dict(
        os.environ, PYTHONPATH=folder, HF_ZERO_AUTOLOAD="0", DS_ACCELERATOR="cpu", DS_BUILD_OPS="0"
    )


def write_with_deepspeed(folder: Path, world: int, units: list[Shapes], installed: str) -> None:
    port = str(free_port())
    shapes = json.dumps([entry for unit in units for entry in unit])
    ranks = []
    for rank in range(world):
        place = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(world),
        }
        env = {
            **in_deepspeed(installed),
            **place,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "GLOO_SOCKET_IFNAME": "lo",
        }
        ranks.append(
            subprocess.Popen(
                [sys.executable, "-c", DEEPSPEED_RANK, shapes, str(folder)],
                env=env,
                stdout=subprocess.DEVNULL,
            )
        )
    codes = [process.wait() for process in ranks]
    if any(codes):
        raise SystemExit("DeepSpeed's ranks failed; their error stands above")


def convert(
    how: tuple[str, str],
    source: Path,
    target: Path,
    options: argparse.Namespace,
    env: dict[str, str] | None = None,
) -> dict[str, Any]:
    """One conversion in a process of its own."""
    shutil.rmtree(target, ignore_errors=True)
    command = [
        sys.executable,
        "-c",
        MEASURED.replace("IMPORT", how[0]).replace("CONVERT", how[1]),
        str(source),
        str(target),
        options.dtype,
        options.max_shard_size,
    ]
    printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=env).stdout
    return json.loads(next(line for line in printed.splitlines() if line.startswith("@"))[1:])


def disk_speed(folder: Path, nbytes: int) -> float:
    """Bytes per second of a plain loop that writes ``nbytes`` one after the other and flushes
    them.
    """
    block = mmap.mmap(-1, BLOCK)  # stands at a page, as direct I/O wants it
    block.write(os.urandom(BLOCK))
    path, flags = folder / "raw", os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    try:
        fd = os.open(path, flags | getattr(os, "O_DIRECT", 0))
    except OSError:  # a file system in memory
        fd = os.open(path, flags)
    begun, written = time.perf_counter(), 0
    try:
        while written < nbytes:
            written += os.write(fd, block)
        os.fsync(fd)
        return written / (time.perf_counter() - begun)
    finally:
        os.close(fd)
        path.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parameters", type=float, default=427e6)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=50_000)
    parser.add_argument("--dtype", default="", choices=["", "float32", "bfloat16", "float16"])
    parser.add_argument("--max-shard-size", default="5GB")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--folder",
        help="where to put 16 bytes per parameter for a while (default: the temporary folder)",
    )
    parser.add_argument("--deepspeed", metavar="FOLDER")
    options = parser.parse_args()
    units = model_shapes(options.parameters, options.width, options.vocabulary)
    rounds: dict[str, list[dict[str, Any]]] = {"hf-zero": []}
    versions = {"torch": torch.__version__, "hf-zero": hf_zero.__version__}
    if options.deepspeed:
        rounds["deepspeed"] = []
        versions["deepspeed"] = next(
            iter(importlib.metadata.distributions(name="deepspeed", path=[options.deepspeed]))
        ).version
    place = Path(tempfile.mkdtemp(prefix="hf-zero-bench-", dir=options.folder))
    try:
        if options.deepspeed:
            write_with_deepspeed(place / "theirs", options.ranks, units, options.deepspeed)
        engines = write_checkpoint(place / "run", options.ranks, units)
        disk = []
        for _ in range(options.rounds):
            rounds["hf-zero"].append(
                convert(
                    (OURS[0], OURS[1].replace("WORKERS", str(options.workers))),
                    place / "run",
                    place / "out",
                    options,
                )
            )
            disk.append(disk_speed(place, rounds["hf-zero"][-1]["output_bytes"]))
            if options.deepspeed:
                rounds["deepspeed"].append(
                    convert(
                        THEIRS,
                        place / "theirs",
                        place / "theirs-out",
                        options,
                        in_deepspeed(options.deepspeed),
                    )
                )
                shutil.rmtree(place / "theirs-out")
        check(place / "out", engines, getattr(torch, options.dtype or "float32"))
    finally:
        shutil.rmtree(place)
    for contender, rows in rounds.items():
        best = min(rows, key=lambda row: row["seconds"])
        row = {
            "bench": "convert", "contender": contender, "checkpoint_ranks": options.ranks,
            "dtype": options.dtype or "float32",
            "parameters": sum(prod(shape) for unit in units for _, shape in unit), **best,
            "peak_mb": max(row["peak_mb"] for row in rows),
            "over_import_mb": max(row["peak_mb"] - row["import_mb"] for row in rows),
            "workers": options.workers if contender == "hf-zero" else None,
            "of_disk": median(row["output_bytes"] / row["seconds"] / speed for row,
            speed in zip(rows, disk)),
            "disk_bytes_per_second": disk, "all_seconds": [[row["seconds"],
            row["of_it_fsync"]] for row in rows], "cores": len(os.sched_getaffinity(0)),
            "machine": platform.machine(), "python": platform.python_version(),
            "versions": versions,
        }  # fmt: skip
        print(json.dumps(row))


if __name__ == "__main__":
    main()
