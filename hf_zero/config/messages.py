"""Configuration of messages in few bits."""

from __future__ import annotations

from dataclasses import dataclass

from hf_zero.config.feature_rows import FeatureSection
from hf_zero.config.value_types import integer, key, number, one_of


@dataclass(frozen=True)
class LocoSection(FeatureSection):
    """LoCo error feedback for quantized gradients; off if both fields are None."""

    FIELD, SECTION_PATH = "zeropp_loco_param", "zero_optimization.zeropp_loco_param"

    err_beta: float | None = key(number(0, 1), None)
    reset_steps: int | None = key(integer(1), None, name="reset_T", unit="steps")

    @property
    def on(self) -> bool:
        """Return whether quantization errors are kept."""
        return self.err_beta is not None or self.reset_steps is not None

    @property
    def beta(self) -> float:
        return 0.8 if self.err_beta is None else self.err_beta

    @property
    def every(self) -> int:
        """The number of steps between two resets of the errors."""
        return self.reset_steps or 1024


@dataclass(frozen=True)
class CompressedCommunication(FeatureSection):
    """Low-bit gradients and updates at stages 1 and 2; ``bits`` None: uncompressed."""

    FIELD = SECTION_PATH = "compressed_communication"

    bits: int | None = key(one_of(4, 1), None, unit="bits")
    freeze_step: int | None = key(integer(1), None, unit="steps")
    block_size: int | None = key(one_of(32, 64, 128, 256, 512, 1024, 2048), None, unit="elements")
