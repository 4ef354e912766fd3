"""Accelerate loops in one process and at stage 3: the ways a script may hand its pieces to
``accelerator.prepare``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deepspeed
import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin, DummyOptim, DummyScheduler
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification

import hf_zero
from tests.helpers.oracle import total_norm
from tests.helpers.plain_process import forget

STEPS = 3
SIZES = {
    "vocab_size": 31, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24,
    "max_position_embeddings": 8,
}  # fmt: skip


def small(seed: int = 3) -> BertForSequenceClassification:
    torch.manual_seed(seed)
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForSequenceClassification(BertConfig(**SIZES, num_hidden_layers=2, **dropout))


def batches(count: int = STEPS) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)

    def draw(high: int, size: tuple[int, ...]) -> torch.Tensor:
        return torch.randint(high, size, generator=generator)

    return [{"input_ids": draw(31, (8,)), "labels": draw(2, ())} for _ in range(4 * count)]


def loader(count: int = STEPS) -> DataLoader[Any]:
    return DataLoader(batches(count), batch_size=4)  # type: ignore[arg-type]


def accelerator_with(config: dict[str, Any], **arguments: Any) -> Accelerator:
    config.setdefault(
        "zero_optimization", {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}
    )
    config.setdefault("train_micro_batch_size_per_gpu", "auto")
    return Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config), **arguments)


def prepared(accelerator: Accelerator) -> tuple[Any, Any, Any]:
    """Return an engine, its AdamW and a loader."""
    model = small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return accelerator.prepare(model, optimizer, loader())


def train(
    accelerator: Accelerator, model: Any, data: Any, optimizer: Any, scheduler: Any = None
) -> list[float]:
    losses = []
    for batch in data:
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def plain(
    model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any = None, clip: float = 0.0
) -> list[float]:
    losses = []
    for batch in loader():
        loss = model(**batch).loss
        loss.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def assert_close(found: list[float], expected: list[float], **tolerances: float) -> None:
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), **tolerances)


def falling(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


def test_a_save_of_the_model_gathers_it_whatever_the_key_says(tmp_path: Path) -> None:
    """accelerate's YAML writes false for a stage without zero3_save_16bit_model."""
    for written in ({}, {"stage3_gather_16bit_weights_on_model_save": False}):
        accelerator = accelerator_with({"zero_optimization": {"stage": 3, **written}})
        model, optimizer, data = prepared(accelerator)
        train(accelerator, model, data, optimizer)
        expected = model._zero3_consolidated_16bit_state_dict()
        accelerator.save_model(model, str(tmp_path / "model"))
        unwrapped, state = accelerator.unwrap_model(model), accelerator.get_state_dict(model)
        unwrapped.save_pretrained(tmp_path / "pretrained", state_dict=state)
        for folder in ("model", "pretrained"):
            saved = load_file(tmp_path / folder / "model.safetensors")
            assert saved.keys() == expected.keys()
            assert all(torch.equal(value, expected[name]) for name, value in saved.items())
        accelerator.free_memory()
        forget()


def test_optimizer_and_schedule_of_the_configuration() -> None:
    """Or a schedule made by a callable."""
    rates = dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps"), "auto")
    params = {"lr": "auto", "weight_decay": "auto", "eps": 1e-6}
    written = {"type": "WarmupLR", "params": {**rates, "warmup_type": "linear"}}
    for by in ("configuration", "callable"):
        model, reference = small(), small()
        config: dict[str, Any] = {"optimizer": {"type": "AdamW", "params": params}}
        theirs = torch.optim.AdamW(reference.parameters(), lr=1e-2, eps=1e-6, weight_decay=0.1)
        dummy = DummyOptim(model.parameters(), lr=1e-2, weight_decay=0.1)
        if by == "callable":
            schedule, wanted = DummyScheduler(dummy, lr_scheduler_callable=falling), falling(theirs)
        else:
            config["scheduler"] = written
            schedule = DummyScheduler(dummy, warmup_num_steps=4)
            wanted = deepspeed.runtime.lr_schedules.WarmupLR(theirs, 0, 1e-2, 4, "linear")
        accelerator = accelerator_with(config)
        model, optimizer, data, schedule = accelerator.prepare(model, dummy, loader(), schedule)
        expected = plain(reference, theirs, wanted)
        assert_close(train(accelerator, model, data, optimizer, schedule), expected)
        assert type(optimizer.optimizer) is torch.optim.AdamW
        forget()


def test_mixed_precision_of_the_accelerator() -> None:
    reference = small()
    scale = {"enabled": "auto", "initial_scale_power": 8}  # a larger one skips the first steps
    accelerator = accelerator_with({"fp16": scale}, mixed_precision="fp16")
    model, optimizer, data = prepared(accelerator)
    assert model.fp16_enabled() and not model.bfloat16_enabled()
    expected = plain(reference, torch.optim.AdamW(reference.parameters(), lr=1e-3))
    assert_close(train(accelerator, model, data, optimizer), expected, rtol=0.02, atol=0.02)
    assert model.skipped_steps == 0
    begun = dict(small().named_parameters())
    found = {
        name: hf_zero.safe_get_full_fp32_param(p) for name, p in model.module.named_parameters()
    }
    off = total_norm({name: found[name] - p for name, p in reference.named_parameters()})
    moved = total_norm({name: begun[name] - p for name, p in reference.named_parameters()})
    assert off < 0.2 * moved
