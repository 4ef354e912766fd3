"""Progressive layer dropping and random layerwise token dropping by the routes of Hugging Face, by
Lightning's and by DeepSpeed's API, against a plain Trainer, or a plain loop, that does the same by
hand.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import accelerate
import deepspeed
import pytest
import torch
import transformers
import yaml
from accelerate.utils import DeepSpeedPlugin
from torch import nn
from torch.utils.data import DataLoader

import hf_zero
from tests.helpers import oracle
from tests.helpers.engines import config_of
from tests.helpers.layer_drop import FAMILIES, GAMMA, THETA, LayerDropJob
from tests.helpers.token_drop import TokenDropJob
from tests.helpers.trainers import logged, options, rows, weights
from tests.helpers.training import At, Plan, plain_sgd
from tests.integrations.lightning.test_config_keys import module_of

pytestmark = pytest.mark.usefixtures("plain_process")
STEPS, MICRO = 3, 2


JOBS = {
    "layers": lambda family: LayerDropJob(family),
    "tokens": lambda family: TokenDropJob(family),
}
each_job = pytest.mark.parametrize("what", JOBS)


def by_hand(model: nn.Module, job: LayerDropJob) -> nn.Module:
    """``model``, each training forward of which runs what the engine would."""
    calls = itertools.count()

    def choose(module: nn.Module, *_: Any) -> None:
        if module.training:
            step, micro = divmod(next(calls), MICRO)
            job.by_hand(module, At(step, micro, 0))

    model.register_forward_pre_hook(choose)
    return model


@pytest.mark.turns
@each_job
@pytest.mark.parametrize("route", ["zero_config", "deepspeed", "callback"])
def test_the_trainer(what: str, route: str, tmp_path: Path) -> None:
    job = JOBS[what]("bert")
    chosen = {"gradient_accumulation_steps": MICRO, "max_steps": STEPS}
    zero = {"zero_optimization": {"stage": 3}, **job.keys}

    def run(name: str, model: nn.Module) -> transformers.Trainer:
        keys: dict[str, Any] = options(tmp_path / name, **chosen)
        more: dict[str, Any] = {}
        if name == "zero_config":
            args: Any = hf_zero.TrainingArguments(**keys, zero_config=zero)
        else:
            own = (
                {**zero, "train_micro_batch_size_per_gpu": "auto"} if name == "deepspeed" else None
            )
            args = transformers.TrainingArguments(**keys, deepspeed=own)
        if name == "callback":
            more = {"callbacks": [hf_zero.ZeroCallback(zero)]}
        made = transformers.Trainer(model=model, args=args, train_dataset=rows("bert", 24), **more)
        made.train()
        return made

    plain = run("plain", by_hand(job.build(), job))
    got = run(route, job.build())
    assert any(map(any, job.left_out.values())) if what == "layers" else job.dropped
    assert logged(got) == pytest.approx(logged(plain), rel=1e-4)
    oracle.compare_tensors("weights", weights(got), weights(plain), 1e-4, 1e-4)


def plain_weights(job: LayerDropJob) -> dict[str, torch.Tensor]:
    """After the steps that the loops below take."""
    made = oracle.run(job, Plan(1, STEPS, MICRO))
    return made.weights


def batch(at: At) -> dict[str, Any]:
    return FAMILIES["gpt2"][1](at.step, at.micro, at.rank)


@each_job
def test_accelerate(what: str) -> None:
    job = JOBS[what]("gpt2")
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


@each_job
def test_accelerates_yaml(what: str, tmp_path: Path) -> None:
    file = tmp_path / "zero.yaml"
    keys = {"zero_stage": 2, **JOBS[what]("gpt2").keys}
    keys.pop("seed", None)
    file.write_text(yaml.safe_dump({"distributed_type": "DEEPSPEED", "deepspeed_config": keys}))
    config = hf_zero.ZeroConfig.from_file(file)
    by_json = hf_zero.ZeroConfig.from_dict(JOBS[what]("gpt2").keys)
    assert config.progressive_layer_drop == by_json.progressive_layer_drop
    assert config.random_ltd == by_json.random_ltd
    assert config.progressive_layer_drop.enabled != config.random_ltd.enabled


@each_job
def test_lightning(what: str) -> None:
    pl: Any = pytest.importorskip("lightning.pytorch")
    from hf_zero.integrations.lightning import ZeroStrategy

    job = JOBS[what]("bert")

    class Net(module_of("bert").__class__):  # type: ignore[misc]
        def configure_model(self) -> None:
            if not hasattr(self, "net"):
                self.net = job.build()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return plain_sgd(self)

    module, data = Net(), DataLoader(rows("bert", 24), batch_size=4)  # type: ignore[arg-type]
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, max_steps=STEPS, accumulate_grad_batches=MICRO,
        strategy=ZeroStrategy(config={"zero_optimization": {"stage": 2}, **job.keys}),
        logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(module, data)
    got = {name: p.detach() for name, p in module.net.named_parameters()}
    plain = by_hand(job.build(), job)
    optimizer = plain_sgd(plain)
    losses = []
    for number, batch in enumerate(data):
        loss = plain(**batch).loss
        (loss / MICRO).backward()
        losses.append(float(loss.detach()))
        if number % MICRO:
            optimizer.step()
            optimizer.zero_grad()
    assert module.losses == pytest.approx(losses, rel=1e-4)
    oracle.compare_tensors("weights", got, dict(plain.named_parameters()), 1e-4)
    trainer.strategy.engine.destroy()


def test_deepspeeds_api_drops_tokens() -> None:
    job = TokenDropJob("gpt2")
    model: Any = job.build()
    config = config_of(1, Plan(accumulation=MICRO), gradient_clipping=0.0, **job.keys)
    engine: Any = deepspeed.initialize(model=model, optimizer=plain_sgd(model), config=config)[0]
    assert engine.random_ltd_enabled()
    for step in range(STEPS):
        for micro in range(MICRO):
            engine.backward(engine(**batch(At(step, micro, 0))).loss)
            engine.step()
    got = {name: p.detach() for name, p in engine.module.named_parameters()}
    oracle.compare_tensors("weights", got, plain_weights(job), 1e-4)
    engine.destroy()


def test_deepspeeds_api() -> None:
    job = LayerDropJob("gpt2")
    model: Any = job.build()
    config = config_of(1, Plan(accumulation=MICRO), gradient_clipping=0.0, **job.keys)
    engine: Any = deepspeed.initialize(model=model, optimizer=plain_sgd(model), config=config)[0]
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
    assert plain.progressive_layer_drop is None
    plain.destroy()
