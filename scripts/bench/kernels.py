"""Each fused operation, forward and backward, beside eager torch, torch.compile and Liger:
correctness first, then time, on one GPU, or on a CPU for heads with their losses.

    python scripts/bench/kernels.py [--only rms_norm,swiglu] [--repeats 30] [--out
    scripts/bench/results]
    python scripts/bench/kernels.py --device cpu --only losses
    python scripts/bench/kernels.py --device cpu --small          # does it run?

An operation's floor is the larger of its fewest bytes over a measured copy and its fewest FLOPs
over a measured bf16 matrix product, both taken in the same run; "of the floor" is that time over
the measured one. Times are medians of CUDA events around forward and backward, contenders
interleaved, with inputs larger than the second-level cache, behind work that keeps the device busy
while the host launches them. A contender whose outputs or gradients are off by more than the bound
is not timed. Liger is taken if it is installed. Rows go to OUT as JSON lines, with versions.
`optimizer` and `sparse_attention` have benchmarks of their own beside this file.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from versions import versions

BUSY = 4_000_000  # cycles, some 2 ms
BOUND = 2e-2  # relative in norm, bf16 against the same in fp32
VERSIONS = ("torch", "triton", "transformers", "liger_kernel")
Contender = Callable[..., Any]


@dataclass(frozen=True)
class Work:
    """One operation at one shape. ``floats`` and ``rest`` are its arguments: differentiated ones
    first, then the others.

    ``moved`` counts the elements that a forward and a backward must read or write at least;
    ``flops`` what they must compute.
    """

    name: str
    floats: Sequence[Tensor]
    contenders: dict[str, Contender]
    moved: int
    flops: int = 0
    rest: Sequence[Any] = field(default=())


def tensor(device: str, *shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device=device) * scale).to(torch.bfloat16)


def liger() -> Any:
    try:
        import liger_kernel.ops as ops
    except ImportError:
        return None
    return ops


def norms(device: str, small: bool) -> list[Work]:
    from hf_zero.ops.norms import layer_norm, layer_norm_of_sum, rms_norm

    rows, width = (64, 256) if small else (16384, 4096)
    x, r, w, b = (
        tensor(device, rows, width),
        tensor(device, rows, width),
        tensor(device, width),
        tensor(device, width),
    )
    one = rows * width

    def rms_eager(x: Tensor, w: Tensor) -> Tensor:  # as transformers' LlamaRMSNorm
        wide = x.float()
        return w * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)

    found = [
        Work("rms_norm", [x, w], {"eager": rms_eager, "hf_zero": lambda x, w: rms_norm(x, w, 1e-6)},
        5 * one),
        Work("layer_norm", [x, w, b], {
            "eager": lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b, 1e-5), "hf_zero": lambda x,
            w, b: layer_norm(x, w, b, 1e-5),
        }, 5 * one),
        Work("add_layer_norm", [x, r, w, b], {
            "eager": lambda x, r, w, b: F.layer_norm(x + r, x.shape[-1:], w, b, 1e-5),
            "hf_zero": lambda x, r, w, b: layer_norm_of_sum(x, r, w, b, 1e-5),
        }, 7 * one),
    ]  # fmt: skip
    if liger() is not None:
        from liger_kernel.ops.layer_norm import LigerLayerNormFunction
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction

        found[0].contenders["liger"] = lambda x, w: LigerRMSNormFunction.apply(x, w, 1e-6)
        found[1].contenders["liger"] = lambda x, w, b: LigerLayerNormFunction.apply(x, w, b, 1e-5)
    return found


def activations(device: str, small: bool) -> list[Work]:
    from hf_zero.ops.activations import geglu, gelu, swiglu

    rows, width = (64, 256) if small else (16384, 8192)
    gate, up, bias = tensor(device, rows, width), tensor(device, rows, width), tensor(device, width)
    one = rows * width
    found = [
        Work(
            "swiglu", [gate, up], {"eager": lambda g, u: F.silu(g) * u, "hf_zero": swiglu}, 8 * one
        ),
        Work(
            "geglu",
            [gate, up],
            {"eager": lambda g, u: F.gelu(g, approximate="tanh") * u, "hf_zero": geglu},
            8 * one,
        ),
        Work(
            "bias_gelu",
            [gate, bias],
            {"eager": lambda x, b: F.gelu(x + b), "hf_zero": gelu},
            5 * one,
        ),
    ]
    if liger() is not None:
        from liger_kernel.ops.geglu import LigerGELUMulFunction
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction

        found[0].contenders["liger"] = LigerSiLUMulFunction.apply
        found[1].contenders["liger"] = LigerGELUMulFunction.apply
    return found


def rotary(device: str, small: bool) -> list[Work]:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    from hf_zero.ops.rotary import rotary as fused

    rows, heads, kv, length, size = (1, 4, 2, 64, 32) if small else (4, 32, 8, 4096, 64)
    q = tensor(device, rows, length, heads, size).transpose(1, 2)
    k = tensor(device, rows, length, kv, size).transpose(1, 2)
    angle = torch.outer(
        torch.arange(length, device=device),
        1e4 ** (-torch.arange(0, size, 2, device=device) / size),
    ).repeat(1, 2)[None]
    cos, sin = angle.cos().bfloat16(), angle.sin().bfloat16()
    contenders: dict[str, Contender] = {"eager": apply_rotary_pos_emb, "hf_zero": fused}
    if liger() is not None:
        from liger_kernel.ops.rope import LigerRopeFunction

        contenders["liger"] = LigerRopeFunction.apply
    return [Work("rotary", [q, k], contenders, 4 * (q.numel() + k.numel()), rest=[cos, sin])]


def losses(device: str, small: bool) -> list[Work]:
    from hf_zero.ops.chunked_head import rows_of_a_chunk
    from hf_zero.ops.deferred.chunks import SummedLoss

    rows, width, words = (16384, 2048, 128256) if device == "cuda" else (4096, 512, 32000)
    if small:
        rows, width, words = 64, 32, 500
    hidden, weight = tensor(device, rows, width), tensor(device, words, width, scale=0.02)
    labels = torch.randint(0, words, (rows,), device=device)

    def eager(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy((hidden @ weight.t()).float(), labels)

    def fused(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        size = rows_of_a_chunk(rows, words, hidden.element_size(), hidden.device)
        plain = lambda hidden, weight, _: eager(hidden, weight, labels) * rows  # noqa: E731
        numbers = (-100, 0.0, 0.0, 1.0, size)
        total: Tensor = SummedLoss.apply(plain, numbers, labels, hidden, weight, None)
        return total / rows

    contenders: dict[str, Contender] = {"eager": eager, "hf_zero": fused}
    if liger() is not None:
        from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

        contenders["liger"] = lambda h, w, y: LigerFusedLinearCrossEntropyFunction.apply(h, w, y)[0]
    moved = 2 * (hidden.numel() + weight.numel())
    return [
        Work(
            "linear_cross_entropy",
            [hidden, weight],
            contenders,
            moved,
            6 * rows * width * words,
            rest=[labels],
        )
    ]


FAMILIES = {
    "norms": norms,
    "activations": activations,
    "rotary": rotary,
    "losses": losses,
}


def first(outputs: Any) -> list[Tensor]:
    return (
        [outputs]
        if isinstance(outputs, Tensor)
        else [one for one in outputs if isinstance(one, Tensor) and one.is_floating_point()]
    )


def forward_backward(
    work: Work, run: Contender, towards: list[Tensor] | None = None
) -> tuple[list[Tensor], list[Tensor]]:
    leaves = [one.detach().requires_grad_() for one in work.floats]
    outputs = first(run(*leaves, *work.rest))
    given = towards if towards is not None else [torch.ones_like(one) for one in outputs]
    return outputs, list(torch.autograd.grad(outputs, leaves, given))


def off(
    work: Work, run: Contender, want: tuple[list[Tensor], list[Tensor]], towards: list[Tensor]
) -> float:
    """The largest distance, relative in norm, of an output or gradient from the same in fp32."""
    outputs, gradients = forward_backward(
        work, run, [one.to(out.dtype) for one, out in zip(towards, first_of(work, run))]
    )
    return max(
        float((have.float() - exact).norm() / exact.norm().clamp(min=1e-30))
        for have, exact in zip([*outputs, *gradients], [*want[0], *want[1]])
    )


def first_of(work: Work, run: Contender) -> list[Tensor]:
    with torch.no_grad():
        return first(run(*work.floats, *work.rest))


def exact(work: Work) -> tuple[tuple[list[Tensor], list[Tensor]], list[Tensor]]:
    """The operation in fp32 by eager torch, and the gradients given to its outputs."""
    wide = Work(
        work.name, [one.float() for one in work.floats], work.contenders, work.moved, rest=work.rest
    )
    generator = torch.Generator(device=work.floats[0].device).manual_seed(1)
    towards = [
        torch.randn(one.shape, device=one.device, generator=generator)
        for one in first_of(wide, wide.contenders["eager"])
    ]
    return forward_backward(wide, wide.contenders["eager"], towards), towards


class Clock:
    """Seconds of a call, after a flush of the cache: CUDA events on a GPU, the CPU time of all
    threads elsewhere.
    """

    def __init__(self, device: str) -> None:
        self.on_gpu = device == "cuda"
        self.scratch = torch.empty(2**27 if self.on_gpu else 2**20, dtype=torch.int8, device=device)

    def __call__(self, call: Callable[[], Any]) -> float:
        self.scratch.zero_()
        if not self.on_gpu:
            begun = time.process_time()
            call()
            return time.process_time() - begun
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(BUSY)  # the host launches all of it meanwhile
        begin.record()
        call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3


def ceilings(clock: Clock, device: str, repeats: int) -> tuple[float, float]:
    """Bytes a second of a copy, read and written; FLOPs a second of a bf16 matrix product."""
    size = 2**30 if device == "cuda" else 2**24
    a, b = (
        torch.empty(size, dtype=torch.int8, device=device),
        torch.ones(size, dtype=torch.int8, device=device),
    )
    side = 8192 if device == "cuda" else 256
    m = tensor(device, side, side)
    for call in (lambda: a.copy_(b), lambda: m @ m):
        call()
    copy = statistics.median(clock(lambda: a.copy_(b)) for _ in range(repeats))
    product = statistics.median(clock(lambda: m @ m) for _ in range(repeats))
    return 2 * size / copy, 2 * side**3 / product


def peak(call: Callable[[], Any], on_gpu: bool) -> float | None:
    """GiB above what was there before."""
    if not on_gpu:
        return None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def measure(
    work: Work, clock: Clock, repeats: int, limits: tuple[float, float]
) -> list[dict[str, Any]]:
    contenders = {**work.contenders}
    if clock.on_gpu:
        contenders["compile"] = torch.compile(work.contenders["eager"], dynamic=False)
    want, towards = exact(work)
    ready: dict[str, tuple[Callable[[], Any], float]] = {}
    for who, run in contenders.items():
        wrong = off(work, run, want, towards)
        # Two roundings of a sum in bf16 are no fault: eager torch shows how far they go.
        if wrong > max(BOUND, 1.5 * (ready["eager"][1] if "eager" in ready else 0.0)):
            print(f"{work.name}: {who} is off by {wrong:.2e}, so it is not timed", flush=True)
            continue
        given = [one.to(out.dtype) for one, out in zip(towards, first_of(work, run))]
        ready[who] = (lambda run=run, given=given: forward_backward(work, run, given), wrong)
    del want
    for call, _ in ready.values():
        call(), call()
    times: dict[str, list[float]] = {who: [] for who in ready}
    for _ in range(repeats):
        for who, (call, _) in ready.items():
            times[who].append(clock(call))
    moved = 2 * work.moved
    floor = max(moved / limits[0], work.flops / limits[1])
    rows = []
    for who, (call, wrong) in ready.items():
        taken = statistics.median(times[who])
        rows.append({
            "operation": work.name, "who": who, "shapes": [list(one.shape) for one in work.floats],
            "s": taken, "gb_s": moved / taken / 1e9,
            "tflops": work.flops / taken / 1e12, "of_the_floor": floor / taken, "off": wrong,
            "peak_gib": peak(call, clock.on_gpu),
        })  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", default="", help="names of operations or families, separated by commas"
    )
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--small", action="store_true", help="small shapes: whether it runs, not how fast"
    )
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    wanted = {name for name in chosen.only.split(",") if name}
    clock = Clock(chosen.device)
    limits = ceilings(clock, chosen.device, chosen.repeats)
    facts = {
        "at": datetime.datetime.now().isoformat(timespec="seconds"), "copy_gb_s": limits[0] / 1e9,
        "matmul_tflops": limits[1] / 1e12,
        "device": torch.cuda.get_device_name() if clock.on_gpu else platform.processor(),
        **versions(*VERSIONS),
    }  # fmt: skip
    print(f"copy {limits[0] / 1e9:.0f} GB/s, bf16 product {limits[1] / 1e12:.0f} TFLOP/s")
    print(
        "| operation | contender | ms | GB/s | TFLOP/s | of the floor | peak GiB | off |\n| --- | "
        "--- | --- | --- | --- | --- | --- | --- |"
    )
    for family, make in FAMILIES.items():
        for work in make(chosen.device, chosen.small):
            if wanted and not wanted & {family, work.name}:
                continue
            for row in measure(work, clock, chosen.repeats, limits):
                print(f"| {row['operation']} | {row['who']} | {row['s'] * 1e3:.3f} | "
                      f"{row['gb_s']:.0f} | {row['tflops']:.0f} | "
                      f"{row['of_the_floor']:.2f} | {row['peak_gib'] or 0:.2f} "
                      f"| {row['off']:.1e} |", flush=True)  # fmt: skip
                if chosen.out:
                    chosen.out.mkdir(parents=True, exist_ok=True)
                    with (chosen.out / "kernels.jsonl").open("a") as file:
                        file.write(json.dumps({**row, **facts}) + "\n")


if __name__ == "__main__":
    main()
