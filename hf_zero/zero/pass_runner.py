"""The passes of an engine: from a loss to the gradients that a step uses."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack
from functools import partial
from operator import attrgetter
from typing import Any, Protocol

import torch

from hf_zero.config import ZeroConfig
from hf_zero.errors import PartitionError, UnreducedGradientsError, UnusedParameterError
from hf_zero.logging import listed
from hf_zero.zero.gather.model_patches import Attached, refuse_switched
from hf_zero.zero.layout.flat_buffer import FlatBuffer
from hf_zero.zero.layout.parameter_views import any_raw_grad
from hf_zero.zero.layout.precision import COMPUTE
from hf_zero.zero.passes import BackwardTracker, ModuleHooks
from hf_zero.zero.reduce.losses import AveragingFactors, Fp16LossScaler, LossScaling
from hf_zero.zero.reduce.reducer import BackwardSettings, Reducer
from hf_zero.zero.sharded_model import ShardedModel
from hf_zero.zero.step.optimizer_step import OptimizerStep
from hf_zero.zero.step.window import AccumulationWindow, BackwardPlace, Counters

NO_GRADIENT = (
    "step() has no gradient: there was no backward since the last step or zero_grad(), or its loss "
    "does not depend on a parameter that trains; call engine.backward(loss) first, and zero_grad() "
    "not between it and step()"
)
_ready = attrgetter("gradient.ready")


class PassRunner:
    """Runs the passes of ``model``: the hooks of forwards and backwards, which :meth:`install`
    registers, and the way from a loss to gradients in ``reducer``.
    """

    tracker: BackwardTracker
    module_hooks: ModuleHooks
    losses: LossScaling

    def __init__(
        self,
        model: ShardedModel,
        optimizer_step: OptimizerStep,
        config: ZeroConfig,
        window: AccumulationWindow,
        counters: Counters,
    ):
        wire = config.communication_data_type
        self.reducer = Reducer(
            model.units,
            model.mesh,
            model.policy,
            optimizer_step.agreement,
            optimizer_step.gradient_offload,
            model.schedule,
            averaging=AveragingFactors.over(
                model.mesh.pp_stage_ranks,
                config.precision,
                config.prescale_gradients,
                config.gradient_predivide_factor,
                wire,
                config.gradient_allreduce_op == "mean",
            ),
            wire_dtype=COMPUTE[wire] if wire else None,
            kernels=config.kernels,
            packed=model.packed_elements,
            keeps_buffers=config.zero.keep_step_buffers,
        )
        self._model = model
        self._optimizer_step = optimizer_step
        self._fp16 = config.precision == "fp16"
        self._window = window
        self._counters = counters
        self._removable = ExitStack()
        self._removed = False
        self.runs_captured = False  # a backward of the step runner is under way
        self.step_runner: StepRunner | None = None
        self._by_step = False  # step() takes in gradients that no hook has seen

    def install(self, scaler: Fp16LossScaler) -> None:
        """Register the hooks on the model; in fp16 also one that scales unscaled losses."""
        model = self._model
        self.tracker = BackwardTracker(
            model.units,
            model.schedule,
            self.reducer,
            self._begin_backward,
            self._end_backward if model.updates_in_backward else None,
            lambda: self.losses.refuse_part(),
            self._window.undo_backward,
        )
        model.schedule.connect(
            self.reducer, self.tracker.abort_broken_backward, self._optimizer_step.on_use
        )
        self.module_hooks = ModuleHooks(
            model.module, model.units, model.schedule, self.tracker, self._refuse_forward
        )
        self._removable.callback(self.module_hooks.remove)
        trains = bool(model.trainable) or model.mesh.dims.pipeline > 1
        self.losses = LossScaling(
            model.mesh.rank,
            scaler,
            self._fp16 and trains,
            model.trainable,
            lambda: self.tracker.under_way,
            lambda: self.tracker.awaits_backward,
            self.module_hooks.watch_gradients,
        )
        self._removable.callback(self.losses.close)
        if self._fp16:
            hook = model.module.register_forward_hook(Attached(self.losses.scale_outputs))
            self._removable.callback(hook.remove)

    def _refuse_forward(self, what: str, trains: bool) -> None:
        """Raise PartitionError where no outermost forward may begin, or would lack a script's
        writes to members of groups; the step refuses these after a forward that ``trains``.
        """
        self._optimizer_step.changes.refuse_until_step(what, trains)
        if not trains and self._optimizer_step.bound is not None:
            self._optimizer_step.bound.members.writes.refuse()

    def run_backward(self, loss: torch.Tensor, retain_graph: bool, weight: float | None) -> None:
        """Backpropagate ``loss``, a scalar of one micro-batch, unscaled. ``weight``: of the
        micro-batch in its window; None: 1 / ``window.accumulation_steps``. Raises PartitionError
        for anything but a scalar tensor.
        """
        if not isinstance(loss, torch.Tensor):
            message = (
                f"backward needs the loss, a scalar tensor, not {type(loss).__name__}; pass "
                "outputs.loss, or what your loss function returns"
            )
            raise PartitionError(message)
        if loss.numel() != 1:
            raise PartitionError(
                f"backward needs a scalar loss, not one of shape {tuple(loss.shape)}; reduce it "
                "with .mean() or .sum()"
            )
        if not loss.requires_grad:
            raise PartitionError(
                "backward needs a loss with a graph, and this one requires no grad: compute it "
                "outside torch.no_grad(), and pass it without .detach(); or no parameter that it "
                "depends on trains"
            )
        self.reduce_stray_gradients()
        self._window.expect_gradients()
        self._optimizer_step.norm_check.record_loss(loss)
        with self.losses.carrying(loss.dtype, weight) as scale:
            scaled = loss.float() * scale if scale != 1.0 else loss
            if self.step_runner is not None and self.step_runner.is_open:
                self._run_captured(self.step_runner, scaled, retain_graph, (scale, weight))
                return
            with self.module_hooks.backward_of(scaled):
                scaled.backward(retain_graph=retain_graph)

    def run_backward_from(
        self, outputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]
    ) -> None:
        """Backpropagate ``gradients`` of ``outputs``, for a micro-batch whose loss is on another
        rank: they carry its loss scale.
        """
        self.reduce_stray_gradients()
        self._window.expect_gradients()
        with self.losses.carrying(torch.float32, None), ExitStack() as backward:
            for output in outputs:
                backward.enter_context(self.module_hooks.backward_of(output))
            torch.autograd.backward(list(outputs), list(gradients))

    def _begin_backward(self) -> None:
        """Prepare the reducer when a backward reaches the model: the loss factors that its
        gradients carry, whether it ends the window, and whether units are updated in it.
        """
        if self._removed:
            raise PartitionError(
                "a backward under an engine that was destroyed, or of a forward from before it was "
                "built again because what trains has changed; run the forward again after that"
            )
        returns = self._only_returns()
        step, window = self._optimizer_step, self._window
        for begin in step.feature_hooks.begin_backward:
            begin()
        if step.bound is not None:
            refuse_switched(self._model.flats)
            step.changes.refuse_until_step("another backward")
            if step.gradient.held.divisor is not None:
                raise PartitionError(
                    "a backward after clip_grad_norm_ adds gradients that are not clipped to those "
                    "that are; clip after the last backward of a step (with Accelerate: if "
                    "accelerator.sync_gradients), or step before this backward"
                )
        place = window.next_backward
        # One that only returns gradients may not tell whether other ranks hold some.
        ends_window = place is BackwardPlace.LAST and not returns
        # A backward that no hook has seen may be followed by another one, unless a step() takes its
        # gradients in: ranks whose hooks have seen theirs have made the update by then.
        updates = (
            ends_window
            and self._model.updates_in_backward
            and not step.gradient.max_norm
            and (self._by_step or self.tracker.inside_backward)
        )
        if updates:
            engine = self._model.engine_flats.engine()
            assert engine is not None
            engine.refuse_update()  # collective: the conditions are equal on all ranks
            updates = not step.waits_for_hooks()
        is_first = window.begin_backward(place, returns)
        weight, unscale = self.losses.begin(1.0 / window.accumulation_steps)
        on_reduced = on_finished = None
        if updates and not self.losses.may_overflow:
            steps_before = self._counters.global_steps
            on_reduced = partial(step.begin_update_in_backward, steps_before=steps_before)
            on_finished = step.updater.end_backward
        elif returns and not any(f.gradient.holds_gradient for f in self._model.trainable):
            on_finished = self.reducer.clear  # of zeros
        self.reducer.configure_backward(
            BackwardSettings(weight, unscale, ends_window, on_reduced, is_first, on_finished)
        )

    def _only_returns(self) -> bool:
        """Return whether the backward under way returns gradients of parameters and leaves none on
        any, as torch.autograd.grad does; or leaves none, inside a forward.
        """
        returns = False
        for flat in self._model.trainable if torch._C._current_graph_task_id() != -1 else ():
            for member in flat.members:
                with torch.enable_grad(), torch._C.DisableTorchFunctionSubclass():
                    view: Any = torch.Tensor.view_as(member, member).grad_fn
                try:  # the node that would add to .grad; none if it has been frozen since
                    if view and torch._C._will_engine_execute_node(view.next_functions[0][0]):
                        return False
                except RuntimeError:  # torch: its gradient is returned
                    returns = True
        if not returns and not self.module_hooks.forward_runs:
            return False
        return not any(any_raw_grad(flat.members) for flat in self._model.trainable)

    def _end_backward(self) -> None:
        """Make the rest of the update of which the backward has made a part: the parts are equal on
        all ranks.
        """
        if self._optimizer_step.updater.backward_update is not None:
            engine = self._model.engine_flats.engine()
            assert engine is not None
            engine.finish_update_in_backward()

    def _run_captured(
        self, runner: StepRunner, scaled: torch.Tensor, retain_graph: bool, loss_factors: Hashable
    ) -> None:
        """Backpropagate ``scaled``, a loss with ``loss_factors``, while a forward of ``runner``
        awaits its backward.
        """
        before, self.runs_captured = self.reducer.progress, True
        try:
            scaled.backward(retain_graph=retain_graph)
        finally:
            self.runs_captured = False
        runner.end_backward(loss_factors, self.reducer.progress is not before)

    def begin_replay(self) -> None:
        """Begin a backward that is launched from a graph: no hook of it runs."""
        self._begin_backward()
        self.reducer.begin_replay()

    def end_replay(self, states: Sequence[Callable[[], None]]) -> None:
        """End a replayed backward: call ``states``, recorded at the capture, which set the gradient
        states of the flat buffers.
        """
        for restore in states:
            restore()
        self.reducer.end_replay()

    def reduce_stray_gradients(self, by_step: bool = False) -> None:
        """Take in gradients that no hook has seen, and abort a backward that an exception has left
        open (collective). ``by_step``: for a ``step()``, before which no backward follows.
        """
        if self.tracker.tasks:
            self.tracker.abort_broken_backward()
        self._by_step = by_step
        try:
            self.module_hooks.reduce_stray_gradients()
        finally:
            self._by_step = False

    def reduce(self) -> None:
        """Reduce the unreduced gradients of earlier backwards (collective)."""
        self.reduce_stray_gradients()
        self._reduce_accumulated()

    def reduce_for_step(self) -> None:
        """Reduce the rest of the window (collective). Raises PartitionError without a gradient."""
        self._reduce_accumulated()
        trainable = self._model.trainable
        if trainable and not any(map(_ready, trainable)):
            raise PartitionError(NO_GRADIENT)

    def _reduce_accumulated(self) -> None:
        for prepare in self._optimizer_step.feature_hooks.before_reduction:
            prepare(self.reducer.local_scale)
        self.reducer.reduce_accumulated()

    def write_gradient(self, flat: FlatBuffer, name: str, value: torch.Tensor | None) -> None:
        """Set the gradient of parameter ``name``, as :meth:`EngineParts.write_gradient`."""
        self._optimizer_step.changes.refuse_until_step(f"writing {name}.grad")
        self._window.expect_gradients()
        self.reducer.wait_for_offload()
        shard = flat.gradient.shard
        device = flat.full.device if shard is None else shard.device
        scale = self._optimizer_step.gradient.held_scale(device)
        flat.gradient.write(name, value, scale * self.reducer.unreduced_scale(flat), scale)

    def has_micro_batch(self) -> bool:
        """Return whether a ``step()`` now counts a micro-batch: there was a backward since the last
        one, or another rank may have had one, where backwards inside a window send nothing.

        Raises PartitionError if ``zero_grad()`` has dropped that backward, and before the first.
        """
        window = self._window
        if self._optimizer_step.bound is None or not window.awaits_backward:
            return True
        if window.has_forward(self.module_hooks.forward_count):  # perhaps a batch without a loss
            shared = self._model.mesh.pp_stage_ranks > 1 and not self._model.policy.shards_gradients
            if shared or (not window.micro_batches and window.ends_by_step):
                self.reducer.idle.end_backward()  # other ranks' may use all parameters
                return True
        if window.lacks_backward:
            self._optimizer_step.applied = False
            raise PartitionError(NO_GRADIENT)
        window.warn_of_empty_step()
        return False

    def refuse_unusable(self) -> None:
        """Raise PartitionError, or UnreducedGradientsError inside no_sync, if a step cannot use the
        gradients held.
        """
        if self.reducer.gradients_lost:
            self._optimizer_step.changes.refuse_until_step(
                "a step whose gradients are not complete"
            )
            raise PartitionError(
                "a backward of this window was broken by an exception after some gradients had "
                "been produced: they are lost, and with them what earlier micro-batches of the "
                "window had added up may be incomplete; call engine.restart_window() and repeat "
                "the window, on all ranks"
            )
        if not self._window.syncs:
            raise UnreducedGradientsError(
                "It is illegal to call Engine.step() inside no_sync context manager: it would use "
                "gradients that are not reduced; leave the no_sync block first"
            )

    def refuse_unused(self) -> None:
        """Raise UnusedParameterError, on all ranks, for trainable parameters without a gradient on
        one rank or more (collective).
        """
        if names := self._optimizer_step.agreement.missing():
            raise UnusedParameterError(
                f"{listed(names, 6)} got no gradient on at least one rank, and "
                "zero_optimization.ignore_unused_parameters is false; freeze what is not used, use "
                "it in every forward, or set the key to true: what no rank uses stays as it is"
            )

    @property
    def under_way(self) -> bool:
        """Return whether a forward or a backward of the model is under way."""
        return self.module_hooks.forward_runs or self.tracker.under_way

    def remove(self) -> None:
        """Remove the hooks from the model and free the gradients."""
        self._removed = True
        if self.step_runner is not None:
            self.step_runner.close()
        self._removable.close()
        self.reducer.close()


class StepRunner(Protocol):
    """The passes and the update of a step, run by a feature in place of the engine."""

    @property
    def is_open(self) -> bool:
        """Return whether its last forward awaits its backward."""

    def forward(self, *args: Any, **kwargs: Any) -> object:
        """Return what the model returns."""

    def end_backward(self, loss_factors: Hashable, others: bool) -> None:
        """End a backward of a loss with ``loss_factors``; ``others``: it read other graphs, too."""

    def update(self, steps_before: int, may_overflow: bool) -> bool:
        """Run one optimizer step, as ``OptimizerStep.update`` does."""

    def close(self) -> None:
        """Free what it holds."""
