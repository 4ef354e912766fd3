"""An exception in a forward or backward, and a script that goes on: alike on all ranks it may; on
one rank it is an error on all.

With gloo and with a backend of which the engine knows nothing, where collectives of different
passes would meet unseen.
"""

from __future__ import annotations

import pytest
import torch

from hf_zero.errors import PartitionError, RankMismatchError
from tests.gloo.test_divergence import ODD, Job
from tests.helpers.backends import PLAIN, join_again
from tests.helpers.cells import fast
from tests.helpers.processes import run_processes, say

FAST = [(PLAIN, 3, "forward"), (PLAIN, 2, "loss"), ("gloo", 3, "forward")]
ALL = [
    *FAST,
    (PLAIN, 2, "backward"),
    (PLAIN, 3, "loss"),
    (PLAIN, 3, "backward"),
    (PLAIN, 0, "backward"),
    ("gloo", 2, "backward"),
]


def go_on(rank: int, cases: list[tuple[str, int, str]]) -> list[tuple[list[float], str]]:
    """For each case the norms of the steps after an exception on all ranks, and the error that
    one on a single rank comes to.
    """
    found = []
    for number, (backend, stage, where) in enumerate(cases):
        say(f"{where} at stage {stage} with {backend}")
        join_again(backend, f"broken {number}")
        job, norms, told = Job(rank, stage), [], "nothing"
        for at in range(3):
            job.step()
            norms.append(float(job.engine.get_global_grad_norm()))
            if at == 1:
                job.raise_and_go_on(where)
                job.at -= 1
        try:
            if rank == ODD:
                job.raise_and_go_on(where)
            for _ in range(3):
                job.step()
        except (RankMismatchError, PartitionError) as error:
            told = f"{type(error).__name__}: {error}"
        found.append((norms, told))
        del job
    return found


@pytest.mark.parametrize(
    "cases", fast([FAST, ALL], lambda cases: cases is FAST), ids=["some", "all"]
)
def test_a_script_that_goes_on_after_an_exception(cases):
    answers = run_processes(2, go_on, cases, timeout=400)
    wanted = None
    for number, case in enumerate(cases):
        (norms, first), (others, second) = (each[number] for each in answers)
        wanted = wanted or norms
        assert norms == others and torch.allclose(
            torch.tensor(norms), torch.tensor(wanted), rtol=1e-5
        ), case
        _, stage, where = case
        for text in (first, second):
            if where == "loss" and stage < 3:  # it has missed nothing, and comes again
                assert text == "nothing", (case, text)
                continue
            assert (
                text.startswith(f"RankMismatchError: rank {ODD} goes on with another ")
                and "after an exception" in text
            ), (case, text)
