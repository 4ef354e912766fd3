"""A Trainer under ZeRO on one rank: the three routes, evaluation, saving and resuming, against
the plain Trainer.
"""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import safetensors.torch
import torch
import transformers
from torch import nn

import hf_zero
from hf_zero.engine import Engine
from hf_zero.errors import ConfigError
from hf_zero.integrations.engine_teardown import destroy_and_restore
from hf_zero.logging import logger
from tests.helpers.plain_process import forget
from tests.helpers.trainers import (
    BEST,
    EVERY_STEP,
    ROUTES,
    assert_same_training,
    distance,
    logged,
    model,
    options,
    routed,
    rows,
    weights,
)

pytestmark = pytest.mark.usefixtures("plain_process")

STAGES = (0, 1, 2, 3)


@pytest.mark.parametrize("architecture", ["bert", "gpt2"])
def test_every_route_and_stage_trains_as_the_plain_trainer(
    architecture: str, tmp_path: Path
) -> None:
    changes = {"gradient_accumulation_steps": 2}
    oracle = routed("plain", 0, tmp_path, architecture, **changes)
    oracle.train()
    losses = []
    for stage, route in zip(
        (*STAGES, 3, 3), ("ours", "stock", "callback", "ours", "stock", "callback"), strict=True
    ):
        run = routed(route, stage, tmp_path, architecture, **changes)
        run.train()
        assert isinstance(run.model_wrapped, Engine) and run.model_wrapped.stage == stage
        assert_same_training(run, oracle)
        losses.append(logged(run))
    assert losses[3] == losses[4] == losses[5]


@pytest.mark.long
@pytest.mark.parametrize("architecture", ["bert", "gpt2", "llama"])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("route", ROUTES)
def test_the_whole_matrix(architecture: str, stage: int, route: str, tmp_path: Path) -> None:
    oracle = routed("plain", 0, tmp_path, architecture)
    oracle.train()
    run = routed(route, stage, tmp_path, architecture)
    run.train()
    assert_same_training(run, oracle)


@pytest.mark.parametrize("stage", STAGES)
def test_evaluation_before_training(stage: int, tmp_path: Path) -> None:
    oracle = routed("plain", 0, tmp_path)
    expected = oracle.evaluate()["eval_loss"]
    oracle.train()
    run = routed(
        "ours",
        stage,
        tmp_path,
        config={"scheduler": {"type": "WarmupDecayLR"}} if stage == 3 else None,
    )
    assert run.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-6)
    assert run.predict(rows()[:3]).predictions.shape[0] == 3
    run.train()
    assert isinstance(run.deepspeed, Engine)
    assert logged(run)[0] == pytest.approx(logged(oracle)[0], rel=1e-5)
    if stage < 3:
        assert_same_training(run, oracle)


@pytest.mark.parametrize("stage", STAGES)
def test_evaluation_alone_then_saving(stage: int, tmp_path: Path) -> None:
    run = routed("stock", stage, tmp_path)
    loss = run.evaluate()["eval_loss"]
    run.save_model(str(tmp_path / "saved"))
    again = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "saved")
    plain = routed("plain", 0, tmp_path, model=again)
    assert plain.evaluate()["eval_loss"] == pytest.approx(loss, rel=1e-6)


@pytest.mark.parametrize("stage", STAGES)
def test_evaluation_while_training_prediction_and_saving(stage: int, tmp_path: Path) -> None:
    changes = {"eval_strategy": "steps", "eval_steps": 2, "eval_on_start": True}
    oracle = routed("plain", 0, tmp_path, **changes)
    oracle.train()
    run = routed("ours", stage, tmp_path, **changes)
    run.train()
    assert logged(run, "eval_loss") == pytest.approx(logged(oracle, "eval_loss"), rel=1e-5)
    expected, found = oracle.predict(rows()[:5]), run.predict(rows()[:5])
    assert torch.allclose(
        torch.tensor(found.predictions), torch.tensor(expected.predictions), atol=1e-4
    )
    run.save_model(str(tmp_path / "saved"))
    again = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "saved").state_dict()
    trained = weights(oracle)
    for name, value in again.items():
        assert torch.allclose(value, trained[name], atol=1e-5), name


@pytest.mark.parametrize("stage", (1, 3))
def test_resuming_is_exact(stage: int, tmp_path: Path) -> None:
    changes = {"save_strategy": "steps", "save_steps": 2}
    whole = routed("ours", stage, tmp_path / "whole", **changes)
    whole.train()
    shutil.copytree(tmp_path / "whole" / "checkpoint-2", tmp_path / "again" / "checkpoint-2")
    resumed = routed("ours", stage, tmp_path / "again", **changes)
    resumed.train(resume_from_checkpoint=True)
    assert logged(resumed) == logged(whole)
    assert logged(resumed, "learning_rate") == logged(whole, "learning_rate")
    expected = weights(whole)
    assert all(torch.equal(value, expected[name]) for name, value in weights(resumed).items())
    names = {path.name for path in (tmp_path / "whole" / "checkpoint-2").iterdir()}
    assert "model.safetensors" in names and "global_step2" in names


