"""Samples that are chosen by their difficulty: the engine's own loader on ranks that are threads,
resumed on others, and what is refused.
"""

from __future__ import annotations

from itertools import chain, islice, repeat
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset

import hf_zero
from hf_zero.errors import ConfigError, DifficultyIndexError
from tests.helpers import sampled
from tests.helpers.cells import in_turn
from tests.helpers.engines import config_of
from tests.helpers.processes import forkserver
from tests.helpers.ranks import run_ranks
from tests.helpers.sampled import BATCH, ROWS, index_in, metric, section
from tests.helpers.training import adamw


def started(config, data=None):
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    data = sampled.data() if data is None else data
    made = hf_zero.initialize(
        model=model, optimizer=adamw(model), training_data=data, config=config
    )
    return made[0], made[2]


def train(engine, loader, steps):
    """The samples that this rank sees in each of ``steps`` steps, over as many epochs of the
    loader as that takes.
    """
    seen: list[list[int]] = [[] for _ in range(steps)]
    end = engine.global_steps + steps
    while True:
        for batch in loader:
            engine.backward(engine(batch["x"]).mean())
            seen[engine.global_steps - end + steps] += batch["id"].tolist()
            engine.step()
            if engine.global_steps == end:
                engine.destroy()
                return seen


def configured(index, ranks, accumulation, **more):
    micro = BATCH // ranks // accumulation
    return config_of(
        2,
        train_micro_batch_size_per_gpu=micro,
        gradient_accumulation_steps=accumulation,
        **section(hard=metric(index, **more)),
    )


def together(shares, accumulation):
    """The samples of each step in the order of micro-batches, ranks within them."""
    micro = BATCH // len(shares) // accumulation
    return [
        [
            sample
            for start in range(0, micro * accumulation, micro)
            for share in step
            for sample in share[start : start + micro]
        ]
        for step in zip(*shares)
    ]


@in_turn(("ranks", "accumulation"), [(1, 4), (4, 2)])
def test_ranks_draw_the_one_order(tmp_path, ranks, accumulation):
    """Across the ends of epochs, with windows of several micro-batches."""
    index = index_in(tmp_path)
    config = configured(index, ranks, accumulation)
    shares = run_ranks(ranks, lambda rank: train(*started(config), 12))
    expected = sampled.drawn(index, 12)
    assert together(shares, accumulation) == expected
    for step, samples in enumerate(expected, start=1):
        hardest = ROWS * sampled.at(step) // 100
        assert max(sampled.VALUES[samples]) < hardest


@in_turn("saved", [3, 7])
def test_a_run_goes_on_on_other_ranks(tmp_path, saved):
    index = index_in(tmp_path)

    def first(rank):
        engine, loader = started(configured(index, 2, 2))
        batches = iter(loader)
        for number in range(2 * saved + 1):  # the last one begins a window that is lost
            batch = next(batches, None) or next(batches := iter(loader))
            engine.backward(engine(batch["x"]).mean())
            engine.step()
            if number == 2 * saved - 1:
                engine.save_checkpoint(str(tmp_path / "saved"))
        engine.destroy()

    def second(ranks, accumulation):
        def go_on(rank):
            engine, loader = started(configured(index, ranks, accumulation))
            engine.load_checkpoint(str(tmp_path / "saved"))
            return train(engine, loader, 12 - saved)

        return together(run_ranks(ranks, go_on), accumulation)

    run_ranks(2, first)
    expected = sampled.drawn(index, 12)[saved:]
    assert second(4, 1) == second(1, 2) == expected


def test_a_function_as_the_schedule_and_workers_that_load_ahead(tmp_path):
    """The same draws as the schedule whose numbers it returns, over two iterations of the
    loader.
    """
    index = index_in(tmp_path)
    config = configured(index, 1, 1, schedule_type="custom")
    config["data_efficiency"]["data_sampling"]["num_workers"] = 1
    engine, loader = started(config)
    assert loader.num_workers == 1
    loader.multiprocessing_context = forkserver()
    engine.set_custom_curriculum_learning_schedule({"hard": sampled.at})
    assert train(engine, loader, 12) == sampled.drawn(index, 12)


def tagged(batch, state):
    step, difficulties = state["curriculum_step"], state["current_difficulties"]
    return {**batch, "x": batch["x"] * 0 + step, "step": step, "difficulties": difficulties}


