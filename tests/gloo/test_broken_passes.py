"""An exception in a forward or backward and a script that goes on, blocks that ranks leave out,
ranks that hang: alike on all ranks it may go on, otherwise an error names the rank. With gloo and
with backends of which the engine knows nothing.
"""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import hf_zero
from hf_zero.errors import PartitionError, RankMismatchError
from tests.gloo.test_divergence import ODD, Job
from tests.helpers import tensor_parallel as models
from tests.helpers.backends import PLAIN, join_again
from tests.helpers.cells import in_one_item
from tests.helpers.processes import run_processes, say
from tests.parallel import expert_cases, pipelines


def go_on(rank, cases):
    """Norms of steps after an exception on all ranks, and the error after one on a single rank."""
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


def test_a_script_that_goes_on_after_an_exception():
    cases = [
        (PLAIN, 3, "forward"),
        (PLAIN, 2, "loss"),
        ("gloo", 2, "backward"),
    ]
    cases += [(PLAIN, 0, "backward")]
    answers = run_processes(2, go_on, cases, timeout=400)
    wanted = answers[0][0][0]
    for case, (norms, first), (others, second) in zip(cases, *answers, strict=True):
        assert norms == others and norms == pytest.approx(wanted, rel=1e-5), case
        _, stage, where = case
        for text in (first, second):
            if where == "loss" and stage < 3:  # it has missed nothing, and comes again
                assert text == "nothing", (case, text)
                continue
            assert text.startswith(f"RankMismatchError: rank {ODD} goes on with another "), case
            assert "after an exception" in text, (case, text)


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
