"""Plain collectives of torch between ranks, without hf-zero: ``python -m tests.nccl.collectives``,
with RANK and so on set. Prints a line of JSON for each and ends with 1 if a value is wrong.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed as dist

SECONDS = 60
SIZES = {"cuda": (1, 1000, 3_000_001), "cpu": (1, 1000, 30_001)}
Check = tuple[str, torch.Tensor, torch.Tensor]  # what, the values, those expected


def full(
    device: torch.device, dtype: torch.dtype, size: int, value: float, count: int = 1
) -> torch.Tensor:
    return torch.full((size * count,), value, device=device, dtype=dtype)


def reductions(device: torch.device, rank: int, world: int) -> Iterator[Check]:
    for dtype in (torch.float32, torch.bfloat16):
        for size in SIZES[device.type]:
            what = f"of {size} in {str(dtype).removeprefix('torch.')}"
            filled = partial(full, device, dtype, size)
            whole = filled(rank + 1.0)
            dist.all_reduce(whole)
            yield f"all-reduce {what}", whole, filled(world * (world + 1) / 2)
            gathered = filled(-1.0, world)
            dist.all_gather_into_tensor(gathered, filled(float(rank)))
            places = torch.arange(world, device=device).to(dtype)
            yield f"all-gather {what}", gathered, places.repeat_interleave(size)
            part = filled(-1.0)
            dist.reduce_scatter_tensor(part, places.repeat_interleave(size) + 1)
            yield f"reduce-scatter {what}", part, filled((rank + 1.0) * world)


def exchanges(device: torch.device, rank: int, world: int) -> Iterator[Check]:
    here = torch.arange(4.0 * world, device=device) + 100 * rank
    there = torch.empty_like(here)
    dist.all_to_all_single(there, here)
    own = torch.arange(4.0, device=device) + 4 * rank
    yield "all-to-all", there, torch.cat([own + 100 * peer for peer in range(world)])
    value = torch.full((5,), float(rank), device=device)
    dist.broadcast(value, world - 1)
    yield "broadcast", value, torch.full_like(value, world - 1.0)
    if world > 1:
        sent, received = torch.full_like(value, float(rank)), torch.empty_like(value)
        before, after = (rank - 1) % world, (rank + 1) % world
        messages = [dist.P2POp(dist.isend, sent, after), dist.P2POp(dist.irecv, received, before)]
        for work in dist.batch_isend_irecv(messages):
            work.wait()
        yield "send and receive", received, torch.full_like(value, float(before))


def communicators(device: torch.device, rank: int, world: int) -> Iterator[Check]:
    """Two communicators at work at once, on two streams of a GPU."""
    other = dist.new_group()
    first, second = (torch.ones(1 << 16, device=device) for _ in range(2))
    if device.type == "cuda":
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            pending = dist.all_reduce(first, group=other, async_op=True)
        second_pending = dist.all_reduce(second, async_op=True)
        with torch.cuda.stream(side):
            pending.wait()
        second_pending.wait()
        torch.cuda.current_stream().wait_stream(side)
    else:
        works = [dist.all_reduce(first, group=other, async_op=True)]
        works.append(dist.all_reduce(second, async_op=True))
        for work in works:
            work.wait()
    yield "two communicators", first + second, torch.full_like(first, 2.0 * world)
    halves = [list(range(start, world, 2)) for start in range(2)] if world > 2 else []
    for ranks in halves:
        group = dist.new_group(ranks)
        if rank in ranks:
            value = torch.ones(1000, device=device)
            dist.all_reduce(value, group=group)
            yield f"communicator of ranks {ranks}", value, torch.full_like(value, float(len(ranks)))


CHECKS: tuple[Callable[[torch.device, int, int], Iterator[Check]], ...] = (
    reductions,
    exchanges,
    communicators,
)


def main() -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        timeout=datetime.timedelta(seconds=SECONDS),
        device_id=device if on_gpu else None,
    )
    wrong = 0
    for check in CHECKS:
        for what, got, want in check(device, rank, world):
            right = torch.equal(got, want)
            wrong += not right
            print(json.dumps({"collective": what, "right": right}), flush=True)
    dist.destroy_process_group()
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
