"""Connections of gloo that an engine makes, counted by kind of engine and number of ranks; what
remains of them, of descriptors and of threads after its end; values that it leaves sharded; and
requests to the job's store at a start, in steps and in a save.
"""

from __future__ import annotations

import gc
import os
import socket
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hf_zero.distributed.world_group import get_world_group
from hf_zero.errors import PartitionError
from hf_zero.planning.simulation.store_load import store_load
from tests.helpers.engines import config_of, start
from tests.helpers.leftovers import await_threads, held_of_the_job, working
from tests.helpers.models import Stack, features, seeded
from tests.helpers.processes import run_processes
from tests.helpers.training import adamw

# Meshes of connections between all ranks: over replicas, gloo's own collectives of gathers and of
# reductions have no common order, and need a group each. The other messages have tags.
CASES: dict[str, tuple[int, dict[str, Any], int]] = {
    "stage 0": (0, {}, 2),
    "stage 1": (1, {}, 1),
    "stage 3": (3, {}, 1),
    "updates of offloaded state": (2, {"offload_optimizer": {"device": "cpu"}}, 1),
    "gathers in two hops": (3, {"mics_hierarchical_params_gather": True}, 1),
    "secondary shards": (3, {"zero_hpz_partition_size": 2}, 1),
}


def connections() -> int:
    """Return the number of connections of this process to other ranks, without those that come and
    go at times of their own: to the store, from ranks that a store in this process serves, and the
    probes of heartbeats, which are no streams.
    """
    count, store = 0, int(os.environ["MASTER_PORT"])
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed by now, or connected to nothing
            if not stat.S_ISSOCK(os.fstat(int(descriptor)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(descriptor))) as connection:
                ends = connection.getpeername(), connection.getsockname()
                is_stream = connection.type == socket.SOCK_STREAM
                count += is_stream and all(
                    isinstance(end, tuple) and end[1] != store for end in ends
                )
    return count


def remaining(before: int) -> int:
    """Return the number of connections beside ``before``, once gloo's threads have closed those of
    engines that have ended.
    """
    until = time.monotonic() + 60
    while connections() > before and time.monotonic() < until:
        time.sleep(0.01)
    return connections() - before


def counts(rank: int) -> dict[str, tuple[int, int, dict[str, int], dict[str, int], bool]]:
    os.environ["LOCAL_WORLD_SIZE"] = "2"  # nodes of two ranks
    get_world_group()
    everything, others, before = {}, working(), connections()
    for name, (stage, section, _) in CASES.items():
        dist.barrier()
        held = held_of_the_job()
        model = seeded(lambda: Stack(3))
        config = config_of(stage, zero_optimization={"stage": stage, **section})
        engine = start(model, adamw(model), config)
        for step in range(2):
            engine.backward(engine(features(0, step, rank)).square().mean())
            engine.step()
        during, weights = connections(), engine.state_dict()
        dist.barrier()  # a rank that destroys its engine closes its ends of the connections
        engine.destroy()
        del engine
        await_threads(others)
        dist.barrier()
        remains = remaining(before)
        left = held_of_the_job()
        # Another engine takes the values over.
        engine = start(model, adamw(model), config_of(3))
        same = all(torch.equal(weights[key], value) for key, value in engine.state_dict().items())
        engine.destroy()
        del engine, model
        gc.collect()
        await_threads(others)
        everything[name] = (during - before, max(remains, remaining(before)), held, left, same)
    return everything


REQUESTS = ("set", "get", "add", "append", "compare_set", "check", "multi_get", "multi_set", "wait")


