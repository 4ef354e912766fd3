"""The loss scale of the reference engine."""

from __future__ import annotations

from hf_zero.config import ZeroConfig


class LossScale:
    """The factor on the loss that keeps fp16 gradients representable; 1 in other precisions.

    Dynamic: an overflow halves it once ``hysteresis`` others have passed; ``loss_scale_window``
    steps without one double it. The first step of a run and the first after an overflow do not
    count.
    """

    def __init__(self, config: ZeroConfig, hysteresis: int | None = None):
        fp16, is_fp16 = config.fp16, config.precision == "fp16"
        self.dynamic = is_fp16 and not fp16.loss_scale
        self.scale = float(fp16.loss_scale or 2.0**fp16.initial_scale_power) if is_fp16 else 1.0
        self.skips = is_fp16 or (config.precision == "bf16" and config.bf16.check_grad_overflow)
        self.window, self.minimum = fp16.loss_scale_window, float(fp16.min_loss_scale)
        self.hysteresis, self.refills = hysteresis or fp16.hysteresis, fp16.consecutive_hysteresis
        self.left, self.good_steps = self.hysteresis, -1

    def update(self, overflow: bool) -> None:
        """Adjust the scale after a step, or after one that ``overflow`` has skipped."""
        if not self.dynamic:
            return
        if overflow:
            self.good_steps = -1
            if self.left > 1:
                self.left -= 1
            else:
                self.scale = max(self.scale / 2, self.minimum)
            return
        self.good_steps += 1
        if self.refills:
            self.left = self.hysteresis
        if self.good_steps >= self.window:
            self.scale, self.good_steps, self.left = self.scale * 2, 0, self.hysteresis
