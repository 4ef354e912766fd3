"""``optimizer.state_dict()`` kept in memory and loaded again, where segments were cut otherwise
then: against plain PyTorch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hf_zero.errors import UnsupportedOptimizerError
from hf_zero.ops import dispatch
from tests.helpers import oracle
from tests.helpers.cells import in_turn
from tests.helpers.checked_triton import checked_triton
from tests.helpers.engines import OnEngine, config_of, full_weights, start
from tests.helpers.offloads import DEVICE, offload
from tests.helpers.ranks import run_ranks
from tests.helpers.stacks import on_ranks
from tests.helpers.training import At, Plan
from tests.ranks.test_unused import HeadsJob

RANKS = 2
Weights = dict[str, torch.Tensor]
Step = Callable[[int], None]


class Plain:
    """One process with whole parameters."""

    dtype = torch.float32

    def __init__(self, job):
        self.model = job.build()
        self.optimizer = job.optimizer(self.model)
        self._job = job

    def __call__(self, *args):
        return self.model(*args)

    def step(self, number):
        for rank in range(RANKS):
            (self._job.loss(self, At(number, 0, rank)) / RANKS).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def weights(self):
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}

    def close(self):
        pass


class Sharded:
    """One rank of an engine."""

    def __init__(self, job, model, section, rank):
        config = config_of(section["stage"], Plan(RANKS), zero_optimization=section)
        self._engine = start(model, job.optimizer(model), config)
        self._net = OnEngine(self._engine, Plan(RANKS))
        self._job, self._rank = job, rank
        self.optimizer = self._engine.optimizer

    def step(self, number):
        self._engine.backward(self._job.loss(self._net, At(number, 0, self._rank)))
        self._engine.step()

    def weights(self):
        return full_weights(self._engine)

    def close(self):
        self._engine.destroy()


def course(opened):
    """Weights after snapshots were loaded that are coarser than what there is by then, and those
    of a second run that begins with a finer one.
    """
    run = opened(0)
    kept = {-1: copy.deepcopy(run.optimizer.state_dict())}
    found = []
    for step in range(6):
        run.step(step)
        kept[step] = copy.deepcopy(run.optimizer.state_dict())
        if step in (1, 4):
            run.optimizer.load_state_dict(copy.deepcopy(kept[-1 if step == 1 else 2]))
    found.append(run.weights())
    run.close()
    run = opened(1)
    run.optimizer.load_state_dict(copy.deepcopy(kept[3]))
    for step in range(2):
        run.step(step)
    found.append(run.weights())
    run.close()
    return found


def check(kind, *sections):
    """``sections`` are those of the first run and of the second."""
    job = HeadsJob(kind, RANKS)
    want = course(lambda which: Plain(job))
    models = [[job.build() for _ in range(2)] for _ in range(RANKS)]

    def on_rank(rank):
        return course(lambda which: Sharded(job, models[rank][which], sections[which], rank))

    for got in run_ranks(RANKS, on_rank):
        for which, (mine, plain) in enumerate(zip(got, want, strict=True)):
            oracle.compare_tensors(f"run {which}", mine, plain, floor=oracle.ADAM_ROUNDING)


def keeping(threshold):
    """Stage 3, at which smaller parameters stay whole."""
    return {"stage": 3, "stage3_param_persistence_threshold": threshold}


NONE, SOME, ALL = map(keeping, (0, 40, 10**6))
CPU, FILES = "optimizer on cpu", "optimizer in files"


@in_turn(
    "kind, first, second",
    [
        ("unfused", 1, 1),
        ("sgd", 2, 2),
        ("lamb", 3, 3),
        # a rank has the same elements at stages 1 to 3
        ("adamw", 3, 1),
        # ranks exchange what they keep; parameters that had made other steps keep their counts
        ("adamw", SOME, NONE),
        ("adamw", NONE, ALL),
        ("unfused", ALL, 2),
        ("sgd", 1, SOME),
        ("lamb", NONE, ALL),
    ],
)
def test_a_snapshot_is_loaded_whatever_was_cut_since(kind, first, second):
    check(kind, *({"stage": each} if isinstance(each, int) else each for each in (first, second)))


@in_turn(
    "kind, stage, ways, thresholds",
    [
        ("adamw", 0, (CPU, CPU), (0, 0)),
        ("nadam", 2, (CPU, CPU), (0, 0)),
        ("sgd", 3, (CPU, CPU), (0, 0)),
        ("lion", 1, (FILES, FILES), (0, 0)),
        ("lamb", 2, (FILES, FILES), (0, 0)),
        ("adamw", 3, ("half on cpu", "half on cpu"), (0, 0)),
        ("adagrad", 3, ("all in files", "all in files"), (0, 0)),
        ("adamw", 2, (DEVICE, CPU), (0, 0)),
        ("adamw", 2, (CPU, DEVICE), (0, 0)),
        ("adamw", 3, (DEVICE, CPU), (0, 10**6)),
        ("adamw", 3, (FILES, DEVICE), (0, 10**6)),
    ],
)
def test_offloaded(kind, stage, ways, thresholds, tmp_path):
    """Pieces are small, so that segments are cut at their ends, too; between ways, as well."""
    check(
        kind,
        *(
            {
                **offload(way, stage, tmp_path, buffer_size=512),
                "stage3_param_persistence_threshold": threshold,
            }
            for way, threshold in zip(ways, thresholds)
        ),
    )


@pytest.mark.long
def test_by_one_launch(monkeypatch):
    monkeypatch.setattr(dispatch, "wanted", lambda name, kernels, device: dispatch.runs_on(device))
    monkeypatch.delenv("HF_ZERO_TRITON", raising=False)
    with checked_triton(poison=False):
        check("adamw", {"stage": 2}, {"stage": 2})


def test_elements_of_another_rank_and_other_groups_are_refused():
    job = HeadsJob("adamw", RANKS)
    dicts: list[dict[str, Any]] = [{}] * RANKS

    def on_rank(rank, model):
        run = Sharded(job, model, {"stage": 2}, rank)
        run.step(0)
        dicts[rank] = copy.deepcopy(run.optimizer.state_dict())
        run.step(1)
        with pytest.raises(UnsupportedOptimizerError, match="saved by another rank"):
            run.optimizer.load_state_dict(copy.deepcopy(dicts[1 - rank]))
        swapped = copy.deepcopy(dicts[rank])
        swapped["segments"]["places"].reverse()
        swapped["param_groups"].reverse()
        with pytest.raises(UnsupportedOptimizerError, match="groups it was saved with"):
            run.optimizer.load_state_dict(swapped)
        run.close()

    on_ranks(RANKS, on_rank, build=lambda: job.build())


def test_other_parameters_stay_whole_of_another_number_of_ranks():
    """A rank's dict alone: elements are missing, or their state is of whole tensors."""
    job = HeadsJob("adamw", RANKS)
    models = [job.build() for _ in range(RANKS)]
    dicts: list[dict[str, Any]] = [{}] * RANKS

    def saved(rank):
        run = Sharded(job, models[rank], NONE, rank)
        run.step(0)
        dicts[rank] = copy.deepcopy(run.optimizer.state_dict())
        run.close()

    def loaded(rank, given, message):
        run = Sharded(job, job.build(), ALL, rank)
        with pytest.raises(UnsupportedOptimizerError, match=message):
            run.optimizer.load_state_dict(copy.deepcopy(given))
        run.close()

    run_ranks(RANKS, saved)
    run_ranks(RANKS, lambda rank: loaded(rank, dicts[0], "saved on another number of ranks"))
    for entry in dicts[1]["state"].values():
        entry["rows"] = torch.ones(2)
    run_ranks(RANKS, lambda rank: loaded(rank, dicts[rank], "'rows' is of whole tensors"))
