"""The reduced gradient before its step: the norm that was measured, the clipping of a script."""

from __future__ import annotations

import torch

from hf_zero.zero.layout.gradients import GradientVersion


class HeldGradient:
    """The reduced gradient of one engine that its next step will use.

    Its norm is known from its measurement until a gradient changes (``version``). A script's
    clipping, a ``divisor`` that the step applies, replaces that to ``max_norm`` until the gradient
    is used or dropped.
    """

    def __init__(self, version: GradientVersion):
        self._version = version
        self.forget()

    def forget(self) -> None:
        """Forget the gradient, which is used or dropped."""
        self.is_measured = self.is_clipped = False
        self._squares: tuple[int, torch.Tensor] | None = None  # and the version of gradients
        self.divisor: torch.Tensor | None = None  # 0-dim on the device; None: not divided

    @property
    def squares(self) -> torch.Tensor | None:
        """The sum of its squares over all ranks, 0-dim, fp64; None if a gradient has changed since
        it was measured.
        """
        if self._squares is None or self._squares[0] != self._version.number:
            return None
        return self._squares[1]

    def measure(self, squares: torch.Tensor) -> None:
        """Set the sum of its squares over all ranks."""
        self.is_measured, self._squares = True, (self._version.number, squares)

    def clip(self, divisor: torch.Tensor | None) -> None:
        """Divide it by ``divisor`` in the step, in place of clipping to ``max_norm``."""
        self.is_clipped, self.divisor = True, divisor


def clip_divisor(norm: torch.Tensor, limit: float) -> torch.Tensor:
    """Return the divisor that clips a gradient of ``norm`` to ``limit``, 0-dim."""
    return ((norm + 1e-6) / limit).clamp(min=1.0)
