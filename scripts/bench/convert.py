"""The converter on a synthetic checkpoint: peak memory and time, one JSON row a contender on
stdout.

    # 427M parameters, fp32 with Adam's moments, two ranks
    python scripts/bench/convert.py
    python scripts/bench/convert.py --parameters 50e6 --dtype bfloat16
    # and DeepSpeed's own script, on a checkpoint that DeepSpeed wrote
    python scripts/bench/convert.py --deepspeed FOLDER

The checkpoint is saved by an engine of stage 3 on ranks that are processes, after one step. The
conversion runs in a process of its own, as ``python zero_to_fp32.py`` would, and its result is
compared with the model's weights before anything is reported. ``peak_mb`` is that process's highest
resident set, Python and torch included; ``import_mb`` is what it had after ``import torch``. A save
writes past the page cache, so that the first round reads from the disk. ``seconds`` is the best
round, after ``import_seconds`` for the modules that the script needs beside torch; ``of_it_fsync``
is what it waited for the device to take the written files. In turns with it a plain loop writes as
many bytes to the same folder, past the page cache where the file system lets it, and flushes them:
``of_disk`` is the converter's speed over that of the loop beside it, the median of the rounds.

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
import time
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

import hf_zero
from hf_zero.launch.hosts import free_port

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


class Block(nn.Module):
    """A unit whose output depends on each of its parameters, which have ``shapes`` below
    ``prefix``.
    """

    def __init__(self, shapes: Shapes, prefix: str) -> None:
        super().__init__()
        for name, shape in shapes:
            *path, leaf = name.removeprefix(prefix).split(".")
            module: nn.Module = self
            for part in path:
                if part not in module._modules:
                    module.add_module(part, nn.Module())
                module = module.get_submodule(part)
            module.register_parameter(leaf, nn.Parameter(torch.empty(shape).uniform_()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + sum(parameter.sum() for parameter in self.parameters())


class Model(nn.Module):
    def __init__(self, units: list[Shapes]) -> None:
        super().__init__()
        torch.manual_seed(0)
        embedding, *layers = units
        self.model = nn.Module()
        self.model.embed_tokens = Block(embedding, "model.embed_tokens.")
        self.model.layers = nn.ModuleList(
            Block(shapes, f"model.layers.{number}.") for number, shapes in enumerate(layers)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in (self.model.embed_tokens, *self.model.layers):
            x = block(x)
        return x


def rank_environment(rank: int, world: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
    }


def save_on_rank(rank: int, world: int, port: int, folder: str, units: list[Shapes]) -> None:
    """A step makes the moments of Adam; at a learning rate of 0 it leaves the weights."""
    os.environ.update(rank_environment(rank, world, port))
    model = Model(units)
    engine, *_ = hf_zero.initialize(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=0.0),
        config={"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}},
    )
    engine.backward(engine(torch.zeros(1)).sum())
    engine.step()
    engine.save_checkpoint(folder)
    engine.destroy()
    torch.distributed.destroy_process_group()


def write_checkpoint(folder: Path, world: int, units: list[Shapes]) -> None:
    arguments = world, free_port(), str(folder), units
    torch.multiprocessing.spawn(save_on_rank, arguments, nprocs=world)


def check(folder: Path, units: list[Shapes], dtype: torch.dtype) -> None:
    """Compare every element of the converted folder with the model's.

    Raises AssertionError naming the first parameter that differs.
    """
    files = [safe_open(path, "pt") for path in sorted(folder.glob("*.safetensors"))]
    tensors = {name: file for file in files for name in file.keys()}  # noqa: SIM118 (it is no dict)
    for name, parameter in Model(units).named_parameters():
        assert torch.equal(tensors[name].get_tensor(name), parameter.detach().to(dtype)), name


def in_deepspeed(folder: str) -> dict[str, str]:
    """The environment of a process in which ``import deepspeed`` is the one in ``folder``."""
    return dict(
        os.environ, PYTHONPATH=folder, HF_ZERO_AUTOLOAD="0", DS_ACCELERATOR="cpu", DS_BUILD_OPS="0"
    )


def write_with_deepspeed(folder: Path, world: int, units: list[Shapes], installed: str) -> None:
    port = free_port()
    shapes = json.dumps([entry for unit in units for entry in unit])
    ranks = []
    for rank in range(world):
        env = {**in_deepspeed(installed), **rank_environment(rank, world, port)}
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
        write_checkpoint(place / "run", options.ranks, units)
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
        check(place / "out", units, getattr(torch, options.dtype or "float32"))
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
