"""Accelerate loops in one process and at stage 3: the ways a script may hand its pieces to
``accelerator.prepare``.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin, DummyOptim, DummyScheduler
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader
from transformers import AutoModel, BertConfig, BertForSequenceClassification, BertModel

from hf_zero.engine import Engine
from hf_zero.errors import ConfigError, UnsupportedOptimizerError
from hf_zero.zero.layout.parameter import ReleasedParameter

pytestmark = pytest.mark.usefixtures("plain_process")

STEPS = 3


def small(seed: int = 3) -> BertForSequenceClassification:
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=31,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=8,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertForSequenceClassification(config)


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


def test_optimizer_and_schedule_of_the_script() -> None:
    model, reference = small(), small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-6)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    accelerator = accelerator_with({"gradient_clipping": 0.1})
    model, optimizer, data, scheduler = accelerator.prepare(model, optimizer, loader(), scheduler)
    assert isinstance(model, Engine) and isinstance(model, deepspeed.DeepSpeedEngine)
    assert accelerator.unwrap_model(model) is model.module
    assert model.train_micro_batch_size_per_gpu() == 4
    theirs = torch.optim.AdamW(reference.parameters(), lr=1e-2, eps=1e-6)
    expected = plain(
        reference,
        theirs,
        torch.optim.lr_scheduler.LambdaLR(theirs, lambda step: 1 / (1 + step)),
        clip=0.1,
    )
    torch.testing.assert_close(
        torch.tensor(train(accelerator, model, data, optimizer, scheduler)), torch.tensor(expected)
    )
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-2 / (1 + STEPS))
    assert not optimizer.step_was_skipped


@pytest.mark.parametrize("written", [{}, {"stage3_gather_16bit_weights_on_model_save": False}])
def test_a_save_of_the_model_gathers_it_whatever_the_key_says(
    written: dict[str, Any], tmp_path: Path
) -> None:
    """accelerate's YAML writes false for a stage without zero3_save_16bit_model."""
    model = small()
    accelerator = accelerator_with({"zero_optimization": {"stage": 3, **written}})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, data = accelerator.prepare(model, optimizer, loader())
    train(accelerator, model, data, optimizer)
    expected = model._zero3_consolidated_16bit_state_dict()
    accelerator.save_model(model, str(tmp_path / "model"))
    unwrapped, state = accelerator.unwrap_model(model), accelerator.get_state_dict(model)
    unwrapped.save_pretrained(tmp_path / "pretrained", state_dict=state)
    for folder in ("model", "pretrained"):
        saved = load_file(tmp_path / folder / "model.safetensors")
        assert saved.keys() == expected.keys()
        assert all(torch.equal(value, expected[name]) for name, value in saved.items())


def test_optimizer_and_schedule_of_the_configuration() -> None:
    model, reference = small(), small()
    config = {
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": "auto", "weight_decay": "auto", "eps": 1e-6},
        },
        "scheduler": {
            "type": "WarmupLR",
            "params": {
                "warmup_min_lr": "auto",
                "warmup_max_lr": "auto",
                "warmup_num_steps": "auto",
                "warmup_type": "linear",
            },
        },
    }
    accelerator = accelerator_with(config)
    dummy = DummyOptim(model.parameters(), lr=1e-2, weight_decay=0.1)
    model, optimizer, data, scheduler = accelerator.prepare(
        model, dummy, loader(), DummyScheduler(dummy, warmup_num_steps=4)
    )
    theirs = torch.optim.AdamW(reference.parameters(), lr=1e-2, eps=1e-6, weight_decay=0.1)
    expected = plain(
        reference, theirs, deepspeed.runtime.lr_schedules.WarmupLR(theirs, 0, 1e-2, 4, "linear")
    )
    torch.testing.assert_close(
        torch.tensor(train(accelerator, model, data, optimizer, scheduler)), torch.tensor(expected)
    )
    assert type(optimizer.optimizer) is torch.optim.AdamW