@in_turn("workers", [0, 1])
def test_a_function_makes_the_batches(tmp_path, workers):
    """A metric that admits every sample has no other visible effect."""
    index = index_in(tmp_path)
    config = configured(index, 1, 1, clustering_type="single_cluster", index_to_metric_path=None)
    config["data_efficiency"]["data_sampling"]["num_workers"] = workers
    engine, loader = started(config)
    loader.multiprocessing_context = forkserver() if workers else None
    seen = {int(row) for batch in loader for row in batch["id"]}
    assert seen == {*range(ROWS)}, "an epoch is a shuffle of all"
    engine.set_data_post_process_func(tagged)
    found = []
    for batch in islice(chain.from_iterable(repeat(loader)), 7):
        engine.backward(engine(batch["x"]).mean())
        engine.step()
        found.append((batch["step"], batch["difficulties"], batch["x"].mean().item()))
    engine.destroy()
    assert found == [(step, {"hard": sampled.at(step)}, float(step)) for step in range(1, 8)]


def test_functions_and_data_that_nothing_draws_are_refused(tmp_path):
    index = index_in(tmp_path)
    config = configured(index, 1, 1)

    def stepping(config):
        engine, loader = started(config)
        engine.backward(engine(next(iter(loader))["x"]).mean())
        return engine

    engine = stepping(configured(index, 1, 1, clustering_type="single_cluster"))
    with pytest.raises(ConfigError, match=r"hard\.clustering_type is 'single_cluster', which"):
        engine.step()
    engine.destroy()
    engine = stepping(config)
    engine.set_data_post_process_func(tagged)
    with pytest.raises(ConfigError, match="no batch of this step has gone through it"):
        engine.step()
    engine.destroy()
    engine, _ = started(config_of(0, train_micro_batch_size_per_gpu=2))
    with pytest.raises(ConfigError, match="set_data_post_process_func"):
        engine.set_data_post_process_func(tagged)
    engine.destroy()
    model = nn.Linear(4, 1)
    engine = hf_zero.initialize(model=model, optimizer=adamw(model), config=config)[0]
    engine.backward(engine(torch.ones(8, 4)).mean())
    with pytest.raises(ConfigError, match="no loader draws by difficulty"):
        engine.step()
    engine.destroy()


class Stream(IterableDataset[Any]):
    def __iter__(self):
        return iter(sampled.data())


NONE_AT_FIRST = {
    "min_difficulty": 0,
    "schedule_config": {"difficulty": [0, 9], "max_step": [9]},
}


def test_configurations_that_are_refused(tmp_path):
    index = index_in(tmp_path)
    for changes, error, said in (
        ({"dificulty_type": "value"}, ConfigError, "'dificulty_type'.*'difficulty_type'"),
        ({"difficulty_type": "values"}, ConfigError, "'values' is none of"),
        ({"clustering_type": "clusters"}, ConfigError, "none of schedule_based, single_cluster"),
        ({"index_to_metric_path": None}, ConfigError, "no index_to_metric_path"),
        ({"index_to_sample_path": "/b"}, ConfigError, "is another folder than index_to_metric"),
        ({"index_to_metric_path": "/no"}, DifficultyIndexError, "/no holds no difficulty index"),
        ({"min_difficulty": None}, ConfigError, "metrics.hard has no min_difficulty"),
        (NONE_AT_FIRST, ConfigError, "no sample is admitted at step 1"),
    ):
        with pytest.raises(error, match=said):
            engine, loader = started(configured(index, 1, 1, **changes))
            try:
                next(iter(loader))
            finally:
                engine.destroy()


def test_data_that_cannot_be_drawn_from_is_refused(tmp_path):
    config = configured(index_in(tmp_path), 1, 1)
    grows = {"training_phases": {"phases": [{"steps": 2}, {"train_batch_size": 16}]}}
    for made, data, error, said in (
        (config, sampled.data()[::-1], DifficultyIndexError, "row 0 of the dataset"),
        (config | grows, None, ConfigError, "training_phases changes how many samples"),
        (config, Stream(), ConfigError, "a Stream, which is iterated"),
    ):
        with pytest.raises(error, match=said):
            started(made, data)
