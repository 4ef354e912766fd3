"""Samples that are chosen by their difficulty in a fit of Lightning's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import hf_zero
from hf_zero.errors import ConfigError
from tests.helpers import sampled
from tests.helpers.models import seeded
from tests.helpers.ranks import run_ranks
from tests.helpers.sampled import BATCH, index_in, metric, section
from tests.helpers.tensor_parallel import llama

pl = pytest.importorskip("lightning.pytorch")
pytestmark = pytest.mark.usefixtures("plain_process")
QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
MICRO = 2


class Net(pl.LightningModule):  # type: ignore[name-defined, misc]
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(4, 1)
        self.seen: list[int] = []

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        self.seen += batch["id"].tolist()
        loss: torch.Tensor = self.net(batch["x"]).mean()
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.seen_last = batch["id"].tolist()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def fit(folder: Path, steps: int, resume: Path | None = None, **options: Any) -> Net:
    from hf_zero.integrations.lightning import ZeroStrategy

    keys = section(hard=metric(index_in(folder)))
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, max_steps=steps, accumulate_grad_batches=BATCH // MICRO,
        strategy=ZeroStrategy(config={"zero_optimization": {"stage": 2}, **keys}),
        default_root_dir=folder, enable_checkpointing=False, **QUIET, **options,
    )  # fmt: skip
    module, data = Net(), sampled.data()
    loaders = DataLoader(data, batch_size=MICRO), DataLoader(data, batch_size=4)
    trainer.fit(module, *loaders, ckpt_path=resume)
    trainer.save_checkpoint(folder / f"step{steps}")
    trainer.strategy.engine.destroy()
    return module


def by_step(seen: list[int]) -> list[list[int]]:
    return [seen[start : start + BATCH] for start in range(0, len(seen), BATCH)]


def test_a_fit_draws_by_difficulty_and_goes_on(tmp_path: Path) -> None:
    """Over the ends of epochs, with windows of four micro-batches; validation reads all."""
    expected = sampled.drawn(index_in(tmp_path), 12)
    module = fit(tmp_path, 7)
    assert by_step(module.seen) == expected[:7] and module.seen_last == [36, 37, 38, 39]
    assert by_step(fit(tmp_path, 12, tmp_path / "step7").seen) == expected[7:]


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="names hard, and no loader draws by difficulty"):
        fit(tmp_path, 1, use_distributed_sampler=False)
    grows = pl.callbacks.GradientAccumulationScheduler({4: 2})
    with pytest.raises(ConfigError, match="Scheduler changes how many samples a step has"):
        fit(tmp_path, 1, callbacks=[grows])


def test_ranks_that_share_layers_read_the_same_samples() -> None:
    """By the sampler that Lightning puts into loaders."""
    from hf_zero.integrations.lightning import ZeroStrategy

    models = [seeded(llama) for _ in range(4)]

    def rank(rank: int) -> list[dict[str, int]]:
        strategy = ZeroStrategy()
        before = strategy.distributed_sampler_kwargs
        hf_zero.tensor_parallel(models[rank], 2)
        return [before, strategy.distributed_sampler_kwargs]

    for place, (before, split) in enumerate(run_ranks(4, rank)):
        assert before == {"num_replicas": 4, "rank": place}
        assert split == {"num_replicas": 2, "rank": place // 2}
