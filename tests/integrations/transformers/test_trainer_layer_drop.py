"""Progressive layer dropping by the routes of Hugging Face and of DeepSpeed's API, against a plain
Trainer, or a plain loop, whose blocks are left out by hand.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import accelerate
import deepspeed
import pytest
import torch
import transformers
from accelerate.utils import DeepSpeedPlugin
from torch import nn

import hf_zero
from tests.helpers import oracle
from tests.helpers.engines import config_of
from tests.helpers.layer_drop import FAMILIES, GAMMA, THETA, LayerDropJob
from tests.helpers.trainers import logged, options, rows, weights
from tests.helpers.training import At, Plan, plain_sgd

pytestmark = pytest.mark.usefixtures("plain_process")
STEPS, MICRO = 3, 2


def dropping_by_hand(model: nn.Module, job: LayerDropJob) -> nn.Module:
    """``model``, each training forward of which leaves out what the engine would."""
    calls = iter(range(1000))

    def choose(module: nn.Module, *_: Any) -> None:
        if module.training:
            step, micro = divmod(next(calls), MICRO)
            job.by_hand(module, At(step, micro, 0))

    model.register_forward_pre_hook(choose)
    return model


@pytest.mark.parametrize("route", ["zero_config", "deepspeed"])
def test_the_trainer(route: str, tmp_path: Path) -> None:
    job = LayerDropJob("bert")
    chosen = {"gradient_accumulation_steps": MICRO, "max_steps": STEPS}
    zero = {"zero_optimization": {"stage": 3}, **job.keys}

    def run(name: str, model: nn.Module) -> transformers.Trainer:
        keys: dict[str, Any] = options(tmp_path / name, **chosen)
        if name == "zero_config":
            args: Any = hf_zero.TrainingArguments(**keys, zero_config=zero)
        else:
            own = (
                {**zero, "train_micro_batch_size_per_gpu": "auto"} if name == "deepspeed" else None
            )
            args = transformers.TrainingArguments(**keys, deepspeed=own)
        made = transformers.Trainer(model=model, args=args, train_dataset=rows("bert", 24))
        made.train()
        return made

    plain = run("plain", dropping_by_hand(job.build(), job))
    got = run(route, job.build())
    assert any(map(any, job.left_out.values()))
    assert logged(got) == pytest.approx(logged(plain), rel=1e-4)
    oracle.compare_tensors("weights", weights(got), weights(plain), 1e-4, 1e-4)


def plain_weights(job: LayerDropJob) -> dict[str, torch.Tensor]:
    """After the steps that the loops below take."""
    made = oracle.run(job, Plan(1, STEPS, MICRO))
    return made.weights


def batch(at: At) -> dict[str, Any]:
    return FAMILIES["gpt2"][1](at.step, at.micro, at.rank)


def test_accelerate() -> None:
    job = LayerDropJob("gpt2")
    config = config_of(2, Plan(accumulation=MICRO), gradient_clipping=0.0, **job.keys)
    accelerator = accelerate.Accelerator(
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config), cpu=True
    )
    model: Any = job.build()
    engine, optimizer = accelerator.prepare(model, plain_sgd(model))
    for step in range(STEPS):
        for micro in range(MICRO):
            with accelerator.accumulate(engine):
                accelerator.backward(engine(**batch(At(step, micro, 0))).loss)
                optimizer.step()
                optimizer.zero_grad()
    got = {name: p.detach() for name, p in engine.module.named_parameters()}
    oracle.compare_tensors("weights", got, plain_weights(job), 1e-4)
    accelerator.free_memory()


def test_deepspeeds_api() -> None:
    job = LayerDropJob("gpt2")
    model: Any = job.build()
    config = config_of(1, Plan(accumulation=MICRO), gradient_clipping=0.0, **job.keys)
    engine: Any = deepspeed.initialize(model=model, optimizer=plain_sgd(model), config=config)[0]
    assert engine.pld_enabled() and (engine.pld_theta(), engine.pld_gamma()) == (THETA, GAMMA)
    assert engine.pld_params()["theta"] == THETA
    dropping = engine.progressive_layer_drop
    assert dropping.get_theta() == 1.0
    for step in range(STEPS):
        for micro in range(MICRO):
            engine.backward(engine(**batch(At(step, micro, 0))).loss)
            engine.step()
    assert dropping.get_state()["pld_theta"] == pytest.approx(
        (1 - THETA) * 2.718281828 ** (-GAMMA * STEPS) + THETA
    )
    got = {name: p.detach() for name, p in engine.module.named_parameters()}
    oracle.compare_tensors("weights", got, plain_weights(job), 1e-4)
    engine.destroy()
    plain: Any = deepspeed.initialize(model=job.build(), config=config_of(0))[0]
    assert not plain.pld_enabled() and plain.progressive_layer_drop is None
    plain.destroy()
