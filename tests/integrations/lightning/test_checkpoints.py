"""Lightning's ModelCheckpoint beside torn folders: ``ckpt_path="last"`` is a whole one, and
folders go by a rename first.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from hf_zero.checkpoint import storage
from hf_zero.errors import CheckpointError

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
    keeping = ModelCheckpoint(
        dirpath=folder, filename="{epoch}", save_last=True, **{"save_top_k": -1, **callback}
    )
    module = Net()
    trainer_of(epochs, keeping).fit(module, ckpt_path=ckpt_path)
    return module


def trainer_of(epochs: int, keeping: ModelCheckpoint, **more: Any) -> pl.Trainer:
    return pl.Trainer(
        **more,
        strategy="zero_stage_2", devices=1, accelerator="cpu", max_epochs=epochs,
        callbacks=[keeping], logger=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip


def tear(way: str, folder: Path) -> None:
    if way == "in the first save":
        shutil.rmtree(folder)
        (folder / ".hf-zero-saving-checkpoint").mkdir(parents=True)
    else:
        os.truncate(next((folder / "checkpoint").glob("rank-*")), 100)


@pytest.mark.parametrize("way", ["in the first save", "a shard cut short"])
def test_where_last_is_torn_the_newest_whole_one_is_taken(
    way: str, tmp_path: Path, heard: list[str]
) -> None:
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


def test_if_none_is_whole_the_run_does_not_start_anew(tmp_path: Path, heard: list[str]) -> None:
    fit(tmp_path, 2)
    for name in ("epoch=0.ckpt", "epoch=1.ckpt", "last.ckpt"):
        tear("a shard cut short", tmp_path / name)
    with pytest.raises(
        CheckpointError,
        match=r"none of the checkpoints in .* is whole \(last.ckpt neither\); "
        r"restore one, or start from scratch",
    ):
        fit(tmp_path, 3, "last")
    assert sum("is skipped" in text for text in heard) == 3


def test_where_there_is_no_last_one_the_run_starts(tmp_path: Path) -> None:
    assert len(fit(tmp_path, 1, "last").losses) == 4


@pytest.mark.parametrize("way", ["in the first save", "a shard cut short"])
def test_a_torn_one_asked_for_by_name_is_refused_with_the_whole_ones(
    way: str, tmp_path: Path
) -> None:
    fit(tmp_path, 3)
    tear(way, tmp_path / "epoch=2.ckpt")
    tear("a shard cut short", tmp_path / "last.ckpt")
    whole = ", ".join(re.escape(str(tmp_path / f"epoch={epoch}.ckpt")) for epoch in (1, 0))
    with pytest.raises(
        CheckpointError,
        match=rf"epoch=2.ckpt is not whole: .* whole, the newest first: {whole}; pass one of them",
    ):
        fit(tmp_path, 4, str(tmp_path / "epoch=2.ckpt"))
    for epoch in (0, 1):
        tear("a shard cut short", tmp_path / f"epoch={epoch}.ckpt")
    with pytest.raises(CheckpointError, match="no other one there is whole"):
        fit(tmp_path, 4, str(tmp_path / "epoch=2.ckpt"))


def test_the_best_is_no_other_model(tmp_path: Path) -> None:
    class Watched(Net):
        def validation_step(self, batch: Any, index: int) -> None:
            self.log("seen", self.layer(batch).square().mean())

        def val_dataloader(self) -> Any:
            return self.train_dataloader()

    keeping = ModelCheckpoint(dirpath=tmp_path, filename="{epoch}", monitor="seen", save_top_k=2)
    trainer = trainer_of(3, keeping)
    module = Watched()
    trainer.fit(module)
    best = trainer.validate(module, ckpt_path="best")[0]["seen"]
    assert best == pytest.approx(float(keeping.best_model_score or 0), rel=1e-6)
    tear("a shard cut short", Path(keeping.best_model_path))
    with pytest.raises(
        CheckpointError,
        match=r"epoch=2.ckpt \(the best\) is not whole: .*epoch=1.ckpt; pass one of them",
    ):
        trainer.validate(module, ckpt_path="best")


def test_a_job_that_was_told_to_end_goes_on_from_the_last_whole_one(
    tmp_path: Path, heard: list[str]
) -> None:
    whole = fit(tmp_path / "whole", 4)
    fit(tmp_path / "run", 3)
    for number, epoch in ((2, 0), (9, 1), (10, 2)):
        shutil.copytree(
            tmp_path / "run" / f"epoch={epoch}.ckpt", tmp_path / f"hpc_ckpt_{number}.ckpt"
        )
    tear("in the first save", tmp_path / "hpc_ckpt_10.ckpt")
    module = Net()
    trainer_of(4, ModelCheckpoint(dirpath=tmp_path / "run"), default_root_dir=tmp_path).fit(
        module, ckpt_path="hpc"
    )
    assert module.losses == whole.losses[8:]
    assert any("hpc_ckpt_10.ckpt is not whole and is skipped" in text for text in heard)


def test_those_beyond_the_best_go_by_a_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    renamed = []
    rename = storage.rename_durably

    def seen(source: Path, target: Path) -> None:
        renamed.append((source.name, target.name))
        rename(source, target)

    monkeypatch.setattr(storage, "rename_durably", seen)
    fit(tmp_path, 4, save_top_k=2, monitor="loss")
    assert sorted(renamed) == [
        (f"epoch={epoch}.ckpt", f".hf-zero-dropped-epoch={epoch}.ckpt") for epoch in (0, 1)
    ]
    assert sorted(item.name for item in tmp_path.iterdir()) == [
        "epoch=2.ckpt",
        "epoch=3.ckpt",
        "last.ckpt",
    ]
