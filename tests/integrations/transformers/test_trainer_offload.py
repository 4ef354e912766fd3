"""Trainers and Accelerate under offload, on one rank: the losses and weights of the same run
without ZeRO.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from hf_zero.engine import Engine
from tests.helpers import oracle
from tests.helpers.offloads import offload
from tests.helpers.trainers import ROUTES, logged, routed, weights

pytestmark = pytest.mark.usefixtures("plain_process")


TRAINED = list(
    itertools.product(ROUTES, [("optimizer on cpu", 2), ("all on cpu", 3), ("all in files", 3)])
)


@pytest.mark.parametrize(
    "route, way, stage",
    [
        pytest.param(route, *way, marks=() if at % 4 == 0 else pytest.mark.long)
        for at, (route, way) in enumerate(TRAINED)
    ],
)
def test_it_trains_as_without_zero(route: str, way: str, stage: int, tmp_path: Path) -> None:
    """Two micro-batches a step, gradient checkpointing, a schedule that falls at each step, an
    evaluation in between.
    """
    more = {
        "gradient_accumulation_steps": 2,
        "lr_scheduler_type": "linear",
        "gradient_checkpointing": True,
        "eval_strategy": "steps",
        "eval_steps": 2,
    }
    plain = routed("plain", 0, tmp_path / "plain", **more)
    plain.train()
    (tmp_path / "disk").mkdir()
    config = {"zero_optimization": offload(way, stage, tmp_path / "disk")}
    run = routed(route, stage, tmp_path / "zero", config=config, **more)
    run.train()
    engine = run.model_wrapped
    assert isinstance(engine, Engine)
    assert engine.config.offload_optimizer.on
    assert all(flat.optimizer_shard.offloaded for flat in engine.sharded_model.trainable)
    for key in ("loss", "eval_loss", "grad_norm", "learning_rate"):
        assert logged(run, key) == pytest.approx(logged(plain, key), rel=1e-4), key
    oracle.compare_tensors("weights", weights(run), weights(plain), floor=oracle.ADAM_ROUNDING)


@pytest.mark.parametrize("way, stage", [("optimizer in files", 1), ("all on cpu", 3)])
def test_a_trainer_resumes(way: str, stage: int, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    config = {"zero_optimization": offload(way, stage, tmp_path / "disk")}
    saves = {"save_strategy": "steps", "save_steps": 2}
    whole = routed("stock", stage, tmp_path / "run", config=config, **saves)
    whole.train()
    again = routed("stock", stage, tmp_path / "again", config=config)
    again.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    assert logged(again) == logged(whole)
    assert all(torch.equal(value, weights(whole)[name]) for name, value in weights(again).items())
