"""Kernels, compiled blocks and checkpointed blocks by the keys of the configuration: Trainers by
each route, and DeepSpeed's API.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch

import hf_zero
from hf_zero.engine import Engine
from hf_zero.integrations.fused import report
from tests.helpers import oracle
from tests.helpers.launched import KEYS
from tests.helpers.trainers import logged, model, routed, rows, weights


def accuracy(answer: Any) -> dict[str, float]:
    right = (answer.predictions == answer.label_ids)[answer.label_ids >= 0]
    return {"accuracy": float(right.mean())}


def test_a_trainer_with_the_keys_is_one_without(tmp_path: Path, heard_in_full: list[str]) -> None:
    """Evaluated before and on the way, with a metric of the logits; saved; taken apart."""
    chosen: dict[str, Any] = {
        "gradient_accumulation_steps": 2, "gradient_checkpointing": True, "eval_steps": 2,
        "label_smoothing_factor": 0.1, "eval_strategy": "steps", "save_strategy": "steps",
        "save_steps": 2, "load_best_model_at_end": True, "metric_for_best_model": "eval_loss",
        "compute_metrics": accuracy,
        "preprocess_logits_for_metrics": lambda logits, labels: logits.argmax(-1),
    }  # fmt: skip
    chosen["eval_dataset"] = rows("llama")[:4]
    runs, evaluated = [], []
    for name in ("plain", "stock"):
        run = routed(name, 2, tmp_path / name, "llama", KEYS, **chosen)
        evaluated.append(run.evaluate())
        run.train()
        runs.append(run)
    plain = runs[0]
    for key in ("eval_loss", "eval_accuracy"):
        assert evaluated[1][key] == pytest.approx(evaluated[0][key], rel=1e-6)
    engine = run.model_wrapped
    assert isinstance(engine, Engine) and len(report(engine.module).replaced) > 8
    assert sum(text.startswith("fused kernels in") for text in heard_in_full) == 1
    for key in ("loss", "eval_loss", "grad_norm", "eval_accuracy"):
        assert logged(run, key) == pytest.approx(logged(plain, key), rel=1e-5), key
    assert run._signature_columns is not None
    assert set(run._signature_columns) == set(plain._signature_columns or ())
    oracle.compare_tensors("weights", weights(run), weights(plain), floor=oracle.ADAM_ROUNDING)
    engine.destroy()
    hf_zero.restore(run.model)
    assert not any("forward" in module.__dict__ for module in run.model.modules())


def test_a_masked_language_model_logs_what_it_logs_by_itself(tmp_path: Path) -> None:
    """BertForMaskedLM ignores num_items_in_batch, so that a Trainer logs the sum over a window."""
    config, more = {"kernels": "auto"}, {"gradient_accumulation_steps": 2}
    losses = []
    for route in ("plain", "stock"):
        run = routed(route, 2, tmp_path, config=config, **more)
        run.train()
        losses.append(logged(run))
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


DEEPSPEEDS: dict[str, dict[str, Any]] = {
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
}  # fmt: skip


def test_a_deepspeed_script_with_its_own_sections() -> None:
    """Nine tokens fit into one block of a sparse layout, so sparse attention is dense there."""

    def trained(more: dict[str, Any]) -> list[float]:
        config = {
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 2,
            "zero_optimization": {"stage": 2},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "eps": 1e-6}},
        }
        net, data, losses = model("bert"), rows("bert"), []
        given = {"model": net, "model_parameters": net.parameters()}
        engine, *_ = deepspeed.initialize(**given, config={**config, **more})
        for start in range(0, len(data), 4):
            part = data[start : start + 4]
            batch = {key: torch.stack([row[key] for row in part]) for key in part[0]}
            loss = engine(**batch).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        assert bool(report(net).replaced) == bool(more)
        engine.destroy()
        return losses

    plain = trained({})
    for name, keys in DEEPSPEEDS.items():
        assert trained(keys) == pytest.approx(plain, rel=1e-5), name
