"""The cells of scripts/gpu, the most telling first: one piece of work by one contender each, in a
process of its own.

    python scripts/bench/gpu_cells.py NAME          # one cell: its rows, as lines after ROW
    python scripts/bench/gpu_cells.py --list
    python scripts/bench/gpu_cells.py --tiny NAME   # on the CPU and tiny: does it run?

NAME is such as "llama-1b,4,4096 hfz1+all". With PROFILE=1 in the environment a training cell says
where the milliseconds of further steps go (step_breakdown.py).

A row names its ``work`` and whose it is (``of``), the figures, the versions, the device, the Triton
kernels of hf-zero that were launched, and those that their references have replaced. hf-zero's name
in cells that compare kernels is "hf-zero".
"""

from __future__ import annotations

import argparse
import datetime
import importlib.machinery
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from versions import versions

VERSIONS = (
    "torch", "triton", "transformers", "accelerate", "torchao", "liger_kernel", "deepspeed",
)  # fmt: skip
Rows = Iterator[dict[str, Any]]


@dataclass(frozen=True)
class Cell:
    """``work`` by contender ``of``, or by several of them, which the rows name.

    ``seconds`` is what it is expected to take on one H200: it is not begun with less time left.
    ``needs`` is a package of a peer; ``native``: hf-zero's part needs the native core.
    """

    work: str
    of: str
    seconds: int
    run: Callable[[bool], Rows]
    needs: str = ""
    native: bool = False

    @property
    def name(self) -> str:
        return f"{self.work} {self.of}".strip()


def train(work: str, kind: str, seconds: int) -> Cell:
    """A training step of ``work`` (SHAPE,ROWS,LENGTH) by ``kind``, as train_gpu.py has them."""

    def run(tiny: bool) -> Rows:
        import train_gpu

        shape, rows, length = work.split(",")
        what, device = kind, "cuda"
        profiled = os.environ.get("PROFILE") == "1"
        if tiny:  # inductor takes a minute to compile for a CPU
            shape, rows, length, device = f"tiny-{shape.split('-')[0]}", "2", "32", "cpu"
            gpus = ("flash", "cudnn", "activations", "float8", "float8gather", "capture")
            extras = [extra for extra in what.split("+") if extra not in gpus]
            what = "+".join("kernels" if extra == "all" else extra for extra in extras).replace(
                "hf-compile", "hf"
            )
        measured = train_gpu.measure(what, shape, int(rows), int(length), device, profiled)
        yield {**measured, "work": work, "of": kind}

    needs = "deepspeed" if kind.startswith("ds") else "liger_kernel" if "liger" in kind else ""
    needs = "torchao" if "float8" in kind else needs
    native = kind.startswith("hfz") and bool({"offload", "most"} & {*kind.split("+")})
    return Cell(work, kind, seconds, run, needs, native)


def gpu_adam(tiny: bool) -> Rows:
    """One AdamW step over 1e9 parameters, fp32."""
    import gpu_optimizer
    import torch

    numel = 20_000 if tiny else 10**9
    flat = gpu_optimizer.Flat(numel, torch.device("cpu" if tiny else "cuda"))
    known = gpu_optimizer.contenders(flat)
    many = gpu_optimizer.SEGMENTS
    chosen = {
        "copy": ("copy", 1),
        "hf-zero": ("flat kernel, 1 segment", 1),
        "torch fused": ("torch fused, 1 tensor", 1),
        f"hf-zero, {many} tensors": (f"flat kernel, {many} segments", many),
        f"torch fused, {many} tensors": (f"torch fused, {many} tensors", many),
        "hf-zero, bf16 gradient and copy": ("flat kernel, bf16 gradient and copy", 1),
    }
    for of, (name, tensors) in chosen.items():
        with torch.no_grad():
            gpu_optimizer.verify(name, known[name], flat)
            ms = statistics.median(
                gpu_optimizer.milliseconds(known[name].step, flat.device, 3 if tiny else 20)
            )
        yield {
            "work": "GPU AdamW, 1e9",
            "of": of,
            "ms": ms,
            "tensors": tensors,
            "GB/s": known[name].bytes * numel / ms / 1e6,
        }


