"""Trainings of a model whose optimizer also holds the weights of a loss, on every route, each
saved in the middle and resumed by new objects: ``python losses_on_routes.py FOLDER [all]``, alone
or by torchrun. Prints "equal ROUTE" on rank 0 for each route that trains as plain PyTorch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import transformers
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DeepSpeedPlugin, DummyOptim
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, Dataset

import hf_zero
from hf_zero.integrations.lightning import FabricStrategy, ZeroStrategy
from tests.helpers.weighted_losses import (
    ROWS,
    batch,
    built,
    config_of,
    optimizer_of,
    own_rows,
    plainly,
)

MICROS, CLIP, SAVED, LAST = 2, 0.1, 2, 4
RANKS, RANK = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
LR, DECAY = 0.01, 0.05
Route = Callable[[nn.Module, nn.Module, int, range, Path], list[torch.Tensor]]


def forget() -> None:
    """Reset Accelerate's state; the process group stays."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    transformers.integrations.deepspeed.unset_hf_deepspeed_config()
    os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)


def zero(stage: int, **more: Any) -> dict[str, Any]:
    return config_of(stage, RANKS, accumulation=MICROS, clip=CLIP) | more


def micro_batches(steps: range) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the rows of this rank, in order."""
    return [
        tuple(own_rows(RANK, RANKS, *batch(step, micro)))
        for step in steps
        for micro in range(MICROS)
    ]


def outside(model: nn.Module, loss: nn.Module) -> list[nn.Parameter]:
    inside = {id(parameter) for parameter in model.parameters()}
    return [parameter for parameter in loss.parameters() if id(parameter) not in inside]


def masters(model: nn.Module, loss: nn.Module) -> list[torch.Tensor]:
    parameters = [*model.parameters(), *outside(model, loss)]
    return [hf_zero.safe_get_full_fp32_param(p).clone() for p in parameters]


def loop(engine: Any, loss: Any, steps: range, folder: Path) -> list[torch.Tensor]:
    if steps.start:
        engine.load_checkpoint(str(folder))
    for x, y in micro_batches(steps):
        engine.backward(loss(engine, x, y))
        engine.step()
    if steps.stop < LAST:
        engine.save_checkpoint(str(folder))
    weights = masters(engine.module, loss)
    engine.destroy()
    return weights


def deepspeed_object(model: Any, loss: Any, stage: int, steps: range, folder: Path) -> Any:
    import deepspeed

    optimizer = optimizer_of(model, loss)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=zero(stage))[0]
    return loop(engine, loss, steps, folder)


def deepspeed_section(model: Any, loss: Any, stage: int, steps: range, folder: Path) -> Any:
    import deepspeed

    section = {"type": "AdamW", "params": {"lr": LR, "eps": 1e-6, "weight_decay": 0.01}}
    groups = optimizer_of(model, loss).param_groups
    parameters = [{"params": group["params"], "lr": group["lr"]} for group in groups]
    config = zero(stage, optimizer=section)
    engine = deepspeed.initialize(model=model, model_parameters=parameters, config=config)[0]
    return loop(engine, loss, steps, folder)


def accelerate(
    model: Any, loss: Any, stage: int, steps: range, folder: Path, section: Any = None
) -> Any:
    config = (
        zero(stage) | {"gradient_clipping": "auto"} | ({"optimizer": section} if section else {})
    )
    plugin = DeepSpeedPlugin(hf_ds_config=config)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=MICROS, deepspeed_plugin=plugin)
    optimizer: Any = optimizer_of(model, loss)
    if section:
        groups = [{"params": g["params"], "lr": g["lr"]} for g in optimizer.param_groups]
        optimizer = DummyOptim(groups)
    engine, optimizer = accelerator.prepare(model, optimizer)
    if steps.start:
        accelerator.load_state(str(folder))
    for x, y in micro_batches(steps):
        with accelerator.accumulate(engine):
            accelerator.backward(loss(engine, x, y))
            if accelerator.sync_gradients:
                named = [*engine.parameters(), *loss.parameters()]
                accelerator.clip_grad_norm_(named, CLIP)
            optimizer.step()
            optimizer.zero_grad()
    if steps.stop < LAST:
        accelerator.save_state(str(folder))
    weights = masters(model, loss)
    accelerator.free_memory()
    return weights


def accelerate_section(model: Any, loss: Any, stage: int, steps: range, folder: Path) -> Any:
    section = {"type": "AdamW", "params": {"lr": LR, "eps": 1e-6, "weight_decay": 0.01}}
    return accelerate(model, loss, stage, steps, folder, section)


class Rows(Dataset[Any]):
    """The rows of all micro-batches, in their order."""

    def __len__(self) -> int:
        return LAST * MICROS * ROWS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        number, row = divmod(index, ROWS)
        x, y = batch(*divmod(number, MICROS))
        return {"x": x[row], "y": y[row]}


class WithLoss(transformers.Trainer):
    """Its loss has weights, and its optimizer holds them: a common subclass of users."""

    def __init__(self, *args: Any, loss: Any, **kwargs: Any) -> None:
        self.loss = loss
        super().__init__(*args, **kwargs)

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        self.optimizer = optimizer_of(self.model, self.loss)
        return self.optimizer

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return self.loss(model, inputs["x"], inputs["y"])


def trained_by(kind: Any, model: Any, loss: Any, stage: int, steps: range, folder: Path) -> Any:
    args = transformers.TrainingArguments(
        str(folder), use_cpu=True, max_steps=steps.stop, save_steps=SAVED, save_strategy="steps",
        per_device_train_batch_size=ROWS // RANKS, gradient_accumulation_steps=MICROS,
        max_grad_norm=CLIP, learning_rate=LR, adam_epsilon=1e-6, weight_decay=DECAY,
        lr_scheduler_type="constant", report_to="none", logging_strategy="no", disable_tqdm=True,
        remove_unused_columns=False, deepspeed=zero(stage) | {"gradient_clipping": "auto"},
    )  # fmt: skip
    run = kind(model, args, train_dataset=Rows(), loss=loss)
    run.remove_callback(transformers.PrinterCallback)
    saved = str(folder / f"checkpoint-{SAVED}")
    run.train(resume_from_checkpoint=saved if steps.start else None)
    weights = masters(model, loss)
    run.model_wrapped.destroy()
    return weights


def trainer(model: Any, loss: Any, stage: int, steps: range, folder: Path) -> Any:
    return trained_by(WithLoss, model, loss, stage, steps, folder)


class SoftmaxLoss(nn.Module):
    """The shape of sentence-transformers' class: the model, and a classifier of pairs."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.classifier = nn.Linear(24, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        a, b = self.model(x), self.model(x.flip(1))
        return nn.functional.cross_entropy(self.classifier(torch.cat([a, b, (a - b).abs()], 1)), y)


