"""Weights rounded to few bits, and how many: the equations of MoQ (mixture of quantization)."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class Rounding:
    """How a tensor is rounded to levels of ``bits`` bits. It has ``groups`` equal parts, end to
    end, each with a scale of its own.

    With Q = 2^bits levels a part g becomes, symmetric: clamp(r(g s), -Q/2, Q/2 - 1) / s with
    s = Q / (2 max|g|), asymmetric: clamp(r((g - min g) / d), 0, Q - 1) d + min g with
    d = (max g - min g) / Q. r rounds to the nearest integer, or stochastic: down after a number
    between 0 and 1 was added, so that the mean is kept.
    """

    groups: int = 1
    symmetric: bool = True
    stochastic: bool = False

    def __call__(
        self, values: torch.Tensor, bits: int, noise: torch.Tensor | None = None
    ) -> torch.Tensor:
        """``values`` rounded, in fp32, of their shape; ``noise`` in [0, 1), of their shape, for a
        stochastic rounding. Raises RuntimeError where ``groups`` does not divide them.
        """
        parts = values.float().reshape(self.groups, -1)
        levels = 2.0**bits
        if self.symmetric:
            largest = parts.abs().amax(1, keepdim=True)
            step, lowest = largest * 2 / levels, torch.zeros_like(largest)
            low, high = -levels / 2, levels / 2 - 1
        else:
            lowest = parts.amin(1, keepdim=True)
            step = (parts.amax(1, keepdim=True) - lowest) / levels
            low, high = 0.0, levels - 1
        step = torch.where(step > 0, step, torch.ones_like(step))  # all values are one
        scaled = (parts - lowest) / step
        if self.stochastic:
            assert noise is not None
            scaled.add_(noise.reshape(self.groups, -1)).floor_()
        else:
            scaled.round_()
        return scaled.clamp_(low, high).mul_(step).add_(lowest).view(values.shape)


def noise_for(values: torch.Tensor, name: str, seed: int, step: int) -> torch.Tensor:
    """Numbers in [0, 1) for the stochastic rounding of parameter ``name`` in ``step``: fp32, on
    the device of ``values``, the same on all ranks that have the same kind of device.
    """
    digest = hashlib.blake2b(f"{seed} {step} {name}".encode(), digest_size=7).digest()
    generator = torch.Generator(values.device).manual_seed(int.from_bytes(digest, "big"))
    return torch.rand(values.shape, generator=generator, device=values.device)


@dataclass(frozen=True)
class Precision:
    """How many bits weights have: ``bits`` since step ``since``, one less from step ``until``
    on.
    """

    bits: int
    until: int
    since: int = 0

    def at(self, step: int, target: int, factor: int = 1) -> Precision:
        """What it is at ``step``: a bit less as often as its end has come, each next end at twice
        the step of the one before, times ``factor``; never less than ``target`` bits.
        """
        found = self
        while found.bits > target and step >= found.until:
            found = replace(
                found, bits=found.bits - 1, until=found.until * 2 * factor, since=found.until
            )
        return found
