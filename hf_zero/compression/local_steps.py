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
for blocks take part in fp32 (:class:`UncodedMomentum`), their variance frozen with the first local
step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

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


class Totals(NamedTuple):
    """K and L of a parameter group over the local steps since the last synchronization."""

    decay: float = 1.0  # K, the product of the steps' weight decays
    length: float = 0.0  # L, the sum of step sizes, decayed


class LocalMomentum:
    """This rank's changes to the flat buffer of ``synchronized``, which holds the momentum and the
    weights of the last synchronization.
    """

    def __init__(self, synchronized: FlatMomentum, bound: BoundOptimizer) -> None:
        self.synchronized = synchronized
        self.used = 0  # bit mask of the parameters that had gradients on this rank
        self._bound = bound
        self._loads = -1  # load count of the optimizer's state at the first local step
        self._momentum: Tensor | None = None  # m_i, fp32 [padded]
        self._displacement: Tensor | None = None  # u_i, fp32 [padded]
        self._totals: dict[int, Totals] = {}  # by group; empty: no step yet

    @property
    def pending(self) -> bool:
        """Return whether there are local steps that have not been synchronized."""
        return bool(self._totals) and self._loads == self._bound.state.scalars.loads

    def add(self, gradient: Tensor, beta: float, factor: Tensor, step: int) -> None:
        """Make step number ``step`` by ``factor`` times ``gradient`` [padded]."""
        flat, synchronized = self.synchronized.flat, self.synchronized
        if not self.pending:
            self.forget()
            self._loads = self._bound.state.scalars.loads
            self._momentum = synchronized.values().clone()
            self._displacement = torch.zeros_like(self._momentum)
        assert self._momentum is not None and self._displacement is not None
        self._momentum.mul_(beta).add_(gradient.float() * factor)
        self.used |= flat.gradient.used
        bounded = self._bounded(self._momentum, step)
        sizes = {index: synchronized.settings(index, step, step) for index, *_ in synchronized.runs}
        for index, start, stop in synchronized.runs:
            decay, size = sizes[index]
            self._displacement[start:stop].mul_(decay).add_(bounded[start:stop], alpha=size)
        for index, (decay, size) in sizes.items():
            before = self._totals.get(index, Totals())
            self._totals[index] = Totals(decay * before.decay, decay * before.length + size)

    def _bounded(self, momentum: Tensor, step: int) -> Tensor:
        """Return ``momentum`` with its blocks bounded by LIMIT, as added to u_i: [padded]."""
        blocks = self.synchronized.blocks
        means = blocks.means(lambda start, stop: momentum[start:stop].abs())
        factors = (self.synchronized.largest(step) / means.clamp_(min=1e-38)).clamp_(max=1.0)
        return momentum * blocks.spread(factors)

    def write_local_weights(self, views: Mapping[str, Tensor]) -> None:
        """Write this rank's weights for forwards and backwards into ``views``, by name."""
        synchronized = self.synchronized
        if not self.pending or synchronized.weights is None or synchronized.exponents is None:
            return
        assert self._displacement is not None
        for name, view in views.items():
            slot, index = synchronized.flat.layout.by_name[name], self._bound.group_of[name]
            if not slot.numel:  # an empty tensor is in no run
                continue
            part, flat = slice(slot.offset, slot.end), view.view(-1)
            weights = synchronized.weights[part]
            if synchronized.has_copy:  # a script may have written to the 16-bit parameters
                weights = torch.where(weights.to(flat.dtype) == flat, weights, flat.float())
            change = self._displacement[part] * powers(synchronized.exponents[part])
            flat.copy_(weights * self._totals[index].decay - change)

    def take_mean(self) -> tuple[Tensor, dict[int, Totals]]:
        """Return u_i / L, [padded], with K and L by group; none are pending then."""
        assert self._momentum is not None and self._displacement is not None
        momentum, mean, totals = self._momentum, self._displacement, self._totals
        for index, start, stop in self.synchronized.runs:
            if totals[index].length > 0.0:
                mean[start:stop].div_(totals[index].length)
            else:  # all learning rates were zero
                mean[start:stop].copy_(momentum[start:stop])
        self.forget()
        return mean, totals

    def forget(self) -> None:
        """Drop the local steps, after a synchronization or because the state was replaced."""
        self._momentum = self._displacement = None
        self._totals, self.used = {}, 0

    def nbytes(self) -> int:
        kept = (self._momentum, self._displacement)
        return sum(tensor.nbytes for tensor in kept if tensor is not None)


class UncodedMomentum(FlatMomentum):
    """A :class:`FlatMomentum` whose messages are not compressed: they and ``momentum`` are fp32
    [ranks, chunk], and errors stay zero.
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

    def values(self) -> Tensor:
        assert self.momentum is not None
        return self.momentum.view(-1)

    def compress(self, gradient: Tensor, beta: float, factor: Tensor) -> Tensor:
        rows = torch.add(self.values() * beta, gradient * factor)
        return rows.view(self.flat.layout.num_shards, -1)

    def combine(self, came: Tensor, beta: float) -> Tensor:
        """Return the mean of all ranks' messages, which is the average: it lacks nothing."""
        average = self.state(AVERAGE)
        torch.sum(came, 0, out=average)
        return average.div_(came.shape[0]).clone()

    def apply(
        self, step: int, settings: Callable[[int], tuple[float, float]], limit: float = LIMIT
    ) -> None:
        """Update the weights; nothing is held to ``limit``, as in an update without messages."""
        assert self.weights is not None and self.exponents is not None
        values = self.values()
        for index, start, stop in self.runs:
            decay, size = settings(index)
            update = values[start:stop] * powers(self.exponents[start:stop])
            self.weights[start:stop].mul_(decay).sub_(update, alpha=size)


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
        self.uncoded: list[UncodedMomentum] = []
        self._changed_values = changed_values
        if momenta and one_bit.local:
            chosen = {momentum.flat for momentum in momenta}
            uncoded = [flat for flat in flats if flat.trainable and flat not in chosen]
            for flat in uncoded:
                if flat.dtype not in FLOATS:
                    raise UnsupportedOptimizerError(
                        f"{next(iter(flat.parameters))} is {flat.dtype}, of which ZeroOneAdam "
                        "makes no local steps; set local_step_clipper: 1, or train it in 32 bits"
                    )
            self.uncoded = [UncodedMomentum(flat, bound) for flat in uncoded]
        self._of = {m: LocalMomentum(m, bound) for m in (*momenta, *self.uncoded)}
        self._computes_apart = False  # modules compute with what write_local_weights writes

    @property
    def active(self) -> bool:
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
        if self.active and not self._computes_apart:
            self._computes_apart = True
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
        used_anywhere = iter(mesh.shard.maximum_on_hosts(used, what))
        return {
            momentum: frozenset(
                slot.name for slot in momentum.flat.layout.slots if not next(used_anywhere)
            )
            for momentum in self._of
        }

    def forget(self) -> None:
        for local in self._of.values():
            local.forget()

    def nbytes(self) -> int:
        """Return the bytes that this rank keeps for local steps."""
        total = sum(local.nbytes() for local in self._of.values())
        return total + sum(momentum.nbytes() for momentum in self.uncoded)
