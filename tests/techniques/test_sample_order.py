"""Draws under difficulties that grow and shrink, against the definition draw by draw; the draws
depend on nothing but the seed and the number before them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest

from hf_zero.errors import ConfigError
from hf_zero.techniques.curriculum_samplers import CurriculumSampler
from hf_zero.techniques.difficulty_index import write_index
from hf_zero.techniques.sample_order import Criterion, SampleOrder

ROWS = 40
SCHEDULES: dict[str, Callable[[int], float]] = {
    "grows each step": lambda step: min(10 + 3 * step, 100),
    "grows in stages": lambda step: [15, 15, 30, 60, 60, 60, 100][min(step, 7) - 1],
    "shrinks and grows": lambda step: [100, 20, 70][step % 3],
    "a pool below a batch": lambda step: 10 if step < 6 else 50,
    "the whole dataset": lambda step: 100,
}


def made(folder, values, name="metric"):
    return write_index(folder / name, np.asarray(values), name)


@pytest.fixture
def index(tmp_path):
    return made(tmp_path, np.random.default_rng(1).integers(0, 12, ROWS))


def check_definition(order, samples):
    """Check draw by draw; return how many epochs have begun."""
    due, epochs = set(range(order.rows)), 1
    for number, sample in enumerate(samples):
        pool = set(order.pool(number // order.batch_size + 1).tolist())
        if not pool & due:
            due, epochs = set(range(order.rows)), epochs + 1
        assert sample in pool & due, (number, sample)
        due.remove(sample)
    return epochs


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_draws_follow_the_definition_and_go_on_from_any_number(index, schedule):
    order = SampleOrder(ROWS, [Criterion("m", index, SCHEDULES[schedule], 100)], 6, seed=3)
    drawn = list(itertools.islice(order.after(0), 50 * 6))
    assert check_definition(order, drawn) > 3
    for consumed in range(0, 150, 7):
        assert list(itertools.islice(order.after(consumed), 50)) == drawn[consumed : consumed + 50]


def test_the_seed_decides_and_epochs_differ(index):
    def drawn(seed):
        order = SampleOrder(ROWS, [], 8, seed)
        return list(itertools.islice(order.after(0), 2 * ROWS))

    assert drawn(1) == drawn(1) != drawn(2)
    first, second = drawn(1)[:ROWS], drawn(1)[ROWS:]
    assert first != second and sorted(first) == sorted(second) == list(range(ROWS))


def test_a_step_that_admits_nothing_is_an_error(index):
    order = SampleOrder(ROWS, [Criterion("m", index, lambda step: 5 - 3 * step)], 4, 0)
    with pytest.raises(
        ConfigError,
        match=r"no sample is admitted at step 2.*m ≤ -1 \(0 samples\).*schedule there, .*min_diff",
    ):
        list(itertools.islice(order.after(0), 8))


def test_a_dataset_without_samples_is_named():
    with pytest.raises(ConfigError, match="the dataset has no samples"):
        next(SampleOrder(0, [], 4, 0).after(0))


def sampler_over(order, drop_last=False):
    return CurriculumSampler(range(order.rows), order.batch_size, drop_last)


def test_an_iteration_begins_at_the_next_step(index):
    order = SampleOrder(ROWS, [Criterion("m", index, SCHEDULES["grows each step"], 100)], 8, 5)
    drawn = list(itertools.islice(order.after(0), 500))
    sampler = sampler_over(order)
    early = sampler.before_skipping(16)
    with pytest.raises(ConfigError, match="iterated before there was an engine; prepare the model"):
        iter(sampler)
    steps = 7
    sampler.follow(order, lambda: steps)
    sampler.set_epoch(2)
    assert list(sampler) == drawn[56:96]
    # the first 16 are dropped by the loader, because steps 6 and 7 have used them
    for skipping in (early, sampler.before_skipping(16), early.before_skipping(0)):
        assert list(skipping)[16:] == drawn[56:80]
    assert list(early.before_skipping(8))[24:] == drawn[56:72]
    assert list(sampler) == drawn[56:96]
    steps = 1  # skipped although the training has not used them
    assert list(sampler.before_skipping(16)) == drawn[:40]
