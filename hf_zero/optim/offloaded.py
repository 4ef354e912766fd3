"""An optimizer some or all of whose state is offloaded: the segments of those flats are updated
piece by piece, on the host.

A step has two halves. :meth:`OffloadedOptimizer.step` steps what is on the device and runs the
optimizer's hooks; :meth:`OffloadedOptimizer.begin` gives an :class:`Update` for the rest, whose
flats may be updated in any order, by another thread too where all groups have a rule
(``host_rules.py``). Groups without one are stepped by the optimizer itself, with gradients for one
piece at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_zero.errors import ConfigError, UnsupportedOptimizerError
from hf_zero.ops import native
from hf_zero.optim import state, torch_fused
from hf_zero.optim.cpu import CPUSGD
from hf_zero.optim.elementwise import elementwise_base
from hf_zero.optim.host_rules import Rule, rule_of
from hf_zero.optim.kernel_calls import MASTER
from hf_zero.optim.piecewise import Counted, Update
from hf_zero.optim.segments import BoundOptimizer
from hf_zero.optim.table import Flat, Region, Segment, apart, cut
from hf_zero.storage.base import StorageFormat, moment_format

# in their first step the gradient itself is the momentum
BEGIN_WITH_GRADIENT = (torch.optim.SGD, CPUSGD)


class OffloadedOptimizer(BoundOptimizer):
    """As :class:`BoundOptimizer`; flats with ``states`` keep their masters and moments there.

    Args:
        moments: how the states that a rule allows are kept there: ``"fp32"``, ``"bf16"`` or
        ``"int8"``.

    Raises:
        ConfigError: ``moments`` in fewer bits for an optimizer whose states must be fp32.
        UnsupportedOptimizerError: an optimizer that the user vouches for counts its steps elsewhere
        than in its state.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        flats: Sequence[Flat],
        group_of: Mapping[str, int],
        parameters: Mapping[str, Tensor],
        moments: str = "fp32",
        kernels: Any = "auto",
    ) -> None:
        self._moments = moments
        self._fresh: set[Segment] = set()  # not stepped yet
        self._hosted: dict[str, list[Segment]] = {}  # by flat
        # arrays, by flat and name, that did not exist when segments were cut
        self._made: set[tuple[str, str]] = set()
        self._refuse_counters(optimizer)
        super().__init__(optimizer, flats, group_of, parameters, kernels)

    @staticmethod
    def _refuse_counters(optimizer: torch.optim.Optimizer) -> None:
        if elementwise_base(type(optimizer)) is not None:
            return
        counted = [
            name
            for group in optimizer.param_groups
            for name in state.counted_elsewhere(optimizer, group)
        ]
        if counted:
            raise UnsupportedOptimizerError(
                f"optimizer {type(optimizer).__name__} changes {sorted(set(counted))} of its "
                "groups or of itself in each step(), and offloaded "
                "state is stepped piece by piece: keep that number in the state of each parameter, "
                "or do not offload the optimizer"
            )

    def _bind(self, flats: Sequence[Flat], groups: set[int]) -> None:
        self._hosted.clear()
        self._made.clear()
        super()._bind(flats, groups)
        for segments in self._hosted.values():
            for segment in segments:
                self._create(segment)

    def _list_segments(self) -> None:
        super()._list_segments()
        self._stepped = [
            segment for segment in self._segments if segment.parts and not self._is_hosted(segment)
        ]

    def _bind_segment(self, segment: Segment) -> None:
        if self._is_hosted(segment):
            segment.tensor = torch.nn.Parameter(self._entry(segment, MASTER), requires_grad=False)
        else:
            super()._bind_segment(segment)

    def _replace(self, pieces: Mapping[Segment, list[Segment]]) -> None:
        super()._replace(pieces)
        for segment, found in pieces.items():
            if self._is_hosted(segment) and len(found) > 1:
                hosted = self._hosted[segment.parts[0].flat.key]
                at = next(place for place, each in enumerate(hosted) if each is segment)
                hosted[at : at + 1] = found
            if segment in self._fresh:
                self._fresh.discard(segment)
                self._fresh.update(found)

    def bring_back(self, moved: Mapping[str, Callable[[], None]]) -> None:
        """Keep the states of some flats on the device from now on: ``moved`` has, by key, what
        gives a flat its masters there.
        """
        flats = {flat.key: flat for flat in self._flats}
        scalars, apart = self.scalars(), self.apart()
        fresh = frozenset[str]().union(*(segment.names for segment in self._fresh))
        kept = {key: self.tensors(flats[key]) for key in moved}
        for move in moved.values():
            move()
        self._fresh = set()
        self._bind(self._flats, {segment.group for segment in self._segments})
        self._fresh = {segment for segment in self._fresh if not fresh.isdisjoint(segment.names)}
        for key, tensors in kept.items():
            for name, tensor in tensors.items():
                self.load_tensor(flats[key], name, tensor)
        self.load_scalars(scalars, apart)

    def _cut(self, flats: Sequence[Flat]) -> list[Region]:
        regions = cut([flat for flat in flats if not flat.storage.offloaded], self.group_of)
        for flat in flats:
            if not flat.storage.offloaded:
                continue
            region = apart(flat, self.group_of)
            for segment in region.segments:
                segment.tensor = torch.nn.Parameter(
                    self._entry(segment, MASTER), requires_grad=False
                )
            self._hosted[flat.key] = region.segments
            regions.append(region)
        return regions

    @staticmethod
    def _stand_in(flats: Sequence[Flat]) -> Tensor:
        return torch.zeros(1)

    def step(
        self,
        grad_scale: Tensor | None = None,
        found_inf: Tensor | None = None,
        shards: Mapping[str, Tensor] | None = None,
    ) -> set[str]:
        """As the base class has it, for what is on the device. Stand-ins are in host memory,
        whatever others of their group are: they count by themselves, with a gradient of zero that
        no number of the device scales.
        """
        written = super().step(grad_scale, found_inf, shards)
        if self._stand_ins and (found_inf is None or not bool(found_inf.ne(0))):
            zeros = [torch.zeros_like(segment.tensor) for segment in self._stand_ins]
            self._step_over(
                self._stand_ins, zeros, None, None, self._takes_scale(), self._bare_step
            )
        return written

    def _takes_scale(self) -> bool:
        return torch_fused.takes_scale(self.optimizer, self._base, None)

    def _bare_step(self) -> None:
        """The class's own step without hooks, which run once for the whole step."""
        own = type(self.optimizer).step
        getattr(own, "__wrapped__", own)(self.optimizer)

    @staticmethod
    def _is_hosted(segment: Segment) -> bool:
        return bool(segment.parts) and segment.parts[0].flat.storage.offloaded

    @staticmethod
    def _entry(segment: Segment, name: str) -> Tensor:
        return segment.parts[0].flat.storage.entry(name)[segment.start : segment.stop]

    def rule(self, group: int) -> Rule | None:
        """The host kernel that updates ``group``; None where the optimizer does it itself."""
        hosted = [
            segment
            for segments in self._hosted.values()
            for segment in segments
            if segment.group == group
        ]
        if any(segment.tensor.dtype != torch.float32 for segment in hosted):
            return None
        # Without the native core torch's own update is faster than the reference, but knows fp32
        # only.
        compressed = self._moments != "fp32" or self.groups[group].get("moments", "fp32") != "fp32"
        return rule_of(self._base, self.groups[group]) if native.available() or compressed else None

    # ---- state ----

    def _create(self, segment: Segment) -> None:
        if not self._is_hosted(segment):
            super()._create(segment)
            return
        if self._kept(segment.tensor):
            return
        states = segment.parts[0].flat.storage
        for name, value in self._fresh_state(segment).items():
            if state.is_elementwise(name, value, (1,)):
                key = segment.parts[0].flat.key, name
                if name not in states.names():
                    states.add(name, self._format(name, value.dtype, segment.group))
                    self._made.add(key)
                if key in self._made and bool(value):  # each group may begin with another number
                    states.store(name, segment.start, value.expand(segment.stop - segment.start))
                value = self._entry(segment, name)
            self.optimizer.state[segment.tensor][name] = value
        self._fresh.add(segment)

    def _fresh_state(self, segment: Segment) -> dict[str, Any]:
        """Its state before the first step, in numbers however it is going to be kept."""
        group = state.in_numbers(self.groups[segment.group])
        return state.fresh_state(self.optimizer, group, torch.zeros(1, dtype=segment.tensor.dtype))

    def _format(self, name: str, dtype: torch.dtype, group: int) -> StorageFormat:
        moments = (
            self._moments if self._moments != "fp32" else self.groups[group].get("moments", "fp32")
        )
        if moments == "fp32" or dtype != torch.float32:
            return StorageFormat(dtype)
        rule = self.rule(group)
        if rule is None or name not in rule.compressible:
            raise ConfigError(
                f"offload_optimizer.moments = {moments!r}: state {name!r} of "
                f"{type(self.optimizer).__name__} is kept in fp32 only; use Adam, AdamW "
                'or Lion, or write "moments": "fp32"'
            )
        return moment_format(moments, dtype, rule.compressible[name])

    def tensors(self, flat: Flat) -> dict[str, Tensor]:
        """As the base class has it; what is offloaded may be a copy, to be changed with
        :meth:`load_tensor`.
        """
        if not flat.storage.offloaded:
            return super().tensors(flat)
        flat.wait_for_update()
        return {name: flat.storage.fetch(name) for name in self.names(flat)}

    def names(self, flat: Flat) -> list[str]:
        """Arrays of a flat whose states are offloaded that hold something: a momentum that the
        first step is to begin does not yet.
        """
        begins = self._base in BEGIN_WITH_GRADIENT and self._fresh.issuperset(
            self._hosted[flat.key]
        )
        return [MASTER] if begins else flat.storage.names()

    def load_tensor(self, flat: Flat, name: str, tensor: Tensor) -> None:
        if not flat.storage.offloaded or name not in flat.storage.names():
            super().load_tensor(flat, name, tensor)
            return
        flat.wait_for_update()
        flat.storage.store(name, 0, tensor)
        if name != MASTER:
            self._fresh.difference_update(self._hosted[flat.key])

    def _put(self, segment: Segment, name: str, at: int, values: Tensor) -> None:
        if not self._is_hosted(segment):
            super()._put(segment, name, at, values)
            return
        flat = segment.parts[0].flat
        if name not in flat.storage.names():
            flat.storage.add(name, StorageFormat(values.dtype))
            self.optimizer.state[segment.tensor][name] = self._entry(segment, name)
        flat.storage.store(name, segment.start + at, values)
        self._fresh.discard(segment)

    def _unstep(self, segment: Segment) -> None:
        super()._unstep(segment)
        if self._is_hosted(segment):
            self._create(segment)

    def packed(self, packed: dict[str, Any]) -> dict[str, Any]:
        """As the base class has it. What is in files is read into memory, all of it."""
        places = {
            id(tensor): place
            for place, tensor in enumerate(p for group in self.groups for p in group["params"])
        }
        entries = dict(packed["state"])
        for segments in self._hosted.values():
            arrays = self.tensors(segments[0].parts[0].flat)
            for segment in segments:
                place = places[id(segment.tensor)]
                numbers = {
                    name: value
                    for name, value in entries.get(place, {}).items()
                    if name not in segment.parts[0].flat.storage.names()
                }
                begins = segment in self._fresh and self._base in BEGIN_WITH_GRADIENT
                kept = set() if begins else entries.get(place, {}).keys() & arrays.keys()
                entries[place] = numbers | {
                    name: arrays[name][segment.start : segment.stop] for name in kept
                }
        kept = {place: entry for place, entry in entries.items() if entry}
        return super().packed({**packed, "state": kept})

    def unpacked(self) -> None:
        super().unpacked()
        for segments in self._hosted.values():
            for segment in segments:
                states = segment.parts[0].flat.storage
                given = self.optimizer.state.pop(segment.tensor, {})
                if given.keys().isdisjoint(states.names()):
                    self._renew(segment)
                for name, value in given.items():
                    if name in states.names():
                        states.store(name, segment.start, value)
                        given[name] = self._entry(segment, name)
                        self._fresh.discard(segment)
                self.optimizer.state[segment.tensor].update(given)

    def forget(self) -> None:
        for segments in self._hosted.values():
            segments[0].parts[0].flat.wait_for_update()
        super().forget()
        for segments in self._hosted.values():
            for segment in segments:
                self._renew(segment)

    def _renew(self, segment: Segment) -> None:
        """Make ``segment``, whose state is in no book, what it was before the first step."""
        states = segment.parts[0].flat.storage
        for name, value in self._fresh_state(segment).items():
            if name in states.names():
                states.store(name, segment.start, value.expand(segment.stop - segment.start))
        self._create(segment)

    def _settle(self) -> None:
        """Only what is on the device is made by torch, wherever it likes."""
        everything = self._regions
        self._regions = self._regions_here()
        try:
            super()._settle()
        finally:
            self._regions = everything

    def _regions_here(self) -> list[Region]:
        return [region for region in self._regions if not region.flats[0][0].storage.offloaded]

    # ---- the second half of a step ----

    def hosted(self, flat: Flat) -> list[Segment]:
        """The segments of ``flat``, whose state is offloaded."""
        return self._hosted[flat.key]

    def begin(self, divisor: float, number: int) -> Update:
        """The update of everything that is offloaded, by the groups as they are now; step counters
        advance as flats are announced.

        ``number`` is another one at each step, and the same on all ranks: stochastic rounding
        depends on it.
        """
        self._start_momentum()
        rules = [self.rule(index) for index in range(len(self.groups))]
        groups = [
            {name: _now(value) for name, value in group.items() if name != "params"}
            for group in self.groups
        ]
        return Update(self, rules, groups, divisor, number)

    def count(self, flat: Flat, rules: Sequence[Rule | None]) -> dict[Segment, Counted]:
        """Advance the step counters of ``flat``, but for parameters that are unused: they are in
        none of the segments returned.
        """
        left_out = self._leave_out(self._hosted[flat.key], flat.unused) if flat.unused else ()
        counted = {}
        for segment in self._hosted[flat.key]:
            if segment in left_out:
                continue
            count = self.optimizer.state[segment.tensor].get("step")
            if count is not None and rules[segment.group] is not None:
                count += 1
            counted[segment] = Counted(0 if count is None else int(count), segment in self._fresh)
            self._fresh.discard(segment)
        return counted

    def _start_momentum(self) -> None:
        """Make what torch's SGD makes in the step after a momentum was set."""
        new = [
            s
            for segments in self._hosted.values()
            for s in segments
            if self.groups[s.group].get("momentum") and not self._kept(s.tensor)
        ]
        if new:
            for segments in self._hosted.values():
                segments[0].parts[0].flat.wait_for_update()
        for segment in new:
            self._create(segment)

    def step_sub_group(
        self, segment: Segment, held: Mapping[str, Any], grad: Tensor, divisor: float, fresh: bool
    ) -> None:
        """One update of ``segment`` by the optimizer itself, over the arrays in ``held``."""
        entries: Any = self.optimizer.state[segment.tensor]
        waiting = segment.tensor.data
        between = {name: entries[name] for name in held if name in entries}
        segment.tensor.data = held[MASTER]
        entries.update({name: held[name] for name in between})
        if fresh and self._base in BEGIN_WITH_GRADIENT:
            entries.pop("momentum_buffer", None)
        gradient = grad if grad.dtype == segment.tensor.dtype else grad.to(segment.tensor.dtype)
        scale = None if divisor == 1.0 else torch.tensor(divisor, dtype=torch.float32)
        self._step_over([segment], [gradient], scale, None, self._takes_scale(), self._bare_step)
        for name, entry in between.items():
            made = entries.get(name)
            if made is not None and made.data_ptr() != held[name].data_ptr():
                held[name].copy_(made)
            entries[name] = entry
        segment.tensor.data = waiting


def _now(setting: Any) -> Any:
    """What ``setting`` of a group is now: a scheduler writes a rate that is a tensor in place."""
    return setting.clone() if isinstance(setting, Tensor) else setting
