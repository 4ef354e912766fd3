"""Lightning's ZeroStrategy with keys of the configuration, beside torn folders, with the memory of
the hosts, and with samples chosen by their difficulty.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.overrides.distributed import UnrepeatedDistributedSampler
from torch.utils.data import DataLoader, IterableDataset

import hf_zero
from hf_zero.checkpoint.memory import saving
from hf_zero.errors import CheckpointError, ConfigError, PartitionError
from hf_zero.integrations.lightning import ZeroStrategy
from hf_zero.loading.shard_only import hold
from tests.helpers import sampled
from tests.helpers.cells import in_turn
from tests.helpers.models import seeded
from tests.helpers.plain_process import forget
from tests.helpers.ranks import run_ranks
from tests.helpers.sampled import BATCH, index_in, metric, section
from tests.helpers.tensor_parallel import llama
from tests.helpers.trainers import model, rows

pytestmark = pytest.mark.filterwarnings("ignore:::lightning")


def module_of(architecture: str) -> Any:
    class Net(pl.LightningModule):
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


QUIET = {
    "accelerator": "cpu", "devices": 1, "use_distributed_sampler": False, "logger": False,
    "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False,
}  # fmt: skip


def test_a_scheduler_of_the_configuration_steps_once_a_step() -> None:
    params = {"warmup_max_lr": 1e-2, "warmup_num_steps": 100, "warmup_type": "linear"}
    schedule = {"scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0.0, **params}}}
    strategy = ZeroStrategy(config={"zero_optimization": {"stage": 2}, **schedule})
    trainer = pl.Trainer(strategy=strategy, max_steps=3, **QUIET)
    trainer.fit(module_of("bert"), DataLoader(rows("bert"), batch_size=4))  # type: ignore[arg-type]
    # which counts from 0
    assert trainer.lr_scheduler_configs[0].scheduler.last_batch_iteration == 2
    strategy.engine.destroy()


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(6, 3)
        self.losses: list[float] = []

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss = self.layer(batch).square().mean()
        self.losses.append(loss.item())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def train_dataloader(self) -> Any:
        rows = torch.randn(12, 6, generator=torch.Generator().manual_seed(3))
        return DataLoader(rows, batch_size=3)  # type: ignore[arg-type]


def trainer_of(epochs: int, keeping: ModelCheckpoint, **more: Any) -> pl.Trainer:
    given = {**QUIET, "strategy": "zero_stage_2", "enable_checkpointing": True, **more}
    return pl.Trainer(max_epochs=epochs, callbacks=[keeping], **given)


def fit(folder: Path, epochs: int, ckpt_path: str | None = None, **callback: Any) -> Net:
    kept = {"save_top_k": -1, **callback}
    keeping = ModelCheckpoint(dirpath=folder, filename="{epoch}", save_last=True, **kept)
    module = Net()
    trainer_of(epochs, keeping).fit(module, ckpt_path=ckpt_path)
    return module


def cut(*folders: Path) -> None:
    for folder in folders:
        os.truncate(next((folder / "checkpoint").glob("rank-*")), 100)


def leave_in_the_first_save(folder: Path) -> None:
    shutil.rmtree(folder)
    (folder / ".hf-zero-saving-checkpoint").mkdir(parents=True)


def test_where_last_is_torn_the_newest_whole_one_is_taken(tmp_path: Path, heard: list[str]) -> None:
    whole = fit(tmp_path / "whole", 4)
    run = tmp_path / "run"
    fit(run, 3)
    cut(run / "epoch=2.ckpt")
    shutil.copytree(run, tmp_path / "other")
    assert fit(tmp_path / "other", 4, "last").losses == whole.losses[12:]
    assert not [text for text in heard if "is skipped" in text]
    leave_in_the_first_save(run / "last.ckpt")
    assert fit(run, 4, "last").losses == whole.losses[8:]
    for name in ("last.ckpt", "epoch=2.ckpt"):
        assert any(f"{name} is not complete and is skipped" in text for text in heard), heard


def test_torn_ones_that_are_asked_for_are_refused_with_the_whole_ones(
    tmp_path: Path, heard: list[str]
) -> None:
    """Where none is whole the run does not start anew, as it does where there is no last one."""
    assert len(fit(tmp_path / "new", 1, "last").losses) == 4
    fit(tmp_path, 3)
    leave_in_the_first_save(tmp_path / "epoch=2.ckpt")
    cut(tmp_path / "last.ckpt")
    whole = ", ".join(re.escape(str(tmp_path / f"epoch={epoch}.ckpt")) for epoch in (1, 0))
    others = rf"epoch=2.ckpt is not complete: .* complete, the newest first: {whole}"
    with pytest.raises(CheckpointError, match=others):
        fit(tmp_path, 4, str(tmp_path / "epoch=2.ckpt"))
    cut(*(tmp_path / f"epoch={epoch}.ckpt" for epoch in (0, 1)))
    with pytest.raises(CheckpointError, match="no other one there is complete"):
        fit(tmp_path, 4, str(tmp_path / "epoch=2.ckpt"))
    none = r"none of the checkpoints in .* is complete \(last.ckpt neither\)"
    with pytest.raises(CheckpointError, match=none):
        fit(tmp_path, 4, "last")
    assert sum("is skipped" in text for text in heard) == 4


def test_a_job_that_was_told_to_end_goes_on_from_the_last_whole_one(
    tmp_path: Path, heard: list[str]
) -> None:
    whole, run = fit(tmp_path / "whole", 4), tmp_path / "run"
    fit(run, 3)
    for number, epoch in ((2, 0), (9, 1), (10, 2)):
        shutil.copytree(run / f"epoch={epoch}.ckpt", tmp_path / f"hpc_ckpt_{number}.ckpt")
    leave_in_the_first_save(tmp_path / "hpc_ckpt_10.ckpt")
    module, keeping = Net(), ModelCheckpoint(dirpath=run)
    trainer_of(4, keeping, default_root_dir=tmp_path).fit(module, ckpt_path="hpc")
    assert module.losses == whole.losses[8:]
    assert any("hpc_ckpt_10.ckpt is not complete and is skipped" in text for text in heard)


def test_weights_of_a_folder_load_into_a_plain_module(tmp_path: Path) -> None:
    module = fit(tmp_path, 1)
    plain = Net()
    folder = str(tmp_path / "last.ckpt")
    plain.load_state_dict(dict(hf_zero.checkpoint.iterate_state_dict(folder)))
    assert torch.equal(plain.layer.weight, module.layer.weight)


class Momentum(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class CallingTheClosure(Momentum):
    def optimizer_step(
        self, epoch: int, index: int, optimizer: Any, optimizer_closure: Any = None
    ) -> None:
        optimizer_closure()
        optimizer.step()


class WithoutLoss(Momentum):
    """None in the last batch of the first window of two, and in both of the second."""

    def training_step(self, batch: Any, index: int) -> Any:
        loss = super().training_step(batch, index)
        return loss if index == 0 else None


class Manual(Momentum):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> None:
        optimizer: Any = self.optimizers()
        if index == 0:
            optimizer.zero_grad()
            optimizer.step()
        loss = super().training_step(batch, index)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


class Assigning(Manual):
    """Gradients of ``autograd.grad``, which the engine's hooks do not see."""

    def training_step(self, batch: Any, index: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        parameters = list(self.layer.parameters())
        gradients = torch.autograd.grad(Net.training_step(self, batch, index), parameters)
        for parameter, gradient in zip(parameters, gradients):
            parameter.grad = gradient
        optimizer.step()


@pytest.mark.parametrize(
    ("kind", "window"),
    [(CallingTheClosure, 1), (CallingTheClosure, 2), (WithoutLoss, 2), (Manual, 1), (Assigning, 1)],
)
def test_a_step_uses_the_gradients_that_are_held(kind: type[Net], window: int) -> None:
    """Also without a loss in its own batch, and none is taken where there are no gradients."""
    trained = []
    for strategy in ("auto", "zero_stage_2"):
        forget()
        module: Any = kind()
        given = {**QUIET, "strategy": strategy, "max_epochs": 2, "accumulate_grad_batches": window}
        pl.Trainer(**given).fit(module)
        trained.append((module.losses, module.layer.weight.detach().clone()))
    (losses, weight), (found, found_weight) = trained
    assert found == losses
    assert torch.equal(found_weight, weight) and not torch.equal(weight, Net().layer.weight)


def test_an_update_waits_for_the_norm_by_which_the_trainer_clips() -> None:
    section = {"stage": 2, "update_in_backward": True}
    weights = []
    for strategy in ("auto", ZeroStrategy(config={"zero_optimization": section})):
        forget()
        module = Momentum()
        given = {**QUIET, "strategy": strategy, "max_epochs": 1, "gradient_clip_val": 0.1}
        pl.Trainer(**given).fit(module)
        weights.append(module.layer.weight.detach().clone())
    torch.testing.assert_close(weights[1], weights[0])


class Unfreezing(Momentum):
    """A layer that the optimizer has from the start trains from the second epoch on."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(6, 6).requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        self.first.requires_grad_(self.current_epoch >= 1)

    def loss_of(self, batch: Any) -> torch.Tensor:
        loss = self.layer(torch.tanh(self.first(batch))).square().mean()
        self.losses.append(loss.item())
        return loss

    def training_step(self, batch: Any, index: int) -> Any:
        return self.loss_of(batch)


class UnfreezingByHand(Unfreezing):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> None:
        optimizer: Any = self.optimizers()
        self.manual_backward(self.loss_of(batch))
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("stage", [1, 3])
def test_a_layer_of_the_optimizer_is_unfrozen_also_in_manual_optimization(stage: int) -> None:
    trained = []
    for kind in (Unfreezing, UnfreezingByHand):
        for strategy in ("auto", f"zero_stage_{stage}"):
            module: Any = kind()
            pl.Trainer(**{**QUIET, "strategy": strategy, "max_epochs": 3}).fit(module)
            with hf_zero.GatheredParameters([module.first.weight]):
                trained.append((module.losses, module.first.weight.detach().clone()))
    before = Unfreezing().first.weight
    for losses, weight in trained:
        assert losses == pytest.approx(trained[0][0], rel=1e-6)
        torch.testing.assert_close(weight, trained[0][1])
        assert not torch.allclose(weight, before)


def test_a_step_after_a_broken_backward_is_refused() -> None:
    class Broken(Manual):
        def training_step(self, batch: Any, index: int) -> None:
            def fails(gradient: torch.Tensor) -> None:
                raise RuntimeError("failed on purpose")

            inputs = batch.clone().requires_grad_()
            inputs.register_hook(fails)
            with pytest.raises(RuntimeError, match="on purpose"):
                self.manual_backward(self.layer(inputs).square().mean())
            cast(Any, self.optimizers()).step()

    with pytest.raises(PartitionError):
        pl.Trainer(strategy="zero_stage_2", max_epochs=1, **QUIET).fit(Broken())


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
            trainer.strategy.engine.generations.wait()
            raise RuntimeError("failed on purpose")


def fit_into_memory(
    folder: Path,
    every: int | None,
    fails: int | None = None,
    resume: str | None = None,
    saves: int | None = None,
    root: str = "root",
) -> tuple[list[float], pl.Trainer]:
    forget()
    saving._claimed.clear()  # the processes before are gone
    memory = {"every": every, "folder": str(folder / "memory"), "job": "job"}
    zero = {"zero_optimization": {"stage": 2}, "checkpoint": {"memory": memory}}
    last = {"save_last": saves is not None, "every_n_train_steps": saves or STEPS + 1}
    keeping, module = ModelCheckpoint(dirpath=folder / "run", **last), Scheduled()
    more = {"strategy": ZeroStrategy(zero), "default_root_dir": folder / root}
    trainer = trainer_of(3, keeping, **more)
    trainer.callbacks.append(Failing(fails))
    if fails is None:
        trainer.fit(module, ckpt_path=resume)
    else:
        with pytest.raises(RuntimeError, match="on purpose"):
            trainer.fit(module, ckpt_path=resume)
    return module.losses, trainer


@pytest.mark.parametrize(("fails", "saves", "begins"), [(9, None, 8), (6, 3, 6), (7, 7, 7)])
def test_a_fit_goes_on_from_the_newer_of_memory_and_disk(
    fails: int, saves: int | None, begins: int, tmp_path: Path
) -> None:
    whole, _ = fit_into_memory(tmp_path / "other", None)
    assert len(whole) == STEPS
    assert fit_into_memory(tmp_path, 2, fails, saves=saves)[0] == whole[:fails]
    resumed, trainer = fit_into_memory(tmp_path, 2, resume="last", saves=saves)
    assert resumed == whole[begins:]
    assert trainer.global_step == STEPS
    if saves == 3:  # a folder that is named is the one that is loaded
        last = str(tmp_path / "run" / "last.ckpt")
        assert fit_into_memory(tmp_path, 2, resume=last, saves=3)[0] == []


def test_a_fit_goes_on_from_no_generation_of_another_root(tmp_path: Path) -> None:
    whole, _ = fit_into_memory(tmp_path / "other", None)
    fit_into_memory(tmp_path, 2, 5)
    assert fit_into_memory(tmp_path, 2, resume="last", root="another")[0] == whole


def test_a_fit_goes_on_from_memory_if_no_last_checkpoint_on_disk_is_whole(tmp_path: Path) -> None:
    whole, _ = fit_into_memory(tmp_path / "other", None)
    fit_into_memory(tmp_path, 2, 9, saves=3)
    for file in (tmp_path / "run").rglob("rank-*"):
        file.unlink()
    resumed, _ = fit_into_memory(tmp_path, 2, fails=11, resume="last", saves=STEPS + 1)
    assert resumed == whole[8:11]
    shutil.rmtree(tmp_path / "memory")
    with pytest.raises(CheckpointError, match=r"none of the checkpoints in .* is complete"):
        fit_into_memory(tmp_path, 2, resume="last", saves=STEPS + 1)


MICRO = 2


class Seeing(pl.LightningModule):
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


def drawing(folder: Path, steps: int, resume: Path | None = None, **options: Any) -> Seeing:
    keys = section(hard=metric(index_in(folder)))
    strategy = ZeroStrategy(config={"zero_optimization": {"stage": 2}, **keys})
    given = {**QUIET, "use_distributed_sampler": True, "default_root_dir": folder, **options}
    windows = {"max_steps": steps, "accumulate_grad_batches": BATCH // MICRO}
    trainer = pl.Trainer(strategy=strategy, **windows, **given)
    module, data = Seeing(), sampled.data()
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
    module = drawing(tmp_path, 7)
    assert by_step(module.seen) == expected[:7] and module.seen_last == [36, 37, 38, 39]
    assert by_step(drawing(tmp_path, 12, tmp_path / "step7").seen) == expected[7:]


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="names hard, and no loader draws by difficulty"):
        drawing(tmp_path, 1, use_distributed_sampler=False)
    grows = pl.callbacks.GradientAccumulationScheduler({4: 2})
    with pytest.raises(ConfigError, match="Scheduler changes how many samples a step has"):
        drawing(tmp_path, 1, callbacks=[grows])


def test_ranks_that_share_layers_read_the_same_samples() -> None:
    """By the sampler that Lightning puts into loaders; batch sizes count such ranks once."""
    models = [seeded(llama) for _ in range(4)]
    sizes = {"train_micro_batch_size_per_gpu": 4, "train_batch_size": 12}
    plain = {"precision": "32-true", "gradient_clip_val": None, "gradient_clip_algorithm": None}

    def rank(rank: int) -> list[dict[str, int]]:
        strategy: Any = ZeroStrategy({"stage": 3, **sizes})
        strategy.cluster_environment = SimpleNamespace(world_size=lambda: 4)
        before = strategy.distributed_sampler_kwargs
        hf_zero.tensor_parallel(models[rank], 2)
        trainer = SimpleNamespace(**plain, accumulate_grad_batches=1)
        with pytest.raises(ConfigError, match="data-parallel ranks = 4 × 1 × 2;"):
            strategy._start_training(trainer, models[rank])
        return [before, strategy.distributed_sampler_kwargs]

    for place, (before, split) in enumerate(run_ranks(4, rank)):
        assert before == {"num_replicas": 4, "rank": place}
        assert split == {"num_replicas": 2, "rank": place // 2}


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(())


@in_turn(
    "stage, size, limit, found",
    [(3, 1, 1.0, "3, 2"), (3, 2, 1.0, "2, 1"), (3, 3, 1.0, ""), (3, 1, 2, ""), (2, 1, 1.0, "")],
)
def test_uneven_batches_to_predict_are_refused_where_forwards_gather(
    stage: int, size: int, limit: float, found: str
) -> None:
    """Five rows on two ranks; a stream has no length."""

    def rank(rank: int) -> None:
        strategy: Any = ZeroStrategy(stage=stage)
        strategy.engine = hold(Net(), strategy.zero_config, stage)
        trainer = SimpleNamespace(predicting=True, training=False, limit_predict_batches=limit)
        strategy._lightning_module = SimpleNamespace(trainer=trainer)
        rows: Any = UnrepeatedDistributedSampler(range(5), 2, rank, shuffle=False)
        loader, stream = DataLoader(rows.dataset, size, sampler=rows), DataLoader(Stream())
        if found:
            with pytest.raises(ConfigError, match=found):
                strategy.process_dataloader(loader)
        else:
            assert strategy.process_dataloader(loader) is loader
        assert strategy.process_dataloader(stream) is stream
        strategy.engine.destroy()

    run_ranks(2, rank)
