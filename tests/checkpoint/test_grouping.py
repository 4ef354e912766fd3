"""Optimizer groups are matched by the parameters in them: their order in the script that resumes
does not matter.
"""

from __future__ import annotations

import dataclasses
import shutil

import pytest
import torch

from hf_zero import checkpoint
from hf_zero.checkpoint.manifest import GroupEntry
from hf_zero.checkpoint.match import pair_groups, reorder_schedule
from tests.checkpoint.jobs import Engine, Job, other, run, small, state_of, train_some
from tests.checkpoint.test_save_load import assert_equal


def entries(*groups: str) -> list[GroupEntry]:
    return [GroupEntry({}, {}, tuple(names.split())) for names in groups]


def paired(saved: list[GroupEntry], *live: str):
    group_of = {name: index for index, names in enumerate(live) for name in names.split()}
    return pair_groups(group_of, len(live), saved, {name: name for name in group_of})


@pytest.mark.parametrize(
    "saved, live, order",
    [
        (("a b", "c"), ("a b", "c"), [0, 1]),
        (("a b", "c"), ("c", "b a"), [1, 0]),
        (("a", "b", "c d"), ("c d", "a", "b"), [2, 0, 1]),
        (("a", ""), ("", "a"), [1, 0]),
        (("a", "", "b"), ("b", "", "a"), [2, 1, 0]),
        (("", ""), ("a", "b"), [0, 1]),  # a writer that does not say where parameters were
        (("a", "old"), ("a new", ""), [0, 1]),
    ],
)
def test_pairs(saved, live, order):
    assert paired(entries(*saved), *live) == (order, [])


def test_what_was_elsewhere_is_named():
    assert paired(entries("a b c", "d"), "a b", "d c") == ([0, 1], ["c (0 there, 1 here)"])
    assert paired(entries("a b", "c d"), "c", "a b d")[1] == ["d (1 there, 1 here)"]


def test_a_schedule_follows_its_groups():
    state = {
        "base_lrs": [1, 2, 3],
        "last_epoch": 7,
        "_milestones": [1, 2, 3],
        "_schedulers": [{"_last_lr": (4, 5, 6), "lr_lambdas": [None]}],
    }
    assert reorder_schedule(state, [2, 0, 1]) == {
        "base_lrs": [3, 1, 2],
        "last_epoch": 7,
        "_milestones": [1, 2, 3],
        "_schedulers": [{"_last_lr": [6, 4, 5], "lr_lambdas": [None]}],
    }


def adam(rates):
    def make(groups):
        for group, rate in zip(groups, rates):
            group["lr"] = rate
        return torch.optim.AdamW(groups)

    return make


def schedule(engine: Engine) -> None:
    engine.lr_scheduler = torch.optim.lr_scheduler.ExponentialLR(engine.bound.optimizer, 0.5)


def turned(job: Job) -> Job:
    """The same groups, the other one first, in an optimizer made with other settings, which the
    load replaces.
    """
    return dataclasses.replace(job, decays=lambda name: "bias" in name, optimizer=adam((0.5, 0.25)))


@pytest.mark.parametrize("ranks", [(2, 2), (2, 3)])
def test_groups_in_another_order_go_on(tmp_path, ranks):
    """Loaded they are equal bit for bit.

    Trained on, a group's update runs over other lengths, and the last bit may round otherwise.
    """
    job = Job(ranks[0], 2, units=("first",), optimizer=adam((1e-2, 1e-3)))

    def whole(engine: Engine):
        schedule(engine)
        train_some(engine, 2)
        checkpoint.save(engine, tmp_path)
        train_some(engine, steps)

    def resumed(engine: Engine):
        schedule(engine)
        checkpoint.load(engine, tmp_path)
        if steps:
            assert [g["weight_decay"] for g in engine.bound.hyperparameters()] == [0.0, 0.1]
        train_some(engine, steps)

    steps = 0
    one, _ = run(job, small, whole)
    into = dataclasses.replace(turned(job), world=ranks[1])
    two, _ = run(into, other, resumed)
    assert_equal(one, two)
    steps = 2
    shutil.rmtree(tmp_path)
    one, _ = run(job, small, whole)
    two, _ = run(into, other, resumed)
    found = state_of(two)
    for name, kinds in state_of(one).items():
        for kind, tensor in kinds.items():
            assert torch.allclose(found[name][kind], tensor, rtol=1e-6, atol=1e-8), (name, kind)
    assert two[0].bound.hyperparameters() == one[0].bound.hyperparameters()[::-1]
    assert two[0].lr_scheduler.get_last_lr() == one[0].lr_scheduler.get_last_lr()[::-1]
    assert "exp_avg" in state_of(two)["second.bias"]
