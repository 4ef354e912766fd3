"""Bytes that a rank sends in a step, dense and compressed, and the link speed below which
compression pays.

The count assumes ring collectives over the ranks that share one copy, with as many bytes received
as sent: (N - 1) / N of a buffer in an all-gather or reduce-scatter, twice that in an all-reduce.
Gathers that are skipped because a unit is still whole are counted, as are persistent parameters.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from hf_zero.compression.block_codecs import DEFAULT_BLOCKS, SMALLEST_TENSOR
from hf_zero.device import kinds
from hf_zero.ops.symmetric_blocks import SymmetricBlocks
from hf_zero.zero.layout.engine_plan import EnginePlan, FlatPlan

ONE_BIT_BLOCK = 2048
SAMPLE = 1 << 20  # elements encoded to measure the time


@dataclass(frozen=True)
class Codings:
    """Seconds to encode one element into few bits, and to decode it."""

    encode: float
    decode: float


@dataclass(frozen=True)
class Traffic:
    """One way of sending. ``nbytes``: bytes per rank and step; ``coding``: seconds per rank and
    step for encoding and decoding.
    """

    name: str
    nbytes: int
    coding: float = 0.0

    def seconds(self, link: float) -> float:
        """Return the seconds on a link of ``link`` bits per second, without computation."""
        return 8 * self.nbytes / link + self.coding

    def pays_below(self, dense: Traffic) -> float | None:
        """Return the link, in bits per second, from which ``dense`` is faster; None: always."""
        saved = 8 * (dense.nbytes - self.nbytes)
        if saved <= 0:
            return None
        return saved / self.coding if self.coding > 0 else float("inf")


@dataclass(frozen=True)
class _Sizes:
    """Elements of one flat buffer that is trained or gathered: ``few`` of them in tensors that may
    be compressed, ``rest`` in others, over ``shards`` ranks.
    """

    item: int
    few: int
    rest: int
    shards: int

    @property
    def nbytes(self) -> int:
        return (self.few + self.rest) * self.item

    @property
    def sent(self) -> float:
        """The share of a whole buffer that a rank sends to the others."""
        return (self.shards - 1) / self.shards

    def dense(self, times: float = 1.0) -> float:
        return times * self.sent * self.nbytes

    def coded(self, nbytes: Callable[[int], float], times: float = 1.0) -> float:
        chunk = -(-self.few // self.shards)
        return times * self.sent * (self.shards * nbytes(chunk) + self.rest * self.item)


def ways_of_sending(plan: EnginePlan, codings: Codings) -> list[Traffic]:
    """Return the ways of sending at the stage of ``plan``, the dense one first; that alone with one
    rank, and if ranks hold different parts of the model, whose own exchanges are not counted.
    """
    stage, replicas = plan.settings.stage, plan.settings.replicate_size
    shards = plan.dims.pp_stage_ranks // replicas
    accumulation = plan.settings.gradient_accumulation_steps or 1
    every = [_sizes(flat, max(1, plan.sharers(flat) // replicas)) for flat in plan.flats]
    trains = [sizes for sizes, flat in zip(every, plan.flats) if flat.spec.trainable]
    in_few_bits = shards > 1 and plan.dims.tensor * plan.dims.expert == 1
    reduces = accumulation if stage > 1 else 1
    gathers = 2 * accumulation
    # the all-reduce of the reduced shards across replicas
    copies = 2 * (replicas - 1) / replicas / shards * reduces
    across = sum(copies * train.nbytes for train in trains)
    few = sum(b.few for b in trains)

    def way(name: str, nbytes: float, encoded: float = 0.0, decoded: float = 0.0) -> Traffic:
        coding = encoded * codings.encode + decoded * codings.decode
        return Traffic(name, round(nbytes + across), coding)

    up = sum(b.dense(reduces) for b in trains)
    four, eight = (SymmetricBlocks(bits, block).nbytes for bits, block in DEFAULT_BLOCKS.items())
    if stage == 3:
        down = sum(b.dense(gathers) for b in every)
        ways = [way("dense", up + down)]
        if in_few_bits:
            few_up = sum(b.coded(four, reduces) for b in trains)
            few_down = sum(b.coded(eight, gathers) for b in every)
            all_few = sum(b.few for b in every)
            ways.append(
                way(
                    "ZeRO++: int4 gradients, int8 weights",
                    few_up + few_down,
                    reduces * few + gathers * all_few / shards,
                    reduces * few + gathers * all_few,
                )
            )
        return ways
    ways = [way("dense", up + sum(b.dense() for b in trains))]
    if in_few_bits and stage > 0:
        both = sum(b.coded(four, reduces + 1) for b in trains)
        coded = (few * (reduces + 1 / shards), few * (reduces + 1))
        ways.append(way("4 bits both ways", both, *coded))
    if in_few_bits:
        ways.append(
            way(
                "1 bit after the freeze",
                sum(b.coded(_one_bit, 2) for b in trains),
                few * (1 + 1 / shards),
                few * 2,
            )
        )
    return ways


def _sizes(flat: FlatPlan, shards: int) -> _Sizes:
    slots = flat.spec.layout.slots
    matrices = (slot.numel for slot in slots if len(slot.shape) > 1)
    few = sum(numel for numel in matrices if numel >= SMALLEST_TENSOR)
    return _Sizes(flat.spec.dtype.itemsize, few, flat.spec.layout.padded - few, shards)


def _one_bit(numel: int) -> float:
    """Return the bytes of ``numel`` elements: one bit each, and a scale of 4 bytes per block."""
    return numel / 8 + 4 * -(-numel // ONE_BIT_BLOCK)


def codings(device: torch.device) -> Codings:
    """Measure the coding times on ``device``, each the best of three."""
    blocks, values = SymmetricBlocks(4, DEFAULT_BLOCKS[4]), torch.randn(SAMPLE, device=device)
    message, out = blocks.quantize(values), torch.empty_like(values)

    def best(call: Callable[[], object]) -> float:
        taken = []
        for _ in range(3):
            began = time.perf_counter()
            call()
            kinds.synchronize(device)
            taken.append(time.perf_counter() - began)
        return min(taken) / SAMPLE

    return Codings(
        best(lambda: blocks.quantize(values)), best(lambda: blocks.dequantize(message, out))
    )
