"""A training step as graphs of the device: forward, backward and update, each captured once and
then launched as a whole (``compile.capture``).

[Note: captured steps]
The first :data:`WARM_UP` steps run as they are: kernels are compiled, orders recorded, buffers
made. The next forward whose arguments have the form of all of these is captured on arguments of its
own, into which later batches are copied. Its outputs are outputs of one autograd node
(:class:`_Replayed`), which takes the gradients that reach them; the backward from exactly these
gradients, with the reductions that its hooks start, is captured in ``PassRunner.run_backward``. A
forward with another form runs as it is.

Graphs repeat what was launched, not what the host did: hooks and counters of a backward that is
launched again are repeated from a record (:class:`_BackwardRecord`). A backward depends on what the
window holds already (:meth:`CapturedStep._place_in_window`): one that overwrites and one that adds
have graphs of their own. The first at a place, and an update with other tensors than the last, run
as they are: a graph would repeat an upcast of the gradients or a copy from the host. What else
changes from step to step is in memory of the device that the host writes before the launch: the
batch, the gradients of the outputs, and the settings of the optimizer's groups.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Protocol

import torch

from hf_zero.config.activations import CAPTURE as KEY
from hf_zero.config.feature_rows import provided
from hf_zero.device import graphs, kinds
from hf_zero.device.graphs import Graph, Graphs
from hf_zero.errors import PartitionError
from hf_zero.logging import log_rank0
from hf_zero.zero.layout.gradients import GradState
from hf_zero.zero.layout.parameter_views import any_raw_grad
from hf_zero.zero.layout.tree import form_of, map_tensors, tensors_in
from hf_zero.zero.reduce.reducer import Reducer
from hf_zero.zero.step.optimizer_step import OptimizerStep
from hf_zero.zero.step.window import AccumulationWindow

_requires_grad, _training = attrgetter("requires_grad"), attrgetter("training")
_version = attrgetter("_version")
WARM_UP = 3  # steps before the first capture


class CapturedBackward(Protocol):
    """``PassRunner`` (``pass_runner.py``), as captured steps call it."""

    reducer: Reducer
    runs_captured: bool

    @property
    def under_way(self) -> bool: ...

    def begin_replay(self) -> None: ...

    def end_replay(self, states: Sequence[Callable[[], None]]) -> None: ...


@dataclass(eq=False)
class _BackwardRecord:
    """A captured backward: its graph, the gradients that it begins with, by the places of their
    outputs, and the states in which it leaves the gradients of the flat buffers.
    """

    graph: Graph
    kind: Hashable
    grads: dict[int, torch.Tensor]
    states: Sequence[Callable[[], None]]


@dataclass(eq=False)
class _CapturedPass:
    """A captured forward, on ``inputs``, with its captured backward once there is one."""

    graph: Graph
    inputs: Sequence[torch.Tensor]
    output: object
    # tensors of ``output`` that require grad; on a graph of autograd until the backward is captured
    outputs: Sequence[torch.Tensor]
    backward: _BackwardRecord | None = None
    serial: int = 0  # of its last launch
    versions: tuple[int, ...] = ()  # torch's counts of writes to its outputs, after it
    reached: dict[int, torch.Tensor] = field(default_factory=dict)  # by a backward, with gradients

    @property
    def graphs(self) -> list[Graph]:
        """The graphs of the forward and of its backward."""
        return [self.graph] if self.backward is None else [self.graph, self.backward.graph]


class _Replayed(torch.autograd.Function):
    """The outputs of a captured forward; takes their gradients for the captured backward."""

    @staticmethod
    def forward(ctx: Any, step: CapturedStep, captured: _CapturedPass, anchor: torch.Tensor) -> Any:
        ctx.step, ctx.captured, ctx.serial = step, captured, captured.serial
        ctx.set_materialize_grads(False)
        return tuple(map(_handed_out, captured.outputs))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        ctx.step.reach(ctx.captured, ctx.serial, grads)
        return None, None, None


def _handed_out(tensor: torch.Tensor) -> torch.Tensor:
    """Return what a caller gets of ``tensor``, an output: numbers are copied, since scripts collect
    losses; larger ones are the memory that the next forward overwrites.
    """
    if hasattr(tensor, "renewed"):  # deferred logits
        renewed: torch.Tensor = tensor.renewed()
        return renewed
    return tensor.detach().clone() if tensor.numel() == 1 else tensor.detach()


class CapturedStep:
    """The captured passes and the captured update of one engine."""

    def __init__(
        self, backward: CapturedBackward, optimizer_step: OptimizerStep, window: AccumulationWindow
    ):
        self._optimizer_step, self._model = optimizer_step, optimizer_step.model
        self._device = self._model.mesh.device
        self._backward, self._window = backward, window
        self._members = [p for flat in self._model.trainable for p in flat.members]
        self._modules = [*self._model.module.modules()]
        self._graphs = Graphs(self._device)
        self._steps = 0  # updates that ran as they are
        self._forms: Counter[Hashable] = Counter()  # forwards by the form of their arguments
        self._form: Hashable = None  # the captured one
        # places in the window, and modes of the modules, at which a pass has run
        self._known: set[Hashable] = set()
        self._passes: dict[Hashable, _CapturedPass] = {}  # by these
        self._prepared: Hashable = None  # what the last update depended on, if it can be captured
        # key, graph, norm
        self._captured_update: tuple[Hashable, Graph, torch.Tensor] | None = None
        self._reached: _CapturedPass | None = None  # by the backward under way
        # the last forward, if it was launched and awaits its backward
        self._open: _CapturedPass | None = None
        self._logged: set[str] = set()
        # read by the captured update: the square of a norm that was measured before, and a divisor
        self._measured = torch.zeros(2, dtype=torch.float64, device=self._device)
        # what makes outputs require grad
        self._anchor = torch.zeros((), device=self._device, requires_grad=True)

    def forward(self, *args: object, **kwargs: object) -> object:
        """Return what the model returns, launched from a graph where there is one for it."""
        run = self._model.module
        if not torch.is_grad_enabled() or not run.training or self._backward.under_way:
            return run(*args, **kwargs)
        tensors = list(tensors_in((args, kwargs)))
        form = self._form_of(tensors, args, kwargs)
        place = self._place_in_window(), tuple(map(_training, self._modules))
        if form is None or not self._takes(form) or place not in self._known:
            self._known.add(place)
            with self._graphs.beside(), self._repeatable(args, kwargs):
                return run(*args, **kwargs)
        captured = self._passes.get(place)
        self._model.wait_for_updates()
        # one without a backward was dropped: its graph of autograd may be too old
        if captured is None or captured.backward is None:
            captured = self._passes[place] = self._capture_forward(args, kwargs)
        for own, given in zip(captured.inputs, tensors, strict=True):
            own.copy_(given, non_blocking=True)
        captured.graph.launch()
        captured.serial += 1
        captured.versions = tuple(map(_version, tensors_in(captured.output)))
        self._open = captured
        replayed: Sequence[torch.Tensor] = ()
        if captured.outputs:
            replayed = _Replayed.apply(self, captured, self._anchor)  # type: ignore[no-untyped-call]
        by_id = dict(zip(map(id, captured.outputs), replayed, strict=True))
        return map_tensors(
            captured.output, lambda t: by_id[id(t)] if id(t) in by_id else _handed_out(t)
        )

    def _repeatable(
        self, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> AbstractContextManager[None]:
        """Return the context of a forward with these arguments, captured or not."""
        names = inspect.signature(self._model.module.forward).parameters
        given = {**dict(zip(names, args)), **kwargs}
        present = [name for name, value in given.items() if value is not None]
        return graphs.repeatable(self._device, present)

    def _form_of(
        self, tensors: Sequence[torch.Tensor], args: object, kwargs: object
    ) -> Hashable | None:
        """Return what a graph depends on in the arguments, whose tensors are ``tensors``; None if
        it depends on more than can be compared.
        """
        if any(tensor.requires_grad or tensor.device != self._device for tensor in tensors):
            return None
        form = form_of((args, kwargs))
        if form is None:
            return None
        # a mask that is known to mask nothing takes another way
        pads = tuple(map(provided("known_padding"), tensors))
        return form, pads, kinds.autocast_dtype(self._device.type)

    def _takes(self, form: Hashable) -> bool:
        """Return whether forwards with arguments of ``form`` are captured."""
        if self._form is None:
            self._forms[form] += 1
            if self._steps < WARM_UP or self._forms[form] <= WARM_UP:
                return False
            self._form = form
        if form != self._form:
            self._log_once(
                "form",
                f"{KEY}: a batch has other shapes, dtypes or arguments than the captured one and "
                "runs uncaptured; pad batches to one shape",
            )
        return form == self._form

    def _log_once(self, kind: str, text: str) -> None:
        if kind not in self._logged:
            self._logged.add(kind)
            log_rank0(text)

    def _place_in_window(self) -> Hashable:
        """Return what a backward depends on before it begins: what the flat buffers hold and where,
        whether it reduces, and which parameters a script has frozen.
        """
        gradients = [flat.gradient for flat in self._model.trainable]
        held = tuple((gradient.state, gradient.address) for gradient in gradients)
        with torch._C.DisableTorchFunctionSubclass():
            trains = tuple(map(_requires_grad, self._members))
        return self._window.next_backward, self._window.accumulation_steps, held, trains

    def _capture_forward(
        self, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> _CapturedPass:
        inputs: list[torch.Tensor] = []

        def own(tensor: torch.Tensor) -> torch.Tensor:
            made = torch.empty_like(tensor, memory_format=torch.contiguous_format)
            # .data has a version counter of its own: batches are written before the backward is
            # captured
            inputs.append(made.data)
            if (pads := provided("known_padding")(tensor)) is not None:
                provided("note_mask")(made, pads)
            return made

        args, kwargs = map_tensors((args, kwargs), own)
        with self._repeatable(args, kwargs):
            graph, output = self._capture("forward", lambda: self._model.module(*args, **kwargs))
        found = list(tensors_in(output))
        plain = [tensor for tensor in found if type(tensor) is torch.Tensor]
        if not any(tensor.requires_grad for tensor in plain) and any(
            tensor.requires_grad for tensor in found
        ):
            raise PartitionError(
                f"{KEY}: the model returns logits that are computed when they are read, and no "
                "loss; pass labels to it, or write kernels without loss"
            )
        outputs = [tensor for tensor in plain if tensor.requires_grad]
        return _CapturedPass(graph, inputs, output, outputs)

    def reach(
        self, captured: _CapturedPass, serial: int, grads: Sequence[torch.Tensor | None]
    ) -> None:
        """Take the gradients of outputs of ``captured`` in the backward of launch ``serial``."""
        # one at another place of the window may have the memory of this one's activations
        if captured is not self._open or captured.serial != serial:
            raise PartitionError(
                f"{KEY}: this backward goes through a forward whose activations a later forward "
                "or backward has overwritten; call backward after each forward, and once, or "
                "remove the key"
            )
        if captured.versions != tuple(map(_version, tensors_in(captured.output))):
            raise PartitionError(
                f"{KEY}: an output of the model, whose memory the captured backward reads, was "
                "written in place before it; write to a clone of the output, or remove the key"
            )
        if not self._backward.runs_captured:
            raise PartitionError(
                f"{KEY}: loss.backward() does not launch the captured backward; call "
                "engine.backward(loss)"
            )
        captured.reached = {at: grad for at, grad in enumerate(grads) if grad is not None}
        self._reached = captured

    @property
    def is_open(self) -> bool:
        """Return whether a captured forward awaits its backward."""
        return self._open is not None

    def end_backward(self, loss_factors: Hashable, others: bool) -> None:
        """Launch the captured backward if the one that has just ended has reached captured outputs.

        Args:
            loss_factors: of the loss and of its micro-batch.
            others: whether that one has also reached modules that ran uncaptured.
        """
        captured, self._reached = self._reached, None
        if captured is None:
            return
        self._open = None
        reached, captured.reached = captured.reached, {}
        if others or any_raw_grad(self._members):
            raise PartitionError(
                f"{KEY}: a backward reaches the captured forward and also parameters by another "
                "way (a penalty on the weights, a module called by itself); compute the whole loss "
                "in the model, or remove the key"
            )
        grads = tuple((at, grad.dtype) for at, grad in reached.items())
        kind = (loss_factors, self._place_in_window(), grads)
        record = captured.backward
        is_new = record is None
        if record is None:
            record = captured.backward = self._capture_backward(captured, kind, reached)
        elif record.kind != kind:
            raise PartitionError(
                f"{KEY}: this backward differs from the captured one in the outputs that have "
                "gradients or in the weight of its micro-batch; call engine.backward the same way "
                "for each micro-batch at this place of the window, or remove the key"
            )
        else:
            self._backward.begin_replay()
        for at, grad in reached.items():
            record.grads[at].copy_(grad)
        record.graph.launch()
        if not is_new:
            self._backward.end_replay(record.states)

    def _capture_backward(
        self, captured: _CapturedPass, kind: Hashable, reached: dict[int, torch.Tensor]
    ) -> _BackwardRecord:
        grads = {at: torch.empty_like(grad) for at, grad in reached.items()}
        outputs = [captured.outputs[at] for at in grads]
        graph, _ = self._capture(
            "backward", lambda: torch.autograd.backward(outputs, list(grads.values()))
        )
        # the graph of autograd ends here
        detached = {id(tensor): tensor.detach() for tensor in captured.outputs}
        captured.output = map_tensors(captured.output, lambda t: detached.get(id(t), t))
        captured.outputs = [detached[id(tensor)] for tensor in captured.outputs]
        states = [flat.gradient.record_state() for flat in self._model.trainable]
        return _BackwardRecord(graph, kind, grads, states)

    def update(self, steps_before: int, may_overflow: bool) -> bool:
        """Run an optimizer step as :meth:`OptimizerStep.update` does, from a graph if possible."""
        step, key = self._optimizer_step, None
        tensors: Sequence[torch.Tensor] = ()
        if not may_overflow and self._steps >= WARM_UP - 1 and self._repeats(step):
            with step.scaled_rates(), step.changing_state():
                tensors = step.bound.prepare_launch(step.shards_to_write())
            places = tuple(tensor.data_ptr() for tensor in tensors)
            states = tuple(flat.gradient.state for flat in self._model.trainable)
            clips = step.gradient.max_norm, step.gradient.held.is_clipped
            key = places, clips, states, self._take_measured(step)
        # one that is new runs as it is first: it compiles kernels and copies tables from the host
        is_new, self._prepared = key is None or key != self._prepared, key
        if is_new or self._steps < WARM_UP:
            self._steps += 1
            return step.update(steps_before, may_overflow)
        if self._captured_update is None or self._captured_update[0] != key:
            with step.capturing():
                graph, _ = self._capture("update", lambda: step.update(steps_before, False))
            assert step.gradient.last is not None
            graph.held.extend(tensors)
            self._captured_update = key, graph, step.gradient.last
            graph.launch()  # the hooks of the optimizer have run in the capture
        else:
            for flat in self._model.trainable:
                flat.user_writes.mark_updated()
            step.bound.launch(self._captured_update[1].launch)
        norm = self._captured_update[2]
        own = norm.clone()  # of this step, which the next launch does not change
        step.gradient.record(own)
        step.norm_check.check(own, steps_before + 1)
        return False

    def _take_measured(self, step: OptimizerStep) -> tuple[bool, bool]:
        """Copy the norm of a gradient that was measured before its step, and the divisor by which a
        script has clipped it, to where a graph reads them. Return whether there are such.
        """
        measured, divisor = step.gradient.held.squares, step.gradient.held.divisor
        if measured is not None:
            self._measured[0].copy_(measured)
            step.gradient.held.measure(self._measured[0])
        if divisor is not None:
            self._measured[1].copy_(divisor)
            step.gradient.held.clip(self._measured[1])
        return measured is not None, divisor is not None

    def _repeats(self, step: OptimizerStep) -> bool:
        """Return whether this update can be captured or replayed: each parameter has a reduced
        gradient, and hf-zero's kernel updates all segments. Logs the reason if not.
        """
        complete = all(
            flat.gradient.state is GradState.REDUCED
            and flat.gradient.used == flat.gradient.all_used
            and not flat.gradient.idle
            and not flat.gradient.unused
            for flat in self._model.trainable
        )
        launches = step.bound.repeats_launch()
        if not complete or not launches:
            why = "the optimizer is not updated by hf-zero's kernel as its group is set now"
            if launches:
                why = "a parameter got no gradient"
            self._log_once("update", f"{KEY}: an update runs uncaptured: {why}")
        return complete and launches

    def close(self) -> None:
        """Free all graphs: the engine is destroyed."""
        found = [graph for each in self._passes.values() for graph in each.graphs]
        if self._captured_update is not None:
            found.append(self._captured_update[1])
        for graph in found:  # losses that a script has kept refer to their passes
            graph.free()
        self._passes.clear()
        self._captured_update, self._open, self._steps = None, None, 0
        self._form = None

    def _capture(self, what: str, run: Callable[[], object]) -> tuple[Graph, object]:
        """Return the graph of ``run``, called ``what`` in messages, and its result."""
        self._model.wait_until_writable()  # no other thread may use the device under a capture
        self._forget()
        try:
            with self._graphs.capture() as graph:
                result = run()
        except RuntimeError as error:
            if isinstance(error, PartitionError):
                raise
            # the end of a capture reports that something in it has failed, not what
            cause: BaseException = error
            while cause.__context__ is not None:
                cause = cause.__context__
            raise PartitionError(
                f"{KEY}: the {what} cannot be captured ({type(cause).__name__}: {cause}); let the "
                "model read nothing from the device (.item(), printed values, shapes that depend "
                "on values), or remove the key"
            ) from cause
        finally:
            self._forget()
        return graph, result

    def _forget(self) -> None:
        """Drop caches that must not cross the border of a capture: message buffers, recorded
        streams, autocast's cached casts.
        """
        self._model.forget_streams()
        self._backward.reducer.forget_buffers()
        torch.clear_autocast_cache()
