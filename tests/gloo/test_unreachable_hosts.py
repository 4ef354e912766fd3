"""Heartbeats between ranks of two hosts, and the loss of one; a link that is cut:
matrix/test_launching.py.
"""

from __future__ import annotations

import os
import socket
import struct

import pytest

from hf_zero.distributed import host_heartbeats
from hf_zero.distributed.collective_log import PendingCollective
from hf_zero.distributed.world_group import get_world_group
from hf_zero.errors import RankMismatchError
from tests.distributed.test_host_heartbeats import threads
from tests.helpers.engines import config_of, start
from tests.helpers.processes import run_processes
from tests.helpers.stacks import run_steps, stack
from tests.helpers.training import adamw

LIMIT = 300.0  # seconds for a launch: less than the timeout of the configuration


def train_on_two_hosts(rank: int) -> tuple[list[int], str]:
    """Return the threads that send heartbeats before, during and after an engine of a rank on a
    host of its own, and the error for the other host, whose loss is simulated.
    """
    os.environ.update(HF_ZERO_HOST=f"worker-{rank}", LOCAL_WORLD_SIZE="1")
    counts = [threads()]
    engines = []
    for _ in range(2):
        model = stack()
        engines.append(start(model, adamw(model), config_of(3, host_timeout=30)))
        run_steps(engines[-1], rank, [0])
    counts.append(threads())
    for engine in engines:
        engine.destroy()
    counts.append(threads())
    model = stack()
    engine = start(model, adamw(model), config_of(3, host_timeout=30))
    run_steps(engine, rank, [0])
    heartbeats = host_heartbeats._started[2]
    assert heartbeats is not None
    packet = struct.pack("!4I16s", 0x687A6231, 2, rank, 1 - rank, heartbeats._token)
    watchdog = get_world_group().watchdog
    if rank == 0:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
            other.sendto(packet, heartbeats._members[0][1:])
        with pytest.raises(RankMismatchError) as raised:
            run_steps(engine, rank, [1])
        return counts, str(raised.value)
    with watchdog.watching(PendingCollective("the other rank", needs=(0,))):
        watchdog.sleep(LIMIT)  # until it learns through the store what rank 0 has found
    return counts, watchdog.verdict


def test_a_rank_that_waits_for_an_unreachable_host_names_it() -> None:
    pytest.importorskip("hf_zero._cpu")
    (counts, own), (_, other) = run_processes(2, train_on_two_hosts)
    assert counts == [0, 1, 0]
    cause = "rank 1 on worker-1 (127.0.0.1) is unreachable: no heartbeat of this host for 30 s"
    for told in (own, other):  # by the wait that it ends, or before that begins
        assert cause in told, told
