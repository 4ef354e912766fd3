"""A step of one stage of a pipeline, recorded.

[Note: repeated micro-batches]
The schedule of torch.distributed.pipelining runs over all micro-batches of the step, and calls the
stage: to compute, to send and to receive. In a simulation the calls for the first micro-batches,
:data:`COMPUTED` of them, run on the meta device. What the last of these does (operations, messages,
bytes) stands for all that follow: its events are recorded again, and the bytes change as they did
from its beginning to the next call, since a schedule keeps memory of a message until it has one of
the next. Messages and waits are those of the schedule, for every micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from hf_zero.distributed.collectives import MeshDim
from hf_zero.distributed.stage_messages import FORWARD_TAG, receives
from hf_zero.measures.collectives import MESSAGES
from hf_zero.parallel.pipeline.rank_stages import launching_by
from hf_zero.planning.simulation.recording import (
    BACKWARD,
    FORWARD,
    PHASES,
    STEP,
    Arrival,
    Event,
    Group,
    Message,
    Recorder,
    Recording,
    StepPlace,
    record_steps,
)

if TYPE_CHECKING:
    from torch.distributed import P2POp

    from hf_zero.distributed.process_group import Waitable
    from hf_zero.parallel.pipeline.engine import PipelineTraining

# micro-batches: the first, the first that adds gradients to others, and one that the rest is like
COMPUTED = 3
CALLS = (
    "get_fwd_recv_ops", "forward_one_chunk", "get_fwd_send_ops",
    "get_bwd_recv_ops", "backward_one_chunk", "get_bwd_send_ops",
)  # fmt: skip
LOSS = "loss"
Header = Sequence[int]


@dataclass(frozen=True)
class _Transfer:
    """A message between two stages, before the schedule launches it. ``peer``: the other rank."""

    arrives: bool
    peer: int
    operation: str
    unit: str
    group: Group
    nbytes: int

    def launched(self, micro_batch: int) -> Message:
        kind = Arrival if self.arrives else Message
        at = StepPlace(PHASES[self.operation == MESSAGES[1]], "", micro_batch)
        return kind(at, self.operation, self.unit, self.group, self.nbytes)


@dataclass
class _StageCall:
    """A call of the stage: its events, the messages that it returns, the bytes that it keeps until
    the next call, the most meanwhile, both in addition to those at its ``begin``, and the block of
    the most.
    """

    phase: str
    begin: int
    events: list[Event] = field(default_factory=list)
    messages: list[_Transfer] = field(default_factory=list)
    kept: int = 0
    most: int = 0
    block: str = ""


class _Works:
    """A batch of messages, as a schedule waits for it."""

    def __init__(self, recorder: Recorder, messages: Sequence[Message], works: Sequence[Waitable]):
        self._recorder, self._messages, self._works = recorder, messages, works

    def wait(self) -> None:
        for message in self._messages:
            self._recorder.waited(message, _nothing)
        for work in self._works:
            work.wait()


def _nothing() -> None:
    """Wait for nobody."""


class StageRecorder(Recorder):
    """Recorder of the engine of a pipeline with one stage on each rank.

    ``simulated``: the other stages do not exist; else this is a rank among real ones, whose
    micro-batches are all computed. ``announced``: in a simulation, the headers that the recorder of
    the stage before has in :attr:`announcements`.
    """

    engine: PipelineTraining

    def __init__(
        self,
        engine: PipelineTraining,
        dims: Sequence[MeshDim],
        simulated: bool = True,
        announced: Sequence[Header] = (),
    ):
        super().__init__(engine, dims)
        self.announcements: list[Header] = []
        self._announced = iter(announced)
        self._simulated = simulated
        self._calls: dict[str, _StageCall] = {}  # the last that was computed, by name
        self._computed: _StageCall | None = None  # the call since whose beginning bytes are counted
        self._repeated: int | None = None  # the bytes after a repeated call
        self._loss_without_value = torch.zeros((), device=engine.device)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Context in which steps are followed."""
        run = self.engine.pipeline_run
        with super().watching(), ExitStack() as stack:
            [stage] = run.stages
            for name in CALLS:
                _replace(stack, stage, name, partial(self._call, name, getattr(stage, name)))
            _replace(stack, run, "run", partial(self._run, run.run))
            _replace(stack, run, "_loss_of", partial(self._loss, run._loss_of))
            _replace(stack, run, "_schedules", {})  # those that were made call what is replaced
            stack.enter_context(launching_by(self._batch))
            if self._simulated:
                _replace(stack, run.messages, "announce", self._announce)
                _replace(stack, run.messages, "announced_by", self._next_announced)
            yield

    def _announce(self, peer: int, numbers: Header) -> None:
        self.announcements.append(numbers)

    def _next_announced(self, peer: int, pending: object) -> Header:
        return next(self._announced)

    def _run(self, run: Callable[..., object], *args: object) -> object:
        self.enter(FORWARD, 0)
        result = run(*args)
        self._end_call()
        self.live.recount()  # repeated calls have made no storages
        self.enter(STEP, 0)
        return result

    def _batch(
        self,
        launch: Callable[..., Sequence[Waitable]],
        ops: Sequence[_Transfer | P2POp],
        desc: str | None = None,
    ) -> list[Waitable]:
        if not ops:
            return []
        messages = [self._transfer(op).launched(self._place.micro_batch) for op in ops]
        for message in messages:
            self.launched(message)
        return [_Works(self, messages, () if self._simulated else launch(ops, desc))]

    def _transfer(self, op: _Transfer | P2POp) -> _Transfer:
        if isinstance(op, _Transfer):
            return op
        column, arrives = self.engine.mesh.sums.stages, receives(op)
        pair = (op.peer, column.ranks[column.rank])
        pair = pair if arrives else pair[::-1]
        first, second = sorted(map(column.ranks.index, pair))
        return _Transfer(
            arrives,
            op.peer,
            MESSAGES[op.tag != FORWARD_TAG],
            f"stages {first} and {second}",
            Group(column.gathers.name.partition(" of ")[2], pair),
            op.tensor.nbytes,
        )

    def _loss(self, call: Callable[..., object], output: object, number: torch.Tensor) -> object:
        return self._call(LOSS, lambda _: call(output, number), int(number))

    def _call(
        self, name: str, call: Callable[..., Any], micro_batch: int, *args: object, **kwargs: object
    ) -> object:
        self._end_call()
        self.enter(BACKWARD if "bwd" in name or "backward" in name else FORWARD, micro_batch)
        if self._simulated and micro_batch >= COMPUTED:
            return self._repeat(name, self._calls[name])
        self._computed = this = self._calls[name] = _StageCall(self._place.phase, self.live.now)
        self.high = self.live.now
        start = 0 if self.recording is None else len(self.recording.events)
        result = call(micro_batch, *args, **kwargs)
        if self.recording is not None:
            this.events = self.recording.events[start:]
        if name.endswith("_ops"):
            this.messages = [*map(self._transfer, result)]
        return result

    def _repeat(self, name: str, this: _StageCall) -> object:
        """Record ``this`` call once more, in place of one that would compute the same."""
        self._place = StepPlace(this.phase, this.block, self._place.micro_batch)
        self._peak(this.most)
        self._repeated = self.live.now + this.kept
        if self.recording is not None:
            self.recording.events += this.events
        # a copy: a schedule may empty the list
        return list(this.messages) if name.endswith("_ops") else self._loss_without_value

    def _end_call(self) -> None:
        """Count the bytes of the last call."""
        if self._computed is not None:
            this, self._computed = self._computed, None
            this.kept, this.most = self.live.now - this.begin, self.high - this.begin
            this.block = self.high_place.block
        elif self._repeated is not None:
            # what a computed micro-batch has freed meanwhile is among the repeated bytes
            self.live.now, self._repeated = self._repeated, None


def _replace(stack: ExitStack, owner: object, name: str, value: object) -> None:
    """Set an attribute of ``owner`` until ``stack`` ends."""
    if name in vars(owner):
        stack.callback(setattr, owner, name, vars(owner)[name])
    else:
        stack.callback(delattr, owner, name)
    setattr(owner, name, value)


def record_stage(recorder: StageRecorder, window: Sequence[object]) -> Recording:
    """Return the recording of an optimizer step of ``recorder``'s engine over the micro-batches of
    ``window``.
    """
    return record_steps(recorder, lambda: recorder.engine.train_batch(iter(window)), len(window))
