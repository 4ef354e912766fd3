"""The steps of an optimizer with a momentum in one bit: the choice between dense and one-bit steps,
what happens between them, and the messages of each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from hf_zero.compression.flat_lamb import FlatLamb
from hf_zero.compression.flat_momentum import LIMIT, FlatMomentum
from hf_zero.compression.frozen_variance import FrozenVariance
from hf_zero.compression.local_steps import LIMIT_OF_MEANS, LocalSteps
from hf_zero.compression.rank_norm import RankNorm, note
from hf_zero.config import ZeroConfig
from hf_zero.device.spans import span
from hf_zero.logging import logger
from hf_zero.optim.group_settings import ALL_FROZEN_AT, FROZEN_AT
from hf_zero.optim.one_bit import as_sent, one_bit_of
from hf_zero.zero.feature import Feature
from hf_zero.zero.layout.flat_buffer import FlatBuffer

if TYPE_CHECKING:
    from hf_zero.zero.step.optimizer_step import OptimizerStep

OUTGROWN_EVERY = 10  # steps between checks, because the host waits for the device
MEASURED = 16  # number of last dense steps that measure the ratio of gradient norms


class MomentumMessage(NamedTuple):
    """What this rank sends of one momentum."""

    momentum: FlatMomentum
    gradient: Tensor  # or a mean of local steps: [padded]
    settings: Callable[[int], tuple[float, float]]  # factor of the weights and step size, by group
    unused: frozenset[str]  # parameters that stay unchanged


class OneBitSteps(Feature):
    """The steps of an engine some of whose momenta are sent in one bit: the optimizer, or a key
    beside Adam, switches them on.
    """

    def __init__(self, settings: ZeroConfig) -> None:
        self._settings = settings

    @classmethod
    def adapt(cls, settings: ZeroConfig, optimizer: torch.optim.Optimizer | None) -> ZeroConfig:
        return as_sent(settings, one_bit_of(settings, optimizer))

    @classmethod
    def is_called(
        cls, model: nn.Module, settings: ZeroConfig, optimizer: torch.optim.Optimizer | None
    ) -> bool:
        return one_bit_of(settings, optimizer) is not None

    def bind(self, step: OptimizerStep) -> None:
        flats, mesh, bound = step.model.flats, step.model.mesh, step.bound
        one_bit = one_bit_of(self._settings, bound.optimizer)
        assert one_bit is not None
        self._step = step
        chosen = [flat for flat in flats if flat.trainable and flat.spec.momentum_blocks]
        self._lamb = [FlatLamb(flat, bound) for flat in chosen if one_bit.lamb]
        self._chosen: Sequence[FlatMomentum] = self._lamb
        if not one_bit.lamb:
            self._chosen = [FlatMomentum(flat, bound) for flat in chosen]
        self._mesh, self._bound, self._one_bit = mesh, bound, one_bit
        self._local = LocalSteps(
            self._chosen, flats, bound, one_bit, step.model.schedule.changed_values
        )
        if not chosen and mesh.rank == 0:
            why = "one rank"
            if mesh.pp_stage_ranks > 1:
                why = "no matrix has a block of elements on each rank"
            logger.warning("nothing travels in 1 bit (%s): all steps are dense", why)
        self._loads = -1  # load count of the state that the counters here belong to
        self._made = 0  # number of steps made
        self._compressing = False  # whether the last step was in one bit
        self._writes = 0  # count of writes by scripts to state at the last gather
        self._stale = False  # a script has written to weights or state since the last step
        self._norm = RankNorm(mesh, bound, step.kernels)
        self._variance = FrozenVariance(mesh, bound, one_bit)
        self._lr = 0.0  # learning rate of the last dense step
        self._warned = False  # about momenta that have outgrown the variance

    @property
    def sends(self) -> bool:
        """Return whether the next step is in one bit."""
        return bool(self._chosen) and not self._one_bit.is_dense(self._made + 1)

    @property
    def is_local(self) -> bool:
        """Return whether the next step sends nothing."""
        return self._local.active and not self._local.synchronizes(self._made + 1)

    @property
    def _momenta(self) -> list[FlatMomentum]:
        """The flat buffers that :meth:`update` changes."""
        return [*self._chosen, *self._local.uncoded] if self._local.active else [*self._chosen]

    def begin_backward(self) -> None:
        """Keep gradients that the next step takes unreduced on their rank."""
        if not self._chosen:
            return
        if self._loads != self._bound.state.scalars.loads:
            self._loads = self._bound.state.scalars.loads
            self._made = self._bound.state.scalars.loaded_steps
            self._compressing = False
            for momentum in (*self._chosen, *self._local.uncoded):
                momentum.forget()
            self._local.forget()
        self._begin_phase()
        self._keep_local(self.sends or self._measures)

    def _begin_phase(self) -> None:
        """Set the interval of synchronization for the next step."""
        local, interval = self._local, self._one_bit.interval(self._made + 1)
        if interval == local.interval:
            return
        if self._compressing and not local.active:
            self._variance.rescale(self._momenta, self._made, self._local.active)
            self._compressing = False  # the momenta that join now must be frozen, too
        local.interval = interval
        for momentum in local.uncoded:
            momentum.flat.gradient.keep_local(False)
        if self._mesh.rank == 0:
            message = "step %d: ranks synchronize every %d steps from now on"
            logger.info(message, self._made + 1, interval)

    @property
    def _measures(self) -> bool:
        after = range(self._made + 2, self._made + 2 + MEASURED)
        return not self.sends and not all(map(self._one_bit.is_dense, after))

    def _keep_local(self, local: bool) -> None:
        for momentum in self._momenta:
            momentum.flat.gradient.keep_local(local)

    def before_reduction(self, scale: float) -> None:
        """Take the norm of the gradients that stay on this rank, before all others are reduced;
        a local gradient times ``scale`` is this rank's term of the mean.
        """
        gradients = [momentum.flat.gradient for momentum in self._momenta]
        local = [g for g in gradients if g.stays_local and g.has_unreduced]
        if not local:
            return
        accumulated = [g.accumulated_grad for g in local if g.accumulated_grad is not None]
        self._norm.take(accumulated, scale)
        self._keep_local(self.sends)

    def squares(self, local: bool) -> Tensor | None:
        if not self.sends:
            return None
        return self._norm.estimated(1.0 if local else 1.0 / self._mesh.shard.size)

    def begin_step(self, must_agree: bool) -> bool:
        self._measure()
        with self._step.changing_state():
            pass  # a script's writes are in the master weights
        local = self.is_local and not must_agree
        self._stale = not local and self._is_stale()
        return local

    def _is_stale(self) -> bool:
        """Return whether a script on any rank has written to weights or state (collective)."""
        if not self.sends or not self._compressing:
            return False
        is_stale = self._writes != self._bound.state.writes
        is_stale |= any(momentum.is_stale for momentum in self._momenta)
        return any(self._mesh.shard.maximum_on_hosts([is_stale], "writes to weights and state"))

    def _measure(self) -> None:
        """Compare the norm of a dense step's reduced gradients with the ranks' own norms, if those
        were taken (collective then).
        """
        if not self.sends:
            shards = [momentum.flat.gradient.shard for momentum in self._momenta]
            self._norm.measure([shard for shard in shards if shard is not None])

    def update(self, divisor: Tensor | None) -> Sequence[FlatBuffer]:
        """Count a step after the optimizer's own, and update the momenta if it is in one bit."""
        compresses = self.sends
        self._made += 1
        if not compresses:
            self._compressing = False
            return []
        if not self._compressing or self._stale:
            self._gather_all()
        self._compressing = True
        self._norm.drop()
        momenta, local = self._momenta, self._local
        with span("update", "momenta in 1 bit"):
            factor = self._factor(divisor)
            if local.active:
                for momentum in momenta:
                    local.of(momentum).add(self._gradient(momentum), self._beta, factor, self._made)
                local.compute_apart()
            if not local.active:
                self._update([self._message(m) for m in momenta], self._beta, factor, LIMIT)
            elif local.synchronizes(self._made):
                self._synchronize()
        return [momentum.flat for momentum in momenta]

    def weights_differ(self) -> bool:
        return self._local.pending

    def before_update(self) -> None:
        """Let the optimizer's own step only count the flat buffers that :meth:`update` changes;
        freeze the variance (collective) or rescale it if the kind of step changes.
        """
        if not self._chosen:
            return
        flats = [momentum.flat for momentum in self._momenta] if self.sends else []
        self._bound.count_only(frozenset(name for flat in flats for name in flat.layout.by_name))
        if self.sends and not self._compressing:
            self._freeze()
        elif not self.sends:
            self._lr = max(float(group["lr"]) for group in self._bound.groups)
            if self._compressing:
                self._variance.rescale(self._momenta, self._made, self._local.active)

    def _freeze(self) -> None:
        """Freeze the variance after a dense step or a load, and raise tiny ones (collective)."""
        variance, made, local = self._variance, self._made, self._local
        was_frozen, frozen = variance.was_frozen, variance.serves_after(made)
        fresh = [] if frozen else [*self._chosen]
        if local.active and not (frozen and variance.covers_all_at(made)):
            fresh += local.uncoded
        if variance.rescales or not frozen:
            variance.note(made, local.active)
        if not fresh:
            return
        variance.freeze(fresh, made)
        if not (frozen or self._mesh.rank or (self._one_bit.renews and was_frozen)):
            self._log_freeze()

    def _log_freeze(self) -> None:
        """Log what travels from now on, and warn of a learning rate that still rises."""
        dense = sum(2 * m.flat.layout.padded * m.flat.dtype.itemsize for m in self._chosen)
        sent = sum(2 * m.blocks.rows * m.blocks.nbytes for m in self._chosen)
        logger.info(
            "step %d: momenta travel in 1 bit (blocks of %d): %s bytes a step instead of %s",
            self._made + 1,
            self._one_bit.block,
            f"{sent:,}",
            f"{dense:,}",
        )
        rate = max(float(group["lr"]) for group in self._bound.groups)
        if rate > self._lr > 0.0 and not self._one_bit.renews:
            logger.warning(
                "step %d: the variance is frozen while the learning rate still rises; freeze it "
                "well after the warm-up: a freeze_step of twice its length has held",
                self._made + 1,
            )

    def _gather_all(self) -> None:
        """Gather the owners' weights, denominators and momentum on all ranks (collective)."""
        variance, momenta = self._variance, self._momenta
        lags = variance.lags(self._made)
        denominators = [momentum.denominators(variance.at, lags) for momentum in momenta]
        # pending local steps began with the momentum of the last synchronization
        renews = not self._local.pending
        pairs = [pair for m, local in zip(momenta, denominators) for pair in m.begin(local, renews)]
        self._mesh.shard.all_gather(pairs, "denominators, weights and momenta").wait()
        self._writes = self._bound.state.writes
        for momentum in momenta:
            momentum.note_master()
        if self._lamb:
            for lamb, sums in zip(self._lamb, variance.sums(self._lamb, denominators)):
                lamb.keep_least(sums)
            scales = torch.cat([lamb.held_scales() for lamb in self._lamb], 1)
            scales = scales.to(self._mesh.device)
            self._mesh.shard.all_reduce(scales, "trust ratios", maximum=True).wait()
            for momentum, own_scales in zip(self._lamb, scales.split(self._tensors, 1)):
                momentum.set_scales(own_scales)

    @property
    def _beta(self) -> float:
        return float(self._bound.groups[0]["betas"][0])

    def _factor(self, divisor: Tensor | None) -> Tensor:
        """Return (1 - b1) over the factor that the gradients are multiplied by: fp32, 0-dim."""
        value, device = (1.0 - self._beta) * self._norm.scale, self._mesh.device
        factor = torch.full((), value, dtype=torch.float32, device=device)
        return factor if divisor is None else factor / divisor.to(device, torch.float32)

    def _gradient(self, momentum: FlatMomentum) -> Tensor:
        """Return this rank's gradient, [padded]."""
        buffer = momentum.flat.gradient
        gradient = buffer.accumulated_grad
        assert gradient is not None
        return gradient if buffer.has_unreduced else torch.zeros_like(gradient)

    def _message(self, momentum: FlatMomentum) -> MomentumMessage:
        """Return the message of a step that all ranks make together."""
        settings = partial(momentum.settings, step=self._made, frozen=self._variance.at)
        return MomentumMessage(
            momentum, self._gradient(momentum), settings, momentum.flat.gradient.unused
        )

    def _update(
        self, messages: Sequence[MomentumMessage], beta: float, factor: Tensor, limit: float
    ) -> None:
        """Update all weights: each momentum becomes ``beta`` times itself and ``factor`` times the
        gradient of its message; updates are held to ``limit`` (collective).
        """
        dim = self._mesh.shard
        sent = []
        for message in messages:
            m, restore = message.momentum, message.momentum.snapshot_unused(message.unused)
            rows = m.compress(message.gradient, beta, factor)
            sizes = [rows.shape[1]] * dim.size
            key = f"momentum of {m.flat.key}"
            sent.append((message, restore, *dim.all_to_all(rows.view(-1), sizes, sizes, key)))
        gathers = []
        for message, restore, handle, came in sent:
            handle.wait()
            m = message.momentum
            row = m.combine(came.view(dim.size, -1), self._beta)
            assert m.momentum is not None
            pair = (m.momentum.view(-1), row.view(-1))
            gathers.append((message, restore, dim.all_gather([pair], f"momentum of {m.flat.key}")))
        for _, _, gather in gathers:
            gather.wait()
        if self._lamb:
            self._scale_updates()
        for message, restore, _ in gathers:
            message.momentum.apply(self._made, message.settings, limit)
            restore()
            message.momentum.publish()
        for m in self._momenta:
            m.note_master()
        self._warn_of_outgrown(limit)

    def synchronize(self) -> None:
        """Synchronize pending local steps."""
        if not self._local.pending:
            return
        with self._step.changing_state():
            if self._is_stale():
                self._gather_all()
            self._synchronize()

    def _synchronize(self) -> None:
        unused, messages = self._local.unused(self._mesh), []
        for momentum in self._momenta:
            mean, totals = self._local.of(momentum).take_mean()
            messages.append(MomentumMessage(momentum, mean, totals.__getitem__, unused[momentum]))
        one = torch.ones((), dtype=torch.float32, device=self._mesh.device)
        # means of local steps include the momentum already
        self._update(messages, 0.0, one, LIMIT_OF_MEANS)

    def _warn_of_outgrown(self, limit: float) -> None:
        """Warn once, on rank 0 alone, because all ranks have the same messages."""
        if self._warned or self._mesh.rank or self._made % OUTGROWN_EVERY:
            return
        flags = [momentum.outgrown for momentum in self._momenta if momentum.outgrown is not None]
        if flags and bool(torch.stack(flags).any()):
            self._warned = True
            logger.warning(
                "step %d: momenta have outgrown the variance that step %d froze; updates of "
                "such blocks are held to %g learning rates (root mean square). If the loss is "
                "worse than without compression, set a larger freeze_step, or "
                "compressed_communication.bits: 4",
                self._made,
                next(at for at in range(self._made, -1, -1) if self._one_bit.is_dense(at)),
                limit,
            )

    @property
    def _tensors(self) -> list[int]:
        return [len(lamb.runs) for lamb in self._lamb]

    def _scale_updates(self) -> None:
        """Compute the scale of the update of each tensor (LAMB) from all ranks (collective)."""
        measured = [lamb.measured() for lamb in self._lamb]
        sums = torch.cat([squares for squares, _ in measured], 1)
        largest = torch.cat([maximum for _, maximum in measured])
        shard = self._mesh.shard
        waits = [
            shard.all_reduce(sums, "norms of updates"),
            shard.all_reduce(largest, "quotients of denominators", maximum=True),
        ]
        for handle in waits:
            handle.wait()
        split = zip(sums.split(self._tensors, 1), largest.split(self._tensors))
        for lamb, parts in zip(self._lamb, split):
            lamb.learn(*parts)

    def complete_state(self) -> None:
        """Move all ranks' errors into the optimizer's state, as a save and a resume would."""
        self.synchronize()
        # after a load, the errors belong to another run
        loaded = self._loads != self._bound.state.scalars.loads
        if loaded or any(momentum.error is None for momentum in self._chosen):
            return
        dim, beta = self._mesh.shard, self._beta
        for momentum in self._chosen:
            assert momentum.error is not None
            mean = torch.empty_like(momentum.error[: momentum.flat.layout.shard_numel])
            handle = dim.reduce_scatter(momentum.error, f"errors of {momentum.flat.key}")
            handle.reduce_into(mean, False, 1.0 / dim.size)
            momentum.take_errors(mean, beta)
        for lamb in self._lamb:
            lamb.store_scales()
        if self._compressing:
            self._variance.rescale(self._momenta, self._made, self._local.active)
        self._compressing = False  # everything is gathered anew, as after a load

    @contextmanager
    def counted_state(self) -> Iterator[bool]:
        """Rescale the variance in this rank's state to the last step made, as in a checkpoint,
        inside this context. Yields whether it did. Errors are not added to the state.
        """
        if not self._compressing or self._loads != self._bound.state.scalars.loads:
            yield False
            return
        variances = [m.state(name) for m in self._momenta for name in m.VARIANCES]
        copies = [variance.clone() for variance in variances]
        notes = {key: self._bound.groups[0].get(key) for key in (FROZEN_AT, ALL_FROZEN_AT)}
        self._variance.rescale(self._momenta, self._made, self._local.active)
        try:
            yield True
        finally:
            for variance, before in zip(variances, copies):
                variance.copy_(before)
            for key, value in notes.items():
                if value is not None:
                    note(self._bound, key, value)

    def remove(self) -> None:
        # with the memory of the optimizer that they hold
        self._lamb, self._chosen = [], []
        self._step = self._bound = self._local = None  # type: ignore[assignment]
        self._norm = self._variance = None  # type: ignore[assignment]

    def state_bytes(self) -> Mapping[str, int]:
        nbytes = sum(momentum.nbytes() for momentum in self._chosen) + self._local.nbytes()
        return {"optimizer": nbytes}
