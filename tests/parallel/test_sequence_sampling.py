"""Samples drawn by difficulty, on ranks that share sequences: those of each step, also resumed."""

from __future__ import annotations

from itertools import chain, islice, repeat
from pathlib import Path

import torch

import hf_zero
from hf_zero.techniques.difficulty_index import write_index
from hf_zero.techniques.sample_order import Criterion, SampleOrder
from tests.helpers import sampled
from tests.helpers.engines import config_of
from tests.helpers.models import seeded
from tests.helpers.ranks import run_ranks
from tests.helpers.sequences import llama
from tests.helpers.training import plain_sgd

STEPS, ROWS = 3, 2


def test_each_step_has_its_samples(tmp_path: Path) -> None:
    data = [
        {
            "id": torch.tensor([row]),
            "input_ids": torch.full((8,), row),
            "labels": torch.zeros(8).long(),
        }
        for row in range(sampled.ROWS)
    ]
    index = write_index(tmp_path / "index", sampled.VALUES, "hard", "id", data)
    config = config_of(
        2,
        train_micro_batch_size_per_gpu=ROWS,
        sequence_parallel_size=2,
        **sampled.section(hard=sampled.metric(index)),
    )
    folder = str(tmp_path / "saved")

    def trained(ranks: int, steps: int, resumed: bool) -> list[list[int]]:
        models = [seeded(llama) for _ in range(ranks)]

        def run(rank: int) -> list[list[int]]:
            engine, _, loader, _ = hf_zero.initialize(
                model=models[rank],
                optimizer=plain_sgd(models[rank]),
                training_data=data,
                config=config,
            )
            if resumed:
                engine.load_checkpoint(folder, load_loader=True)
            seen = []
            for batch in islice(chain.from_iterable(repeat(loader)), steps):  # type: ignore
                seen.append(batch.pop("id").flatten().tolist())
                engine.backward(engine(**batch).loss)
                engine.step()
            if not resumed:
                engine.save_checkpoint(folder)
            engine.destroy()
            return seen

        groups = run_ranks(ranks, run)[::2]
        return [list(chain(*step)) for step in zip(*groups)]

    for ranks in (2, 4):
        order = SampleOrder(
            sampled.ROWS,
            [Criterion("hard", index, sampled.at, 100)],
            ROWS * ranks // 2,
            sampled.SEED,
        ).after(0)
        wanted = [list(islice(order, ROWS * ranks // 2)) for _ in range(STEPS)]
        assert trained(ranks, 1, False) + trained(ranks, STEPS - 1, True) == wanted
