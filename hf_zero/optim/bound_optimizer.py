"""The user's optimizer bound to the shards of one rank: it steps segments instead of parameters."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_zero.config.feature_rows import provided
from hf_zero.optim.device_state import DeviceState
from hf_zero.optim.elementwise import update_base
from hf_zero.optim.existing_state import collect
from hf_zero.optim.group_settings import GroupSettings
from hf_zero.optim.members import GroupMembers
from hf_zero.optim.moment_formats import names_in_8_bits
from hf_zero.optim.optimizer_state import OptimizerState
from hf_zero.optim.own_step import POST_HOOKS, OwnStep, taken_hooks
from hf_zero.optim.segment_entries import NarrowStates, SegmentStateAccess
from hf_zero.optim.segment_table import SegmentTable
from hf_zero.optim.segments import Segment
from hf_zero.optim.state_dicts import StateDicts
from hf_zero.optim.step_launch import step_launch
from hf_zero.optim.whole_tensor import ShardRanks, WholeTensorOptimizer

if TYPE_CHECKING:
    from hf_zero.zero.layout.optimizer_shard import OptimizerShard


class BoundOptimizer:
    """``optimizer`` over this rank's flat buffers.

    The object, its group dicts and their number stay; ``group["params"]`` becomes the list of this
    rank's parts of its parameters, frozen ones too (``members.py``), and ``optimizer.state`` is by
    these (``member_states.py``). In a step of torch's code the list has the segments, and
    ``optimizer.state`` is by them: leaf tensors over the master weights, or placeholders where the
    state is offloaded. A group that owns nothing on this rank has a stand-in of one zero there, so
    that its step counters advance as on the other ranks.

    :meth:`step` updates the state on the device. :meth:`offloaded_update` then returns the update
    of the offloaded state, made sub-group by sub-group, usually on another thread.

    Where a group leaves both ``fused`` and ``foreach`` at None, torch has a fused kernel of the
    class for the device and the masters are fp32, ``fused`` is switched on: one pass over memory,
    which also divides by the gradient scale. Its results equal the unfused update's up to
    rounding. ``fused=False`` in the group keeps it off.

    Args:
        optimizer: a torch.optim.Optimizer that can step flat shards (see
            :func:`hf_zero.optim.elementwise.check`).
        flats: this rank's optimizer shard of each flat buffer; only trainable ones are used.
        group_of: parameter name -> index of its group. A trainable parameter without a group is not
            updated.
        parameters: parameter name -> the object the optimizer holds, to find existing state. Such
            state (whole tensors) is cut to this rank's elements.
        kernels: the configuration's ``kernels``: whether one kernel may update all segments
            (``fused.py``).
        moments: storage format of offloaded states that a host rule allows it for: ``"fp32"``,
            ``"bf16"`` or ``"int8"``.
        ranks: the ranks that share ``flats``; None: this rank owns them whole.
        bf16: the state in bf16 between steps; None: none.
        copied: keys of the flat buffers with copies of their master weights.
        members: the name of each parameter of each group, in the order of a script, and that
            parameter if it is frozen: whole, or this rank's part.

    Raises:
        UnsupportedOptimizerError: state exists that cannot be carried over; the optimizer is then
            unchanged.
        ConfigError: ``moments`` in fewer bits for an optimizer whose states must be fp32.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        flats: Sequence[OptimizerShard],
        group_of: Mapping[str, int],
        parameters: Mapping[str, Tensor],
        kernels: str | tuple[str, ...] = "auto",
        moments: str = "fp32",
        ranks: ShardRanks | None = None,
        bf16: NarrowStates | None = None,
        copied: Collection[str] = (),
        members: Sequence[Sequence[tuple[str, Tensor | None]]] = (),
    ) -> None:
        self.optimizer, self.group_of, self.ranks = optimizer, dict(group_of), ranks or ShardRanks()
        self.settings = GroupSettings(optimizer, optimizer.defaults)
        flats = [flat for flat in flats if flat.trainable]
        slots = {slot.name: slot for flat in flats for slot in flat.layout.slots}
        carried = collect(optimizer, parameters, slots, group_of)
        base, self._bf16 = update_base(type(optimizer)), bf16
        in_8_bits = names_in_8_bits(optimizer, parameters, slots, group_of)
        entries = SegmentStateAccess(optimizer, bf16, in_8_bits)
        device = DeviceState(entries, base)
        fused = self._fused = step_launch()(device, base, kernels)
        table = self._table = SegmentTable(base, device, fused, moments, flats, self.group_of)
        if isinstance(optimizer, WholeTensorOptimizer):
            optimizer.tensors = provided("sharded_tensors")(
                optimizer, flats, group_of, lambda: table.segments, self.ranks, kernels
            )
        groups = range(len(self.groups))
        # by default those that train
        members = members or [[(n, None) for n, g in group_of.items() if g == at] for at in groups]
        self.members = GroupMembers(table, members, parameters, copied)
        run_hooks = self.members.shown.by_member.run_hooks
        self._own = OwnStep(base, device, self.members.phase, run_hooks)
        self.state = OptimizerState(table, self.members, carried)
        self.state_dicts = StateDicts(self.state, self.settings)
        self._counted = frozenset[str]()  # parameters that other code updates

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The optimizer's live ``param_groups``."""
        return self.optimizer.param_groups

    def takes_shards(self) -> bool:
        """Return whether the next :meth:`step` can also write the new values into the shards."""
        return self._fused.ready and self._fused.takes(self._not_counted(self._table.stepped))

    def repeats_launch(self) -> bool:
        """Return whether a captured graph can replay the next :meth:`step`: hf-zero's kernel
        updates every segment on the device, with settings read from device memory.
        """
        table, fused = self._table, self._fused
        separate = self._counted or table.offloaded_stand_ins
        return fused.ready and not separate and fused.repeats(table.stepped)

    def prepare_launch(self, shards: Mapping[str, Tensor]) -> list[Tensor]:
        """Write the group settings and kernel tables of the next captured :meth:`step` to the
        device. Return the tensors outside the graph that it reads or writes; the graph is valid for
        their addresses only.
        """
        return self._fused.prepare(self._table.stepped, shards)

    def without_post_hooks(self) -> AbstractContextManager[object]:
        """Return a context in which a step runs none of the optimizer's own post hooks: they run
        once all ranks have the new weights (:meth:`run_post_hooks`).
        """
        return taken_hooks(self.optimizer, POST_HOOKS)

    def launch(self, replay: Callable[[], None]) -> None:
        """Call ``replay``, which launches a step of this optimizer from a graph, with the hooks
        that torch calls for steps of all optimizers.
        """
        with self.without_post_hooks():
            torch.optim.Optimizer.profile_hook_step(lambda _: replay())(self.optimizer)

    def run_pre_hooks(self, between: Callable[[], None] = lambda: None) -> None:
        """Run the optimizer's own pre hooks, as a step of torch does at its beginning, and
        ``between`` after each but the last.
        """
        for at, hook in enumerate([*self.optimizer._optimizer_step_pre_hooks.values()]):
            if at:
                between()
            self._run_hook(hook)

    def run_post_hooks(self, between: Callable[[], None]) -> Exception | None:
        """Run the optimizer's own post hooks, as a step of torch does at its end, and ``between``
        after each but the last. Return the error of a hook, which ends the calls of hooks alone.
        """
        failure = None
        for at, hook in enumerate([*self.optimizer._optimizer_step_post_hooks.values()]):
            if at:
                between()
            if failure is None:
                try:
                    self._run_hook(hook)
                except Exception as error:
                    failure = error
        return failure

    def _run_hook(self, hook: Callable[..., object]) -> None:
        with self.members.phase.running_hook():
            hook(self.optimizer, (self.optimizer,), {})

    def step(
        self,
        grad_scale: Tensor | None = None,
        shards: Mapping[str, Tensor] | None = None,
        steps_before: int = 0,
        without: Collection[OptimizerShard] = (),
        run_pre_hooks: Callable[[], None] | None = None,
    ) -> set[str]:
        """Make one update from the gradients of the flat buffers.

        The kernels of ``fused.py`` read gradients of any float dtype and leave them unchanged. The
        optimizer's own step divides fp32 gradients by ``grad_scale`` in place, and casts 16-bit
        ones into memory that lives as long as the step. Parameters that are ``unused`` in their
        flat buffer are skipped: weight, state and step count stay.

        Args:
            grad_scale: 0-dim tensor that the gradients are divided by (loss scale and clipping in
                one), or None for 1.
            shards: key of a flat buffer -> a tensor to write the new values of its ``owned``
                elements to as well, rounded to its dtype.
            steps_before: number of earlier steps, equal on all ranks: the seed of rounding.
            without: flat buffers that :meth:`step_some` has updated already.
            run_pre_hooks: runs the optimizer's own pre hooks; by default :meth:`run_pre_hooks`.

        Returns:
            The keys of ``shards`` that have been written; empty if the optimizer's own step has
            run.
        """
        optimizer, table, fused = self.optimizer, self._table, self._fused
        self.members.shown.take()
        if self._bf16 is not None and optimizer._optimizer_step_pre_hooks:
            table.separate_members()  # hooks can leave each one out, though all are widened
        left_out, written = self._separate_left_out(table.flats), set[str]()
        segments = table.stepped
        if without:
            segments = [s for s in segments if not s.parts or s.parts[0].flat not in without]
        if left_out:
            segments = [s for s in segments if not (s.parts and left_out.issuperset(s.names))]
        if fused.ready and fused.takes(self._not_counted(table.stepped)):
            written = fused.step(table.stepped, segments, grad_scale, shards or {}, True)
        else:
            hooks = run_pre_hooks or self.run_pre_hooks
            self._step_by_class(segments, grad_scale, steps_before, hooks)
        # A scheduler made after binding wraps ``optimizer.step`` to set this flag; the step above
        # does not call through that wrapper.
        optimizer._opt_called = True  # type: ignore[attr-defined]
        for segment in self._counted_segments() if self._counted else ():
            self._table.entries.states[segment.tensor]["step"] += 1
        # without a gradient scale on the device, unlike the other segments
        if table.offloaded_stand_ins:
            self._own.step_stand_ins(table.offloaded_stand_ins)
        return written

    def count_only(self, names: frozenset[str]) -> None:
        """Leave the parameters ``names`` to other code, until the next call: steps of the optimizer
        only count them, also where no rank has used them. Create missing state with its initial
        values.
        """
        self._counted = names
        self._table.separate(self.members.shown.segments, names)
        for segment in self._counted_segments():
            self._table.state_of(segment).create(segment)

    def _counted_segments(self) -> list[Segment]:
        return [s for s in self._table.stepped if self._counted & s.names]

    def _not_counted(self, segments: Sequence[Segment]) -> Sequence[Segment]:
        """Return those of ``segments`` that a step of the optimizer updates."""
        counted = self._counted
        return [s for s in segments if counted.isdisjoint(s.names)] if counted else segments

    def step_some(self, flats: Collection[OptimizerShard], steps_before: int) -> None:
        """Update ``flats`` alone, whose gradients share no memory with other gradients.
        :meth:`step` updates the rest, with the hooks of the optimizer.
        """
        self.members.shown.take()
        left_out, fused = self._separate_left_out(flats), self._fused
        segments = [segment for flat in flats for segment, _ in self._table.parts(flat)]
        if left_out:
            segments = [segment for segment in segments if not left_out.issuperset(segment.names)]
        if segments and fused.ready and fused.takes(segments):
            fused.step(self._table.stepped, segments, None, {}, False)
        elif segments:
            self._step_by_class(segments, None, steps_before, None)

    def _separate_left_out(self, flats: Collection[OptimizerShard]) -> frozenset[str]:
        """Return the parameters that an update of ``flats`` leaves out, and part their segments."""
        left_out = self._counted
        for flat in flats:
            left_out |= flat.gradient.unused
        if left_out:
            self._table.separate(self._not_counted(self._table.stepped), left_out)
        return left_out

    def _step_by_class(
        self,
        segments: list[Segment],
        grad_scale: Tensor | None,
        steps_before: int,
        run_pre_hooks: Callable[[], None] | None,
    ) -> None:
        """Step ``segments`` by the optimizer's own code; ``run_pre_hooks`` None: without any hooks
        of the optimizer.
        """
        if self._fused.ready:
            self._fused.separate_counters()
        if self._bf16 is None:
            step = self._own.step_without_hooks if run_pre_hooks is None else None
            self._own.update(segments, grad_scale, step, run_pre_hooks)
        else:
            self._own.update_rounded(segments, grad_scale, steps_before, run_pre_hooks)

    def offloaded_update(self, divisor: float, steps_before: int) -> Any:
        """Return the update of all offloaded state, with the group settings of this moment; step
        counters advance as flat buffers are announced.

        ``steps_before``, the number of earlier steps, is equal on all ranks: it seeds rounding.
        """
        used, step_sub_group = self._table.used_segments, self._own.update_sub_group
        return self._table.offloaded.offloaded_update(used, step_sub_group, divisor, steps_before)
