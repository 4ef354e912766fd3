"""The oracle: a plain single-process loop over the same global batch, in fp32 or in mixed
precision, and how to compare.

A gradient is the mean over ranks and accumulation steps of each micro-batch's own gradient. A
trainable parameter that no micro-batch of a step used has none: the optimizer leaves its weight and
state as they are. It is recorded as zero.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from tests.helpers.training import At, Driver, Job, Plan, Trace

FP32_TOLERANCE = 1e-5
MIXED_FACTOR = 1.2
# An all-reduce over more than two ranks (stage 0) adds up in the backend's order; the other stages
# add in the oracle's own.
MIXED_FACTOR_OTHER_ORDER = 1.5
ROUNDING = 1e-7
# AdamW multiplies the rounding in gradients that are zero in theory by up to lr / eps = 1000.
ADAM_ROUNDING = 5e-6


class _Plain(Driver):
    """The bare model; gradients gather in fp32 in ``sums``, whatever the precision of the model."""

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        self.module, self.plan, self.dtype, self.memory = model, plan, plan.dtype, {}
        self.scale = plan.scale if plan.precision == "fp16" else 1.0
        self.begin(plan.accumulation)
        self.sums = {
            name: torch.zeros_like(p, dtype=torch.float32)
            for name, p in model.named_parameters()
            if p.requires_grad
        }
        self.used: set[str] = set()  # in this step, by any rank
        self.sent: list[dict[str, torch.Tensor]] = []  # by message: sums over the ranks so far
        self.place = 0  # the message this rank sends next

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def begin(self, micros: int) -> None:
        """Begin a step whose windows have ``micros`` micro-batches."""
        # what a sum over the window and the ranks is divided by
        self.mean = self.scale * self.plan.ranks * micros
        self.divisor = self.mean if self.plan.precision == "fp16" else 1.0

    def backward(self, loss: torch.Tensor) -> None:
        # the mean over the window is taken in fp32: by three is no exact division
        (loss * self.scale).backward()
        self.harvest()

    def harvest(self) -> None:
        for name, p in self.module.named_parameters():
            if p.grad is not None:
                self.used.add(name)
                self.sums[name] += p.grad.float() / self.mean
                p.grad = None
        if self.plan.each_backward:
            self.send()

    def send(self) -> None:
        """Add this rank's sums to those of others, in the dtype of the parameters."""
        if self.place == len(self.sent):
            self.sent.append(
                {
                    name: torch.zeros_like(p)
                    for name, p in self.module.named_parameters()
                    if name in self.sums
                }
            )
        for name, total in self.sums.items():
            # fp16 travels before it is divided, because small gradients would vanish.
            self.sent[self.place][name] += (total * self.divisor).to(
                self.sent[self.place][name].dtype
            )
            total.zero_()
        self.place += 1

    def end_rank(self) -> None:
        if not self.plan.each_backward:
            self.send()
        self.place = 0

    def take(self) -> dict[str, torch.Tensor]:
        grads = {
            name: torch.stack([sent[name].float() for sent in self.sent]).sum(0) / self.divisor
            for name in self.sums
        }
        self.sent = []
        return grads


def cast_parameters(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast parameters, but what transformers keeps in fp32; never buffers."""
    keep = list(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    if dtype == torch.float16:
        keep += list(getattr(model, "_keep_in_fp32_modules", None) or ())
    for name, p in model.named_parameters():
        if p.is_floating_point() and not any(part in keep for part in name.split(".")):
            p.data = p.data.to(dtype)
    return model


@contextmanager
def _rates_times(factor: float, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    groups = optimizer.param_groups if factor != 1.0 else []
    rates = [group["lr"] for group in groups]
    for group, rate in zip(groups, rates):
        group["lr"] = rate * factor
    yield
    for group, rate in zip(groups, rates):
        group["lr"] = rate


def run(job: Job, plan: Plan) -> Trace:
    """Train ``job`` by ``plan`` in this process alone."""
    master = job.build()
    mixed = plan.precision != "fp32"
    model = cast_parameters(copy.deepcopy(master), plan.dtype) if mixed else master
    optimizer = job.optimizer(master)
    net, trace = _Plain(model, plan), Trace()
    masters = dict(master.named_parameters())
    memories: list[dict[str, Any]] = [{} for _ in range(plan.ranks)]
    for step in range(plan.steps):
        losses: list[float] = []
        micros = job.micros(plan, step)
        net.begin(micros)
        for rank in range(plan.ranks):
            net.memory = memories[rank]
            window = [At(step, micro, rank) for micro in range(micros)]
            losses += [float(loss.detach()) for loss in job.window(net, window, lambda: None)]
            net.end_rank()
        grads = net.take()
        norm = total_norm(grads)
        factor = min(1.0, plan.clip / (norm + 1e-6)) if plan.clip else 1.0
        for name in net.used:
            masters[name].grad = grads[name] * factor
        net.used.clear()
        with _rates_times(job.rate(step), optimizer):
            optimizer.step()
        optimizer.zero_grad()
        if mixed:
            with torch.no_grad():
                for name, p in model.named_parameters():
                    p.copy_(masters[name])
        trace.losses.append(sum(losses) / len(losses))
        trace.norms.append(norm)
        trace.grads.append(grads)
    # What is frozen has no master: it is what the model computes with.
    trace.weights = {
        name: (masters[name] if masters[name].requires_grad else p)
        .detach()
        .to(masters[name].dtype, copy=True)
        for name, p in model.named_parameters()
    }
    return trace


_kept: dict[tuple[str, Plan], Trace] = {}


def kept(job: Job, plan: Plan) -> Trace:
    """``run``, remembered by the job's name."""
    key = (job.name, plan)
    if key not in _kept:
        _kept[key] = run(job, plan)
    return _kept[key]


def mixed(job: Job, plan: Plan, stage: int) -> Trace:
    """The plain loop in 16 bits, whose ranks are added up when those of ``stage`` are."""
    return kept(job, dataclasses.replace(plan, each_backward=stage >= 2))


def total_norm(tensors: Mapping[str, torch.Tensor]) -> float:
    return math.sqrt(sum(float(t.double().pow(2).sum()) for t in tensors.values()))


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm())


