"""TRL's trainers with LoRA on one rank at stage 3, against the same trainers without an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trl
from datasets import load_dataset
from peft import LoraConfig

from hf_zero.engine import Engine
from hf_zero.ops.deferred import DeferredOutput, tensor
from tests.helpers.cells import in_turn
from tests.helpers.trainers import assert_same_training, options
from tests.matrix.scripts import trl_material

TRAINERS = {"sft": (trl.SFTTrainer, trl.SFTConfig), "dpo": (trl.DPOTrainer, trl.DPOConfig)}


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("material")
    trl_material.save_models(folder)
    trl_material.save_rows(folder)
    return folder


@pytest.mark.parametrize("kind", TRAINERS)
def test_adapters_train_as_without_an_engine(kind: str, material: Path, tmp_path: Path) -> None:
    trainer, config = TRAINERS[kind]
    file, cache = str(material / "rows.jsonl"), str(tmp_path / "cache")
    rows = load_dataset("json", data_files=file, split="train", cache_dir=cache)
    if kind == "sft":
        rows = rows.select_columns("prompt").rename_column("prompt", "text")

    def trained(**changes: Any) -> Any:
        args = config(**options(tmp_path, bf16=False, max_length=64, **changes))
        lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
        run = trainer(str(material / "untied"), args=args, train_dataset=rows, peft_config=lora)
        run.train()
        return run

    plain = trained()
    run = trained(deepspeed={"zero_optimization": {"stage": 3}})
    assert isinstance(run.model_wrapped, Engine) and run.model_wrapped.stage == 3
    assert_same_training(run, plain)


LOSSES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("sft", {}), ("sft", {"label_smoothing_factor": 0.1}), ("dpo", {}),
)  # fmt: skip


@in_turn("kind, more", LOSSES)
def test_losses_without_whole_logits(
    kind: str, more: dict[str, Any], material: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    """TRL computes most losses in chunks itself, and those with label smoothing from logits."""
    trainer, config = TRAINERS[kind]
    file, cache = str(material / "rows.jsonl"), str(tmp_path / "cache")
    rows = load_dataset("json", data_files=file, split="train", cache_dir=cache)
    if kind == "sft":
        rows = rows.select_columns("prompt").rename_column("prompt", "text")

    def trained(**changes: Any) -> Any:
        args = config(**options(tmp_path, bf16=False, max_length=64, **more, **changes))
        run = trainer(str(material / "untied"), args=args, train_dataset=rows)
        run.train()
        return run

    plain, computed = trained(), []
    of_call, materialize = DeferredOutput.of_call, DeferredOutput.materialize
    made = []
    monkeypatch.setattr(tensor, "rows_of_a_chunk", lambda *_: 5)
    monkeypatch.setattr(DeferredOutput, "of_call", lambda *a: made.append(a) or of_call(*a))
    monkeypatch.setattr(
        DeferredOutput, "materialize", lambda one: computed.append(one.shape) or materialize(one)
    )
    run = trained(deepspeed={"zero_optimization": {"stage": 3}, "kernels": ["loss"]})
    assert not computed and bool(made) == bool(more)
    assert_same_training(run, plain)
