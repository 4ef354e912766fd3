"""Optimizer state of segments whose state is offloaded: one segment for each sub-group of a flat
buffer's storage, with placeholders for its arrays in entries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_zero.errors import UnsupportedOptimizerError
from hf_zero.offload.storage import MASTER, StorageFormat
from hf_zero.offload.sub_group_update import Counted, Rule, SubGroupUpdate
from hf_zero.ops import native
from hf_zero.optim.cpu import CPUAdam
from hf_zero.optim.elementwise import BEGIN_WITH_GRADIENT
from hf_zero.optim.host_rules import rule_of, stored_format
from hf_zero.optim.initial_state import InitialStates, InitialValues
from hf_zero.optim.offloaded_segments import OffloadedSegments, StepSubGroup, UsedSegments
from hf_zero.optim.segment_entries import SegmentStateAccess, copy_of, is_elementwise
from hf_zero.optim.segments import FetchedArrays, Segment, current_settings, offloaded_region
from hf_zero.optim.whole_tensor import WholeTensorOptimizer

if TYPE_CHECKING:
    from hf_zero.zero.layout.optimizer_shard import OptimizerShard


class OffloadedState(OffloadedSegments):
    """The state of the segments whose state is offloaded.

    ``moments``: the configured storage format, of the states that :func:`stored_format` allows it
    for. ``base``: the optimizer's class among those with a known update.
    """

    def __init__(self, entries: SegmentStateAccess, base: type | None, moments: str) -> None:
        super().__init__(entries, base, moments)
        self._entries, self._initial = entries, InitialStates(entries)
        self._base, self._moments = base, moments

    def cut(self, flats: Sequence[OptimizerShard], group_of: Mapping[str, int]) -> None:
        """Cut ``flats``, whose state is offloaded, into regions."""
        self.set_regions(offloaded_region(flat, group_of) for flat in flats)

    @staticmethod
    def view(segment: Segment, name: str) -> Tensor:
        """Return the entry of state ``name`` of ``segment``."""
        return segment.parts[0].flat.contents.entry(name)[segment.start : segment.stop]

    def offloaded_update(
        self,
        used_segments: UsedSegments,
        step_sub_group: StepSubGroup,
        divisor: float,
        steps_before: int,
    ) -> SubGroupUpdate:
        """Return the update of all state in one step, with the group settings of this moment."""
        self.create_momenta()
        self.create_maxima()
        self.rewrite_initial_values()
        groups, narrow = self._entries.groups, self._entries.bf16
        rules = [self.rule(index) for index in range(len(groups))]

        def count(flat: OptimizerShard) -> dict[Segment, Counted]:
            return self.count(used_segments(flat), rules)

        settings = [current_settings(group) for group in groups]
        optimizer = self._entries.optimizer
        tensors: Any = optimizer.tensors if isinstance(optimizer, WholeTensorOptimizer) else None
        return SubGroupUpdate(
            self.segments,
            step_sub_group,
            count,
            rules,
            settings,
            divisor,
            steps_before,
            tensors,
            narrow,
        )

    def count(
        self, segments: Sequence[Segment], rules: Sequence[Rule | None]
    ) -> dict[Segment, Counted]:
        """Advance the step counters of ``segments``; return these with their counts."""
        for segment in segments:
            self.reset_removed(segment)
        first, counted = self.mark_first_steps(segments), {}
        for segment in segments:
            count = self._entries.states[segment.tensor].get("step")
            if count is not None and rules[segment.group] is not None:
                count += 1
            step = 0 if count is None else int(count)
            counted[segment] = Counted(step, segment in first, self._entries.of_whole(segment))
        return counted

    def mark_first_steps(self, segments: Sequence[Segment]) -> set[Segment]:
        """Return those of ``segments`` that make their first step now, and note that they have
        begun. SGD with momentum 0 and an existing buffer has not: its first step with momentum
        sets the buffer to the gradient.
        """
        entries, first = self._entries, {segment for segment in segments if not segment.begun}
        for segment in first:
            segment.begun = bool(
                self._base not in BEGIN_WITH_GRADIENT
                or entries.groups[segment.group].get("momentum")
                or not entries.of(segment)
            )
        return first

    def rule(self, group: int) -> Rule | None:
        """Return the host kernel that updates ``group``; None if the optimizer itself does."""
        settings = self._entries.groups[group]
        if isinstance(self._entries.optimizer, WholeTensorOptimizer):
            return rule_of(self._base, settings)
        mine = [segment for segment in self.all_segments if segment.group == group]
        if any(segment.tensor.dtype == torch.float64 for segment in mine):
            return None
        # Without the native core torch's own update is faster than the reference, but supports fp32
        # only.
        in_fp32 = self._moments == settings.get("moments", "fp32") == "fp32"
        return None if in_fp32 and not native.available() else rule_of(self._base, settings)

    def _format(self, name: str, dtype: torch.dtype, segment: Segment) -> StorageFormat:
        """Return the storage format of a new array ``name``, for all sub-groups of its flat buffer:
        those without 8-bit moments are left in ``dtype``.
        """
        flat = segment.parts[0].flat
        coded = {
            segment.sub_group
            for segment in self.segments(flat)
            if self._entries.is_in_8_bits(segment)
        }
        others = frozenset(range(len(flat.contents.sub_groups))) - coded if coded else None
        return stored_format(self._entries, self._moments, segment.group, name, dtype, others)

    def create_all(self) -> None:
        """Create the state of every segment, see :meth:`create`."""
        first = self._initial.cached(decoded=True)
        for segment in self.all_segments:
            self.create(segment, first)

    def create(self, segment: Segment, first: InitialValues | None = None) -> None:
        """Create the entries of ``segment`` before its first step, if it has none, and arrays that
        do not exist yet; ``first``: initial values.
        """
        if self._entries.of(segment):
            return
        self._create_missing_names(segment, first or self._initial.cached(decoded=True))
        segment.begun = False

    def _create_missing_names(self, segment: Segment, first: InitialValues) -> None:
        flat, live = segment.parts[0].flat, self._entries.states[segment.tensor]
        for name, value in first(segment.group, _like(segment)).items():
            if name in live:
                continue
            entry: object = copy_of(value)
            if is_elementwise(name, value, (1,)):
                if name not in flat.contents.names():
                    flat.writing().add(name, self._format(name, value.dtype, segment))
                    for other in self.segments(flat):  # initial values may differ between groups
                        self._write_first(other, first, name)
                entry = self.view(segment, name)
            live[name] = entry

    def _write_first(self, segment: Segment, first: InitialValues, *names: str) -> None:
        """Write the values before the first step into numbers of ``segment``, and those other than
        0 into its arrays, which exist; ``names``: into these.
        """
        entries, arrays = self._entries.of(segment), segment.parts[0].flat.contents.names()
        for name, value in first(segment.group, _like(segment)).items():
            if (names and name not in names) or (name in arrays and not bool(value)):
                continue
            if name in arrays:
                self._fill(segment, name, value)
            elif name in entries:
                self._entries.states[segment.tensor][name] = copy_of(value)

    def create_missing(self, flat: OptimizerShard) -> bool:
        """Create the missing state of ``flat``, with its values before a first step; return whether
        all of its segments already had state with such values.
        """
        segments = self.segments(flat)
        begun = bool(segments) and all(map(self._is_initial, segments))
        for segment in segments:
            self.create(segment)
        return begun

    def _is_initial(self, segment: Segment) -> bool:
        """Return whether ``segment`` has its initial state: it was not stepped yet."""
        return not segment.begun and bool(self._entries.of(segment))

    def reset(self, segment: Segment) -> None:
        """Reset ``segment`` as if it had never been stepped."""
        if self._is_initial(segment):
            return
        self._entries.states.pop(segment.tensor, None)
        self._write_and_create(segment)

    def reset_all(self) -> None:
        """Reset all segments to before the first step; entries must have been removed."""
        for segment in self.all_segments:
            self._write_and_create(segment)

    def reset_removed(self, segment: Segment) -> None:
        """Reset ``segment`` if a script has removed its entry of ``optimizer.state``."""
        live = self._entries.states
        if live.get(segment.tensor) or not segment.begun:
            return
        kept = self.arrays(segment.parts[0].flat).dtypes.keys() - {MASTER}
        if kept or self._entries.of_wholes:
            self._write_and_create(segment)

    def _write_and_create(self, segment: Segment) -> None:
        """Write the initial values of ``segment``, 0 too, and create its entries, which must have
        been removed.
        """
        first = self._initial.cached(decoded=True)
        for name, value in first(segment.group, _like(segment)).items():
            if name in segment.parts[0].flat.contents.names():
                self._fill(segment, name, value)
        self.create(segment, first)

    @staticmethod
    def _fill(segment: Segment, name: str, value: Tensor) -> None:
        """Set each element of state ``name`` of ``segment`` to ``value``."""
        values = value.expand(segment.stop - segment.start)
        segment.parts[0].flat.writing().store(name, segment.start, values)

    def rewrite_initial_values(self) -> None:
        """Write the initial values of segments that were not stepped yet: ASGD's and Rprop's
        contains the learning rate, which a schedule or a load may have changed since. A script may
        also have switched a setting on that keeps a further state.
        """
        first = self._initial.cached(decoded=True)
        for segment in self.all_segments:
            if not segment.begun:
                self._create_missing_names(segment, first)
                self._write_first(segment, first)

    def create_momenta(self) -> None:
        """Create momenta as torch's SGD does in the step after momentum was switched on."""
        new = [
            segment
            for segment in self.all_segments
            if self._entries.groups[segment.group].get("momentum") and not self._entries.of(segment)
        ]
        for segment in new:
            self.create(segment)

    def create_maxima(self) -> None:
        """Create AMSGrad's maxima of segments that were stepped without them, as CPUAdam does.

        Raises UnsupportedOptimizerError for other classes, whose own step would not find them.
        """
        for index, group in enumerate(self._entries.groups):
            if not group.get("amsgrad"):
                continue
            first = self._initial.cached(decoded=True)
            for segment in self.all_segments:
                known = self._entries.states.get(segment.tensor, {})
                if segment.group != index or not segment.begun or "max_exp_avg_sq" in known:
                    continue
                if not isinstance(self._entries.optimizer, CPUAdam):
                    raise UnsupportedOptimizerError(
                        f"amsgrad of group {index} is true and its state has no maxima of earlier "
                        "steps; set it before the first step, as for a plain "
                        f"{type(self._entries.optimizer).__name__}"
                    )
                self._create_missing_names(segment, first)

    def arrays(self, flat: OptimizerShard) -> FetchedArrays:
        """Return the master weights and each per-element state of ``flat``, 1-D over
        ``flat.owned``, that holds values; they may be copies.
        """
        storage = flat.reading()
        segments = self.segments(flat)
        # a momentum that the first step will set holds no values yet
        begun = any(segment.begun for segment in segments)
        begins = self._base in BEGIN_WITH_GRADIENT and not begun
        names = [MASTER] if begins else storage.names()
        return FetchedArrays({name: storage.dtype(name) for name in names}, storage.fetch)

    def load_tensor(self, flat: OptimizerShard, name: str, tensor: Tensor, first: int) -> None:
        """Copy ``tensor`` (1-D) into a state of ``flat``, from element ``first`` on."""
        flat.writing().store(name, first, tensor)
        for segment, _ in self.parts(flat, first, first + tensor.numel()):
            segment.begun = True

    def put(self, segment: Segment, name: str, at: int, values: Tensor) -> None:
        """Write ``values`` into state ``name`` of ``segment``, starting at element ``at``."""
        storage = segment.parts[0].flat.writing()
        if name not in storage.names():
            storage.add(name, StorageFormat(values.dtype))
        live = self._entries.states[segment.tensor]
        if name not in live:
            live[name] = self.view(segment, name)
        storage.store(name, segment.start + at, values)
        segment.begun = True

    def copies(self, flat: OptimizerShard) -> dict[str, Tensor]:
        """Return copies of the per-element states of ``flat``: a load here overwrites the arrays,
        and a load of torch leaves the tensors of an earlier state dict unchanged.
        """
        copies = {}
        for name, dtype in self.arrays(flat).dtypes.items():
            if name != MASTER:
                copies[name] = torch.empty(flat.spec.owned_numel, dtype=dtype)
                flat.reading().fetch_into(name, 0, copies[name])
        return copies


def _like(segment: Segment) -> Tensor:
    """Return a tensor of one element in the dtype of ``segment``, for its initial values."""
    return torch.zeros(1, dtype=segment.tensor.dtype)
