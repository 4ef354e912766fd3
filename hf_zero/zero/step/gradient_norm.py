"""The norm of the reduced gradient of a step: measured, agreed on by the ranks, and clipped."""

from __future__ import annotations

import logging
import math
from collections import defaultdict

import torch

from hf_zero.config import ZeroConfig
from hf_zero.logging import counted, listed, log_rank0
from hf_zero.optim.bound_optimizer import BoundOptimizer
from hf_zero.zero.layout.gradients import GradientBuffer
from hf_zero.zero.reduce.losses import Fp16LossScaler
from hf_zero.zero.reduce.norm import squared_norm
from hf_zero.zero.reduce.step_agreement import StepAgreement
from hf_zero.zero.sharded_model import ShardedModel
from hf_zero.zero.step.held_gradient import HeldGradient, clip_divisor
from hf_zero.zero.step.step_interfaces import NO_HOOKS, StepHooks


class GradientNorm:
    """The norm of the reduced gradient of ``model``, for one step after the other, and by what it
    is clipped; in both without the loss scale of ``scaler``.

    ``agreement`` gets the sum of squares over the ranks, with what a script has set for ``bound``,
    None without an optimizer; ``hooks``: those of the features.
    """

    def __init__(
        self,
        model: ShardedModel,
        bound: BoundOptimizer | None,
        agreement: StepAgreement,
        scaler: Fp16LossScaler,
        hooks: StepHooks,
        config: ZeroConfig,
    ):
        self._model, self._agreement, self._scaler, self._hooks = model, agreement, scaler, hooks
        self._kernels = config.kernels
        if bound is not None:
            self._settings, self._optimizer = bound.settings, bound.optimizer
        # the norm to which steps clip; 0.0: no clipping
        self.max_norm = float(config.gradient_clipping or 0.0)
        self.held = HeldGradient(model.engine_flats.gradient_version)
        # the norm of the last step, or of a gradient measured since, 0-dim on the device
        self.last: torch.Tensor | None = None
        self._looked_for_ungrouped = False

    def close(self) -> None:
        """Drop the hooks of the features."""
        self._hooks = NO_HOOKS

    def clip_to(self, max_norm: float) -> None:
        """Clip to ``max_norm`` in each step from now on; 0.0: not."""
        self.max_norm = max_norm

    def record(self, last: torch.Tensor | None) -> None:
        """Record the norm of a step, which a graph has measured, or one before a rebuild."""
        self.last = last

    def measure(self, steps_before: int) -> torch.Tensor:
        """Return the norm before clipping, 0-dim, and agree on the parameters that have a gradient
        (collective). The step uses it unless a gradient changes, or a feature acts at its
        beginning.
        """
        _, norm = self.of_step(steps_before, holds=True)
        return norm.clone()  # the caller's own

    def of_step(
        self, steps_before: int, holds: bool, local: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sum of squares over all ranks, fp64, and the norm, which is then the
        :attr:`last`, 0-dim: those held, or new ones on which the ranks agree (collective), to be
        held for the step if it ``holds`` them. ``local``: as this rank estimates them without the
        others, for a feature whose steps are local.
        """
        total = self.held.squares if self.held.is_measured else None
        if total is None:
            total = self._own_squares(local)
            if not local:
                (total,) = self._agree(total, steps_before)
            if holds and not self._hooks.begin_step:
                self.held.measure(total)
        self.last = norm = total.sqrt() / self._scaler.scale
        return total, norm

    def _own_squares(self, local: bool = False) -> torch.Tensor:
        """Return this rank's part of the square of the gradient norm: fp64, 0-dim. ``local``: the
        square for all ranks, as far as this rank can estimate it.
        """
        by_weight: defaultdict[float, list[GradientBuffer]] = defaultdict(list, {1.0: []})
        for flat in self._model.trainable:
            if not flat.gradient.stays_local:
                by_weight[flat.mesh.weight].append(flat.gradient)
        device = self._model.mesh.device
        squares = squared_norm(by_weight.pop(1.0), device, self._kernels)
        for weight, gradients in by_weight.items():
            squares = squares + weight * squared_norm(gradients, device, self._kernels)
        for squares_of in self._hooks.squares:
            added = squares_of(local)
            if added is not None:
                squares = squares + added
        return squares

    def _agree(self, squares: torch.Tensor, steps_before: int) -> torch.Tensor:
        """Return the sum of ``squares`` over the ranks, [1]. They agree on the used parameters, and
        compare what a script has set since the engine was built.
        """
        settings = self._settings.changes()
        if switched := self._model.engine_flats.switched:
            settings = f"{settings}, requires_grad switched of {switched}".removeprefix(", ")
        before = len(self._optimizer._optimizer_step_pre_hooks)
        after = len(self._optimizer._optimizer_step_post_hooks)
        # ranks exchange what hooks have written: between two before the step, and after each later
        for count, where in (before if before > 1 else 0, "before"), (after, "after"):
            if count and self._model.shards_masters:
                settings = f"{settings}, {count} hooks {where} the step".removeprefix(", ")
        return self._agreement.agree(squares.view(1), steps_before, settings)

    @torch.no_grad()
    def current(self) -> float:
        """Return the norm before clipping as a number, on which nothing is agreed; 0.0 without a
        gradient (collective).
        """
        # another stage of a pipeline may have gradients
        ready = any(flat.gradient.ready for flat in self._model.trainable)
        total = self._own_squares() if ready else squared_norm((), self._model.mesh.device)
        for dim in (self._model.mesh.sums.stages, self._model.mesh.sums.counted):
            dim.all_reduce(total, "gradient norm").wait()
        return float(total.sqrt()) / self._scaler.scale

    def clip(self, limit: float, steps_before: int) -> torch.Tensor:
        """Clip the reduced gradient to norm ``limit`` (infinity: not) for the step, in place of
        ``max_norm``. Return its norm before (collective).
        """
        norm, divisor = self.measure(steps_before), self.held.divisor
        if divisor is not None:
            norm = norm / divisor
        if limit != math.inf:
            self.warn_of_ungrouped()
            last = clip_divisor(norm, limit)
            divisor = last if divisor is None else divisor * last
        self.held.clip(divisor)
        return norm

    def held_scale(self, device: torch.device) -> float | torch.Tensor:
        """Return the factor on the gradients held: the loss scale, and what a script's clipping has
        yet to divide by, then on ``device``.
        """
        scale, divisor = self._scaler.scale, self.held.divisor
        return scale if divisor is None else divisor.to(device) * scale

    def warn_of_ungrouped(self) -> None:
        """Warn, the first time that gradients are clipped, of parameters whose gradients torch's
        ``clip_grad_norm_(model.parameters())`` would count besides.
        """
        if self._looked_for_ungrouped:
            return
        self._looked_for_ungrouped = True
        frozen = (flat.parameters for flat in self._model.flats if not flat.trainable)
        names = [n for parameters in frozen for n, p in parameters.items() if p.requires_grad]
        if names:
            log_rank0(
                f"{counted(len(names), 'parameter')} of the model require grad and are in no group "
                f"of the optimizer ({listed(names, 3)}): the norm and clipping leave out their "
                "gradients, which torch's clip_grad_norm_(model.parameters()) counts; pass them to "
                "the optimizer, or freeze them",
                logging.WARNING,
            )
