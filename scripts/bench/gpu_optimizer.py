"""AdamW over a flat of a GPU: the flat kernel beside torch's fused step, as one tensor and as 400,
LAMB and the norm; in ms and shares of a copy.

    python scripts/bench/gpu_optimizer.py                       # 1e9 parameters; about 60 GB of
    device memory python scripts/bench/gpu_optimizer.py --sweep               # also other tiles,
    blocks, warps and stages of the kernel python scripts/bench/gpu_optimizer.py --dry
    # the same lines on this CPU, tiny: shows that they run, not how fast

Each contender is checked first, against fp64. Times are medians of CUDA events around single steps,
behind work that keeps the device busy while the host launches them. Bytes are those that an update
cannot do without: 28 an element in fp32, 2 more for a bf16 copy, 2 fewer for a bf16 gradient. One
JSON row a contender goes to --out.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import itertools
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_zero.ops import dispatch
from hf_zero.ops.flat_optimizers import FlatRun, RowSettings, Tiles, adam_, advance_, settings_table
from hf_zero.ops.flat_tiles import TILE, squared_norms
from hf_zero.ops.lamb import LambSettings, apply_, measure_

LR, BETA1, BETA2, EPS, DECAY = 1e-3, 0.9, 0.999, 1e-8, 0.01
SEGMENTS = 400
SWEEP = list(
    itertools.product((4096, 8192, 16384), ((512, 4), (1024, 4), (1024, 8), (2048, 8)), (1, 3))
)
RUN = 1 << 14


@dataclass(frozen=True)
class Contender:
    """``step`` and the bytes an element that it cannot do without."""

    step: Callable[[], Any]
    bytes: float
    grad: Tensor | None = None  # what it updates with; None: it is no update
    copies: bool = False


class Flat:
    """A flat of ``numel`` parameters and everything that its update needs."""

    def __init__(self, numel: int, device: torch.device):
        self.numel, self.device = numel, device
        self.master, self.mean, self.square = (torch.zeros(numel, device=device) for _ in range(3))
        self.grad = torch.randn(numel, device=device)
        self.grad16, self.copy16 = (
            self.grad.bfloat16(),
            torch.zeros(numel, dtype=torch.bfloat16, device=device),
        )
        self.counters: list[Tensor] = []  # of every contender: cleared with the moments
        cuts = (
            torch.randperm(numel - 1, generator=torch.Generator().manual_seed(0))[: SEGMENTS - 1]
            .add(1)
            .sort()
            .values.tolist()
        )
        self.sizes = [stop - start for start, stop in itertools.pairwise([0, *cuts, numel])]

    def clear(self) -> None:
        generator = torch.Generator(self.device).manual_seed(1)
        self.master.normal_(generator=generator)
        for each in (self.mean, self.square, *self.counters):
            each.zero_()

    def counted(self, number: int) -> Tensor:
        """Step counters of a contender, [number]."""
        self.counters.append(torch.zeros(number, device=self.device))
        return self.counters[-1]

    def tiles(self, segments: int, tile: int = TILE) -> Tiles:
        """One segment, or ``SEGMENTS`` of odd lengths, whose settings are told apart as those of
        two groups would be.
        """
        if segments == 1:
            return Tiles.cut([FlatRun(self.numel, 0, 0, 0, 0)], self.device, tile)
        starts = itertools.accumulate(self.sizes, initial=0)
        return Tiles.cut(
            [
                FlatRun(size, index % 2, at, at, at)
                for index, (at, size) in enumerate(zip(starts, self.sizes))
            ],
            self.device,
            tile,
        )


def ours(
    flat: Flat, segments: int, narrow: bool = False, copies: bool = False, tile: int = TILE
) -> Contender:
    tiles = flat.tiles(segments, tile)
    steps, settings = (
        flat.counted(tiles.rows),
        settings_table([RowSettings(LR, BETA1, BETA2, EPS, DECAY)] * tiles.rows, flat.device),
    )
    grad, out = flat.grad16 if narrow else flat.grad, flat.copy16 if copies else None

    def step() -> None:
        adam_(flat.master, grad, flat.mean, flat.square, tiles, advance_(steps, settings), out=out)

    return Contender(step, 28 + 2 * copies - 2 * narrow, grad, copies)


def torch_fused(flat: Flat, segments: int, copies: bool = False) -> Contender:
    sizes = [flat.numel] if segments == 1 else flat.sizes
    masters, grads, means, squares = (
        [*each.split(sizes)] for each in (flat.master, flat.grad, flat.mean, flat.square)
    )
    counters = [*flat.counted(len(sizes))]
    told: dict[str, Any] = {
        "lr": LR,
        "beta1": BETA1,
        "beta2": BETA2,
        "weight_decay": DECAY,
        "eps": EPS,
        "amsgrad": False,
        "maximize": False,
    }

    def step() -> None:
        torch._foreach_add_(counters, 1)  # as torch.optim.AdamW does
        torch._fused_adamw_(masters, grads, means, squares, [], counters, **told)
        if copies:
            flat.copy16.copy_(flat.master)

    return Contender(step, 28 + 2 * copies, flat.grad, copies)


def norms(flat: Flat) -> dict[str, Contender]:
    parts = [*flat.grad.split(flat.sizes)]
    even = flat.numel // RUN * RUN

    def in_runs() -> None:
        torch.linalg.vector_norm(flat.grad[:even].view(-1, RUN), dim=1).double().square().sum()

    return {
        f"norm, flat kernel, {SEGMENTS} tensors": Contender(lambda: squared_norms(parts), 4),
        "norm, torch in runs of 16,384": Contender(in_runs, 4),
    }


def lamb(flat: Flat) -> Contender:
    """LAMB's two passes; its ratio is of whole tensors, so tests/gpu checks it and not this."""
    w, g, m, v = (
        [*each.split(flat.sizes)] for each in (flat.master, flat.grad, flat.mean, flat.square)
    )
    settings = LambSettings(BETA1, BETA2, EPS, DECAY)

    def step() -> None:
        weights, update = measure_(w, g, m, v, settings, kernels="on").sqrt().unbind(1)
        apply_(w, m, v, (weights / update).clamp(0.01, 10.0) * LR, settings, kernels="on")

    return Contender(step, 40)


