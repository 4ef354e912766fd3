"""Trainings of Transformers' Trainer and of Lightning that call a function at each point: with an
engine, and plain, in one process.
"""

from __future__ import annotations

from collections.abc import Callable
from tempfile import TemporaryDirectory
from typing import Any

import lightning.pytorch as pl
import torch
import transformers
from lightning.fabric import Fabric
from torch import nn

from hf_zero.integrations.lightning import FabricStrategy, ZeroStrategy
from tests.helpers.engines import config_of, full_weights
from tests.helpers.models import seeded
from tests.helpers.step_accesses import (
    MICROS,
    ROWS,
    STEPS,
    Net,
    ScriptClipping,
    Session,
    batch,
    net,
    schedule,
    sgd,
    squared,
)

At = Callable[[str, int, Session], None]


def norm_of(model: nn.Module) -> float:
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return float(torch.cat([grad.flatten() for grad in grads]).norm()) if grads else 0.0


class Scored(Net):
    """A model that returns its loss, as those of Transformers."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": squared(super().forward, x)}


class Rows(torch.utils.data.Dataset[Any]):
    """The rows of all micro-batches, in their order."""

    def __len__(self) -> int:
        return STEPS * MICROS * ROWS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        number, row = divmod(index, ROWS)
        return {"x": batch(*divmod(number, MICROS), 0)[row]}


class Noted(transformers.Trainer):
    """Calls ``point`` where subclasses of users act: in ``compute_loss`` and ``training_step``."""

    point: Callable[[str], None]

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        if not self.accelerator.sync_gradients:
            self.point("compute_loss")
        return loss

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().training_step(*args, **kwargs)
        last = self.accelerator.sync_gradients
        self.point("training_step, last" if last else "training_step")
        return loss


class Callback(transformers.TrainerCallback):
    def __init__(self, point: Callable[[str], None]) -> None:
        self.point = point


for _name in (
    "on_step_begin", "on_substep_end", "on_pre_optimizer_step", "on_optimizer_step", "on_step_end",
):  # fmt: skip
    setattr(Callback, _name, lambda self, *_, name=_name, **__: self.point(name))


def trainer(stage: int | None, clip: float, at: At) -> dict[str, Any]:
    """``stage`` None: without an engine."""
    model = seeded(Scored)
    optimizer = sgd(model)
    session: Session | None = None

    def point(name: str) -> None:
        nonlocal session
        if session is None:
            engine = None if stage is None else run.model_wrapped
            session = Session(model, run.optimizer, lambda x: model(x)["loss"], engine)
            session.limit = lambda limit: setattr(run.args, "max_grad_norm", limit)
        if name == "training_step, last":
            noted[0] = norm_of(model) if stage is None else 0.0
        elif name == "on_pre_optimizer_step":  # the Trainer reads it, also where it does not clip
            session.norm = noted[0]
        at(name, run.state.global_step - (name == "on_step_end"), session)

    noted = [0.0]
    zero = config_of(
        stage or 0,
        gradient_accumulation_steps=MICROS,
        gradient_clipping="auto",
        train_micro_batch_size_per_gpu=ROWS,
    )
    with TemporaryDirectory() as folder:
        args = transformers.TrainingArguments(
            folder, use_cpu=True, max_steps=STEPS, per_device_train_batch_size=ROWS,
            gradient_accumulation_steps=MICROS, max_grad_norm=clip, report_to="none",
            save_strategy="no", logging_strategy="no", disable_tqdm=True,
            remove_unused_columns=False, **({} if stage is None else {"deepspeed": zero}),
        )  # fmt: skip
        run = Noted(
            model, args, train_dataset=Rows(), callbacks=[Callback(point)],
            optimizers=(optimizer, schedule(optimizer)),
        )  # fmt: skip
        run.remove_callback(transformers.PrinterCallback)
        run.point = point
        run.train()
    if stage is None:
        return {n: p.detach().clone() for n, p in model.named_parameters()}
    weights = full_weights(run.model_wrapped)
    run.model_wrapped.destroy()
    return weights


class Module(pl.LightningModule):
    """Calls ``point`` in the hooks and the overrides of users."""

    point: Callable[[str], None]

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        optimizer = sgd(self)
        return [optimizer], [{"scheduler": schedule(optimizer), "interval": "step"}]

    def last(self, index: int) -> bool:
        return index % MICROS == MICROS - 1


class Automatic(Module):
    def training_step(self, x: torch.Tensor, index: int) -> torch.Tensor:
        self.index = index
        loss = squared(self, x)
        if not self.last(index):
            self.point("training_step")
        return loss

    def on_train_batch_start(self, x: Any, index: int) -> None:
        if not self.last(index):
            self.point("on_train_batch_start")

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.point("on_before_zero_grad")

    def on_before_backward(self, loss: Any) -> None:
        if not self.last(self.index):
            self.point("on_before_backward")

    def on_after_backward(self) -> None:
        self.point("on_after_backward, last" if self.last(self.index) else "on_after_backward")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.point("on_before_optimizer_step")

    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        super().configure_gradient_clipping(*args, **kwargs)
        self.point("configure_gradient_clipping")

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        self.point("optimizer_step")

    def on_train_batch_end(self, outputs: Any, x: Any, index: int) -> None:
        self.point("on_train_batch_end, last" if self.last(index) else "on_train_batch_end")


class Manual(Module):
    limit = 0.0
    clipped = False

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def set_limit(self, limit: float) -> None:
        self.limit = limit
        if self.clipped:
            self.clip_gradients(self.optimizers(), limit, "norm")

    def training_step(self, x: torch.Tensor, index: int) -> None:
        optimizer, scheduler = self.optimizers(), self.lr_schedulers()
        if not self.last(index):
            self.point("before forward")
        loss = squared(self, x) / MICROS
        if not self.last(index):
            self.point("after forward")
        self.manual_backward(loss)
        if not self.last(index):
            self.point("after backward in the window")
            return
        self.point("after the last backward")
        if self.limit:
            self.clip_gradients(optimizer, self.limit, "norm")
        self.clipped = True
        self.point("after clipping")
        optimizer.step()
        self.clipped = False
        self.point("after step")
        scheduler.step()
        self.point("after scheduler")
        optimizer.zero_grad()
        self.point("after zero_grad")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.point("on_before_optimizer_step")

    def on_train_batch_end(self, outputs: Any, x: Any, index: int) -> None:
        self.point("on_train_batch_end, last" if self.last(index) else "on_train_batch_end")


class Batches(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return STEPS * MICROS

    def __getitem__(self, index: int) -> torch.Tensor:
        return batch(*divmod(index, MICROS), 0)


def _fit(
    module: Any, stage: int | None, clip: float, at: At, before_clipping: str, clipping: str
) -> Any:
    """``before_clipping``, ``clipping``: the points before and after clipping."""
    session: Session | None = None
    noted, ended = 0.0, 0

    def point(name: str) -> None:
        nonlocal session, noted, ended
        if session is None:
            optimizer = run.strategy.optimizers[0]
            engine = None if stage is None else run.strategy.engine
            session = Session(module.net, optimizer, module.net, engine, divides=False)
            set_limit = getattr(module, "set_limit", lambda x: setattr(run, "gradient_clip_val", x))
            session.limit = set_limit
        if stage is None and name == before_clipping:
            noted = session.step_norm = norm_of(module)
        limit = run.gradient_clip_val or getattr(module, "limit", 0.0)
        if name == (clipping if limit else step_ended):
            session.norm = noted
        at(name, ended, session)
        ended += name == "on_train_batch_end, last"

    step_ended = "optimizer_step" if module.automatic_optimization else "after step"
    module.point = point
    automatic = {"accumulate_grad_batches": MICROS, "gradient_clip_val": clip or None}
    run: Any = pl.Trainer(
        max_epochs=1,
        **(automatic if module.automatic_optimization else {}),
        **({} if stage is None else {"strategy": ZeroStrategy(stage=stage)}),
        accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
    )  # fmt: skip
    run.fit(module, torch.utils.data.DataLoader(Batches(), batch_size=None))
    if stage is None:
        return {n: p.detach().clone() for n, p in module.net.named_parameters()}
    weights = full_weights(run.strategy.engine)
    run.strategy.engine.destroy()
    return {name.removeprefix("net."): value for name, value in weights.items()}


def lightning(stage: int | None, clip: float, at: At) -> dict[str, Any]:
    before, after = "on_before_optimizer_step", "configure_gradient_clipping"
    return _fit(Automatic(), stage, clip, at, before, after)  # type: ignore[no-any-return]


def lightning_manual(stage: int | None, clip: float, at: At) -> dict[str, Any]:
    module = Manual()
    module.limit = clip
    return _fit(module, stage, clip, at, "after the last backward", "after clipping")  # type: ignore[no-any-return]


def fabric(stage: int | None, clip: float, at: At) -> dict[str, Any]:
    """A loop of Fabric, which divides the loss by the micro-batches of a step itself."""
    strategy = {} if stage is None else {"strategy": FabricStrategy(stage=stage)}
    launched = Fabric(accelerator="cpu", devices=1, **strategy)  # type: ignore[arg-type]
    launched.launch()
    bare = net()
    bare_optimizer = sgd(bare)
    model, optimizer = launched.setup(bare, bare_optimizer)
    scheduler = schedule(optimizer)
    engine = None if stage is None else launched.strategy.engines[0]  # type: ignore[attr-defined]
    session = Session(bare, optimizer, model, engine, divides=False)
    clipping = ScriptClipping(
        lambda limit: launched.clip_gradients(model, optimizer, max_norm=limit), clip
    )
    session.limit = clipping.set_limit
    for step in range(STEPS):
        at("before forward", step, session)
        for micro in range(MICROS):
            loss = squared(model, batch(step, micro, 0)) / MICROS
            if micro == 0:
                at("after forward", step, session)
            launched.backward(loss)
            if micro == 0:
                at("after backward in the window", step, session)
        at("after the last backward", step, session)
        norm = norm_of(bare) if stage is None else 0.0
        session.norm = norm if clipping.limit else session.norm
        session.step_norm = norm if engine is None else None
        clipping()
        at("after clipping", step, session)
        optimizer.step()
        session.norm, clipping.clipped = norm, False
        at("after step", step, session)
        scheduler.step()
        at("after scheduler", step, session)
        optimizer.zero_grad()
        at("after zero_grad", step, session)
    if engine is None:
        return {n: p.detach().clone() for n, p in bare.named_parameters()}
    weights = full_weights(engine)
    engine.destroy()
    return weights
