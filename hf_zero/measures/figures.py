"""The figures of each optimizer step, under one set of names for every route:

loss: mean over the ranks and the micro-batches of the step, of the losses given to
``engine.backward``; left out unless every micro-batch has told its. learning_rate: of the first
group, as the step used it. grad_norm: before clipping, without the loss scale. loss_scale: fp16
only, as the step used it. step_ms: from the end of the last step, without evaluations, saves and
what follows them up to the next training forward or step; the bytes and waits of these are no part
of the step, either. samples_per_second, tokens_per_second: of all ranks. mfu: model FLOPs
utilization of this rank, between 0 and 1. device_bytes, ram_bytes, disk_bytes: state of this rank
by tier as the step's update begins, gradients included. peak_device_bytes: the allocator's peak.
wire_bytes: sent by this rank for collectives and for messages of pipelines; its parts by operation
are all_gather_wire_bytes and so on. gather_wait_ms, reduction_wait_ms: computation of this rank
waited so long for all-gathers, and for other collectives. samples, tokens: of this step, of all
ranks. samples_seen: since the beginning of the run, ``train_micro_batch_size_per_gpu`` for each
micro-batch of a rank; where no batch size is configured, the sum of samples.

A figure that does not apply is left out. Numbers of the device are read a step late
(``stopwatch.py``, the note). The line of the log about a step has some of them.
"""

from __future__ import annotations

import logging
import math
import re
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING

import torch

from hf_zero.config import ZeroConfig
from hf_zero.config.measures import MetricsSection
from hf_zero.config.sourced import is_written
from hf_zero.device import free_memory, kinds, pinned
from hf_zero.logging import JsonObject, finite, in_units, logger
from hf_zero.measures.collectives import FIGURES, CollectiveRow, EngineCollectives
from hf_zero.measures.stopwatch import Mark, Stopwatch, is_over, mark, milliseconds
from hf_zero.measures.utilization import flops_per_token, peak_flops
from hf_zero.zero.state_bytes import bytes_by_tier, held_bytes

if TYPE_CHECKING:
    from hf_zero.zero.training_engine import TrainingEngine

Figures = JsonObject
Waits = list[tuple[CollectiveRow, list[Stopwatch]]]
# names of results of an evaluation, and those among them that are no results but its speed
EVALUATION = re.compile(
    r"(?:^|[_/ .-])(?:eval|evaluation|val|valid|validation|test)(?:[_/ .-]|$)", re.I
)
SPEED_OF_EVALUATION = re.compile(r"(?:_per_second|_runtime|_time|_seconds)$")
NOT_DRAWN = ("step", "samples_seen", "samples", "tokens")


def tracked(figures: Mapping[str, object]) -> Figures:
    """Return the figures that trackers draw over steps."""
    return {name: value for name, value in figures.items() if name not in NOT_DRAWN}


def evaluation_results(values: Mapping[str, object]) -> JsonObject:
    """Return the numbers among logged ``values`` whose names say that they are results of an
    evaluation: eval_loss, val/accuracy; not its speed. One that is not finite is None.
    """
    results: JsonObject = {}
    for name, value in values.items():
        if not EVALUATION.search(name) or SPEED_OF_EVALUATION.search(name):
            continue
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = value.item()
        if isinstance(value, Real) and not isinstance(value, bool):
            results[name] = finite(float(value))
    return results


def main_input(engine: TrainingEngine, inputs: object) -> torch.Tensor | None:
    """Return the tensor with one row a sample among the arguments of a forward: the model's main
    input if it is named, otherwise the first one.
    """
    name = getattr(engine.module, "main_input_name", "input_ids")
    first = None
    for key, value in _leaves(inputs, ""):
        if key == name:
            return value
        first = value if first is None else first
    return first