def compare_tensors(
    what: str,
    got: Mapping[str, torch.Tensor],
    want: Mapping[str, torch.Tensor],
    tolerance: float = FP32_TOLERANCE,
    floor: float = ROUNDING,
) -> None:
    """Each tensor within ``tolerance`` of its own norm plus ``floor`` of the norm over all tensors.

    The second term is what rounding leaves in tensors that are zero in theory, as the gradient of
    an attention key's bias.
    """
    assert set(got) == set(want), (
        f"{what}: missing {sorted(set(want) - set(got))}, unexpected {sorted(set(got) - set(want))}"
    )
    allowed = floor * total_norm(want)
    wrong = []
    for name, expected in want.items():
        assert got[name].shape == expected.shape, (
            f"{what} of {name} has shape {tuple(got[name].shape)}, expected {tuple(expected.shape)}"
        )
        error, size = _distance(got[name], expected), float(expected.double().norm())
        if not error <= tolerance * size + allowed:  # written so that NaN is wrong
            wrong.append(
                f"{name}: norm {float(got[name].double().norm()):.6g}, expected "
                f"{size:.6g}, off by {error:.3g}"
            )
    assert not wrong, f"{what} wrong in {len(wrong)} of {len(want)} tensors:\n  " + "\n  ".join(
        wrong[:12]
    )


def compare(
    got: Trace, want: Trace, tolerance: float = FP32_TOLERANCE, weight_floor: float = ADAM_ROUNDING
) -> None:
    """fp32: each step's loss, norm and gradients, and the last weights."""
    assert len(got.losses) == len(want.losses), (
        f"{len(got.losses)} steps, expected {len(want.losses)}"
    )
    for step, expected in enumerate(want.grads):
        compare_tensors(f"step {step}: gradient", got.grads[step], expected, tolerance)
        for what, a, b in (
            ("loss", got.losses[step], want.losses[step]),
            ("gradient norm", got.norms[step], want.norms[step]),
        ):
            assert abs(a - b) <= tolerance * abs(b), (
                f"step {step}: {what} {a:.8g}, expected {b:.8g}"
            )
    compare_tensors("weights", got.weights, want.weights, tolerance, weight_floor)


def errors(got: Trace, exact: Trace) -> dict[str, float]:
    """Return the distances of a run from the fp32 one, over all steps."""
    return {
        "loss": math.sqrt(sum((a - b) ** 2 for a, b in zip(got.losses, exact.losses))),
        "gradient norm": math.sqrt(sum((a - b) ** 2 for a, b in zip(got.norms, exact.norms))),
        "gradients": math.sqrt(
            sum(
                _distance(a[name], b[name]) ** 2
                for a, b in zip(got.grads, exact.grads)
                for name in b
            )
        ),
        "weights": math.sqrt(
            sum(_distance(got.weights[name], exact.weights[name]) ** 2 for name in exact.weights)
        ),
    }


def factor_at(stage: int, ranks: int) -> float:
    return MIXED_FACTOR_OTHER_ORDER if stage == 0 and ranks > 2 else MIXED_FACTOR


def compare_mixed(
    got: Trace, mixed: Trace, exact: Trace, dtype: torch.dtype, factor: float = MIXED_FACTOR
) -> None:
    """16-bit: the error against fp32 is at most ``factor`` times that of the same mixed-precision
    loop in one process.

    Loss and gradient norm are single numbers, whose error may be small by luck. So the loss is also
    allowed a twentieth of the rounding of ``dtype`` and half of what the error in the weights could
    do to it (gradient norm times error, to first order), and the norm what the error in the
    gradients could do to it.
    """
    ours, theirs = errors(got, exact), errors(mixed, exact)
    theirs["loss"] += (
        torch.finfo(dtype).eps / 20 * math.hypot(*exact.losses)
        + max(exact.norms) * theirs["weights"] / 2
    )
    theirs["gradient norm"] = max(theirs["gradient norm"], theirs["gradients"])
    for what, error in ours.items():
        limit = factor * theirs[what]
        assert error <= limit, f"{what}: error {error:.4g} against fp32, limit {limit:.4g}"


def accept(got: Trace, job: Job, plan: Plan, stage: int) -> None:
    """Compare a run by ``plan`` at ``stage`` with the plain loop, as its precision asks."""
    if plan.precision == "fp32":
        compare(got, kept(job, plan))
        return
    exact = kept(job, dataclasses.replace(plan, precision="fp32"))
    factor = factor_at(stage, plan.ranks)
    compare_mixed(got, mixed(job, plan, stage), exact, plan.dtype, factor)
