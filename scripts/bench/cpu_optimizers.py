"""One step of CPU Adam: torch fused and foreach, DeepSpeedCPUAdam (where it builds) and hf-zero,
and of hf-zero's LAMB, beside the memory's own speed.

    python scripts/bench/cpu_optimizers.py [--numel 1e8] [--rounds 15] [--threads N] [--deepspeed
    FOLDER] [--out scripts/bench/results]

Every round runs every contender once untimed and once timed, one after the other, after a pause in
which the threads of the one before go to sleep; a contender's figure is its best round. Before
anything is timed, one step of each is compared with the same step in float64. GB/s counts the bytes
a step must move: of a gradient, master and moments read and written, and a copy written. The triad
(a = b + s * c) is torch's own, 12 bytes an element. FOLDER is what `pip install --target FOLDER
deepspeed` made; its kernel is compiled at first use. Raw rows with versions go to OUT as JSON
lines.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_zero.ops import native
from hf_zero.ops.host import adam, lamb_apply, lamb_measure
from hf_zero.ops.moment_blocks import Blocks

LR, BETA1, BETA2, EPS, DECAY = 1e-3, 0.9, 0.999, 1e-8, 0.01
PAUSE = 0.02  # seconds: longer than OpenMP's threads spin
SAMPLE = 4096


class Memory:
    """The arrays of all contenders; each works on its first ``numel`` elements."""

    def __init__(self, numel: int) -> None:
        generator = torch.Generator().manual_seed(0)
        chunk = torch.randn(min(numel, 1 << 20), generator=generator)
        self.master, self.grad = (_filled(numel, chunk, torch.float32) for _ in range(2))
        self.mean, self.square = torch.zeros(numel), torch.zeros(numel)
        # the fp32 gradient that torch's kernels need of a bf16 one; the triad's result
        self.wide = torch.zeros(numel)
        self.grad16, self.copy16 = (
            _filled(numel, chunk, torch.bfloat16),
            torch.zeros(numel, dtype=torch.bfloat16),
        )
        self.mean16, self.square16 = (torch.zeros(numel, dtype=torch.bfloat16) for _ in range(2))
        self.mean8, self.square8 = (
            Blocks.zeros(numel, signed=True),
            Blocks.zeros(numel, signed=False),
        )
        self.dynamic_mean, self.dynamic_square = (
            Blocks.zeros(numel, signed=True, dynamic=True),
            Blocks.zeros(numel, signed=False, dynamic=True),
        )
        self.step = 0

    def clear(self) -> None:
        for moment in (self.mean, self.square, self.mean16, self.square16):
            moment.zero_()
        for blocks in (self.mean8, self.square8, self.dynamic_mean, self.dynamic_square):
            blocks.codes.zero_()
            blocks.scales.zero_()


def _filled(numel: int, chunk: Tensor, dtype: torch.dtype) -> Tensor:
    out = torch.empty(numel, dtype=dtype)
    for start in range(0, numel, chunk.numel()):
        out[start : start + chunk.numel()] = chunk[: numel - start]
    return out


@dataclass(frozen=True)
class Contender:
    """``run(step)`` and the bytes an element that it cannot do without."""

    run: Callable[[int], None]
    bytes: float
    narrow: bool = False  # a bf16 gradient in, a bf16 copy out
    tolerance: float = 1e-6
    lamb: bool = False  # its update is LAMB's, of one tensor


def contenders(m: Memory) -> dict[str, Contender]:
    counter = torch.tensor(0.0)
    settings: dict[str, Any] = {
        "lr": LR,
        "beta1": BETA1,
        "beta2": BETA2,
        "eps": EPS,
        "weight_decay": DECAY,
    }

    def fused(step: int, grad: Tensor | None = None) -> None:
        counter.fill_(step)
        grads = [m.grad if grad is None else grad]
        torch._fused_adamw_(
            [m.master],
            grads,
            [m.mean],
            [m.square],
            [],
            [counter],
            amsgrad=False,
            maximize=False,
            **settings,
        )

    def fused_with_casts(step: int) -> None:
        m.wide.copy_(m.grad16)
        fused(step, m.wide)
        m.copy16.copy_(m.master)

    parameter = torch.nn.Parameter(m.master, requires_grad=False)
    foreach = torch.optim.AdamW(
        [parameter], lr=LR, betas=(BETA1, BETA2), eps=EPS, weight_decay=DECAY, foreach=True
    )

    def run_foreach(step: int) -> None:
        parameter.grad = m.grad
        foreach.state[parameter] = {
            "step": torch.tensor(float(step - 1)),
            "exp_avg": m.mean,
            "exp_avg_sq": m.square,
        }
        foreach.step()

    def ours(mean: Any, square: Any, narrow: bool) -> Callable[[int], None]:
        grad, out = (m.grad16, m.copy16) if narrow else (m.grad, None)
        return lambda step: adam(
            m.master, grad, mean, square, step=step, decoupled=True, out=out, **settings
        )

    def lamb(step: int) -> None:
        numbers = {"beta1": BETA1, "beta2": BETA2, "eps": EPS, "decay": DECAY, "eps_inside": False}
        weights, update = lamb_measure(m.master, m.grad, m.mean, m.square, **numbers)
        size = LR * (1 - BETA2**step) ** 0.5 / (1 - BETA1**step) * trust(weights, update)
        lamb_apply(m.master, m.mean, m.square, step_size=size, **numbers)

    return {
        "torch fused fp32": Contender(fused, 28),
        "hf-zero fp32": Contender(ours(m.mean, m.square, False), 28),
        "torch fused + casts": Contender(fused_with_casts, 40, narrow=True),
        "hf-zero bf16 in and out": Contender(ours(m.mean, m.square, True), 28, narrow=True),
        "hf-zero bf16 in and out, bf16 moments": Contender(
            ours(m.mean16, m.square16, True), 20, narrow=True, tolerance=1e-4
        ),
        "hf-zero bf16 in and out, 8-bit moments": Contender(
            ours(m.mean8, m.square8, True), 16 + 16 / 256, narrow=True, tolerance=1e-3
        ),
        "hf-zero fp32, moments in bitsandbytes' 8 bits": Contender(
            ours(m.dynamic_mean, m.dynamic_square, False), 16 + 16 / 256, tolerance=1e-3
        ),
        "torch foreach fp32": Contender(run_foreach, 28),
        "hf-zero LAMB fp32": Contender(lamb, 40, lamb=True),
    }


def deepspeed_contender(folder: str, m: Memory) -> Contender:
    """Raises whatever the import and the compilation of DeepSpeed's kernel raise."""
    sys.path.insert(0, folder)
    from deepspeed.ops.op_builder import CPUAdamBuilder

    kernel = CPUAdamBuilder().load()
    kernel.create_adam(0, LR, BETA1, BETA2, EPS, DECAY, True, False)
    return Contender(
        lambda step: kernel.adam_update(
            0, step, LR, BETA1, BETA2, EPS, DECAY, True, m.master, m.grad, m.mean, m.square
        ),
        28,
    )


