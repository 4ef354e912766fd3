"""Kernels, compiled blocks and checkpointed blocks through Lightning's ZeroStrategy, beside the
same fit without the keys.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from hf_zero.integrations.fused import report
from tests.helpers.launched import KEYS
from tests.helpers.trainers import model, rows

pl = pytest.importorskip("lightning.pytorch")
pytestmark = pytest.mark.usefixtures("plain_process")


@pytest.fixture(autouse=True)
def references(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ZERO_TRITON", "0")


def module_of(architecture: str) -> Any:
    class Net(pl.LightningModule):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.losses: list[float] = []

        def configure_model(self) -> None:
            if not hasattr(self, "net"):
                self.net = model(architecture)

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            outputs = self.net(**batch)
            self.losses.append(float(outputs.loss.detach()))
            return outputs.loss

        def validation_step(self, batch: Any, index: int) -> None:
            outputs = self.net(**batch)
            self.log("accuracy", (outputs.logits.argmax(-1) == batch["labels"]).float().mean())
            self.log("val_loss", outputs.loss)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3, eps=1e-6)

    return Net()


def fitted(
    architecture: str, precision: str, keys: dict[str, Any]
) -> tuple[list[float], dict[str, float], int]:
    """Losses of the micro-batches, what validation logged, and how many modules were replaced."""
    from hf_zero.integrations.lightning import ZeroStrategy

    module, data = module_of(architecture), rows(architecture)
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = pl.Trainer(
        accelerator="cpu", devices=1,
        strategy=ZeroStrategy(config={"zero_optimization": {"stage": 3}, **keys}), max_epochs=1,
        accumulate_grad_batches=2, gradient_clip_val=0.5, precision=precision,
        use_distributed_sampler=False, **quiet,
    )  # fmt: skip
    trainer.fit(module, DataLoader(data, batch_size=4), DataLoader(data[:6], batch_size=2))
    found = {name: float(value) for name, value in trainer.callback_metrics.items()}
    replaced = len(report(trainer.strategy.engine.module).replaced)
    trainer.strategy.engine.destroy()
    return module.losses, found, replaced


@pytest.mark.parametrize(
    "architecture, precision, relative", [("llama", "32-true", 1e-5), ("bert", "bf16-mixed", 1e-2)]
)
def test_a_fit_with_the_keys_is_one_without(
    architecture: str, precision: str, relative: float
) -> None:
    want, found = (fitted(architecture, precision, keys) for keys in ({}, KEYS))
    assert want[2] == 0 and found[2] > 8 and len(found[0]) == 8
    assert found[0] == pytest.approx(want[0], rel=relative)
    assert found[1]["val_loss"] == pytest.approx(want[1]["val_loss"], rel=relative)
    assert "accuracy" in found[1]
