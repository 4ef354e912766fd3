"""A Trainer under ZeRO on one rank: the three routes, evaluation, saving, resuming, offload and
options of scripts, against the plain Trainer.
"""

from __future__ import annotations

import logging
import shutil
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import peft
import pytest
import safetensors.torch
import torch
import transformers
from packaging.version import Version
from torch import nn

import hf_zero
from hf_zero.engine import Engine
from hf_zero.errors import ConfigError
from hf_zero.logging import logger
from tests.helpers import oracle
from tests.helpers.cells import in_turn
from tests.helpers.models import VOCAB
from tests.helpers.offloads import offload
from tests.helpers.plain_process import forget
from tests.helpers.trainers import (
    assert_same_training,
    distance,
    logged,
    model,
    options,
    routed,
    rows,
    weights,
)

SAVES = {"save_strategy": "steps", "save_steps": 2}


def trained(*given: Any, **changes: Any) -> transformers.Trainer:
    run = routed(*given, **changes)
    run.train()
    return run


def test_evaluation_prediction_and_saving(tmp_path: Path) -> None:
    """Before training, on the way and after it."""
    runs, found = [], []
    for route in ("plain", "ours"):
        on_the_way = {"eval_strategy": "steps", "eval_steps": 2, "eval_on_start": True}
        run = routed(route, 3, tmp_path, **on_the_way)
        before = run.evaluate()["eval_loss"]
        run.save_model(str(tmp_path / f"untrained {route}"))
        assert run.predict(rows()[:3]).predictions.shape[0] == 3
        run.train()
        found.append([before, *logged(run, "eval_loss")])
        found.append(torch.tensor(run.predict(rows()[:5]).predictions))
        runs.append(run)
    assert_same_training(runs[1], runs[0])
    assert found[2][0] == pytest.approx(found[0][0], rel=1e-6)
    assert found[2] == pytest.approx(found[0], rel=1e-5)
    assert torch.allclose(found[3], found[1], atol=1e-4)
    runs[1].save_model(str(tmp_path / "saved"))
    load = transformers.AutoModelForMaskedLM.from_pretrained
    right = load(tmp_path / "untrained plain").state_dict()
    again = load(tmp_path / "untrained ours").state_dict()
    assert all(torch.equal(value, right[name]) for name, value in again.items())
    again, right = load(tmp_path / "saved").state_dict(), weights(runs[0])
    assert all(torch.allclose(value, right[name], atol=1e-5) for name, value in again.items())


@pytest.mark.parametrize(("saved", "stage"), [(3, 3), (3, 0)])
def test_a_resumed_run_is_the_run_at_any_stage(saved: int, stage: int, tmp_path: Path) -> None:
    whole = trained("callback", saved, tmp_path / "whole", **SAVES)
    folder = tmp_path / "whole" / "checkpoint-2"
    assert {"model.safetensors", "global_step2"} <= {path.name for path in folder.iterdir()}
    shutil.copytree(folder, tmp_path / "again" / "checkpoint-2")
    again = routed("callback", stage, tmp_path / "again", **SAVES)
    if saved == stage:
        again.evaluate()
    again.train(resume_from_checkpoint=True)
    assert logged(again, "learning_rate") == logged(whole, "learning_rate")
    assert logged(again) == pytest.approx(logged(whole), rel=1e-5)
    expected = weights(whole)
    assert distance(weights(again), expected) <= 1e-5 * distance(expected)
    if saved == stage:
        assert logged(again) == logged(whole)
        assert all(torch.equal(value, expected[name]) for name, value in weights(again).items())


