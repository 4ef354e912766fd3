"""Gathers of the weights of float8 linear layers in float8, with one scale for each whole weight.

[Note: the cast of a cast]
A linear layer with dynamic scales casts its weight to float8 with 448 / amax. A rank casts its part
of the weight with the scale of the whole, and the receivers convert the message back to the compute
dtype: 448 becomes amax again, bit for bit, and so the layer has the same scale; every other number
is off by less than half a unit of float8, and so the layer's cast has the bytes of the message. The
layer thus multiplies with what it would have cast from the whole weight itself, and a rank that has
unrounded values (GatheredParameters, a weight that it alone holds) computes the same. This holds in
bf16 and fp32; small numbers of fp16 are too coarse for it.

[Note: one message for all scales]
The amax of a weight is over all ranks, after the update, so no message before has it. If a
weight has changed (``FlatBuffer.version``: a step, a load, a write), the next pass begins with one
message that has the amax of all weights, each rank's of its own part. In the pass itself a rank
must not wait for it: a wait at the launch of a gather, ahead of its turn, could be for a rank that
waits for a reduction (``reduction_order.py``, the note).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from hf_zero.distributed.collectives import MeshDim
from hf_zero.zero.layout.flat_buffer import FlatBuffer
from hf_zero.zero.layout.flat_layout import FlatLayout
from hf_zero.zero.layout.parameter_codec import (
    CodecAgreement,
    FlatUse,
    MessageCodecs,
    ParameterCodec,
    ParameterUse,
)

FLOAT8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FLOAT8).max
SMALLEST_AMAX = 1e-12  # torchao's EPS
_MARK = "_hf_zero_float8"


def mark_float8(parameter: nn.Parameter) -> None:
    """Mark ``parameter`` as one that only float8 linear layers with one scale a weight read."""
    parameter.__dict__[_MARK] = True


def is_float8(parameter: torch.Tensor) -> bool:
    """Return whether ``parameter`` is marked."""
    return _MARK in parameter.__dict__


class Float8Weights:
    """The codec of one flat buffer of weights in gathers: float8 with a scale for each, from
    :meth:`set_scales`. ``owned``: this rank's elements.
    """

    differences = False
    reads_master = True  # the note on the cast of a cast

    def __init__(self, layout: FlatLayout, owned: tuple[int, int]):
        self._layout, self._owned = layout, owned
        self._place = {slot.name: index for index, slot in enumerate(layout.slots)}
        self._scales: Sequence[torch.Tensor] = ()
        self._units: Sequence[torch.Tensor] = ()

    def __str__(self) -> str:
        return "float8 with a scale for each weight"

    @property
    def weights(self) -> int:
        """Number of weights."""
        return len(self._layout.slots)

    @staticmethod
    def agreement(dim: MeshDim, flats: Sequence[FlatBuffer]) -> CodecAgreement:
        """Return the scales of ``flats``, on which the ranks along ``dim`` agree."""
        return AgreedScales(dim, flats)

    def nbytes(self, numel: int) -> int:
        """Return the bytes of a message of ``numel`` elements."""
        return numel

    def amax(self, values: torch.Tensor, start: int) -> torch.Tensor:
        """Return the largest magnitude of each weight in ``values``, the elements of the flat
        buffer from ``start`` on; zeros for weights that have none there: fp32 [weights].
        """
        pieces = list(self._layout.pieces(start, start + values.numel()))
        parts = [values.narrow(0, piece.offset - start, len(piece)) for piece in pieces]
        largest = [values.new_zeros(())] * self.weights
        for piece, norm in zip(pieces, torch._foreach_norm(parts, math.inf) if parts else ()):
            largest[self._place[piece.name]] = norm
        return torch.stack(largest).float()

    def set_scales(self, scales: Sequence[torch.Tensor], units: Sequence[torch.Tensor]) -> None:
        """Set what :func:`scales_of` returns for the whole weights."""
        self._scales, self._units = scales, units

    @torch.no_grad()
    def encode(
        self, values: torch.Tensor, rows: int = 1, current: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Encode, see :class:`hf_zero.distributed.collectives.GatherCodec`. One row is this
        rank's part; several are the whole buffer, which needs no agreement on its scales.
        """
        start = self._owned[0]
        if rows > 1:
            start = 0
            self.set_scales(*scales_of(self.amax(values, start)))
        scaled = torch.zeros(values.numel(), device=values.device)
        for piece in self._layout.pieces(start, start + values.numel()):
            place = 0, piece.offset - start, len(piece)
            scale = self._scales[self._place[piece.name]]
            torch.mul(values.narrow(*place), scale, out=scaled.narrow(*place))
        return scaled.to(FLOAT8).view(torch.uint8).view(rows, -1)

    @torch.no_grad()
    def decode(self, messages: torch.Tensor, full: torch.Tensor) -> None:
        """Decode, see :class:`hf_zero.distributed.collectives.GatherCodec`."""
        full.copy_(messages.view(-1).view(FLOAT8))  # exact in 16 bits, too
        for slot, unit in zip(self._layout.slots, self._units):
            part = full.narrow(0, slot.offset, slot.numel)
            torch.mul(part, unit, out=part)  # computed in fp64


def scales_of(amax: torch.Tensor) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
    """Return the scale of each weight of ``amax`` [weights], fp32, and the unit by which a receiver
    multiplies, fp64, in which 448 units are exactly the amax: each [1].
    """
    amax = amax.double().clamp(min=SMALLEST_AMAX)
    return (LARGEST / amax).float().split(1), (amax / LARGEST).split(1)


class AgreedScales(CodecAgreement):
    """The scales of ``flats``, whose codecs are :class:`Float8Weights`."""

    def __init__(self, dim: MeshDim, flats: Sequence[FlatBuffer]):
        super().__init__(dim, flats)
        self._changes: list[int] = []  # of each flat buffer, at the last agreement

    def renew(self) -> None:
        changes = [flat.version for flat in self.flats]
        if changes != self._changes:
            with torch.inference_mode(False), torch.no_grad():
                self._agree()
            self._changes = changes

    def _agree(self) -> None:
        own = [_codec(flat).amax(flat.shard, flat.owned[0]) for flat in self.flats]
        chunk = torch.cat(own)
        every = chunk.new_empty(self.dim.size * chunk.numel())
        self.dim.all_gather([(every, chunk)], "scales of float8 weights").wait()
        scales, units = scales_of(every.view(self.dim.size, -1).amax(0))
        at = 0
        for codec in map(_codec, self.flats):
            end = at + codec.weights
            codec.set_scales(scales[at:end], units[at:end])
            at = end


def _codec(flat: FlatBuffer) -> Float8Weights:
    codec = flat.spec.gather_codec
    assert isinstance(codec, Float8Weights)
    return codec


class Float8Gathers(ParameterCodec):
    """Gathers in float8 of the weights that :func:`mark_float8` has marked."""

    key = "float8"

    def takes(self, parameter: torch.Tensor, use: ParameterUse) -> bool:
        fits = use.dtype in (torch.bfloat16, torch.float32)  # the note on the cast of a cast
        return use.gathered and fits and is_float8(parameter)

    def messages(self, flat: FlatUse) -> MessageCodecs:
        return MessageCodecs(gathered=Float8Weights(flat.layout, flat.owned))
