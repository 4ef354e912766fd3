"""The members of an optimizer's groups under an engine: this rank's part of each parameter, in the
order of the script. A step of torch's code has segments (``segments.py``) in their place.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_zero.config.feature_rows import provided
from hf_zero.errors import PartitionError
from hf_zero.optim.own_step import GroupsInStep
from hf_zero.optim.snapshots import parts_of

if TYPE_CHECKING:
    from hf_zero.optim.segment_table import SegmentTable
    from hf_zero.optim.segments import Segment
    from hf_zero.zero.layout.training_state import OptimizerShard

_data: Any = Tensor.data
_grad: Any = Tensor.grad


class GroupMember(torch.nn.Parameter):
    """This rank's part of ``parameter``, over memory of the engine; without elements if the rank
    has none of it. Its count of changes has writes through ``.data``, too.

    ``shard``: the flat buffer whose gradient the engine holds between a backward and the step; None
    for a part of one that was frozen when the engine was built.
    """

    parameter: Tensor | None = None
    shard: OptimizerShard | None = None
    groups = GroupsInStep()

    @property
    def requires_grad(self) -> bool:
        """As of the parameter that it is a part of; autograd sees none."""
        return self.parameter is not None and self.parameter.requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> GroupMember:
        """Freeze the parameter, or let it train."""
        if self.parameter is not None:
            self.parameter.requires_grad_(requires_grad)
        return self

    @property
    def grad(self) -> Tensor | None:
        """None; in hooks before the step the gradient of its elements. Raises PartitionError while
        the engine holds gradients.
        """
        self._refuse(self._is_held())
        gradient: Tensor | None = _grad.__get__(self)
        return gradient

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        sets = self.shard is not None and value is not None and not self.groups.in_step
        self._refuse(sets or self._is_held())
        _grad.__set__(self, value)

    def _is_held(self) -> bool:
        """Return whether the engine holds a gradient that the member does not have."""
        shard = None if self.groups.in_step else self.shard
        return shard is not None and shard.gradient.holds_gradient

    def _refuse(self, refused: bool) -> None:
        if refused:
            raise PartitionError(
                "the members of optimizer.param_groups are this rank's parts of the master "
                "weights, and their gradients are in the engine; use config gradient_clipping "
                "(accelerator.clip_grad_norm_ under Accelerate) instead of clip_grad_norm_, config "
                "fp16 instead of torch.amp.GradScaler, "
                "hf_zero.safe_get_full_grad(parameter) or hf_zero.safe_set_full_grad(parameter, "
                "value) with a parameter of the model, or engine.zero_grad()"
            )

    def __reduce_ex__(self, protocol: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            plain = self.detach()
        return torch.nn.Parameter(plain, self.requires_grad).__reduce_ex__(protocol)

    @property
    def data(self) -> Tensor:
        """The values, whose writes are counted."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        """Copy ``value`` over the values: the member stays in the memory of its flat buffer."""
        if value.shape != self.shape:
            raise PartitionError(
                f"a member of optimizer.param_groups was given data of shape {tuple(value.shape)} "
                f"and has {tuple(self.shape)}: it is this rank's part of the master weights; write "
                "to the parameters of the model"
            )
        with torch.no_grad():
            self.copy_(value)

    def move(self, memory: Tensor) -> Tensor:
        """Continue in ``memory``; return the former one, which keeps its values."""
        former: Tensor = _data.__get__(self)
        _data.__set__(self, memory)
        return former

    def lend(self, gradient: Tensor | None) -> None:
        """Set the gradient that hooks before a step see."""
        _grad.__set__(self, gradient)


class FileMember(GroupMember):
    """A member whose elements are in files, with a stand-in of one element as its memory; or a view
    of one.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call ``func``. Raises PartitionError where it writes to the stand-in."""
        first, failure = args[0] if args else None, None
        with torch._C.DisableTorchFunctionSubclass():
            given = first if isinstance(first, (list, tuple)) else [first]
            own = [tensor for tensor in given if isinstance(tensor, cls)]
            versions = [tensor._version for tensor in own]
            try:
                result = func(*args, **(kwargs or {}))
            except RuntimeError as error:
                if "more than one element of the written-to tensor" not in str(error):
                    raise
                failure = error
            if failure is None and versions == [tensor._version for tensor in own]:
                memory = {tensor.untyped_storage()._cdata for tensor in own}
                return _map_views(result, memory)
        raise PartitionError(
            'a script writes to a member of group["params"], and its values are in files, where '
            "it cannot; write to the model's parameters, or set "
            "zero_optimization.offload_optimizer.device (offload_param.device for frozen "
            "parameters) to cpu"
        ) from failure


def _map_views(result: Any, memory: Collection[int]) -> Any:
    """Return ``result`` of an operation with tensors in ``memory``, addresses of storages, as
    members.
    """
    if isinstance(result, (list, tuple)):
        return type(result)([_map_views(item, memory) for item in result])
    if type(result) is not Tensor or result.untyped_storage()._cdata not in memory:
        return result
    return result.as_subclass(FileMember)


def member_class(bytes_by_tier: Mapping[str, int]) -> type[GroupMember]:
    """Return the class of members over the memory of a storage with ``bytes_by_tier``: one in files
    has a stand-in.
    """
    return FileMember if bytes_by_tier["disk"] else GroupMember


class HiddenStates(dict[Any, Any]):
    """``optimizer.state`` between steps, empty. A feature shows the state of members there, and
    lends their gradients to hooks before a step.
    """

    open: Mapping[Any, Any] = {}
    """Entries that a script may have written to."""

    def __init__(self, *_: object) -> None:
        super().__init__()

    def replace(self, states: Mapping[Any, Any]) -> None:
        """Let ``states`` be the state of all members."""

    def discard(self) -> None:
        """Forget the entries."""

    def run_hooks(
        self, run: Callable[[], None], segments: Sequence[Segment], gradients: list[Tensor]
    ) -> tuple[list[Segment], list[Tensor]]:
        """``run`` the hooks before a step of ``segments``; return those that are stepped, with
        their ``gradients``.
        """
        run()
        return [*segments], gradients


# writes to members, which other ranks or copies of the weights miss
_writes_to = attrgetter("member_writes")


class GroupMembers:
    """The members of the groups of an optimizer, in the lists that are its ``group["params"]``
    between steps, and ``optimizer.state`` by member.

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
        self._optimizer, self._table = table.entries.optimizer, table
        self.groups, flats = GroupsInStep(), table.flats
        # members of a flat buffer share a count of changes, which steps leave as it is
        memory = {flat.key: flat.memory_of_members() for flat in flats}
        kinds = {flat.key: member_class(flat.contents.nbytes()) for flat in flats}
        # others refuse writes
        writable = {key for key, kind in kinds.items() if kind is GroupMember}
        self._watched = [flat for flat in flats if flat.key in writable.intersection(copied)]
        self.parts = parts_of(names, flats)
        self.lists = list[list[Tensor]]()  # kept so that no other list can have its id
        for parts, of_group in zip(self.parts, names):
            self.lists.append([])
            for part, (name, frozen) in zip(parts, of_group):
                member: Any = frozen
                if part.flat is not None:
                    # without calls of Python, of which a large model would make many
                    elements = memory[part.flat.key].narrow(0, part.start, part.last - part.first)
                    kind = kinds[part.flat.key]
                    member = Tensor._make_subclass(kind, elements.view(part.shape), False)
                    member.shard, member.groups = part.flat, self.groups
                if isinstance(member, GroupMember):
                    member.parameter = parameters.get(name)
                self.lists[-1].append(member)
        self._identities = list[int]()
        for group, members in zip(self._optimizer.param_groups, self.lists):
            group["params"] = members
            self._identities += id(members), *map(id, members)
        self._accepted = 0
        self.accept_writes()
        self.states: Any = provided("member_states", HiddenStates)(table, self.lists, self.parts)
        self.show_states()

    def show_states(self) -> None:
        """Let ``optimizer.state`` be by member, in place of what torch, or a script, has set."""
        self._optimizer.state = self.states

    def take_states(self) -> None:
        """Store what a script has written to ``optimizer.state``."""
        now: Any = self._optimizer.state
        if now is not self.states and now is not self._table.entries.states:
            self.show_states()
            self.states.replace(now)
        if self.states.open:
            self.states.take()

    @property
    def segments(self) -> list[Segment]:
        """The current segments, with what a script has written to ``optimizer.state``."""
        self.take_states()
        return self._table.segments

    def move(self) -> None:
        """Continue in the memory that the master weights have now."""
        memory = {flat.key: flat.memory_of_members() for flat in self._table.flats}
        for member, part in zip(chain(*self.lists), chain(*self.parts)):
            if isinstance(member, GroupMember) and part.flat is not None:
                member.move(part.of(memory[part.flat.key]))

    def check(self) -> None:
        """Raise PartitionError if the optimizer's groups are others, in another order or with other
        members than the engine has given them: groups are found by their place; or if a script
        has written to members where other ranks, or copies of the weights, miss that.
        """
        if self.groups.in_step:  # they have the segments
            return
        self.take_states()
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
        self.refuse_written()

    @property
    def written(self) -> int:
        """Number of a script's writes to members that are not taken over."""
        return int(sum(map(_writes_to, self._watched))) - self._accepted

    def accept_writes(self) -> None:
        """Note that all writes to members so far are taken over."""
        self._accepted += self.written

    def refuse_written(self) -> None:
        """Raise PartitionError if members were :attr:`written`."""
        if not self.written:
            return
        remedy = "register what reads the weights as another hook, after this one"
        if not self.groups.in_hook:
            remedy = (
                "load a checkpoint, and write to the parameters of the model, or in a hook after "
                "the step (optimizer.register_step_post_hook)"
            )
        raise PartitionError(
            f"the members of optimizer.param_groups of {type(self._optimizer).__name__} were "
            f"written to {'in this hook' if self.groups.in_hook else 'between steps'}; they are "
            "this rank's parts of the master weights, and other ranks and copies of the weights "
            f"miss that; {remedy}"
        )
