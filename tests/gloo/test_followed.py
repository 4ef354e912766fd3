"""A backend whose waits return before its collectives are completed, as on a device: a hang is
found all the same, and its reason told.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from hf_zero.distributed import collectives
from hf_zero.errors import RankMismatchError
from tests.gloo.test_divergence import ODD, Job
from tests.helpers.backends import PLAIN, join_again
from tests.helpers.processes import run_processes


class LateWork:
    """A collective that a stream waits for, not the host."""

    def __init__(self, work: Any):
        self._work = work

    def wait(self) -> None:
        pass

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())


class LateHandle(collectives.Handle):
    def __init__(self, works: Any, *args: Any, **kwargs: Any):
        super().__init__([LateWork(work) for work in works], *args, **kwargs)


def leave(rank: int) -> str:
    join_again(PLAIN, "followed")
    job = Job(rank, 2)
    for _ in range(2):
        job.step()
    if rank == ODD:
        job.engine.mesh.close(groups=False)
        # its process is there, and connected, until the other one knows
        dist.distributed_c10d._get_default_store().wait(["known"], timedelta(seconds=200))
        return ""
    collectives.Handle, job.engine.mesh.shard._follows = LateHandle, collectives.CPU  # type: ignore[misc]
    with pytest.raises(RankMismatchError) as raised:
        for _ in range(2000):
            job.step()
            time.sleep(0.05)
    dist.distributed_c10d._get_default_store().set("known", "")
    return str(raised.value)


def test_a_rank_that_leaves_others_to_their_devices():
    said, _ = run_processes(2, leave, timeout=400)
    assert (
        f"rank {ODD} will never join: it has destroyed its engine" in said
        and "rank 0 waits for reduce-scatter of" in said
    ), said