def trust(weights: float, update: float) -> float:
    """LAMB's ratio of sums of squares, within DeepSpeed's coefficients."""
    return min(max((weights / update) ** 0.5, 0.01), 10.0)


def verify(name: str, contender: Contender, m: Memory) -> None:
    """Two steps of the first elements against float64, before anything is timed."""
    m.clear()
    # the ratio of LAMB is one of all elements
    sample = m.master.numel() if contender.lamb else SAMPLE
    weight, grad = (
        m.master[:sample].double(),
        (m.grad16 if contender.narrow else m.grad)[:sample].double(),
    )
    mean, square = torch.zeros_like(grad), torch.zeros_like(grad)
    for step in (1, 2):
        contender.run(step)
        mean, square = mean.lerp(grad, 1 - BETA1), square * BETA2 + (1 - BETA2) * grad * grad
        if contender.lamb:
            update = mean / (square.sqrt() + EPS) + DECAY * weight
            ratio = trust(float(weight.square().sum()), float(update.square().sum()))
            corrected = (1 - BETA2**step) ** 0.5 / (1 - BETA1**step)
            weight = weight - LR * corrected * ratio * update
            continue
        weight = weight * (1 - LR * DECAY) - LR / (1 - BETA1**step) * mean / (
            (square / (1 - BETA2**step)).sqrt() + EPS
        )
    off = float((m.master[:sample].double() - weight).abs().max())
    if off > contender.tolerance:
        raise SystemExit(f"{name}: off by {off:.2e} after two steps; not timed")
    if contender.narrow and not torch.equal(m.copy16, m.master.bfloat16()):
        raise SystemExit(f"{name}: the bf16 copy is not the master")