def cpu_adam(tiny: bool) -> Rows:
    """One AdamW step over 5e8 parameters on the host; ours takes bf16 gradients and writes bf16
    parameters in the same pass.
    """
    import cpu_optimizers
    import torch

    from hf_zero.ops import native

    if not native.available():
        raise SystemExit(f"there is no native core to measure: {native.why_not()}")
    torch.set_num_threads(native.threads())
    numel = 100_000 if tiny else 5 * 10**8
    memory = cpu_optimizers.Memory(numel)
    known = cpu_optimizers.contenders(memory)
    chosen = {
        "hf-zero": "hf-zero bf16 in and out",
        "torch fused + casts": "torch fused + casts",
        "torch fused": "torch fused fp32",
        "hf-zero fp32": "hf-zero fp32",
        "torch foreach": "torch foreach fp32",
    }
    for of, name in chosen.items():
        with torch.no_grad():
            cpu_optimizers.verify(name, known[name], memory)
            times = []
            for step in range(3, 9):
                begun = time.perf_counter()
                known[name].run(step)
                times.append(time.perf_counter() - begun)
        yield {
            "work": "CPU AdamW, 5e8",
            "of": of,
            "s": statistics.median(times[1:]),
            "threads": native.threads(),
        }


def sparse(length: int, with_flex: bool) -> Callable[[bool], Rows]:
    """Block-sparse attention beside dense flash attention, forward and backward."""

    def run(tiny: bool) -> Rows:
        import sparse_attention
        import torch

        args = argparse.Namespace(
            tokens=32768, heads=16, width=64, random=3, rounds=10, scratch=256 << 20, flex=with_flex
        )
        if tiny:
            args = argparse.Namespace(
                tokens=512, heads=2, width=16, random=3, rounds=2, scratch=1024, flex=False
            )
        torch.manual_seed(0)
        rows = sparse_attention.measure(
            256 if tiny else length, args, torch.device("cpu" if tiny else "cuda")
        )
        for row in rows:
            figures = {"ms": row["forward_backward_ms"], "tflops": row["tflops"]}
            if row["contender"] == "hf-zero":
                figures["times_dense"] = row["times_the_best_dense"]
            yield {"work": f"BigBird attention, {length}", "of": row["contender"], **figures}

    return run


def pinning(tiny: bool) -> Rows:
    """8 GiB of pinned host memory, and what it takes of the host beyond what was asked for."""
    import psutil
    import torch

    from hf_zero.ops.host_memory import HostArena

    asked = 1 << (24 if tiny else 33)
    device = torch.device("cpu" if tiny else "cuda", 0)
    if not tiny:
        torch.zeros(1, device=device)

    def arena() -> Any:
        return HostArena(pin=True, device=device).take(asked, torch.uint8)

    def torchs() -> Any:
        return torch.empty(asked, dtype=torch.uint8, pin_memory=not tiny).fill_(0)

    for of, take in (("hf-zero", arena), ("torch pin_memory", torchs)):
        before = psutil.Process().memory_info().rss
        begun = time.perf_counter()
        held = take()
        seconds = time.perf_counter() - begun
        taken = psutil.Process().memory_info().rss - before
        yield {
            "work": "pinning 8 GiB",
            "of": of,
            "s": seconds,
            "over_asked": taken / asked,
            "pinned": held.is_pinned() if not tiny else None,
        }
        del held


BERT, LONG_BERT = "bert-large,256,128", "bert-large,64,512"
LLAMA, LLAMA_3B, LLAMA_8B = "llama-1b,4,4096", "llama-3b,4,2048", "llama-8b,4,2048"