def contenders(flat: Flat) -> dict[str, Contender]:
    return {
        "copy": Contender(lambda: flat.square.copy_(flat.mean), 8),
        "torch fused, 1 tensor": torch_fused(flat, 1),
        f"torch fused, {SEGMENTS} tensors": torch_fused(flat, SEGMENTS),
        "torch fused and cast to bf16": torch_fused(flat, 1, copies=True),
        "flat kernel, 1 segment": ours(flat, 1),
        f"flat kernel, {SEGMENTS} segments": ours(flat, SEGMENTS),
        "flat kernel, bf16 copy": ours(flat, 1, copies=True),
        "flat kernel, bf16 gradient and copy": ours(flat, 1, narrow=True, copies=True),
        f"LAMB, {SEGMENTS} tensors": lamb(flat),
        **norms(flat),
    }


def verify(name: str, contender: Contender, flat: Flat) -> None:
    """Two steps of all elements against fp64, a slice at a time."""
    if contender.grad is None:
        return
    flat.clear()
    before = flat.master.clone()
    for _ in range(2):
        contender.step()
    for at in range(0, flat.numel, 1 << 26):
        part = slice(at, at + (1 << 26))
        weight, grad = before[part].double(), contender.grad[part].double()
        mean, square = torch.zeros_like(grad), torch.zeros_like(grad)
        for step in (1, 2):
            mean, square = mean.lerp(grad, 1 - BETA1), square * BETA2 + (1 - BETA2) * grad * grad
            weight = weight * (1 - LR * DECAY) - LR / (1 - BETA1**step) * mean / (
                (square / (1 - BETA2**step)).sqrt() + EPS
            )
        off = float((flat.master[part].double() - weight).abs().max())
        if not off < 2e-6:
            raise SystemExit(f"{name}: off by {off:.2e} after two steps; not timed")
        if contender.copies and not torch.equal(flat.copy16[part], flat.master[part].bfloat16()):
            raise SystemExit(f"{name}: the bf16 copy is not the master")


