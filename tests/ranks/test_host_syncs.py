"""Host synchronisations of a step, engine and model apart: none where no number was asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from tests.helpers.cells import in_turn
from tests.helpers.engines import config_of, start
from tests.helpers.host_syncs import HostSyncs
from tests.helpers.models import ARCHITECTURES, Architecture, Stack, tokens
from tests.helpers.stacks import on_ranks, run_steps, stack
from tests.helpers.training import Plan

SCALAR = "_local_scalar_dense"
CPU = {"device": "cpu"}
OPTIMIZER: dict[str, Any] = {"offload_optimizer": CPU}
ALL: dict[str, Any] = {"offload_optimizer": CPU, "offload_param": CPU}
MEASURES = {
    "metrics": {"enabled": True},
    "comms_logger": {"enabled": True},
    "wall_clock_breakdown": True,
}


def with_mask(step, micro, rank):
    """Given a mask, models of transformers read back whether it masks anything, by their file."""
    ids = tokens(step, micro, rank)
    return {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)}


def counted(rank, model, config):
    """The third step of two micro-batches, when orders have been recorded and states made."""
    engine = start(model, torch.optim.AdamW(model.parameters(), lr=1e-3), config)
    for step in range(3):
        with HostSyncs() as syncs:
            if isinstance(model, Stack):
                run_steps(engine, rank, [step], 2)
                continue
            for micro in range(2):
                engine.backward(engine(**with_mask(step, micro, rank)).loss)
                engine.step()
    engine.destroy()
    return syncs


ONE, TWO = {f"optimizer_step.py: {SCALAR}": 1}, {f"optimizer_step.py: {SCALAR}": 2}


BERT = Architecture("bert", ARCHITECTURES["bert"].make, with_mask).build


@in_turn(
    "build, stage, precision, clip, offload, more, expected",
    [  # one: whether the step overflowed, or the divisor for the host's update
        (BERT, 3, "fp16", 1.0, {}, {}, ONE),
        (stack, 3, "bf16", 1.0, ALL, {}, ONE),
        (stack, 1, "fp16", 1.0, OPTIMIZER, {}, TWO),
        (stack, 2, "fp32", 1.0, {}, {}, {}),
        (stack, 1, "fp32", 0.0, {}, {}, {}),  # nor is a norm read
        # on a host figures are read as the step ends, at once
        (stack, 3, "fp32", 0.0, {}, MEASURES, {"figures.py: tolist": 1}),
    ],
)
def test_the_engine_reads_nothing_back(build, stage, precision, clip, offload, more, expected):
    config = config_of(stage, Plan(accumulation=2, clip=clip, precision=precision), **more)
    config["zero_optimization"].update(offload)
    theirs = {f"masking_utils.py: {SCALAR}": 2} if build is BERT else {}
    for syncs in on_ranks(2, counted, config, build=build):
        engine = syncs.of("hf_zero")
        if offload:  # step counters of states that are in host memory
            engine.pop(f"bound_optimizer.py: {SCALAR}", None)
        assert engine == Counter(expected)
        assert syncs.of("transformers") == theirs
        assert {owner for owner, _, _ in syncs.found} <= {"hf_zero", "transformers"}


# -- the counter itself ----------------------------------------------------------------------------


X = torch.arange(6.0)
WAITS: dict[str, Callable[[], Any]] = {
    "_local_scalar_dense": lambda: X.sum().item(),
    "nonzero": lambda: X.nonzero(),
    "index": lambda: X[X > 2],
    "index_put_": lambda: X.clone().__setitem__(X > 9, torch.ones(0)),
    "tolist": lambda: X.tolist(),
    "repeat_interleave": lambda: torch.repeat_interleave(torch.tensor([1, 2])),
}


@in_turn("name", WAITS)
def test_what_waits_is_counted(name):
    with HostSyncs() as syncs:
        WAITS[name]()
    assert syncs.found == {("tests", "test_host_syncs.py", name): 1}
