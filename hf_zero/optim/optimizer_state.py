"""The state of an optimizer between steps, as loads and checkpoints see it: per-element state by
flat buffer, scalars and the state of whole tensors by parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hf_zero.errors import UnsupportedOptimizerError
from hf_zero.offload.storage import MASTER
from hf_zero.optim.existing_state import Carried
from hf_zero.optim.group_scalars import GroupScalars
from hf_zero.optim.initial_state import InitialStates
from hf_zero.optim.members import GroupMembers
from hf_zero.optim.segment_table import SegmentTable
from hf_zero.optim.segments import masters
from hf_zero.optim.state_by_member import StateUses
from hf_zero.optim.whole_tensor_state import WholeTensorState

if TYPE_CHECKING:
    from hf_zero.zero.layout.optimizer_shard import OptimizerShard


class OptimizerState:
    """The state of the segments in ``table`` by flat buffer, with its parts by parameter:
    ``scalars``, ``tensor_state``.

    Args:
        members: the members of the groups, whose entries a script may have changed.
        carried: the state of whole parameters, to be cut to this rank's elements.
    """

    def __init__(self, table: SegmentTable, members: GroupMembers, carried: Carried) -> None:
        self.table, self.members, self._entries = table, members, table.entries
        self.scalars = GroupScalars(table, members.shown)
        self.tensor_state = WholeTensorState(table, members.shown)
        self.initial, self.device = InitialStates(table.entries), table.device
        self.writes = 0  # number of writes to per-element state from outside
        members.shown.by_member.watch(StateUses(self.forget))
        if carried.scalars:
            self._load(carried)

    def wait_with(self, wait: Callable[[], object]) -> None:
        """Let reads of the state call ``wait`` first, which waits for the update of offloaded state
        unless the engine itself updates it now.
        """
        self._entries.wait = wait

    def _load(self, carried: Carried) -> None:
        """Load the state that parameters had before they were cut."""
        for flat in self.table.flats:
            for piece in list(flat.layout.pieces(*flat.owned)):
                first = piece.offset - flat.owned[0]
                for kind, whole in carried.per_element.get(piece.name, {}).items():
                    self._load_state(flat, kind, whole[piece.start : piece.stop], first)
        self.scalars.load(carried.scalars)
        self.tensor_state.load(carried.tensor_state)

    def arrays(self, flat: OptimizerShard) -> Mapping[str, Tensor]:
        """Return ``"master"`` and each per-element state of ``flat`` that exists, 1-D over
        ``flat.owned``. On the device these are writable views; offloaded and 8-bit ones may be
        copies, made where they are read, to be changed with :meth:`load_tensor`.
        """
        self.members.shown.take()
        table = self.table
        return table.offloaded.arrays(flat) if flat.offloaded else table.device.arrays(flat)

    def tensors(self, flat: OptimizerShard) -> dict[str, Tensor]:
        """Return the :meth:`arrays` of ``flat``, all of them in memory."""
        return dict(self.arrays(flat))

    def existing(self) -> dict[str, set[str]]:
        """Return by parameter the names of the per-element states that exist on this rank."""
        names: dict[str, set[str]] = {}
        for segment in self.members.shown.segments:
            kinds = self._entries.elementwise(segment).keys()
            for name in segment.names if segment.parts and kinds else ():
                if name in self.table.group_of:
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
        self.members.shown.take()
        self.writes += 1
        touched = self.table.parts(flat, first, first + tensor.numel())
        exist = [bool(self._entries.states.get(segment.tensor)) for segment, _ in touched]
        if tensor._base is not None and not all(exist):
            tensor = tensor.clone()  # it may view the arrays that the creation of state writes to
        for segment, _ in touched:
            self.table.state_of(segment).create(segment)
        having = {segment for segment, _ in touched if name in self._entries.of(segment)}
        if flat.offloaded and touched and len(having) == len(touched):
            self.table.offloaded.load_tensor(flat, name, tensor, first)
            return
        if touched and not (having or self.initial.some_group_keeps(name, masters(flat))):
            have = sorted(
                {key for segment, _ in touched for key in self._entries.elementwise(segment)}
            )
            raise UnsupportedOptimizerError(
                f"optimizer {type(self._entries.optimizer).__name__} keeps no state {name!r} for "
                f"{flat.key!r} (it keeps {have}); the state was saved by another optimizer or with "
                "other options. Use the same optimizer, or load without optimizer states."
            )
        for segment, part in touched:
            start, group = max(part.start, first), segment.group
            values, at = tensor[start - first : part.stop - first], part.offset + start - part.start
            keeps = segment in having or name in self.initial.of_group(group, masters(flat))
            if keeps or (self.initial.is_switched_off(group, name) and bool(values.any())):
                self.table.state_of(segment).put(segment, name, at, values)

    def create_offloaded(self, flat: OptimizerShard) -> bool:
        """Create the missing state of the offloaded ``flat``, with its values before a first step;
        return whether all of its segments already had state with such values. A load calls this
        first, because creation overwrites storage, and torch's ``load_state_dict`` has dropped
        entries.
        """
        return flat.offloaded and self.table.offloaded.create_missing(flat)

    def keeps_errors(self, flat: OptimizerShard) -> bool:
        """Return whether rounding errors of the master weights of ``flat`` are kept."""
        kahan = self._entries.bf16 is not None and self._entries.bf16.kahan
        return kahan and flat.has_master and flat.contents.dtype(MASTER) == torch.bfloat16

    def keeps(self, name: str) -> bool:
        """Return whether a group of this optimizer keeps a state ``name``, or would with a
        momentum, as far as its class shows without a step.
        """
        narrow = self._entries.bf16 is not None and self._entries.bf16.masters
        like = torch.zeros(1, dtype=torch.bfloat16 if narrow else torch.float32)
        return self.initial.some_group_keeps(name, like)

    def forget(self) -> None:
        """Reset all state, offloaded state too, to that before the first step."""
        self.scalars.note_load([])
        self.drop()
        self.table.join({})  # no parameter has been left out of a step
        self.table.offloaded.reset_all()

    def drop(self) -> None:
        """Drop all entries and the state on the device, as torch's ``load_state_dict`` does.
        Offloaded arrays stay: the caller loads them, or resets them.
        """
        self.members.shown.by_member.discard()
        self.members.shown.show()
        self._entries.states.clear()
        self.table.fused.separate_counters()
        self.table.device.reset_all()

    def writes_on_device(self) -> int:
        """Return torch's count of writes in place to the arrays on the device."""
        return sum(array._version for array in self.device.all_arrays)

    def move_to_device(self, moved: Mapping[str, Callable[[], None]]) -> None:
        """Move the optimizer state of some flat buffers from their offload tier to the device,
        until the engine ends. ``moved``: key of a flat buffer -> function that moves its master
        weights and gradient memory.

        All state is copied before anything moves, because the new cut of segments has none; the
        moments are loaded first, as they create the entries that the numbers go into.
        """
        scalars, shared = self.scalars.of_parameters(), self.scalars.of_groups()
        tensor_state, segments = self.tensor_state.by_parameter(), self.table.segments
        not_begun = {name for s in segments if not s.begun for name in s.names}
        # states already on the device are cut anew together with those that move there
        loaded = [flat for flat in self.table.flats if flat.key in moved or not flat.offloaded]
        tensors_of = {flat: self.tensors(flat) for flat in loaded}
        for move in moved.values():
            move()
        self.table.bind()
        self.members.move()
        for flat, tensors in tensors_of.items():
            for name, tensor in tensors.items():
                self.load_tensor(flat, name, tensor)
        self.scalars.load(scalars, shared)
        for segment in self.table.segments:
            exists = segment.offloaded or bool(self._entries.of(segment))
            segment.begun = exists and not_begun.isdisjoint(segment.names)
        self.tensor_state.load(tensor_state)
