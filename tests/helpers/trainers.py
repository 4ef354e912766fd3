"""Tiny Trainers by every route to ZeRO: real architectures, fixed rows, losses read from the
log.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import hf_zero
from tests.helpers.models import ARCHITECTURES, LENGTH, VOCAB

STEPS, ROWS_A_BATCH = 4, 4

ROUTES = ("ours", "stock", "callback")  # "plain" is none of them
TO_TRAINER = inspect.signature(transformers.Trainer).parameters.keys() - {"args"}

EVERY_STEP = {"save_strategy": "steps", "save_steps": 1}
# With a learning rate that spoils the model: each evaluation is worse than the one before.
SPOILED = {"eval_strategy": "steps", "eval_steps": 1, "learning_rate": 0.5}
BEST = {**SPOILED, "load_best_model_at_end": True}

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


class Began(transformers.TrainerCallback):
    """The step that a training begins with, after what it resumes from."""

    step: int | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.step = state.global_step


def began_at(run: transformers.Trainer) -> int | None:
    return next(each.step for each in run.callback_handler.callbacks if isinstance(each, Began))


def trainer(args: Any, architecture: str = "bert", **changes: Any) -> transformers.Trainer:
    data = rows(architecture)
    chosen = {
        "model": model(architecture),
        "args": args,
        "train_dataset": data,
        "eval_dataset": data[:6],
        **changes,
        "callbacks": [*(changes.get("callbacks") or ()), Began()],
    }
    return transformers.Trainer(**chosen)


def routed(
    route: str,
    stage: int,
    folder: Path,
    architecture: str = "bert",
    config: dict[str, Any] | None = None,
    **changes: Any,
) -> transformers.Trainer:
    """A Trainer whose ZeRO config comes by ``route``; ``changes`` go to the arguments, those of
    ``Trainer`` excepted.
    """
    given = {name: changes.pop(name) for name in TO_TRAINER & changes.keys()}
    zero = {"zero_optimization": {"stage": stage}, **(config or {})}
    chosen = options(folder, **changes)
    if route == "ours":
        args = hf_zero.TrainingArguments(**chosen, zero_config=zero)
    elif route == "stock":
        args = transformers.TrainingArguments(**chosen, deepspeed=zero)
    else:
        args = transformers.TrainingArguments(**chosen)
    if route == "callback":
        given["callbacks"] = [*given.get("callbacks", ()), hf_zero.ZeroCallback(zero)]
    return trainer(args, architecture, **given)


def logged(run: transformers.Trainer, key: str = "loss") -> list[float]:
    return [entry[key] for entry in run.state.log_history if key in entry]


def weights(run: transformers.Trainer) -> dict[str, torch.Tensor]:
    """Whole weights after training, in the engine's compute dtype."""
    return {name: value.detach().clone() for name, value in run.model.state_dict().items()}


def assert_same_training(
    run: transformers.Trainer,
    oracle: transformers.Trainer,
    tolerance: float = 1e-5,
    without: str = "none",
) -> None:
    for key in ("loss", "grad_norm", "learning_rate"):
        assert logged(run, key) == pytest.approx(logged(oracle, key), rel=tolerance) != [], key
    expected, found = (
        {name: value for name, value in weights(of).items() if without not in name}
        for of in (oracle, run)
    )
    assert found.keys() == expected.keys()
    # Over the whole model: what Adam makes of gradients that are zero in theory (a key's bias) is
    # noise on both sides.
    assert distance(found, expected) <= tolerance * distance(expected)


def distance(
    first: dict[str, torch.Tensor], second: dict[str, torch.Tensor] | None = None
) -> float:
    """The norm of all weights, or of their differences."""
    return float(
        sum(
            (value.double() - (second[name].double() if second else 0)).square().sum()
            for name, value in first.items()
        )
        ** 0.5
    )
