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
from tests.helpers.engines import config_of, start
from tests.helpers.models import ARCHITECTURES, seeded
from tests.helpers.processes import forkserver
from tests.helpers.ranks import run_ranks
from tests.helpers.sampled import BATCH, index_in, metric, section
from tests.helpers.training import adamw, plain_sgd


def started(config, data=()):
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    data = sampled.data() if data == () else data
    made = hf_zero.initialize(
        model=model, optimizer=adamw(model), training_data=data, config=config
    )
    return made[0], made[2]


def train(engine, loader, steps):
    """The samples that this rank sees in each step, over as many epochs as that takes."""
    seen: list[list[int]] = [[] for _ in range(steps)]
    end = engine.global_steps + steps
    for batch in chain.from_iterable(repeat(loader)):
        engine.backward(engine(batch["x"]).mean())
        seen[engine.global_steps - end + steps] += batch["id"].tolist()
        engine.step()
        if engine.global_steps == end:
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


def test_ranks_draw_the_one_order_and_go_on_on_other_ranks(tmp_path):
    """Across the ends of epochs, with windows of several micro-batches."""
    index, saved = index_in(tmp_path), 7

    def first(rank):
        engine, loader = started(configured(index, 2, 2))
        seen = train(engine, loader, saved)
        engine.save_checkpoint(str(tmp_path / "saved"))
        engine.backward(engine(next(iter(loader))["x"]).mean())  # of a window that is lost
        engine.destroy()
        return seen

    def second(ranks, accumulation):
        def go_on(rank):
            engine, loader = started(configured(index, ranks, accumulation))
            engine.load_checkpoint(str(tmp_path / "saved"))
            seen = train(engine, loader, 12 - saved)
            engine.destroy()
            return seen

        return together(run_ranks(ranks, go_on), accumulation)

    expected = sampled.drawn(index, 12)
    assert together(run_ranks(2, first), 2) == expected[:saved]
    assert second(4, 1) == second(1, 2) == expected[saved:]


def tagged(batch, state):
    step, difficulties = state["curriculum_step"], state["current_difficulties"]
    return {**batch, "x": batch["x"] * 0 + step, "step": step, "difficulties": difficulties}


@in_turn("workers", [0, 1])
def test_functions_are_the_schedule_and_make_the_batches(tmp_path, workers):
    """Over two iterations of the loader, also with workers that load ahead."""
    index = index_in(tmp_path)
    config = configured(index, 1, 1, schedule_type="custom")
    config["data_efficiency"]["data_sampling"]["num_workers"] = workers
    engine, loader = started(config)
    assert loader.num_workers == workers
    loader.multiprocessing_context = forkserver() if workers else None
    engine.set_custom_curriculum_learning_schedule({"hard": sampled.at})
    engine.set_data_post_process_func(tagged)
    drawn, found = [], []
    for batch in islice(chain.from_iterable(repeat(loader)), 7):
        engine.backward(engine(batch["x"]).mean())
        engine.step()
        drawn.append(batch["id"].tolist())
        found.append((batch["step"], batch["difficulties"], batch["x"].mean().item()))
    engine.destroy()
    assert drawn == sampled.drawn(index, 7)
    assert found == [(step, {"hard": sampled.at(step)}, float(step)) for step in range(1, 8)]


def test_functions_and_data_that_nothing_draws_are_refused(tmp_path):
    index = index_in(tmp_path)
    drawn = configured(index, 1, 1)
    single = configured(index, 1, 1, clustering_type="single_cluster")
    for config, loads, function, said in (
        (single, True, None, r"hard\.clustering_type is 'single_cluster', which"),
        (drawn, True, tagged, "no batch of this step has gone through it"),
        (drawn, False, None, "no loader draws by difficulty"),
    ):
        engine, loader = started(config, sampled.data() if loads else None)
        x = next(iter(loader))["x"] if loads else torch.ones(8, 4)
        engine.backward(engine(x).mean())
        if function is not None:
            engine.set_data_post_process_func(function)
        with pytest.raises(ConfigError, match=said):
            engine.step()
        engine.destroy()
    engine, _ = started(config_of(0, train_micro_batch_size_per_gpu=2))
    with pytest.raises(ConfigError, match="set_data_post_process_func"):
        engine.set_data_post_process_func(tagged)
    engine.destroy()


def test_post_processing_beside_shared_sequences_is_refused(tmp_path):
    """A loader of theirs draws the batches of several steps at once."""

    def over(rank):
        config = configured(index, 1, 1) | {"sequence_parallel_size": 2}
        model = seeded(lambda: ARCHITECTURES["llama"].build())
        engine = start(model, plain_sgd(model), config)
        with pytest.raises(ConfigError, match="draw those of several steps at once"):
            engine.set_data_post_process_func(tagged)
        engine.destroy()

    index = index_in(tmp_path)
    run_ranks(2, over)


class Stream(IterableDataset[Any]):
    def __iter__(self):
        return iter(sampled.data())


NONE_AT_FIRST = {
    "min_difficulty": 0,
    "schedule_config": {"difficulty": [0, 9], "max_step": [9]},
}


def test_configurations_and_data_that_are_refused(tmp_path):
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
            next(iter(started(configured(index, 1, 1, **changes))[1]))
    for name, settings in (("hard", 5), ("seqlen", None)):
        with pytest.raises(ConfigError, match=f"metrics.{name} = {settings} is not a section"):
            started(config_of(1) | sampled.section(**{name: settings}))
    config = configured(index, 1, 1)
    grows = {"training_phases": {"phases": [{"steps": 2}, {"train_batch_size": 16}]}}
    for made, data, error, said in (
        (config, sampled.data()[::-1], DifficultyIndexError, "row 0 of the dataset"),
        (config | grows, sampled.data(), ConfigError, "training_phases changes how many samples"),
        (config, Stream(), ConfigError, "a Stream, which is iterated"),
    ):
        with pytest.raises(error, match=said):
            started(made, data)
