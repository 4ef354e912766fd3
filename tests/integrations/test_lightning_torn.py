"""Lightning's ModelCheckpoint beside torn folders: ``ckpt_path="last"`` is a whole one, and folders go by a rename first."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from hf_zero.checkpoint import folders, retention

pytestmark = [pytest.mark.usefixtures("plain_process"), pytest.mark.filterwarnings("ignore")]


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(6, 3)
        self.losses: list[float] = []

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss = self.layer(batch).square().mean()
        self.losses.append(float(loss))
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def train_dataloader(self) -> Any:
        rows = torch.randn(12, 6, generator=torch.Generator().manual_seed(3))
        return DataLoader(rows, batch_size=3)  # type: ignore[arg-type]


def fit(folder: Path, epochs: int, ckpt_path: str | None = None, **callback: Any) -> Net:
    keeping = ModelCheckpoint(dirpath=folder, filename="{epoch}", save_last=True, **{"save_top_k": -1, **callback})
    trainer = pl.Trainer(
        strategy="zero_stage_2", devices=1, accelerator="cpu", max_epochs=epochs, callbacks=[keeping], logger=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    module = Net()
    trainer.fit(module, ckpt_path=ckpt_path)
    return module


def tear(way: str, folder: Path) -> None:
    if way == "in the first save":
        shutil.rmtree(folder)
        (folder / ".hf-zero-saving-checkpoint").mkdir(parents=True)
    else:
        os.truncate(next((folder / "checkpoint").glob("rank-*")), 100)


@pytest.mark.parametrize("way", ["in the first save", "a shard cut short"])
def test_where_last_is_torn_the_newest_whole_one_is_taken(way: str, tmp_path: Path, heard: list[str]) -> None:
    whole = fit(tmp_path / "whole", 4)
    fit(tmp_path / "run", 3)
    tear(way, tmp_path / "run" / "last.ckpt")
    tear("a shard cut short", tmp_path / "run" / "epoch=2.ckpt")
    resumed = fit(tmp_path / "run", 4, "last")
    assert resumed.losses == whole.losses[8:]
    for name in ("last.ckpt", "epoch=2.ckpt"):
        assert any(f"{name} is not whole and is skipped" in text for text in heard), heard


def test_a_whole_last_is_taken(tmp_path: Path, heard: list[str]) -> None:
    whole = fit(tmp_path / "whole", 4)
    fit(tmp_path / "run", 3)
    tear("a shard cut short", tmp_path / "run" / "epoch=2.ckpt")
    assert fit(tmp_path / "run", 4, "last").losses == whole.losses[12:]
    assert not [text for text in heard if "is skipped" in text]


def test_those_beyond_the_best_go_by_a_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    renamed = []
    rename = folders.rename

    def seen(source: Path, target: Path) -> None:
        renamed.append((source.name, target.name))
        rename(source, target)

    monkeypatch.setattr(retention.folders, "rename", seen)
    fit(tmp_path, 4, save_top_k=2, monitor="loss")
    assert sorted(renamed) == [(f"epoch={epoch}.ckpt", f".hf-zero-dropped-epoch={epoch}.ckpt") for epoch in (0, 1)]
    assert sorted(item.name for item in tmp_path.iterdir()) == ["epoch=2.ckpt", "epoch=3.ckpt", "last.ckpt"]
