"""``deepspeed.runtime.pipe``: the engine of a pipeline under DeepSpeed's name, and schedules, the
instructions of each stage, step by step, for scripts that read or show them.

The engine runs the schedules of torch.distributed.pipelining. With ``S`` stages, ``M``
micro-batches and steps of equal duration, stage ``s`` computes the forward of micro-batch ``m`` in
step ``2 m + s`` and its backward in ``2 (m + S) - 1 - s`` (1F1B: PipeDream-Flush, arXiv
2006.09503). Without backwards it computes ``m`` in step ``m + s``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

from hf_zero.config.value_types import argument, integer
from hf_zero.deepspeed.engine import DeepSpeedEngine
from hf_zero.distributed.parallel_dims import check_size
from hf_zero.parallel.pipeline.engine import pipelined

PipelineEngine = pipelined(DeepSpeedEngine)


class PipeInstruction:
    """An instruction to a stage; keyword arguments are attributes."""

    name = "PipeInstruction"

    def __init_subclass__(cls, name: str = "") -> None:
        cls.name = name or cls.__name__

    def __init__(self, **kwargs: object) -> None:
        self.kwargs = kwargs
        self.__dict__.update(kwargs)

    def __repr__(self) -> str:
        arguments = ", ".join(f"{key}={value!r}" for key, value in self.kwargs.items())
        return f"{self.name}({arguments})"


class WeightUpdate(PipeInstruction, name="OptimizerStep"):
    """Update the weights."""


class ReduceGrads(PipeInstruction):
    """Reduce the gradients of a stage over its data-parallel ranks."""


class ReduceTiedGrads(PipeInstruction):
    """Reduce the gradients of parameters that several stages share."""


class BufferOpInstruction(PipeInstruction):
    """An instruction on the micro-batch in a buffer of the stage."""

    def __init__(self, buffer_id: int, **kwargs: object) -> None:
        super().__init__(buffer_id=buffer_id, **kwargs)


class LoadMicroBatch(BufferOpInstruction):
    """Read a micro-batch: inputs on the first stage, labels on the last."""


class ForwardPass(BufferOpInstruction):
    """Compute outputs."""


class BackwardPass(BufferOpInstruction):
    """Compute gradients."""


class SendActivation(BufferOpInstruction):
    """Send outputs to the next stage."""


class RecvActivation(BufferOpInstruction):
    """Receive inputs from the previous stage."""


class SendGrad(BufferOpInstruction):
    """Send gradients of the inputs to the previous stage."""


class RecvGrad(BufferOpInstruction):
    """Receive gradients of the outputs from the next stage."""


class PipeSchedule(ABC):
    """The schedule of stage ``stage_id`` of ``stages`` for ``micro_batches``: an iterable of steps,
    each a list of instructions in their order. Raises ConfigError for numbers below 1, and for
    another stage.
    """

    def __init__(self, micro_batches: int, stages: int, stage_id: int) -> None:
        check_size(micro_batches, "micro_batches", "micro-batches")
        check_size(stages, "stages", "stages")
        argument(type(self).__name__, "stage_id", integer(0, stages - 1), stage_id)
        self.micro_batches = micro_batches
        self.stages = stages
        self.stage_id = stage_id
        self.prev_stage = stage_id - 1
        self.next_stage = stage_id + 1

    @abstractmethod
    def steps(self) -> Iterator[list[PipeInstruction]]:
        """Yield the instructions of each step."""

    def num_pipe_buffers(self) -> int:
        """Return the number of micro-batches held at once; buffers are reused in turn."""
        return self.micro_batches

    @property
    def stage(self) -> int:
        return self.stage_id

    @property
    def num_stages(self) -> int:
        return self.stages

    @property
    def num_micro_batches(self) -> int:
        return self.micro_batches

    @property
    def is_first_stage(self) -> bool:
        return self.stage_id == 0

    @property
    def is_last_stage(self) -> bool:
        return self.next_stage == self.stages

    def __iter__(self) -> Iterator[list[PipeInstruction]]:
        return self.steps()

    def _buffer(self, micro_batch: int) -> int:
        return micro_batch % self.num_pipe_buffers()

    def _there(self, micro_batch: int) -> bool:
        return 0 <= micro_batch < self.micro_batches

    def _forward(self, micro_batch: int) -> list[PipeInstruction]:
        """Return the instructions of an existing micro-batch's forward."""
        at = self._buffer(micro_batch)
        received: list[PipeInstruction] = [] if self.is_first_stage else [RecvActivation(at)]
        if self.is_first_stage or self.is_last_stage:
            received.append(LoadMicroBatch(at))
        return [*received, ForwardPass(at)]


class InferenceSchedule(PipeSchedule):
    """Forwards only."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        for step in range(self.micro_batches + self.stages - 1):
            micro_batch = step - self.stage_id
            instructions: list[PipeInstruction] = []
            if self._there(micro_batch - 1) and not self.is_last_stage:
                instructions.append(SendActivation(self._buffer(micro_batch - 1)))
            yield instructions + (self._forward(micro_batch) if self._there(micro_batch) else [])

    def num_pipe_buffers(self) -> int:
        """Return two: one is computed while another is sent."""
        return 2


class TrainSchedule(PipeSchedule):
    """Alternating forwards and backwards, with the update in the last step."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        count = 2 * (self.micro_batches + self.stages - 1)
        before, was_forward = -1, False
        for step in range(count):
            forward = (step - self.stage_id) % 2 == 0
            micro_batch = (step - self.stage_id) // 2
            if not forward:
                micro_batch = (step + 1 + self.stage_id) // 2 - self.stages
            instructions = self._sent(before, was_forward) if self._there(before) else []
            if self._there(micro_batch):
                instructions += (
                    self._forward(micro_batch) if forward else self._backward(micro_batch)
                )
            if step == count - 1:
                instructions += [ReduceTiedGrads(), ReduceGrads(), WeightUpdate()]
            yield instructions
            before, was_forward = micro_batch, forward

    def num_pipe_buffers(self) -> int:
        """Return the number of micro-batches that await their backward, at least two."""
        return max(2, min(self.stages - self.stage_id, self.micro_batches))

    def _sent(self, micro_batch: int, forward: bool) -> list[PipeInstruction]:
        """Return the sends of a micro-batch after its forward, or its backward."""
        at = self._buffer(micro_batch)
        if forward:
            return [] if self.is_last_stage else [SendActivation(at)]
        return [] if self.is_first_stage else [SendGrad(at)]

    def _backward(self, micro_batch: int) -> list[PipeInstruction]:
        at = self._buffer(micro_batch)
        received: list[PipeInstruction] = [] if self.is_last_stage else [RecvGrad(at)]
        return [*received, BackwardPass(at)]