def count_requests() -> Counter[str]:
    """Count the requests of this process from now on, by thread; not those of torch's native
    code.
    """
    asked = Counter[str]()

    def counted(request: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(request)
        def count(*args: Any) -> Any:
            asked[threading.current_thread().name] += 1
            return request(*args)

        return count

    for kind in (dist.Store, dist.PrefixStore, dist.TCPStore):
        for name in REQUESTS:
            if name in vars(kind):
                setattr(kind, name, counted(vars(kind)[name]))
    return asked


def descriptors_of_the_job(rank: int) -> tuple[int, int]:
    """Return how many file descriptors the job's first engine and three more leave behind."""
    dist.barrier()
    counts, others, before = [len(os.listdir("/proc/self/fd"))], working(), connections()
    for engines in (1, 3):
        for _ in range(engines):
            model = seeded(lambda: Stack(1))
            engine = start(model, adamw(model), config_of(3))
            engine.destroy()
            del engine, model
            gc.collect()
        others |= {each for each in working() if each.name in ("hf_zero-posts", "hf_zero-watch")}
        await_threads(others)
        dist.barrier()
        assert remaining(before) == 0
        counts.append(len(os.listdir("/proc/self/fd")))
    return counts[1] - counts[0], counts[2] - counts[1]


def test_all_engines_of_a_job_leave_one_connection_to_its_store() -> None:
    """By which a rank tells the others of its end; the store has its other end."""
    for found in run_processes(3, descriptors_of_the_job, timeout=580):
        assert found == (1, 0)


def requests(rank: int, folder: Path) -> dict[str, int]:
    asked, found = count_requests(), dict[str, int]()
    get_world_group()
    found["job"] = asked.total()

    def note(what: str) -> None:
        dist.barrier()
        found[what] = asked.pop(threading.main_thread().name, 0)

    note("job alone")
    model = seeded(lambda: Stack(3))
    engine = start(model, adamw(model), config_of(3))
    note("engine")
    for step in range(4):
        engine.backward(engine(features(0, step, rank)).square().mean())
        engine.step()
        note("first step" if not step else f"step {step}")
    engine.save_checkpoint(str(folder))
    note("save")
    engine.load_checkpoint(str(folder))
    note("load")
    engine.destroy()
    return found


def test_a_start_asks_the_store_little_and_steps_and_saves_nothing(tmp_path: Path) -> None:
    """Of the training thread. The watchdog's asks while a wait lasts (test_store_requests.py)."""
    for world in (2, 4):
        answers = run_processes(world, requests, tmp_path / str(world), timeout=580)
        for rank, found in enumerate(answers):
            who = f"rank {rank} of {world}"
            assert found["job"] == 3, f"{who}: its number, its first post, its process"
            assert found["engine"] == (rank == 0), f"{who}: the number of holders, once"
            names = ("step 1", "step 2", "step 3", "save", "load")
            assert [found[name] for name in names] == [0] * 5, who
        sent = sum(found[name] for found in answers for name in ("job", "engine"))
        restarted = sent + sum(found["load"] for found in answers)
        load = store_load(world, rate=10.0)
        assert (load.start, load.restart, load.start_seconds) == (sent, restarted, sent / 10), world


def test_an_engine_connects_ranks_once_and_closes_its_connections():
    for world in (2, 4):
        for rank, answers in enumerate(run_processes(world, counts, timeout=580)):
            for name, (made, remain, before, after, same) in answers.items():
                who = f"{name}, rank {rank} of {world}"
                assert made == CASES[name][2] * (world - 1), who
                assert remain == 0 and same, who
                for what in ("file descriptors", "threads", "process groups"):
                    assert after[what] <= before[what], f"{who}: {what}"


def steps_without_a_group(rank: int, stage: int) -> None:
    """Train, destroy the process group, and go on."""
    model = seeded(lambda: Stack(3))
    engine = start(model, adamw(model), config_of(stage))

    def step(number: int) -> None:
        engine.backward(engine(features(0, number, rank)).square().mean())
        engine.step()

    step(0)
    dist.destroy_process_group()
    with pytest.raises(PartitionError, match="destroy_process_group"):
        step(1)
    engine.destroy()
    # the end of this process destroys a group
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def test_a_step_after_the_end_of_the_process_group_is_refused() -> None:
    for stage in (1, 3):
        run_processes(2, steps_without_a_group, stage)
