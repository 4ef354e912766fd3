"""A Trainer whose batches and sequences grow, against a plain loop over the same data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import hf_zero
from hf_zero.errors import ConfigError
from tests.helpers import oracle
from tests.helpers.trainers import logged, model, options, rows, weights

pytestmark = pytest.mark.usefixtures("plain_process")

# of 8 batches of 4 rows: 1 + 1 + 2 + 2 + 2, then 2 + 4 + 2 (what is left)
PHASES = {
    "lr_scaling_method": "linear",
    "phases": [
        {"steps": 2, "sequence_length": 5},
        {"steps": 4, "train_batch_size": 8},
        {"train_batch_size": 16},
    ],
}
WINDOWS = [(1, 5, 1.0)] * 2 + [(2, 9, 2.0)] * 4 + [(4, 9, 4.0), (2, 9, 4.0)]
STEPS = len(WINDOWS)
CHOSEN = {
    "lr_scheduler_type": "constant",
    "warmup_steps": 0,
    "max_grad_norm": 0.0,
    "max_steps": STEPS,
    "save_strategy": "steps",
    "save_steps": 3,
}


def uneven() -> list[dict[str, torch.Tensor]]:
    data = rows("llama", 32)
    for at, row in enumerate(data):
        row["labels"][: at % 3] = -100
    return data


def plain(folder: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    args = transformers.TrainingArguments(**options(folder, **CHOSEN))
    run = transformers.Trainer(model=model("llama"), args=args, train_dataset=uneven())
    loader, net = run.get_train_dataloader(), run.model
    run.create_optimizer()
    batches = []
    for epoch in range(2):
        loader.set_epoch(epoch)
        batches += [{**batch} for batch in loader]
    losses = []
    for micros, length, factor in WINDOWS:
        window = [
            {name: value[:, :length].contiguous() for name, value in batches.pop(0).items()}
            for _ in range(micros)
        ]
        labels = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in window)
        total = sum(net(**batch, num_items_in_batch=labels).loss for batch in window)
        total.backward()
        for group in run.optimizer.param_groups:
            group["lr"] = 1e-3 * factor
        run.optimizer.step()
        net.zero_grad()
        losses.append(float(total.detach()))
    assert not batches
    return losses, {name: value.detach().clone() for name, value in net.state_dict().items()}


def ours(folder: Path, resume: Any = None, **changes: Any) -> transformers.Trainer:
    zero = {"zero_optimization": {"stage": 2}, "training_phases": PHASES}
    zero.update(changes.pop("zero", {}))
    args = hf_zero.TrainingArguments(**options(folder, **{**CHOSEN, **changes}), zero_config=zero)
    run = transformers.Trainer(model=model("llama"), args=args, train_dataset=uneven())
    run.train(resume_from_checkpoint=resume)
    return run


def test_windows_grow_and_epochs_are_counted_by_them(tmp_path: Path) -> None:
    wanted, values = plain(tmp_path / "plain")
    got = ours(tmp_path / "phases")
    assert logged(got) == pytest.approx(wanted, rel=1e-4)
    oracle.compare_tensors("weights", weights(got), values, floor=oracle.ADAM_ROUNDING)
    assert got.state.num_train_epochs == 2
    for at in (3, 6):
        again = ours(tmp_path / f"from {at}", str(tmp_path / "phases" / f"checkpoint-{at}"))
        assert logged(again) == pytest.approx(wanted, rel=1e-4)
    by_epochs = ours(tmp_path / "epochs", max_steps=-1, num_train_epochs=2)
    assert by_epochs.state.global_step == by_epochs.state.max_steps == STEPS
    assert logged(by_epochs) == pytest.approx(wanted, rel=1e-4)


def test_what_the_trainer_cannot_change(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="write 1 there, and train_batch_size in the first"):
        ours(tmp_path, gradient_accumulation_steps=2)
    micro = {"phases": [{"steps": 1}, {"train_micro_batch_size_per_gpu": 2}]}
    with pytest.raises(ConfigError, match="that was prepared brings batches of one size"):
        ours(tmp_path, zero={"training_phases": micro})
