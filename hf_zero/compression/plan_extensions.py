"""What the plan of an engine reads of messages in few bits and of gathers over more meshes.

Rows of ``config/features.toml`` name these functions. Each returns the fields of
:class:`hf_zero.zero.extensions.Extensions` that it sets, {} if nothing that it serves is in use.
``needs_one_mesh`` refuses a model that is split over ranks before ``initialize``, as the
``excludes.axes`` of the rows refuse the keys that split it; both do at every stage, also where a
key has no effect.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TypedDict

import torch

from hf_zero.compression.block_codecs import (
    DEFAULT_BLOCKS,
    SMALLEST_TENSOR,
    BlockCodec,
    BlockwiseCodec,
)
from hf_zero.compression.error_feedback import ErrorCodec, sends_few_bits
from hf_zero.compression.secondary_shards import SecondaryShards
from hf_zero.config import ZeroConfig
from hf_zero.config.messages import CompressedCommunication, LocoSection
from hf_zero.distributed.collectives import Codec
from hf_zero.distributed.two_hops import TwoHops
from hf_zero.ops.sign_blocks import SignBlocks
from hf_zero.ops.symmetric_blocks import SymmetricBlocks
from hf_zero.optim.one_bit import one_bit_of
from hf_zero.zero.layout.stage_policy import POLICIES

_ZERO = "zero_optimization."


class ExtensionFields(TypedDict, total=False):
    """The fields of ``Extensions`` that this file sets, which has their descriptions."""

    codecs: tuple[BlockwiseCodec, ...]
    node: int
    hierarchical: str
    route: type[TwoHops]
    needs_one_mesh: tuple[str, ...]
    gathers: type[SecondaryShards]


def few_bits(config: ZeroConfig, optimizer: torch.optim.Optimizer | None) -> ExtensionFields:
    """Gradients, weights and updates in 4 or 8 bits (ZeRO++'s qgZ and qwZ), and the errors of
    gradients fed back (LoCo); none beside momenta in one bit.
    """
    zero, section = config.zero, config.section_of(CompressedCommunication)
    keys = _in_use(
        {
            f"{_ZERO}zero_quantized_gradients": zero.quantized_gradients,
            f"{_ZERO}zero_quantized_weights": zero.quantized_weights,
            f"{_ZERO}zero_quantized_nontrainable_weights": zero.quantized_nontrainable_weights,
            "compressed_communication.bits": section.bits is not None,
        }
    )
    if not keys or one_bit_of(config, optimizer) is not None:
        return {}
    four, eight = (
        BlockCodec(SymmetricBlocks(bits, section.block_size or DEFAULT_BLOCKS[bits]))
        for bits in (4, 8)
    )
    # an offloaded update sends its new values uncompressed
    sends_differences = section.bits is not None and not config.offload_optimizer.on
    codec = BlockwiseCodec(
        gradients=_codecs_of_gradients(config, four),
        weights=eight if zero.quantized_weights else None,
        frozen=eight if zero.quantized_weights or zero.quantized_nontrainable_weights else None,
        deltas=BlockCodec(four.blocks, differences=True) if sends_differences else None,
        smallest=section.block_size or SMALLEST_TENSOR,
    )
    return {"codecs": (codec,), "needs_one_mesh": keys}


def one_bit(config: ZeroConfig, optimizer: torch.optim.Optimizer | None) -> ExtensionFields:
    """Momenta in one bit an element (1-bit Adam, 1-bit LAMB, 0/1 Adam)."""
    settings = one_bit_of(config, optimizer)
    if settings is None:
        return {}
    codec = BlockwiseCodec(momentum=SignBlocks(settings.block), smallest=settings.block)
    return {"codecs": (codec,), "needs_one_mesh": ("compressed_communication.bits",)}


def secondary_shards(
    config: ZeroConfig, optimizer: torch.optim.Optimizer | None
) -> ExtensionFields:
    """Values kept within each node for the gathers of the backward (ZeRO++'s hpZ)."""
    ranks, keys = config.zero.hpz_partition_size, (f"{_ZERO}zero_hpz_partition_size",)
    if ranks <= 1:
        return {}
    if not POLICIES[config.stage].shards_parameters:
        return {"needs_one_mesh": keys}
    return {"gathers": SecondaryShards, "node": ranks, "needs_one_mesh": keys}


def two_hops(config: ZeroConfig, optimizer: torch.optim.Optimizer | None) -> ExtensionFields:
    """Gathers across hosts and then within each, and replicas of the shards (both MiCS)."""
    key, hops = f"{_ZERO}mics_hierarchical_params_gather", config.zero.hierarchical_gather
    keys = _in_use({"replicate_size": (config.replicate_size or 1) > 1, key: hops})
    if not keys:
        return {}
    if not hops or not POLICIES[config.stage].shards_parameters:
        return {"needs_one_mesh": keys}
    return {"hierarchical": key, "route": TwoHops, "needs_one_mesh": keys}


def _codecs_of_gradients(config: ZeroConfig, codec: BlockCodec) -> Callable[[], Codec] | None:
    """Return the function that makes the codec of the gradients of a flat buffer, each its own if
    it keeps errors; None: they are sent uncompressed.
    """
    loco = config.section_of(LocoSection)
    if not sends_few_bits(config):
        return None
    return partial(ErrorCodec, codec, loco.beta) if loco.on else lambda: codec


def _in_use(keys: Mapping[str, bool]) -> tuple[str, ...]:
    return tuple(key for key, on in keys.items() if on)
