"""One training step of an engine without memory, as recorded: what it computes, the messages that
it launches and waits for, and the bytes that it holds meanwhile.

The engine is the one that ``hf_zero.initialize`` builds, of one rank, over the fake process group
and on the meta device: its plan, hooks and schedule run, and every operation computes shapes only.
The first steps record the order of gathers and make lasting buffers; the last one is kept.

[Note: bytes]
The state at rest is that of the plan, by tier. In addition the recording counts each storage
that an operation makes while it is alive (activations, gradients, messages), and the units that are
gathered. Storages that exist before the step and belong to no operation of it are state.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from hf_zero.device import spans
from hf_zero.distributed.collectives import MeshDim
from hf_zero.measures.collectives import MESSAGES, IssuedStats, ObservedHandle
from hf_zero.planning.live_bytes import LiveBytes
from hf_zero.planning.simulation.shapes import ShapeCache, tensors_of
from hf_zero.zero.layout.meta_run import COPIES, GROUPED, NUMBERS

if TYPE_CHECKING:
    from hf_zero.zero.layout.flat_buffer import FlatBuffer
    from hf_zero.zero.training_engine import TrainingEngine

FORWARD, BACKWARD, STEP = "forward", "backward", "step"
PHASES = (FORWARD, BACKWARD, STEP)
aten = torch.ops.aten
_ANSWERS = {**NUMBERS, **COPIES, **GROUPED}
# FLOPs by operation, from its arguments
_FLOPS = {
    **flop_registry,
    aten._grouped_mm: lambda rows, others, *_, **__: 2 * rows.numel() * others.shape[-1],
}
_FUSED = re.compile(r"aten::_fused_\w+_$")  # optimizer steps, in place


@dataclass(frozen=True)
class StepPlace:
    """A place in a step: the phase, one of :data:`PHASES`, and the block that runs."""

    phase: str
    block: str
    micro_batch: int

    def __str__(self) -> str:
        inside = f" of {self.block}" if self.block else ""
        return f"{self.phase}{inside}"


@dataclass
class Work:
    """Operations between two messages: their number, FLOPs of matrix products, and bytes read and
    written by the others.
    """

    place: StepPlace
    flops: float = 0.0
    nbytes: int = 0
    operations: int = 0


@dataclass(frozen=True)
class Group:
    """A group of global ranks that exchange messages."""

    name: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Message:
    """A collective: ``operation`` on ``nbytes`` of ``unit`` over ``group``. ``anew``: bytes of them
    that it writes to memory which was released before.
    """

    place: StepPlace
    operation: str
    unit: str
    group: Group
    nbytes: int
    anew: int = 0

    @property
    def unit_name(self) -> str:
        """The name of the unit alone, of its messages of all flat buffers; "" for the root."""
        return self.unit.partition("|")[0]


@dataclass(frozen=True, eq=False)
class Arrival(Message):
    """A message of another stage of a pipeline that this rank is ready to receive."""


@dataclass(frozen=True)
class Wait:
    """A wait of the host, or of the computing stream, for ``message``."""

    place: StepPlace
    message: Message


Event = Work | Message | Wait


RECORDED = 3  # micro-batches: the first, the last, and one that all between them are like


@dataclass
class Recording:
    """One step of ``micro_batches``. ``events``: in the order of the host. ``peaks``: bytes besides
    the state at rest, by phase, and the place of the peak. ``repeats``: how many micro-batches
    between the first and the last are like the second one, and not among the events.
    """

    micro_batches: int = 1
    events: list[Event] = field(default_factory=list)
    peaks: dict[str, tuple[int, StepPlace]] = field(default_factory=dict)
    repeats: int = 0

    def step(self) -> Iterator[Event]:
        """Yield the events of the whole step."""
        middle = [event for event in self.events if event.place.micro_batch == 1]
        last = None
        for event in self.events:
            if last == 1 and event.place.micro_batch == 2:
                for _ in range(self.repeats):
                    yield from middle
            last = event.place.micro_batch
            yield event

    @property
    def flops(self) -> float:
        """FLOPs of the matrix products of the step."""
        return sum(event.flops for event in self.step() if isinstance(event, Work))


class Recorder(TorchDispatchMode):
    """Dispatch mode that records a step of an engine on the meta device.

    A host that reads a number of a tensor without values reads 0.
    """

    def __init__(self, engine: TrainingEngine, dims: Sequence[MeshDim]):
        super().__init__()
        self.engine: TrainingEngine = engine
        self._dims = dims
        self._device = engine.device.type
        self._shapes = ShapeCache()
        self.live = LiveBytes()
        self.high = 0  # the most of them so far
        self._gathered = 0
        self._place = self.high_place = StepPlace(FORWARD, "", 0)
        self.recording: Recording | None = None

    def enter(self, phase: str, micro_batch: int) -> None:
        """Begin a phase."""
        self._place = StepPlace(phase, "", micro_batch)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Context in which steps are followed."""
        with ExitStack() as stack:
            for dim in {id(dim): dim for dim in self._dims if dim.size > 1}.values():
                stats = _Messages(self, dim)
                stack.callback(dim.observe(stats, partial(ObservedHandle, self.waited, stats)))
            stack.enter_context(spans.watched(self._on_span))
            stack.enter_context(_fused_on_meta())
            stack.enter_context(_as_if_read(self.engine))
            stack.enter_context(self)
            yield

    @contextmanager
    def recorded(self, micro_batches: int, repeats: int = 0) -> Iterator[Recording]:
        """Context of the step to keep; arguments as for :class:`Recording`."""
        optimizer = self.engine.optimizer
        for state in optimizer.state.values() if optimizer is not None else ():
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    self.live.forget(value.untyped_storage())
        self.recording = Recording(micro_batches, repeats=repeats)
        try:
            yield self.recording
        finally:
            self.recording = None

    def _on_span(self, what: str, block: str, ends: bool) -> None:
        if not ends:
            self._place = StepPlace(self._place.phase, block, self._place.micro_batch)
        elif what in PHASES:
            return
        self._count_gathered()

    def launched(self, message: Message) -> None:
        """Record the launch of ``message``."""
        self._count_gathered()
        if self.recording is not None:
            self.recording.events.append(message)

    def newly_gathered(self) -> int:
        """Return the bytes of units that have memory again since they were counted."""
        before = self._gathered
        self._count_gathered()
        return max(0, self._gathered - before)

    def waited(self, message: Message, wait: Callable[[], None]) -> None:
        """Record a wait for ``message``, and ``wait``."""
        if self.recording is not None:
            self.recording.events.append(Wait(self._place, message))
        wait()

    @property
    def place(self) -> StepPlace:
        return self._place

    def __torch_dispatch__(
        self, func: Any, types: object, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> object:
        kwargs = kwargs or {}
        inputs = [*tensors_of(args)]
        for tensor in inputs:
            self.live.exclude(tensor.untyped_storage())
        answer = _ANSWERS.get(func)
        if answer is not None:
            out = answer(func, args, kwargs)
        else:  # torch has no shapes of fused steps
            fused = _FUSED.match(func._schema.name)
            out = None if fused else self._shapes(func, args, kwargs)
        fresh, outputs = False, [*tensors_of((out,))]
        for tensor in outputs:
            if tensor.device.type == self._device:
                fresh |= self.live.add(tensor.untyped_storage())
        if fresh:
            self._peak()
        if self.recording is not None and func.namespace != "c10d":
            work = self._work()
            work.operations += 1
            formula = _FLOPS.get(func._overloadpacket)
            if formula is not None:
                work.flops += formula(*args, **kwargs, out_val=out)
            elif fresh or func._schema.is_mutable:
                work.nbytes += sum(tensor.nbytes for tensor in (*inputs, *outputs))
        return out

    def add_flops(self, flops: float) -> None:
        """Count matrix products of a kernel whose shapes alone are computed."""
        if self.recording is not None:
            self._work().flops += flops

    def _work(self) -> Work:
        assert self.recording is not None
        events = self.recording.events
        last = events[-1] if events else None
        if not isinstance(last, Work) or last.place is not self._place:
            last = Work(self._place)
            events.append(last)
        return last

    def _count_gathered(self) -> None:
        self._gathered = sum(
            flat.full.untyped_storage().nbytes() for flat in self.engine.flats if flat.sharded
        )
        self._peak()

    def _peak(self, more: int = 0) -> None:
        if self.live.now + more >= self.high:
            self.high, self.high_place = self.live.now + more, self._place
        if self.recording is None:
            return
        nbytes, phase = self.live.now + more + self._gathered, self._place.phase
        if nbytes > self.recording.peaks.get(phase, (-1, self._place))[0]:
            self.recording.peaks[phase] = nbytes, self._place


@contextmanager
def _fused_on_meta() -> Iterator[None]:
    """Context in which torch's optimizers run their fused steps on the meta device."""
    from torch.optim import optimizer

    supported = optimizer._get_fused_kernels_supported_devices  # type: ignore[attr-defined]
    optimizer._get_fused_kernels_supported_devices = lambda: [*supported(), "meta"]  # type: ignore[attr-defined]
    try:
        yield
    finally:
        optimizer._get_fused_kernels_supported_devices = supported  # type: ignore[attr-defined]


@contextmanager
def _as_if_read(engine: TrainingEngine) -> Iterator[None]:
    """Context for what the host reads on the meta device: numbers are finite, and all ranks have
    gradients of the parameters of which this one has.
    """
    agreement, world = engine.optimizer_step.agreement, engine.mesh.pp_stage_ranks
    isfinite = torch.isfinite
    read = agreement.ranks_with_gradients

    def counts(flats: Sequence[FlatBuffer], total: torch.Tensor) -> list[list[int]]:
        if not total.is_meta:
            return read(flats, total)
        return [
            [world * (flat.gradient.used >> index & 1) for index in range(len(flat.members))]
            for flat in flats
        ]

    def finite(values: torch.Tensor) -> torch.Tensor:
        return torch.ones(values.shape, dtype=torch.bool) if values.is_meta else isfinite(values)

    agreement.ranks_with_gradients = counts  # type: ignore[method-assign]
    torch.isfinite = finite  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.isfinite = isfinite
        del agreement.ranks_with_gradients


class _Messages(IssuedStats[Message]):
    """Passes the messages of one dimension on to a recorder. A note is the message itself."""

    def __init__(self, recorder: Recorder, dim: MeshDim):
        super().__init__()
        self._recorder = recorder
        self._group = Group(dim.gathers.name.partition(" of ")[2], tuple(dim.ranks))

    def record(self, operation: str, key: str, size: int) -> None:
        if operation in MESSAGES:
            return  # the schedule of the pipeline launches it later
        anew = self._recorder.newly_gathered()
        self.last = Message(self._recorder.place, operation, key, self._group, size, anew)
        self._recorder.launched(self.last)


def record(
    recorder: Recorder, loss_of: Callable[[], torch.Tensor], micro_batches: int
) -> Recording:
    """Return the recording of an optimizer step of ``recorder``'s engine, of ``micro_batches``
    backwards of ``loss_of()``. The engine itself accumulates at most :data:`RECORDED`.
    """
    engine = recorder.engine

    def step() -> None:
        for number in range(min(micro_batches, RECORDED)):
            recorder.enter(FORWARD, number)
            loss = loss_of()
            recorder.enter(BACKWARD, number)
            engine.backward(loss)
            recorder.enter(STEP, number)
            engine.step()

    return record_steps(recorder, step, micro_batches, max(0, micro_batches - RECORDED))


def record_steps(
    recorder: Recorder, step: Callable[[], object], micro_batches: int, repeats: int = 0
) -> Recording:
    """Return the recording of a call of ``step`` after two others; other arguments as for
    :class:`Recording`.
    """
    with recorder.watching():
        step()
        step()
        with recorder.recorded(micro_batches, repeats) as recording:
            step()
    return recording