def test_resuming_after_an_evaluation(tmp_path: Path) -> None:
    changes = {"save_strategy": "steps", "save_steps": 2}
    whole = routed("callback", 3, tmp_path, **changes)
    whole.train()
    resumed = routed("callback", 3, tmp_path, **changes)
    resumed.evaluate()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert logged(resumed) == logged(whole)


@pytest.mark.parametrize("stage", (0, 3))
def test_the_best_model_is_loaded_at_the_end(stage: int, tmp_path: Path) -> None:
    run = routed("ours", stage, tmp_path, **EVERY_STEP, **BEST)
    run.train()
    losses = logged(run, "eval_loss")
    assert losses[0] < losses[-1]
    assert run.evaluate()["eval_loss"] == pytest.approx(min(losses), rel=1e-6)


def test_a_scheduler_and_an_optimizer_in_the_config(tmp_path: Path) -> None:
    config = {"optimizer": {"type": "AdamW"}, "scheduler": {"type": "WarmupDecayLR"}}
    losses = []
    for route, stage in (("ours", 1), ("stock", 3), ("callback", 3)):
        run = routed(route, stage, tmp_path, config=config, max_steps=3)
        run.train()
        losses.append(logged(run))
        assert len(set(logged(run, "learning_rate"))) > 1
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert losses[1] == losses[2]


@pytest.mark.parametrize("stage", (0, 3))
def test_the_trainers_own_optimizer_and_scheduler_are_used(stage: int, tmp_path: Path) -> None:
    def run(route: str) -> tuple[transformers.Trainer, torch.optim.Optimizer]:
        made = model()
        optimizer = torch.optim.SGD(made.parameters(), lr=0.05, momentum=0.9)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
        started = routed(route, stage, tmp_path, model=made, optimizers=(optimizer, schedule))
        started.train()
        return started, optimizer

    oracle, _ = run("plain")
    found, optimizer = run("ours")
    assert_same_training(found, oracle)
    assert found.deepspeed.optimizer is optimizer
    assert logged(found, "learning_rate")[1] == 0.025


@pytest.mark.parametrize("route", ("ours", "stock"))
def test_the_trainers_adafactor(route: str, tmp_path: Path) -> None:
    changes = {"optim": "adafactor", "save_strategy": "steps", "save_steps": 2}
    plain = routed("plain", 0, tmp_path / "plain", **changes)
    plain.train()
    whole = routed(route, 3, tmp_path / "whole", **changes)
    whole.train()
    assert_same_training(whole, plain, without="key.bias")
    resumed = routed(route, 2, tmp_path / "again", **changes)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert_same_training(resumed, plain, without="key.bias")


def test_two_optimizers(tmp_path: Path) -> None:
    made = model()
    optimizer = torch.optim.SGD(made.parameters(), lr=0.05)
    run = routed(
        "ours",
        2,
        tmp_path,
        model=made,
        optimizers=(optimizer, None),
        config={"optimizer": {"type": "AdamW"}},
    )
    with pytest.raises(ConfigError, match=r"gives SGD and the ZeRO config gives 'AdamW'"):
        run.train()


@pytest.mark.parametrize("route", ROUTES)
def test_tensor_parallelism_that_is_off(route: str, tmp_path: Path) -> None:
    """0 is DeepSpeed's default; the Trainer divides the ranks by it."""
    off = {"tensor_parallel": {"autotp_size": 0}}
    run = routed(route, 1, tmp_path, "gpt2", config=off, max_steps=1)
    run.train()
    assert run.get_tp_size() == 1


def test_a_wrapped_model_is_refused(tmp_path: Path) -> None:
    class Wrapped(transformers.Trainer):
        def _wrap_model(
            self, model: nn.Module, training: bool = True, dataloader: Any = None
        ) -> nn.Module:
            return nn.DataParallel(model)

    args = hf_zero.TrainingArguments(**options(tmp_path), zero_config="zero2")
    run = Wrapped(model=model(), args=args, train_dataset=rows())
    with pytest.raises(ConfigError, match="prepared DataParallel instead of hf-zero's engine"):
        run.train()


@pytest.mark.turns
@pytest.mark.parametrize("stage", (1, 3))
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_16_bit_training(stage: int, precision: str, tmp_path: Path) -> None:
    oracle = routed("plain", 0, tmp_path)
    oracle.train()
    scale = {"loss_scale": 128} if precision == "fp16" else {}
    by_flag = routed("ours", stage, tmp_path, config={precision: scale}, **{precision: True})
    by_flag.train()
    by_config = routed("stock", stage, tmp_path, config={precision: {"enabled": True, **scale}})
    by_config.train()
    assert logged(by_flag) == logged(by_config)
    assert logged(by_flag) == pytest.approx(logged(oracle), rel=2e-2)
    assert next(by_flag.model.parameters()).dtype == getattr(
        torch, {"bf16": "bfloat16", "fp16": "float16"}[precision]
    )


