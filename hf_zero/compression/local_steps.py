"""0/1 Adam's local steps (arXiv:2202.06009): between two synchronizations each rank uses its own
momentum, and nothing is sent.

[Note: local steps]
With b1, D, e_i, C and a as in flat_momentum.py (the note), l = lr / (1 - b1^t), and m and x the
momentum and the weights of the last synchronization, equal on all ranks, rank i begins with m_i =
m, K = 1, L = u_i = 0::

    each step   m_i = b1 m_i + (1 - b1) g_i;        u_i = (1 - lr wd) u_i + l m_i
                K = (1 - lr wd) K;                  L = (1 - lr wd) L + l
    forwards and backwards compute with K x - u_i / D

    then        z = e_i + u_i / L;    q_i = C(z);   e_i = z - q_i                  (all-to-all)
    owner       r = mean_i q_i + b1 (a - m);        m = C(r);   a = m + (r - m) / b1   (all-gather)
    all         x = K x - L m / D

u_i / L is a mean of momenta: errors have the units of momenta, as in steps that all synchronize,
where the paper's have the units of u_i. Both are equivalent while L is constant. Only
synchronizations change the weights: reads and writes outside forwards and backwards, and saves, see
x.

The contribution of a block of m_i to u_i is bounded by LIMIT, so that gradients which outgrow D
move no weight too far; that of m is bounded by LIMIT_OF_MEANS, because one rank's own momentum is
larger than a mean.

A parameter that no rank has used since the last synchronization stays unchanged. Tensors too small
for blocks take part in fp32 (:class:`FlatDense`), their variance frozen with the first local step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from hf_zero.compression.block_codecs import FLOATS
from hf_zero.compression.flat_momentum import AVERAGE, LIMIT, FlatMomentum
from hf_zero.distributed.mesh import Mesh
from hf_zero.errors import UnsupportedOptimizerError
from hf_zero.ops.sign_blocks_reference import powers
from hf_zero.optim.bound_optimizer import BoundOptimizer
from hf_zero.optim.one_bit import OneBit
from hf_zero.zero.layout.compute_copy import ChangedValues
from hf_zero.zero.layout.flat_buffer import FlatBuffer

LIMIT_OF_MEANS = 1.0


class LocalMomentum:
    """This rank's changes to the flat buffer of ``momentum`` since the last synchronization."""

    def __init__(self, momentum: FlatMomentum, bound: BoundOptimizer) -> None:
        self.momentum = momentum
        self.used = 0  # bit mask of the parameters that had gradients on this rank
        self._bound = bound
        self._loads = -1  # load count of the optimizer's state at the first local step
        self._own: Tensor | None = None  # m_i, fp32 [padded]
        self._moved: Tensor | None = None  # u_i, fp32 [padded]
        self._sums: dict[int, tuple[float, float]] = {}  # K and L by group; empty: no step yet

    @property
    def pending(self) -> bool:
        """Return whether there are local steps that have not been synchronized."""
        return bool(self._sums) and self._loads == self._bound.group_scalars.loads

    def add(self, gradient: Tensor | None, beta: float, factor: Tensor, step: int) -> None:
        """Make step number ``step`` by ``factor`` times ``gradient`` [padded]; None: zeros."""
        flat, momentum = self.momentum.flat, self.momentum
        if not self.pending:
            self.forget()
            self._loads = self._bound.group_scalars.loads
            self._own = momentum.values().clone()
            self._moved = torch.zeros_like(self._own)
        assert self._own is not None and self._moved is not None
        self._own.mul_(beta)
        if gradient is not None:
            self._own.add_(gradient.float() * factor)
        self.used |= flat.gradient.used
        settings = {index: momentum.settings(index, step, step) for index, *_ in momentum.runs}
        counted = self._bounded(step)
        for index, start, stop in momentum.runs:
            keep, size = settings[index]
            self._moved[start:stop].mul_(keep).add_(counted[start:stop], alpha=size)
        for index, (keep, size) in settings.items():
            factor_so_far, moved = self._sums.get(index, (1.0, 0.0))
            self._sums[index] = keep * factor_so_far, keep * moved + size

    def _bounded(self, step: int) -> Tensor:
        """Return m_i with its blocks bounded by LIMIT, as added to u_i: [padded]."""
        assert self._own is not None
        momentum_sum, blocks = self._own, self.momentum.blocks
        means = blocks.means(lambda start, stop: momentum_sum[start:stop].abs())
        factors = (self.momentum.largest(step) / means.clamp_(min=1e-38)).clamp_(max=1.0)
        return momentum_sum * blocks.spread(factors)

    def mean(self) -> Tensor:
        """Return u_i / L, [padded], in the memory of u_i."""
        assert self._own is not None and self._moved is not None
        for index, start, stop in self.momentum.runs:
            size, part = self._sums[index][1], self._moved[start:stop]
            if size > 0.0:
                part.div_(size)
            else:  # all learning rates were zero
                part.copy_(self._own[start:stop])
        return self._moved

    def settings(self, index: int) -> tuple[float, float]:
        """Return K and L of group ``index``."""
        return self._sums[index]

    def forget(self) -> None:
        """Drop the local steps, after a synchronization or because the state was replaced."""
        self._own = self._moved = None
        self._sums, self.used = {}, 0

    def write_local_weights(self, views: Mapping[str, Tensor]) -> None:
        """Write this rank's weights for forwards and backwards into ``views``, by name."""
        momentum = self.momentum
        if not self.pending or momentum.weights is None or momentum.exponents is None:
            return
        assert self._moved is not None
        for name, view in views.items():
            slot, index = momentum.flat.layout.by_name[name], self._bound.group_of[name]
            if not slot.numel:  # an empty tensor is in no run
                continue
            part, flat = slice(slot.offset, slot.end), view.view(-1)
            weights = momentum.weights[part]
            if momentum.has_copy:  # a script may have written to the 16-bit parameters
                weights = torch.where(weights.to(flat.dtype) == flat, weights, flat.float())
            moved = self._moved[part] * powers(momentum.exponents[part])
            flat.copy_(weights * self._sums[index][0] - moved)

    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self._own, self._moved) if tensor is not None)


