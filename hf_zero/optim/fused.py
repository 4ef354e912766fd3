"""The update of all segments in one launch: Adam, AdamW and Lion by the flat kernels, in place of
the optimizer's own step.

[Note: state under a fused step]
State stays in ``optimizer.state`` under torch's names, shapes and dtypes, so checkpoints and state
dicts do not depend on the kernel. Moments are slices of the arrays of ``DeviceState``; counters are
views of one tensor with an entry per group, or an entry per segment once segments of a group
differ in their counts: from the first step on that leaves a segment out, or if loaded state has
different counts. Replaced tensors (``load_state_dict``) are detected by identity at the next step
and moved into the arrays. Before the optimizer's own step runs, and before scalars are loaded
segment by segment, the shared counters are cloned: torch increments each entry, and would increment
a shared one several times.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hf_zero.device import graphs
from hf_zero.device.pinned import upload
from hf_zero.ops import dispatch
from hf_zero.ops.flat_optimizers import (
    ADAM,
    LION,
    RowSettings,
    adam_,
    advance_,
    lion_,
    settings_table,
)
from hf_zero.ops.flat_tiles import FlatRun, Tiles
from hf_zero.optim.adam import Adam
from hf_zero.optim.device_state import DeviceState
from hf_zero.optim.elementwise import elementwise_base
from hf_zero.optim.lion import Lion
from hf_zero.optim.own_step import is_own
from hf_zero.optim.segments import ParamGroup, ParamState, Segment, SegmentPart
from hf_zero.optim.step_launch import StepLaunch

_MOMENTS = {"flat_adam": ("exp_avg", "exp_avg_sq"), "flat_lion": ("exp_avg",)}


@dataclass(frozen=True)
class _Launch:
    """One kernel launch, over segment parts whose master weights, gradients, moments and shards lie
    in the same storages; ``segment``, ``part``: the first, by which these are found.
    """

    segment: Segment
    part: SegmentPart
    tiles: Tiles


@dataclass(eq=False)
class _Tables:
    """Device tables of the launches over one set of segments; ``numbers`` and ``key``: the host
    values that they were made from.
    """

    settings: Tensor | None = None
    numbers: list[list[float]] = field(default_factory=list)
    key: tuple[object, ...] = ()
    launches: list[_Launch] = field(default_factory=list)
    written: set[str] = field(default_factory=set)  # keys of shards that it writes whole
    # rows of the settings that it reads, if steps are counted per segment, and their indices there
    rows: list[int] = field(default_factory=list)
    selected: Tensor | None = None


class FusedStep(StepLaunch):
    """The update of an optimizer, whose class updates as ``base``, on segments of one device."""

    def __init__(
        self, device: DeviceState, base: type | None, kernels: str | tuple[str, ...]
    ) -> None:
        entries = device.entries
        self._optimizer, self._base = entries.optimizer, base
        # the launch reads and writes state in fp32
        self._kernel = KERNELS.get(base) if base is not None and entries.bf16 is None else None
        self._moments = () if self._kernel is None else _MOMENTS[self._kernel.name]
        self._kernels = kernels
        self._device, self._states = device, entries.states
        self._own_step = is_own(entries.optimizer.step, entries.optimizer)
        self.reset(None)

    @staticmethod
    def reads_16_bits(
        optimizer: torch.optim.Optimizer, kernels: str | tuple[str, ...], device: torch.device
    ) -> bool:
        # torch's own update first casts all of them to fp32, and takes more memory at its peak than
        # with fp32 gradients
        base = elementwise_base(type(optimizer))
        kernel = KERNELS.get(base) if base is not None else None
        if (
            kernel is None
            or not dispatch.wanted("optimizer", kernels, device)
            or kernel.name in dispatch.broken()
        ):
            return False
        # binding switches ``fused`` on for torch's classes unless the group says otherwise
        plain = [
            {**group, "fused": group.get("fused") is not False and group.get("foreach") is None}
            for group in optimizer.param_groups
        ]
        return all(is_plain(group, base) for group in plain)

    def reset(self, device: torch.device | None) -> None:
        self.ready = (
            self._kernel is not None
            and self._own_step
            and device is not None
            and dispatch.wanted("optimizer", self._kernels, device)
        )
        # state by segment, as the last launch has left it
        self._slices: dict[Segment, dict[str, Tensor]] = {}
        self._counts_by_segment = False  # count steps per segment, not per group
        self._rows: dict[Segment, int] = {}  # segment -> its row of the tables, if counted so
        self._steps: Tensor | None = None
        # by the first of the segments that are stepped together
        self._tables: dict[Segment, _Tables] = {}

    def divide(self, by_segment: bool = True) -> None:
        # until the next launch, the counters of a group would still be one
        self.separate_counters()
        if by_segment or self._counts_by_segment:  # else a captured launch reads its tables there
            self._rows, self._steps, self._tables = {}, None, {}
        self._counts_by_segment = by_segment

    def takes(self, segments: Sequence[Segment]) -> bool:
        if (
            self._kernel is None
            or not self.ready
            or self._kernel.name in dispatch.broken()
            or not any(segment.parts for segment in segments)
        ):
            return False
        device = segments[0].tensor.device
        # pre-step hooks may read the gradient of each tensor
        if self._optimizer._optimizer_step_pre_hooks:
            return False
        groups = self._optimizer.param_groups
        return all(
            is_plain(groups[index], self._base) for index in {segment.group for segment in segments}
        ) and all(
            segment.tensor.device == device
            and segment.tensor.dtype == torch.float32
            and all(is_ready(part, device) for part in segment.parts)
            for segment in segments
        )

    def repeats(self, segments: Sequence[Segment]) -> bool:
        """Return whether a launch over all of ``segments`` can be replayed from a graph: the kernel
        takes it, and the segments of a group share a step counter.
        """
        if self._counts_by_segment or not self.takes(segments):
            return False
        return self._is_in_place(segments) or not self._counts_differ(segments)

    def prepare(self, segments: Sequence[Segment], shards: Mapping[str, Tensor]) -> list[Tensor]:
        """Write the settings of the next step over ``segments`` to the device, with the tables of
        its launches if a storage or offset has changed; return the tensors outside the graph that a
        captured launch of this step reads or writes.
        """
        if not self._is_in_place(segments):
            self._put_in_place(segments, segments)
        tables = self._plan(segments, shards)
        assert self._steps is not None
        settings = self._settings_of(tables, segments, self._steps.device)
        parts = [part for segment in segments for part in segment.parts]
        return [
            settings,
            self._steps,
            *self._device.all_arrays,
            *(launch.tiles.table for launch in tables.launches),
            *(segment.tensor for segment in segments),
            *(part.flat.gradient.shard for part in parts if part.flat.gradient.shard is not None),
            *shards.values(),
        ]

    def step(
        self,
        segments: Sequence[Segment],
        stepped: Sequence[Segment],
        grad_scale: Tensor | None,
        shards: Mapping[str, Tensor],
        hooks: bool,
    ) -> set[str]:
        device = segments[0].tensor.device
        if len(stepped) < len(segments) and not self._counts_by_segment:
            self.divide()
        if not self._is_in_place(stepped):
            self._put_in_place(segments, stepped)
        divisor = None
        if grad_scale is not None:
            divisor = grad_scale.detach().to(device, torch.float32).reshape(())
        tables = self._plan(stepped, shards)

        def launch(optimizer: torch.optim.Optimizer) -> None:
            if stepped:
                self._launch(tables, stepped, divisor, shards)

        (torch.optim.Optimizer.profile_hook_step(launch) if hooks else launch)(self._optimizer)
        return tables.written

    def _launch(
        self,
        tables: _Tables,
        segments: Sequence[Segment],
        divisor: Tensor | None,
        shards: Mapping[str, Tensor],
    ) -> None:
        assert self._steps is not None
        coefficients = self._advance(tables, self._steps, segments)
        for launch in tables.launches:
            shard, grad = shards.get(launch.part.flat.key), launch.part.flat.gradient.shard
            assert grad is not None
            master = _storage_of(launch.segment.tensor)
            out = None if shard is None else _storage_of(shard)
            shared: dict[str, Any] = {"divisor": divisor, "out": out}
            slices = self._slices[launch.segment]
            moments = [_storage_of(slices[name]) for name in self._moments]
            update: Any = adam_ if self._kernel is ADAM else lion_
            update(master, _storage_of(grad), *moments, launch.tiles, coefficients, **shared)

    def _advance(self, tables: _Tables, steps: Tensor, segments: Sequence[Segment]) -> Tensor:
        """Count the step of ``segments``; return the coefficients of each row for the kernel."""
        if not self._counts_by_segment:
            settings = tables.settings  # of :meth:`prepare`, for a launch that is captured
            if settings is None or not graphs.capturing():
                settings = self._settings_of(tables, segments, steps.device)
            return advance_(steps, settings)
        selected = self._selected(tables, segments, steps.device)
        counted = steps[selected]
        by_group = {
            group: self._row(self._optimizer.param_groups[group])
            for group in {segment.group for segment in segments}
        }
        advanced = advance_(
            counted,
            self._uploaded(tables, [by_group[segment.group] for segment in segments], steps.device),
        )
        steps[selected] = counted
        coefficients = advanced.new_zeros(steps.numel(), advanced.shape[1])
        coefficients[selected] = advanced
        return coefficients

    def _selected(
        self, tables: _Tables, segments: Sequence[Segment], device: torch.device
    ) -> Tensor:
        """Return the rows of ``segments`` as indices on the device, copied there if they differ."""
        rows = [self._rows[segment] for segment in segments]
        if tables.selected is None or rows != tables.rows:
            chosen = torch.tensor(rows, dtype=torch.int64)
            tables.rows, tables.selected = rows, upload(chosen, device)
        return tables.selected

    def _settings_of(
        self, tables: _Tables, segments: Sequence[Segment], device: torch.device
    ) -> Tensor:
        """Return the settings of the groups of ``segments`` on the device, a row for each group."""
        used = {segment.group for segment in segments}
        rows = [
            self._row(group) if index in used else RowSettings(0.0)
            for index, group in enumerate(self._optimizer.param_groups)
        ]
        return self._uploaded(tables, rows, device)

    def _uploaded(
        self, tables: _Tables, rows: Sequence[RowSettings], device: torch.device
    ) -> Tensor:
        """Return ``rows`` as a table on the device, copied there if one of them has changed."""
        numbers = [row.numbers() for row in rows]
        if (
            tables.settings is None
            or numbers != tables.numbers
            or any(isinstance(row.lr, Tensor) for row in rows)
        ):
            table, tables.numbers = settings_table(rows, device), numbers
            if tables.settings is None or tables.settings.shape != table.shape:
                tables.settings = table
            else:  # a captured launch reads it there
                tables.settings.copy_(table)
        return tables.settings

    def _row(self, group: ParamGroup) -> RowSettings:
        beta1, beta2 = group["betas"]
        shared = {
            "lr": group["lr"],
            "beta1": beta1,
            "beta2": beta2,
            "weight_decay": group["weight_decay"],
            "maximize": group["maximize"],
        }
        if self._kernel is LION:
            return RowSettings(**shared, corrected=False)
        decoupled = group.get("decoupled_weight_decay", self._base is torch.optim.AdamW)
        corrected = bool(group.get("bias_correction", True))
        return RowSettings(
            **shared, eps=group["eps"], decoupled=bool(decoupled), corrected=corrected
        )

    def _plan(self, segments: Sequence[Segment], shards: Mapping[str, Tensor]) -> _Tables:
        """Return the tables of the launches over ``segments``, new ones if a place has changed."""
        if not segments:
            return _Tables()
        tables = self._tables.setdefault(segments[0], _Tables())
        places = (
            (
                _place(segment.tensor),
                _place(part.flat.gradient.shard),
                _place(shards.get(part.flat.key)),
            )
            for segment in segments
            for part in segment.parts
        )
        key = self._device.allocations, *places
        if tables.launches and key == tables.key:
            return tables
        together: dict[tuple[object, ...], tuple[Segment, SegmentPart, list[FlatRun]]] = {}
        covered: dict[str, int] = {}
        for segment in segments:
            for part in segment.parts:
                grad, shard = part.flat.gradient.shard, shards.get(part.flat.key)
                assert grad is not None
                moments = [self._slices[segment][name] for name in self._moments]
                kind = tuple(
                    None if t is None else (t.untyped_storage()._cdata, t.dtype)
                    for t in (segment.tensor, grad, shard, *moments)
                )
                piece = FlatRun(
                    part.stop - part.start,
                    self._row_of(segment),
                    _begin(segment.tensor) + part.offset,
                    _begin(grad) + part.start,
                    _begin(moments[0]) + part.offset,
                    None if shard is None else _begin(shard) + part.start,
                )
                together.setdefault(kind, (segment, part, []))[2].append(piece)
                if shard is not None:
                    covered[part.flat.key] = covered.get(part.flat.key, 0) + piece.length
        device = segments[0].tensor.device
        tables.launches = [
            _Launch(segment, part, Tiles.cut(pieces, device))
            for segment, part, pieces in together.values()
        ]
        tables.written = {name for name, numel in covered.items() if numel == shards[name].numel()}
        tables.key = key
        return tables

    def _is_in_place(self, segments: Sequence[Segment]) -> bool:
        state = self._states
        return self._slices.keys() >= set(segments) and all(
            state[segment.tensor].get(name) is slice_
            for segment in segments
            for name, slice_ in self._slices[segment].items()
        )

    def _put_in_place(self, segments: Sequence[Segment], stepped: Sequence[Segment]) -> None:
        """Move the state of those of ``segments`` that have some into its arrays, and their step
        counters into one tensor. Create that of ``stepped``.
        """
        self._device.create_for_first_step(stepped)
        for segment in stepped:
            self._device.create(segment)  # a script may have removed it
        state = self._states
        begun = [segment for segment in segments if state.get(segment.tensor)]
        self._device.move_into_arrays(begun)
        if not self._counts_by_segment and self._counts_differ(begun):
            self.divide()
        if self._counts_by_segment and not self._rows:
            self._rows = {segment: row for row, segment in enumerate(segments)}
        if self._steps is None:
            number = len(self._rows or self._optimizer.param_groups)
            device = segments[0].tensor.device
            self._steps = torch.zeros(number, dtype=torch.float32, device=device)
        self._slices = {}
        for segment in begun:
            live = state[segment.tensor]
            slices = self._slices[segment] = {name: live[name] for name in self._moments}
            if self._kernel is ADAM:
                slices["step"] = self._counter(live, self._steps[self._row_of(segment)])

    def _counts_differ(self, segments: Sequence[Segment]) -> bool:
        """Return whether segments of one group have made different numbers of steps."""
        if self._kernel is not ADAM:
            return False
        steps = [self._states.get(segment.tensor, {}).get("step") for segment in segments]
        device, kind = segments[0].tensor.device, torch.float32
        known = [torch.as_tensor(s, dtype=kind, device=device) for s in steps if s is not None]
        if not known:
            return False
        numbers = iter(torch.stack(known).tolist())  # one copy to the host
        counts = {
            (segment.group, 0.0 if step is None else next(numbers))
            for segment, step in zip(segments, steps)
        }
        return len(counts) > len({group for group, _ in counts})

    def _row_of(self, segment: Segment) -> int:
        return self._rows[segment] if self._counts_by_segment else segment.group

    @staticmethod
    def _counter(state: ParamState, counter: Tensor) -> Tensor:
        """Return ``counter``, which takes the place of the step count in ``state``."""
        count = state.get("step", 0.0)
        if isinstance(count, Tensor) and count.data_ptr() != counter.data_ptr():
            counter.copy_(count)
        elif not isinstance(count, Tensor):
            counter.fill_(count)
        state["step"] = counter
        return counter

    def separate_counters(self) -> None:
        if self._kernel is ADAM:
            for segment, slices in self._slices.items():
                entries = self._states.get(segment.tensor, {})
                if entries.get("step") is slices["step"]:
                    entries["step"] = slices["step"].clone()
        self._slices = {}


def _place(tensor: Tensor | None) -> tuple[int, int, torch.dtype] | None:
    """Return the storage of ``tensor``, its offset there and its dtype, on which the tables depend:
    their places count from the beginning of a storage, whose memory may be another in each step.
    """
    if tensor is None:
        return None
    return tensor.untyped_storage()._cdata, _begin(tensor), tensor.dtype


def _begin(tensor: Tensor) -> int:
    return int(tensor.storage_offset())


def _storage_of(tensor: Tensor) -> Tensor:
    """Return the whole storage of ``tensor`` as a 1-D tensor of its dtype."""
    return tensor.detach().as_strided(
        (tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0
    )


KERNELS: dict[type, Any] = {
    **dict.fromkeys((torch.optim.Adam, torch.optim.AdamW, Adam), ADAM),
    Lion: LION,
}
_GRADIENTS = (torch.float32, torch.bfloat16, torch.float16)


def is_plain(group: ParamGroup, base: type | None) -> bool:
    """Return whether the kernels support all settings of ``group``."""
    numbers = (*group["betas"], group["weight_decay"], group.get("eps", 0.0))
    plain = all(isinstance(number, (int, float)) for number in numbers) and _is_number(group["lr"])
    if base is Lion:
        return plain and group["foreach"] is None
    return plain and bool(group["fused"]) and not group["amsgrad"] and not group["differentiable"]


def _is_number(lr: object) -> bool:
    return isinstance(lr, (int, float)) or (isinstance(lr, Tensor) and lr.numel() == 1)


def is_ready(part: SegmentPart, device: torch.device) -> bool:
    grad = part.flat.gradient.shard
    return (
        grad is not None
        and grad.device == device
        and grad.dtype in _GRADIENTS
        and grad.is_contiguous()
    )
