"""The process harness: one launch for results, one for a failure, one for a hang."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from hf_zero.distributed.collective_log import CollectiveStats
from hf_zero.distributed.collectives import DimGroups, MeshDim
from hf_zero.distributed.watchdog import Watchdog
from tests.helpers.processes import run_processes, say
from tests.helpers.ranks import RankFailed, RanksHung


def point_to_point(rank, offset):
    value = torch.full((3,), float(rank + offset))
    other = torch.empty(3)
    works = [dist.isend(value, 1 - rank), dist.irecv(other, 1 - rank)]
    for work in works:
        work.wait()
    return other.tolist()


def one_fails(rank):
    if rank == 1:
        raise ValueError("bad shard")
    dist.barrier()


def one_waits(rank):
    say(f"rank {rank} is here")
    if rank == 0:
        time.sleep(1000)


def between_hosts(rank):
    """Exchange numbers between the hosts of a device's ranks; return the gathered ones and the
    maximum.
    """
    groups = DimGroups(None, None, "nccl", torch.device("cpu"))
    axis = MeshDim(range(3), rank, groups, CollectiveStats(), Watchdog(enabled=False))
    axis._follows = torch.device("cuda")  # whose messages no backend here takes
    assert axis.host_messages_on == torch.device("cpu")
    whole = torch.empty(3, 2, dtype=torch.int64)
    axis.all_gather([(whole.view(-1), torch.tensor([rank, 7 * rank]))], "numbers").wait()
    return whole, axis.maximum_on_hosts([rank, -rank, int(rank == 1)], "numbers")


def test_hosts_tell_each_other_numbers_beside_a_device():
    for whole, largest in run_processes(3, between_hosts, timeout=300):
        assert whole.tolist() == [[0, 0], [1, 7], [2, 14]] and largest == [2, 0, 1]


def test_processes_answer_in_order():
    assert run_processes(2, point_to_point, 1, timeout=300) == [[2.0] * 3, [1.0] * 3]


def test_a_failure_in_a_process_is_raised_with_its_rank():
    with pytest.raises(RankFailed, match=r"rank 1 of 2 failed:[\s\S]*bad shard"):
        run_processes(2, one_fails, timeout=300)


@pytest.mark.long
def test_a_process_that_hangs_is_shown_and_ended():
    with pytest.raises(
        RanksHung, match=r"ranks \[0\] did not return[\s\S]*rank 0 is here[\s\S]*one_waits"
    ):
        run_processes(2, one_waits, timeout=25)
