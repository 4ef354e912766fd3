"""One way to write a training loop for the engine and for the oracle: a :class:`Job` sees only a
:class:`Driver`.

The job says how a micro-batch becomes a loss and its backward; who averages, reduces, clips and
steps is the driver's business. So the same lines run in one plain process (the oracle) and on every
rank of an engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tests.helpers.models import ARCHITECTURES, Architecture, Batch, Stack, features, seeded

Optimizers = Callable[[nn.Module], torch.optim.Optimizer]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    # eps 1e-6: with 1e-8 Adam turns the rounding of gradients that are zero in theory into steps of
    # full size.
    return torch.optim.AdamW(trainable(model), lr=1e-3, eps=1e-6, weight_decay=0.1)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(trainable(model), lr=0.05, momentum=0.9)


def plain_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(trainable(model), lr=0.05)


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


@dataclass(frozen=True)
class Plan:
    """The length and precision of a training. ``clip`` 0 disables clipping; ``scale`` is the static
    loss scale of fp16.

    ``each_backward``: the oracle sums over ranks, in the plan's precision, after every backward and
    not once per accumulation window.
    """

    ranks: int = 1
    steps: int = 3
    accumulation: int = 1
    precision: str = "fp32"
    clip: float = 0.0
    scale: float = 1024.0
    each_backward: bool = False

    @property
    def dtype(self) -> torch.dtype:
        return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[
            self.precision
        ]


class Driver:
    """The interface of a job to its training: call it like the model; ``module`` is the bare model;
    ``backward`` takes the loss of one micro-batch.

    ``memory`` is storage of this rank, for jobs that keep something between micro-batches.
    """

    module: nn.Module
    dtype: torch.dtype
    memory: dict[str, Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def backward(self, loss: torch.Tensor) -> None:
        raise NotImplementedError


class Session(Driver):
    """A driver on one rank of a parallel run, and what is read from it."""

    def step(self) -> None:
        """Called after each micro-batch; updates the weights at the end of a window."""
        raise NotImplementedError

    def grads(self) -> dict[str, torch.Tensor]:
        """Whole gradients before a step: averaged, unscaled, not clipped."""
        raise NotImplementedError

    def norm(self) -> float:
        """After the step: the norm of those gradients."""
        raise NotImplementedError

    def weights(self) -> dict[str, torch.Tensor]:
        """Whole fp32 weights."""
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


@dataclass(frozen=True)
class At:
    """The position of a micro-batch in a run."""

    step: int
    micro: int
    rank: int


class Job:
    """A model, its optimizer, and what one micro-batch does.

    Subclasses are the ways people call a model.
    """

    name = ""

    def build(self) -> nn.Module:
        raise NotImplementedError

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return adamw(model)

    def loss(self, net: Driver, at: At) -> torch.Tensor:
        raise NotImplementedError

    def micros(self, plan: Plan, step: int) -> int:
        """Return the micro-batches of a rank in ``step``."""
        return plan.accumulation

    def rate(self, step: int) -> float:
        """Return what multiplies the learning rates of the plain loop in ``step``."""
        return 1.0

    def micro(self, net: Driver, at: At) -> torch.Tensor:
        """Run one micro-batch to the end of its backward; returns its loss."""
        loss = self.loss(net, at)
        net.backward(loss)
        return loss

    def window(
        self, net: Driver, at: Sequence[At], end_micro: Callable[[], None]
    ) -> list[torch.Tensor]:
        """Run a window; ``end_micro`` is called where a script calls ``engine.step()``."""
        losses = []
        for each in at:
            losses.append(self.micro(net, each))
            end_micro()
        return losses


@dataclass
class ArchitectureJob(Job):
    """A transformers model that returns its own loss."""

    architecture: Architecture
    make_optimizer: Optimizers = adamw
    name: str = field(init=False)

    def __post_init__(self) -> None:
        self.name = self.architecture.name

    def build(self) -> nn.Module:
        return self.architecture.build()

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return self.make_optimizer(model)

    def batch(self, at: At) -> Batch:
        return self.architecture.batch(at.step, at.micro, at.rank)

    def loss(self, net: Driver, at: At) -> torch.Tensor:
        return net(**self.batch(at)).loss


class StackJob(Job):
    """A stack, or ``model``, on random features, squared error against zero."""

    model: type[nn.Module] = Stack

    def build(self) -> nn.Module:
        return seeded(self.model)

    def loss(self, net: Driver, at: At) -> torch.Tensor:
        return squared_output(net, at)


def squared_output(net: Driver, at: At) -> torch.Tensor:
    return net(features(at.step, at.micro, at.rank).to(net.dtype)).float().pow(2).mean()


@dataclass
class Way(Job):
    """One way to call a model, put together of functions: ``make`` makes the model (which
    :func:`seeded` seeds), ``loss_of`` calls it, ``micro_of`` replaces :meth:`micro`.
    """

    name: str
    make: Callable[[], nn.Module] = Stack
    loss_of: Callable[[Driver, At], torch.Tensor] = squared_output
    make_optimizer: Optimizers = adamw
    micro_of: Callable[[Driver, At], torch.Tensor] | None = None

    def build(self) -> nn.Module:
        return seeded(self.make)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return self.make_optimizer(model)

    def loss(self, net: Driver, at: At) -> torch.Tensor:
        return self.loss_of(net, at)

    def micro(self, net: Driver, at: At) -> torch.Tensor:
        return self.micro_of(net, at) if self.micro_of else super().micro(net, at)


def own_loss(name: str, micros: int = 0, **more: Any) -> Callable[[Driver, At], torch.Tensor]:
    """A loss that an architecture computes itself, ``micros`` micro-batches later."""
    batch = ARCHITECTURES[name].batch
    return lambda net, at: net(**batch(at.step, at.micro + micros, at.rank), **more).loss


@dataclass
class Trace:
    """Per step the mean loss, the norm before clipping and each gradient; the final weights."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    grads: list[dict[str, torch.Tensor]] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)


def train(session: Session, job: Job, plan: Plan, rank: int) -> Trace:
    """Train on one rank and record; losses are this rank's own."""
    trace = Trace()
    for step in range(plan.steps):
        micros, ended = job.micros(plan, step), 0
        window = [At(step, micro, rank) for micro in range(micros)]

        def end_micro(micros: int = micros) -> None:
            nonlocal ended
            ended += 1
            if ended == micros:
                trace.grads.append(session.grads())
            session.step()

        losses = [float(loss.detach()) for loss in job.window(session, window, end_micro)]
        trace.losses.append(sum(losses) / len(losses))
        trace.norms.append(session.norm())
    trace.weights = session.weights()
    return trace


def merge(traces: Sequence[Trace]) -> Trace:
    """Return one trace of all ranks: losses averaged, the rest equal bit for bit."""
    first = traces[0]
    for rank, other in enumerate(traces[1:], 1):
        assert other.norms == first.norms, (
            f"rank {rank} has gradient norms {other.norms}, rank 0 has {first.norms}"
        )
        for step, (mine, theirs) in enumerate(zip(first.grads, other.grads)):
            for name, grad in mine.items():
                assert torch.equal(grad, theirs[name]), (
                    f"gradient of {name} in step {step} differs between rank 0 and rank {rank}"
                )
        for name, weight in first.weights.items():
            assert torch.equal(weight, other.weights[name]), (
                f"weight {name} differs between rank 0 and rank {rank}"
            )
    losses = [sum(values) / len(traces) for values in zip(*(t.losses for t in traces))]
    return Trace(losses, first.norms, first.grads, first.weights)
