"""The user's optimizer bound to the shards of one rank: it steps segments instead of parameters."""

from __future__ import annotations

from collections import ChainMap, OrderedDict, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.optimizer import StateDict

from hf_zero.config.feature_rows import provided
from hf_zero.errors import PartitionError, UnsupportedOptimizerError
from hf_zero.logging import listed
from hf_zero.offload.storage import COMPENSATION, MASTER
from hf_zero.ops.coded_arrays import CodedArray
from hf_zero.optim import snapshots
from hf_zero.optim.device_state import DeviceState
from hf_zero.optim.elementwise import BEGIN_WITH_GRADIENT, adopt_states, update_base
from hf_zero.optim.existing_state import Carried, collect
from hf_zero.optim.group_settings import SharedSettings, load_settings, plain_settings, scaled_rates
from hf_zero.optim.initial_state import InitialStates, initial_state, kept_states
from hf_zero.optim.members import GroupMember, GroupsInStep, HiddenStates, member_class
from hf_zero.optim.moment_formats import names_in_8_bits
from hf_zero.optim.own_step import OwnStep
from hf_zero.optim.segment_entries import NarrowStates, SegmentStateAccess, copy_of
from hf_zero.optim.segment_table import (
    GroupReport,
    GroupScalars,
    ParameterScalars,
    SegmentTable,
    WholeTensorState,
    report_of,
)
from hf_zero.optim.segments import ParamGroup, ParamState, Segment, masters
from hf_zero.optim.step_launch import step_launch
from hf_zero.optim.whole_tensor import ShardRanks, WholeTensorOptimizer
from hf_zero.zero.layout.flat_layout import Slot

if TYPE_CHECKING:
    from hf_zero.zero.layout.training_state import OptimizerShard