def test_a_schedule_made_by_a_callable_for_the_optimizer_of_the_configuration() -> None:
    model = small()
    accelerator = accelerator_with({"optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}})
    dummy = DummyOptim(model.parameters(), lr=1e-2)

    def halved(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

    model, optimizer, data, scheduler = accelerator.prepare(
        model, dummy, loader(), DummyScheduler(dummy, lr_scheduler_callable=halved)
    )
    train(accelerator, model, data, optimizer, scheduler)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-2 / 2**STEPS)


def test_a_configuration_file_beside_the_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "zero.json"
    file.write_text(
        json.dumps(
            {
                "zero_optimization": {"stage": 3},
                "train_micro_batch_size_per_gpu": "auto",
                "gradient_accumulation_steps": 1,
            }
        )
    )
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(file))
    accelerator = Accelerator()
    model = small()
    model, optimizer, data = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=1e-3), loader()
    )
    assert model.zero_optimization_stage() == 3
    assert len(train(accelerator, model, data, optimizer)) == STEPS


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_of_the_accelerator(precision: str) -> None:
    model, reference = small(), small()
    accelerator = accelerator_with({}, mixed_precision=precision)
    model, optimizer, data = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=1e-3), loader()
    )
    assert (model.bfloat16_enabled(), model.fp16_enabled()) == (
        precision == "bf16",
        precision == "fp16",
    )
    expected = plain(reference, torch.optim.AdamW(reference.parameters(), lr=1e-3))
    torch.testing.assert_close(
        torch.tensor(train(accelerator, model, data, optimizer)),
        torch.tensor(expected),
        rtol=0.02,
        atol=0.02,
    )


def test_two_trainings_one_after_the_other() -> None:
    accelerator = accelerator_with({})
    curves = []
    for _ in range(2):
        model = small()
        engine, optimizer, data = accelerator.prepare(
            model, torch.optim.AdamW(model.parameters(), lr=1e-3), loader()
        )
        curves.append(train(accelerator, engine, data, optimizer))
        engine, optimizer, data = accelerator.free_memory(engine, optimizer, data)
        assert engine is None and accelerator.deepspeed_engine_wrapped is None
    assert curves[0] == curves[1]


def test_two_engines_side_by_side() -> None:
    """A teacher that is asked and a student that learns, prepared one by one."""
    accelerator = accelerator_with({})
    student, teacher = small(1), small(2).requires_grad_(False)
    expected = copy.deepcopy(teacher)
    student, optimizer, data = accelerator.prepare(
        student, torch.optim.AdamW(student.parameters(), lr=1e-3), loader()
    )
    teacher = accelerator.prepare(teacher)
    assert isinstance(teacher, Engine) and teacher is not student
    for batch in data:
        with torch.no_grad():
            target = teacher(**batch).logits
        torch.testing.assert_close(target, expected(**batch).logits.detach())
        accelerator.backward((student(**batch).logits - target).square().mean())
        optimizer.step()
    assert student.counters.global_steps == STEPS
    teacher.destroy()
    student.destroy()
    student.destroy()


def test_models_load_whole_under_stage_3_and_are_sharded_by_prepare(tmp_path: Path) -> None:
    small().save_pretrained(tmp_path)
    accelerator = accelerator_with({})
    loaded = BertForSequenceClassification.from_pretrained(tmp_path)
    drawn = AutoModel.from_config(
        BertConfig(
            vocab_size=31,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=24,
        )
    )
    assert isinstance(drawn, BertModel) and drawn.embeddings.word_embeddings.weight.std() > 0.01
    for (name, ours), theirs in zip(loaded.named_parameters(), small().parameters()):
        assert type(ours) is nn.Parameter, name
        assert torch.equal(ours, theirs), name
    loaded.resize_token_embeddings(40)
    assert loaded.bert.embeddings.word_embeddings.weight.shape == (40, 16)
    engine, _, _ = accelerator.prepare(loaded, torch.optim.AdamW(loaded.parameters()), loader())
    assert all(isinstance(p, ReleasedParameter) for p in engine.module.parameters())
    with deepspeed.zero.GatheredParameters(engine.module.classifier.weight, modifier_rank=0):
        engine.module.classifier.weight.data.fill_(2.0)
    assert accelerator.get_state_dict(engine)["classifier.weight"].eq(2.0).all()