def test_names_of_bitsandbytes_train_in_8_bits_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Embeddings keep fp32, as the Trainer has it with bitsandbytes."""
    monkeypatch.setattr(transformers.utils, "is_bitsandbytes_available", lambda: False)

    def wide() -> nn.Module:
        torch.manual_seed(5)
        sizes = {"n_embd": 64, "n_layer": 1, "n_head": 2, "vocab_size": VOCAB}
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))

    fp32 = logged(trained("plain", 0, tmp_path, "gpt2", model=wide()))
    found = {}
    for stage, name in enumerate(("adamw_bnb_8bit", "paged_adamw_8bit", "lion_8bit", "adamw_8bit")):
        run = trained("ours", stage, tmp_path, "gpt2", model=wide(), optim=name)
        coded = run.model_wrapped.bound._table.entries.names_in_8_bits
        assert {each.rpartition("h.0.")[2] for each in coded} == {
            "attn.c_attn.weight",
            "attn.c_proj.weight",
            "mlp.c_fc.weight",
            "mlp.c_proj.weight",
        }
        found[name] = logged(run)
    assert found["adamw_bnb_8bit"] == found["paged_adamw_8bit"] == found["adamw_8bit"]
    assert max(abs(a - b) for a, b in zip(found["adamw_8bit"], fp32)) < 0.01
    assert found["lion_8bit"] != found["adamw_8bit"]
    with pytest.raises(ImportError, match="bitsandbytes"):
        trained("ours", 1, tmp_path, "gpt2", model=wide(), optim="ademamix_8bit")


def test_two_optimizers_a_scheduler_alone_and_a_wrapped_model_are_refused(tmp_path: Path) -> None:
    made = model()
    given: dict[str, Any] = {"model": made}
    given["optimizers"] = (torch.optim.SGD(made.parameters(), lr=0.05), None)
    run = routed("ours", 2, tmp_path, config={"optimizer": {"type": "AdamW"}}, **given)
    with pytest.raises(ConfigError, match=r"gives SGD and the ZeRO config gives 'AdamW'"):
        run.train()
    forget()
    schedule = torch.optim.lr_scheduler.ConstantLR(given["optimizers"][0])
    for route in ("ours", "callback"):
        with pytest.raises(ConfigError, match="ConstantLR"):
            routed(route, 2, tmp_path, model=made, optimizers=(None, schedule))
        forget()
    assert routed("plain", 0, tmp_path, model=made, optimizers=(None, schedule)).optimizer is None
    forget()

    class Wrapped(transformers.Trainer):
        def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None) -> Any:
            return nn.DataParallel(model)

    args = hf_zero.TrainingArguments(**options(tmp_path), zero_config="zero2")
    with pytest.raises(ConfigError, match="prepared DataParallel instead of hf-zero's engine"):
        Wrapped(model=model(), args=args, train_dataset=rows()).train()


class OwnOptimizer(transformers.Trainer):
    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        return self.optimizer


class OwnGroups(transformers.Trainer):
    def get_optimizer_cls_and_kwargs(self, args: Any, model: Any = None) -> Any:
        return torch.optim.SGD, {"lr": 0.05}


def test_an_optimizer_of_the_class_that_the_section_replaces(
    tmp_path: Path, heard: list[str]
) -> None:
    for kind, name in ((OwnOptimizer, "create_optimizer"), (OwnGroups, "get_optimizer_cls_and_")):
        for section in ({}, {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}):
            forget()
            heard.clear()
            written = {"zero_optimization": {"stage": 1}, **section}
            args = transformers.TrainingArguments(
                **options(tmp_path, max_steps=1), deepspeed=written
            )
            run = kind(model(), args, train_dataset=rows())
            run.train()
            told = [text for text in heard if f"{kind.__name__}.{name}" in text]
            assert bool(told) is bool(section)
            assert all("'AdamW', replaces" in text and "remove the sect" in text for text in told)
            run.deepspeed.destroy()


def test_tensor_parallelism_that_is_off_and_the_level_of_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0 is DeepSpeed's default; the Trainer divides the ranks by it. The level is the user's."""
    monkeypatch.setattr(logger, "level", logging.INFO)
    off = {"tensor_parallel": {"autotp_size": 0}}
    for route in ("ours", "stock"):
        run = trained(route, 1, tmp_path, "gpt2", config=off, max_steps=1, log_level="error")
        assert run.get_tp_size() == 1, route
        assert logger.level == logging.INFO


def test_a_step_that_overflowed_leaves_the_schedule_alone(tmp_path: Path) -> None:
    scale = {"fp16": {"initial_scale_power": 24, "hysteresis": 1}}
    changes = {"fp16": True, "warmup_steps": 0, "max_steps": 12}
    run = trained("ours", 3, tmp_path, config=scale, **changes)
    skipped = run.deepspeed.counters.skipped_steps
    assert 0 < skipped < 12
    rates = logged(run, "learning_rate")
    assert rates[: skipped + 1] == [rates[0]] * (skipped + 1) and rates[-1] < rates[0]


