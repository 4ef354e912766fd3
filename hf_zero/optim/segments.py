"""An optimizer bound to the shards of one rank: the user's own object, stepping segments instead of
parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_zero.errors import UnsupportedOptimizerError
from hf_zero.optim import hyperparameters, snapshots, state, torch_fused
from hf_zero.optim.device_state import DeviceState, StateEntries, replace_segments
from hf_zero.optim.elementwise import elementwise_base
from hf_zero.optim.fused import FusedStep
from hf_zero.optim.host_rules import Rule
from hf_zero.optim.kernel_calls import MASTER
from hf_zero.optim.offloaded_state import BEGIN_WITH_GRADIENT, OffloadedState, refuse_counters
from hf_zero.optim.piecewise import Counted, Update
from hf_zero.optim.table import Flat, Segment, divide, masters, split
from hf_zero.parameters.layout import Slot


class BoundOptimizer:
    """``optimizer`` over this rank's flats.

    The object, its group dicts and their number stay; ``group["params"]`` becomes the list of this
    rank's segments, leaf tensors over the masters, or tensors that stand for them where they are
    offloaded. A group that owns nothing on this rank gets a stand-in of one zero, so that its step
    counters run as on the other ranks.

    What is on the device is updated by :meth:`step`. What is offloaded follows: :meth:`begin` gives
    its update, which is made sub-group by sub-group, on another thread as a rule.

    Where a group leaves both ``fused`` and ``foreach`` at None, torch has a fused kernel of the
    class for the device and the masters are fp32, ``fused`` is switched on: one pass over memory,
    which also divides by the gradient scale. Its results equal those of the unfused update up to
    rounding. ``fused=False`` in the group keeps it off.

    Args:
        optimizer: a torch.optim.Optimizer whose update is element-wise (see
        :func:`hf_zero.optim.elementwise.check`). flats: the flats of this rank; only trainable ones
        are used. group_of: parameter name -> index of its group. A trainable parameter that is in
        no group is left alone. parameters: parameter name -> the object the optimizer holds, to
        find state that exists already. Such state
            (whole tensors) is cut to this rank's elements.
        kernels: the configuration's ``kernels``: whether one kernel may update all segments
        (:mod:`hf_zero.optim.fused`). moments: how the states that a rule allows are kept where
        they are offloaded: ``"fp32"``, ``"bf16"`` or ``"int8"``.

    Raises:
        UnsupportedOptimizerError: state exists that cannot be carried over, or an optimizer that
        the user vouches for counts its steps elsewhere than in its state, which is offloaded; the
        optimizer is then unchanged. ConfigError: ``moments`` in fewer bits for an optimizer whose
        states must be fp32.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        flats: Sequence[Flat],
        group_of: Mapping[str, int],
        parameters: Mapping[str, Tensor],
        kernels: Any = "auto",
        moments: str = "fp32",
    ) -> None:
        self.optimizer = optimizer
        self.group_of = dict(group_of)
        self._base = elementwise_base(type(optimizer))
        self._step = optimizer.step  # with the wrappers LR schedulers have put on the object
        self._fused = FusedStep(optimizer, self._base, self._step, kernels)
        self._entries = StateEntries(optimizer)
        self._device = DeviceState(self._entries)
        self._offloaded = OffloadedState(self._entries, self._base, moments)
        self._flats = [flat for flat in flats if flat.trainable]
        if any(flat.offloaded for flat in self._flats):
            refuse_counters(optimizer)
        slots: dict[str, Slot] = {
            slot.name: slot for flat in self._flats for slot in flat.layout.slots
        }
        carried = state.collect(optimizer, parameters, slots, group_of)
        self._bind({group_of[name] for name in slots if name in group_of})
        self._carry(carried, group_of)

    def _bind(self, groups: set[int]) -> None:
        """Cut the flats into segments and put them into the optimizer's groups, with no state; each
        of ``groups`` gets one.
        """
        self._fused.reset()
        here = [flat for flat in self._flats if not flat.offloaded]
        away = [flat for flat in self._flats if flat.offloaded]
        self._device.cut(here, self.group_of)
        self._offloaded.cut(away, self.group_of)
        regions = [*self._device.regions, *self._offloaded.regions]
        segments = [segment for region in regions for segment in region.segments]
        self._stand_ins: list[Segment] = []
        for group in sorted(groups - {segment.group for segment in segments}):
            stand_in = Segment(group, 0, 1, [])
            zero = torch.zeros(1) if away else masters(self._flats[0]).new_zeros(1)
            stand_in.tensor = torch.nn.Parameter(zero, requires_grad=False)
            self._stand_ins.append(stand_in)
        self._segments = segments + self._stand_ins
        # groups whose parameters have not all made the same steps, as far as this rank has them
        self._parted: set[int] = set()
        dict.clear(self.optimizer.state)  # not that of a script, which comes to forget()
        self._list_segments()
        for live in self.groups:
            torch_fused.choose(self._base, live)
        self._offloaded.create_all()

    def _list_segments(self) -> None:
        """Let the optimizer's groups and :meth:`step` know of the segments there are now."""
        self._stepped = [segment for segment in self._segments if not segment.offloaded]
        if self._steps_stand_ins_apart:
            self._stepped = [segment for segment in self._stepped if segment.parts]
        for index, live in enumerate(self.groups):
            live["params"] = [
                segment.tensor for segment in self._segments if segment.group == index
            ]

    @property
    def _steps_stand_ins_apart(self) -> bool:
        """Whether stand-ins are in host memory, whatever others of their group are: they count by
        themselves.
        """
        return bool(self._offloaded.regions)

    def _state_of(self, segment: Segment) -> DeviceState | OffloadedState:
        return self._offloaded if segment.offloaded else self._device

    def _divide(
        self, segments: Iterable[Segment], kind_of: Callable[[str], Hashable]
    ) -> dict[Segment, list[tuple[Hashable, Segment]]]:
        """Cut ``segments``, with their state, wherever a parameter of another kind begins; what
        each became, with its kind.
        """
        divided = {segment: divide(segment, kind_of) for segment in segments}
        self._replace(
            {segment: [piece for _, piece in found] for segment, found in divided.items()}
        )
        return divided

    def _replace(self, pieces: Mapping[Segment, list[Segment]]) -> None:
        """Put the pieces that segments were cut into in their places, with their state."""
        changed = {segment: found for segment, found in pieces.items() if len(found) > 1}
        for segment, found in changed.items():
            entries: Mapping[str, Any] = self.optimizer.state.pop(segment.tensor, {})
            for piece in found:
                self._state_of(piece).bind(piece)
                start = piece.start - segment.start
                if entries:
                    self.optimizer.state[piece.tensor] = state.narrowed(
                        entries, segment.tensor.shape, start, start + piece.tensor.numel()
                    )
        if changed:
            replace_segments([*self._device.regions, *self._offloaded.regions], changed)
            self._segments = [
                piece for segment in self._segments for piece in changed.get(segment, [segment])
            ]
            self._list_segments()
            self._fused.divide()
            self._offloaded.replace(changed)

    def _leave_out(self, segments: Iterable[Segment], unused: frozenset[str]) -> set[Segment]:
        """The segments of ``unused`` parameters among ``segments``, which are cut so that they
        hold no others.
        """
        concerned = [segment for segment in segments if not unused.isdisjoint(segment.names)]
        left_out = {segment for segment in concerned if unused.issuperset(segment.names)}
        mixed = [segment for segment in concerned if segment not in left_out]
        self._parted |= {segment.group for segment in concerned}
        for found in self._divide(mixed, unused.__contains__).values():
            left_out |= {piece for is_unused, piece in found if is_unused}
        return left_out

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The optimizer's live ``param_groups``."""
        return self.optimizer.param_groups

    @property
    def segments(self) -> list[tuple[int, Tensor]]:
        """(group index, tensor) of every segment of this rank, stand-ins included."""
        return [(segment.group, segment.tensor) for segment in self._segments]

    # ---- stepping ----

    def takes_shards(self) -> bool:
        """Whether the next :meth:`step` can write the new values into the shards, too."""
        return self._fused.takes(self._stepped)

    def step(
        self,
        grad_scale: Tensor | None = None,
        found_inf: Tensor | None = None,
        shards: Mapping[str, Tensor] | None = None,
    ) -> set[str]:
        """One update from the flats' gradients.

        Gradients that are fp32 are divided by ``grad_scale`` in place; 16-bit ones are cast first,
        into memory that lives as long as the step. Parameters that are ``unused`` in their flat are
        passed over: weight, state and step count stay.

        Args:
            grad_scale: 0-dim tensor that the gradients are divided by (loss scale and clipping in
            one), or None for 1. found_inf: 0-dim tensor; if it is not 0, nothing changes, neither
            weights nor state nor step counters.
                Fused groups read it on the device. Others wait for its value on the host.
            shards: by key of a flat, where the new values of its ``owned`` elements should go as
            well, rounded to its dtype.

        Returns:
            The keys among ``shards`` whose new values are there; none where the optimizer's own
            step has run.
        """
        optimizer: Any = self.optimizer
        unused = frozenset[str]().union(*(flat.unused for flat in self._flats if flat.unused))
        left_out = (
            self._leave_out([segment for segment in self._stepped if segment.parts], unused)
            if unused
            else ()
        )
        if self._fused.takes(self._stepped):
            written = self._fused.step(
                self._device.regions, self._stepped, left_out, grad_scale, found_inf, shards or {}
            )
            optimizer._opt_called = True
            self._device.stepped(together=True)
            self._step_stand_ins_apart(found_inf)
            return written
        self._fused.part()
        segments = (
            [segment for segment in self._stepped if segment not in left_out]
            if left_out
            else self._stepped
        )
        apart = [
            [segment.tensor for segment in segments if segment.group == group]
            for group in range(len(self.groups))
            if self._parted
        ]
        with torch_fused.beginning_apart(optimizer, self._base, apart):
            in_kernel = torch_fused.takes_scale(optimizer, self._base, found_inf)
            if found_inf is not None and not in_kernel and bool(found_inf.ne(0)):
                optimizer._opt_called = True
                return set()
            gradients = [
                segment.gradient() if segment.parts else torch.zeros_like(segment.tensor)
                for segment in segments
            ]
            self._step_over(segments, gradients, grad_scale, found_inf, in_kernel, self._step)
        # A scheduler made after binding has wrapped whatever stands at ``optimizer.step`` now, to
        # notice this call.
        optimizer._opt_called = True
        # segments of a group that is parted get their first state in different steps
        self._device.stepped(together=False if self._parted else None)
        self._step_stand_ins_apart(found_inf)
        return set()

    def _step_stand_ins_apart(self, found_inf: Tensor | None) -> None:
        """Step stand-ins that are not stepped with the others, with a gradient of zero that no
        number of the device scales.
        """
        if not self._steps_stand_ins_apart or not self._stand_ins:
            return
        if found_inf is None or not bool(found_inf.ne(0)):
            zeros = [torch.zeros_like(segment.tensor) for segment in self._stand_ins]
            self._step_over(
                self._stand_ins, zeros, None, None, self._takes_scale(), self._bare_step
            )

    def _step_over(
        self,
        segments: Sequence[Segment],
        gradients: list[Tensor],
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
        in_kernel: bool,
        step: Callable[[], Any],
    ) -> None:
        """``step`` with ``gradients``; the optimizer passes over segments that have none."""
        optimizer: Any = self.optimizer
        if grad_scale is not None and not in_kernel and gradients:
            torch._foreach_div_(
                gradients, grad_scale.to(dtype=gradients[0].dtype, device=gradients[0].device)
            )
        try:
            if in_kernel:
                # The kernels skip on exactly 1.0 and take fp32.
                optimizer.grad_scale = (
                    None
                    if grad_scale is None
                    else grad_scale.detach().to(torch.float32).reshape(())
                )
                optimizer.found_inf = (
                    None if found_inf is None else found_inf.ne(0).to(torch.float32).reshape(())
                )
            for segment, gradient in zip(segments, gradients):
                segment.tensor.grad = gradient
            step()
        finally:
            for segment in segments:
                segment.tensor.grad = None
            if in_kernel:
                del optimizer.grad_scale, optimizer.found_inf

    def _takes_scale(self) -> bool:
        return torch_fused.takes_scale(self.optimizer, self._base, None)

    def _bare_step(self) -> None:
        """The class's own step without hooks, which run once for the whole step."""
        own = type(self.optimizer).step
        getattr(own, "__wrapped__", own)(self.optimizer)

    # ---- the second half of a step: what is offloaded ----

    def begin(self, divisor: float, number: int) -> Update:
        """The update of everything that is offloaded, by the groups as they are now; step counters
        advance as flats are announced.

        ``number`` is another one at each step, and the same on all ranks: stochastic rounding
        depends on it.
        """
        self._offloaded.start_momentum()
        rules = [self._offloaded.rule(index) for index in range(len(self.groups))]
        groups = [
            {name: _now(value) for name, value in group.items() if name != "params"}
            for group in self.groups
        ]
        return Update(self, rules, groups, divisor, number)

    def offloaded_segments(self, flat: Flat) -> list[Segment]:
        """The segments of ``flat``, whose state is offloaded."""
        return self._offloaded.segments(flat)

    def count(self, flat: Flat, rules: Sequence[Rule | None]) -> dict[Segment, Counted]:
        """Advance the step counters of ``flat``, but for parameters that are unused: they are in
        none of the segments returned.
        """
        left_out = (
            self._leave_out(self._offloaded.segments(flat), flat.unused) if flat.unused else ()
        )
        counted = {}
        for segment in self._offloaded.segments(flat):
            if segment in left_out:
                continue
            count = self.optimizer.state[segment.tensor].get("step")
            if count is not None and rules[segment.group] is not None:
                count += 1
            number = 0 if count is None else int(count)
            counted[segment] = Counted(number, self._offloaded.take_fresh(segment))
        return counted

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

    def bring_back(self, moved: Mapping[str, Callable[[], None]]) -> None:
        """Keep the states of some flats on the device from now on: ``moved`` has, by key, what
        gives a flat its masters there.
        """
        flats = {flat.key: flat for flat in self._flats}
        scalars, apart = self.scalars(), self.apart()
        fresh = self._offloaded.fresh_names()
        kept = {key: self.tensors(flats[key]) for key in moved}
        for move in moved.values():
            move()
        self._bind({segment.group for segment in self._segments})
        self._offloaded.keep_fresh(fresh)
        for key, tensors in kept.items():
            for name, tensor in tensors.items():
                self.load_tensor(flats[key], name, tensor)
        self.load_scalars(scalars, apart)

    # ---- state, per flat and per group ----

    def tensors(self, flat: Flat) -> dict[str, Tensor]:
        """``"master"`` and each per-element state of ``flat``: 1-D over ``flat.owned``, views
        that may be written; of what is offloaded maybe copies, to be changed with
        :meth:`load_tensor`.
        """
        if flat.offloaded:
            return self._offloaded.tensors(flat)
        return {"master": masters(flat), **self._device.tensors(flat)}

    def names(self, flat: Flat) -> list[str]:
        """Arrays of a flat whose states are offloaded that hold something."""
        return self._offloaded.names(flat)

    def load_tensor(self, flat: Flat, name: str, tensor: Tensor) -> None:
        """Copy ``tensor`` (1-D over ``flat.owned``) into the masters or a state; state that does
        not exist yet is created.

        Elements whose group keeps no such state (SGD's momentum may be on in one group only) are
        passed over.

        Raises:
            UnsupportedOptimizerError: no group keeps a state of that name.
        """
        if flat.offloaded and name in flat.storage.names():
            self._offloaded.load_tensor(flat, name, tensor)
            return
        if name == "master":
            _copy(masters(flat), tensor)
            return
        touched = [
            (segment, part)
            for segment in self._segments
            for part in segment.parts
            if part.flat is flat
        ]
        known = []
        for segment, part in touched:
            self._state_of(segment).create(segment)
            if name in self._entries.of(segment):
                known.append((segment, part))
        if touched and not known and not self._entries.some_group_keeps(name, masters(flat)):
            have = sorted(
                {key for segment, _ in touched for key in self._entries.elementwise(segment)}
            )
            raise UnsupportedOptimizerError(
                f"optimizer {type(self.optimizer).__name__} keeps no state {name!r} for "
                f"{flat.key!r} (it keeps {have}); the state was saved "
                "by another optimizer or with other options. Use the same optimizer, or load "
                "without optimizer states."
            )
        for segment, part in known:
            place = self.optimizer.state[segment.tensor][name][
                part.offset : part.offset + part.stop - part.start
            ]
            _copy(place, tensor[part.start : part.stop])

    def forget(self) -> None:
        """Make all state what it was before the first step."""
        self._offloaded.wait()
        dict.clear(self.optimizer.state)
        self._parted.clear()
        self._offloaded.renew_all()

    def scalars(self) -> list[dict[str, float]]:
        """Per group, the numbers its parameters share, such as ``{"step": 3.0}``; the same on
        every rank, but for :meth:`apart`.
        """
        out: list[dict[str, float]] = [{} for _ in self.groups]
        # the first of each group
        for segment in {segment.group: segment for segment in reversed(self._segments)}.values():
            out[segment.group] = self._entries.numbers(segment)
        return out

    def apart(self) -> list[dict[str, dict[str, float]]]:
        """Per group whose parameters have not all made the same steps: the numbers of each with
        elements on this rank; else nothing.
        """
        out: list[dict[str, dict[str, float]]] = [{} for _ in self.groups]
        for segment in self._segments:
            if segment.group in self._parted and segment.parts:
                out[segment.group] |= dict.fromkeys(segment.names, self._entries.numbers(segment))
        return out

    def load_scalars(
        self,
        scalars: Sequence[Mapping[str, float]],
        apart: Sequence[Mapping[str, Mapping[str, float]]] = (),
    ) -> None:
        """Inverse of :meth:`scalars` and :meth:`apart`, whose parameters may be of any rank; state
        that does not exist yet is created.

        Raises:
            UnsupportedOptimizerError: another number of groups, or a number that a group does not
            keep.
        """
        self._same_groups(scalars, "step counts")
        own = {name: values for group in apart for name, values in group.items()}
        if own:
            numbers_of = {name: tuple(sorted(values.items())) for name, values in own.items()}
            concerned = [
                segment
                for segment in self._segments
                if segment.parts and not segment.names.isdisjoint(own)
            ]
            self._parted |= {index for index, group in enumerate(apart) if group}
            self._divide(concerned, numbers_of.get)
        for segment in self._segments:
            values = (
                own.get(min(segment.names), scalars[segment.group])
                if own and segment.parts
                else scalars[segment.group]
            )
            if not values:
                if own and segment.parts and min(segment.names) in own:
                    self._state_of(segment).unstep(segment)
                continue
            self._state_of(segment).create(segment)
            kept = self._entries.of(segment)
            for name, number in values.items():
                if name not in kept:
                    raise UnsupportedOptimizerError(
                        f"optimizer {type(self.optimizer).__name__} keeps no number {name!r} in "
                        f"group {segment.group}; the state was saved by "
                        "another optimizer. Use the same one, or load without optimizer states."
                    )
                if isinstance(kept[name], Tensor):
                    kept[name].fill_(number)
                else:
                    self.optimizer.state[segment.tensor][name] = state.scalar_like(
                        kept[name], number
                    )

    def hyperparameters(self) -> list[dict[str, Any]]:
        """Per group, the settings a checkpoint keeps, as JSON-able values (see
        :mod:`hf_zero.optim.hyperparameters`).
        """
        return [hyperparameters.plain(group) for group in self.groups]

    def load_hyperparameters(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Write ``saved`` into the live group dicts; a schedule goes on from there."""
        self._same_groups(saved, "hyperparameters")
        for group, values in zip(self.groups, saved):
            hyperparameters.restore(group, values)

    def packed(self, packed: dict[str, Any]) -> dict[str, Any]:
        """The optimizer's own state dict ``packed``, over the segments of this rank, with where
        each of them lies and with what is offloaded, read into memory.
        """
        in_order = sorted(self._segments, key=lambda segment: segment.group)
        packed = self._offloaded.packed(packed, in_order)
        return snapshots.described(packed, self._segments, self._parted)

    def fitted(self, packed: dict[str, Any]) -> dict[str, Any]:
        """``packed``, a state dict of these elements, for the optimizer's own
        ``load_state_dict``: segments are cut where those of ``packed`` begin, and its entries
        where segments of this optimizer do. One that does not say where its segments lie is
        returned as it is.

        Raises:
            UnsupportedOptimizerError: other groups, or not the elements of this rank.
        """
        self._same_groups(packed["param_groups"], "a state dict")
        saved = snapshots.read(packed, type(self.optimizer).__name__)
        if saved is None:
            return packed
        self._replace(
            {
                segment: split(segment, saved.borders(segment))
                for segment in self._segments
                if segment.parts
            }
        )
        self._parted = set(saved.parted)
        return saved.over(self._segments)

    def unpacked(self) -> None:
        """The optimizer's own ``load_state_dict`` has given its segments other state."""
        self._device.stepped(together=False)
        self._offloaded.unpacked()

    def keeps(self, name: str) -> bool:
        """Whether a group of this optimizer keeps a state ``name``, as far as its class tells
        without a step.
        """
        return self._entries.some_group_keeps(name, torch.zeros(1))

    def _carry(self, carried: state.Carried, group_of: Mapping[str, int]) -> None:
        with_state = {group_of[name] for name in carried.tensors}
        for segment in self._segments:
            scalars = carried.scalars.get(segment.group, {})
            if not scalars and segment.group not in with_state:
                continue
            self._state_of(segment).create(segment)
            live = self.optimizer.state[segment.tensor]
            for name, number in scalars.items():
                live[name] = state.scalar_like(live[name], number) if name in live else number
            for part in segment.parts:
                for key, start, stop, at in part.pieces():
                    for name, whole in carried.tensors.get(key, {}).items():
                        self._state_of(segment).put(segment, name, at, whole[start:stop])

    def _same_groups(self, given: Sequence[Any], what: str) -> None:
        if len(given) != len(self.groups):
            raise UnsupportedOptimizerError(
                f"{what} of {len(given)} groups cannot go into optimizer "
                f"{type(self.optimizer).__name__} with {len(self.groups)}; build the "
                "optimizer with the groups it was saved with, or load without optimizer states"
            )


def _now(setting: Any) -> Any:
    """What ``setting`` of a group is now: a scheduler writes a rate that is a tensor in place."""
    return setting.clone() if isinstance(setting, Tensor) else setting


def _copy(into: Tensor, values: Tensor) -> None:
    if into.data_ptr() != values.data_ptr():
        into.copy_(values)