def milliseconds(step: Callable[[], Any], device: torch.device, rounds: int) -> list[float]:
    for _ in range(3):
        step()
    times = []
    for _ in range(rounds):
        if device.type == "cuda":
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(2_000_000)
            begin.record()
            step()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
        else:
            start = time.perf_counter()
            step()
            times.append((time.perf_counter() - start) * 1e3)
    return times


@contextmanager
def configured(block: int, warps: int, stages: int) -> Iterator[None]:
    """The kernel with another block, number of warps and of stages."""
    from hf_zero.ops.triton_kernels import flat_optimizers as kernels

    before = kernels.BLOCK, kernels.WARPS, kernels.STAGES
    kernels.BLOCK, kernels.WARPS, kernels.STAGES = block, warps, stages
    try:
        yield
    finally:
        kernels.BLOCK, kernels.WARPS, kernels.STAGES = before


def measure(flat: Flat, rounds: int, sweep: bool) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    copy_speed = 0.0

    def row(name: str, contender: Contender) -> None:
        nonlocal copy_speed
        verify(name, contender, flat)
        ms = statistics.median(milliseconds(contender.step, flat.device, rounds))
        speed = contender.bytes * flat.numel / ms / 1e6
        copy_speed = copy_speed or speed
        rows.append(
            {
                "numel": flat.numel,
                "contender": name,
                "ms": ms,
                "GB/s": speed,
                "share of a copy": speed / copy_speed,
            }
        )
        print(f"  {name:44} {ms:9.3f} ms {speed:8.0f} GB/s {speed / copy_speed:6.3f} of a copy")

    for name, contender in contenders(flat).items():
        row(name, contender)
    for tile, (block, warps), stages in SWEEP if sweep else []:
        with configured(block, warps, stages):
            row(
                f"tile {tile}, block {block}, {warps} warps, {stages} stages",
                ours(flat, 1, tile=tile),
            )
    if dispatch.broken():
        raise SystemExit(f"kernels that could not be compiled: {dispatch.broken()}")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--numel",
        type=float,
        default=1e9,
        help="parameters; 28 bytes of memory each, and 8 while they are checked",
    )
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument(
        "--sweep", action="store_true", help="also other tiles, blocks, warps and stages"
    )
    parser.add_argument(
        "--dry",
        action="store_true",
        help="on the CPU, 20,000 parameters, two rounds; writes no rows",
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    if not arguments.dry and not torch.cuda.is_available():
        raise SystemExit("there is no GPU to measure; --dry runs the same lines on the CPU")
    device = torch.device("cpu" if arguments.dry else "cuda")
    head = {
        "versions": {name: importlib.metadata.version(name) for name in ("torch", "triton")},
        "python": platform.python_version(),
        "device": "cpu" if arguments.dry else torch.cuda.get_device_name(),
        "rounds": 2 if arguments.dry else arguments.rounds,
    }
    print(json.dumps(head))
    with torch.no_grad():
        rows = measure(
            Flat(20_000 if arguments.dry else int(arguments.numel), device),
            head["rounds"],
            arguments.sweep,
        )
    if arguments.dry:
        return
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / f"gpu_optimizer-{datetime.date.today():%Y-%m-%d}.jsonl"
    with path.open("a") as file:
        file.writelines(json.dumps(each) + "\n" for each in [head, *rows])
    print(f"rows in {path}")


if __name__ == "__main__":
    main()