class GISTEmbedLoss(nn.Module):
    """The shape of sentence-transformers' class: the model, and a guide that requires grad and gets
    none; with a temperature that is learned, as subclasses have.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.guide = model, nn.Linear(8, 8)
        self.temperature = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        a, b = self.model(x), self.model(x.flip(1))
        with torch.no_grad():
            guide = self.guide(x)
            known = nn.functional.cosine_similarity(guide[:, None], guide[None], dim=-1) > 0.9
            known &= ~torch.eye(len(x), dtype=torch.bool)
        near = nn.functional.cosine_similarity(a[:, None], b[None], dim=-1) / self.temperature
        return nn.functional.cross_entropy(near.masked_fill(known, -1e9), torch.arange(len(x)))


def groups_of(loss: nn.Module, decay: float) -> list[dict[str, Any]]:
    named = [(name, p) for name, p in loss.named_parameters() if p.requires_grad]
    return [
        {"params": [p for name, p in named if name.endswith("bias") is bias], "weight_decay": value}
        for bias, value in ((False, decay), (True, 0.0))
    ]


class SentenceTrainer(WithLoss):
    """What sentence-transformers' Trainer overrides: the groups of the loss in place of those of
    the model, which the loss contains, and the engine in place of the loss's model.
    """

    create_optimizer = transformers.Trainer.create_optimizer

    def get_optimizer_cls_and_kwargs(self, args: Any, model: Any = None) -> Any:
        kind, keys = super().get_optimizer_cls_and_kwargs(args, self.loss)
        keys["optimizer_dict"] = groups_of(self.loss, args.weight_decay)
        return kind, keys

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if model is self.model_wrapped and model is not self.model:
            self.loss.model = model
        return self.loss(inputs["x"], inputs["y"])


def sentences(model: Any, loss: Any, stage: int, steps: range, folder: Path) -> Any:
    return trained_by(SentenceTrainer, model, loss, stage, steps, folder)


def sharding(stage: int) -> dict[str, Any]:
    """The Trainer and Fabric have the rest."""
    return {"zero_optimization": config_of(stage, RANKS)["zero_optimization"]}


class Fitted(pl.LightningModule):
    """The list keeps the loss from being a module of this one. An epoch has SAVED steps."""

    def __init__(self, model: nn.Module, loss: nn.Module) -> None:
        super().__init__()
        self.net, self.losses = model, [loss]

    def training_step(self, rows: Any, index: int) -> torch.Tensor:
        return self.losses[0](self.net, *rows)  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return optimizer_of(self.net, self.losses[0])

    def train_dataloader(self) -> Any:
        first = self.current_epoch * SAVED
        return DataLoader(micro_batches(range(first, first + SAVED)), batch_size=None)  # type: ignore[arg-type]


def lightning(model: Any, loss: Any, stage: int, steps: range, folder: Path) -> Any:
    module = Fitted(model, loss)
    run = pl.Trainer(
        max_epochs=steps.stop // SAVED, accumulate_grad_batches=MICROS, gradient_clip_val=CLIP,
        strategy=ZeroStrategy(sharding(stage)), reload_dataloaders_every_n_epochs=1,
        accelerator="cpu", devices=RANKS, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
    )  # fmt: skip
    run.fit(module, ckpt_path=str(folder / "saved.ckpt") if steps.start else None)
    if steps.stop < LAST:
        run.save_checkpoint(folder / "saved.ckpt")
    weights = masters(model, loss)
    run.strategy.engine.destroy()  # type: ignore[attr-defined]
    return weights


def fabric(model: Any, loss: Any, stage: int, steps: range, folder: Path) -> Any:
    launched = Fabric(accelerator="cpu", devices=RANKS, strategy=FabricStrategy(sharding(stage)))
    launched.launch()
    net, optimizer = launched.setup(model, optimizer_of(model, loss))
    state = {"model": net, "optimizer": optimizer}
    if steps.start:
        launched.load(folder / "saved", state)
    for number, (x, y) in enumerate(micro_batches(steps), 1):
        last = number % MICROS == 0
        with nullcontext() if last else launched.no_backward_sync(net):
            launched.backward(loss(net, x, y) / MICROS)
        if last:
            launched.clip_gradients(net, optimizer, max_norm=CLIP)
            optimizer.step()
            optimizer.zero_grad()
    if steps.stop < LAST:
        launched.save(folder / "saved", state)
    weights = masters(model, loss)
    launched.strategy.engines[0].destroy()  # type: ignore[attr-defined]
    return weights


def of_sentences(kind: Any) -> Callable[[], tuple[nn.Module, nn.Module]]:
    def make() -> tuple[nn.Module, nn.Module]:
        model, _ = built()
        return model, kind(model)

    return make


ROUTES: dict[str, tuple[Callable[[], tuple[nn.Module, nn.Module]], Route]] = {
    "deepspeed": (built, deepspeed_object),
    "deepspeed, section optimizer": (built, deepspeed_section),
    "accelerate": (built, accelerate),
    "accelerate, section optimizer": (built, accelerate_section),
    "trainer": (built, trainer),
    "SoftmaxLoss": (of_sentences(SoftmaxLoss), sentences),
    "GISTEmbedLoss": (of_sentences(GISTEmbedLoss), sentences),
    "lightning": (built, lightning),
    "fabric": (built, fabric),
}


def sentences_plainly(model: nn.Module, loss: nn.Module) -> list[torch.Tensor]:
    """Return the weights of plain PyTorch, with the batches of all ranks."""
    optimizer = torch.optim.AdamW(groups_of(loss, DECAY), lr=LR, eps=1e-6)
    for step in range(LAST):
        for micro in range(MICROS):
            for rank in range(RANKS):
                value = loss(*own_rows(rank, RANKS, *batch(step, micro)))
                (value / RANKS / MICROS).backward()
        nn.utils.clip_grad_norm_(loss.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in (*model.parameters(), *outside(model, loss))]


def main(folder: Path, whole: bool) -> None:
    """``whole``: each route at each stage, else at two of them, which take turns."""
    for number, (name, (make, route)) in enumerate(ROUTES.items()):
        if route is sentences:
            want = sentences_plainly(*make())
        else:
            want = plainly(accumulation=MICROS, clip=CLIP, steps=LAST)[1]
        for stage in range(4) if whole else (number % 4, (number + 2) % 4):
            place = folder / name.replace(" ", "_") / str(stage)
            for steps in (range(SAVED), range(SAVED, LAST)):
                forget()
                model, loss = make()
                if RANK:
                    with torch.no_grad():  # rank 0's values count
                        for parameter in loss.parameters():
                            parameter.add_(1.0)
                found = route(model, loss, stage, steps, place)
            where = f"{name}, stage {stage}"
            torch.testing.assert_close(
                found,
                want,
                rtol=1e-5,
                atol=1e-6,
                msg=lambda said: f"{where}: {said}",  # noqa: B023
            )
        if not RANK:
            print("equal", name, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), whole=sys.argv[2:] == ["all"])
