"""A Trainer whose sequences grow, against a plain one whose batches were cut by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import hf_zero
from tests.helpers import oracle
from tests.helpers.models import LENGTH
from tests.helpers.trainers import logged, model, options, rows, weights

pytestmark = pytest.mark.usefixtures("plain_process")

GROWING = [3, 5, 8, LENGTH]
CURRICULUM = {
    "enabled": True,
    "curriculum_type": "seqlen",
    "min_difficulty": 3,
    "max_difficulty": 64,
    "schedule_type": "fixed_discrete",
    "schedule_config": {"difficulty": GROWING, "max_step": [1, 2, 3]},
}


class CutByHand(transformers.Trainer):
    """The oracle: the labels of a window are counted after its batches were cut."""

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        length = GROWING[self.state.global_step]
        cut = (
            {name: value[:, :length].contiguous() for name, value in batch.items()}
            for batch in epoch_iterator
        )
        return super().get_batch_samples(cut, num_batches, device)


def uneven(architecture: str) -> list[dict[str, torch.Tensor]]:
    """Rows that do not have equally many labels."""
    data = rows(architecture, 32)
    for at, row in enumerate(data):
        row["labels"][: at % 3] = -100
    return data


@pytest.mark.parametrize(
    ("architecture", "stage", "smoothing"), [("gpt2", 3, 0.0), ("bert", 2, 0.0), ("llama", 1, 0.1)]
)
def test_the_loss_counts_what_is_left(
    architecture: str, stage: int, smoothing: float, tmp_path: Path
) -> None:
    """Accumulated, resumed in the middle, evaluated on whole sequences on the way."""
    data = uneven(architecture)
    chosen = {
        "gradient_accumulation_steps": 2,
        "label_smoothing_factor": smoothing,
        "save_strategy": "steps",
        "save_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 2,
    }

    def run(kind: Any, args: Any, resume: Any = None) -> transformers.Trainer:
        made: transformers.Trainer = kind(
            model=model(architecture), args=args, train_dataset=data, eval_dataset=data[:6]
        )
        made.train(resume_from_checkpoint=resume)
        return made

    plain = run(CutByHand, transformers.TrainingArguments(**options(tmp_path / "plain", **chosen)))
    zero = {"zero_optimization": {"stage": stage}, "curriculum_learning": CURRICULUM}

    def ours(name: str, resume: Any = None) -> transformers.Trainer:
        args = hf_zero.TrainingArguments(**options(tmp_path / name, **chosen), zero_config=zero)
        return run(transformers.Trainer, args, resume)

    got = ours("curriculum")
    for key in ("loss", "eval_loss", "grad_norm"):
        assert logged(got, key) == pytest.approx(logged(plain, key), rel=1e-5), key
    oracle.compare_tensors("weights", weights(got), weights(plain), floor=oracle.ADAM_ROUNDING)
    again = ours("again", str(tmp_path / "curriculum" / "checkpoint-2"))
    assert logged(again) == pytest.approx(logged(plain), rel=1e-5)
