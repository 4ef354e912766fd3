"""Trainers whose data change while they train: sequences and batches that grow, against plain ones
whose batches were cut by hand.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
import torch
import transformers

import hf_zero
from hf_zero.errors import ConfigError
from hf_zero.integrations.transformers import zero_callback
from tests.helpers import oracle
from tests.helpers.models import LENGTH
from tests.helpers.sampled import metric, section
from tests.helpers.trainers import logged, model, options, rows, weights


def uneven(architecture: str) -> list[dict[str, torch.Tensor]]:
    """Rows that do not have equally many labels."""
    data = rows(architecture, 32)
    for at, row in enumerate(data):
        row["labels"][: at % 3] = -100
    return data


def ours(folder: Path, zero: dict[str, Any], **changes: Any) -> Any:
    config = {"zero_optimization": {"stage": 2}, **zero}
    return hf_zero.TrainingArguments(**options(folder, **changes), zero_config=config)


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


def test_the_loss_counts_what_is_left(tmp_path: Path) -> None:
    """Accumulated, resumed in the middle, evaluated on whole sequences on the way."""
    data = uneven("gpt2")
    chosen = {"gradient_accumulation_steps": 2, "label_smoothing_factor": 0.1}
    chosen |= {"save_strategy": "steps", "save_steps": 2}
    chosen |= {"eval_strategy": "steps", "eval_steps": 2}

    def run(kind: Any, args: Any, resume: Any = None) -> transformers.Trainer:
        made: transformers.Trainer = kind(
            model=model("gpt2"), args=args, train_dataset=data, eval_dataset=data[:6]
        )
        made.train(resume_from_checkpoint=resume)
        return made

    plain = run(CutByHand, transformers.TrainingArguments(**options(tmp_path / "plain", **chosen)))
    zero = {"zero_optimization": {"stage": 3}, "curriculum_learning": CURRICULUM}
    got = run(transformers.Trainer, ours(tmp_path / "curriculum", zero, **chosen))
    for key in ("loss", "eval_loss", "grad_norm"):
        assert logged(got, key) == pytest.approx(logged(plain, key), rel=1e-5), key
    oracle.compare_tensors("weights", weights(got), weights(plain), floor=oracle.ADAM_ROUNDING)
    saved = str(tmp_path / "curriculum" / "checkpoint-2")
    again = run(transformers.Trainer, ours(tmp_path / "again", zero, **chosen), saved)
    assert logged(again) == pytest.approx(logged(plain), rel=1e-5)


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
PHASE_STEPS = len(WINDOWS)
CHOSEN = {
    "lr_scheduler_type": "constant",
    "warmup_steps": 0,
    "max_grad_norm": 0.0,
    "max_steps": PHASE_STEPS,
    "save_strategy": "steps",
    "save_steps": 3,
}


def plain(folder: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    args = transformers.TrainingArguments(**options(folder, **CHOSEN))
    run = transformers.Trainer(model=model("llama"), args=args, train_dataset=uneven("llama"))
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


def phased(
    folder: Path, resume: Any = None, callbacks: Any = None, **changes: Any
) -> transformers.Trainer:
    zero = {"training_phases": changes.pop("phases", PHASES)}
    args = ours(folder, zero, **{**CHOSEN, **changes})
    run = transformers.Trainer(
        model=model("llama"), args=args, train_dataset=uneven("llama"), callbacks=callbacks
    )
    run.train(resume_from_checkpoint=resume)
    return run


def test_windows_grow_and_epochs_are_counted_by_them(tmp_path: Path) -> None:
    wanted, values = plain(tmp_path / "plain")
    got = phased(tmp_path / "phases")
    assert logged(got) == pytest.approx(wanted, rel=1e-4)
    oracle.compare_tensors("weights", weights(got), values, floor=oracle.ADAM_ROUNDING)
    assert got.state.num_train_epochs == 2
    resume = str(tmp_path / "phases" / "checkpoint-6")
    again = phased(tmp_path / "epochs", resume, max_steps=-1, num_train_epochs=2)
    assert again.state.global_step == again.state.max_steps == PHASE_STEPS
    assert logged(again) == pytest.approx(wanted, rel=1e-4)


class Epochs(transformers.TrainerCallback):
    """The epoch as the steps end, as other callbacks read it."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.seen.append(state.epoch)


def test_what_the_trainer_counts_is_counted_by_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Epochs, tokens, operations and samples, also of a run that was resumed."""
    clock = iter(range(1000))
    counted = SimpleNamespace(perf_counter=lambda: float(next(clock)))
    monkeypatch.setattr(zero_callback, "time", counted)
    micros = [window[0] for window in WINDOWS]
    batches = list(itertools.accumulate(micros))
    tokens = list(itertools.accumulate(4 * micros * length for micros, length, _ in WINDOWS))
    for first in (0, 3):
        epochs, callback = Epochs(), hf_zero.ZeroCallback()
        run = phased(
            tmp_path,
            str(tmp_path / f"checkpoint-{first}") if first else None,
            callbacks=[epochs, callback],
            include_num_input_tokens_seen="all",
        )
        assert epochs.seen == [number / 8 for number in batches[first:]]
        assert logged(run, "epoch")[:-1] == [number / 8 for number in batches]
        assert logged(run, "num_input_tokens_seen")[:-1] == tokens
        counted_weights = run.model.num_parameters(exclude_embeddings=True)
        assert run.state.total_flos == 6 * counted_weights * tokens[-1]
        # a tick of the clock a step
        assert logged(run, "samples_per_second") == [4.0 * number for number in micros]
    *_, samples, _, _, _ = run.set_initial_training_values(run.args, run.get_train_dataloader())
    assert samples == 4 * batches[-1]


def test_what_the_trainer_cannot_change(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="write 1 there, and train_batch_size in the first"):
        phased(tmp_path, gradient_accumulation_steps=2)
    micro = {"phases": [{"steps": 1}, {"train_micro_batch_size_per_gpu": 2}]}
    with pytest.raises(ConfigError, match="that was prepared brings batches of one size"):
        phased(tmp_path, phases=micro)
    stream = datasets.Dataset.from_list(uneven("llama")).to_iterable_dataset()
    args = ours(tmp_path, {"training_phases": PHASES}, **CHOSEN)
    run = transformers.Trainer(model=model("llama"), args=args, train_dataset=stream)
    with pytest.raises(ConfigError, match="the IterableDataset of train_dataset has none"):
        run.train()
    index = hf_zero.analyze([[1] * 3, [1] * 4] * 8, out=tmp_path / "index", progress=False)
    args = ours(tmp_path, section(seqlen=metric(index)), train_sampling_strategy="sequential")
    run = transformers.Trainer(model=model("gpt2"), args=args, train_dataset=uneven("gpt2"))
    with pytest.raises(ConfigError, match=r"no loader draws by difficulty: .*the Trainer's"):
        run.train()
