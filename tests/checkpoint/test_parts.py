"""Checkpoints of models that are cut over ranks: loaded on other tensor-, expert- and data-parallel
ranks, converted, and written whole, bit for bit.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hf_zero
from hf_zero.checkpoint.manifest import Manifest
from hf_zero.distributed.parallel_dims import ParallelDims
from hf_zero.distributed.parallel_groups import init_parallel
from hf_zero.errors import CheckpointError
from hf_zero.zero.access.consolidate import whole_state_dict
from hf_zero.zero.layout.sharding import Sharding, set_sharding
from tests.helpers.engines import start
from tests.helpers.models import seeded
from tests.helpers.ranks import run_ranks
from tests.helpers.split import Split, batches, config_of_split, plain, split
from tests.helpers.training import adamw

STEPS = 3


def engine_of(whole: nn.Module, sizes: Any, stage: int) -> Any:
    dims = ParallelDims.over(torch.distributed.get_world_size(), **sizes)
    model = split(copy.deepcopy(whole), init_parallel(dims))
    return start(model, adamw(model), config_of_split(stage))


def steps(engine: Any, rank: int, data: Tensor) -> None:
    dims = engine.mesh.dims
    for step in data:
        engine.backward(engine(step.chunk(dims.data)[dims.coordinate(rank, "data")]))
        engine.step()


def saved(rank: int, whole: nn.Module, data: Tensor, sizes: Any, stage: int, folder: Path) -> Any:
    engine = engine_of(whole, sizes, stage)
    steps(engine, rank, data[: STEPS - 1])
    engine.save_checkpoint(folder, tag="t")
    state = whole_state_dict(engine)
    engine.destroy()
    return state


def loaded(rank: int, whole: nn.Module, data: Tensor, sizes: Any, stage: int, folder: Path) -> Any:
    engine = engine_of(whole, sizes, stage)
    engine.load_checkpoint(folder, tag="t")
    state = whole_state_dict(engine)
    steps(engine, rank, data[STEPS - 1 :])
    after = whole_state_dict(engine)
    engine.destroy()
    return state, after


@pytest.mark.parametrize(
    ("before", "after", "stage"),
    [
        ({"tensor": 2}, {"tensor": 4}, 3),
        ({"tensor": 4}, {}, 1),
        ({}, {"tensor": 2}, 0),
        ({"tensor": 2, "expert": 2}, {"expert": 4}, 2),
        ({"expert": 4}, {"tensor": 2}, 3),
    ],
    ids=str,
)
def test_on_other_ranks(before: Any, after: Any, stage: int, tmp_path: Path) -> None:
    """At another stage, too."""
    whole = seeded(lambda: Split("expert" in before, blocks=2))
    fresh = copy.deepcopy(whole)
    for p in fresh.parameters():
        p.data.add_(1.0)
    data = batches(STEPS, 1, 4).flatten(1, 3)  # the same rows on any ranks
    want = plain(whole, adamw, data[:, None, None])
    states = run_ranks(4, saved, whole, data, before, stage, tmp_path)
    manifest = Manifest.read(tmp_path / "t" / "manifest.json")
    assert manifest.version == (3 if before else 2)
    converted = dict(hf_zero.checkpoint.iterate_state_dict(tmp_path, dtype="float32"))
    for state in states:
        assert state.keys() == converted.keys() == want.weights.keys()
        assert all(state[name].equal(converted[name]) for name in state)
    for state, trained in run_ranks(4, loaded, fresh, data, after, 3 - stage, tmp_path):
        assert all(state[name].equal(converted[name]) for name in converted), "not what was saved"
        for name, value in trained.items():
            torch.testing.assert_close(value, want.weights[name], rtol=1e-5, atol=2e-5)


BOXES = {
    "is held twice": lambda slot: slot.pop("box"),
    "hold the same elements": lambda slot: slot["box"]["cuts"][0][1].__setitem__(0, [6, 12]),
    "do not make one of shape": lambda slot: slot["box"].update(whole=[13, 12]),
    "the layout is damaged": lambda slot: slot["box"]["cuts"][0][1].__setitem__(0, [0, 5]),
    "a box holds the whole shape": lambda slot: slot["box"].pop("whole"),
}


def test_boxes_that_do_not_fit(tmp_path: Path) -> None:
    """Parts without a box are not saved."""

    def run(rank: int, whole: nn.Module) -> None:
        engine = engine_of(whole, {"tensor": 2}, 1)
        engine.save_checkpoint(tmp_path, tag="t")
        engine.destroy()
        model = split(copy.deepcopy(whole), init_parallel(ParallelDims.over(2, tensor=2)))
        set_sharding(model.blocks[0].down.weight, Sharding(("tensor",)))
        engine = start(model, adamw(model), config_of_split(1))
        with pytest.raises(CheckpointError, match=r"blocks\.0\.down\.weight are parts of tensors"):
            engine.save_checkpoint(tmp_path)
        engine.destroy()

    run_ranks(2, run, seeded(lambda: Split(blocks=2)))
    path = tmp_path / "t" / "manifest.json"
    for message, change in BOXES.items():
        data = json.loads(path.read_text())
        data.pop("digest")
        slots = [slot for flat in data["flats"] for slot in flat["layout"]["slots"]]
        change(next(slot for slot in slots if slot["name"] == "blocks.0.value.weight"))
        with pytest.raises(CheckpointError, match=message):
            Manifest.from_json(data, path)
