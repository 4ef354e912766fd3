"""Ranks that part ways on real gloo processes: each ends with an error that says where both are,
and none is aborted natively.

The process group is made anew for each kind, so that one launch tries many.
"""

import re
import tempfile
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import hf_zero
from hf_zero.errors import PartitionError, RankMismatchError
from tests.helpers.broken_stacks import Armed
from tests.helpers.engines import config_of, start
from tests.helpers.models import features, seeded
from tests.helpers.processes import run_processes, say
from tests.helpers.stacks import squared
from tests.helpers.training import At, Plan, plain_sgd

ODD = 1  # the rank that parts
COLLECTIVES = (
    r"all-gather|reduce-scatter|all-reduce|exchange|broadcast|barrier|gather of|end of "
    r"the pass|agreement|backward after|step \d"
)
LIMIT = 100  # seconds of the configuration's timeout: an error that comes by it names it


class Job:
    """A training on one rank, and what its script may do at the wrong time."""

    def __init__(self, rank, stage, accumulation=1):
        self.rank, self.model, self.at, self.accumulation = rank, seeded(Armed), 0, accumulation
        self.engine = start(
            self.model,
            plain_sgd(self.model),
            config_of(stage, Plan(accumulation=accumulation, clip=1.0), timeout=LIMIT),
        )

    def backward(self):
        self.at += 1
        self.engine.backward(squared(self.engine, At(self.at, 0, self.rank)))

    def step(self):
        for _ in range(self.accumulation):
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

    def raise_and_go_on(self, where):
        self.model.at = where
        with pytest.raises(ArithmeticError):
            self.backward()
        self.model.at = ""
        self.engine.zero_grad()


def more_micro_batches(job):
    job.backward()


def fewer_micro_batches(job):
    job.engine.set_gradient_accumulation_boundary(True)
    job.backward()
    job.engine.step()
    job.engine.set_gradient_accumulation_boundary(None)


def evaluates(job):
    job.evaluate()


def evaluates_then_saves(job):
    job.evaluate()
    job.save()


def saves(job):
    job.save()


def looks_at_a_weight(job):
    """The sum of a whole weight where the others sum one number: gloo aborts on that."""
    job.backward()
    for parameter in job.model.parameters():
        hf_zero.safe_get_full_fp32_param(parameter)


def sets_a_weight(job):
    with hf_zero.GatheredParameters([job.model.head.weight], modifier_rank=0):
        pass


def catches_an_error_in_forward(job):
    job.raise_and_go_on("forward")


def catches_an_error_in_backward(job):
    job.raise_and_go_on("backward")


def destroys_its_engine(job):
    job.engine.destroy()
    time.sleep(4)  # and does not come back
    raise RankMismatchError("over")


def waits_elsewhere(job):
    hf_zero.distributed.world_group.barrier()


PARTED = [
    (more_micro_batches, (0, 2, 3), 1),
    (fewer_micro_batches, (0, 2, 3), 2),
    (evaluates, (3,), 1),
    (evaluates_then_saves, (0, 2), 1),
    (saves, (0, 2, 3), 1),
    (looks_at_a_weight, (2, 3), 1),
    (sets_a_weight, (0, 2, 3), 1),
    (catches_an_error_in_forward, (3,), 1),
    (catches_an_error_in_backward, (0, 2, 3), 1),
    (destroys_its_engine, (0, 2, 3), 1),
    (waits_elsewhere, (0, 2, 3), 1),
]
Case = tuple[str, int, int, int]  # function, stage, accumulation, steps before ODD parts


def cases_of(steps):
    return [
        (fn.__name__, stage, accumulation, steps)
        for fn, stages, accumulation in PARTED
        for stage in stages
    ]


def part(rank, cases):
    """Run the cases on this rank; return the text of each case's error."""
    store, world = dist.distributed_c10d._get_default_store(), dist.get_world_size()
    told = []
    for number, (name, stage, accumulation, steps) in enumerate(cases):
        say(f"{name} at stage {stage} after {steps} steps")
        dist.destroy_process_group()
        own = dist.PrefixStore(f"case {number}", store)
        dist.init_process_group(
            "gloo", store=own, rank=rank, world_size=world, timeout=timedelta(seconds=200)
        )
        try:
            job = Job(rank, stage, accumulation)
            for _ in range(steps):
                job.step()
            if rank == ODD:
                globals()[name](job)
            for _ in range(3):
                job.step()
            job.engine.destroy()
            told.append("nothing")
        except (RankMismatchError, PartitionError) as error:
            told.append(f"{type(error).__name__}: {error}")
        del job
    return told


def check(ranks, cases, timeout):
    answers = run_processes(ranks, part, cases, timeout=timeout)
    wrong = []
    for number, (name, stage, _, steps) in enumerate(cases):
        for rank in range(ranks):
            text = answers[rank][number]
            where = f"rank {rank} of {name} at stage {stage} after {steps} steps: {text}"
            places = len(re.findall(COLLECTIVES, text))
            named = (
                f"rank {ODD}" in text
                and "which is the timeout" not in text
                and places >= (1 if "destroyed" in text else 2)
            )
            through = (
                text == "nothing"
                and f"which rank {rank} will never join"
                in answers[ODD if rank != ODD else 0][number]
            )
            if (
                text != "RankMismatchError: over"
                and not through
                and not (text.startswith("RankMismatchError") and named)
            ):
                wrong.append(where)
    assert not wrong, "\n".join(wrong)


FAST = [
    ("more_micro_batches", 2, 1, 2),
    ("saves", 3, 1, 2),
    ("catches_an_error_in_backward", 0, 1, 2),
]


def test_some_ranks_that_part():
    check(2, FAST, timeout=400)


BEFORE_THE_FIRST_STEP = [
    ("fewer_micro_batches", 3, 2, 0),
    ("more_micro_batches", 0, 1, 0),
    ("saves", 0, 1, 0),
    ("sets_a_weight", 2, 1, 0),
    ("waits_elsewhere", 3, 1, 0),
]
ONE_OF_THREE = [
    ("more_micro_batches", 0, 1, 2),
    ("saves", 2, 1, 2),
    ("evaluates", 3, 1, 2),
    ("catches_an_error_in_backward", 3, 1, 2),
]


@pytest.mark.long
def test_ranks_that_part():
    check(
        2, [case for case in cases_of(2) if case not in FAST] + BEFORE_THE_FIRST_STEP, timeout=590
    )


@pytest.mark.long
def test_one_of_three_ranks_parts():
    check(3, ONE_OF_THREE, timeout=300)


def slow(rank, folder):
    """A rank that is slow in its own code, one that is slow to save, and errors that a script
    gets over: all is well.
    """
    found = []
    for stage in (0, 2, 3):
        job = Job(rank, stage)
        job.step()
        time.sleep(3.0 * rank)
        job.step()
        with pytest.raises(ZeroDivisionError):
            1 / (0 * rank)
        time.sleep(3.0 * (1 - rank))
        job.engine.save_checkpoint(f"{folder}/{stage}")
        job.raise_and_go_on("backward")  # on all ranks alike
        job.step()
        found.append(job.engine.get_global_grad_norm())
    return found


@pytest.mark.long
def test_slow_ranks_are_no_error(tmp_path):
    one, other = run_processes(2, slow, str(tmp_path), timeout=400)
    assert one == other and len(one) == 3
