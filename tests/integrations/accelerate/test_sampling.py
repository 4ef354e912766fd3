"""Loaders of Accelerate that draw by difficulty: prepared in any order, shared out in every way,
resumed in the middle of an epoch.
"""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import accelerate.data_loader
import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, DeepSpeedPlugin
from torch import nn
from torch.utils.data import DataLoader, SequentialSampler

from hf_zero.errors import ConfigError
from hf_zero.integrations.accelerate.difficulty_loaders import skip_what_was_trained
from hf_zero.integrations.accelerate.loaders import _DataParallelState
from hf_zero.techniques.curriculum_samplers import CurriculumSampler
from hf_zero.techniques.difficulty_index import DifficultyIndex
from tests.helpers import sampled
from tests.helpers.cells import in_one_item
from tests.helpers.plain_process import forget
from tests.helpers.sampled import BATCH, index_in, metric, section

WINDOW = 2
BATCHES = 10  # of an epoch


def accelerator_with(folder: Path, **options: Any) -> Accelerator:
    config = {
        "zero_optimization": {"stage": 2},
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": WINDOW,
        **section(hard=metric(index_in(folder))),
    }
    plugin = DeepSpeedPlugin(hf_ds_config=config)
    return Accelerator(
        cpu=True, deepspeed_plugin=plugin, gradient_accumulation_steps=WINDOW, **options
    )


def loader(shuffle: bool = True, data: Any = None, **options: Any) -> Any:
    data = sampled.data() if data is None else data
    return DataLoader(data, batch_size=BATCH // WINDOW, shuffle=shuffle, **options)


def parts() -> tuple[Any, Any]:
    model = nn.Linear(4, 1)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def train(accelerator: Accelerator, model: Any, optimizer: Any, batches: Any) -> list[list[int]]:
    """The samples of each step of one iteration over ``batches``."""
    seen: list[list[int]] = [[]]
    for batch in batches:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch["x"]).mean())
            optimizer.step()
            optimizer.zero_grad()
        seen[-1] += batch["id"].tolist()
        if accelerator.sync_gradients:
            seen.append([])
    return seen[:-1]


def test_a_loader_that_shuffles_draws_by_difficulty(tmp_path: Path) -> None:
    """Over epochs without ``set_epoch``, and after one that was broken off."""
    accelerator = accelerator_with(tmp_path)
    data = accelerator.prepare(loader())
    model, optimizer = accelerator.prepare(*parts())
    assert len(data) == BATCHES
    expected = sampled.drawn(index_in(tmp_path), 20)
    got = train(accelerator, model, optimizer, data) + train(accelerator, model, optimizer, data)
    got += train(accelerator, model, optimizer, itertools.islice(data, 2 * WINDOW))
    got += train(accelerator, model, optimizer, data)
    assert got == expected[: len(got)] and len(got) == 17


def test_a_state_goes_on_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    options = {"dataloader_config": DataLoaderConfiguration(use_seedable_sampler=True)}

    def run(resume: bool) -> list[list[int]]:
        accelerator = accelerator_with(tmp_path, **options)
        model, optimizer, data = accelerator.prepare(*parts(), loader())
        if not resume:
            train(accelerator, model, optimizer, data)
            train(accelerator, model, optimizer, itertools.islice(data, 3 * WINDOW))
            accelerator.save_state(str(tmp_path / "state"))
            return []
        accelerator.load_state(str(tmp_path / "state"))
        assert accelerator.step == 0  # a window begins, of whatever length
        rest = accelerator.skip_first_batches(data, 3 * WINDOW)
        both = itertools.chain(rest, data)
        return train(accelerator, model, optimizer, both)

    run(resume=False)
    forget()
    assert run(resume=True) == sampled.drawn(index_in(tmp_path), 15)[8:]


def test_other_loaders_are_left_alone(tmp_path: Path) -> None:
    accelerator = accelerator_with(tmp_path)
    evaluated = accelerator.prepare(loader(shuffle=False))
    assert isinstance(evaluated.batch_sampler.sampler, SequentialSampler)
    assert next(iter(evaluated))["id"].tolist() == [0, 1, 2, 3]
    mine = accelerator.prepare(loader())
    assert accelerator.prepare(mine) is mine  # once is enough
    with pytest.raises(ConfigError, match="iterated before there was an engine"):
        next(iter(mine))


@in_one_item([(2, True, 1), (4, False, 3), (4, True, 0)])
def test_ranks_of_accelerate_share_one_order(case: tuple[int, bool, int]) -> None:
    """Each rank's loader as Accelerate cuts it, resumed at a micro-batch of the second epoch."""
    ranks, split, skipped = case
    micro = BATCH if split else BATCH // ranks
    done = 5 + skipped  # a batch of all ranks is a step

    def seen(rank: int, index: DifficultyIndex) -> list[list[int]]:
        prepared = accelerate.data_loader.prepare_data_loader(
            DataLoader(sampled.data(), batch_size=micro, shuffle=True),  # type: ignore[arg-type]
            num_processes=ranks,
            process_index=rank,
            split_batches=split,
        )
        sampler = CurriculumSampler(sampled.data(), BATCH)
        sampler.follow(sampled.order(index), lambda: done)
        prepared.set_sampler(sampler)
        if skipped:
            original = accelerate.data_loader.skip_first_batches.__wrapped__
            skip = partial(skip_what_was_trained, original)
            prepared = skip(skip(prepared, 1), skipped - 1)
        return [batch["id"].tolist() for batch in prepared]

    with TemporaryDirectory() as folder:
        index = index_in(Path(folder))
        shares = [seen(rank, index) for rank in range(ranks)]
        got = [list(itertools.chain(*step)) for step in zip(*shares)]
        assert got == sampled.drawn(index, 20)[done : done + 5 - skipped]


def test_a_stateful_loader_takes_back_what_it_fetched_for_data_parallel_ranks() -> None:
    """Three of them have read one batch each ahead of what the script has seen."""
    made = accelerate.data_loader.DataLoaderDispatcher(sampled.data(), batch_size=2)
    made.state = _DataParallelState(made.state, 3)

    def state(batches: int) -> dict[str, Any]:
        read = {"_num_yielded": batches, "_sampler_iter_yielded": batches}
        return {**read, "_index_sampler_state": {"samples_yielded": 2 * batches}}

    made.dl_state_dict = state(8)
    made.adjust_state_dict_for_prefetch()
    assert made.dl_state_dict == state(6)