def test_a_second_train_goes_on_with_a_new_optimizer(
    tmp_path: Path, heard_in_full: list[str]
) -> None:
    """Under ZeRO Transformers begins each train() with one; a plain Trainer keeps the first."""
    plain = trained("plain", 0, tmp_path)
    plain.optimizer = None
    plain.train()
    for stage, freed in ((3, False), (2, True), (3, True)):
        forget()
        heard_in_full.clear()
        run = trained("ours", stage, tmp_path)
        if freed:  # a script may end the engine itself
            run.accelerator.free_memory()
        run.train()
        assert_same_training(run, plain)
        said = "another train() goes on with the weights and with a new optimizer"
        assert sum(said in text for text in heard_in_full) == 1


def test_a_second_train_of_a_model_with_another_frozen_module(tmp_path: Path) -> None:
    runs = []
    for route, stage in (("plain", 0), ("ours", 3)):
        runs.append(trained(route, stage, tmp_path, optim="sgd"))
        runs[-1].model.probe = nn.Linear(3, 2).requires_grad_(False)
        runs[-1].train()
        forget()
    assert logged(runs[1]) == pytest.approx(logged(runs[0]), rel=1e-5)


@pytest.mark.parametrize("given", [False, True])
def test_a_schedule_that_a_script_made_is_made_anew_by_each_train(
    given: bool, tmp_path: Path
) -> None:
    """``create_optimizer_and_scheduler`` before ``train()``, of another number of steps."""
    runs = []
    for route in ("plain", "ours"):
        made = model()
        sgd = torch.optim.SGD(made.parameters(), lr=0.05) if given else None
        kept = {"optimizers": (sgd, None)} if given else {"optim": "sgd"}
        run = routed(route, 2, tmp_path, model=made, max_steps=3, **kept)
        run.create_optimizer_and_scheduler(7)
        for _ in range(2):
            run.train()
            runs.append((logged(run, "learning_rate"), logged(run)))
        forget()
    assert runs[0][0] == runs[1][0] == runs[2][0] == runs[3][0]
    assert [run[1] for run in runs[2:]] == [pytest.approx(run[1], rel=1e-4) for run in runs[:2]]


class Trial(SimpleNamespace):
    """One of a study of optuna."""

    def report(self, objective: float, step: int) -> None: ...

    def should_prune(self) -> bool:
        return False


class Study:
    def __init__(self) -> None:
        self.objectives: list[float] = []

    def optimize(self, objective: Any, n_trials: int, **_: Any) -> None:
        self.objectives += [objective(Trial(number=n, params={})) for n in range(n_trials)]
        best = min(self.objectives)
        at = self.objectives.index(best)
        self.best_trial = SimpleNamespace(number=at, value=best, params={})

    def _is_multi_objective(self) -> bool:
        return False


