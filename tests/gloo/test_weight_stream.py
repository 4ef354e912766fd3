"""``engine.iter_weights`` on gloo ranks, whose messages somebody waits for: loops left early."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.engines import STAGES, config_of, start
from tests.helpers.processes import run_processes
from tests.helpers.stacks import run_steps, stack
from tests.helpers.training import plain_sgd


def leave(rank):
    """At each stage: loops left by a break and by an error, then whole ones; their losses and
    weights, beside those of a training without loops.
    """
    found = {}
    for stage in STAGES:
        for loops in (False, True):
            model = stack()
            engine = start(model, plain_sgd(model), config_of(stage))
            if loops:
                for _ in engine.iter_weights("300B", None, changed_only=True):
                    break
                with pytest.raises(ZeroDivisionError):
                    for _ in engine.iter_weights("300B", None):
                        1 / 0  # noqa: B018
            losses = run_steps(engine, rank, range(2))
            buckets = engine.iter_weights("300B", None, changed_only=True)
            weights = {name: value.clone() for bucket in buckets for name, value in bucket}
            found[stage, loops] = losses, weights
            engine.destroy()
    return found


def test_a_loop_may_be_left_early():
    for found in run_processes(2, leave, timeout=120):
        for stage in STAGES:
            losses, weights = found[stage, True]
            want, of = found[stage, False]
            assert losses == want and weights.keys() == of.keys()
            assert all(torch.equal(value, of[name]) for name, value in weights.items())
