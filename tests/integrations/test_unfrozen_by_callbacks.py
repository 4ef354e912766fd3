"""Layers that a callback of a trainer unfreezes: Lightning's BaseFinetuning and a TrainerCallback,
beside the same trainers without an engine.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import transformers
from lightning.pytorch.callbacks import BaseFinetuning, ModelCheckpoint
from torch.utils.data import DataLoader

from hf_zero.integrations.lightning import ZeroStrategy
from tests.helpers.trainers import logged, model, routed, rows, weights
from tests.integrations.lightning.test_strategy import QUIET, module_of

pytestmark = pytest.mark.filterwarnings("ignore:::lightning")


class Unfreeze(BaseFinetuning):
    """The second layer trains from the second epoch on."""

    def freeze_before_training(self, pl_module: Any) -> None:
        pl_module.configure_model()
        self.freeze(pl_module.net.model.layers)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            layer = pl_module.net.model.layers[1]
            self.unfreeze_and_add_param_group(layer, optimizer, lr=5e-4)


def fit(folder: Path, stage: int | None, epochs: int, resume: str | None = None) -> Any:
    """Return the losses of ``epochs`` epochs of two steps; None: without an engine."""
    torch.manual_seed(0)
    module = module_of("llama")

    def optimizer() -> torch.optim.Optimizer:
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(trained, lr=1e-3, eps=1e-6)

    module.configure_optimizers = optimizer
    chosen = {} if stage is None else {
        "strategy": ZeroStrategy(config={"zero_optimization": {"stage": stage}})
    }  # fmt: skip
    saving = ModelCheckpoint(folder, filename="end", save_top_k=-1)
    trainer = pl.Trainer(
        max_epochs=epochs,
        callbacks=[Unfreeze(), saving],
        **chosen,
        **{**QUIET, "enable_checkpointing": True},
    )
    trainer.fit(module, DataLoader(rows("llama")[:8], batch_size=4), ckpt_path=resume)
    groups = [
        (group["lr"], len(group["params"]) > 0) for group in trainer.optimizers[0].param_groups
    ]
    if stage is not None:
        trainer.strategy.engine.destroy()
    return module.losses, groups, saving.best_model_path or saving.last_model_path


@pytest.mark.parametrize("stage", [1, 3])
def test_a_callback_of_lightning(tmp_path: Path, stage: int) -> None:
    want, groups, _ = fit(tmp_path / "plain", None, 4)
    losses, found, saved = fit(tmp_path / "zero", stage, 3)
    assert losses == pytest.approx(want[:6], rel=1e-6)
    assert found == groups and [lr for lr, _ in groups] == [1e-3, 5e-4]
    losses, found, _ = fit(tmp_path / "again", stage, 4, resume=saved)
    assert losses == pytest.approx(want[6:], rel=1e-5) and found == groups


class UnfreezeLayer(transformers.TrainerCallback):
    """The first layer trains from the third step on; ``adds``: in a group of its own."""

    def __init__(self, adds: bool) -> None:
        self.adds = adds

    def on_step_end(
        self, args: Any, state: Any, control: Any, model: Any = None, **objects: Any
    ) -> None:
        if state.global_step != 2:
            return
        layer = model.bert.encoder.layer[0].requires_grad_(True)
        if self.adds:
            objects["optimizer"].add_param_group({"params": list(layer.parameters())})
            schedule = getattr(objects["lr_scheduler"], "scheduler", objects["lr_scheduler"])
            for name in ("base_lrs", "lr_lambdas"):
                getattr(schedule, name).append(getattr(schedule, name)[0])


def trained(route: str, stage: int, folder: Path, adds: bool) -> transformers.Trainer:
    net = model("bert")
    net.bert.encoder.layer[0].requires_grad_(False)
    given: dict[str, Any] = {}
    if not adds:
        given["optimizers"] = torch.optim.AdamW(net.parameters(), 1e-3, eps=1e-6), None
    run = routed(
        route, stage, folder, model=net, train_dataset=rows("bert", 24), max_steps=5,
        callbacks=[UnfreezeLayer(adds)], **given,
    )  # fmt: skip
    run.train()
    return run


@pytest.mark.parametrize(
    "route, stage, adds", [("ours", 3, False), ("stock", 1, True), ("callback", 3, True)]
)
def test_a_callback_of_the_trainer(tmp_path: Path, route: str, stage: int, adds: bool) -> None:
    plain = trained("plain", 0, tmp_path / "plain", adds)
    run = trained(route, stage, tmp_path / "zero", adds)
    assert logged(run) == pytest.approx(logged(plain), rel=1e-5)
    first = weights(plain)["bert.encoder.layer.0.output.dense.weight"]
    before = model("bert").state_dict()["bert.encoder.layer.0.output.dense.weight"]
    assert not torch.equal(first, before)
    for name, value in weights(plain).items():
        torch.testing.assert_close(weights(run)[name], value, rtol=1e-4, atol=3e-6)
