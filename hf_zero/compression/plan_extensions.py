"""What the plan of an engine reads of messages in few bits and of gathers over more meshes. Rows of
``config/features.toml`` name these functions; each returns the fields of
:class:`hf_zero.zero.extensions.Extensions` that it sets, {} if it is off.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from hf_zero.compression.block_codecs import DEFAULT_BLOCKS, SMALLEST_TENSOR, BlockwiseCodec
from hf_zero.compression.error_feedback import ErrorCodec, sends_few_bits
from hf_zero.compression.secondary_shards import SecondaryShards
from hf_zero.config import ZeroConfig
from hf_zero.config.messages import CompressedCommunication, LocoSection
from hf_zero.distributed.two_hops import TwoHops
from hf_zero.ops.sign_blocks import SignBlocks
from hf_zero.ops.symmetric_blocks import BlockCodec, SymmetricBlocks
from hf_zero.optim.one_bit import one_bit_of
from hf_zero.zero.layout.stage_policy import POLICIES

_ZERO = "zero_optimization.zero_"


def few_bits(config: ZeroConfig, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """Gradients, weights and updates in 4 or 8 bits (ZeRO++'s qgZ and qwZ), and the errors of
    gradients fed back (LoCo); none beside momenta in one bit.
    """
    if one_bit_of(config, optimizer) is not None:
        return {}
    zero, loco = config.zero, config.section_of(LocoSection)
    section = config.section_of(CompressedCommunication)
    four, eight = (
        BlockCodec(SymmetricBlocks(bits, section.block_size or DEFAULT_BLOCKS[bits]))
        for bits in (4, 8)
    )
    gradients = None
    if sends_few_bits(config):
        gradients = partial(ErrorCodec, four, loco.beta) if loco.on else lambda: four
    # an offloaded update sends its new values uncompressed
    differences = section.bits is not None and not config.offload_optimizer.on
    keys = {
        f"{_ZERO}quantized_gradients": zero.quantized_gradients,
        f"{_ZERO}quantized_weights": zero.quantized_weights,
        f"{_ZERO}quantized_nontrainable_weights": zero.quantized_nontrainable_weights,
        "compressed_communication.bits": section.bits is not None,
    }
    codec = BlockwiseCodec(
        gradients,
        eight if zero.quantized_weights else None,
        eight if zero.quantized_weights or zero.quantized_nontrainable_weights else None,
        BlockCodec(four.blocks, differences=True) if differences else None,
        block=section.block_size or SMALLEST_TENSOR,
    )
    return {"codecs": (codec,), "needs_one_mesh": _in_use(keys)}


def one_bit(config: ZeroConfig, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """Momenta in one bit an element (1-bit Adam, 1-bit LAMB, 0/1 Adam)."""
    settings = one_bit_of(config, optimizer)
    if settings is None:
        return {}
    return {
        "codecs": (BlockwiseCodec(momentum=SignBlocks(settings.block), block=settings.block),),
        "needs_one_mesh": ("compressed_communication.bits",),
    }


def secondary_shards(config: ZeroConfig, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """Values kept within each node for the gathers of the backward (ZeRO++'s hpZ)."""
    ranks, keys = config.zero.hpz_partition_size, (f"{_ZERO}hpz_partition_size",)
    if ranks <= 1:
        return {}
    if not POLICIES[config.stage].shards_parameters:
        return {"needs_one_mesh": keys}
    return {"gathers": SecondaryShards, "node": ranks, "needs_one_mesh": keys}


def two_hops(config: ZeroConfig, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """Gathers across hosts and then within each (MiCS), and replicas of the shards."""
    key = "zero_optimization.mics_hierarchical_params_gather"
    hops = config.zero.hierarchical_gather
    keys = {"replicate_size": (config.replicate_size or 1) > 1, key: hops}
    sharded = POLICIES[config.stage].shards_parameters
    return {
        "hierarchical": key if hops and sharded else "",
        "route": TwoHops,
        "needs_one_mesh": _in_use(keys),
    }


def _in_use(keys: dict[str, bool]) -> Sequence[str]:
    return tuple(key for key, on in keys.items() if on)
