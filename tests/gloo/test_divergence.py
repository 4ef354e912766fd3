"""Ranks that part ways, hang or go on after an exception, and hosts that are unreachable, on real
gloo processes: each rank ends with an error that names the others' places, and none is aborted
natively. The process group is made anew for each kind: one launch tries many.
"""

from __future__ import annotations

import os
import re
import socket
import struct
import tempfile
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import hf_zero
from hf_zero.distributed import host_heartbeats
from hf_zero.distributed.collective_log import PendingCollective
from hf_zero.distributed.world_group import get_world_group
from hf_zero.errors import PartitionError, RankMismatchError
from tests.distributed.test_host_heartbeats import threads
from tests.helpers import tensor_parallel as models
from tests.helpers.backends import join_again
from tests.helpers.broken_stacks import Armed
from tests.helpers.cells import in_one_item
from tests.helpers.engines import config_of, start
from tests.helpers.models import features, seeded
from tests.helpers.processes import run_processes, say
from tests.helpers.stacks import run_steps, squared, stack
from tests.helpers.training import At, Plan, adamw, plain_sgd
from tests.parallel import expert_cases, pipelines

ODD = 1  # the rank that parts
COLLECTIVES = (
    r"all-gather|reduce-scatter|all-reduce|exchange|broadcast|barrier|gather of|end of "
    r"the pass|agreement|backward after|step \d"
)
LIMIT = 100  # seconds of the configuration's timeout: an error that comes by it names it


class Job:
    """A training on one rank, and what its script may do at the wrong time."""

    def __init__(self, rank, stage):
        self.rank, self.model, self.at = rank, seeded(Armed), 0
        config = config_of(stage, Plan(clip=1.0), timeout=LIMIT)
        self.engine = start(self.model, plain_sgd(self.model), config)

    def backward(self):
        self.at += 1
        self.engine.backward(squared(self.engine, At(self.at, 0, self.rank)))

    def step(self):
        self.backward()
        self.engine.step()

    def evaluate(self):
        self.engine.eval()
        with torch.no_grad():
            for _ in range(2):
                self.engine(features(self.at, 0, self.rank))
        self.engine.train()

    def save(self):
        with tempfile.TemporaryDirectory() as folder:
            self.engine.save_checkpoint(folder)

    def raise_and_go_on(self):
        self.model.at = "backward"
        with pytest.raises(ArithmeticError):
            self.backward()
        self.model.at = ""
        self.engine.zero_grad()

    def restart_a_window(self):
        with self.engine.no_sync():
            self.backward()
        self.engine.zero_grad()

    def set_a_weight(self):
        with hf_zero.GatheredParameters([self.model.head.weight], modifier_rank=0):
            pass

    def destroy(self):
        self.engine.destroy()
        time.sleep(4)  # and does not come back
        raise RankMismatchError("over")


# what ODD does, and at which stages
PARTED = {
    "more micro-batches": (Job.backward, (0, 2, 3)),
    "evaluates": (Job.evaluate, (3,)),
    "saves": (Job.save, (0, 2, 3)),
    "sets a weight": (Job.set_a_weight, (0, 2, 3)),
    "restarts a window": (Job.restart_a_window, (0, 1)),
    "catches an error in backward": (Job.raise_and_go_on, (0, 2, 3)),
    "destroys its engine": (Job.destroy, (0, 2, 3)),
    "sends an object": (lambda job: get_world_group().broadcast_object("x", ODD), (0, 3)),
    "sends a tensor": (lambda job: get_world_group().broadcast(torch.ones(3), ODD), (0, 3)),
    "waits elsewhere": (lambda job: hf_zero.distributed.world_group.barrier(), (0, 2, 3)),
}
FAST = [
    ("more micro-batches", 2, 2),
    ("saves", 3, 2),
    ("restarts a window", 0, 2),
    ("restarts a window", 1, 2),
    ("catches an error in backward", 0, 2),
    ("sends an object", 3, 2),
    ("sends a tensor", 3, 2),
]
# name, stage, steps before ODD parts
ALL = [(name, stage, 2) for name, (_, stages) in PARTED.items() for stage in stages] + [
    ("sets a weight", 2, 0),
    ("waits elsewhere", 3, 0),
]


