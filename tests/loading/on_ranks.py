"""Many cases inside one launch of real processes; what each comes to, by name."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

import torch.distributed as dist

from tests.helpers.processes import run_processes, say

Case = Callable[[int, Path], None]
PATIENCE = 10.0  # seconds the other ranks get to fail in the same case


def run_cases(
    world: int,
    cases: Mapping[str, Case],
    folder: Path,
    timeout: float = 400.0,
    start: str = "forkserver",
) -> dict[str, str]:
    """Run each case on every rank: its traceback, or "" where it passed.

    A case that fails on some ranks alone ends the launch: the others may wait for it for ever.
    """
    return run_processes(world, _run, dict(cases), folder, timeout=timeout, start=start)[0]


def _run(rank: int, cases: dict[str, Case], folder: Path) -> dict[str, str]:
    import transformers

    transformers.logging.disable_progress_bar()
    store, world = dist.distributed_c10d._get_default_store(), dist.get_world_size()
    outcomes = {}
    for name, case in cases.items():
        say(name)
        dist.barrier()  # what one case leaves in the folder is there for the next
        outcomes[name] = ""
        try:
            case(rank, folder)
        except Exception:
            outcomes[name] = traceback.format_exc()
            store.add(f"failed/{name}", 1)
            deadline = time.monotonic() + PATIENCE
            while store.add(f"failed/{name}", 0) < world:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
    return outcomes
