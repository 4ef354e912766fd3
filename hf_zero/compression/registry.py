"""The extensions of an engine's step that a configuration or an optimizer asks for, in rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from typing import Any

import torch

from hf_zero.compression.error_feedback import ErrorCodec, ErrorFeedback
from hf_zero.compression.one_bit_steps import OneBitSteps
from hf_zero.compression.secondary_shards import SecondaryShards
from hf_zero.config import ZeroConfig
from hf_zero.ops.sign_blocks import SignBlocks
from hf_zero.ops.symmetric_blocks import BlockCodec, SymmetricBlocks
from hf_zero.optim.one_bit import OneBit, one_bit_of
from hf_zero.zero.extensions import Extensions
from hf_zero.zero.layout.codecs import DEFAULT_BLOCKS, SMALLEST_TENSOR, Codecs
from hf_zero.zero.layout.stage_policy import POLICIES

_ZERO = "zero_optimization.zero_"
# Returns the fields of :class:`Extensions` that settings ask for; {} if they are off.
Row = Callable[[ZeroConfig, "torch.optim.Optimizer | None"], dict[str, Any]]


def compressed(config: ZeroConfig, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """Messages in fewer bits: momenta in one, or gradients, weights and updates in 4 or 8; weights
    of float8 linear layers in float8.
    """
    settings = one_bit_of(config, optimizer)
    return _few_bits(config) if settings is None else _one_bit(config, settings)


def _few_bits(config: ZeroConfig) -> dict[str, object]:
    """Gradients, weights and updates in 4 or 8 bits (ZeRO++'s qgZ and qwZ), and the errors of
    gradients fed back (LoCo).
    """
    zero, both, loco = config.zero, config.compressed_communication, config.zeropp_loco_param
    four, eight = (
        BlockCodec(SymmetricBlocks(bits, both.block_size or DEFAULT_BLOCKS[bits]))
        for bits in (4, 8)
    )
    gradients = None
    if both.bits or zero.quantized_gradients:
        gradients = partial(ErrorCodec, four, loco.beta) if loco.on else lambda: four
    # an offloaded update sends its new values uncompressed
    differences = both.bits is not None and not config.offload_optimizer.on
    keys = {
        f"{_ZERO}quantized_gradients": zero.quantized_gradients,
        f"{_ZERO}quantized_weights": zero.quantized_weights,
        f"{_ZERO}quantized_nontrainable_weights": zero.quantized_nontrainable_weights,
        "compressed_communication.bits": both.bits is not None,
    }
    codecs = Codecs(
        gradients,
        eight if zero.quantized_weights else None,
        eight if zero.quantized_weights or zero.quantized_nontrainable_weights else None,
        BlockCodec(four.blocks, differences=True) if differences else None,
        float8_gathers=config.float8_training.gather_weights,
        block=both.block_size or SMALLEST_TENSOR,
    )
    steps = (partial(ErrorFeedback, every=loco.every),) if gradients is not None and loco.on else ()
    return {"codecs": codecs, "steps": steps, "needs_one_mesh": _in_use(keys)}


def _one_bit(config: ZeroConfig, settings: OneBit) -> dict[str, object]:
    """Momenta in one bit an element (1-bit Adam, 1-bit LAMB, 0/1 Adam)."""
    codecs = Codecs(
        momentum=SignBlocks(settings.block),
        float8_gathers=config.float8_training.gather_weights,
        block=settings.block,
    )
    return {
        "codecs": codecs,
        "steps": (partial(OneBitSteps, one_bit=settings),),
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
    return {"hierarchical": key if hops and sharded else "", "needs_one_mesh": _in_use(keys)}


ROWS: list[Row] = [two_hops, secondary_shards, compressed]


def extensions_of(config: ZeroConfig, optimizer: torch.optim.Optimizer | None = None) -> Extensions:
    """Return the extensions that ``config`` or ``optimizer`` asks for.

    Sequences of several rows are joined; of other fields a later row's value counts.
    """
    values: dict[str, Any] = {}
    joined = {field.name for field in fields(Extensions) if field.default == ()}
    for row in ROWS:
        for name, value in row(config, optimizer).items():
            values[name] = values.get(name, ()) + value if name in joined else value
    return Extensions(**values)


def _in_use(keys: dict[str, bool]) -> Sequence[str]:
    return tuple(key for key, on in keys.items() if on)
