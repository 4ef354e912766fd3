"""Bytes of training state that one rank holds, by kind and by tier.

The functions are methods of :class:`hf_zero.Engine`, under their names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from hf_zero.zero.sharded_engine import ShardedEngine

STATE_KINDS = ("parameters", "gradients", "optimizer")
TIERS = ("device", "ram", "disk")
GATHERED, MASTERS, MOMENTS = "gathered", "masters", "moments"
_REPORTED = {kind: kind for kind in STATE_KINDS} | {MASTERS: "optimizer", MOMENTS: "optimizer"}


def state_bytes(engine: ShardedEngine) -> dict[str, int]:
    """Return the current bytes of state on this rank, in all tiers: parameters (gathered ones
    excluded at stage 3), gradients (between a backward and its step), optimizer.
    """
    nbytes = held_bytes(engine)
    return {kind: sum(nbytes[kind, tier] for tier in TIERS) for kind in STATE_KINDS}


def bytes_by_tier(
    engine: ShardedEngine, counts: Counter[tuple[str, str]] | None = None
) -> dict[str, int]:
    """Return the same bytes by tier: ``device``, ``ram`` (offloaded state, and the buffers between
    it and files) and ``disk``. ``counts``: the result of :func:`held_bytes`, if known.
    """
    counts = held_bytes(engine) if counts is None else counts
    tiers = {tier: sum(counts[kind, tier] for kind in STATE_KINDS) for tier in TIERS}
    tiers["ram"] += sum(engine.sharded_model.placement.buffer_bytes().values())
    return tiers


def held_bytes(engine: ShardedEngine) -> Counter[tuple[str, str]]:
    """Return the bytes by kind and tier."""
    counts: Counter[tuple[str, str]] = Counter()
    for bytes_of_feature in engine.optimizer_step.feature_hooks.state_bytes:
        for kind, nbytes in bytes_of_feature().items():
            counts[kind, "device"] += nbytes
    for unit in engine.units:
        if unit.source is not None:
            counts["parameters", "device"] += unit.source.nbytes()
    counted: set[int] = set()
    for kind, tensor in tensors_on_device(engine):
        if kind != GATHERED and tensor.numel() and tensor.data_ptr() not in counted:
            counted.add(tensor.data_ptr())
            counts[_REPORTED[kind], "device"] += tensor.nbytes
    for flat in engine.flats:
        offloaded = [("parameters", flat.shard_bytes())] if flat.shard_offloaded else []
        if flat.optimizer_shard.offloaded:
            gradient = flat.gradient.shard
            assert gradient is not None
            counts["gradients", "ram"] += gradient.nbytes
            offloaded.append(("optimizer", flat.optimizer_shard.contents.nbytes()))
        for kind, by_tier in offloaded:
            for tier, nbytes in by_tier.items():
                counts[kind, tier] += nbytes
    return counts


def tensors_on_device(engine: ShardedEngine) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (kind, tensor) for the state of the flat buffers in memory of the device: parameters,
    gradients, masters, moments, and whole parameters while they are :data:`GATHERED`. Masters that
    a gather casts are yielded once more as parameters.
    """
    bound = engine.bound
    for flat in engine.flats:
        shard, gradient = flat.optimizer_shard, flat.gradient
        if not shard.offloaded:
            if shard.has_separate_master:
                master = shard.master
                assert master is not None
                yield MASTERS, master
            if flat.trainable and bound is not None:
                yield from ((MOMENTS, tensor) for tensor in bound.state.device.memory(shard))
        if gradient.memory is not None and gradient.memory.nbytes:
            yield "gradients", gradient.on_device()
        if flat.cast_master is not None:
            yield "parameters", flat.cast_master
        elif flat.sharded and not flat.shard_offloaded:
            yield "parameters", flat.shard
        yield GATHERED if flat.sharded else "parameters", flat.full
        for buffer in flat.transform.memory if flat.transform is not None else ():
            yield "parameters", buffer
