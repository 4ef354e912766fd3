"""The number of buffers that send gradients at once: a few, however deep the model, and in the
first backward as well.
"""

from __future__ import annotations

from collections import Counter
from functools import partial

import pytest

from hf_zero.zero.reduce.reductions import IN_FLIGHT, WireBuffers
from tests.helpers.engines import config_of, start
from tests.helpers.models import Stack, seeded
from tests.helpers.stacks import on_ranks, squared
from tests.helpers.training import At, adamw

DEPTH = 12


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stage", [2, 3])
def test_few_at_once(stage, ranks, monkeypatch):
    taken, most = Counter[WireBuffers](), Counter[WireBuffers]()
    acquire, release = WireBuffers.acquire, WireBuffers.release

    def acquires(self, *args):
        taken[self] += 1
        most[self] = max(most[self], taken[self])
        return acquire(self, *args)

    def releases(self, buffer):
        taken[self] -= buffer is not None
        release(self, buffer)

    monkeypatch.setattr(WireBuffers, "acquire", acquires)
    monkeypatch.setattr(WireBuffers, "release", releases)
    blocks = {"stage": stage, "stage3_module_granularity_threshold": 0}

    def run(rank, model):
        engine = start(model, adamw(model), config_of(stage, zero_optimization=blocks))
        for step in range(2):
            engine.backward(squared(engine, At(step, 0, rank)))
            engine.step()
        engine.destroy()

    on_ranks(ranks, run, build=partial(seeded, partial(Stack, depth=DEPTH)))
    assert len(most) == ranks and not +taken
    assert max(most.values()) <= IN_FLIGHT + 1