@pytest.mark.parametrize("stage", (0, 3))
def test_a_step_that_overflowed_leaves_the_schedule_alone(stage: int, tmp_path: Path) -> None:
    run = routed(
        "ours",
        stage,
        tmp_path,
        config={"fp16": {"initial_scale_power": 24, "hysteresis": 1}},
        fp16=True,
        warmup_steps=0,
        max_steps=12,
    )
    run.train()
    skipped = run.deepspeed.counters.skipped_steps
    assert 0 < skipped < 12
    rates = logged(run, "learning_rate")
    assert rates[: skipped + 1] == [rates[0]] * (skipped + 1) and rates[-1] < rates[0]


@pytest.mark.parametrize("stage", STAGES)
def test_a_second_train_goes_on(stage: int, tmp_path: Path) -> None:
    runs = []
    for route in ("plain", "ours"):
        run = routed(route, stage, tmp_path)
        run.train()
        # the plain Trainer keeps Adam's moments, under ZeRO each train() begins with new ones
        run.optimizer = None
        run.train()
        runs.append(run)
    assert_same_training(runs[1], runs[0])


@pytest.mark.parametrize("stage", (1, 3))
def test_a_second_train_in_16_bits_loses_nothing(stage: int, tmp_path: Path) -> None:
    run = routed("ours", stage, tmp_path, bf16=True)
    run.train()
    masters = {
        name: hf_zero.safe_get_full_fp32_param(parameter)
        for name, parameter in run.model.named_parameters()
    }
    destroy_and_restore(run.deepspeed)
    for name, parameter in run.model.named_parameters():
        assert type(parameter) is nn.Parameter and torch.equal(parameter, masters[name])
    assert not all(torch.equal(value, value.bfloat16().float()) for value in masters.values())


def test_the_level_of_the_log_is_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logger, "level", logging.INFO)
    routed("ours", 1, tmp_path, log_level="error").train()
    assert logger.level == logging.INFO


@pytest.mark.parametrize("stage", (1, 3))
def test_adapters_over_frozen_blocks(stage: int, tmp_path: Path) -> None:
    def lora() -> nn.Module:
        torch.manual_seed(5)
        config = peft.LoraConfig(
            r=4, target_modules=["c_attn"], task_type="CAUSAL_LM", init_lora_weights=False
        )
        return peft.get_peft_model(model("gpt2"), config)

    changes = {"save_strategy": "steps", "save_steps": 2, "learning_rate": 1e-2}
    oracle = routed("plain", 0, tmp_path / "plain", "gpt2", model=lora(), learning_rate=1e-2)
    oracle.train()
    whole = routed("ours", stage, tmp_path, "gpt2", model=lora(), **changes)
    whole.train()
    assert_same_training(whole, oracle)
    resumed = routed("ours", stage, tmp_path, "gpt2", model=lora(), **changes)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert logged(resumed) == logged(whole)
    resumed.save_model(str(tmp_path / "saved"))
    saved = safetensors.torch.load_file(tmp_path / "saved" / "adapter_model.safetensors")
    trained = peft.get_peft_model_state_dict(oracle.model)
    assert saved.keys() == trained.keys() and saved
    assert distance(saved, trained) <= 1e-5 * distance(trained)


@pytest.mark.parametrize("stage", (0, 3))
def test_generation_in_evaluation(stage: int, tmp_path: Path) -> None:
    data = [{"input_ids": row["input_ids"], "labels": row["labels"][:5]} for row in rows("t5")]
    losses = []
    for route in ("plain", "stock"):
        zero = {"deepspeed": {"zero_optimization": {"stage": stage}}} if route == "stock" else {}
        settings = options(
            tmp_path,
            predict_with_generate=True,
            generation_max_length=7,
            eval_strategy="steps",
            eval_steps=2,
            **zero,
        )
        args = transformers.Seq2SeqTrainingArguments(**settings)
        run = transformers.Seq2SeqTrainer(
            model=model("t5"), args=args, train_dataset=data, eval_dataset=data[:6]
        )
        before = run.predict(data[:3]).predictions
        run.train()
        losses.append(
            (
                logged(run),
                logged(run, "eval_loss"),
                before.tolist(),
                run.predict(data[:3]).predictions.tolist(),
            )
        )
    for found, expected in zip(losses[1], losses[0], strict=True):
        assert torch.allclose(torch.tensor(found), torch.tensor(expected), rtol=1e-5)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_second_training_has_a_new_optimizer(
    stage: int, tmp_path: Path, heard_in_full: list[str]
) -> None:
    """Under ZeRO Transformers begins each train() with one; a plain Trainer keeps that of the
    first, and otherwise does the same.
    """
    kept, oracle = (routed("plain", 0, tmp_path) for _ in range(2))
    for each in (kept, kept, oracle):
        each.train()
    oracle.optimizer = None
    oracle.train()
    forget()
    run = routed("ours", stage, tmp_path)
    for _ in range(2):
        run.train()
    assert_same_training(run, oracle)
    assert logged(kept)[:2] == pytest.approx(logged(oracle)[:2], rel=1e-6)
    assert abs(logged(kept)[2] - logged(oracle)[2]) > 1e-3
    assert (
        sum(
            "another train() goes on with the weights and with a new optimizer" in text
            for text in heard_in_full
        )
        == 1
    )