class LocalSteps:
    """The local steps of ``momenta``, and of the other trainable flat buffers among ``flats``:
    ranks synchronize every ``interval`` steps.
    """

    def __init__(
        self,
        momenta: Sequence[FlatMomentum],
        flats: Sequence[FlatBuffer],
        bound: BoundOptimizer,
        one_bit: OneBit,
        changed_values: ChangedValues,
    ) -> None:
        self.interval = 1
        self.others: list[FlatMomentum] = []  # never compressed to bits
        self._changed_values = changed_values
        if momenta and one_bit.local:
            chosen = {momentum.flat for momentum in momenta}
            dense = [flat for flat in flats if flat.trainable and flat not in chosen]
            for flat in dense:
                if flat.dtype not in FLOATS:
                    raise UnsupportedOptimizerError(
                        f"{next(iter(flat.parameters))} is {flat.dtype}, of which ZeroOneAdam "
                        "makes no local steps; set local_step_clipper: 1, or train it in 32 bits"
                    )
            self.others = [FlatDense(flat, bound) for flat in dense]
        self._of = {m: LocalMomentum(m, bound) for m in (*momenta, *self.others)}
        self._moves = False  # modules compute with what write_local_weights writes

    @property
    def on(self) -> bool:
        """Return whether the next step is in a phase in which some steps send nothing."""
        return self.interval > 1

    @property
    def pending(self) -> bool:
        """Return whether ranks compute with different weights."""
        return any(local.pending for local in self._of.values())

    def synchronizes(self, step: int) -> bool:
        return step % self.interval == 0

    def of(self, momentum: FlatMomentum) -> LocalMomentum:
        return self._of[momentum]

    def compute_apart(self) -> None:
        """Make modules compute with this rank's weights; called between passes."""
        if self.on and not self._moves:
            self._moves = True
            for momentum, local in self._of.items():
                self._changed_values.change(
                    [momentum.flat], local.write_local_weights, "weights of this rank alone"
                )

    def unused(self, mesh: Mesh) -> dict[FlatMomentum, frozenset[str]]:
        """Return the parameters unused on all ranks since the last synchronization (collective)."""
        used = [
            local.used >> index & 1
            for momentum, local in self._of.items()
            for index in range(len(momentum.flat.layout.slots))
        ]
        what = "parameters used since the last synchronization"
        at, used_by_none = iter(mesh.shard.maximum_on_hosts(used, what)), {}
        for momentum in self._of:
            slots = momentum.flat.layout.slots
            used_by_none[momentum] = frozenset(slot.name for slot in slots if not next(at))
        return used_by_none

    def forget(self) -> None:
        for local in self._of.values():
            local.forget()

    def nbytes(self) -> int:
        """Return the bytes that this rank keeps for local steps."""
        total = sum(local.nbytes() for local in self._of.values())
        return total + sum(momentum.nbytes() for momentum in self.others)


class FlatDense(FlatMomentum):
    """A :class:`FlatMomentum` without compression; ``momentum`` and the messages are fp32 [ranks,
    chunk], and errors stay zero.
    """

    def renew(self) -> tuple[Tensor, Tensor]:
        layout = self.flat.layout
        if self.momentum is None:
            self.momentum = torch.empty(
                layout.num_shards,
                layout.shard_numel,
                dtype=torch.float32,
                device=self.flat.full.device,
            )
        return self.momentum.view(-1), self.state(AVERAGE).clone()

    def compress(self, gradient: Tensor, beta: float, factor: Tensor) -> Tensor:
        return torch.add(self.values() * beta, gradient * factor).view(
            self.flat.layout.num_shards, -1
        )

    def combine(self, came: Tensor, beta: float) -> Tensor:
        average = self.state(AVERAGE)
        torch.sum(came, 0, out=average)
        return average.div_(came.shape[0]).clone()

    def apply(
        self, step: int, settings: Callable[[int], tuple[float, float]], limit: float = LIMIT
    ) -> None:
        assert self.weights is not None and self.exponents is not None
        values = self.values()
        for index, start, stop in self.runs:
            keep, size = settings(index)
            update = values[start:stop] * powers(self.exponents[start:stop])
            self.weights[start:stop].mul_(keep).sub_(update, alpha=size)

    def values(self) -> Tensor:
        assert self.momentum is not None
        return self.momentum.view(-1)
