"""Kernels, compiled blocks and checkpointed blocks by the keys of the configuration: Trainers by
each route, and DeepSpeed's API.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import transformers
from torch.nn import functional

import hf_zero
from hf_zero.engine import Engine
from hf_zero.integrations.fused import report
from tests.helpers import oracle
from tests.helpers.launched import KEYS
from tests.helpers.trainers import logged, model, options, routed, rows, weights

pytestmark = pytest.mark.usefixtures("plain_process")


def accuracy(answer: Any) -> dict[str, float]:
    return {
        "accuracy": float((answer.predictions == answer.label_ids)[answer.label_ids >= 0].mean())
    }


CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "ours": ("gpt2", 3, {"gradient_accumulation_steps": 2}),
    "stock": (
        "llama",
        2,
        {
            "gradient_accumulation_steps": 2,
            "label_smoothing_factor": 0.1,
            "gradient_checkpointing": True,
        },
    ),
    "callback": ("bert", 1, {}),
}


@pytest.fixture(autouse=True)
def references(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ZERO_TRITON", "0")


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Callable[[str], int]:
    """Return a function that counts the lines of our log with a given beginning."""
    from hf_zero.logging import logger

    monkeypatch.setattr(logger, "propagate", True)
    caplog.set_level(logging.INFO, logger.name)
    return lambda start: sum(record.getMessage().startswith(start) for record in caplog.records)


@pytest.mark.parametrize("route", CASES)
def test_a_trainer_with_the_keys_is_one_without(
    route: str, tmp_path: Path, told: Callable[[str], int]
) -> None:
    """Evaluated before and on the way, with a metric of the logits; saved; the best model found;
    resumed; taken apart.
    """
    architecture, stage, more = CASES[route]
    steps = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    chosen = {**more, **steps, "load_best_model_at_end": True, "metric_for_best_model": "eval_loss"}
    metrics = {
        "compute_metrics": accuracy,
        "preprocess_logits_for_metrics": lambda logits, labels: logits.argmax(-1),
    }

    def made(name: str, route: str) -> transformers.Trainer:
        keys = {**chosen, **metrics}
        return routed(route, stage, tmp_path / name, architecture, KEYS, **keys)

    def finished(run: transformers.Trainer) -> tuple[transformers.Trainer, dict[str, float], Any]:
        before = run.evaluate()
        run.train()
        return run, before, run.predict(rows(architecture, 5))

    plain, before, want = finished(made("plain", "plain"))
    run, found_before, found = finished(made("keys", route))
    for key in ("eval_loss", "eval_accuracy"):
        assert found_before[key] == pytest.approx(before[key], rel=1e-6)
    engine = run.model_wrapped
    assert isinstance(engine, Engine) and len(report(engine.module).replaced) > 8
    assert told("fused kernels in") == 1
    for key in ("loss", "eval_loss", "grad_norm", "eval_accuracy"):
        assert logged(run, key) == pytest.approx(logged(plain, key), rel=1e-5), key
    assert run._signature_columns is not None
    assert set(run._signature_columns) == set(plain._signature_columns or ())
    oracle.compare_tensors("weights", weights(run), weights(plain), floor=oracle.ADAM_ROUNDING)
    assert found.metrics["test_loss"] == pytest.approx(want.metrics["test_loss"], rel=1e-5)
    assert found.predictions.shape == want.predictions.shape

    again = made("again", route)
    again.train(resume_from_checkpoint=str(tmp_path / "keys" / "checkpoint-2"))
    assert logged(again) == pytest.approx(logged(run), rel=1e-6)
    engine.destroy()
    hf_zero.restore(run.model)
    assert not any("forward" in module.__dict__ for module in run.model.modules())


def test_a_loss_that_reads_logits_beside_labels(tmp_path: Path) -> None:
    """A common form of ``compute_loss``: the labels go to the model, and its logits into another
    loss.
    """

    class Weighted(transformers.Trainer):
        def compute_loss(
            self,
            model: Any,
            inputs: Any,
            return_outputs: bool = False,
            num_items_in_batch: Any = None,
        ) -> Any:
            outputs = model(**inputs)
            logits, labels = outputs.logits[:, :-1].float(), inputs["labels"][:, 1:]
            loss = functional.cross_entropy(
                logits.flatten(0, 1), labels.flatten(), label_smoothing=0.2
            )
            return (loss, outputs) if return_outputs else loss

    def trained(name: str, **zero: Any) -> transformers.Trainer:
        args = hf_zero.TrainingArguments(
            **options(tmp_path / name), zero_config={"zero_optimization": {"stage": 3}, **zero}
        )
        run = Weighted(model=model("llama"), args=args, train_dataset=rows("llama"))
        run.train()
        return run

    without, run = trained("without"), trained("with", kernels=["loss"])
    assert logged(run) == pytest.approx(logged(without), rel=1e-5)
    assert logged(run, "grad_norm") == pytest.approx(logged(without, "grad_norm"), rel=1e-5)


def test_a_masked_language_model_says_that_it_divides(
    tmp_path: Path, told: Callable[[str], int]
) -> None:
    """BertForMaskedLM ignores num_items_in_batch, so that a plain Trainer logs the sum over a
    window. The fused head logs the mean.
    """

    def trained(route: str) -> transformers.Trainer:
        run = routed(route, 2, tmp_path, config={"kernels": "auto"}, gradient_accumulation_steps=2)
        run.train()
        return run

    plain, run = trained("plain"), trained("stock")
    assert logged(run) == pytest.approx([loss / 2 for loss in logged(plain)], rel=1e-5)
    assert told("BertForMaskedLM is given num_items_in_batch") == 1


DEEPSPEEDS = {
    "checkpointing": {
        "kernels": "auto",
        "compile": {"deepcompile": False},
        "activation_checkpointing": {
            "partition_activations": True, "cpu_checkpointing": True,
            "contiguous_memory_optimization": True, "number_checkpoints": 2,
            "synchronize_checkpoint_boundary": False, "profile": False,
        },
    },
    "sparse attention": {
        "sparse_attention": {
            "mode": "fixed", "block": 16, "different_layout_per_head": True, "num_local_blocks": 4,
            "num_global_blocks": 1,
            "attention": "bidirectional", "horizontal_global_attention": False,
            "num_different_global_patterns": 4,
            "num_random_blocks": 0, "local_window_blocks": [4], "global_block_indices": [0],
            "num_sliding_window_blocks": 3,
        },
    },
    "compiled": {"compile": {"blocks": True, "backend": "aot_eager"}, "kernels": KEYS["kernels"],
    "attention_backend": "math"},
}  # fmt: skip


@pytest.mark.parametrize("keys", DEEPSPEEDS.values(), ids=DEEPSPEEDS)
def test_a_deepspeed_script_with_its_own_sections(keys: dict[str, Any]) -> None:
    """Nine tokens fit into one block of a sparse layout, so sparse attention is dense there."""

    def trained(more: dict[str, Any]) -> list[float]:
        optimizer = {"type": "AdamW", "params": {"lr": 1e-3, "eps": 1e-6}}
        config = {
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 2,
            "zero_optimization": {"stage": 2},
        }
        net = model("bert")
        engine, *_ = deepspeed.initialize(
            model=net,
            model_parameters=net.parameters(),
            config={**config, "optimizer": optimizer, **more},
        )
        losses, data = [], rows("bert")
        for start in range(0, len(data), 4):
            loss = engine(
                **{
                    name: torch.stack([row[name] for row in data[start : start + 4]])
                    for name in data[0]
                }
            ).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        changed = bool(report(net).replaced)
        engine.destroy()
        assert changed == bool(more)
        return losses

    assert trained(keys) == pytest.approx(trained({}), rel=1e-5)
