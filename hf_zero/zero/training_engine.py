"""The engine: forward, backward and step over a model with sharded parameters, gradients and
optimizer state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from hf_zero.config import ZeroConfig
from hf_zero.config.elasticity import ELASTICITY
from hf_zero.errors import ConfigError, HfZeroError, PartitionError
from hf_zero.logging import listed, logger
from hf_zero.optim.segments import ParamGroup
from hf_zero.zero.access.consolidate import consolidated, whole_state_dict
from hf_zero.zero.engine_parts import EngineParts
from hf_zero.zero.layout.gradients import GradientBuffer
from hf_zero.zero.layout.precision import COMPUTE, refuse_mixed_dtypes
from hf_zero.zero.layout.tree import map_tensors
from hf_zero.zero.rebuild import groups_over, rebuild, unfrozen
from hf_zero.zero.reduce.losses import Fp16LossScaler
from hf_zero.zero.step.optimizer_step import failed_write
from hf_zero.zero.step.window import WindowEnd

if TYPE_CHECKING:
    from torch.nn.modules.module import _IncompatibleKeys


class TrainingEngine(EngineParts):
    """``model`` under ZeRO: forward, backward, step. The subclass :class:`hf_zero.Engine` adds
    checkpoints, also in memory, measures and traces, streams of weights and curricula.

    The loss given to :meth:`backward` (or a plain ``loss.backward()``) is the unscaled loss of one
    micro-batch on this rank; the engine averages over the accumulation window and over ranks, and
    scales for fp16. With ``shard_only`` it trains nothing: parameters keep their dtypes, and may be
    frozen and unfrozen.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.sharded_model.engine_flats.trainability_changed and torch.is_grad_enabled():
            self.rebuild_if_unfrozen()
        if self._cast_to is not None:
            args, kwargs = map_tensors(
                (args, kwargs), lambda t: t.to(self._cast_to) if t.is_floating_point() else t
            )
        if not torch.compiler.is_compiling():
            batches = self.optimizer_step.agreement.batches
            trains = self.sharded_model.module.training
            if batches.active and batches.awaits_batch and trains and torch.is_grad_enabled():
                batches.record((args, kwargs))  # to be compared with other ranks'
        with self.measures.forward(self, args, kwargs):
            try:
                run: Callable[..., object] = self.sharded_model.module
                if self.pass_runner.step_runner is not None:
                    run = self.pass_runner.step_runner.forward
                if not self.config.torch_autocast.enabled:
                    return run(*args, **kwargs)
                dtype = COMPUTE[self.config.torch_autocast.dtype]
                with torch.autocast(self.device.type, dtype):
                    return run(*args, **kwargs)
            except RuntimeError as error:
                refuse_mixed_dtypes(error, self.module, self.config.precision, (args, kwargs))
                raise
            except (KeyboardInterrupt, SystemExit):
                # They bypass the post-forward hooks, whose graph would keep the engine alive:
                # Python's garbage collector sees no cycle through a graph.
                self.pass_runner.module_hooks.abort_broken_pass()
                for abort in self.feature_set.hooks.abort_forward:
                    abort()
                raise

    def batch_of(self, args: object, kwargs: object) -> object:
        """Return the arguments that hold the batch; None on a pipeline stage without the first."""
        return args, kwargs

    def prepare_batch(self, batch: object) -> Any:
        """Return ``batch``, a mapping, as training techniques change it for the current step: with
        sequences of this step's length. For loops that count labels or compute the loss themselves;
        a forward does it by itself.
        """
        for prepare in self.feature_set.hooks.prepare_batch:
            batch = prepare(batch)
        return batch

    def backward(
        self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True
    ) -> torch.Tensor:
        """Backpropagate the unscaled scalar loss of a micro-batch, and return it unchanged.

        ``scale_wrt_gas=False``: the caller has already divided by the accumulation steps (or by the
        tokens of the window).
        """
        with self.measures.backward(self, loss, not scale_wrt_gas):
            self.pass_runner.run_backward(loss, retain_graph, None if scale_wrt_gas else 1.0)
        return loss

    @property
    def pass_is_under_way(self) -> bool:
        """Return whether a forward or a backward has begun and not ended."""
        return self.pass_runner.under_way

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context for backwards that do not end the accumulation window: stages 0 and 1 keep their
        gradients on this rank.

        Stages 2 and 3 keep no whole gradient and reduce in every backward even so; the result is
        equal.
        """
        self.rebuild_if_unfrozen()  # gradients that a script has set belong to what trains now
        self.pass_runner.reduce_stray_gradients()
        with self.accumulation.no_sync():
            yield
            self.pass_runner.reduce_stray_gradients()

    @property
    def in_no_sync(self) -> bool:
        """Return whether a ``no_sync`` block is open."""
        return not self.accumulation.syncs

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Set whether the next backward ends the accumulation window, until the next call. Raises
        UnmanagedWindowError if every step ends one.
        """
        end = WindowEnd.NEXT_BACKWARD if is_boundary else WindowEnd.LATER_BACKWARD
        self.accumulation.set_end(end)

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return whether the backward under way, or the next, is known to end the accumulation
        window; False without managed accumulation.
        """
        return self.accumulation.ends

    def holds_gradients(self) -> bool:
        """Return whether a step has gradients to use, or to refuse after a broken backward; those
        that no hook has seen are taken in first (collective).
        """
        self.pass_runner.reduce_stray_gradients()
        return self.held_micro_batches > 0 or self.pass_runner.reducer.gradients_lost

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients and restart the accumulation window: the next micro-batch is its
        first. Every rank must call it, or none. ``optimizer.zero_grad()`` does the same, unless the
        script calls it after every micro-batch of a window. Without ``set_to_none`` the next step
        updates parameters that had a gradient with zeros if no backward uses them.
        """
        self.drop_gradients(partial(GradientBuffer.zero_grad, set_to_none=set_to_none))

    def drop_gradients(self, drop: Callable[[GradientBuffer], None] = GradientBuffer.clear) -> None:
        """Drop all gradients, those of each flat buffer by its method ``drop``, and restart the
        accumulation window. By default zeros that :meth:`zero_grad` has set remain, as in torch
        when a script loads a checkpoint.
        """
        if self.bound is not None and self.bound.members.phase.in_step:
            self.changes.refuse_gradients("zero_grad()")
        self.pass_runner.module_hooks.abort_broken_pass()
        self.changes.refuse_until_step("zero_grad()")
        self.pass_runner.reducer.clear(drop)
        self.optimizer_step.gradient.held.forget()
        self.pass_runner.losses.reset()
        self.measures.zero_grad()
        self.accumulation.restart()
        self.optimizer_step.agreement.name_restarts(self.accumulation.restarts)

    def restart_window(self) -> None:
        """Drop all gradients and restart the accumulation window, as :meth:`zero_grad` does."""
        self.zero_grad()

    @torch.no_grad()
    def gradient_norm(self) -> float:
        """Return the norm of the gradient for the next step, before clipping, without the loss
        scale; 0.0 without a gradient (collective).
        """
        self.pass_runner.reduce()
        return self.optimizer_step.gradient.current()

    @torch.no_grad()
    def clip_gradient(self, limit: float) -> torch.Tensor:
        """Clip the gradient for the next step to norm ``limit`` (infinity: not), in place of
        ``max_norm``; again, if it was clipped before. Return its norm before, without the loss
        scale: 0-dim on the device, for which the host does not wait (collective). The step uses
        this norm unless a gradient is written since.
        """
        self._reduce_for_norm()
        if limit != math.inf:
            self.changes.refuse_until_step("clip_grad_norm_")
        return self.optimizer_step.gradient.clip(limit, self.counters.global_steps)

    @torch.no_grad()
    def measure_gradient(self) -> torch.Tensor:
        """Return the norm of the gradient for the next step, before any clipping, in the form of
        :meth:`clip_gradient`. A backward may have made its update already.
        """
        self._reduce_for_norm()
        return self.optimizer_step.gradient.measure(self.counters.global_steps)

    def _reduce_for_norm(self) -> None:
        if self.changes.broken or self.changes.away:
            self.changes.refuse("clip_grad_norm_")
        self.pass_runner.reduce_stray_gradients()
        self.pass_runner.refuse_unusable()
        self.pass_runner.reduce_for_step()

    @torch.no_grad()
    def step(self) -> None:
        """At the end of an accumulation window clip, update, and step the scheduler; elsewhere only
        count the micro-batch. Without a backward since the last call it counts nothing, and warns.

        In fp16 an overflowed gradient skips the update: weights, optimizer and scheduler are
        unchanged.
        """
        if self._installed is None:
            self._raise_destroyed("step()")
        if self.changes.broken or self.changes.away:
            self.changes.refuse("step()")
        window, runner = self.accumulation, self.pass_runner
        ends_window = window.begin_step(self.changes.unconfirmed is not None)
        runner.module_hooks.abort_broken_pass()
        runner.reduce_stray_gradients(by_step=True)
        self.sharded_model.patches.check()
        runner.refuse_unusable()
        if not window.backwards and not runner.has_micro_batch():
            return
        # a backward has made the update, or the stray gradients have just now
        is_updated = self.changes.unconfirmed is not None
        if not is_updated:
            self.optimizer_step.applied = False
        forwards = runner.module_hooks.forward_count
        if not ends_window:
            with self.changes.change(f"a micro-batch of step {self.counters.global_steps + 1}"):
                self._count_micro_batches(window.end_micro_batch(forwards, self.counters))
            return
        self.refuse_update()
        if is_updated:
            failure = self._confirm_update()
        else:
            try:
                runner.reduce_for_step()
            except BaseException as error:
                if not isinstance(error, HfZeroError):
                    runner.reducer.lose_gradients()
                raise
            if not self.config.zero.ignore_unused_parameters:
                runner.refuse_unused()
            with self.changes.change(f"step {self.counters.global_steps + 1}"):
                self._count_micro_batches(window.end_window(forwards))
                failure = self._update()
        if failure is not None:
            raise failure

    def refuse_update(self) -> None:
        """Raise ConfigError without an optimizer, PartitionError for changed groups of it, for a
        scheduler that the script has stepped, OffloadError after a failed write of offloaded state
        (collective), unless a backward has made the update: that is not waited for.
        """
        if self.optimizer_step.bound is None:
            raise ConfigError(
                "step() needs an optimizer, and the engine was built without one; pass one with "
                "its model to hf_zero.initialize, or to prepare, or name one in the config"
            )
        self.optimizer_step.bound.members.check()
        step, position = self._scheduled or (None, None)
        current = getattr(self.lr_scheduler, "last_epoch", None)
        # a load has changed the number of steps
        known = step == self.counters.global_steps and position is not None
        if known and current is not None and current > position:
            raise PartitionError(
                f"{type(self.lr_scheduler).__name__}.step() was called after engine.step(), which "
                "steps the learning-rate schedule itself: it would advance twice as fast; remove "
                "the call, or give no scheduler to initialize and keep the call"
            )
        if self.sharded_model.placement.files is None or self.changes.unconfirmed is not None:
            return
        if failed := self.optimizer_step.failed_writes():
            raise failed_write(failed)

    def _update(self, in_backward: bool = False) -> Exception | None:
        """Update the weights and end the step; keep its gradients if ``in_backward``. Return the
        error of a post hook of the optimizer: the step is complete even so, as in torch.
        """
        losses, runner = self.pass_runner.losses, self.pass_runner.step_runner
        update = self.optimizer_step.update if runner is None else runner.update
        overflow = update(self.counters.global_steps, losses.may_overflow)
        self._announce_to_ranks()
        self.schedule.end_step()
        self.optimizer_step.bound.members.writes.accept()
        failure = None
        if not overflow and self.optimizer_step.bound.optimizer._optimizer_step_post_hooks:
            failure = self._run_post_hooks()
        requests, consensus = self.stop_requests, self.mesh.consensus
        if requests.asked or (consensus is not None and consensus.steps.stopped):
            requests.end_step()
        if in_backward:
            self.pass_runner.reducer.drop_stray_gradients()  # that a hook after the step has set
        else:
            self._end_window(overflow)
        scaler = losses.update_scale(overflow)
        self._end_update(overflow, scaler)
        # a scheduler that takes a metric is stepped by the script
        scheduler = self.lr_scheduler
        if scheduler is not None and not (overflow or isinstance(scheduler, ReduceLROnPlateau)):
            scheduler.step()
            self._scheduled = (self.counters.global_steps, getattr(scheduler, "last_epoch", None))
        for end in self.optimizer_step.feature_hooks.end_step:
            end(self.counters.global_steps, overflow, scaler.scale)
        return failure

    def _end_update(self, overflow: bool, scaler: Fp16LossScaler) -> None:
        """Count the update, set its outcome and the new loss scale of ``scaler`` on the optimizer,
        and log a step that was skipped because of an ``overflow``.
        """
        optimizer_step = self.optimizer_step
        if self.optimizer is not None:
            self.optimizer.overflow = overflow
        if self.scaler.dynamic:
            self.set_scale_on_optimizer()
        self.counters.global_steps += 1
        self.counters.skipped_steps += overflow
        optimizer_step.applied = not overflow
        if overflow and optimizer_step.refuses_infinite:
            logger.warning(
                "step %d skipped: its gradients are not finite; look at the loss, the learning "
                "rate and the batches of this step",
                self.counters.global_steps,
            )
        elif overflow and scaler.at_floor:
            logger.warning(
                "step %d skipped: fp16 gradients overflow at the smallest loss scale, %g; the loss "
                "or the learning rate has diverged",
                self.counters.global_steps,
                scaler.scale,
            )

    def _end_window(self, overflow: bool = False) -> None:
        """Drop the gradients of a window whose update is made, or skipped for an ``overflow``, and
        after the first one move the state that fits back to the device (collective).
        """
        self.pass_runner.reducer.clear(GradientBuffer.end_step)
        held = self.optimizer_step.gradient.held
        if held.is_measured or held.is_clipped:
            held.forget()
        if self.sharded_model.placement.awaits_first_step and not overflow:
            self.optimizer_step.bring_state_back()

    def _run_post_hooks(self) -> Exception | None:
        """Run the post hooks of the optimizer, and take what each writes to its groups over into
        the weights of all ranks (collective). Return their error.
        """
        self.sharded_model.lend_to_hooks()
        take = self.optimizer_step.take_hook_writes
        failure = self.optimizer_step.bound.run_post_hooks(take)
        take(ends_step=True)
        return failure

    def run_step_hooks(self) -> None:
        """Run the hooks of the optimizer's step, as torch's step does for which ``zero_grad()`` has
        left no gradient, and take over what they write (collective). No step is counted.
        """
        optimizer = self.bound.optimizer
        if not (optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks):
            return
        self.bound.members.check()
        with torch.no_grad(), self.changes.change("a step without gradients"):
            self.sharded_model.lend_to_hooks()
            self.optimizer_step.run_pre_hooks()
            self.bound.members.writes.accept()
            failure = self._run_post_hooks()
        if failure is not None:
            raise failure

    def _announce_to_ranks(self) -> None:
        """Announce events to the other ranks, before all agree at the end of this step: a subclass
        may have some.
        """

    def _count_micro_batches(self, count: int) -> None:
        self.counters.micro_steps += count
        if not self.measures.counts_samples or self.config.has_batch_size:
            samples = (self.config.train_micro_batch_size_per_gpu or 1) * self.data_ranks
            self.counters.global_samples += samples * count

    def _raise_destroyed(self, call: str) -> NoReturn:
        raise PartitionError(
            f"{call} of an engine that was destroyed; train with another one: "
            "hf_zero.initialize(model=..., optimizer=...)"
        )

    @torch.no_grad()
    def finish_update_in_backward(self) -> None:
        """Make the rest of the update, and end the step, at the end of a backward that has made a
        part of it and closes the window (collective). Gradients stay for :meth:`step`.
        """
        step, window = self.optimizer_step, self.accumulation
        self.measures.begin_update(self)
        step.refuse_changed()
        self.pass_runner.reduce_for_step()
        with self.changes.change(f"step {self.counters.global_steps + 1}"):
            before = window.micro_batches
            self._count_micro_batches(window.begin_update_in_backward())
            failure = self._update(in_backward=True)
            settings, hooks = step.settings(), step.hook_ids()
            window.await_step(1, before)
        self.changes.unconfirmed = settings, hooks, step.bound.state.writes_on_device(), failure

    def _confirm_update(self) -> Exception | None:
        """Begin another window after an update in the backward, and return the error of a post hook
        of the optimizer. Raises PartitionError for what a script has changed since.
        """
        step, changes = self.optimizer_step, self.changes
        assert changes.unconfirmed is not None
        settings, hooks, writes, failure = changes.unconfirmed
        if step.gradient.max_norm:
            changes.refuse_unconfirmed("gradient clipping that was switched on after the backward")
        if step.hook_ids() != hooks:
            changes.refuse_unconfirmed("a hook registered or removed after the backward")
        if step.settings() != settings:
            changes.refuse_unconfirmed("a change of the optimizer's settings")
        if step.bound.state.writes_on_device() != writes:
            changes.refuse_unconfirmed("a write to optimizer.state")
        step.refuse_writes()
        self.accumulation.end_window(self.pass_runner.module_hooks.forward_count)
        changes.unconfirmed = None
        with changes.change(f"step {self.counters.global_steps}"):
            self._end_window()
        return failure

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the number of micro-batches per step, from the next window on. Raises ConfigError
        unless ``train_batch_size`` is a multiple of the micro-batch times the ranks, and
        PartitionError inside a window.
        """
        micro = self.train_micro_batch_size_per_gpu() * self.data_ranks
        if train_batch_size < 1 or train_batch_size % micro:
            raise ConfigError(
                f"a train batch of {train_batch_size} samples is not a multiple of {micro} "
                "(micro-batch x ranks); choose one"
            )
        if self.window_is_open:
            raise PartitionError(
                "set_train_batch_size() inside an accumulation window would weigh its "
                "micro-batches differently; call it after the step that ends the window"
            )
        self.set_batches(self.train_micro_batch_size_per_gpu(), train_batch_size // micro)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Set the number of samples per micro-batch from now on: the loop provides them, and the
        number of micro-batches per step stays.
        """
        self.set_batches(micro_batch_size, self.gradient_accumulation_steps())

    def set_batches(self, micro: int, accumulation_steps: int) -> None:
        """Set ``micro`` samples per micro-batch and ``accumulation_steps`` micro-batches per step,
        from the next window on.
        """
        self.config = self.config_with_batches(micro, accumulation_steps)
        self.accumulation.set_accumulation_steps(accumulation_steps)

    def trust_loader(self) -> None:
        """Compare no batches of the ranks: a loader divides them."""
        self.optimizer_step.agreement.batches.trust_loader()

    def config_with_batches(self, micro: int, accumulation_steps: int) -> ZeroConfig:
        """Return the configuration with ``micro`` samples per micro-batch and
        ``accumulation_steps`` micro-batches per step, which replace the sizes that ``elasticity``
        computes.
        """
        config = self.config.without(ELASTICITY)
        sizes = {
            "train_micro_batch_size_per_gpu": micro,
            "gradient_accumulation_steps": accumulation_steps,
            "train_batch_size": micro * accumulation_steps * self.data_ranks,
        }
        # ``resolve`` divides the ranks by the sizes of these keys
        shared = config.tensor_parallel.size * config.ranks_of_a_sequence
        return config.override(sizes, "set by the script").resolve(self.data_ranks * shared)

    def rebuild_if_unfrozen(self, loads: bool = False) -> None:
        """Rebuild the engine if parameters that its optimizer has were unfrozen (collective);
        ``loads``: a load follows, which may replace a half changed state.
        """
        flats = self.sharded_model.engine_flats
        if not flats.trainability_changed:
            return
        flats.trainability_changed = False
        if self.optimizer_step.bound is not None and (names := unfrozen(self)):
            try:
                rebuild(self, f"unfreezing {listed(names, 3)}", lambda: None, loads)
            except BaseException:
                if not self.destroyed:
                    self.sharded_model.engine_flats.trainability_changed = True
                raise

    def add_param_group(self, group: ParamGroup) -> None:
        """Add ``group`` to the optimizer, as its ``add_param_group`` does: its parameters, which
        must be in the model, train from the next step on. Collective, after a step.
        """
        params = group["params"]
        if not isinstance(params, (torch.Tensor, set)):  # torch refuses a set
            params = list(params)
        optimizer, added = self.optimizer, {**group, "params": params}
        add = type(optimizer).add_param_group
        rebuild(self, "optimizer.add_param_group", lambda: add(optimizer, dict(added)))

    def replace(
        self, changed: torch.nn.Module | torch.nn.Parameter, group: int | None = None
    ) -> None:
        """Continue with ``changed``, a module or parameter that the script has put into the model:
        it trains from the next step on, and everything else keeps its state. Collective, after a
        step.

        Args:
            changed: whole, with the same values on all ranks, else the values of rank 0 count. What
                it has replaced leaves the optimizer.
            group: index of the optimizer's group for its parameters; None: the groups of the
                parameters that they replace.

        Raises:
            PartitionError: ``changed`` is not in the model, takes the place of nothing that trains
                and ``group`` is None, or a window of accumulation is open.
        """
        new = [changed] if isinstance(changed, torch.nn.Parameter) else list(changed.parameters())
        rebuild(self, "replace()", lambda: groups_over(self, new, group))

    def consolidated(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Return an iterator over whole parameters on the CPU, one unit at a time, by first name
        (collective: exhaust it on every rank).
        """
        self.changes.refuse_until_step("consolidated()", acts=False)
        return consolidated(self, dtype)

    def state_dict(  # type: ignore[override]
        self, *args: Any, rank0_only: bool = False, dtype: torch.dtype | None = None, **kwargs: Any
    ) -> dict[str, Any] | None:
        """Return the consolidated model's state dict, as the bare model's. Collective at stage 3.

        ``rank0_only``: other ranks get None, and hold only one unit at a time; with ``dtype`` as in
        :meth:`consolidated`.
        """
        self.changes.refuse("state_dict()")
        if rank0_only:
            return whole_state_dict(self, everywhere=False, dtype=dtype)
        state: dict[str, Any] = self.module.state_dict(*args, **kwargs)
        return state

    def load_state_dict(
        self, state_dict: Mapping[str, object], strict: bool = True, assign: bool = False
    ) -> _IncompatibleKeys:
        """Call the bare model's ``load_state_dict`` with whole values (collective at stage 3)."""
        keys: _IncompatibleKeys = self.module.load_state_dict(state_dict, strict, assign)
        return keys

    def compile(
        self,
        backend: str = "inductor",
        compile_kwargs: dict[str, object] | None = None,
        **options: Any,
    ) -> None:
        """Compile each block's forward as ``compile: blocks`` does, with these arguments of
        torch.compile; gathers stay outside.
        """
        self.feature_set.compile(backend, **{**(compile_kwargs or {}), **options})

    def stop_on(self, *signals: int) -> None:
        """Listen for signals, and for :meth:`request_stop`, from now on. Every rank must call it
        before the next step; after each step, ``if engine.stop_requested``, save and leave.

        A signal among ``signals`` no longer ends this process. Its previous handler is called too,
        and is restored by another ``stop_on()`` or by ``destroy``. Needs the main thread if there
        are signals.

        Raises:
            ConfigError: one of ``signals`` is none that a process can handle.
            PartitionError: there are signals beside the main thread, or for a destroyed engine,
                for which ``stop_on()`` has no effect.
        """
        if self.destroyed and signals:
            self._raise_destroyed("stop_on()")
        if not self.destroyed:
            self.stop_requests.listen(*signals)

    def request_stop(self) -> None:
        """Ask all ranks to stop after one of the next steps.

        One rank is enough; signal handlers may call it. Raises PartitionError for ranks that do not
        listen, and for a destroyed engine.
        """
        if self.destroyed:
            self._raise_destroyed("request_stop()")
        self.stop_requests.request()

    @property
    def stop_requested(self) -> bool:
        """Return whether a rank was asked to stop; it changes on all ranks in the same step."""
        return self.stop_requests.agreed
