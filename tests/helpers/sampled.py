"""Data whose samples are drawn by difficulty: an index, its configuration, and what each step
should draw.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hf_zero.techniques.difficulty_index import DifficultyIndex, write_index
from hf_zero.techniques.sample_order import Criterion, SampleOrder

ROWS, BATCH = 40, 8
PERCENTILES = [25, 50, 100]
LAST_STEPS = [2, 4]
SEED = 11
VALUES = np.random.default_rng(5).permutation(ROWS)


def at(step: int) -> int:
    """The percentile that is admitted at ``step``, counted from 1."""
    return PERCENTILES[sum(step > last for last in LAST_STEPS)]


def index_in(folder: Path) -> DifficultyIndex:
    return write_index(folder / "index", VALUES, "hard", "id", data())


def data() -> list[dict[str, torch.Tensor]]:
    return [{"id": torch.tensor(row), "x": torch.full((4,), row / ROWS)} for row in range(ROWS)]


def metric(index: DifficultyIndex, **changes: Any) -> dict[str, Any]:
    return {
        "index_to_metric_path": str(index.folder),
        "difficulty_type": "percentile",
        "clustering_type": "schedule_based",
        "min_difficulty": PERCENTILES[0],
        "max_difficulty": PERCENTILES[-1],
        "schedule_type": "fixed_discrete",
        "schedule_config": {"difficulty": PERCENTILES, "max_step": LAST_STEPS},
        **changes,
    }


def section(**metrics: Any) -> dict[str, Any]:
    learning = {"enabled": True, "curriculum_metrics": metrics}
    sampling = {"enabled": True, "curriculum_learning": learning}
    return {"data_efficiency": {"enabled": True, "seed": SEED, "data_sampling": sampling}}


def order(index: DifficultyIndex) -> SampleOrder:
    return SampleOrder(ROWS, [Criterion("hard", index, at, 100)], BATCH, SEED)


def drawn(index: DifficultyIndex, steps: int) -> list[list[int]]:
    """The samples of each step."""
    samples = itertools.islice(order(index).after(0), steps * BATCH)
    return np.fromiter(samples, int).reshape(steps, BATCH).tolist()  # type: ignore[no-any-return]
