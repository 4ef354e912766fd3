"""Threads that an engine starts set their device before anything else: they begin with device 0,
on which every rank would open a context.
"""

from __future__ import annotations

import threading

import pytest

from hf_zero.device import kinds
from hf_zero.distributed import rank_requests
from hf_zero.offload.update import Updater
from tests.helpers.engines import config_of, start
from tests.helpers.models import ARCHITECTURES
from tests.helpers.offloads import offload
from tests.helpers.ranks import run_ranks
from tests.helpers.training import Plan, sgd


def train(rank, models, section):
    engine = start(
        models[rank],
        sgd(models[rank]),
        config_of(section["stage"], Plan(ranks=len(models)), zero_optimization=section),
    )
    for step in range(2):
        engine.backward(engine(**ARCHITECTURES["gpt2"].batch(step, 0, rank)).loss)
        engine.step()
    engine.destroy()


@pytest.mark.parametrize(
    "stage, where, thread", [(2, Updater, "hf-zero update"), (3, rank_requests, "hf_zero-serve")]
)
def test_the_device_is_set_first(stage, where, thread, tmp_path, monkeypatch):
    current, worked = threading.local(), []
    monkeypatch.setattr(kinds, "set_device", lambda device: setattr(current, "device", device.type))
    name = "_run" if where is Updater else "_serve_until_closed"
    work = getattr(where, name)

    def watched(*args):
        worked.append((threading.current_thread().name, getattr(current, "device", None)))
        return work(*args)

    monkeypatch.setattr(where, name, watched)
    models = [ARCHITECTURES["gpt2"].build() for _ in range(2)]
    run_ranks(2, train, models, offload("optimizer on cpu", stage, tmp_path))
    assert len(worked) >= 2 and all(
        who.startswith(thread) and device == "cpu" for who, device in worked
    ), worked