def test_whole_weights_out_of_a_saved_state(tmp_path: Path) -> None:
    accelerator = accelerator_with({})
    model = small()
    engine, optimizer, data = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=1e-3), loader()
    )
    train(accelerator, engine, data, optimizer)
    accelerator.save_state(str(tmp_path))
    whole = accelerator.get_state_dict(engine)
    counted = torch.load(
        deepspeed.utils.zero_to_fp32.get_model_state_file(str(tmp_path), 3), weights_only=True
    )
    ranks = [
        torch.load(file, weights_only=True)
        for file in deepspeed.utils.zero_to_fp32.get_optim_files(str(tmp_path))
    ]
    assert counted["dp_world_size"] == len(ranks) == 1 and counted["global_steps"] > 0
    assert [rank["optimizer_state_dict"]["zero_stage"] for rank in ranks] == [3]
    loose = deepspeed.utils.zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(str(tmp_path))
    filled = deepspeed.utils.zero_to_fp32.load_state_dict_from_zero_checkpoint(
        small(8), str(tmp_path)
    ).state_dict()
    for name, tensor in whole.items():
        assert torch.equal(tensor, loose[name]) and torch.equal(tensor, filled[name]), name
    deepspeed.utils.zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(
        str(tmp_path), str(tmp_path / "model")
    )
    assert list((tmp_path / "model").glob("pytorch_model*.bin"))


def test_generation_in_the_middle_of_training_as_trl_does_it() -> None:
    """TRL gathers everything, takes the hooks off, runs the bare model, and puts the hooks back."""
    accelerator = accelerator_with({})
    model, expected = small(), small()
    engine, optimizer, data = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=1e-3), loader()
    )
    batch = next(iter(data))
    with deepspeed.zero.GatheredParameters(engine.parameters()):
        offload = engine.optimizer.parameter_offload
        for _, parameter in [
            *offload.module.named_parameters(),
            *offload.module.ds_external_parameters(),
        ]:
            assert (
                parameter.ds_status
                == deepspeed.runtime.zero.partition_parameters.ZeroParamStatus.AVAILABLE
            )
            parameter.ds_active_sub_modules.clear()
        for hook in [*offload.forward_hooks, *offload.backward_hooks]:
            hook.remove()
        offload.forward_hooks, offload.backward_hooks = [], []
        with torch.no_grad():
            seen = accelerator.unwrap_model(engine)(**batch).logits
        if not offload.param_coordinator.is_invalid_trace():
            offload.param_coordinator._invalidate_trace()
        offload._register_deepspeed_module(offload.module)
    torch.testing.assert_close(seen, expected(**batch).logits.detach())
    assert all(isinstance(p, ReleasedParameter) for p in engine.module.parameters())
    torch.testing.assert_close(
        torch.tensor(train(accelerator, engine, data, optimizer)),
        torch.tensor(plain(expected, torch.optim.AdamW(expected.parameters(), lr=1e-3))),
    )


def test_an_optimizer_that_is_wrong_on_shards_is_refused() -> None:
    accelerator = accelerator_with({})
    model = small()
    with pytest.raises(UnsupportedOptimizerError, match="LBFGS"):
        accelerator.prepare(model, torch.optim.LBFGS(model.parameters()), loader())


def test_a_key_that_nobody_knows_is_refused() -> None:
    accelerator = accelerator_with({"gradient_cliping": 1.0})
    model = small()
    with pytest.raises(ConfigError, match="gradient_clipping"):
        accelerator.prepare(model, torch.optim.AdamW(model.parameters()), loader())