CELLS = (
    train(BERT, "hfz1+all", 45),
    train(LLAMA, "hfz1+all", 40),
    train(LLAMA, "liger", 25),
    Cell("BigBird attention, 16384", "", 20, sparse(16384, with_flex=False)),
    train(LLAMA_3B, "hfz2+all+offload", 50),
    train(LLAMA, "hfz3+all", 35),
    train(BERT, "hf-compile", 75),
    Cell("GPU AdamW, 1e9", "", 75, gpu_adam),
    Cell("pinning 8 GiB", "", 20, pinning),
    Cell("BigBird attention, 4096", "", 30, sparse(4096, with_flex=False)),
    train(LLAMA_3B, "hfz2+all+most", 60),
    Cell("CPU AdamW, 5e8", "", 60, cpu_adam, native=True),
    train(LONG_BERT, "hfz1+all", 50),
    train(LLAMA, "hfz1+all+capture", 50),
    train(BERT, "hfz1+all+capture", 60),
    train(LLAMA, "hfz1+all+cudnn", 50),
    train(LLAMA, "hfz1+all+flash", 50),
    train(LLAMA, "hf", 30),
    train(LLAMA, "fsdp2", 30),
    train(LLAMA, "fsdp2-liger", 30),
    train(LLAMA, "fsdp2-compile", 45),
    train(LLAMA, "fsdp2-liger-compile", 50),
    train(LLAMA, "hfz1+all+8bit", 40),
    train(LLAMA, "hfz1+all+16bit", 40),
    train(LLAMA, "hfz1+all+selective", 40),
    train(LLAMA, "hfz3+all+selective", 40),
    train(LLAMA, "hfz3+all+float8", 50),
    train(LLAMA, "hfz3+all+float8gather", 50),
    train(LLAMA, "hf-float8", 50),
    train(LLAMA, "hf-compile", 90),
    train(BERT, "hf", 30),
    train(LONG_BERT, "hf-compile", 75),
    train(LONG_BERT, "hf", 30),
    train(BERT, "fsdp2", 30),
    train(LONG_BERT, "fsdp2", 30),
    train(BERT, "ds1", 40),
    train(LONG_BERT, "ds1", 40),
    train(LLAMA, "ds1", 40),
    train(LLAMA, "ds3", 45),
    train(LLAMA_3B, "ds2+offload", 130),
    train(LLAMA_3B, "liger", 40),
    train(LLAMA, "hfz1+all+activations", 60),
    train(LLAMA_8B, "hfz2+all+ckpt+offload", 150),
    train(LLAMA_8B, "hfz1+all+16bit", 80),
    Cell("BigBird attention, 32768", "", 60, sparse(32768, with_flex=True)),
    train(LLAMA, "hfz1", 30),
    train(BERT, "hfz1", 30),
)


def here(package: str) -> bool:
    """Return whether ``package`` itself is on the path: hf-zero's own answer to its name does not
    count.
    """
    return importlib.machinery.PathFinder.find_spec(package) is not None


def launched() -> set[str]:
    """The names of hf-zero's Triton kernels that are launched from now on, as they are."""
    from hf_zero.ops.dispatch import Kernel

    names, launcher = set[str](), Kernel.launcher

    def noting(kernel: Kernel) -> Callable[..., Any]:
        names.add(kernel.name)
        return launcher(kernel)

    Kernel.launcher = noting  # type: ignore[method-assign]
    return names


def kernels(names: set[str], on_gpu: bool) -> dict[str, Any]:
    """Return a row's fields on kernels: those of ``names`` that ran, and why others were
    replaced.
    """
    from hf_zero.ops import dispatch

    replaced, why = dispatch.broken(), ""
    if on_gpu:
        why = dispatch.missing_driver() if dispatch.installed() else "triton is not installed"
    if why:
        replaced["all"] = why
    return {"kernels": sorted(names - {*replaced}), "replaced": replaced}


def about(tiny: bool) -> dict[str, Any]:
    import torch

    known = versions(*(name for name in VERSIONS if here(name)))
    facts = {"at": datetime.datetime.now().isoformat(timespec="seconds"), **known}
    return {**facts, "device": "cpu, tiny" if tiny else torch.cuda.get_device_name()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", nargs="?")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    chosen = parser.parse_args()
    if chosen.list or not chosen.name:
        print("\n".join(f"{cell.seconds:4} s  {cell.name}" for cell in CELLS))
        return
    cell = next((cell for cell in CELLS if cell.name == chosen.name), None)
    if cell is None:
        raise SystemExit(f"{chosen.name!r} is no cell; --list shows them")
    sys.path.insert(0, str(Path(__file__).parents[2]))
    facts = about(chosen.tiny)
    ours = not cell.of or cell.of.startswith("hfz")
    names = launched() if ours else set[str]()
    for row in cell.run(chosen.tiny):
        ran = kernels(names, not chosen.tiny) if ours and row["of"].startswith("hf") else {}
        print("ROW " + json.dumps({**row, **ran, **facts}), flush=True)
    sys.stdout.flush()
    os._exit(0)  # peers' threads may abort the process on the way out


if __name__ == "__main__":
    main()
