"""The optimizer step: updates on the device and of offloaded state, and what scripts write between
and in them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import NamedTuple

import torch

from hf_zero.config import ZeroConfig
from hf_zero.device import kinds, streams
from hf_zero.device.spans import NOTHING, span
from hf_zero.errors import ConfigError, OffloadError
from hf_zero.logging import log_rank0
from hf_zero.offload.unit_updates import GradientCopies, UnitUpdates
from hf_zero.optim.bound_optimizer import BoundOptimizer
from hf_zero.optim.group_settings import compared_settings, scaled_rates
from hf_zero.optim.segments import ParamGroup
from hf_zero.zero.gather.unit import Unit, unit_of
from hf_zero.zero.layout.flat_buffer import FlatBuffer
from hf_zero.zero.layout.gradients import GradState
from hf_zero.zero.layout.optimizer_shard import OptimizerShard
from hf_zero.zero.reduce.losses import Fp16LossScaler
from hf_zero.zero.reduce.norm import NormCheck, squared_norm
from hf_zero.zero.reduce.step_agreement import StepAgreement
from hf_zero.zero.sharded_model import ShardedModel
from hf_zero.zero.step.gradient_norm import GradientNorm
from hf_zero.zero.step.held_gradient import clip_divisor
from hf_zero.zero.step.state_changes import StateChanges
from hf_zero.zero.step.step_interfaces import NO_HOOKS, StepHooks


class StepBefore(NamedTuple):
    """What a step keeps over a rebuild of the engine: the attributes of its name, and the names of
    parameters that have had gradients, and zeros (``GradientBuffer.restore_zeros``).
    """

    max_norm: float
    last_norm: torch.Tensor | None
    lr_scale: float
    applied: bool
    present: set[str]
    zeroed: set[str]


class OptimizerStep:
    """Updates the parameters of ``model`` from their reduced gradients with ``optimizer``.

    ``updater`` has the units with offloaded state; ``hooks``: those of the features.
    """

    bound: BoundOptimizer
    """``optimizer`` over the shards of this rank. Without one, and after :meth:`close`, it is None
    in spite of its type: callers that may come then compare it with None, and others need one.
    """

    def __init__(
        self,
        model: ShardedModel,
        optimizer: torch.optim.Optimizer | None,
        config: ZeroConfig,
        scaler: Fp16LossScaler,
        hooks: StepHooks,
        changes: StateChanges,
    ):
        self.model, self.scaler = model, scaler
        self.norm_check = NormCheck(model.mesh.device, config.precision, model.mesh.rank)
        self.kernels, self.feature_hooks, self.changes = config.kernels, hooks, changes
        self.bound = None  # type: ignore[assignment]
        if optimizer is not None:
            self.bound = model.bind(optimizer, config)
        self.agreement = StepAgreement(model.trainable, model.mesh, model.mesh.device)
        self.gradient = GradientNorm(model, self.bound, self.agreement, scaler, hooks, config)
        self.gradient_offload: GradientCopies | None = None  # copies of gradients to the host
        self.updater = UnitUpdates()  # of offloaded state
        # moves the state that fits beside a first step to the device (collective)
        self.bring_state_back: Callable[[], None] = lambda: None
        # waits for the update of a unit that is needed, if that may outlast the step
        self.on_use: Callable[[Unit], None] | None = None
        if model.overlaps:
            self.on_use = Unit.wait_for_update
        # whether non-finite gradients prevent a step even without a loss scale
        self.refuses_infinite = config.precision == "bf16" and config.bf16.check_grad_overflow
        self.lr_scale = 1.0  # factor of an update on the learning rates of the groups
        self.applied = False  # whether the last step has changed the weights
        # the engine itself reads and writes the optimizer's state now, without waiting for an
        # update
        self.updates_state = False
        self._updated_on: streams.Stream | None = None  # the stream of an update in a backward
        self._is_captured = False  # the update under way is captured in a graph: nothing runs yet
        self._warned_of_hooks = False

    def offload_to(
        self, updater: UnitUpdates, copies: GradientCopies | None, bring_back: Callable[[], None]
    ) -> None:
        """Let ``updater`` update offloaded state, from ``copies`` of gradients in host memory
        unless they are there; ``bring_back`` moves state that fits to the device after a first
        step.
        """
        self.updater, self.on_use = updater, updater.used
        self.gradient_offload, self.bring_state_back = copies, bring_back

    def kept(self) -> StepBefore:
        """Return what :meth:`restore` takes after a rebuild of the engine."""
        gradients = [flat.gradient for flat in self.model.trainable]
        present = {name for g in gradients for name in g.names_of(g.present)}
        zeroed = {name for g in gradients for name in g.names_of(g.zeroed)}
        norms = self.gradient.max_norm, self.gradient.last
        return StepBefore(*norms, self.lr_scale, self.applied, present, zeroed)

    def restore(self, before: StepBefore) -> None:
        """Continue with what the step of the engine ``before`` a rebuild has kept."""
        self.lr_scale, self.applied = before.lr_scale, before.applied
        for flat in self.model.trainable:
            flat.gradient.restore_zeros(before.present, before.zeroed)
        self.gradient.clip_to(before.max_norm)
        self.gradient.record(before.last_norm)

    def scale_rates(self, factor: float) -> None:
        """Multiply the learning rates of the groups by ``factor`` in updates from now on."""
        self.lr_scale = factor

    def check_updates(self) -> None:
        """Raise ConfigError for state that is not on the device, and that nothing updates."""
        offloads = self.model.placement.offloads_optimizer and self.bound is not None
        if offloads and not self.updater.takes_offloaded:
            raise ConfigError(
                "zero_optimization.offload_optimizer keeps state outside of the device, and no "
                "feature of this engine updates it there; remove the section, or pass the "
                "features of the configuration (FeatureSet.of)"
            )

    def update(self, steps_before: int, may_overflow: bool) -> bool:
        """Run one optimizer step, number ``steps_before`` + 1 (collective). Return True if it was
        skipped for non-finite gradients: with ``may_overflow``, or with ``refuses_infinite``.
        """
        if self._updated_on is not None:  # torch's engine waits for streams of leaves alone
            self._follow_updates(self.model.mesh.device)
        model, may_skip = self.model, may_overflow or self.refuses_infinite
        local = False
        for begin in self.feature_hooks.begin_step:
            local |= begin(may_skip)
        # with an update in the backward, step() may come later
        total, norm = self.gradient.of_step(steps_before, model.updates_in_backward, local)
        if may_skip and not bool(torch.isfinite(total)):
            return True
        if not may_overflow and not self._is_captured:
            self.norm_check.check(norm, steps_before + 1)
        written, fresh = self._update_state(self._divisor(norm), steps_before)
        stale = []
        hooked = bool(self.bound.optimizer._optimizer_step_pre_hooks)  # they may write to any
        for flat in model.flats:
            unused = flat.trainable and flat.gradient.unused and flat.gradient.all_unused
            if unused and not hooked:
                fresh.add(flat)
            elif flat.trainable:
                flat.user_writes.mark_updated()
            if not flat.optimizer_shard.offloaded and flat not in fresh:
                stale.append(flat)
        model.schedule.refresh(stale, model.flats, frozenset(written), after_step=True)
        return False

    def _divisor(self, norm: torch.Tensor) -> torch.Tensor | None:
        """Return by what the update divides gradients of ``norm``: the loss scale and clipping, on
        the device; None: by nothing.
        """
        scale, gradient = self.scaler.scale, self.gradient
        if gradient.held.divisor is not None:
            return scale * gradient.held.divisor
        if gradient.max_norm > 0.0 and not gradient.held.is_clipped:
            gradient.warn_of_ungrouped()
            return scale * clip_divisor(norm, gradient.max_norm)
        return None if scale == 1.0 else torch.full((), scale, device=self.model.mesh.device)

    def _update_state(
        self, divisor: torch.Tensor | None, steps_before: int
    ) -> tuple[set[str], set[FlatBuffer]]:
        """Update weights and state, after the hooks before the update. Return the keys of flat
        buffers whose shards a kernel has written, and the flat buffers that features have updated.
        """
        model, by_features = self.model, set[FlatBuffer]()
        # fp32: the optimizer writes the shards that other ranks may be fetching
        with self.scaled_rates(), self.changing_state():
            for prepare in self.feature_hooks.before_update:
                prepare()
            if self.bound.optimizer._optimizer_step_pre_hooks:
                self._warn_of_hooks()
                model.lend_to_hooks()
            rest = self._apply_rest(divisor, steps_before) if model.updates_in_backward else ()
            hooks = self.bound.optimizer._optimizer_step_post_hooks
            put_off = self.bound.without_post_hooks() if hooks else NOTHING
            with span("update", "parameters on the device"), put_off:
                written = self.bound.step(
                    divisor,
                    shards=self.shards_to_write(),
                    steps_before=steps_before,
                    without=rest,
                    run_pre_hooks=self.run_pre_hooks,
                )
            for update_flats in self.feature_hooks.update:
                by_features.update(update_flats(divisor))
            if self.updater.units or self.updater.backward_update is not None:
                update = self.updater.backward_update or self.bound.offloaded_update(
                    1.0 if divisor is None else float(divisor), steps_before
                )
                self.updater.start(update)
        return written, by_features

    def _apply_rest(self, divisor: torch.Tensor | None, steps_before: int) -> set[OptimizerShard]:
        """Update each flat buffer on the device that the backward has not updated, unless pre-step
        hooks or a divisor need all gradients at once. Return those updated, there or here.
        """
        updated = set()
        one_by_one = divisor is None and not self.bound.optimizer._optimizer_step_pre_hooks
        for flat in self.model.trainable:
            if one_by_one and flat.gradient.has_reduced and not flat.optimizer_shard.offloaded:
                self._apply([flat], steps_before)
            if flat.gradient.state is GradState.APPLIED:
                updated.add(flat.optimizer_shard)
        return updated

    def _apply(self, flats: Sequence[FlatBuffer], steps_before: int) -> None:
        """Update the state of ``flats``, on the device, and free their gradients."""
        for flat in flats:
            norm = squared_norm([flat.gradient], self.model.mesh.device, self.kernels)
            flat.optimizer_shard.updating()
            with span("update", flat.key):
                self.bound.step_some({flat.optimizer_shard}, steps_before)
            flat.gradient.mark_applied(norm)

    def shards_to_write(self) -> dict[str, torch.Tensor]:
        """Return, by key of their flat buffer, the shards that an optimizer kernel can write while
        it has the new master weights in registers.
        """
        if not self.bound.takes_shards():
            return {}
        flats = [
            flat
            for flat in self.model.trainable
            if flat.optimizer_shard.has_separate_master
            and flat.gradient.state is not GradState.APPLIED
            and flat.cast_master is None
            and not flat.spec.momentum_blocks
            and not flat.spec.sends_differences
            and not flat.optimizer_shard.offloaded
            and not flat.shard_offloaded
        ]
        return {flat.key: flat.shard_memory() for flat in flats}

    def run_pre_hooks(self) -> None:
        """Run the optimizer's own pre hooks, and take over what they write to parameters."""
        self.bound.run_pre_hooks(self.take_hook_writes)
        self.take_user_writes()

    def take_hook_writes(self, ends_step: bool = False) -> None:
        """Take over what a hook of the step has written to parameters, and to members of groups,
        before others read the weights; with ``ends_step`` no other hook follows (collective).
        """
        writes = self.bound.members.writes
        if any(differ() for differ in self.feature_hooks.weights_differ):
            writes.accept()  # the ranks take them when their weights become equal
            return
        self.take_user_writes()
        copies = [flat for flat in self.model.trainable if flat.copies_master]
        if ends_step or (copies and self.model.mesh.largest("writes to members", writes.pending)):
            for flat in copies:
                flat.count_change()
            self.model.schedule.refresh(copies, copies)
            writes.accept()
            if not ends_step:
                self.model.lend_to_hooks()

    def take_member_writes(self) -> None:
        """Let whole weights that are about to be read have what a script has written to members of
        groups: in a hook of the step (collective). Elsewhere raise PartitionError.
        """
        if self.bound is not None and self.bound.members.phase.in_hook:
            self.take_hook_writes()
        elif self.bound is not None:
            self.bound.members.writes.refuse()

    def scaled_rates(self) -> AbstractContextManager[None]:
        """Return a context with the learning rate of each group multiplied by ``lr_scale``."""
        return NOTHING if self.lr_scale == 1.0 else scaled_rates(self.bound.groups, self.lr_scale)

    @contextmanager
    def changing_state(self) -> Iterator[None]:
        """Context for changes of shards and optimizer state, with a script's writes taken over."""
        with self.model.schedule.shards.writing(), self._updating_state():
            self.take_user_writes()
            yield

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Context in which a graph captures an update, instead of running it."""
        self._is_captured = True
        try:
            yield
        finally:
            self._is_captured = False

    @contextmanager
    def _updating_state(self) -> Iterator[None]:
        self.updates_state = True
        try:
            yield
        finally:
            self.updates_state = False

    def take_user_writes(self) -> None:
        """Copy a script's writes to whole parameters into shards and master weights. Raises
        PartitionError for units updated in the backward.
        """
        for unit in self.model.units:
            if self.updater.backward_update is not None and (
                unit in self.updater.units_updated_in_backward
                or any(flat.gradient.state is GradState.APPLIED for flat in unit.trainable_flats)
            ):
                for flat in unit.trainable_flats:
                    for name in flat.user_writes.names():
                        self.changes.refuse_until_step(f"a write to {name}")
            unit.take_user_writes()

    def _warn_of_hooks(self) -> None:
        """Warn once of hooks before the optimizer's step that do not see all gradients."""
        if self._warned_of_hooks:
            return
        self._warned_of_hooks = True
        if self.updater.units:
            log_rank0(
                "hooks before the optimizer's step find no gradients of the parameters that "
                "zero_optimization.offload_optimizer updates, and change nothing of their update; "
                "if they change gradients, switch offload_optimizer off",
                logging.WARNING,
            )
        elif self.model.shards_masters:
            log_rank0(
                "hooks before the optimizer's step find in optimizer.param_groups this rank's "
                "parts of the gradients: a norm of them is not that of the whole gradient; clip "
                "with gradient_clipping, or before optimizer.step()",
                logging.WARNING,
            )

    def waits_for_hooks(self) -> bool:
        """Return whether no rank updates in the backward, because one has hooks before the step:
        gathers of offloaded state follow the order of its updates (collective if anything is
        offloaded). Otherwise each rank looks at its own hooks.
        """
        if not self.model.placement.offloads_anything:
            return False
        hooked = bool(self.bound.optimizer._optimizer_step_pre_hooks)
        return bool(self.model.mesh.largest("hooks before the step", int(hooked)))

    @torch.no_grad()
    def begin_update_in_backward(self, flats: Sequence[FlatBuffer], steps_before: int) -> bool:
        """Update ``flats``, of one unit and all offloaded or none, within the backward, after
        ``steps_before`` steps; ``TrainingEngine.finish_update_in_backward`` makes the rest of the
        update. Their gradients must be complete, and nothing may prevent the step any more. Return
        False if hooks before the step await them.
        """
        if self.bound.optimizer._optimizer_step_pre_hooks:
            return False
        unit, updater = unit_of(flats[0]), self.updater
        if updater.backward_update is None:
            self.bound.members.check()
        if unit.streams.device is not None:
            self._follow_updates(unit.streams.device)
        unit.take_user_writes()
        with self.scaled_rates(), self._updating_state():
            update = updater.backward_update or self.bound.offloaded_update(1.0, steps_before)
            if flats[0].optimizer_shard.offloaded:
                updater.start_in_backward(update, unit)
                for flat in flats:
                    flat.gradient.free_on_device()
            else:
                updater.begin_in_backward(update)
                self._apply(flats, steps_before)
            self.bound.members.writes.accept()
        for flat in flats:
            if flat.follows_updates and not flat.sharded and not flat.gradient.all_unused:
                flat.user_writes.mark_updated()  # the rest of the backward must not read it
        return True

    def _follow_updates(self, device: torch.device) -> None:
        """Let the current stream of ``device`` wait for the last update, which another branch of
        the model may have made on a stream of its own: updates share the optimizer's counters.
        """
        current = streams.current_stream(device)
        streams.wait_for([self._updated_on or current], current)
        self._updated_on = current

    def settings(self) -> list[ParamGroup]:
        """Return the settings of the optimizer's groups with which an update is made now, as
        :func:`compared_settings` does.
        """
        with self.scaled_rates():
            return [compared_settings(group) for group in self.bound.groups]

    def hook_ids(self) -> list[int]:
        """Return the ids of the optimizer's own hooks of its steps."""
        optimizer = self.bound.optimizer
        return [*optimizer._optimizer_step_pre_hooks, *optimizer._optimizer_step_post_hooks]

    def refuse_changed(self) -> None:
        """Raise PartitionError if the optimizer's groups have changed since the update of a part of
        the model in the backward.
        """
        update = self.updater.backward_update
        if update is not None and self.settings() != [*map(compared_settings, update.groups)]:
            self.changes.refuse_until_step("a change of the optimizer's settings")

    def refuse_writes(self) -> None:
        """Raise PartitionError for a script's writes to weights since an update in the backward."""
        for unit in self.model.units:
            # A write waits for the update, so a unit under update has none. take_user_writes raises
            # for a write (``FlatBuffer.refuse_changed``).
            if not any(flat.optimizer_shard.has_update for flat in unit.flats):
                unit.take_user_writes()

    def failed_writes(self) -> str:
        """Return the writes of offloaded state that failed in the last update, on any rank; "" if
        none (collective if something is in files).

        That update is complete even so: what could not be written stays in memory
        (offload/nvme.py, the note).
        """
        model = self.model
        if model.placement.files is None:
            return ""
        self.updater.finish()
        error = model.placement.files.write_error()
        failed = model.mesh.largest("a look at what was written", int(error is not None))
        if not any(model.mesh.gather_from_stages(failed, "whether writes have failed")):
            return ""
        errors = model.mesh.job.all_gather_object(str(error or ""), "writes that failed")
        return "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(errors) if text)

    def synchronize(self) -> None:
        """Make the weights of all ranks equal, before whole weights are read, if steps do not
        always send their changes (collective).
        """
        for synchronize in self.feature_hooks.synchronize:
            synchronize()

    def complete_state(self) -> None:
        """Send unsent parts of the state to their owners, before state is saved (collective)."""
        for complete in self.feature_hooks.complete_state:
            self.model.wait_until_writable()
            complete()

    @contextmanager
    def counted_state(self) -> Iterator[bool]:
        """Context in which the counters and tensors of the optimizer's state belong to one step,
        for readers other than a save. Yields True if they change again at its exit.
        """
        if self.feature_hooks.counted_state:
            self.model.wait_until_writable()
        with ExitStack() as counted:
            changed = [counted.enter_context(hook()) for hook in self.feature_hooks.counted_state]
            yield any(changed)

    def forget_state(self) -> None:
        """Reset the optimizer's state to that before the first step.

        Raises PartitionError if a backward has used it already.
        """
        self.changes.refuse_until_step("optimizer.state.clear()")
        self.model.wait_until_writable()
        self.bound.state.forget()

    def close(self) -> None:
        """Wait for the update under way and its gathers, and raise their first exception."""
        failures = [self.updater.close(), self.model.end_gathers()]
        if self.model.placement.offloads_anything:
            # no copy may outlive the host memory that it reads or fills
            kinds.synchronize(self.model.mesh.device)
        self.gradient.close()
        self.bound, self.feature_hooks = None, NO_HOOKS  # type: ignore[assignment]
        for failure in filter(None, failures):  # the model lacks values of the last step
            raise failure


def failed_write(failed: str) -> OffloadError:
    """Return the error for writes of offloaded state that have ``failed``."""
    return OffloadError(
        f"a write of offloaded state has failed: {failed}. The last step is complete, what could "
        "not be written is in memory: save a checkpoint now, free disk space or fix the path, and "
        "resume"
    )
