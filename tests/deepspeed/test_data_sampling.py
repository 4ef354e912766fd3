"""Loaders of DeepSpeed's API that draw by difficulty."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deepspeed
import pytest
from torch import nn

from hf_zero.errors import ConfigError
from tests.helpers import sampled
from tests.helpers.engines import config_of
from tests.helpers.ranks import run_ranks
from tests.helpers.sampled import BATCH, index_in, metric, section
from tests.helpers.training import adamw


def engine_with(**sections: Any) -> Any:
    config = config_of(
        1, train_micro_batch_size_per_gpu=BATCH // 4, gradient_accumulation_steps=4, **sections
    )
    model = nn.Linear(4, 1)
    return deepspeed.initialize(model=model, optimizer=adamw(model), config=config)[0]


def test_deepspeed_io(tmp_path: Path) -> None:
    """A loader made after the engine, over windows of four micro-batches."""
    index = index_in(tmp_path)

    def run(rank: int) -> list[list[int]]:
        engine = engine_with(**section(hard=metric(index)))
        seen: list[list[int]] = [[] for _ in range(5)]
        for batch in engine.deepspeed_io(sampled.data()):
            engine.backward(engine(batch["x"]).mean())
            seen[engine.global_steps] += batch["id"].tolist()
            engine.step()
        engine.destroy()
        return seen

    assert run_ranks(1, run)[0] == sampled.drawn(index, 5)


def test_one_function_for_two_curricula(tmp_path: Path) -> None:
    index = index_in(tmp_path)
    hard = metric(index, schedule_type="custom")

    def run(rank: int) -> None:
        engine = engine_with(**section(hard=hard, harder=hard))
        with pytest.raises(ConfigError, match=r"one function was given .* hard and harder; pass"):
            engine.set_custom_curriculum_learning_schedule(sampled.at)
        engine.set_custom_curriculum_learning_schedule({"hard": sampled.at, "harder": sampled.at})
        loader = engine.deepspeed_io(sampled.data())
        assert next(iter(loader))["id"].tolist() == sampled.drawn(index, 1)[0][: BATCH // 4]
        engine.destroy()

    run_ranks(1, run)
