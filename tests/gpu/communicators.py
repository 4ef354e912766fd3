"""Communicators that NCCL splits from the job's on one rank, which prints what they are: in a
process of its own, which a crash in torch would end.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.distributed as dist

from hf_zero.distributed import communicators, process_group

DEVICE = torch.device("cuda", 0)
LIMIT = timedelta(seconds=60)
KEYS = {"min_ctas": 1, "max_ctas": 4, "cta_policy": "efficiency"}


def made(high_priority: bool) -> dict[str, Any]:
    """What a communicator has, and the sums over it."""
    world = dist.group.WORLD
    assert world is not None
    before = world._get_backend(DEVICE).comm_split_count()
    options = communicators.nccl_options(KEYS, high_priority, LIMIT)
    group = communicators.make_group([[0]], 0, DEVICE, "nccl", LIMIT, options)
    used = group._get_backend(DEVICE).options
    value = torch.arange(8.0, device=DEVICE)
    whole, part = torch.empty_like(value), torch.empty_like(value)
    dist.all_reduce(value, group=group)
    dist.all_gather_into_tensor(whole, value, group=group)
    dist.reduce_scatter_tensor(part, whole, group=group)
    row = {
        "splits": world._get_backend(DEVICE).comm_split_count() - before,
        "high priority": used.is_high_priority_stream,
        **{name: getattr(used.config, name) for name in KEYS},
        "values": part.tolist(),
    }
    dist.destroy_process_group(group)
    return row


def main() -> None:
    torch.cuda.set_device(DEVICE)
    for job in range(2):  # a second one in the same process
        store = dist.HashStore()
        dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=DEVICE)
        for high_priority in (True, False):
            print(json.dumps({"job": job, **made(high_priority)}), flush=True)
        process_group.destroy_process_group()


if __name__ == "__main__":
    main()
