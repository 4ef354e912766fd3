"""An optimizer bound to the flat shards of one rank: the user's own object, stepping segments
instead of parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_zero.errors import UnsupportedOptimizerError
from hf_zero.optim import hyperparameters, snapshots, state, torch_fused
from hf_zero.optim.elementwise import elementwise_base
from hf_zero.optim.fused import FusedStep
from hf_zero.optim.table import Flat, Region, Segment, cut, divide, masters, split
from hf_zero.parameters.layout import Slot


class BoundOptimizer:
    """``optimizer`` over this rank's flats.

    The object, its group dicts and their number stay; ``group["params"]`` becomes the list of this
    rank's segments, leaf tensors over the masters. A group that owns nothing on this rank gets a
    stand-in of one zero, so that its step counters run as on the other ranks.

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
        (:mod:`hf_zero.optim.fused`).

    Raises:
        UnsupportedOptimizerError: state exists that cannot be carried over; the optimizer is then
        unchanged.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        flats: Sequence[Flat],
        group_of: Mapping[str, int],
        parameters: Mapping[str, Tensor],
        kernels: Any = "auto",
    ) -> None:
        self.optimizer = optimizer
        self.group_of = dict(group_of)
        self._base = elementwise_base(type(optimizer))
        self._step = optimizer.step  # with the wrappers LR schedulers have put on the object
        self._fused = FusedStep(optimizer, self._base, self._step, kernels)
        self._flats = [flat for flat in flats if flat.trainable]
        slots: dict[str, Slot] = {
            slot.name: slot for flat in self._flats for slot in flat.layout.slots
        }
        carried = state.collect(optimizer, parameters, slots, group_of)
        self._bind(self._flats, {group_of[name] for name in slots if name in group_of})
        self._carry(carried, group_of)

    def _bind(self, flats: Sequence[Flat], groups: set[int]) -> None:
        """Cut ``flats`` into segments and put them into the optimizer's groups, with no state;
        each of ``groups`` gets one.
        """
        self._homed = False
        self._fused.reset()
        self._regions = self._cut(flats)
        self._region_of = {
            flat.key: (region, base) for region in self._regions for flat, base in region.flats
        }
        segments = [segment for region in self._regions for segment in region.segments]
        self._stand_ins: list[Segment] = []
        for group in sorted(groups - {segment.group for segment in segments}):
            stand_in = Segment(group, 0, 1, [])
            stand_in.tensor = torch.nn.Parameter(self._stand_in(flats), requires_grad=False)
            self._stand_ins.append(stand_in)
        self._segments = segments + self._stand_ins
        # groups whose parameters have not all made the same steps, as far as this rank has them
        self._parted: set[int] = set()
        dict.clear(self.optimizer.state)  # not that of a script, which comes to forget()
        self._list_segments()
        for live in self.groups:
            torch_fused.choose(self._base, live)

    def _list_segments(self) -> None:
        """Let the optimizer's groups and :meth:`step` know of the segments there are now."""
        self._stepped = self._segments
        for index, live in enumerate(self.groups):
            live["params"] = [
                segment.tensor for segment in self._segments if segment.group == index
            ]

    def _bind_segment(self, segment: Segment) -> None:
        """Give ``segment``, which was cut out of another, its tensor."""
        segment.bind()

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
                self._bind_segment(piece)
                start = piece.start - segment.start
                if entries:
                    self.optimizer.state[piece.tensor] = state.narrowed(
                        entries, segment.tensor.shape, start, start + piece.tensor.numel()
                    )
        if changed:
            for region in self._regions:
                region.segments = [
                    piece
                    for segment in region.segments
                    for piece in changed.get(segment, [segment])
                ]
            self._segments = [
                piece for segment in self._segments for piece in changed.get(segment, [segment])
            ]
            self._list_segments()
            self._fused.divide()

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

    @staticmethod
    def _stand_in(flats: Sequence[Flat]) -> Tensor:
        return masters(flats[0]).new_zeros(1)

    def _cut(self, flats: Sequence[Flat]) -> list[Region]:
        return cut(flats, self.group_of)

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
                self._regions_here(), self._stepped, left_out, grad_scale, found_inf, shards or {}
            )
            optimizer._opt_called = True
            self._homed = True
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
        if self._parted:
            # segments get their first state in different steps; it is brought together where it is
            # asked for
            self._homed = False
        elif not self._homed:
            self._settle()
        return set()

    def _regions_here(self) -> list[Region]:
        """The regions whose states are on the device."""
        return self._regions

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

    # ---- state, per flat and per group ----

    def tensors(self, flat: Flat) -> dict[str, Tensor]:
        """``"master"`` and each per-element state of ``flat``: 1-D over ``flat.owned``, views
        that may be written.
        """
        out = {"master": masters(flat)}
        if flat.key not in self._region_of:
            return out
        self._settle()
        region, base = self._region_of[flat.key]
        numel = flat.owned[1] - flat.owned[0]
        for segment in region.segments:
            if any(part.flat is flat for part in segment.parts):
                for name, home in self._homes(region, segment).items():
                    out[name] = home[base : base + numel]
        return out

    def load_tensor(self, flat: Flat, name: str, tensor: Tensor) -> None:
        """Copy ``tensor`` (1-D over ``flat.owned``) into the masters or a state; state that does
        not exist yet is created.

        Elements whose group keeps no such state (SGD's momentum may be on in one group only) are
        passed over.

        Raises:
            UnsupportedOptimizerError: no group keeps a state of that name.
        """
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
            self._create(segment)
            if name in self._kept(segment.tensor):
                known.append((segment, part))
        if touched and not known and not self._some_group_keeps(name, masters(flat)):
            have = sorted({key for segment, _ in touched for key in self._elementwise(segment)})
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
        dict.clear(self.optimizer.state)
        self._parted.clear()

    def scalars(self) -> list[dict[str, float]]:
        """Per group, the numbers its parameters share, such as ``{"step": 3.0}``; the same on
        every rank, but for :meth:`apart`.
        """
        out: list[dict[str, float]] = [{} for _ in self.groups]
        # the first of each group
        for segment in {segment.group: segment for segment in reversed(self._segments)}.values():
            out[segment.group] = self._numbers(segment)
        return out

    def apart(self) -> list[dict[str, dict[str, float]]]:
        """Per group whose parameters have not all made the same steps: the numbers of each with
        elements on this rank; else nothing.
        """
        out: list[dict[str, dict[str, float]]] = [{} for _ in self.groups]
        for segment in self._segments:
            if segment.group in self._parted and segment.parts:
                out[segment.group] |= dict.fromkeys(segment.names, self._numbers(segment))
        return out

    def _numbers(self, segment: Segment) -> dict[str, float]:
        kept, shape = self._kept(segment.tensor), segment.tensor.shape
        return {
            name: float(value)
            for name, value in kept.items()
            if state.is_scalar(name, value, shape)
        }

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
                    self._unstep(segment)
                continue
            self._create(segment)
            kept = self._kept(segment.tensor)
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
        each of them lies and with what is not kept in its books.
        """
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
        self._homed = False

    # ---- how state is kept ----

    def _kept(self, tensor: Tensor) -> dict[str, Any]:
        return state.kept(self.optimizer.state[tensor]) if tensor in self.optimizer.state else {}

    def _elementwise(self, segment: Segment) -> dict[str, Tensor]:
        shape = segment.tensor.shape
        return {
            name: v
            for name, v in self._kept(segment.tensor).items()
            if state.is_elementwise(name, v, shape)
        }

    def _create(self, segment: Segment) -> None:
        """Give ``segment`` the state it would have before its first step, if it has none."""
        if self._kept(segment.tensor):
            return
        for name, value in state.fresh_state(
            self.optimizer, self.groups[segment.group], segment.tensor
        ).items():
            if state.is_elementwise(name, value, (1,)):
                value = value.expand(segment.tensor.shape).clone()
            self.optimizer.state[segment.tensor][name] = value

    def _unstep(self, segment: Segment) -> None:
        """Make ``segment`` one that was never stepped."""
        self.optimizer.state.pop(segment.tensor, None)

    def keeps(self, name: str) -> bool:
        """Whether a group of this optimizer keeps a state ``name``, as far as its class tells
        without a step.
        """
        return self._some_group_keeps(name, torch.zeros(1))

    def _some_group_keeps(self, name: str, like: Tensor) -> bool:
        return any(name in state.fresh_state(self.optimizer, group, like) for group in self.groups)

    def _homes(self, region: Region, segment: Segment) -> dict[str, Tensor]:
        """For each state of ``segment``, the tensor over the whole region that it is a part of
        (after ``_settle``).
        """
        return {
            name: value.as_strided((region.numel,), (1,), value.storage_offset() - segment.start)
            for name, value in self._elementwise(segment).items()
        }

    def _settle(self) -> None:
        """Keep each state of a region of several segments in one piece of memory, so that flats
        have views of it.

        torch makes state segment by segment, in the first step. The move costs one state of one
        region at a time.
        """
        for region in self._regions:
            for segment in region.segments:
                for name, value in self._kept(segment.tensor).items():
                    shape = segment.tensor.shape
                    if not state.is_scalar(name, value, shape) and not state.is_elementwise(
                        name, value, shape
                    ):
                        state.refuse_unknown(
                            self.optimizer,
                            name,
                            value,
                            f"a segment of {segment.parts[0].flat.key!r}",
                        )
            whole = (
                len(region.segments) == 1
                and region.segments[0].stop - region.segments[0].start == region.numel
            )
            if not whole:
                for name in sorted(
                    {name for segment in region.segments for name in self._elementwise(segment)}
                ):
                    self._gather_home(region, name)
        self._homed = True

    def _gather_home(self, region: Region, name: str) -> None:
        owners = [segment for segment in region.segments if name in self._elementwise(segment)]
        values = [self.optimizer.state[segment.tensor][name] for segment in owners]
        origins = {
            (value.untyped_storage()._cdata, value.storage_offset() - owner.start)
            for owner, value in zip(owners, values)
        }
        size = values[0].untyped_storage().nbytes() // values[0].element_size()
        if (
            len(origins) == 1
            and next(iter(origins))[1] >= 0
            and size - next(iter(origins))[1] >= region.numel
        ):
            return
        home = values[0].new_zeros(region.numel)
        for other in region.segments:
            if other not in owners:  # not stepped yet: what its first step will begin with
                first = state.fresh_state(
                    self.optimizer, self.groups[other.group], other.tensor
                ).get(name)
                if first is not None:
                    home[other.start : other.stop] = first
        for owner, value in zip(owners, values):
            home[owner.start : owner.stop].copy_(value)
            self.optimizer.state[owner.tensor][name] = home[owner.start : owner.stop]

    def _carry(self, carried: state.Carried, group_of: Mapping[str, int]) -> None:
        with_state = {group_of[name] for name in carried.tensors}
        for segment in self._segments:
            scalars = carried.scalars.get(segment.group, {})
            if not scalars and segment.group not in with_state:
                continue
            self._create(segment)
            live = self.optimizer.state[segment.tensor]
            for name, number in scalars.items():
                live[name] = state.scalar_like(live[name], number) if name in live else number
            for part in segment.parts:
                for key, start, stop, at in part.pieces():
                    for name, whole in carried.tensors.get(key, {}).items():
                        self._put(segment, name, at, whole[start:stop])

    def _put(self, segment: Segment, name: str, at: int, values: Tensor) -> None:
        """Write ``values`` into state ``name`` from element ``at`` of ``segment`` on."""
        live = self.optimizer.state[segment.tensor]
        if name not in live:
            live[name] = torch.zeros_like(segment.tensor)
        live[name][at : at + values.numel()].copy_(values)

    def _same_groups(self, given: Sequence[Any], what: str) -> None:
        if len(given) != len(self.groups):
            raise UnsupportedOptimizerError(
                f"{what} of {len(given)} groups cannot go into optimizer "
                f"{type(self.optimizer).__name__} with {len(self.groups)}; build the "
                "optimizer with the groups it was saved with, or load without optimizer states"
            )


def _copy(into: Tensor, values: Tensor) -> None:
    if into.data_ptr() != values.data_ptr():
        into.copy_(values)
