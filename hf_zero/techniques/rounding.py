"""Weights rounded to few bits, and how many: the equations of MoQ (mixture of quantization)."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

import torch

from hf_zero.ops.level_rounding import round_to_levels


@dataclass(frozen=True)
class Rounding:
    """How a tensor is rounded to levels of ``bits`` bits (hf_zero/ops/level_rounding.py). It has
    ``groups`` equal parts, end to end, each with a scale of its own.
    """

    groups: int = 1
    symmetric: bool = True
    stochastic: bool = False

    def round_(
        self, values: torch.Tensor, bits: int, noise: torch.Tensor | None = None, share: float = 0.0
    ) -> torch.Tensor:
        """Round ``values`` in place, and return them. ``noise`` in [0, 1), of their shape, for a
        stochastic rounding; ``share`` of them as they were stays. Raises KernelError where
        ``groups`` does not divide them.
        """
        assert self.stochastic == (noise is not None)
        return round_to_levels(values, bits, self.groups, self.symmetric, noise, share)


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
