"""Curricula and training phases in Accelerate's loop and under Lightning."""

from __future__ import annotations

from typing import Any

import deepspeed
import pytest
import torch
from torch.utils.data import DataLoader

from hf_zero.errors import ConfigError
from tests.helpers import oracle
from tests.helpers.trainers import model, rows
from tests.integrations.accelerate.test_loop import accelerator_with, loader, small
from tests.integrations.lightning.test_config_keys import module_of

pytestmark = pytest.mark.usefixtures("plain_process")

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


def fit(architecture: str, **keys: Any) -> Any:
    pl: Any = pytest.importorskip("lightning.pytorch")
    from hf_zero.integrations.lightning import ZeroStrategy

    module = module_of(architecture)
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, max_epochs=1, use_distributed_sampler=False,
        strategy=ZeroStrategy(config={"zero_optimization": {"stage": 2}, **keys}),
        logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    data: Any = rows(architecture, 12)
    trainer.fit(module, DataLoader(data, batch_size=4))
    return module


def test_under_lightning() -> None:
    """The whole module is what the engine calls: its batch is cut, whatever training_step does."""
    got = fit("llama", curriculum_learning=CURRICULUM)
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
        fit("llama", training_phases=GROWS)


def test_what_deepspeeds_engine_says() -> None:
    learning = {"enabled": True, "curriculum_metrics": {"seqlen_truncate": CURRICULUM}}
    efficiency = {"enabled": True, "data_sampling": {"enabled": True}}
    efficiency["data_sampling"]["curriculum_learning"] = learning  # type: ignore[index]
    found = {}
    for name, keys in (
        ("legacy", {"curriculum_learning": CURRICULUM}),
        ("metrics", {"data_efficiency": efficiency}),
        ("off", {}),
    ):
        net = small()
        engine, *_ = deepspeed.initialize(model=net, config={"train_batch_size": 2, **keys})
        found[name] = engine.curriculum_learning_enabled()
        engine.destroy()
    assert found == {"legacy": False, "metrics": True, "off": False}
