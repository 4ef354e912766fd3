"""Ranks that part ways on real gloo processes: each ends with an error that says where both are,
and none is aborted natively. The process group is made anew for each kind: one launch tries many.
"""

import re
import tempfile
import time

import pytest
import torch

import hf_zero
from hf_zero.errors import PartitionError, RankMismatchError
from tests.helpers.backends import join_again
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
        plan = Plan(accumulation=accumulation, clip=1.0)
        config = config_of(stage, plan, timeout=LIMIT)
        self.engine = start(self.model, plain_sgd(self.model), config)

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

    def end_a_window_early(self):
        self.engine.set_gradient_accumulation_boundary(True)
        self.step_one()
        self.engine.set_gradient_accumulation_boundary(None)

    def step_one(self):
        self.backward()
        self.engine.step()

    def look_at_weights(self):
        """The sum of a whole weight where the others sum one number: gloo aborts on that."""
        self.backward()
        for parameter in self.model.parameters():
            hf_zero.safe_get_full_fp32_param(parameter)

    def set_a_weight(self):
        with hf_zero.GatheredParameters([self.model.head.weight], modifier_rank=0):
            pass

    def destroy(self):
        self.engine.destroy()
        time.sleep(4)  # and does not come back
        raise RankMismatchError("over")


# what ODD does, at which stages, with what accumulation
PARTED = {
    "more micro-batches": (Job.backward, (0, 2, 3), 1),
    "fewer micro-batches": (Job.end_a_window_early, (0, 2, 3), 2),
    "evaluates": (Job.evaluate, (3,), 1),
    "saves": (Job.save, (0, 2, 3), 1),
    "looks at a weight": (Job.look_at_weights, (2, 3), 1),
    "sets a weight": (Job.set_a_weight, (0, 2, 3), 1),
    "catches an error in forward": (lambda job: job.raise_and_go_on("forward"), (3,), 1),
    "catches an error in backward": (lambda job: job.raise_and_go_on("backward"), (0, 2, 3), 1),
    "destroys its engine": (Job.destroy, (0, 2, 3), 1),
    "waits elsewhere": (lambda job: hf_zero.distributed.world_group.barrier(), (0, 2, 3), 1),
}
FAST = [("more micro-batches", 2, 2), ("saves", 3, 2), ("catches an error in backward", 0, 2)]
# name, stage, steps before ODD parts
ALL = [(name, stage, 2) for name, (_, stages, _) in PARTED.items() for stage in stages] + [
    ("fewer micro-batches", 3, 0),
    ("sets a weight", 2, 0),
    ("waits elsewhere", 3, 0),
]


def part(rank, cases):
    """The text of each case's error."""
    told = []
    for number, (name, stage, steps) in enumerate(cases):
        say(f"{name} at stage {stage} after {steps} steps")
        join_again("gloo", f"case {number}")
        act, _, accumulation = PARTED[name]
        try:
            job = Job(rank, stage, accumulation)
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
