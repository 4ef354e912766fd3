"""Error feedback for compressed gradients (LoCo)."""

from __future__ import annotations

from collections.abc import Iterable

from hf_zero.ops.error_codec import ErrorCodec
from hf_zero.zero.layout.flat_buffer import FlatBuffer


class GradientErrors:
    """The error buffers of ``flats``, cleared after every ``every`` steps.

    ``scale``: the loss scale in gradients.
    """

    def __init__(self, flats: Iterable[FlatBuffer], every: int, scale: float):
        codecs = (flat.spec.reduce_codec for flat in flats)
        self._codecs = [codec for codec in codecs if isinstance(codec, ErrorCodec)]
        self._every, self._scale = every, scale

    def end_step(self, number: int, overflow: bool, scale: float) -> None:
        """End step ``number``, counted from 1; ``scale`` is the loss scale of the next one."""
        if overflow or number % self._every == 0:
            self.clear(scale)
        elif scale != self._scale:
            for codec in self._codecs:
                codec.rescale(scale / self._scale)
        self._scale = scale

    def clear(self, scale: float) -> None:
        """Clear the errors, for other weights and the loss scale ``scale``."""
        for codec in self._codecs:
            codec.clear()
        self._scale = scale
