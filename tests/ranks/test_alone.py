"""A rank that reads the model alone, outside passes, while the others do something else: it gets
the values by fetches, and the others go on as if nothing had been asked.
"""

from __future__ import annotations

import threading
import time

import pytest

from hf_zero.errors import RankMismatchError
from hf_zero.zero.access.full import GatheredParameters
from tests.helpers import oracle
from tests.helpers.engines import config_of, full_weights, start
from tests.helpers.stacks import on_ranks, squared
from tests.helpers.training import At, adamw

RANKS = 2


def trained(engine, rank, steps, read=lambda step: None):
    for step in range(steps):
        read(step)
        engine.backward(squared(engine, At(step, 0, rank)))
        engine.step()


@pytest.mark.parametrize("more", [{}, {"zero_quantized_weights": True}], ids=["", "rounded"])
def test_others_go_on_with_a_forward(more):
    """Their gathers are recorded; planned ones are met in tests/gloo/test_endings.py."""

    def run(rank, model, alone):
        zero = {"stage": 3, **more}
        engine = start(model, adamw(model), config_of(3, zero_optimization=zero, timeout=60))
        states = []

        def read(step):
            if step == 0 and (rank == 0 or not alone):
                with GatheredParameters(model.head.weight):
                    states.append({"head.weight": model.head.weight.detach().clone()})
                states.append(engine.module.state_dict())

        trained(engine, rank, 4, read)
        return states, full_weights(engine)

    (states, want), _ = on_ranks(RANKS, run, False)
    (alone, weights), (_, of_the_other) = on_ranks(RANKS, run, True)
    for got, expected in zip(alone, states, strict=True):
        oracle.compare_tensors("read alone", got, expected, 0.0, 0.0)
    for got in (weights, of_the_other):
        oracle.compare_tensors("weights", got, want)


def test_one_that_ends_its_engine_serves_until_then():
    def run(rank, model):
        engine = start(model, adamw(model), config_of(3, timeout=60))
        trained(engine, rank, 2)
        want = full_weights(engine)
        if rank == 0:
            return engine.module.state_dict(), want
        while not engine.mesh.consensus.gathers.is_awaited_by(0):
            time.sleep(0.01)
        engine.destroy()
        return {}, want

    (state, want), _ = on_ranks(RANKS, run)
    oracle.compare_tensors("read alone", {name: state[name] for name in want}, want)


def test_the_reason_is_told_where_the_values_are_gone():
    gone = threading.Event()

    def run(rank, model):
        engine = start(model, adamw(model), config_of(3, timeout=60))
        trained(engine, rank, 1)
        if rank == 1:
            engine.destroy()
            gone.set()
            return
        assert gone.wait(60)
        with pytest.raises(RankMismatchError, match="rank 1 has destroyed its engine"):
            engine.module.state_dict()

    on_ranks(RANKS, run)