# writes to members, which other ranks or copies of the weights miss
_writes_to = attrgetter("member_writes")


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
        self.optimizer = optimizer
        self.group_of = dict(group_of)
        self.settings = SharedSettings(optimizer, optimizer.defaults)
        self._base = update_base(type(optimizer))
        self._bf16 = bf16
        self._groups = GroupsInStep()
        self._entries = SegmentStateAccess(optimizer, bf16)
        device = DeviceState(self._entries, self._base, self._base in BEGIN_WITH_GRADIENT)
        self.device_state = device
        self._own = OwnStep(optimizer, self._base, bf16, self._groups, device)
        self._fused = step_launch()(optimizer, self._base, self._own.step, kernels, device, bf16)
        # by default those that train
        self._members = members or [
            [(name, None) for name, group in group_of.items() if group == index]
            for index in range(len(optimizer.param_groups))
        ]
        self._table = SegmentTable(self._entries, self._base, device, self._fused, moments)
        self.group_scalars = GroupScalars(self._entries, self._table)
        self.tensor_state = WholeTensorState(self._entries, self._table)
        self.initial_states = InitialStates(self._entries)
        self.offloaded_segments = self._table.offloaded.segments
        self._counted = frozenset[str]()  # parameters that other code updates
        self.step_sub_group = self._own.sub_group
        self.in_hook = False  # a hook of a step is under way
        self._flats, self.ranks = [flat for flat in flats if flat.trainable], ranks or ShardRanks()
        if isinstance(optimizer, WholeTensorOptimizer):
            table, sharded_tensors = self._table, provided("sharded_tensors")
            optimizer.tensors = sharded_tensors(
                optimizer, self._flats, group_of, lambda: table.segments, self.ranks, kernels
            )
        slots: dict[str, Slot] = {
            slot.name: slot for flat in self._flats for slot in flat.layout.slots
        }
        # parameters with moments in 8 bits
        self.names_in_8_bits = names_in_8_bits(optimizer, parameters, slots, group_of)
        self._table.names_in_8_bits = self.names_in_8_bits
        carried = collect(optimizer, parameters, slots, group_of)
        groups = {group_of[name] for name in slots if name in group_of}
        self._table.bind(self._flats, self.group_of, groups)
        self._list_members(parameters, copied)
        self._table.take_writes = self.take_writes
        if carried.scalars:
            self._load(carried)

    def _list_members(self, parameters: Mapping[str, Tensor], copied: Collection[str]) -> None:
        """Write the members into the groups, and let ``optimizer.state`` be by them. ``copied``:
        keys of the flat buffers whose copies of master weights a script's writes would miss.
        """
        # members of a flat buffer share a count of changes, which steps leave as it is
        memory = {flat.key: flat.memory_of_members() for flat in self._flats}
        kinds = {key: member_class(values) for key, values in memory.items()}
        # others refuse writes
        writable = {key for key, kind in kinds.items() if kind is GroupMember}
        self._watched = [flat for flat in self._flats if flat.key in writable.intersection(copied)]
        self._parts = snapshots.parts_of(self._members, self._flats)
        self._lists = list[list[Tensor]]()  # kept so that no other list can have its id
        for parts, members in zip(self._parts, self._members):
            self._lists.append([])
            for part, (name, frozen) in zip(parts, members):
                member: Any = frozen
                if part.flat is not None:
                    # without calls of Python, of which a large model would make many
                    elements = memory[part.flat.key].narrow(0, part.start, part.last - part.first)
                    kind = kinds[part.flat.key]
                    member = Tensor._make_subclass(kind, elements.view(part.shape), False)
                    member.shard, member.groups = part.flat, self._groups
                if isinstance(member, GroupMember):
                    member.parameter = parameters.get(name)
                self._lists[-1].append(member)
        self._identities = list[int]()
        for group, stand_ins in zip(self.groups, self._lists):
            group["params"] = stand_ins
            self._identities += id(stand_ins), *map(id, stand_ins)
        states = provided("member_states", HiddenStates)
        self.states: Any = states(self._entries, self._table, self._lists, self._parts, self.forget)
        self._own.run_hooks = self.states.run_hooks
        self.accept_writes()
        self.show_states()

    def show_states(self) -> None:
        """Let ``optimizer.state`` be by member, in place of what torch, or a script, has set."""
        self.optimizer.state = self.states

    def wait_with(self, wait: Callable[[], object]) -> None:
        """Let reads of the state call ``wait`` first, which waits for the update of offloaded state
        unless the engine itself updates it now.
        """
        self._entries.wait = wait

    def take_writes(self) -> None:
        """Store what a script has written to ``optimizer.state``."""
        now: Any = self.optimizer.state
        if now is not self.states and now is not self._entries.states:
            self.show_states()
            self.states.replace(now)
        if self.states.open:
            self.states.take()

    def _load(self, carried: Carried) -> None:
        """Load the state that parameters had before they were cut."""
        for flat in self._flats:
            for piece in list(flat.layout.pieces(*flat.owned)):
                first = piece.offset - flat.owned[0]
                for kind, whole in carried.per_element.get(piece.name, {}).items():
                    self._load_state(flat, kind, whole[piece.start : piece.stop], first)
        self.load_by_parameter(carried.scalars)
        self.tensor_state.load(carried.tensor_state)

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The optimizer's live ``param_groups``."""
        return self.optimizer.param_groups

    def check_groups(self) -> None:
        """Raise PartitionError if the optimizer's groups are others, in another order or with other
        members than the engine has given them: groups are found by their place; or if a script
        has written to members where other ranks, or copies of the weights, miss that.
        """
        if self._groups.in_step:  # they have the segments
            return
        self.take_writes()
        identities: list[int] = []
        for group in self.optimizer.param_groups:
            identities += id(group["params"]), *map(id, group["params"])
        if identities != self._identities:
            raise PartitionError(
                f"optimizer.param_groups of {type(self.optimizer).__name__} was reordered, or "
                "groups or members were added, removed or moved, and an engine finds groups by "
                "their place; undo that, and call optimizer.add_param_group, engine.replace or "
                "parameter.requires_grad_(False), or change the settings of a group (lr) instead"
            )
        if sum(map(_writes_to, self._watched)) != self._accepted_writes:
            self.refuse_written_members()

    @property
    def members_written(self) -> bool:
        """Whether a script has written to members that other ranks, or copies of the weights, have
        the former values of.
        """
        return bool(sum(map(_writes_to, self._watched)) != self._accepted_writes)

    def refuse_written_members(self) -> None:
        """Raise PartitionError if :attr:`members_written`."""
        if self.members_written:
            remedy = "register what reads the weights as another hook, after this one"
            if not self.in_hook:
                remedy = (
                    "load a checkpoint, and write to the parameters of the model, or in a hook "
                    "after the step (optimizer.register_step_post_hook)"
                )
            raise PartitionError(
                f"the members of optimizer.param_groups of {type(self.optimizer).__name__} were "
                f"written to {'in this hook' if self.in_hook else 'between steps'}; they are this "
                "rank's parts of the master weights, and other ranks and copies of the weights "
                f"miss that; {remedy}"
            )

    def accept_writes(self) -> None:
        """Note that all writes to members of groups so far are taken over."""
        self._accepted_writes = sum(map(_writes_to, self._watched))

    # ---- stepping ----

    def scaled_rates(self, factor: float) -> AbstractContextManager[None]:
        """Return a context with the learning rate of each group multiplied by ``factor``."""
        return nullcontext() if factor == 1.0 else scaled_rates(self.groups, factor)

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

    @contextmanager
    def without_post_hooks(self) -> Iterator[None]:
        """Context in which a step runs none of the optimizer's own post hooks: they run once all
        ranks have the new weights (:meth:`run_post_hooks`).
        """
        optimizer = self.optimizer
        hooks = optimizer._optimizer_step_post_hooks
        optimizer._optimizer_step_post_hooks = OrderedDict()
        try:
            yield
        finally:
            optimizer._optimizer_step_post_hooks = hooks

    def launch(self, replay: Callable[[], None]) -> None:
        """Call ``replay``, which launches a step of this optimizer from a graph, with the hooks
        that torch calls for steps of all optimizers.
        """
        with self.without_post_hooks():
            torch.optim.Optimizer.profile_hook_step(lambda _: replay())(self.optimizer)

    @property
    def is_stepping(self) -> bool:
        """Return whether a step is under way, whose members have the gradients."""
        return self._groups.in_step

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
        self.in_hook = True
        try:
            hook(self.optimizer, (self.optimizer,), {})
        finally:
            self.in_hook = False

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
        optimizer: Any = self.optimizer
        table = self._table
        self.take_writes()

        def rest() -> list[Segment]:
            return [s for s in table.stepped if not s.parts or s.parts[0].flat not in without]

        segments, hooks = rest if without else None, run_pre_hooks or self.run_pre_hooks
        written = self._step(segments, self._flats, grad_scale, shards or {}, steps_before, hooks)
        # A scheduler made after binding wraps ``optimizer.step`` to set this flag; the step above
        # does not call through that wrapper.
        optimizer._opt_called = True
        for segment in self._counted_segments() if self._counted else ():
            self._entries.states[segment.tensor]["step"] += 1
        # without a gradient scale on the device, unlike the other segments
        if table.offloaded_stand_ins:
            self._own.stand_ins(table.offloaded_stand_ins)
        return written

    def count_only(self, names: frozenset[str]) -> None:
        """Leave the parameters ``names`` to other code, until the next call: steps of the optimizer
        only count them, also where no rank has used them. Create missing state with its initial
        values.
        """
        self._counted = names
        self._table.separate(self._table.segments, names)
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

        def segments() -> list[Segment]:
            return [segment for flat in flats for segment, _ in self._table.parts(flat)]

        self._step(segments, flats, None, {}, steps_before)

    def _step(
        self,
        of_step: Callable[[], list[Segment]] | None,
        flats: Collection[OptimizerShard],
        grad_scale: Tensor | None,
        shards: Mapping[str, Tensor],
        steps_before: int,
        run_pre_hooks: Callable[[], None] | None = None,
    ) -> set[str]:
        """Step the segments that ``of_step`` returns, all in ``flats``; None: all segments. Return
        the keys of ``shards`` that were written. ``run_pre_hooks``: None: without any hooks of the
        optimizer.
        """
        table, fused, hooks = self._table, self._fused, run_pre_hooks is not None
        if hooks and self._bf16 is not None and self.optimizer._optimizer_step_pre_hooks:
            table.separate_members()  # hooks can leave each one out, though all are widened
        segments = table.stepped if of_step is None else of_step()
        left_out = self._counted
        for flat in flats:
            left_out |= flat.gradient.unused
        if left_out:
            table.separate(self._not_counted(segments), left_out)
            segments = table.stepped if of_step is None else of_step()
            segments = [s for s in segments if not (s.parts and left_out.issuperset(s.names))]
        if not segments and not hooks:
            return set()
        if fused.ready and fused.takes(self._not_counted(table.stepped) if hooks else segments):
            return fused.step(table.stepped, segments, grad_scale, shards, hooks)
        if fused.ready:
            fused.separate_counters()
        if self._bf16 is None:
            step = None if hooks else self._own.bare
            self._own.update(segments, grad_scale, step, run_pre_hooks)
        else:
            self._own.update_rounded(segments, grad_scale, steps_before, run_pre_hooks)
        return set()

    # ---- the second half of a step: offloaded state ----

    def offloaded_update(self, divisor: float, steps_before: int) -> Any:
        """Return the update of all offloaded state, with the group settings of this moment; step
        counters advance as flat buffers are announced.

        ``steps_before``, the number of earlier steps, is equal on all ranks: it seeds rounding.
        """
        return self._table.offloaded.offloaded_update(self, divisor, steps_before)

    def used_segments(self, flat: OptimizerShard) -> list[Segment]:
        """Return the segments of ``flat``, whose state is offloaded, without those of unused
        parameters.
        """
        table, unused = self._table, flat.gradient.unused
        if unused:
            table.separate(table.offloaded.segments(flat), unused)
        return [s for s in table.offloaded.segments(flat) if not unused.issuperset(s.names)]

    def move_to_device(self, moved: Mapping[str, Callable[[], None]]) -> None:
        """Move the optimizer state of some flat buffers from their offload tier to the device,
        until the engine ends. ``moved``: key of a flat buffer -> function that moves its master
        weights and gradient memory.
        """
        flats = {flat.key: flat for flat in self._flats}
        scalars, shared = self.group_scalars.of_parameters(), self.group_scalars.scalars()
        tensor_state, segments = self.tensor_state.by_parameter(), self._table.segments
        not_begun = {name for s in segments if not s.begun for name in s.names}
        # states already on the device are cut anew together with those that move there
        tensors_by_key = {
            flat.key: self.tensors(flat)
            for flat in self._flats
            if flat.key in moved or not flat.offloaded
        }
        for move in moved.values():
            move()
        groups = {segment.group for segment in self._table.segments}
        self._table.bind(self._flats, self.group_of, groups)
        memory = {flat.key: flat.memory_of_members() for flat in self._flats}
        for member, part in zip(chain(*self._lists), chain(*self._parts)):
            if isinstance(member, GroupMember) and part.flat is not None:
                member.move(part.of(memory[part.flat.key]))
        for key, tensors in tensors_by_key.items():
            for name, tensor in tensors.items():
                self.load_tensor(flats[key], name, tensor)
        self.group_scalars.load(scalars, shared)
        for segment in self._table.segments:
            exists = segment.offloaded or bool(self._entries.of(segment))
            segment.begun = exists and not_begun.isdisjoint(segment.names)
        self.tensor_state.load(tensor_state)

    # ---- state, per flat and per group ----

    def arrays(self, flat: OptimizerShard) -> Mapping[str, Tensor]:
        """Return ``"master"`` and each per-element state of ``flat`` that exists, 1-D over
        ``flat.owned``. On the device these are writable views; offloaded and 8-bit ones may be
        copies, made where they are read, to be changed with :meth:`load_tensor`.
        """
        self.take_writes()
        table = self._table
        return table.offloaded.arrays(flat) if flat.offloaded else table.device.arrays(flat)

    def tensors(self, flat: OptimizerShard) -> dict[str, Tensor]:
        """Return the :meth:`arrays` of ``flat``, all of them in memory."""
        return dict(self.arrays(flat))

    def existing(self) -> dict[str, set[str]]:
        """Return by parameter the names of the per-element states that exist on this rank."""
        names: dict[str, set[str]] = {}
        for segment in self._table.segments:
            kinds = self._entries.elementwise(segment).keys()
            for name in segment.names if segment.parts and kinds else ():
                if name in self.group_of:
                    names.setdefault(name, set()).update(kinds)
        return names

    def load_tensor(self, flat: OptimizerShard, name: str, tensor: Tensor, first: int = 0) -> None:
        """Copy ``tensor`` (1-D) into the masters or a state, from element ``first`` of
        ``flat.owned`` on; create state of these elements that does not exist yet.

        Elements whose group keeps no such state (SGD's momentum may be on in one group only) are
        skipped. As in torch, a momentum that is switched off keeps its state; where it has none,
        values that are all zeros create none. The caller holds ``flat.writing()``.

        Raises:
            UnsupportedOptimizerError: no group keeps a state of that name.
        """
        self.create_offloaded(flat)  # settings of groups may be new
        if name == MASTER:
            flat.store_master(tensor, first)
        else:
            self._load_state(flat, name, tensor, first)

    def _load_state(self, flat: OptimizerShard, name: str, tensor: Tensor, first: int) -> None:
        """Load state ``name`` as :meth:`load_tensor`."""
        self.group_scalars.writes += 1
        touched = self._table.parts(flat, first, first + tensor.numel())
        for segment, _ in touched:
            if tensor._base is not None and not self._entries.states.get(segment.tensor):
                tensor = tensor.clone()  # a view of arrays, in which the creation of state writes
            self._table.state_of(segment).create(segment)
        having = {segment for segment, _ in touched if name in self._entries.of(segment)}
        if flat.offloaded and touched and len(having) == len(touched):
            self._table.offloaded.load_tensor(flat, name, tensor, first)
            return
        if touched and not (having or self.initial_states.some_group_keeps(name, masters(flat))):
            have = sorted(
                {key for segment, _ in touched for key in self._entries.elementwise(segment)}
            )
            raise UnsupportedOptimizerError(
                f"optimizer {type(self.optimizer).__name__} keeps no state {name!r} for "
                f"{flat.key!r} (it keeps {have}); the state was saved by another optimizer or with "
                "other options. Use the same optimizer, or load without optimizer states."
            )
        for segment, part in touched:
            start, group = max(part.start, first), segment.group
            values, at = tensor[start - first : part.stop - first], part.offset + start - part.start
            keeps = segment in having or name in self.initial_states.of_group(group, masters(flat))
            if keeps or (self.initial_states.is_switched_off(group, name) and bool(values.any())):
                self._table.state_of(segment).put(segment, name, at, values)

    def create_offloaded(self, flat: OptimizerShard) -> bool:
        """Create the missing state of the offloaded ``flat``, with its values before a first step;
        return whether all of its segments already had state with such values. A load calls this
        first, because creation overwrites storage, and torch's ``load_state_dict`` has dropped
        entries.
        """
        return flat.offloaded and self._table.offloaded.create_missing(flat)

    def forget(self) -> None:
        """Reset all state, offloaded state too, to that before the first step."""
        self.states.discard()
        self.group_scalars.note_load([])
        self._entries.states.clear()
        self._table.join({})  # no parameter has been left out of a step
        self.drop_state()
        self._table.offloaded.reset_all()

    def by_parameter(
        self,
        names: Mapping[str, str],
        gather: Callable[[Mapping[str, ParameterScalars]], list[Mapping[str, ParameterScalars]]],
    ) -> dict[str, ParameterScalars]:
        """Return the scalar states (step count) of this rank's parameters that have a group, as the
        ranks with their elements have them; None for one never stepped.

        ``names``: this rank's names -> names in the whole model. ``gather`` returns its argument of
        every rank (collective).
        """
        own_flats = [flat for flat in self._flats if flat.spec.saves_shard]  # not of replicas
        reported = {slot.name for flat in own_flats for slot in flat.layout.slots}
        numbers = self.group_scalars.of_parameters().items()
        reports = gather({names[name]: own for name, own in numbers if name in reported})
        known = dict[str, ParameterScalars](ChainMap(*map(dict, reports)))
        # an empty tensor has no elements on any rank
        own = {name: known[whole] for name, whole in names.items() if whole in known}
        shared = [report_of(of)[0] for of in self._by_group(own)]
        return {name: own.get(name, shared[group]) for name, group in self.group_of.items()}

    def reports(self, whole: Callable[[str], str]) -> list[GroupReport]:
        """Return the report on the parameters of each group that have elements on this rank;
        ``whole`` returns names in the whole model.
        """
        of_groups = self._by_group(self.group_scalars.of_parameters())
        return [report_of({whole(n): own for n, own in of.items()}) for of in of_groups]

    def load_by_parameter(self, scalars: Mapping[str, ParameterScalars]) -> None:
        """Load the ``scalars`` of each parameter that a group has; one that is missing there begins
        without state. Raises UnsupportedOptimizerError for a scalar that a group does not keep.
        """
        shared = [report_of(of_group)[0] for of_group in self._by_group(scalars)]
        self.group_scalars.load(scalars, shared)

    def _by_group(
        self, scalars: Mapping[str, ParameterScalars]
    ) -> list[dict[str, ParameterScalars]]:
        """Return the ``scalars`` of the parameters of each group."""
        of_groups: list[dict[str, ParameterScalars]] = [{} for _ in self.groups]
        for name, group in self.group_of.items():
            if name in scalars:
                of_groups[group][name] = scalars[name]
        return of_groups

    def hyperparameters(self) -> list[ParamGroup]:
        """Return per group the settings that a checkpoint keeps, as JSON-able values (see
        :func:`hf_zero.optim.group_settings.plain_settings`).
        """
        return [plain_settings(group) for group in self.groups]

    def load_hyperparameters(self, saved: Sequence[Mapping[str, object]]) -> None:
        """Write ``saved`` into the live group dicts, so that a schedule continues from there."""
        self._same_groups(saved, "hyperparameters")
        for group, values in zip(self.groups, saved):
            load_settings(group, values)

    def state_dict(self, pack: Callable[[], StateDict]) -> StateDict:
        """Return what ``pack``, the optimizer's own ``state_dict``, returns over this rank's parts
        of the parameters of its groups; whole ones have the shape of their parameter. Those that
        were never stepped have no entry, as in torch. Offloaded state is read into memory.
        """
        optimizer, table, entries = self.optimizer, self._table, self._entries
        parts = self._parts
        arrays = {
            flat.key: table.offloaded.copies(flat) if flat.offloaded else self.tensors(flat)
            for flat in self._flats
        }
        states: defaultdict[Tensor, ParamState] = defaultdict(dict)
        for part, member in zip(chain(*parts), chain(*self._lists)):
            if part.flat is None or part.first == part.last:
                continue
            segment, _ = table.parts(part.flat, part.start, part.stop)[0]
            entry, own = entries.of(segment).items(), arrays[part.flat.key]
            if entry and (segment.begun or not segment.offloaded):
                states[member] = {
                    name: part.of(own[name]) if name in own else copy_of(value)
                    for name, value in entry
                }
        kept, between = optimizer.state, [group["params"] for group in self.groups]
        try:
            optimizer.state = states
            for group, params in zip(self.groups, self._lists):
                group["params"] = params
            packed = pack()
        finally:
            optimizer.state = kept
            for group, params in zip(self.groups, between):
                group["params"] = params
        return snapshots.described(packed, parts, self.group_scalars.scalars(), self._flats)

    def with_parts(self, packed: StateDict) -> StateDict:
        """Return ``packed``, a state dict of this model, with the part of each entry: whole
        parameters, or the parts of this rank, if it has none. Raises UnsupportedOptimizerError for
        other groups.
        """
        self._same_groups(packed["param_groups"], "a state dict")
        if snapshots.KEY in packed:
            return packed
        parts = self._parts
        saved, live = [len(group["params"]) for group in packed["param_groups"]], [*map(len, parts)]
        if saved != live:
            raise UnsupportedOptimizerError(
                f"a state dict of {saved} parameters a group cannot go into optimizer "
                f"{type(self.optimizer).__name__}, which has {live}; load one of the same groups, "
                "or use load_checkpoint"
            )
        given = iter(range(sum(live)))
        states = {entry: dict(of) for entry, of in packed["state"].items()}
        adopt_states(self.optimizer, states.values())
        read = [
            [part.read_as(states.get(entry, {})) for part, entry in zip(of, given)] for of in parts
        ]
        return snapshots.described(packed | {"state": states}, read, None, self._flats)

    def refuse_unkept(
        self,
        kinds: Collection[str],
        numbers: Sequence[Collection[str]],
        settings: Sequence[ParamGroup],
    ) -> None:
        """Raise UnsupportedOptimizerError if, with the ``settings`` of its groups in a state dict,
        no group keeps a state of one of the ``kinds``, or a group not one of its ``numbers``.
        """
        segments = self._table.segments
        present = {MASTER, COMPENSATION}.union(*(self._entries.of(s).keys() for s in segments))
        if present.issuperset(chain(kinds, *numbers)):
            return
        kept = list[set[str]]()
        for group, saved in zip(self.groups, settings):
            new = {**group, **plain_settings(saved)}
            first = initial_state(self.optimizer, new, torch.zeros(1))
            kept.append(present | first.keys() | kept_states(self.optimizer, new))
        unknown = set(kinds).difference(*kept)
        unknown = unknown.union(*(set(own) - names for own, names in zip(numbers, kept)))
        if unknown:
            keeps = sorted(set().union(*kept) - {MASTER, COMPENSATION})
            raise UnsupportedOptimizerError(
                f"a state dict has state {listed(sorted(unknown), 6)}, and optimizer "
                f"{type(self.optimizer).__name__} keeps {', '.join(keeps)}: remove it from the "
                "dict, or load into the optimizer that saved it; nothing was loaded"
            )

    def drop_state(self) -> None:
        """Drop all entries and the state on the device, as a load of torch does, which must follow.
        Offloaded arrays stay, for the load to write to.
        """
        self.states.discard()
        self.show_states()
        self._entries.states.clear()
        self._fused.separate_counters()
        self._table.device.reset_all()

    def settings_of(self, packed: StateDict) -> StateDict:
        """Return ``packed`` without its entries, for the optimizer's own ``load_state_dict``."""
        sizes = [len(group["params"]) for group in self.groups]
        groups = [
            {**group, "params": [*range(size)]}
            for group, size in zip(packed["param_groups"], sizes)
        ]
        return {**packed, "state": {}, "param_groups": groups}

    def version(self) -> tuple[Hashable, ...]:
        """Return a value that changes with every load, in-place write or replacement of optimizer
        state. A step may change it, too.
        """
        self.take_writes()
        entries = self._entries.states.values()
        # a list: an update on another thread may add entries
        values = [value for entry in entries for value in list(entry.values())]
        codes = [value.codes if isinstance(value, CodedArray) else value for value in values]
        tensors = [value for value in codes if torch.is_tensor(value)]
        versions = tuple((id(tensor), tensor._version) for tensor in tensors)
        return self.group_scalars.loads, self.group_scalars.writes, versions

    def keeps_errors(self, flat: OptimizerShard) -> bool:
        """Return whether rounding errors of the master weights of ``flat`` are kept."""
        kahan = self._bf16 is not None and self._bf16.kahan
        return kahan and flat.has_master and flat.contents.dtype(MASTER) == torch.bfloat16

    def keeps(self, name: str) -> bool:
        """Return whether a group of this optimizer keeps a state ``name``, or would with a
        momentum, as far as its class shows without a step.
        """
        narrow = self._bf16 is not None and self._bf16.masters
        like = torch.zeros(1, dtype=torch.bfloat16 if narrow else torch.float32)
        return self.initial_states.some_group_keeps(name, like)

    def _same_groups(self, saved: Sequence[object], what: str) -> None:
        if len(saved) != len(self.groups):
            raise UnsupportedOptimizerError(
                f"{what} of {len(saved)} groups cannot go into optimizer "
                f"{type(self.optimizer).__name__} with {len(self.groups)}; build the "
                "optimizer with the groups it was saved with, or load without optimizer states"
            )
