"""The codecs of compressed collectives: one per flat buffer and direction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from hf_zero.distributed.collectives import Codec, GatherCodec
from hf_zero.logging import logger
from hf_zero.ops.sign_blocks import SignBlocks
from hf_zero.zero.layout.flat_buffer import FlatBuffer
from hf_zero.zero.layout.flat_layout import FlatLayout
from hf_zero.zero.layout.float8_weights import is_float8

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
# Default block size by bits. Adam divides by the usual magnitude of a gradient element: 4 bits lose
# the elements far below the largest of their block, and a larger block loses more of them
# (scripts/bench/results/compressed_loss-*.jsonl).
DEFAULT_BLOCKS = {4: 64, 8: 256}
SMALLEST_TENSOR = 256  # elements


@dataclass(frozen=True)
class Codecs:
    """Codecs for reductions of gradients and for gathers of weights; None sends values
    uncompressed.

    gradients: makes the codec of one flat buffer, which may keep state. weights, frozen: for
    gathers at stage 3 of trainable and of frozen parameters. deltas: for the changes of a step,
    where all ranks keep whole weights. momentum: for a momentum that is sent in place of gradients.
    float8_gathers: gather the weights of float8 linear layers (:func:`mark_float8`) in float8 at
    stage 3. block: tensors with fewer elements, and 1-D tensors, are sent uncompressed in flat
    buffers of their own: next to a matrix their elements would share a block scale that is too
    large for them.
    """

    gradients: Callable[[], Codec] | None = None
    weights: Codec | None = None
    frozen: Codec | None = None
    deltas: Codec | None = None
    momentum: SignBlocks | None = None
    float8_gathers: bool = False
    block: int = SMALLEST_TENSOR

    def takes(self, parameter: torch.Tensor, trains: bool) -> bool:
        """Return whether ``parameter`` may be placed in a compressed flat buffer."""
        ours = (self.gradients, self.weights, self.deltas, self.momentum)
        return (
            any(ours if trains else (self.frozen,))
            and parameter.dim() > 1
            and parameter.numel() >= self.block
        )

    def sends_float8(self, parameter: torch.Tensor, dtype: torch.dtype) -> bool:
        """Return whether gathers of values in ``dtype`` send ``parameter`` in float8."""
        fits = dtype in (torch.bfloat16, torch.float32)  # float8_weights.py, the note
        return self.float8_gathers and fits and is_float8(parameter)

    def momentum_of(self, layout: FlatLayout, dtype: torch.dtype) -> SignBlocks | None:
        """Return the codec for momenta of a flat buffer that :meth:`takes` has chosen, if any."""
        fits = layout.num_shards > 1 and layout.shard_numel >= self.block and dtype in FLOATS
        return self.momentum if fits else None

    def codecs(
        self, layout: FlatLayout, dtype: torch.dtype, trains: bool, sharded: bool, persistent: bool
    ) -> tuple[Codec | None, GatherCodec | None]:
        """Return the codecs for reductions and for gathers of a flat buffer of parameters that
        :meth:`takes` has chosen.
        """
        if layout.num_shards == 1 or layout.shard_numel < self.block or dtype not in FLOATS:
            return None, None
        if not trains:
            return None, self.frozen if sharded else None
        up = self.gradients() if self.gradients is not None else None
        return up, self.weights if sharded else None if persistent else self.deltas


UNCOMPRESSED = Codecs()


def report(flats: Sequence[FlatBuffer], wire: torch.dtype | None) -> None:
    """Log on rank 0 which collectives are compressed, and the bytes of their messages."""
    chosen = [flat for flat in flats if flat.spec.reduce_codec or flat.spec.gather_codec]
    if not chosen or chosen[0].engine_mesh.rank != 0:
        return
    sentences = []
    trains = [flat for flat in flats if flat.trainable and flat.layout.num_shards > 1]
    up = [(flat.layout, wire or flat.dtype, flat.spec.reduce_codec) for flat in trains]
    down = [
        (flat.layout, flat.dtype, flat.spec.gather_codec)
        for flat in flats
        if flat.layout.num_shards > 1
    ]
    for what, messages in (("a reduction of all gradients", up), ("a gather of all weights", down)):
        names = sorted({str(codec) for *_, codec in messages if codec is not None})
        if names:
            dense = sum(layout.padded * dtype.itemsize for layout, dtype, _ in messages)
            sent = sum(
                layout.padded * dtype.itemsize
                if codec is None
                else layout.num_shards * codec.nbytes(layout.shard_numel)
                for layout, dtype, codec in messages
            )
            sentences.append(f"{what} is {sent:,} bytes instead of {dense:,} ({', '.join(names)})")
    logger.info(
        f"compressed communication in {len(chosen)} of {len(flats)} flats: " + "; ".join(sentences)
    )
