"""A tiny Trainer run: real BERT and GPT-2 architectures, fixed rows, losses read from the
Trainer's own log.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from tests.helpers.models import ARCHITECTURES, LENGTH, VOCAB

STEPS, ROWS_A_BATCH = 4, 4

Row = dict[str, torch.Tensor]


def rows(architecture: str = "bert", count: int = 2 * STEPS * ROWS_A_BATCH) -> list[Row]:
    """Every row has equally many labels, so that a mean over a batch is the mean over its ranks'
    means.
    """
    generator = torch.Generator().manual_seed(7)
    made = []
    for _ in range(count):
        ids = torch.randint(3, VOCAB, (LENGTH,), generator=generator)
        labels = ids.clone()
        if architecture == "bert":
            labels[::3] = -100
        made.append({"input_ids": ids, "labels": labels})
    return made


def model(architecture: str = "bert") -> nn.Module:
    return ARCHITECTURES[architecture].build()


def options(folder: Path, **changes: Any) -> dict[str, Any]:
    """Arguments of any TrainingArguments class: four steps, every one logged, nothing reported
    or saved.
    """
    chosen = {
        "output_dir": str(folder),
        "use_cpu": True,
        "max_steps": STEPS,
        "per_device_train_batch_size": ROWS_A_BATCH,
        "per_device_eval_batch_size": ROWS_A_BATCH,
        "learning_rate": 1e-3,
        "adam_epsilon": 1e-6,
        "max_grad_norm": 0.5,
        "warmup_steps": 1,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "seed": 3,
    }
    return {**chosen, **changes}


def trainer(args: Any, architecture: str = "bert", **changes: Any) -> transformers.Trainer:
    data = rows(architecture)
    chosen = {
        "model": model(architecture),
        "args": args,
        "train_dataset": data,
        "eval_dataset": data[:6],
        **changes,
    }
    return transformers.Trainer(**chosen)


def logged(run: transformers.Trainer, key: str = "loss") -> list[float]:
    return [entry[key] for entry in run.state.log_history if key in entry]


def weights(run: transformers.Trainer) -> dict[str, torch.Tensor]:
    """Whole weights after training, in the engine's compute dtype."""
    return {name: value.detach().clone() for name, value in run.model.state_dict().items()}
