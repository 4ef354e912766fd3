"""Layer dropping, token dropping, curricula and training phases by the routes of Hugging Face, by
Lightning's and by DeepSpeed's API, against a plain Trainer, or a plain loop, that does the same by
hand.
"""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import deepspeed
import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from hf_zero.errors import ConfigError
from hf_zero.integrations.lightning import ZeroStrategy
from tests.helpers import oracle
from tests.helpers.engines import config_of
from tests.helpers.layer_drop import FAMILIES, GAMMA, THETA, LayerDropJob
from tests.helpers.token_drop import TokenDropJob
from tests.helpers.trainers import logged, model, routed, rows, weights
from tests.helpers.training import At, Plan, plain_sgd
from tests.integrations.accelerate.test_loop import accelerator_with, loader, small
from tests.integrations.lightning.test_strategy import QUIET, module_of

STEPS, MICRO = 3, 2


JOBS = {"layers": LayerDropJob, "tokens": TokenDropJob}


def by_hand(model: nn.Module, job: LayerDropJob) -> nn.Module:
    """``model``, each training forward of which runs what the engine would."""
    calls = itertools.count()

    def choose(module: nn.Module, *_: Any) -> None:
        if module.training:
            step, micro = divmod(next(calls), MICRO)
            job.by_hand(module, At(step, micro, 0))

    model.register_forward_pre_hook(choose)
    return model


@pytest.mark.parametrize(("what", "route"), [("layers", "ours"), ("tokens", "stock")])
def test_the_trainer(what: str, route: str, tmp_path: Path) -> None:
    job = JOBS[what]("bert")
    chosen = {"gradient_accumulation_steps": MICRO, "max_steps": STEPS}
    runs = []
    for name, net in (("plain", by_hand(job.build(), job)), (route, job.build())):
        given = {**chosen, "model": net, "train_dataset": rows("bert", 24)}
        runs.append(routed(name, 3, tmp_path / name, config=job.keys, **given))
        runs[-1].train()
    plain, got = runs
    assert any(map(any, job.left_out.values())) if what == "layers" else job.dropped
    assert logged(got) == pytest.approx(logged(plain), rel=1e-4)
    oracle.compare_tensors("weights", weights(got), weights(plain), 1e-4, 1e-4)


def batch(at: At) -> dict[str, Any]:
    return FAMILIES["gpt2"][1](at.step, at.micro, at.rank)


@pytest.mark.parametrize("what", JOBS)
def test_deepspeeds_api(what: str) -> None:
    job = JOBS[what]("gpt2")
    model: Any = job.build()
    config = config_of(1, Plan(accumulation=MICRO), gradient_clipping=0.0, **job.keys)
    engine: Any = deepspeed.initialize(model=model, optimizer=plain_sgd(model), config=config)[0]
    dropping = engine.progressive_layer_drop
    assert engine.random_ltd_enabled() == (what == "tokens") == (dropping is None)
    assert dropping is None or dropping.get_theta() == 1.0
    for step in range(STEPS):
        for micro in range(MICRO):
            engine.backward(engine(**batch(At(step, micro, 0))).loss)
            engine.step()
    if dropping is not None:
        theta = (1 - THETA) * math.exp(-GAMMA * STEPS) + THETA
        assert dropping.get_state()["pld_theta"] == pytest.approx(theta)
    got = {name: p.detach() for name, p in engine.module.named_parameters()}
    oracle.compare_tensors("weights", got, oracle.run(job, Plan(1, STEPS, MICRO)).weights, 1e-4)
    engine.destroy()


GROWS = {"phases": [{"steps": 2, "sequence_length": 5}, {"train_batch_size": 8, "lr_scale": 2}]}
CURRICULUM = {
    "enabled": True,
    "min_difficulty": 4,
    "max_difficulty": 64,
    "schedule_type": "fixed_discrete",
    "schedule_config": {"difficulty": [4, 64], "max_step": [2]},
}


def test_windows_of_accumulate_grow() -> None:
    net, plain = small(), small()
    accelerator = accelerator_with({"training_phases": GROWS})
    net, optimizer, data = accelerator.prepare(
        net, torch.optim.AdamW(net.parameters(), lr=1e-2, eps=1e-6), loader(8)
    )
    ends = []
    for batch in data:
        with accelerator.accumulate(net):
            accelerator.backward(net(**batch).loss)
            ends.append(accelerator.sync_gradients)
            optimizer.step()
            optimizer.zero_grad()
    assert ends == [True, True, False, True, False, True, False, True]
    assert net.global_steps == 5 and net.get_lr() == [2e-2]

    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-2, eps=1e-6)
    batches = [*loader(8)]
    for step, window in enumerate([[0], [1], [2, 3], [4, 5], [6, 7]]):
        for at in window:
            batch = batches[at]
            ids = batch["input_ids"][:, : 5 if step < 2 else 8]
            (plain(input_ids=ids, labels=batch["labels"]).loss / len(window)).backward()
        theirs.param_groups[0]["lr"] = 1e-2 if step < 2 else 2e-2
        theirs.step()
        theirs.zero_grad()
    got = accelerator.get_state_dict(net)
    oracle.compare_tensors("weights", got, plain.state_dict(), floor=oracle.ADAM_ROUNDING)


def test_a_curriculum_under_lightning() -> None:
    """The whole module is what the engine calls: its batch is cut, whatever training_step does."""

    def fit(**keys: Any) -> Any:
        module, loader = module_of("llama"), DataLoader(rows("llama", 12), batch_size=4)
        strategy = ZeroStrategy(config={"zero_optimization": {"stage": 2}, **keys})
        pl.Trainer(strategy=strategy, max_epochs=1, **QUIET).fit(module, loader)
        return module

    got = fit(curriculum_learning=CURRICULUM)
    plain = model("llama")
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3, eps=1e-6)
    wanted = []
    for step, batch in enumerate(DataLoader(rows("llama", 12), batch_size=4)):  # type: ignore[arg-type]
        short = {name: value[:, : 4 if step < 2 else 9] for name, value in batch.items()}
        loss = plain(**short).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        wanted.append(float(loss.detach()))
    assert got.losses == pytest.approx(wanted, rel=1e-5)
    with pytest.raises(ConfigError, match="Lightning's loop has windows of one size"):
        fit(training_phases=GROWS)
