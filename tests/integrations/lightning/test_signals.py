"""Lightning and signals: one checkpoint and exit code 85 at a step, and the requeue of SLURM jobs.
``matrix/test_going_on.py`` sends signals to ranks.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.trainer.connectors import signal_connector
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hf_zero.integrations.lightning import ZeroStrategy
from tests.helpers.cells import in_turn
from tests.helpers.plain_process import forget

pytestmark = pytest.mark.filterwarnings("ignore:::lightning")
BOTH = (signal.SIGTERM, signal.SIGUSR1)


@pytest.fixture(autouse=True)
def defaults() -> Iterator[None]:
    """The default handlers of both signals, which must be back at the end of the test."""
    before = [signal.signal(number, signal.SIG_DFL) for number in BOTH]
    yield
    assert [signal.getsignal(number) for number in BOTH] == [signal.SIG_DFL] * 2
    for number, handler in zip(BOTH, before, strict=True):
        signal.signal(number, handler)
    forget()


class Net(pl.LightningModule):
    """Sends itself ``number`` in the third step; notes the handler of SIGTERM."""

    def __init__(self, number: int = 0) -> None:
        super().__init__()
        self.number, self.steps, self.handler = number, 0, None

    def configure_model(self) -> None:
        if not hasattr(self, "net"):
            self.net = nn.Linear(4, 1)

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        self.steps += 1
        self.handler = signal.getsignal(signal.SIGTERM)
        if self.number and self.steps == 3:
            os.kill(os.getpid(), self.number)
        return self.net(batch[0]).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def trainer_in(folder: Path, steps: int = 8, **keys: Any) -> pl.Trainer:
    config = {"zero_optimization": {"stage": 2}, **keys}
    return pl.Trainer(
        strategy=ZeroStrategy(config=config), accelerator="cpu", devices=1, max_steps=steps,
        logger=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=folder,
    )  # fmt: skip


def loader() -> Any:
    return DataLoader(TensorDataset(torch.ones(32, 4)), batch_size=2)


@in_turn("number", BOTH)
def test_only_the_signal_of_slurm_queues_the_job_again(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[list[str]] = []
    monkeypatch.setattr(signal_connector, "call", lambda words: called.append(words) or 0)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    run = trainer_in(tmp_path)
    environment = run._accelerator_connector.cluster_environment
    environment.auto_requeue, environment.requeue_signal = True, signal.SIGUSR1
    with pytest.raises(SIGTERMException):
        run.fit(Net(number), loader())
    assert called == ([["scontrol", "requeue", "7"]] if number == signal.SIGUSR1 else [])
    assert [folder.name for folder in tmp_path.glob("*.ckpt")] == ["hpc_ckpt_1.ckpt"]
    run.strategy.engine.destroy()