def part(rank, cases):
    """The text of each case's error."""
    told = []
    for number, (name, stage, steps) in enumerate(cases):
        say(f"{name} at stage {stage} after {steps} steps")
        join_again("gloo", f"case {number}")
        act, _ = PARTED[name]
        try:
            job = Job(rank, stage)
            for _ in range(steps):
                job.step()
            if rank == ODD:
                act(job)
            for _ in range(3):
                job.step()
            job.engine.destroy()
            told.append("nothing")
        except (RankMismatchError, PartitionError) as error:
            told.append(f"{type(error).__name__}: {error}")
        del job
    return told


def is_named(rank, text, others):
    """Whether the error of a rank names ODD and both places, or it is through and ODD knows."""
    places = len(re.findall(COLLECTIVES, text))
    named = f"rank {ODD}" in text and "which is the timeout" not in text
    enough = places >= (1 if "destroyed" in text else 2)
    through = text == "nothing" and f"which rank {rank} will never join" in others
    told = text.startswith("RankMismatchError") and named and enough
    return text == "RankMismatchError: over" or through or told


@pytest.mark.parametrize("cases", [FAST, pytest.param(ALL, marks=pytest.mark.long)], ids=len)
def test_ranks_that_part(cases):
    answers = run_processes(2, part, cases, timeout=590)
    wrong = [
        f"rank {rank} of {case}: {answers[rank][number]}"
        for number, case in enumerate(cases)
        for rank in range(2)
        if not is_named(rank, answers[rank][number], answers[1 - rank][number])
    ]
    assert not wrong, "\n".join(wrong)


HANGS = 1
SECONDS = 3  # the timeout: groups made before the engine would wait for half an hour
TOLD = "the others have raised"


def _hang(*_):
    if dist.get_rank() == HANGS:
        store = dist.distributed_c10d._get_default_store()
        store.wait([TOLD], timedelta(seconds=200))


def _train(rank, axis):
    if axis == "pipeline":
        model, keys = pipelines.pipeline(2, 2), {}
    else:
        model, keys = models.mixtral(), expert_cases.keys(2)
    config = pipelines.config(2, 1, timeout=SECONDS, **keys)
    engine, *_ = hf_zero.initialize(model=model, config=config, optimizer=pipelines.sgd)

    def step():
        if axis == "pipeline":
            engine.train_batch(iter(pipelines.batches(2)))
            return
        ids = torch.randint(3, 60, (2, 8), generator=torch.Generator().manual_seed(1))
        for _ in range(2):
            engine.backward(engine(input_ids=ids, labels=ids).loss)
            engine.step()

    step()
    last = [module for module in model.modules() if isinstance(module, torch.nn.Linear)][-1]
    last.register_forward_pre_hook(_hang)
    try:
        step()
    except RankMismatchError as error:
        return str(error)
    finally:
        dist.distributed_c10d._get_default_store().set(TOLD, "")
    return "no error"


@in_one_item(("expert", "pipeline"))
def test_the_timeout_of_the_configuration_holds_and_the_rank_that_hangs_is_named(axis):
    said = run_processes(2, _train, axis, timeout=200)[1 - HANGS]
    assert "which is the timeout" in said and f"rank {HANGS} on" in said, said
    assert f"{axis} " in said, said


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
    with watchdog.watching(PendingCollective("the other rank", required=(0,))):
        watchdog.sleep(300.0)  # until it learns through the store what rank 0 has found
    return counts, watchdog.verdict


def test_a_rank_that_waits_for_an_unreachable_host_names_it() -> None:
    pytest.importorskip("hf_zero._cpu")
    (counts, own), (_, other) = run_processes(2, train_on_two_hosts)
    assert counts == [0, 1, 0]
    cause = "rank 1 on worker-1 (127.0.0.1) is unreachable: no heartbeat of this host for 30 s"
    for told in (own, other):  # by the wait that it ends, or before that begins
        assert cause in told, told
