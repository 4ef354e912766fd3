"""A Trainer whose samples are chosen by their difficulty: what each step trains on, and on what a
resumed one goes on.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import transformers

import hf_zero
from hf_zero.errors import ConfigError
from tests.helpers import sampled
from tests.helpers.models import VOCAB
from tests.helpers.plain_process import forget
from tests.helpers.sampled import metric, section
from tests.helpers.trainers import model, options

pytestmark = pytest.mark.usefixtures("plain_process")

ROWS, STEPS = sampled.ROWS, 8


def data() -> datasets.Dataset:
    """Rows whose first token says which they are, and that get longer from row to row."""
    rows = [[row % VOCAB, *[1] * (row // 4)] for row in range(ROWS)]
    return datasets.Dataset.from_dict({"input_ids": rows, "row": range(ROWS), "unused": rows})


class Noting(transformers.Trainer):
    """Notes the rows of each training step."""

    seen: list[list[int]]

    def training_step(self, model: Any, inputs: Any, *args: Any, **more: Any) -> Any:
        self.seen = getattr(self, "seen", [[] for _ in range(STEPS)])
        self.seen[self.state.global_step] += inputs.pop("row").tolist()
        return super().training_step(model, inputs, *args, **more)


def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    length = max(len(row["input_ids"]) for row in rows)
    ids = torch.tensor([row["input_ids"] + [0] * (length - len(row["input_ids"])) for row in rows])
    return {"input_ids": ids, "labels": ids, "row": torch.tensor([row["row"] for row in rows])}


def run(folder: Path, name: str, resume: str | None = None, **more: Any) -> list[list[int]]:
    index = hf_zero.analyze(data(), out=folder / "index", progress=False)
    hard = metric(index)
    zero = {"zero_optimization": {"stage": 2}, **section(seqlen=hard)}
    args = hf_zero.TrainingArguments(
        **options(
            folder / name,
            max_steps=STEPS,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            save_strategy="steps",
            save_steps=6,
            **more,
        ),
        zero_config=zero,
    )
    args.label_names = ["labels"]
    args.remove_unused_columns = False
    made = Noting(
        model=model("gpt2"),
        args=args,
        train_dataset=data().remove_columns("unused"),
        eval_dataset=data().select(range(4)),
        data_collator=collate,
    )
    made.train(resume_from_checkpoint=resume)
    forget()
    return made.seen


def expected(folder: Path) -> list[list[int]]:
    index = hf_zero.analyze(data(), out=folder / "index", progress=False)
    return sampled.drawn(index, STEPS)


@pytest.mark.parametrize("ignore_data_skip", [False, True])
def test_each_step_draws_what_it_admits_and_goes_on_with_it(
    tmp_path: Path, ignore_data_skip: bool
) -> None:
    """Five steps an epoch, resumed in the second one, whose batches are skipped or not."""
    through = run(tmp_path, "through", dataloader_num_workers=0)
    assert through == expected(tmp_path)
    resumed = run(
        tmp_path,
        "resumed",
        str(tmp_path / "through" / "checkpoint-6"),
        ignore_data_skip=ignore_data_skip,
    )
    assert resumed == [[]] * 6 + through[6:]


def test_another_order_of_the_trainer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"no loader draws by difficulty: .*the Trainer's default"
    ):
        run(tmp_path, "sorted", train_sampling_strategy="sequential")