def measure(numel: int, rounds: int, deepspeed: str | None) -> tuple[list[dict[str, Any]], str]:
    m = Memory(numel)
    known, why_no_deepspeed = contenders(m), "no folder given (--deepspeed)"
    if deepspeed:
        try:
            known["DeepSpeedCPUAdam fp32"], why_no_deepspeed = deepspeed_contender(deepspeed, m), ""
        except Exception as error:  # whatever a compiler can fail at; the row says so
            why_no_deepspeed = f"{type(error).__name__}: {error}"[:300]
    for name, contender in known.items():
        verify(name, contender, m)
    m.clear()
    known["triad"] = Contender(lambda step: torch.add(m.grad, m.mean, alpha=1.5, out=m.wide), 12)
    times: dict[str, list[float]] = {name: [] for name in known}
    rows = []
    for turn in range(rounds):
        for name, contender in known.items():
            time.sleep(PAUSE)
            for timed in (False, True):
                m.step += 1
                begin = time.perf_counter()
                contender.run(m.step)
                seconds = time.perf_counter() - begin
                if timed:
                    times[name].append(seconds)
                    rows.append(
                        {"numel": numel, "round": turn, "contender": name, "seconds": seconds}
                    )
    best = {name: min(values) for name, values in times.items()}
    print(
        f"\n{numel:.3g} parameters, {native.threads()} threads, {native.instruction_set()}, best "
        f"of {rounds} rounds (median)"
    )
    for name, seconds in best.items():
        speed = known[name].bytes * numel / seconds / 1e9
        print(
            f"  {name:40} {seconds * 1e3:9.2f} ms "
            f"({statistics.median(times[name]) * 1e3:9.2f})  {speed:6.1f} GB/s"
        )
    triad = known["triad"].bytes / best["triad"]
    bars = {
        "fp32 / torch fused (<= 1.00)": best["hf-zero fp32"] / best["torch fused fp32"],
        "bf16 in and out / torch fused + casts (<= 0.70)": best["hf-zero bf16 in and out"]
        / best["torch fused + casts"],
        "fp32 bandwidth / triad (>= 0.85)": 28 / best["hf-zero fp32"] / triad,
        "LAMB / torch fused AdamW (<= 1.30)": best["hf-zero LAMB fp32"] / best["torch fused fp32"],
        "fp32 / moments in bitsandbytes' 8 bits (>= 0.80)": best["hf-zero fp32"]
        / best["hf-zero fp32, moments in bitsandbytes' 8 bits"],
        "bf16 in and out bandwidth / triad (>= 0.85)": 28 / best["hf-zero bf16 in and out"] / triad,
    }
    if "DeepSpeedCPUAdam fp32" in best:
        bars["fp32 / DeepSpeedCPUAdam (<= 1.00)"] = (
            best["hf-zero fp32"] / best["DeepSpeedCPUAdam fp32"]
        )
    else:
        print(f"  DeepSpeedCPUAdam: {why_no_deepspeed}")
    for name, ratio in bars.items():
        print(f"  {name:50} {ratio:.3f}")
    rows.append(
        {"numel": numel, "best": best, "bars": bars, "deepspeed": why_no_deepspeed or "built"}
    )
    return rows, why_no_deepspeed


def versions(folder: str | None) -> dict[str, str]:
    found = {name: importlib.metadata.version(name) for name in ("torch", "hf-zero")}
    if folder is not None:  # what lies there, not what answers to the name here
        found["deepspeed"] = next(
            iter(importlib.metadata.distributions(name="deepspeed", path=[folder]))
        ).version
    return found


def cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
        platform.processor(),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--numel", type=float, nargs="+", default=[1e8], help="parameters; 40 bytes of memory each"
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--threads",
        type=int,
        default=None,
        help="of every contender; all cores of this process where it is left out",
    )
    parser.add_argument("--deepspeed", help="a folder with an installed deepspeed")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    if not native.available():
        raise SystemExit(f"there is no native core to measure: {native.why_not()}")
    threads = arguments.threads or native.threads()
    native.set_threads(threads)
    torch.set_num_threads(threads)
    head = {
        "versions": versions(arguments.deepspeed),
        "python": platform.python_version(),
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "threads": threads,
    }
    rows: list[dict[str, Any]] = [
        {**head, "instruction_set": native.instruction_set(), "load": os.getloadavg()}
    ]
    with torch.no_grad():
        for numel in arguments.numel:
            rows += measure(int(numel), arguments.rounds, arguments.deepspeed)[0]
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / f"cpu_optimizers-{datetime.date.today():%Y-%m-%d}.jsonl"
    with path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    print(f"\nrows in {path}")


if __name__ == "__main__":
    main()
