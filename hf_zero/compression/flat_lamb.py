"""The momentum of one flat buffer under 1-bit LAMB: a :class:`FlatMomentum` that also keeps the
scale of the update of each tensor (hf_zero/optim/one_bit_lamb.py).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hf_zero.compression.flat_momentum import (
    AVERAGE,
    FLOOR,
    VARIANCE,
    FlatMomentum,
    grown,
    squares_of,
)
from hf_zero.device.pinned import upload
from hf_zero.ops.sign_blocks_reference import powers
from hf_zero.optim.bound_optimizer import BoundOptimizer
from hf_zero.optim.group_settings import FROZEN_AT
from hf_zero.optim.one_bit_lamb import FACTOR, FACTOR_SETTINGS, FRESH, RATIO, next_factor
from hf_zero.optim.segments import ParamGroup
from hf_zero.optim.trust_ratio import step_size
from hf_zero.zero.layout.flat_buffer import FlatBuffer


class FlatLamb(FlatMomentum):
    """A :class:`FlatMomentum` for LAMB; a run is one tensor. The owner reconstructs the gradient g'
    = (r - b1 a) / (1 - b1) of its chunk from the messages, and v' is the variance of g'.
    """

    VARIANCES = (VARIANCE, FRESH)

    def __init__(self, flat: FlatBuffer, bound: BoundOptimizer) -> None:
        super().__init__(flat, bound)
        self._slots = [slot for slot in flat.layout.slots if slot.numel]
        self.runs = [(index, slot.offset, slot.end) for index, slot in enumerate(self._slots)]
        self._least: dict[str, Tensor] = {}
        # c and f of each tensor, equal on all ranks
        device = flat.full.device
        self._scales = torch.ones(2, len(self._slots), dtype=torch.float32, device=device)

    def freeze(self) -> None:
        self.state(FRESH).copy_(self.state(VARIANCE))
        tensor_state = self._bound.state.tensor_state
        tensor_state.put(FACTOR, dict.fromkeys(tensor_state.names))

    def _denominators_of(self, group: ParamGroup, variance: Tensor, step: int) -> Tensor:
        """Return sqrt(v) + eps, or sqrt(v + eps), uncorrected: LAMB corrects its step size."""
        if group["eps_inside_sqrt"]:
            return (variance + float(group["eps"])).sqrt_()
        return variance.sqrt().add_(float(group["eps"]))

    def _variance_of(self, group: ParamGroup, denominators: Tensor, step: int) -> Tensor:
        eps = float(group["eps"])
        if group["eps_inside_sqrt"]:
            return denominators.square().sub_(eps).clamp_(min=0.0)
        return (denominators - eps).clamp_(min=0.0).square_()

    def keep_least(self, sums: Tensor) -> None:
        """Set the lower bounds of denominators in comparisons from ``sums`` of all ranks."""
        means = (sums[0] / sums[1].clamp(min=1.0)).sqrt() * FLOOR
        self._least = dict(zip(self.flat.layout.by_name, means.float()))

    def held_scales(self) -> Tensor:
        """Return c and f of the tensors with a part on this rank, else zeros: [2, tensors]."""
        factors = self._bound.state.tensor_state.by_parameter()
        scales = torch.zeros(self._scales.shape, dtype=torch.float32)
        for index, slot in enumerate(self._slots):
            numbers = factors.get(slot.name, {})
            if RATIO in numbers:
                scales[0, index] = float(numbers[RATIO])
                scales[1, index] = float(numbers.get(FACTOR, torch.ones(1)))
        return scales

    def set_scales(self, scales: Tensor) -> None:
        """Set c and f to ``scales``, the maximum over ranks, or 1 if a tensor has none."""
        self._scales = torch.where(scales > 0, scales, torch.ones_like(scales))

    def store_scales(self) -> None:
        """Write f of each tensor into the optimizer's state, before a save."""
        tensor_state, factors = self._bound.state.tensor_state, self._scales[1].cpu()
        stored = tensor_state.by_parameter()
        names = [slot.name for slot in self._slots]
        by_name = dict(zip(names, factors.split(1)))
        tensor_state.put(FACTOR, {name: by_name[name] for name in names if name in stored})

    def largest(self, step: int) -> Tensor:
        # for uncorrected denominators, whether or not the step size is corrected
        group = self._bound.groups[0]
        return super().largest(step) / grown(group, 1, int(group[FROZEN_AT])) ** 0.5

    def combine(self, came: Tensor, beta: float) -> Tensor:
        before = self.state(AVERAGE).clone()
        sent = super().combine(came, beta)
        after, fresh = self.state(AVERAGE), self.state(FRESH)
        decoded = self._own_blocks.values(sent)
        gradient = (after - before).mul_(beta).div_(1.0 - beta).add_(decoded)
        for slot in self._slots:
            start, stop = self._own(slot.name)
            decay = float(self._group_of(slot.name)["betas"][1])
            new = gradient[start:stop]
            fresh[start:stop].mul_(decay).addcmul_(new, new, value=1.0 - decay)
        return sent

    def measured(self) -> tuple[Tensor, Tensor]:
        """Return for this rank's part of each tensor the squares of its update without and with
        weight decay, [2, tensors], fp64, and the largest quotient of its denominators, [tensors].
        """
        assert self.momentum is not None and self.weights is not None
        assert self.exponents is not None
        first, stop_of = self.flat.owned
        own_row = self.momentum[self.flat.mesh.shard.rank : self.flat.mesh.shard.rank + 1]
        update = self._own_blocks.values(own_row)
        update *= powers(self.exponents[first:stop_of])
        sums = torch.zeros(2, len(self._slots), dtype=torch.float64, device=update.device)
        largest = torch.zeros(len(self._slots), dtype=torch.float32, device=update.device)
        variance, fresh = self.state(VARIANCE), self.state(FRESH)
        for index, slot in enumerate(self._slots):
            start, stop = self._own(slot.name)
            if start == stop:
                continue
            group = self._group_of(slot.name)
            part = update[start:stop]
            sums[0, index] = squares_of(part)
            part = part + float(group["weight_decay"]) * self.weights[first + start : first + stop]
            sums[1, index] = squares_of(part)
            frozen, now = (
                self._denominators_of(group, d[start:stop], 0) for d in (variance, fresh)
            )
            largest[index] = frozen.div_(now.clamp_(min=self._least[slot.name])).max()
        return sums, largest

    def learn(self, sums: Tensor, largest: Tensor) -> None:
        """Update the scales f for this step, from values reduced over all ranks."""
        groups = [self._group_of(slot.name) for slot in self._slots]
        rows = [[float(group[name]) for group in groups] for name in FACTOR_SETTINGS]
        settings = upload(torch.tensor(rows, dtype=torch.float32), largest.device)
        without, whole = sums.sqrt().float()
        self._scales[1] = next_factor(settings, largest, without, whole, self._scales[1])

    def settings(self, index: int, step: int, frozen: int) -> tuple[float, float]:
        """Return the weight decay of a tensor, and its step size without c and f."""
        group = self._group_of(self._slots[index].name)
        return float(group["weight_decay"]), step_size(group, step, frozen)

    def rates(self, settings: Callable[[int], tuple[float, float]]) -> Tensor:
        decay, size = super().rates(settings)
        size = size * self._scales.prod(0)
        return torch.stack([1.0 - size * decay, size])

    def _kept(self, name: str) -> list[Tensor]:
        start, stop = self._own(name)
        return [*super()._kept(name), self.state(FRESH)[start:stop]]
