"""The loss factors: the weight of a micro-batch in its window, the average over ranks, and the fp16
loss scale (Micikevicius et al., arXiv:1710.03740). Each gradient must carry them exactly once.

[Note: one loss, several engines]
The backward of one loss may go through several engines of a rank: a loss over two models, or one
model fed by another. The factors at its root hold for all of them, so they share one record.
``engine.backward(loss)`` applies a scale at the root, and every engine takes its gradients in as if
the scale had been its own. A plain ``loss.backward()`` can only be scaled where it reaches the
outputs of a model; behind these it is unknown what has been scaled, so it may go through only one
engine.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from hf_zero.config import ZeroConfig
from hf_zero.errors import PartitionError
from hf_zero.zero.layout.flat_buffer import FlatBuffer
from hf_zero.zero.layout.tree import map_tensors, tensors_in, transformed

SCALED_ONCE = (
    "plain loss.backward() reaches several fp16 forwards or engines, so the loss scale cannot be "
    "applied exactly once; call engine.backward(loss)"
)

SCALED_OUTSIDE = (
    "plain loss.backward() applies the fp16 loss scale at the outputs of the model, which "
    "parameters of the optimizer outside the model do not see; call engine.backward(loss)"
)


@dataclass(frozen=True)
class AveragingFactors:
    """Factors before (``pre``) and after (``post``) the reduction, for the average over ranks and
    the weight of a micro-batch.

    A factor after the reduction costs a pass over this rank's shard, one before it over the whole
    gradient. Scaling after it loses no small values; scaling before it cannot overflow, which
    matters on an fp16 wire without a loss scale.
    """

    pre: float
    post: float
    weight_after: bool = False

    @classmethod
    def over(
        cls,
        world: int,
        precision: str,
        prescale: bool = False,
        predivide: float = 1.0,
        wire: str | None = None,
        averages: bool = True,
    ) -> AveragingFactors:
        """Return the factors for ``world`` ranks. ``prescale`` divides by ``predivide`` before and
        by the rest of ``world`` after; ``wire`` is the dtype sent, None: ``precision``. Without
        ``averages`` gradients are summed: ``post`` undoes the division.
        """
        if not averages:
            mean = cls.over(world, precision, prescale, predivide, wire)
            return replace(mean, post=mean.post * world)
        if prescale:
            return cls(1.0 / predivide, predivide / world, precision == "fp16")
        if wire == "fp16" and precision != "fp16":
            return cls(1.0 / world, 1.0)
        return cls(1.0, 1.0 / world, True)

    def before(self, weight: float, on_the_wire: bool = False) -> float:
        """Return the factor for a gradient taken in, onto the wire or into the accumulator."""
        return self.pre if on_the_wire and self.weight_after else self.pre * weight

    def after(self, weight: float, on_the_wire: bool = False) -> float:
        """Return the factor for the reduced sum."""
        return self.post * weight if on_the_wire and self.weight_after else self.post


class Fp16LossScaler:
    """The factor on the loss that keeps fp16 gradients representable; a constant 1 outside fp16.

    Dynamic: each overflow beyond ``hysteresis`` halves the scale, not below ``minimum``; ``window``
    steps without one double it. The first step of a run and the first after an overflow do not
    count, as in DeepSpeed's present DynamicLossScaler, whose keys these are; its older releases
    count them, and double a step earlier. With ``consecutive`` each good step refills the
    hysteresis, else only a growth of the scale does.
    """

    def __init__(
        self,
        scale: float = 1.0,
        dynamic: bool = False,
        window: int = 1000,
        hysteresis: int = 2,
        minimum: float = 1.0,
        consecutive: bool = False,
    ):
        self.scale = float(scale)
        self.dynamic = dynamic
        self.window, self._hysteresis, self.minimum = window, hysteresis, minimum
        self._consecutive = consecutive
        self._left = hysteresis
        self._since = -1  # good steps that count; -1: the next one does not

    @classmethod
    def from_config(cls, config: ZeroConfig) -> Fp16LossScaler:
        if config.precision != "fp16":
            return cls()
        fp16 = config.fp16
        if fp16.loss_scale:
            return cls(fp16.loss_scale)
        scale, minimum = 2.0**fp16.initial_scale_power, float(fp16.min_loss_scale)
        window, hysteresis = fp16.loss_scale_window, fp16.hysteresis
        return cls(scale, True, window, hysteresis, minimum, fp16.consecutive_hysteresis)

    @property
    def at_floor(self) -> bool:
        """Return whether the scale cannot be lowered any further."""
        return not self.dynamic or self.scale <= self.minimum

    def update(self, overflow: bool) -> None:
        """Adjust the scale after a step, or after a step that ``overflow`` has skipped."""
        if not self.dynamic:
            return
        if overflow:
            self._since = -1
            if self._left <= 1:
                self.scale = max(self.scale / 2.0, self.minimum)
            else:
                self._left -= 1
            return
        self._since += 1
        if self._consecutive:
            self._left = self._hysteresis
        if self._since >= self.window:
            self._since = 0
            self._left = self._hysteresis
            self.scale *= 2.0

    def state_dict(self) -> dict[str, float]:
        return {"scale": self.scale, "left": self._left, "since": self._since}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self.scale = float(state["scale"])
        self._left, self._since = int(state["left"]), int(state["since"])


class _ScaleGradient(torch.autograd.Function):
    """Identity whose backward multiplies by the fp16 loss scale, for a loss that is not passed to
    ``engine.backward``.
    """

    @staticmethod
    def forward(
        ctx: Any, factor: Callable[[], float], *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.factor = factor
        ctx.set_materialize_grads(False)
        # not views: they may be changed in place (``loss *= n``)
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        factor = ctx.factor()
        return (None, *(grad if grad is None or factor == 1.0 else grad * factor for grad in grads))


class _FactorsOfBackward:
    """The loss factors of the backward under way, which the engines of one rank share."""

    def __init__(self) -> None:
        self.engines: weakref.WeakSet[LossScaling] = weakref.WeakSet()
        self.scale_owner: LossScaling | None = None  # the engine whose scale is applied
        self.scale = 1.0
        self.weight: float | None = None  # of the micro-batch, if given by the caller
        # end callback of the backward that was scaled at outputs; an exception drops it
        self._task: weakref.ref[object] | None = None

    def put(self, scale_owner: LossScaling, scale: float, weight: float | None) -> None:
        """Set the factors at the root of the next backward's loss."""
        self.scale_owner, self.scale, self.weight, self._task = scale_owner, scale, weight, None

    def put_at_outputs(self, scale_owner: LossScaling, scale: float) -> None:
        """Set the scale of ``scale_owner`` for the backward under way, from here to its end."""
        callback = partial(self.clear)
        self.put(scale_owner, scale, None)
        self._task = weakref.ref(callback)
        torch.autograd.Variable._execution_engine.queue_callback(callback)

    def clear(self) -> None:
        self.scale_owner, self.scale, self.weight, self._task = None, 1.0, None, None

    @property
    def by_outputs(self) -> bool:
        """Return whether the backward under way has been scaled at the outputs of a model."""
        if self._task is not None and self._task() is None:
            self.clear()
        return self._task is not None


