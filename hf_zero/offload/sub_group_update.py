"""One step of offloaded state: flat buffers in any order, sub-group by sub-group, also on another
thread than the training one.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, islice
from typing import TYPE_CHECKING, Any

from torch import Tensor

from hf_zero.offload.storage import MASTER, Storage
from hf_zero.ops.moment_blocks import Blocks, Moment

if TYPE_CHECKING:
    from hf_zero.optim.offloaded_segments import StepSubGroup
    from hf_zero.optim.segment_entries import NarrowStates
    from hf_zero.optim.segments import Segment
    from hf_zero.optim.sharded_tensors import ShardedTensors
    from hf_zero.optim.whole_tensor import TensorPlace
    from hf_zero.zero.layout.optimizer_shard import OptimizerShard

PREFETCHED_SUB_GROUPS = 8  # announced sub-groups to prefetch; there may be fewer buffers
# returns memory for the new values of elements [start, stop), in the dtype of the parameters
OutputFor = Callable[[int, int], Tensor | None]
# is called with this range and memory once the values are written
FinishOutput = Callable[[int, int, Tensor | None], None]


@dataclass(frozen=True, eq=False)
class WholeTensorCall:
    """Arguments of an update of whole tensors, as of :class:`hf_zero.optim.whole_tensor.Parts`."""

    place: TensorPlace
    tensor_state: dict[str, Tensor]
    results: tuple[Tensor, ...]


@dataclass(frozen=True, eq=False)
class Call:
    """The arguments of a kernel other than its arrays: the optimizer's ``group`` as it was when the
    step began, and the number of the step, from 1 on.
    """

    group: Mapping[str, Any]
    step: int
    divisor: float  # divides the gradient
    seed: int  # seed of stochastic rounding
    is_first_step: bool
    whole: WholeTensorCall | None = None


@dataclass(frozen=True)
class Rule:
    """``update(arrays by state name, gradient, values to write, call)``; ``compressible`` are the
    states that may be kept in 16 or 8 bits.

    ``prepare(arrays, gradient, call, at)``, if any, runs before the update, for everything that is
    updated: it returns the input that round ``at`` of a whole-tensor optimizer combines.
    """

    update: Callable[[Mapping[str, Moment], Tensor, Tensor | None, Call], None]
    knows: Callable[[Mapping[str, object]], bool]
    compressible: Mapping[str, bool]  # name: signed
    prepare: Callable[[Mapping[str, Moment], Tensor, Call, int], Tensor] | None = None


@dataclass(frozen=True, eq=False)
class Counted:
    """The number of a segment's step, from 1 on (0: its optimizer counts by itself), whether it is
    the first, and the state of its whole tensor.
    """

    step: int = 0
    is_first_step: bool = False
    tensor_state: dict[str, Tensor] = field(default_factory=dict)


class SubGroupUpdate:
    """One step of the offloaded state. Each flat buffer is to be run once. ``segments_of`` returns
    the segments of a flat buffer; ``count`` advances their step counters and returns them with
    their counts, both without those of unused parameters; ``step_sub_group`` updates what no rule
    does.
    """

    def __init__(
        self,
        segments_of: Callable[[OptimizerShard], Sequence[Segment]],
        step_sub_group: StepSubGroup,
        count: Callable[[OptimizerShard], Mapping[Segment, Counted]],
        rules: Sequence[Rule | None],
        groups: Sequence[Mapping[str, object]],
        divisor: float,
        steps_before: int,
        tensors: ShardedTensors | None,
        bf16: NarrowStates | None,
    ) -> None:
        self._segments_of, self._step_sub_group = segments_of, step_sub_group
        self._count, self._steps_before = count, steps_before
        self._rules, self.groups, self._divisor = rules, groups, divisor
        self._counted: dict[Segment, Counted] = {}
        self._tensors = tensors
        self._bf16 = bf16
        self._prepared: dict[Segment, Tensor] = {}  # in the current round
        self._results: dict[Segment, tuple[Tensor, ...]] = {}  # of finished rounds
        # sub-groups still to be acquired, in the order of their announcement
        self._line: dict[tuple[OptimizerShard, int], None] = {}
        self._lock = threading.Lock()

    @property
    def touches_optimizer(self) -> bool:
        """Return whether the optimizer's step is called, whose groups must not change meanwhile."""
        return any(rule is None for rule in self._rules)

    @property
    def rounds(self) -> int:
        """The number of rounds to prepare every announced flat buffer for before any is run."""
        return self._tensors.optimizer.ROUNDS if self._tensors is not None else 0

    def announce(self, flat: OptimizerShard) -> None:
        """Announce that ``flat`` is to be run, usually after those announced before. Its step
        counters advance now.

        No update of the flat buffer may be running.
        """
        counted = self._count(flat)
        with self._lock:
            self._counted.update(counted)
            self._line |= dict.fromkeys(
                (flat, sub_group) for sub_group, _ in self._sub_groups(flat)
            )

    def _sub_groups(self, flat: OptimizerShard) -> list[tuple[int, list[Segment]]]:
        """Return the sub-groups of ``flat``, with segments; none if its parameters are unused."""
        segments = self._segments_of(flat)
        if not any(segment in self._counted for segment in segments):
            return []
        return [
            (sub_group, list(those))
            for sub_group, those in groupby(segments, key=lambda segment: segment.sub_group)
        ]

    def run(self, flat: OptimizerShard, output_for: OutputFor, finish_output: FinishOutput) -> None:
        """Update ``flat``, which was announced, sub-group by sub-group: write the new values to
        ``output_for(start, stop)``, then call ``finish_output`` with the range and these values.
        """
        storage, grad = flat.updating(), flat.gradient.shard
        assert grad is not None
        for sub_group, segments in self._sub_groups(flat):
            arrays = self._acquire(flat, storage, sub_group)
            start, stop = segments[0].start, segments[-1].stop
            out = output_for(start, stop)
            if len(segments) == 1 and segments[0] in self._counted:
                self._apply(segments[0], arrays, grad[start:stop], out)
            else:
                self._apply_parts(segments, arrays, grad, out)
            storage.release(sub_group)
            finish_output(start, stop, out)

    def prepare(self, flat: OptimizerShard, at: int) -> None:
        """Run round ``at`` before the update of ``flat``, which was announced."""
        storage, grad = flat.updating(), flat.gradient.shard
        assert grad is not None
        for sub_group, segments in self._sub_groups(flat):
            chosen = [s for s in segments if s in self._counted and self._prepares(s)]
            if not chosen:
                continue
            state = self._acquire(flat, storage, sub_group)
            with self._lock:  # it is acquired again after all the others
                self._line[flat, sub_group] = None
            for segment in chosen:
                rule = self._rules[segment.group]
                assert rule is not None and rule.prepare is not None
                span = slice(segment.start - segments[0].start, segment.stop - segments[0].start)
                arrays = {name: array[span] for name, array in state.items()}
                self._prepared[segment] = rule.prepare(
                    arrays, grad[segment.start : segment.stop], self._call(segment), at
                )
            storage.release(sub_group)

    def _prepares(self, segment: Segment) -> bool:
        rule = self._rules[segment.group]
        return rule is not None and rule.prepare is not None

    def combine(self, at: int) -> None:
        """Combine round ``at``, for which all flat buffers have been prepared (collective)."""
        assert self._tensors is not None
        segments: list[list[Segment]] = [[] for _ in self.groups]
        for segment in self._prepared:
            segments[segment.group].append(segment)
        parts = [[segment.tensor for segment in of] for of in segments]
        prepared = [[self._prepared[segment] for segment in of] for of in segments]
        combined = self._tensors.optimizer.combine(at, self.groups, parts, prepared)
        for those, results in zip(segments, combined):
            for segment, result in zip(those, results):
                self._results[segment] = (*self._results.get(segment, ()), result)
        self._prepared = {}

    def _acquire(self, flat: OptimizerShard, storage: Storage, sub_group: int) -> Mapping[str, Any]:
        state = storage.acquire(sub_group)
        with self._lock:
            del self._line[flat, sub_group]
            following = list(islice(self._line, PREFETCHED_SUB_GROUPS))
        for other, key in following:
            other.contents.prefetch(key)
        return state

    def _apply_parts(
        self,
        segments: Sequence[Segment],
        state: Mapping[str, Any],
        grad: Tensor,
        out: Tensor | None,
    ) -> None:
        """Update the parts of a sub-group if some are unused, or at other numbers of steps."""
        first = segments[0].start
        whole = {
            name: array.decode() if isinstance(array, Blocks) else array
            for name, array in state.items()
        }
        for segment in segments:
            span = slice(segment.start - first, segment.stop - first)
            target = None if out is None else out[span]
            if segment in self._counted:
                arrays = {name: array[span] for name, array in whole.items()}
                self._apply(segment, arrays, grad[segment.start : segment.stop], target)
            elif target is not None:
                target.copy_(whole[MASTER][span])
        for name, array in state.items():
            if isinstance(array, Blocks):
                array.encode(whole[name])

    def _apply(
        self, segment: Segment, arrays: Mapping[str, Any], grad: Tensor, out: Tensor | None
    ) -> None:
        rule, counted = self._rules[segment.group], self._counted[segment]
        wide = arrays if self._bf16 is None else self._bf16.widen(arrays)
        writes = rule is not None and wide[MASTER] is arrays[MASTER]
        if rule is None:
            self._step_sub_group(segment, wide, grad, self._divisor, counted.is_first_step)
        else:
            rule.update(wide, grad, out if writes else None, self._call(segment))
        if self._bf16 is not None:
            self._bf16.narrow(segment, arrays, wide, self._steps_before)
        if out is not None and not writes:
            out.copy_(arrays[MASTER])

    def _call(self, segment: Segment) -> Call:
        counted = self._counted[segment]
        seed = zlib.crc32(
            f"{self._steps_before} {segment.parts[0].flat.key} {segment.start}".encode()
        )
        whole = None
        if self._tensors is not None:
            whole = WholeTensorCall(
                self._tensors.place_of(segment),
                counted.tensor_state,
                self._results.get(segment, ()),
            )
        return Call(
            self.groups[segment.group],
            counted.step,
            self._divisor,
            seed,
            counted.is_first_step,
            whole,
        )
