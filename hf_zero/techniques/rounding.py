"""The equations of MoQ (mixture of quantization): rounding of weights, and their number of bits."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

import torch

from hf_zero.ops.level_rounding import round_to_levels


@dataclass(frozen=True)
class Rounding:
    """Rounding of a tensor to levels of ``bits`` bits (hf_zero/ops/level_rounding.py), in
    ``groups`` equal contiguous parts with a scale each.
    """

    groups: int = 1
    symmetric: bool = True
    stochastic: bool = False

    def round_(
        self, values: torch.Tensor, bits: int, noise: torch.Tensor | None = None, share: float = 0.0
    ) -> torch.Tensor:
        """Round ``values`` in place, and return them. ``noise`` in [0, 1), of their shape, makes
        the rounding stochastic; ``share`` is the weight of the unrounded values in the result.
        Raises KernelError if ``groups`` does not divide the number of values.
        """
        assert self.stochastic == (noise is not None)
        return round_to_levels(values, bits, self.groups, self.symmetric, noise, share)


def noise_for(values: torch.Tensor, name: str, seed: int, step: int) -> torch.Tensor:
    """Return numbers in [0, 1) for the stochastic rounding of parameter ``name`` in ``step``: fp32,
    on the device of ``values``, equal on all ranks with the same kind of device.
    """
    digest = hashlib.blake2b(f"{seed} {step} {name}".encode(), digest_size=7).digest()
    generator = torch.Generator(values.device).manual_seed(int.from_bytes(digest, "big"))
    return torch.rand(values.shape, generator=generator, device=values.device)


@dataclass(frozen=True)
class Precision:
    """The number of bits of weights: ``bits`` since step ``since``, one less from step ``until``
    on.
    """

    bits: int
    until: int
    since: int = 0

    def at(self, step: int, target: int, factor: int = 1) -> Precision:
        """Return the precision at ``step``: one bit is dropped at each ``until``, the next
        ``until`` is twice that step times ``factor``; never fewer than ``target`` bits.
        """
        found = self
        while found.bits > target and step >= found.until:
            found = replace(
                found, bits=found.bits - 1, until=found.until * 2 * factor, since=found.until
            )
        return found