_ranks: dict[int, _FactorsOfBackward] = {}  # by rank, because ranks may be threads of one process


class LossScaling:
    """Loss scaling of one engine.

    ``scales``: losses are multiplied by the scale of ``scaler``, in a pipeline also if all
    parameters of this rank are frozen. ``in_backward``: whether a backward is under way in this
    engine; ``awaits_backward``: whether one may reach it. ``watch`` makes every gradient begin a
    backward: if an engine of the rank scales losses, the scale in a gradient is known only in its
    backward.
    """

    def __init__(
        self,
        rank: int,
        scaler: Fp16LossScaler,
        scales: bool,
        training: Sequence[FlatBuffer],
        in_backward: Callable[[], bool],
        awaits_backward: Callable[[], bool],
        watch: Callable[[], None],
    ):
        self.scaler, self._scales = scaler, scales
        self._training = list(training)
        self._in_backward, self._awaits_backward = in_backward, awaits_backward
        # the engine whose scale the gradients held here have carried, if not this one
        self._scale_owner: LossScaling | None = None
        self._borrowed_scale = 1.0  # that scale
        # a gradient with this engine's scale has overflowed in another engine
        self._overflow_reported = False
        self._rank = _ranks.setdefault(rank, _FactorsOfBackward())
        self._watch = watch
        if any(engine._scales for engine in self._rank.engines):
            # An engine that was dropped without ``destroy`` is collected at different times on
            # different ranks, and all ranks must watch, or none.
            gc.collect()
        self._rank.engines.add(self)
        if any(engine._scales for engine in self._rank.engines):
            for engine in list(self._rank.engines):
                engine._watch()

    def close(self) -> None:
        """Unregister the engine, which is destroyed."""
        self._scale_owner = None
        self._rank.engines.discard(self)
        if self._rank.scale_owner is self:
            self._rank.clear()

    @contextmanager
    def carrying(self, dtype: torch.dtype, weight: float | None) -> Iterator[float]:
        """Context for the backward of a loss of ``dtype`` given to this engine; yields the factor
        for the loss.

        If this engine has no scale of its own, it uses the largest scale of the rank's engines that
        the backward may reach, so that their gradients do not vanish. Raises PartitionError for an
        fp16 loss that cannot represent the scale.
        """
        scale_owner = self
        if not self._scales:
            for engine in self._rank.engines:
                if not engine._scales or not engine._awaits_backward():
                    continue
                if scale_owner is self or engine.scaler.scale > scale_owner.scaler.scale:
                    scale_owner = engine
        scale = scale_owner.scaler.scale
        is_constant = not scale_owner.scaler.dynamic
        if is_constant and dtype == torch.float16 and scale > torch.finfo(dtype).max:
            raise PartitionError(
                f"an fp16 loss cannot carry a loss_scale of {scale:g}; compute the loss in fp32 "
                "(logits.float()), or choose a smaller scale"
            )
        self._rank.put(scale_owner, scale, weight)
        try:
            yield scale
        finally:
            self._rank.clear()

    def begin(self, weight: float) -> tuple[float, float]:
        """Return the weight of the micro-batch, and the factor that removes another engine's scale
        from the gradients, when a backward reaches this engine.

        The weight is equal on all ranks. The second factor need not be: an engine that was dropped
        without ``destroy`` provides its scale until it is garbage-collected, at different times on
        different ranks. So it is applied before the reduction, except in fp16: there the gradients
        have a scale of their own, and either could be out of range with the other's.
        """
        rank = self._rank
        if rank.by_outputs and rank.scale_owner is not self and self._training:
            raise PartitionError(SCALED_ONCE)
        owner = rank.scale_owner
        if owner is not None and owner is not self and owner._scales:
            self._scale_owner, self._borrowed_scale = owner, rank.scale
        weight = weight if rank.weight is None else rank.weight
        unscale = self.scaler.scale / rank.scale
        return (weight * unscale, 1.0) if self._scales else (weight, unscale)

    def scale_outputs(self, module: nn.Module, args: object, output: object) -> object:
        """Scale an otherwise unscaled loss where its backward reaches these outputs: a forward hook
        of the model.
        """
        if transformed():
            return None  # the script owns these gradients
        tensors = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
        if not self._scales or not tensors or not torch.is_grad_enabled() or self._in_backward():
            return None
        wrapped = _ScaleGradient.apply(self._missing_scale, *tensors)  # type: ignore[no-untyped-call]
        replaced = dict(zip(map(id, tensors), wrapped))
        return map_tensors(output, lambda tensor: replaced.get(id(tensor), tensor))

    def _missing_scale(self) -> float:
        rank = self._rank
        twice = rank.by_outputs
        if rank.scale_owner is not None and not twice:
            return 1.0
        if twice or any(engine._training and engine._in_backward() for engine in rank.engines):
            raise PartitionError(SCALED_ONCE)
        if any(flat.spec.outside for flat in self._training):
            raise PartitionError(SCALED_OUTSIDE)
        rank.put_at_outputs(self, self.scaler.scale)
        return self.scaler.scale

    def refuse_part(self) -> None:
        """Raise PartitionError if the backward, scaled at outputs, reaches a part of the model that
        was called alone.
        """
        if self._rank.by_outputs:
            raise PartitionError(SCALED_ONCE)

    @property
    def may_overflow(self) -> bool:
        """Return whether gradients held here have carried a scale, of this engine or another."""
        return self._scales or self._scale_owner is not None

    def update_scale(self, overflow: bool) -> Fp16LossScaler:
        """Update the scale that the gradients carried, after a step or one skipped because of
        ``overflow``. Return the scaler of that scale.
        """
        owner, self._scale_owner = self._scale_owner, None
        if owner is not None and overflow:
            owner._report_overflow(self._borrowed_scale)
        if owner is None or self._overflow_reported:
            self.scaler.update(self._overflow_reported or overflow)
            self._overflow_reported = False
        return self.scaler if owner is None else owner.scaler

    def reset(self) -> None:
        """Reset the record of the scale: gradients have been dropped."""
        self._scale_owner = None
        if self._overflow_reported:
            self._overflow_reported = False
            self.scaler.update(True)

    def _report_overflow(self, scale: float) -> None:
        if self.scaler.scale != scale:
            return  # it has been lowered since
        self._overflow_reported = True
        if not any(flat.gradient.holds_gradient for flat in self._training):
            self.reset()  # else later: gradients held here include the current scale
