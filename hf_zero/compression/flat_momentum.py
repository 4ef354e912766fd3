"""The momentum of one flat buffer, sent in one bit.

[Note: the equations]
Of N ranks, rank i holds the error e_i of its messages; all hold the momentum m decoded from the
last messages, the exponents k of the frozen denominators D = sqrt(v_hat) + eps, and the fp32
weights x. The owner of a chunk also holds a, the momentum including what m lacks (``exp_avg``)::

    rank i   z = e_i + b1 m + (1 - b1) g_i;    q_i = C(z);    e_i = z - q_i      (all-to-all)
    owner    r = mean_i q_i + b1 (a - m);      m = C(r);      a = m + (r - m) / b1  (all-gather)
    all      x = (1 - lr wd) x - lr / (1 - b1^t) m / D, with 1 / D rounded to k

C is a bit an element and a scale for each block of a tensor (hf_zero/ops/sign_blocks.py). Nothing
is lost: the difference between m and the exact momentum is in a and in the errors, and is sent
later. This is 1-bit Adam (arXiv:2102.02888) with each rank keeping a part of the average instead of
all of it. At the freeze v is raised so that D is at least FLOOR times its root mean square in its
tensor: elements of tiny variance share a scale with larger ones, so their decoded momentum would
move them far, here and in later dense steps.

Nothing bounds m / D if gradients outgrow their size at the freeze (on a plateau that ends later, by
thousands). So where the root mean square of m / ((1 - b1^t) D) in a block exceeds ``limit``, the
step of x scales m down to it, as Adafactor does with its updates (arXiv:1804.04235, section 6). In
Adam it is about 1. Without bias correction m and v are used undivided, and the bound is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from hf_zero.device.pinned import upload
from hf_zero.ops.sign_blocks import BlockTable, SignBlocks
from hf_zero.ops.sign_blocks_reference import exponents_of
from hf_zero.optim.bound_optimizer import BoundOptimizer
from hf_zero.optim.segments import ParamGroup, group_runs
from hf_zero.zero.layout.flat_buffer import FlatBuffer
from hf_zero.zero.reduce.norm import sums_of_squares

# After a well-chosen freeze no run has reached LIMIT. A tighter LIMIT, and a higher FLOOR, cost
# GPT-2 up to 0.06 in loss (scripts/bench/results/compressed_loss-*.jsonl).
FLOOR, LIMIT = 0.03, 4.0
AVERAGE, VARIANCE = "exp_avg", "exp_avg_sq"


class FlatMomentum:
    """This rank's state of the momentum of ``flat``: see the note.

    ``begin`` is called before the first of consecutive steps in one bit, and after any change of
    weights or state from outside.
    """

    VARIANCES: tuple[str, ...] = (VARIANCE,)

    def __init__(self, flat: FlatBuffer, bound: BoundOptimizer) -> None:
        self.flat = flat
        layout, sent = flat.layout, flat.spec.momentum_blocks
        form = SignBlocks() if sent is None else SignBlocks(sent.block)
        self.blocks = form.cut(layout.edges, layout.end, layout.num_shards, layout.shard_numel)
        self._own_blocks: BlockTable = self.blocks.row(flat.mesh.shard.rank)
        self._bound = bound
        self.runs = [  # every element belongs to a group
            (run.group or 0, run.start, run.stop)
            for run in group_runs(flat.layout, (0, flat.layout.end), bound.group_of)
        ]
        self._run_of: Tensor | None = None  # int64 [ranks * blocks]: the run of each block
        self.error: Tensor | None = None  # [padded]
        self.momentum: Tensor | None = None  # [ranks, bytes]
        self.exponents: Tensor | None = None  # int8 [padded]
        self.weights: Tensor | None = None  # fp32 [padded]
        self._largest: Tensor | None = None  # fp32 [ranks, blocks]: scales of an update of LIMIT
        self.outgrown: Tensor | None = None  # bool, 0-dim: a step has reached LIMIT
        self._state: dict[str, Tensor] = {}
        self._master_seen: tuple[int, int] | None = None  # its address and version

    def state(self, name: str) -> Tensor:
        """Return the state ``name`` of this rank's chunk: [owned], a view of the optimizer's."""
        array, shard = self._state.get(name), self.flat.optimizer_shard
        if array is None or array.data_ptr() != self._bound.state.device.address(shard, name):
            self._state = self._bound.state.tensors(shard)
            array = self._state.get(name)
        assert array is not None
        return array

    @property
    def has_copy(self) -> bool:
        """Return whether the weights are an fp32 copy, because the parameters are in 16 bits."""
        return self.flat.dtype != torch.float32

    @property
    def _master_now(self) -> tuple[int, int] | None:
        master = self.flat.optimizer_shard.master
        return None if master is None else (master.data_ptr(), master._version)

    @property
    def is_stale(self) -> bool:
        """Return whether other code than these steps has written to this rank's weights."""
        if self.weights is None or not self.has_copy:
            return False
        return self._master_now != self._master_seen

    def note_master(self) -> None:
        """Record the version of the master weights after a step's own writes; weights share memory
        and its write counter, so any later change is another writer's.
        """
        self._master_seen = self._master_now

    def freeze(self) -> None:
        """Prepare the state of a subclass when the variance is frozen."""

    def denominators(self, step: int, lags: Mapping[str, int]) -> Tensor:
        """Return sqrt(v / (1 - b2^t)) + eps of this rank's chunk, [owned]: t is ``step``, the step
        of v, less ``lags``, by name the steps in which no rank has used the parameter.
        """
        variance = self.state(VARIANCE)
        result = torch.zeros_like(variance)
        for name, start, stop in self._owned():
            group, count = self._group_of(name), step - lags.get(name, 0)
            result[start:stop] = self._denominators_of(group, variance[start:stop], count)
        return result

    def sums(self, denominators: Tensor) -> Tensor:
        """Return, over this rank's elements of each tensor with a variance, the sum of squares of
        ``denominators`` and their number, [2, tensors], fp64.
        """
        variance, terms = self.state(VARIANCE), list[Tensor]()
        for _, start, stop in self._owned():
            varies = variance[start:stop] > 0
            terms.append(squares_of(denominators[start:stop] * varies))
            terms.append(varies.count_nonzero().double())
        return torch.stack([total.to(denominators.device) for total in terms]).view(-1, 2).T

    def raise_variance(
        self, denominators: Tensor, sums: Tensor, usual: Tensor, step: int, lags: Mapping[str, int]
    ) -> None:
        """Raise the variance of this rank's chunk so that ``denominators``, its own, are at least
        FLOOR times their root mean square in their tensor. Elements without variance, which no step
        has used, get the root mean square itself; a tensor of nothing else gets the ``usual`` one.
        """
        variance = self.state(VARIANCE)
        for (name, start, stop), (total, count) in zip(self._owned(), sums.T):
            mean = torch.where(count > 0, (total / count.clamp(min=1.0)).sqrt(), usual)
            local, stored = denominators[start:stop], variance[start:stop]
            least = torch.where(stored > 0, mean * FLOOR, mean).to(local.dtype)
            group = self._group_of(name)
            raised = self._variance_of(group, least, step - lags.get(name, 0))
            stored.copy_(torch.where(least > local, raised, stored))

    def _correction(self, group: ParamGroup, step: int) -> float:
        """Return the bias correction (a divisor) of a variance of ``step`` steps."""
        return grown(group, 1, max(1, step)) if corrects(group) else 1.0

    def _denominators_of(self, group: ParamGroup, variance: Tensor, step: int) -> Tensor:
        return variance.div(self._correction(group, step)).sqrt_().add_(float(group["eps"]))

    def _variance_of(self, group: ParamGroup, denominators: Tensor, step: int) -> Tensor:
        roots = (denominators - float(group["eps"])).clamp_(min=0.0)
        return roots.square_().mul_(self._correction(group, step))

    def count_variance(self, before: int, now: int, lags: Mapping[str, int]) -> None:
        """Rescale the variance from step ``before`` to step ``now``: the bias correction that the
        optimizer's own step divides by has changed.
        """
        for variance in map(self.state, self.VARIANCES):
            for name, start, stop in self._owned():
                group, lag = self._group_of(name), lags.get(name, 0)
                ratio = self._correction(group, now - lag) / self._correction(group, before - lag)
                variance[start:stop].mul_(ratio)

    def begin(self, denominators: Tensor, renews: bool = True) -> list[tuple[Tensor, Tensor]]:
        """Return the (whole, own) pairs to gather before steps in one bit; without ``renews`` the
        momentum is kept, which all ranks have.
        """
        flat, layout = self.flat, self.flat.layout
        master = flat.optimizer_shard.master
        assert master is not None
        self._largest = None
        # the clamp is for padding, which has no denominators
        exponents = exponents_of(denominators.clamp(min=1e-30).reciprocal())
        device = flat.full.device
        if self.error is None:
            self.error = torch.zeros(layout.padded, dtype=torch.float32, device=device)
        if self.exponents is None:
            self.exponents = torch.empty(layout.padded, dtype=torch.int8, device=device)
        if self.weights is None:
            self.weights = (
                flat.full
                if not self.has_copy
                else torch.empty(layout.padded, dtype=torch.float32, device=device)
            )
        pairs = [(self.exponents, exponents.to(torch.int8))]
        if self.weights is not flat.full:
            pairs.append((self.weights, master))
        return [*pairs, self.renew()] if renews or self.momentum is None else pairs

    def renew(self) -> tuple[Tensor, Tensor]:
        """Return the (whole, own) pair to gather C of the owners' averages on all ranks."""
        device, average = self.flat.full.device, self.state(AVERAGE)
        if self.momentum is None:
            self.momentum = self.blocks.empty(device)
        nothing = self._own_blocks.empty(device)
        zero = torch.zeros((), dtype=torch.float32, device=device)
        message = self._own_blocks.compress(
            average.clone(), torch.zeros_like(average), nothing, 0.0, zero
        )
        return self.momentum.view(-1), message.view(-1)

    def compress(self, gradient: Tensor, beta: float, factor: Tensor) -> Tensor:
        """Return the messages of this rank's ``gradient`` [padded], a row for the owner of each
        chunk. ``factor`` is (1 - beta) over the factor that the gradient is multiplied by.
        """
        assert self.error is not None and self.momentum is not None
        return self.blocks.compress(self.error, gradient, self.momentum, beta, factor)

    def combine(self, came: Tensor, beta: float) -> Tensor:
        """Return the message of this rank's chunk of the momentum from all ranks' messages."""
        assert self.momentum is not None
        rank = self.flat.mesh.shard.rank
        own_row = self.momentum[rank : rank + 1]
        return self._own_blocks.combine(came, self.state(AVERAGE), own_row, beta)

    def apply(
        self, step: int, settings: Callable[[int], tuple[float, float]], limit: float = LIMIT
    ) -> None:
        """Update the weights by the received momentum in step number ``step``. ``settings`` of a
        group: the factor that weights are multiplied by, and the step size; ``limit``: see the
        note.
        """
        assert self.momentum is not None and self.weights is not None
        assert self.exponents is not None
        if self._run_of is None:
            numbers = self.blocks.numbers([start for _, start, _ in self.runs])
            self._run_of = upload(numbers, self.weights.device)
        of_runs = self.rates(settings).float().index_select(1, self._run_of)
        decay, size = of_runs.view(2, *self.blocks.shape).unbind()
        self.blocks.apply(self.weights, self._bounded(step, limit), self.exponents, decay, size)

    def rates(self, settings: Callable[[int], tuple[float, float]]) -> Tensor:
        """Return ``settings`` of each run: fp64 [2, runs]."""
        numbers = list(zip(*(settings(index) for index, *_ in self.runs)))
        return upload(torch.tensor(numbers, dtype=torch.float64), self.flat.full.device)

    def largest(self, step: int) -> Tensor:
        """Return the scale of a block's momentum whose update in step number ``step`` is LIMIT:
        fp32 [ranks, blocks].
        """
        assert self.exponents is not None
        if self._largest is None:
            squares = self.blocks.mean_squares(self.exponents)
            self._largest = squares.rsqrt_().mul_(LIMIT).float()
            self.outgrown = torch.zeros((), dtype=torch.bool, device=self.exponents.device)
        # all groups have the same betas
        return self._largest * grown(self._bound.groups[0], 0, step)

    def _bounded(self, step: int, limit: float) -> Tensor:
        """Return the momentum of step number ``step``, with scales bounded by ``limit``."""
        assert self.momentum is not None
        largest, bounded = self.largest(step), self.momentum.clone()
        assert self.outgrown is not None
        scales = self.blocks.scales(bounded)
        self.outgrown.logical_or_((scales > largest).any())
        torch.minimum(scales, largest * (limit / LIMIT), out=scales)
        return bounded

    def values(self) -> Tensor:
        """Return the momentum as decoded on all ranks: fp32 [padded]."""
        assert self.momentum is not None
        return self.blocks.values(self.momentum)

    def settings(self, index: int, step: int, frozen: int) -> tuple[float, float]:
        """Return the factor of group ``index``'s weights (decay), and the step size."""
        group = self._bound.groups[index]
        lr = float(group["lr"])
        decay = 1.0 - lr * float(group["weight_decay"])
        return decay, lr / (grown(group, 0, step) if corrects(group) else 1.0)

    def publish(self) -> None:
        """Copy the weights into the whole parameters, the shard and the master weights."""
        flat, weights = self.flat, self.weights
        master = flat.optimizer_shard.master
        assert weights is not None and master is not None
        if weights is not flat.full:
            flat.full.copy_(weights)
            master.copy_(weights[flat.owned[0] : flat.owned[1]])

    def snapshot_unused(self, names: frozenset[str]) -> Callable[[], None]:
        """Snapshot weights, error and average of the parameters ``names``; return a function that
        restores them after a step, which must not change unused parameters.
        """
        copies = [(tensor, tensor.clone()) for name in names for tensor in self._kept(name)]

        def restore() -> None:
            for tensor, before in copies:
                tensor.copy_(before)

        return restore

    def _kept(self, name: str) -> list[Tensor]:
        """Return views of everything that a step changes of parameter ``name``."""
        slot, (start, stop) = self.flat.layout.by_name[name], self._own(name)
        assert self.weights is not None and self.error is not None
        whole = [tensor[slot.offset : slot.end] for tensor in (self.weights, self.error)]
        return [*whole, self.state(AVERAGE)[start:stop]]

    def forget(self) -> None:
        """Drop errors and cached state, because the optimizer's state has been replaced."""
        self.error = None
        self._state = {}  # state of a parameter may be created later, at another address

    def take_errors(self, mean: Tensor, beta: float) -> None:
        """Move all ranks' errors, of which ``mean`` covers this chunk [owned], into the average."""
        assert self.error is not None
        self.state(AVERAGE).add_(mean * (1.0 / beta))
        self.error.zero_()

    def nbytes(self) -> int:
        """Return the bytes that this rank keeps besides the optimizer's state."""
        local = (self.error, self.momentum, self.exponents)
        whole = None if self.weights is self.flat.full else self.weights
        return sum(tensor.nbytes for tensor in (*local, whole) if tensor is not None)

    def _owned(self) -> list[tuple[str, int, int]]:
        """Return each parameter with the range of its part in this rank's chunk."""
        return [(name, *self._own(name)) for name in self.flat.layout.by_name]

    def _group_of(self, name: str) -> Mapping[str, Any]:
        group: ParamGroup = self._bound.groups[self._bound.group_of[name]]
        return group

    def _own(self, name: str) -> tuple[int, int]:
        _, start, stop = self.flat.spec.own_range(name)
        return start, stop


def corrects(group: ParamGroup) -> bool:
    """Return whether the optimizer corrects the moments of ``group`` for their start at zero."""
    return bool(group.get("bias_correction", True))


def grown(group: ParamGroup, moment: int, steps: int) -> float:
    """Return the share that a moment (0: the mean, 1: the variance) has of a constant after
    ``steps`` steps: the divisor of its bias correction.
    """
    return float(1.0 - float(group["betas"][moment]) ** steps)


def squares_of(values: Tensor) -> Tensor:
    """Return the sum of squares of ``values``, fp64, 0-dim."""
    if not values.numel():
        return torch.zeros((), dtype=torch.float64, device=values.device)
    return sums_of_squares([values])[0]