def test_a_search_trains_a_model_of_its_own_in_each_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, heard_in_full: list[str]
) -> None:
    """With a stand-in for optuna."""
    optuna = ModuleType("optuna")
    optuna.__spec__ = ModuleSpec("optuna", None)
    vars(optuna).update(Trial=Trial, trial=SimpleNamespace(BaseTrial=Trial))
    monkeypatch.setitem(sys.modules, "optuna", optuna)
    chosen = [
        {"learning_rate": 1e-3, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1},
        {"learning_rate": 3e-2, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
    ]

    def search(route: str) -> list[float]:
        forget()
        study = Study()
        vars(optuna)["create_study"] = lambda **_: study
        run = routed(route, 3, tmp_path / route, model=None, model_init=lambda: model())
        run.hyperparameter_search(
            hp_space=lambda trial: chosen[trial.number], n_trials=2, backend="optuna"
        )
        return study.objectives

    expected = search("plain")
    for route in ("ours", "stock"):
        assert search(route) == pytest.approx(expected, rel=1e-5)
    assert expected[0] != pytest.approx(expected[1], rel=1e-2)
    assert not any("goes on with the weights" in text for text in heard_in_full)
    with pytest.raises(ConfigError, match=r"TrainingArguments\(zero_config"):
        search("callback")


@in_turn("limit", [float("inf"), -1.0])
def test_a_limit_with_which_the_trainer_does_not_clip(limit: float, tmp_path: Path) -> None:
    chosen = {"max_grad_norm": limit, "max_steps": 2, "optim": "sgd", "learning_rate": 0.1}
    expected = trained("plain", 0, tmp_path, **chosen)
    forget()
    assert_same_training(trained("ours", 3, tmp_path, **chosen), expected)


def test_a_training_step_with_two_backwards(tmp_path: Path) -> None:
    """The second forward follows the first backward, from the first step on."""

    def run(route: str) -> transformers.Trainer:
        forget()
        twice = routed(route, 3, tmp_path, max_steps=2, optim="sgd", learning_rate=0.1)
        step = twice.training_step
        twice.training_step = lambda *args: step(*args) + step(*args)
        twice.train()
        return twice

    plain = run("plain")
    assert_same_training(run("ours"), plain)


def test_a_backward_of_a_training_step_is_divided_as_without_zero(tmp_path: Path) -> None:
    """A loss that a subclass passes to the Accelerator itself: the Trainer's own it divides."""

    def run(route: str) -> transformers.Trainer:
        forget()
        more = {"max_steps": 2, "optim": "sgd", "learning_rate": 0.1}
        own = routed(route, 2, tmp_path, gradient_accumulation_steps=2, **more)
        step = own.training_step

        def training_step(model: nn.Module, inputs: dict[str, Any], *others: Any) -> torch.Tensor:
            extra = own.compute_loss(model, own._prepare_inputs(dict(inputs)))
            own.accelerator.backward(extra)
            return step(model, inputs, *others)

        own.training_step = training_step
        own.train()
        return own

    plain = run("plain")
    assert_same_training(run("ours"), plain)


def test_the_engine_has_the_batch_that_fits(tmp_path: Path) -> None:
    class Short(transformers.Trainer):
        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            if self._train_batch_size > 3:
                raise RuntimeError("CUDA out of memory.")
            return super().training_step(*args, **kwargs)

    chosen = options(tmp_path, auto_find_batch_size=True, max_steps=2)
    args = hf_zero.TrainingArguments(**chosen, zero_config="zero2")
    run = Short(model=model(), args=args, train_dataset=rows())
    run.train()
    assert run.deepspeed.train_micro_batch_size_per_gpu() == 3
    assert run.deepspeed.train_batch_size() == 3
    assert run.deepspeed.global_samples == 6


def test_adapters_over_frozen_blocks(tmp_path: Path) -> None:
    lora = peft.LoraConfig(
        r=4, target_modules=["c_attn"], task_type="CAUSAL_LM", init_lora_weights=False
    )

    def adapted() -> dict[str, Any]:
        torch.manual_seed(5)
        return {"model": peft.get_peft_model(model("gpt2"), lora), "learning_rate": 1e-2, **SAVES}

    plain = trained("plain", 0, tmp_path / "plain", "gpt2", **adapted())
    whole = trained("ours", 3, tmp_path, "gpt2", **adapted())
    assert_same_training(whole, plain)
    again = routed("ours", 3, tmp_path, "gpt2", **adapted())
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert logged(again) == logged(whole)
    again.save_model(str(tmp_path / "saved"))
    saved = safetensors.torch.load_file(tmp_path / "saved" / "adapter_model.safetensors")
    right = peft.get_peft_model_state_dict(plain.model)
    assert saved.keys() == right.keys() and saved
    assert distance(saved, right) <= 1e-5 * distance(right)


def test_offloaded_it_trains_and_resumes_as_without_zero(tmp_path: Path) -> None:
    """Two micro-batches a step, gradient checkpointing, a schedule that falls at each step, an
    evaluation in between.
    """
    more = {
        "gradient_accumulation_steps": 2, "lr_scheduler_type": "linear", "eval_strategy": "steps",
        "gradient_checkpointing": True, "eval_steps": 2, **SAVES,
    }  # fmt: skip
    plain = trained("plain", 0, tmp_path / "plain", **more)
    (tmp_path / "disk").mkdir()
    config = {"zero_optimization": offload("all in files", 3, tmp_path / "disk")}
    run = trained("callback", 3, tmp_path, config=config, **more)
    engine = run.model_wrapped
    assert isinstance(engine, Engine) and engine.config.offload_optimizer.on
    assert all(flat.optimizer_shard.offloaded for flat in engine.sharded_model.trainable)
    for key in ("loss", "eval_loss", "grad_norm", "learning_rate"):
        # a plain Trainer of Transformers before 5.6 divides by the micro-batches twice
        twice = key == "grad_norm" and Version(transformers.__version__) < Version("5.6")
        right = [value * (2 if twice else 1) for value in logged(plain, key)]
        assert logged(run, key) == pytest.approx(right, rel=1e-4), key
    whole = weights(run)
    oracle.compare_tensors("weights", whole, weights(plain), floor=oracle.ADAM_ROUNDING)
    again = routed("callback", 3, tmp_path / "again", config=config, **more)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert logged(again) == logged(run)
    assert all(torch.equal(value, whole[name]) for name, value in weights(again).items())
