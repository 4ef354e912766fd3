"""A fit that saves into the memory of the hosts, fails, and goes on by ``ckpt_path="last"``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from hf_zero.checkpoint.memory import saving
from hf_zero.integrations.lightning.lightning_pytorch import ZeroStrategy
from tests.helpers.plain_process import forget
from tests.integrations.lightning.test_checkpoints import Net

pytestmark = [pytest.mark.usefixtures("plain_process"), pytest.mark.filterwarnings("ignore")]

STEPS = 12  # four an epoch


class Rows:
    """Twelve rows in batches of three, with a place that is saved."""

    def __init__(self) -> None:
        rows = torch.randn(12, 6, generator=torch.Generator().manual_seed(3))
        self.batches, self.at = rows.split(3), 0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[torch.Tensor]:
        begin, self.at = self.at, 0
        for number in range(begin, len(self.batches)):
            self.at = (number + 1) % len(self.batches)
            yield self.batches[number]

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Scheduled(Net):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]

    def train_dataloader(self) -> Any:
        return Rows()


class Failing(Callback):
    def __init__(self, at: int | None) -> None:
        self.at = at

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == self.at:
            trainer.strategy.engine.memory.wait()
            raise RuntimeError("failed on purpose")


def fit(
    folder: Path, every: int | None, fails: int | None = None, resume: str | None = None,
    saves: int | None = None,
) -> tuple[list[float], pl.Trainer]:  # fmt: skip
    forget()
    saving._claimed.clear()  # the processes before are gone
    memory = {"every": every, "folder": str(folder / "memory"), "job": "job"}
    zero = {"zero_optimization": {"stage": 2}, "checkpoint": {"memory": memory}}
    keeping = ModelCheckpoint(
        dirpath=folder / "run", save_last=saves is not None, every_n_train_steps=saves or STEPS + 1
    )
    trainer = pl.Trainer(
        strategy=ZeroStrategy(zero), devices=1, accelerator="cpu", max_epochs=3, logger=False,
        callbacks=[Failing(fails), keeping], enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    module = Scheduled()
    if fails is None:
        trainer.fit(module, ckpt_path=resume)
    else:
        with pytest.raises(RuntimeError, match="on purpose"):
            trainer.fit(module, ckpt_path=resume)
    return module.losses, trainer


@pytest.mark.parametrize(
    ("fails", "saves", "begins"), [(3, None, 2), (9, None, 8), (6, 3, 6), (7, 7, 7)]
)
def test_a_fit_goes_on_from_the_newer_of_memory_and_disk(
    fails: int, saves: int | None, begins: int, tmp_path: Path
) -> None:
    whole, _ = fit(tmp_path / "other", None)
    assert len(whole) == STEPS
    assert fit(tmp_path, 2, fails, saves=saves)[0] == whole[:fails]
    resumed, trainer = fit(tmp_path, 2, resume="last", saves=saves)
    assert resumed == whole[begins:]
    assert trainer.global_step == STEPS


def test_a_folder_that_is_named_is_the_one_that_is_loaded(tmp_path: Path) -> None:
    whole, _ = fit(tmp_path / "other", None)
    fit(tmp_path, 2, 7, saves=3)
    last = str(tmp_path / "run" / "last.ckpt")
    assert fit(tmp_path, 2, resume=last, saves=3)[0] == whole[6:]
    assert fit(tmp_path, 2, resume="last", saves=3)[0] == whole[12:]
