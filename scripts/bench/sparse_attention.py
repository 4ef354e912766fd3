"""Block-sparse attention beside dense flash attention: forward and backward, 4k to 32k tokens, a
BigBird-like layout of blocks of 64.

    python scripts/bench/sparse_attention.py [--lengths 4096,8192,16384,32768] [--tokens 32768]
    [--flex] [--sweep] [--out scripts/bench/results] python scripts/bench/sparse_attention.py --dry
    # tiny, on the CPU, by the reference: is the script right?

Contenders: torch's flash and cuDNN attention over all tokens, FlexAttention compiled with the same
layout (``--flex``), and hf-zero, eager as it is called. The batch is ``--tokens`` divided by the
length. Each round times every contender once, with CUDA events around forward and backward
together, after the L2 cache was written over; a figure is the median of the rounds. Before anything
is timed, outputs and gradients are compared: hf-zero with torch's attention under the layout's
mask, dense contenders with hf-zero's dense layout, FlexAttention with its sparse one. FLOPs count
the tiles of the layout (forward 4, backward 10 times tile² · width). ``--sweep`` times hf-zero's
kernels with other warps and stages, to choose kernels/gpu's table by. Raw rows with versions go to
standard output, and to OUT as JSON lines.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import itertools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

from hf_zero.ops import dispatch
from hf_zero.ops.sparse_attention import (
    BigBirdSparsityConfig,
    DenseSparsityConfig,
    SparsityConfig,
    sparse_attention,
)

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
TOLERANCE = 2e-2
BUSY = 4_000_000  # cycles, some 2 ms
MASKED = 16_384  # tokens up to which the layout's mask is written out to be compared with


def dense(backend: SDPBackend) -> Attend:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(backend):
            return sdpa(q, k, v)

    return attend


def flex(config: SparsityConfig, length: int, device: torch.device) -> Attend:
    """FlexAttention with the layout as its BlockMask."""
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    layout = config.make_layout(length)[:1].to(device, torch.int32)[None]  # [1, 1, blocks, blocks]
    counts = layout.sum(-1, dtype=torch.int32)
    indices = layout.argsort(dim=-1, descending=True, stable=True).to(torch.int32)
    none = torch.zeros_like(counts)
    blocks = layout[0, 0].bool()

    def inside(b: Any, h: Any, row: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
        return blocks[row // config.block, column // config.block]

    mask = BlockMask.from_kv_blocks(
        none,
        torch.zeros_like(indices),
        counts,
        indices,
        BLOCK_SIZE=config.block,
        mask_mod=inside,
        seq_lengths=(length, length),
    )
    return functools.partial(torch.compile(flex_attention), block_mask=mask)


def both(attend: Attend, leaves: list[torch.Tensor], grad: torch.Tensor) -> list[torch.Tensor]:
    out = attend(*leaves)
    return [out, *torch.autograd.grad(out, leaves, grad)]


def compared(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    """The largest relative difference (norm over norm) of output and gradients."""
    return max(
        ((a.float() - b.float()).norm() / b.float().norm()).item() for a, b in zip(ours, theirs)
    )


def masked(
    config: SparsityConfig,
    length: int,
    leaves: list[torch.Tensor],
    grad: torch.Tensor,
    ours: list[torch.Tensor],
) -> float:
    """The difference from torch's attention under the mask of the layout, in the first head of
    the first sequence.
    """
    mask = config.make_layout(length)[0].bool().to(grad.device)
    mask = mask.repeat_interleave(config.block, 0).repeat_interleave(config.block, 1)
    first = [x.detach()[:1, :1].requires_grad_() for x in leaves]
    return compared(
        [x[:1, :1] for x in ours],
        both(lambda q, k, v: sdpa(q, k, v, attn_mask=mask), first, grad[:1, :1]),
    )


def milliseconds(run: Callable[[], Any], device: torch.device, scratch: torch.Tensor) -> float:
    scratch.zero_()
    if device.type != "cuda":
        begun = time.perf_counter()
        run()
        return (time.perf_counter() - begun) * 1e3
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(BUSY)  # the host launches all of it meanwhile
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def contenders(
    config: SparsityConfig, length: int, device: torch.device, with_flex: bool
) -> dict[str, Attend]:
    found: dict[str, Attend] = {"hf-zero": lambda q, k, v: sparse_attention(q, k, v, config)}
    if device.type == "cuda":
        found |= {
            "flash": dense(SDPBackend.FLASH_ATTENTION),
            "cudnn": dense(SDPBackend.CUDNN_ATTENTION),
        }
        if with_flex:
            found["flex"] = flex(config, length, device)
    else:
        found["math"] = dense(SDPBackend.MATH)
    return found


def measure(length: int, args: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    batch = max(1, args.tokens // length)
    config = BigBirdSparsityConfig(args.heads, 64, num_random_blocks=args.random)
    q, k, v, grad = (
        torch.randn(batch, length, args.heads, args.width, device=device).bfloat16().transpose(1, 2)
        for _ in range(4)
    )
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    scratch = torch.empty(args.scratch, dtype=torch.int8, device=device)
    found = contenders(config, length, device, args.flex)

    whole = DenseSparsityConfig(args.heads, 64)
    checks = {
        "dense": both(lambda *x: sparse_attention(*x, whole), leaves, grad),
        "sparse": both(found["hf-zero"], leaves, grad),
    }
    differences = {
        "hf-zero": masked(config, length, leaves, grad, checks["sparse"])
        if length <= MASKED
        else None
    }
    for name in list(found):
        try:
            if name != "hf-zero":
                differences[name] = compared(
                    both(found[name], leaves, grad), checks["sparse" if name == "flex" else "dense"]
                )
        except RuntimeError as error:
            print(f"{name} does not run here: {str(error).splitlines()[0]}", flush=True)
            del found[name]
    del checks
    wrong = {
        name: value
        for name, value in differences.items()
        if value is not None and value > TOLERANCE
    }
    if wrong or dispatch.broken():
        raise SystemExit(
            f"not timed, because results differ: {wrong}, kernels that do not "
            f"compile: {dispatch.broken()}"
        )

    times: dict[str, list[float]] = {name: [] for name in found}
    phases: dict[str, list[float]] = {name: [] for name in found}
    for _ in range(args.rounds + 2):
        for name, attend in found.items():
            times[name].append(
                milliseconds(lambda a=attend: both(a, leaves, grad), device, scratch)
            )
            with torch.no_grad():
                phases[name].append(milliseconds(lambda a=attend: a(*leaves), device, scratch))
    tiles = int(config.make_layout(length)[0].sum())
    rows = []
    for name in found:
        median, forward = (statistics.median(values[2:]) for values in (times[name], phases[name]))
        pairs = tiles if name in ("hf-zero", "flex") else (length // 64) ** 2
        flops = 14 * pairs * 64 * 64 * args.width * args.heads * batch
        rows.append(
            {
                "case": "sparse_attention",
                "contender": name,
                "length": length,
                "batch": batch,
                "heads": args.heads,
                "width": args.width,
                "density": round(tiles / (length // 64) ** 2, 4),
                "forward_ms": round(forward, 4),
                "forward_backward_ms": round(median, 4),
                "fastest_ms": round(min(times[name][2:]), 4),
                "tflops": round(flops / median / 1e9, 1),
                "difference": differences[name],
            }
        )
    ours = next(row for row in rows if row["contender"] == "hf-zero")
    best = min(
        (
            row["forward_backward_ms"]
            for row in rows
            if row["contender"] in ("flash", "cudnn", "math")
        ),
        default=None,
    )
    ours["times_the_best_dense"] = round(best / ours["forward_backward_ms"], 2) if best else None
    return rows


def sweep(length: int, args: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """hf-zero alone, one table at a time with other settings."""
    from hf_zero.ops.triton_kernels import sparse_attention_tiles as tables

    batch = max(1, args.tokens // length)
    config = BigBirdSparsityConfig(args.heads, 64, num_random_blocks=args.random)
    q, k, v, grad = (
        torch.randn(batch, length, args.heads, args.width, device=device).bfloat16().transpose(1, 2)
        for _ in range(4)
    )
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    scratch = torch.empty(args.scratch, dtype=torch.int8, device=device)
    rows = []
    for table, (warps, stages) in itertools.product(
        ("FORWARD", "QUERIES", "KEYS"), itertools.product((4, 8), (1, 2, 3, 4))
    ):
        settings = getattr(tables, table)
        before = settings[args.width]
        settings[args.width] = tables.Settings(warps, stages)
        try:
            taken = [
                milliseconds(
                    lambda: both(lambda *x: sparse_attention(*x, config), leaves, grad),
                    device,
                    scratch,
                )
                for _ in range(args.rounds)
            ]
            rows.append(
                {
                    "case": "sparse_attention_sweep",
                    "length": length,
                    "table": table,
                    "warps": warps,
                    "stages": stages,
                }
            )
            rows[-1]["forward_backward_ms"] = round(statistics.median(taken[2:]), 4)
        finally:
            settings[args.width] = before
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", default="4096,8192,16384,32768")
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--random", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--scratch", type=int, default=256 << 20)
    parser.add_argument("--flex", action="store_true")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.dry:
        args.lengths, args.tokens, args.heads, args.width, args.rounds, args.scratch = (
            "256,512",
            512,
            2,
            16,
            3,
            1024,
        )
    device = torch.device("cpu" if args.dry else "cuda")
    torch.manual_seed(0)
    about: dict[str, Any] = {"torch": torch.__version__, "date": datetime.date.today().isoformat()}
    if device.type == "cuda":
        import triton

        about |= {"triton": triton.__version__, "device": torch.cuda.get_device_name()}
    rows = []
    for length in map(int, args.lengths.split(",")):
        for row in (sweep if args.sweep else measure)(length, args, device):
            rows.append({**row, **about})
            print(json.dumps(rows[-1]), flush=True)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        path = args.out / f"sparse_attention-{about['date']}.jsonl"
        with path.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)


if __name__ == "__main__":
    main()
