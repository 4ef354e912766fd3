"""What a script has of an optimizer between steps under an engine: the members of its groups, in
the script's own order, its writes to them, and ``optimizer.state``. A step of torch's code has
segments (``segments.py``) in place of members.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from torch import Tensor

from hf_zero.config.feature_rows import provided
from hf_zero.errors import PartitionError
from hf_zero.optim.group_member import GroupMember, member_class
from hf_zero.optim.own_step import OptimizerPhase
from hf_zero.optim.segment_table import SegmentTable
from hf_zero.optim.segments import Segment
from hf_zero.optim.snapshots import parts_of
from hf_zero.optim.state_by_member import HiddenStates, StateByMember

if TYPE_CHECKING:
    from hf_zero.zero.layout.optimizer_shard import OptimizerShard

_writes_to = attrgetter("member_writes")


class MemberWrites:
    """A script's writes to members over ``flats``, which other ranks, or copies of the weights,
    miss until the engine takes them over.

    ``phase``: that of the optimizer, of class ``name``.
    """

    def __init__(self, flats: Sequence[OptimizerShard], phase: OptimizerPhase, name: str) -> None:
        self._flats, self._phase, self._name = flats, phase, name
        self._accepted = 0
        self.accept()

    @property
    def pending(self) -> int:
        """The number of writes that are not taken over."""
        return int(sum(map(_writes_to, self._flats))) - self._accepted

    def accept(self) -> None:
        """Record that all writes so far are taken over."""
        self._accepted += self.pending

    def refuse(self) -> None:
        """Raise PartitionError if any are :attr:`pending`."""
        if not self.pending:
            return
        where = "in this hook"
        remedy = "register what reads the weights as another hook, after this one"
        if not self._phase.in_hook:
            where = "between steps"
            remedy = (
                "load a checkpoint, and write to the parameters of the model, or in a hook after "
                "the step (optimizer.register_step_post_hook)"
            )
        raise PartitionError(
            f"the members of optimizer.param_groups of {self._name} were written to {where}; they "
            "are this rank's parts of the master weights, and other ranks and copies of the "
            f"weights miss that; {remedy}"
        )


class ShownState:
    """``optimizer.state`` of the optimizer with the segments of ``table``: ``by_member`` but for
    the time of its own step.
    """

    def __init__(self, table: SegmentTable, by_member: StateByMember) -> None:
        self._table, self._entries, self.by_member = table, table.entries, by_member
        self._optimizer: Any = table.entries.optimizer  # torch types its state as a defaultdict
        self.show()

    def show(self) -> None:
        """Let ``optimizer.state`` be by member, in place of what torch, or a script, has set."""
        self._optimizer.state = self.by_member

    def take(self) -> None:
        """Store what a script has written to ``optimizer.state``, or put in its place."""
        now = self._optimizer.state
        if now is not self.by_member and now is not self._entries.states:
            self.show()
            self.by_member.replace(now)
        if self.by_member.open:
            self.by_member.take()

    @property
    def segments(self) -> list[Segment]:
        """The current segments, after :meth:`take`, which may cut them."""
        self.take()
        return self._table.segments


class GroupMembers:
    """The members of the groups of an optimizer, in the lists that are its ``group["params"]``
    between steps: ``lists``, by group, with the ``parts`` that they are; ``writes``: a script's, to
    them; ``shown``: ``optimizer.state``, which is by these; ``phase``: of the optimizer's step.

    Args:
        table: the segments of the optimizer.
        names: the name of each parameter of each group, in the order of a script, and that
            parameter if it is frozen: whole, or this rank's part.
        parameters: parameter name -> the object that the optimizer holds.
        copied: keys of the flat buffers whose copies of master weights a script's writes would
            miss.
    """

    def __init__(
        self,
        table: SegmentTable,
        names: Sequence[Sequence[tuple[str, Tensor | None]]],
        parameters: Mapping[str, Tensor],
        copied: Collection[str],
    ) -> None:
        self._optimizer, self._flats = table.entries.optimizer, table.flats
        self.phase = OptimizerPhase()
        kinds = {flat.key: member_class(flat.contents.nbytes()) for flat in self._flats}
        self.parts = parts_of(names, self._flats)
        self.lists = self._lists_of(kinds, names, parameters)
        self._identities = list[int]()
        # ``lists`` keeps them alive, so that no other list can have the id of one
        for group, members in zip(self._optimizer.param_groups, self.lists):
            group["params"] = members
            self._identities += id(members), *map(id, members)
        # members in files refuse writes by themselves
        watched = [f for f in self._flats if f.key in copied and kinds[f.key] is GroupMember]
        self.writes = MemberWrites(watched, self.phase, type(self._optimizer).__name__)
        by_member = provided("member_states", HiddenStates)
        self.shown = ShownState(table, by_member(table, self.lists, self.parts))

    def _lists_of(
        self,
        kinds: Mapping[str, type[GroupMember]],
        names: Sequence[Sequence[tuple[str, Tensor | None]]],
        parameters: Mapping[str, Tensor],
    ) -> list[list[Tensor]]:
        """Return the members of each group, of the ``kinds`` of their flat buffers."""
        # members of a flat buffer share a count of changes, which steps leave as it is
        memory = {flat.key: flat.memory_of_members() for flat in self._flats}
        lists = list[list[Tensor]]()
        for parts, of_group in zip(self.parts, names):
            lists.append([])
            for part, (name, frozen) in zip(parts, of_group):
                member: Any = frozen
                if part.flat is not None:
                    # without calls of Python, of which a large model would make many
                    elements = memory[part.flat.key].narrow(0, part.start, part.last - part.first)
                    kind = kinds[part.flat.key]
                    member = Tensor._make_subclass(kind, elements.view(part.shape), False)
                    member.shard, member.phase = part.flat, self.phase
                if isinstance(member, GroupMember):
                    member.parameter = parameters.get(name)
                lists[-1].append(member)
        return lists

    def move(self) -> None:
        """Continue in the memory that the master weights have now."""
        memory = {flat.key: flat.memory_of_members() for flat in self._flats}
        for member, part in zip(chain(*self.lists), chain(*self.parts)):
            if isinstance(member, GroupMember) and part.flat is not None:
                member.move(part.of(memory[part.flat.key]))

    def check(self) -> None:
        """Store what a script has written to ``optimizer.state``. Raises PartitionError if the
        optimizer's groups are others, in another order or with other members than the engine has
        given them: groups are found by their place; or for :attr:`writes`. Does nothing in a step,
        in which the groups have the segments.
        """
        if self.phase.in_step:
            return
        self.shown.take()
        identities: list[int] = []
        for group in self._optimizer.param_groups:
            identities += id(group["params"]), *map(id, group["params"])
        if identities != self._identities:
            raise PartitionError(
                f"optimizer.param_groups of {type(self._optimizer).__name__} was reordered, or "
                "groups or members were added, removed or moved, and an engine finds groups by "
                "their place; undo that, and call optimizer.add_param_group, engine.replace or "
                "parameter.requires_grad_(False), or change the settings of a group (lr) instead"
            )
        self.writes.refuse()
