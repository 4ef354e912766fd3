"""Bytes of training state that one rank holds, by kind and by tier.

The functions are methods of :class:`hf_zero.Engine`, under their names.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

KINDS = ("parameters", "gradients", "optimizer")
TIERS = ("device", "ram", "disk")


def state_bytes(engine: Any) -> dict[str, int]:
    """Return the current bytes of state on this rank, in all tiers: parameters (gathered ones
    excluded at stage 3), gradients (between a backward and its step), optimizer.
    """
    nbytes = held_bytes(engine)
    return {kind: sum(nbytes[kind, tier] for tier in TIERS) for kind in KINDS}


def bytes_by_tier(engine: Any, counts: Counter[tuple[str, str]] | None = None) -> dict[str, int]:
    """Return the same bytes by tier: ``device``, ``ram`` (offloaded state, and the buffers between
    it and files) and ``disk``. ``counts``: the result of :func:`held_bytes`, if known.
    """
    counts = held_bytes(engine) if counts is None else counts
    tiers = {tier: sum(counts[kind, tier] for kind in KINDS) for tier in TIERS}
    tiers["ram"] += sum(engine.sharded_model.placement.held().values())
    return tiers


def held_bytes(engine: Any) -> Counter[tuple[str, str]]:
    """Return the bytes by kind and tier."""
    bound = engine.bound
    counts: Counter[tuple[str, str]] = Counter()
    counted: set[int] = set()

    def add(kind: str, tier: str, tensor: torch.Tensor | None) -> None:
        if tensor is not None and tensor.numel() and tensor.data_ptr() not in counted:
            counted.add(tensor.data_ptr())
            counts[kind, tier] += tensor.nbytes

    for extension in engine.optimizer_step.extensions:
        for kind, nbytes in extension.state_bytes().items():
            counts[kind, "device"] += nbytes
    for unit in engine.units:
        counts["parameters", "device"] += unit.source.nbytes()
    for flat in engine.flats:
        if flat.sharded:
            for tier, nbytes in flat.shard_bytes().items():
                counts["parameters", tier] += nbytes
        else:
            add("parameters", "device", flat.full)
        for buffer in flat.computing.memory if flat.computing is not None else ():
            add("parameters", "device", buffer)
        if not flat.trainable:
            continue
        memory = flat.gradient.memory
        if memory is not None and memory.nbytes:
            whole = flat.gradient.accumulated_grad
            add("gradients", "device", flat.gradient.shard if whole is None else whole)
        if flat.optimizer_shard.offloaded:
            add("gradients", "ram", flat.gradient.shard)
            for tier, nbytes in flat.optimizer_shard.storage.nbytes().items():
                counts["optimizer", tier] += nbytes
            continue
        if flat.optimizer_shard.has_own_master:
            add("optimizer", "device", flat.optimizer_shard.master)
        for tensor in bound.memory(flat.optimizer_shard) if bound is not None else ():
            add("optimizer", "device", tensor)
    return counts
