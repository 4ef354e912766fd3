"""The stages of a pipeline on one rank, run by the schedules of torch.distributed.pipelining.

[Note: a stage of our own]
torch's schedules decide when each stage runs which micro-batch, and launch and wait for the
messages; :class:`Stage` implements what they call on a stage. torch's own PipelineStage fixes
shapes with the first micro-batch, for which it runs a forward and a backward of the model, accepts
tensors only, and runs the backward without the loss scale and the hooks of an engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hf_zero.distributed.collective_log import DEVICE_ERRORS
from hf_zero.distributed.stage_messages import PASSED_CLASSES, Activations, StageMessages
from hf_zero.errors import ConfigError
from hf_zero.ops.operators import GradientContext

if TYPE_CHECKING:
    from torch.distributed import P2POp

Forward = Callable[[int, int, object], object]
Backward = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], None]


class _Received(torch.autograd.Function):
    """Identity whose output is neither a leaf nor a view, so that the first layer of a stage may
    change its input in place.
    """

    @staticmethod
    def forward(ctx: GradientContext, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(
        ctx: GradientContext, *grads: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        return grads


class Stage:
    """Stage ``index`` of ``count``.

    ``forward(index, micro_batch, inputs)`` returns the output: a tensor, or a tuple or list of
    tensors and None; ``inputs`` is the output of the previous stage, None on the first.
    ``backward(outputs, gradients)`` runs a backward; on the last stage ``outputs`` is the loss
    only, and ``gradients`` is empty.
    """

    def __init__(
        self, index: int, count: int, messages: StageMessages, forward: Forward, backward: Backward
    ):
        self.stage_index = index
        self.num_stages = count
        self.group_rank, self.group_size = messages.rank, messages.size
        self.device = messages.device
        self.submod = nn.Module()  # the schedules check whether it is an FSDP module
        self.has_backward = False
        # read by schedules for messages to stages other than neighbors, which do not occur
        self.args_recv_info: dict[int, tuple[object, ...]] = {0: ()}
        self.act_send_info: dict[int, list[object]] = {}
        # read by the schedules of torch 2.15 when they connect ranks, which StageMessages does
        self.p2p_per_edge, self._parent_group = False, None
        self.stage_index_to_group_rank: dict[int, int] = {}  # schedules of several stages set it
        self._messages = messages
        self._forward = forward
        self._backward = backward
        self._inputs: dict[int, tuple[Activations, tuple[bool, ...], type[Any]]] = {}
        self._outputs: dict[int, tuple[Activations, type[Any]]] = {}
        self._gradients: dict[int, list[torch.Tensor]] = {}  # gradients of outputs
        self._sent_back: dict[int, list[torch.Tensor]] = {}  # gradients of inputs
        self._losses: dict[int, torch.Tensor] = {}

    @property
    def is_first(self) -> bool:
        return self.stage_index == 0

    @property
    def is_last(self) -> bool:
        return self.stage_index == self.num_stages - 1

    @property
    def _before(self) -> int:
        return (self.stage_index - 1) % self.group_size

    @property
    def _after(self) -> int:
        return (self.stage_index + 1) % self.group_size

    def clear_runtime_states(self) -> None:
        states = (self._inputs, self._outputs, self._gradients, self._sent_back, self._losses)
        for by_micro_batch in states:
            by_micro_batch.clear()

    def _prepare_forward_infra(self, *args: object, **kwargs: object) -> None:
        """Do nothing: shapes are unknown until the messages arrive."""

    def _prepare_backward_infra(self, *args: object, **kwargs: object) -> None:
        """Do nothing: shapes are unknown until the messages arrive."""

    def _get_init_p2p_neighbors_ops(self) -> list[P2POp]:
        return []

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Do nothing: the engine reduces and scales gradients."""

    def release_fwd_send_outputs(self, micro_batch: int) -> None:
        """Do nothing: the backward of the micro-batch releases its outputs."""

    def _clear_unlaunched_fwd_recv(self, micro_batch: int) -> None:
        """Do nothing: the end of a run clears all that it received."""

    _clear_unlaunched_bwd_recv = _clear_unlaunched_fwd_recv

    def get_fwd_recv_ops(self, micro_batch: int) -> list[P2POp]:
        if self.is_first:
            return []
        memory, grads, kind, operations = self._messages.receive(
            self._before, self.stage_index - 1, micro_batch
        )
        self._inputs[micro_batch] = memory, grads, kind
        return operations

    def get_fwd_send_ops(self, micro_batch: int) -> list[P2POp]:
        if self.is_last:
            return []
        outputs, kind = self._outputs[micro_batch]
        operations = self._messages.send(self._after, self.stage_index, micro_batch, outputs, kind)
        if not self.has_backward:
            del self._outputs[micro_batch]
        return operations

    def get_bwd_recv_ops(self, micro_batch: int) -> list[P2POp]:
        if self.is_last or not self.has_backward:
            return []
        outputs = [
            output
            for output in self._outputs[micro_batch][0]
            if output is not None and output.requires_grad
        ]
        memory, operations = self._messages.receive_gradients(
            self._after, self.stage_index, micro_batch, outputs
        )
        self._gradients[micro_batch] = memory
        return operations

    def get_bwd_send_ops(self, micro_batch: int) -> list[P2POp]:
        if self.is_first or not self.has_backward:
            return []
        gradients = self._sent_back.pop(micro_batch)
        return self._messages.send_gradients(
            self._before, self.stage_index - 1, micro_batch, gradients
        )

    def set_local_fwd_input(self, outputs: object, micro_batch: int) -> None:
        activations, kind = _as_tuple(outputs)
        grads = tuple(
            activation is not None and activation.requires_grad for activation in activations
        )
        # copied, as by a message: the next stage may change it in place
        inputs = tuple(None if t is None else t.detach().clone() for t in activations)
        self._inputs[micro_batch] = inputs, grads, kind

    def get_local_bwd_output(self, micro_batch: int) -> tuple[torch.Tensor, ...]:
        return tuple(self._sent_back.pop(micro_batch, ()))

    def set_local_bwd_input(self, gradients: Sequence[torch.Tensor], micro_batch: int) -> None:
        self._gradients[micro_batch] = list(gradients)

    def forward_one_chunk(
        self,
        micro_batch: int,
        args: object = (),
        kwargs: object = None,
        save_forward_output: bool = True,
    ) -> object:
        inputs = None
        if not self.is_first:
            activations, grads, kind = self._inputs[micro_batch]
            if self.has_backward:
                leaves = [t for t, differentiable in zip(activations, grads) if differentiable]
                for leaf in leaves:
                    assert leaf is not None
                    leaf.requires_grad_()
                received = iter(_Received.apply(*leaves) if leaves else ())
                activations = tuple(
                    next(received) if used else tensor for tensor, used in zip(activations, grads)
                )
            else:
                del self._inputs[micro_batch]
            inputs = activations[0] if kind is torch.Tensor else kind(activations)
        output = self._forward(self.stage_index, micro_batch, inputs)
        if not self.is_last:
            self._outputs[micro_batch] = _as_tuple(output)
        return output

    def keep_loss(self, micro_batch: int, loss: torch.Tensor) -> torch.Tensor:
        """Keep ``loss`` for its backward, and return it without its graph: a schedule keeps all
        losses until the end of the step, and a graph keeps the inputs of the stage.
        """
        if self.has_backward:
            self._losses[micro_batch] = loss
        return loss.detach()

    def backward_one_chunk(
        self,
        micro_batch: int,
        loss: torch.Tensor | None = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        if not self.has_backward:
            return
        if self.is_last:
            self._backward([self._losses.pop(micro_batch)], [])
        else:
            outputs = [
                t for t in self._outputs.pop(micro_batch)[0] if t is not None and t.requires_grad
            ]
            self._backward(outputs, self._gradients.pop(micro_batch))
        if not self.is_first:
            activations, grads, _ = self._inputs.pop(micro_batch)
            self._sent_back[micro_batch] = [
                torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
                for tensor, differentiable in zip(activations, grads)
                if tensor is not None and differentiable
            ]


def _as_tuple(output: object) -> tuple[Activations, type[Any]]:
    """Return the output of a stage as a tuple, and its class, of :data:`PASSED_CLASSES`. Raises
    ConfigError for another class, which the next stage could not be given.
    """
    if isinstance(output, torch.Tensor):
        return (output,), torch.Tensor
    kind, values = type(output), output if isinstance(output, (tuple, list)) else ()
    if kind in PASSED_CLASSES and all(v is None or isinstance(v, torch.Tensor) for v in values):
        return tuple(values), kind
    raise ConfigError(
        f"a stage of the pipeline gives a {kind.__name__}; return a tensor from the layer before "
        "the next stage, or a plain tuple or list of tensors and None"
    )


def make_schedule(
    name: str,
    stages: Sequence[Stage],
    micro_batches: int,
    loss: Callable[[object, torch.Tensor], torch.Tensor],
) -> Any:
    """Return the schedule ``name`` of torch.distributed.pipelining for the ``stages`` of this rank.

    ``loss(output, number)`` computes the loss of a micro-batch. With fewer micro-batches than
    stages "1f1b" becomes GPipe, which then keeps no more activations. Raises ConfigError for a
    number of micro-batches that an interleaved schedule cannot divide.
    """
    from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

    rank_stages: list[Any] = list(stages)
    options: dict[str, Any] = {"loss_fn": loss, "scale_grads": False}
    if name == "interleaved_1f1b":
        ranks = stages[0].group_size
        rounds = max(1, micro_batches // ranks)
        if micro_batches % rounds:
            raise ConfigError(
                f"gradient_accumulation_steps is {micro_batches}, which the interleaved schedule "
                f"cannot divide among {ranks} ranks of a pipeline; make it a multiple of {ranks}"
            )
        schedule: Any = ScheduleInterleaved1F1B(rank_stages, micro_batches, **options)
    elif name == "gpipe" or micro_batches < stages[0].num_stages:
        schedule = ScheduleGPipe(rank_stages[0], micro_batches, **options)
    else:
        schedule = Schedule1F1B(rank_stages[0], micro_batches, **options)
    schedule._p2p_initialized = True  # torch 2.15 would launch collectives and messages of its own
    return schedule


@contextmanager
def launching_by(launch: Callable[..., list[Any]]) -> Iterator[None]:
    """Context in which schedules launch a batch of messages by ``launch(own, operations, desc)``,
    ``original`` being torch's function, and wait for what it returns.
    """
    from torch.distributed.pipelining import schedules

    original = schedules._batch_p2p
    schedules._batch_p2p = partial(launch, original)
    try:
        yield
    finally:
        schedules._batch_p2p = original


class PipelineRun:
    """Run the ``stages`` of this rank under the schedule ``name``."""

    def __init__(self, name: str, stages: Sequence[Stage], messages: StageMessages):
        self.name = name
        self.stages = list(stages)
        self.messages = messages
        self._loss: Callable[[object, int], torch.Tensor] | None = None
        self._schedules: dict[int, Any] = {}

    def run(
        self, micro_batches: int, loss: Callable[[object, int], torch.Tensor], training: bool
    ) -> list[torch.Tensor]:
        """Run ``micro_batches`` through all stages (collective over the pipeline); return their
        losses on the rank of the last stage, an empty list elsewhere.
        """
        if micro_batches not in self._schedules:
            self._schedules[micro_batches] = make_schedule(
                self.name, self.stages, micro_batches, self._loss_of
            )
        schedule, losses = self._schedules[micro_batches], list[torch.Tensor]()
        arguments = {"target": torch.arange(micro_batches)} if self.stages[-1].is_last else {}
        self._loss = loss
        run = schedule.step if training else schedule.eval
        try:
            with self.messages.running(training), launching_by(self.messages.launch):
                run(losses=losses, return_outputs=False, **arguments)
        except BaseException as error:
            del self._schedules[micro_batches]  # holds losses of the run that failed
            if not isinstance(error, RuntimeError) or not _is_of_a_message(error):
                raise
            raise self.messages.explain(error) from error
        finally:
            self._loss = None
            for stage in self.stages:
                stage.clear_runtime_states()
        self.messages.finish()
        return losses

    def _loss_of(self, output: object, number: torch.Tensor) -> torch.Tensor:
        assert self._loss is not None
        return self.stages[-1].keep_loss(int(number), self._loss(output, int(number)))


def _is_of_a_message(error: RuntimeError) -> bool:
    """Return whether ``error`` was raised in the launch of a message or a wait for one, judged by
    the function that raised it: schedules have checks of their own.
    """
    trace, where, function = error.__traceback__, "", ""
    while trace is not None:
        where = trace.tb_frame.f_globals.get("__name__", "")
        function, trace = trace.tb_frame.f_code.co_name, trace.tb_next
    if isinstance(error, DEVICE_ERRORS):
        return False
    if where == "torch.distributed.pipelining.schedules":
        return function in ("_batch_p2p", "_wait_batch_p2p")
    return where.startswith("torch.distributed.dist")
