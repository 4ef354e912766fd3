"""Kernels, compiled blocks and checkpointed blocks by the keys of the configuration: Trainers by
each route.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import hf_zero
from hf_zero.engine import Engine
from hf_zero.integrations.fused import report
from tests.helpers import oracle
from tests.helpers.launched import KEYS
from tests.helpers.trainers import logged, routed, rows, weights


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
