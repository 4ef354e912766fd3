"""Codecs as properties of parameters: what is sent of them, and how it is made whole.

A plan asks each codec whether it takes a parameter. Those that do are part of what parameters of
one flat buffer have in common, and make the codecs of its messages. The core has none of its own:
features bring them (``PlannedExtensions.codecs``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from hf_zero.distributed.collectives import Codec, GatherCodec, MeshDim
from hf_zero.logging import logger
from hf_zero.zero.layout.flat_buffer import FlatBuffer
from hf_zero.zero.layout.flat_layout import FlatLayout
from hf_zero.zero.layout.flat_spec import MomentumBlocks


class ParameterUse(NamedTuple):
    """How an engine uses one parameter. raw: only its own module reads its bytes. outside: no
    module of the model has it. gathered: each rank keeps a part of it between its uses.
    """

    dtype: torch.dtype
    trains: bool
    raw: bool
    outside: bool
    gathered: bool


class MessageCodecs(NamedTuple):
    """The codecs of one flat buffer; None: uncompressed. reduced: of its gradients. gathered: of
    its values, or of their changes. momentum: of the momentum that is sent in place of gradients.
    """

    reduced: Codec | None = None
    gathered: GatherCodec | None = None
    momentum: MomentumBlocks | None = None

    def overridden(self, other: MessageCodecs) -> MessageCodecs:
        """Return these codecs, with those that ``other`` has in their place."""
        return MessageCodecs(
            other.reduced or self.reduced,
            other.gathered or self.gathered,
            other.momentum or self.momentum,
        )


class FlatUse(NamedTuple):
    """The flat buffer that a codec is made for. sharded: its values are gathered and released.
    persistent: they stay whole at a stage that shards others. owned: this rank's elements.
    """

    layout: FlatLayout
    dtype: torch.dtype
    trains: bool
    sharded: bool
    persistent: bool
    owned: tuple[int, int]


class ParameterCodec:
    """One way to send parameters in fewer bytes."""

    key = ""  # of flat buffers of its parameters
    sends_changes = False  # whether steps send momenta or changes, from master weights in fp32

    def takes(self, parameter: torch.Tensor, use: ParameterUse) -> bool:
        """Return whether ``parameter``, in this use, may be sent so."""
        raise NotImplementedError

    def messages(self, flat: FlatUse) -> MessageCodecs:
        """Return the codecs of a flat buffer of parameters that :meth:`takes` has chosen."""
        raise NotImplementedError


def agreements(flats: Sequence[FlatBuffer]) -> list[Callable[[], None]]:
    """Return what the codecs of gathers of ``flats`` call ahead of a pass to agree on values of all
    ranks (collective), by mesh dimension: the ``renew`` of their ``agreement``, made of both.
    """
    groups: dict[tuple[Callable[..., CodecAgreement], MeshDim], list[FlatBuffer]] = {}
    for flat in flats:
        agreement = getattr(flat.spec.gather_codec, "agreement", None)
        if agreement is not None:
            groups.setdefault((agreement, flat.mesh.shard), []).append(flat)
    return [agreement(dim, flats).renew for (agreement, dim), flats in groups.items()]


class CodecAgreement:
    """The values on which the codecs of ``flats`` agree along ``dim``."""

    def __init__(self, dim: MeshDim, flats: Sequence[FlatBuffer]):
        self.dim, self.flats = dim, list(flats)

    def renew(self) -> None:
        """Agree again if the values have changed (collective)."""
        raise NotImplementedError


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