def _leaves(value: object, key: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        if value.dim():
            yield key, value
    elif isinstance(value, Mapping):
        for name, child in value.items():
            yield from _leaves(child, str(name))
    elif isinstance(value, (list, tuple)):
        for child in value:
            yield from _leaves(child, key)


@dataclass(eq=False)
class _Step:
    """A step whose numbers are on their way to the host."""

    known: Figures
    tokens: int  # of this rank
    length: float  # tokens of a sequence
    numbers: torch.Tensor  # [5] float64: sum of losses, ranks with a loss, samples, tokens, norm
    times: list[tuple[Mark, Mark]]
    waits: Waits
    other_waits: Waits  # of evaluations, and for the sums of these figures

    @property
    def is_over(self) -> bool:
        return is_over(self.times[-1][1])


class StepFigures:
    """Collects the figures of the steps for which ``is_wanted(number)`` is true before they begin,
    counted from 1, and gives them to ``report``. Equal on all ranks, because the losses are summed
    over them. ``alone``: no other rank takes part; the loss is this rank's, and every rank has its
    number of samples and tokens.
    """

    def __init__(
        self,
        engine: TrainingEngine,
        section: MetricsSection,
        counts: EngineCollectives | None,
        is_wanted: Callable[[int], bool],
        report: Callable[[Figures], None],
        alone: bool = False,
    ):
        self.last: Figures = {}
        self._device, self._counts = engine.device, counts
        self._is_wanted, self._report, self._alone = is_wanted, report, alone
        self._given = section.flops_per_token
        self._peak = (
            1e12 * section.peak_tflops
            if section.peak_tflops
            else peak_flops(engine.device, engine.config.precision)
        )
        self.held: Counter[tuple[str, str]] = Counter()  # bytes by kind and tier
        self._unread: deque[_Step] = deque()
        self._begin: Mark | None = None  # None between an evaluation or a save and the next forward
        self._divisor: int | None = None  # of weighed losses, if it is known
        self._clear(engine)

    def _clear(self, engine: TrainingEngine) -> None:
        self._micro_steps = engine.counters.micro_steps
        self.collects = self._is_wanted(engine.counters.global_steps + 1)
        self.zero_grad()
        self._samples = self._tokens = 0
        self._square_lengths = 0  # of the tokens of all sequences: each counts its own length
        self._scale = 1.0  # of the loss, as the step uses it
        self._rate: float | None = None
        self._times: list[tuple[Mark, Mark]] = []
        self._sent = Counter[str]()  # bytes by operation in ``_times``
        self._wire = self._wire_now()
        self._waits: Waits = []
        self._other_waits: Waits = []

    def _wire_now(self) -> Counter[str]:
        return Counter() if self._counts is None else self._counts.wire.copy()

    def zero_grad(self) -> None:
        """Drop the losses so far."""
        self._loss: torch.Tensor | None = None
        self._known_losses = 0  # of backwards
        self._weighed = False

    def forward(self, engine: TrainingEngine, inputs: object) -> None:
        """Count the samples and tokens of a training forward in a step that is wanted."""
        if not engine.module.training or not torch.is_grad_enabled():  # Lightning sets the module's
            self.pause()  # an evaluation is no part of a step
            return
        self._resume()
        rows = main_input(engine, inputs)
        if rows is None:
            return
        self._samples += rows.shape[0]
        if rows.dim() == 2 and not rows.is_floating_point():
            self._tokens += rows.numel()
            self._square_lengths += rows.numel() * rows.shape[1]

    def divided_by(self, steps: int | None) -> None:
        """Note the divisor of the weighed losses to come; None: unknown."""
        self._divisor = steps

    def backward(self, loss: torch.Tensor, weighed: bool) -> None:
        """Add the loss of a micro-batch, which is ``weighed`` if the sum over its window is to be
        shown, not the mean: unless its divisor is known.
        """
        if not self.collects:
            return
        self._resume()
        value = loss.detach().double().reshape(())
        if weighed and self._divisor is not None:
            value, weighed = value * self._divisor, False
        self._loss = value if self._loss is None else self._loss + value
        self._weighed = weighed
        self._known_losses += 1

    def begin_step(self, engine: TrainingEngine) -> None:
        """Note the learning rate of the step, its loss scale, and the bytes of its state."""
        if not self.collects:
            return
        self._resume()
        self._scale = engine.loss_scale()
        self.held = held_bytes(engine)
        groups = [] if engine.optimizer is None else engine.optimizer.param_groups
        if groups and not isinstance(groups[0]["lr"], torch.Tensor):
            self._rate = engine.get_lr()[0]

    def end_step(self, engine: TrainingEngine) -> None:
        """Sum up a step that has ended (collective), and read those before that are over."""
        if self.collects:
            self._resume()  # an evaluation after an update in the backward has paused
            self._unread.append(self._ended(engine, engine.counters.global_steps))
        self._clear(engine)
        self._begin = mark(self._device) if self.collects else None
        while self._unread and self._unread[0].is_over:
            self._read(engine, self._unread.popleft())

    def pause(self) -> None:
        """Leave the time until the next forward or step out of the next step's, and its bytes and
        waits. So is the time before, unless it has had a forward of the step.
        """
        if self._begin is None:
            return
        if self._samples:
            self._times.append((self._begin, mark(self._device)))
        self._begin = None
        now = self._wire_now()
        self._sent += now - self._wire
        self._waits += self._take_waits()

    def _resume(self) -> None:
        """Let the time of the step go on after an evaluation or a save."""
        if self._begin is None:
            self._begin = mark(self._device)
            self._wire = self._wire_now()
            self._other_waits += self._take_waits()

    def _take_waits(self) -> Waits:
        return [] if self._counts is None else self._counts.take_waits()

    def restart(self, engine: TrainingEngine) -> None:
        """Begin a step after a load, with the engine's counters as they are now."""
        others = self._waits + self._other_waits + self._take_waits()
        self._clear(engine)
        self._begin, self._other_waits = None, others

    def finish(self, engine: TrainingEngine) -> None:
        """Read all steps; waits for the device."""
        while self._unread:
            self._read(engine, self._unread.popleft())

    def _ended(self, engine: TrainingEngine, number: int) -> _Step:
        figures: Figures = {"step": number}
        if self._counts is None or engine.config.has_batch_size:
            figures["samples_seen"] = engine.global_samples
        if self._rate is not None:
            figures["learning_rate"] = self._rate
        if engine.config.precision == "fp16":
            figures["loss_scale"] = self._scale
        figures.update({f"{tier}_bytes": n for tier, n in bytes_by_tier(engine, self.held).items()})
        if not kinds.is_synchronous(self._device):
            figures["peak_device_bytes"] = free_memory.max_allocated(self._device)
        if self._counts is not None:
            sent = self._sent + (self._wire_now() - self._wire)
            figures["wire_bytes"] = round(sent.total())
            figures.update({f"{op}_wire_bytes": round(size) for op, size in sent.items() if size})
        waits = self._waits + self._take_waits()
        numbers = self._summed(engine)
        assert self._begin is not None
        return _Step(
            figures,
            self._tokens,
            self._square_lengths / self._tokens if self._tokens else 0.0,
            numbers,
            [*self._times, (self._begin, mark(self._device))],
            waits,
            self._other_waits + self._take_waits(),
        )

    def _summed(self, engine: TrainingEngine) -> torch.Tensor:
        """Return the numbers of the step over all ranks, on their way to host memory."""

        def number(value: float) -> torch.Tensor:
            return torch.full((), value, dtype=torch.float64, device=self._device)

        micros = engine.counters.micro_steps - self._micro_steps
        loss = self._loss if self._known_losses >= micros else None
        ranks = engine.mesh.pp_stage_ranks if self._alone else 1
        counts = (float(loss is not None), ranks * self._samples, ranks * self._tokens)
        if loss is None:
            loss = number(0.0)
        elif not self._weighed:
            loss = loss / micros
        local = torch.stack([loss.to(self._device), *map(number, counts)])
        mesh = engine.mesh
        for dim in () if self._alone else (mesh.sums.stages, mesh.shard, mesh.replicate):
            dim.all_reduce(local, FIGURES).wait()
        norm = engine.grad_norm_tensor().double().reshape(1).to(self._device)
        numbers = torch.cat([local, norm])
        if kinds.is_synchronous(self._device):
            return numbers
        return pinned.empty(5, torch.float64).copy_(numbers, non_blocking=True)

    def _read(self, engine: TrainingEngine, step: _Step) -> None:
        took = sum(milliseconds(*time) for time in step.times)
        loss, losses, samples, tokens, norm = step.numbers.tolist()
        tensor_ranks = max(engine.mesh.dims.tensor, engine.config.tensor_parallel.size)
        samples *= engine.data_ranks / engine.mesh.pp_stage_ranks
        tokens /= tensor_ranks
        figures = dict(step.known)
        if losses:
            figures["loss"] = loss / losses
        figures["grad_norm"] = norm
        figures["step_ms"] = took
        for name, count in (("samples", samples), ("tokens", tokens)):
            if count:
                figures[name] = round(count)
                if took:
                    figures[f"{name}_per_second"] = 1e3 * count / took
        if "samples_seen" not in figures:
            engine.counters.global_samples += round(samples)
            figures["samples_seen"] = engine.global_samples
        utilization = self._utilization(engine, step, took, tensor_ranks)
        if utilization is not None:
            figures["mfu"] = utilization
        if self._counts is not None:
            self._counts.read(step.other_waits)
            waits = self._counts.read(step.waits)
            figures.update({f"{kind}_wait_ms": waits[kind] for kind in ("gather", "reduction")})
        self.last = figures
        self._report(figures)

    def _utilization(
        self, engine: TrainingEngine, step: _Step, took: float, tensor_ranks: int
    ) -> float | None:
        """Return the share of its peak at which this rank has computed; None: not known."""
        if self._peak is None or not step.tokens or not took:
            return None
        stages = engine.mesh.dims.pipeline
        per_token = self._given and self._given / (tensor_ranks * stages)
        if not per_token:
            per_token = flops_per_token(engine.module, step.length, tensor_ranks, stages)
        return None if per_token is None else 1e3 * per_token * step.tokens / took / self._peak


SECONDS = 30.0  # between two lines that no key asks for
# figures of the line, with their names there
PRINTED = {
    "loss": "loss",
    "learning_rate": "learning_rate",
    "grad_norm": "grad_norm",
    "loss_scale": "loss_scale",
    "samples_per_second": "samples/s",
    "tokens_per_second": "tokens/s",
    "step_ms": "ms/step",
}


class StepLine:
    """The line of one engine, on the rank that logs it.

    ``every``: steps between two lines; 0 if no key asks for them. ``by_time``: rank 0 then logs its
    first step, and a line each 30 seconds at most, unless a bar of tqdm is open or null or
    infinity is written as ``steps_per_print``. No rank but rank 0 takes part in these.
    """

    def __init__(self, config: ZeroConfig, rank: int):
        every = config.steps_per_print
        self.every = 0 if every is None or math.isinf(every) else max(1, int(every))
        # null and infinity are read as None; Accelerate writes infinity by habit
        refused = not self.every and is_written(config.sources["steps_per_print"])
        self.by_time = rank == 0 and not refused and logger.isEnabledFor(logging.INFO)
        self._next = 0.0

    def is_due(self, step: int) -> bool:
        """Return whether ``step`` has a line, as far as it is known before the step."""
        if self.every:
            return step % self.every == 0
        return self.by_time and time.monotonic() >= self._next

    def log(self, figures: Figures, of_rank_0: bool) -> None:
        """Log the line of ``figures`` if it is due; ``of_rank_0``: the loss is rank 0's own."""
        step = figures["step"]
        if not self.is_due(step):
            return
        self._next = time.monotonic() + SECONDS
        if self.every or not _bar_is_open():
            logger.info("step %d: %s", step, _text(figures, of_rank_0))


def _bar_is_open() -> bool:
    """Return whether a bar of tqdm is on the terminal of this process."""
    bars = getattr(sys.modules.get("tqdm"), "tqdm", None)
    return bool(getattr(bars, "_instances", ()))


def _text(figures: Figures, of_rank_0: bool) -> str:
    """Return the figures, the bytes of this rank's state and the most its device has held."""
    shown = [f"{label} {figures[name]:.6g}" for name, label in PRINTED.items() if name in figures]
    if of_rank_0 and "loss" in figures:
        shown[0] += " (rank 0's batches only)"
    state = sum(figures.get(f"{tier}_bytes", 0) for tier in ("device", "ram", "disk"))
    shown.append(f"model state {in_units(state)}")
    if "peak_device_bytes" in figures:
        shown.append(f"peak device memory {in_units(figures['peak_device_bytes'])}")
    return ", ".join(shown)
