"""Depth of a planned gather: frames of Python from the module's hook to torch.distributed."""

from __future__ import annotations

import sys

import torch.distributed as dist

from hf_zero.zero.gather.hooks import Hooks
from tests.helpers.engines import config_of, start
from tests.helpers.models import Stack, seeded
from tests.helpers.stacks import on_ranks, squared
from tests.helpers.training import At, adamw

MOST = 6


def frames_above(frame) -> list[str]:
    """The names of what is under way from ``Hooks._pre_forward`` to ``frame``, or none."""
    names = []
    while frame is not None:
        names.append(frame.f_code.co_name)
        if frame.f_code is Hooks._pre_forward.__code__:
            return names[::-1]
        frame = frame.f_back
    return []


class Done:
    """The handle of a collective that has completed."""

    def wait(self, *limit):
        return True


def test_a_planned_gather_is_at_most_six_frames_deep(monkeypatch):
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    plain, seen = getattr(dist, name), []

    def spied(*args, **kwargs):
        seen.append(frames_above(sys._getframe(1)))
        return plain(*args, **kwargs)

    def message(*args, **kwargs):
        seen.append(frames_above(sys._getframe(1)))
        return Done()

    def run(rank, model):
        engine = start(model, adamw(model), config_of(3))
        for number in range(2):
            engine.backward(squared(engine, At(number, 0, rank)))
            engine.step()
        if rank == 0:
            seen.clear()
        engine.mesh.barrier()
        squared(engine, At(2, 0, rank))
        engine.mesh.barrier()
        # as gloo sends it
        engine.mesh.shard._point_to_point = True
        squared(engine, At(2, 0, rank))
        engine.mesh.shard._point_to_point = False

    monkeypatch.setattr(dist, name, spied)
    monkeypatch.setattr(dist, "irecv", message)
    monkeypatch.setattr(dist, "isend", message)
    on_ranks(2, run, build=lambda: seeded(lambda: Stack(4)))
    paths = [path for path in seen if path]
    whole = {path[-1] for path in paths}
    assert whole == {"all_gather", "_exchange"}, "the gathers of both kinds were seen"
    assert max(map(len, paths)) <= MOST, max(paths, key=len)
