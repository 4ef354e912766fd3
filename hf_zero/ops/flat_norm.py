"""Sums of squares of many tensors in one pass: fp32 in runs of :data:`RUN` elements, runs added in
fp64, in a fixed order.

The result of a tensor depends on its elements alone, not on its neighbours. A run whose fp32 sum
overflows, or is so small that squares may have vanished, is summed again in fp64; so a sum is not
finite exactly if an element is not.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hf_zero.device.pinned import upload
from hf_zero.errors import KernelError
from hf_zero.ops import flat_norm_reference as reference
from hf_zero.ops.dispatch import Kernel
from hf_zero.ops.flat_tiles import PHASE

RUN = 16384
RUN_COLUMNS = 4  # first element, length, whether it is whole and aligned, 0
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _example(device: torch.device) -> tuple[Any, ...]:
    return torch.rand(40, device=device), *run_tables(((0, 24), (24, 16)), device)


RUNS = Kernel("flat_squares", "flat_norm:squares", reference.squares, example=_example)


def squared_norm(tensors: Tensor | Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return (sum of squares, 0-dim fp64; whether an element is not finite, 0-dim fp32: 1 or 0) of
    all elements, without waiting for the device.

    Args and errors as in :func:`squared_norms`.
    """
    total = squared_norms([tensors] if isinstance(tensors, Tensor) else tensors).sum()
    return total, total.isfinite().logical_not().float()


def squared_norms(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum of squares of each of ``tensors``: [tensors] fp64, on their device.

    Args:
        tensors: contiguous, fp32, bf16 or fp16, on one device. Those of one dtype in one storage
            take one launch.

    Raises:
        KernelError: no tensors, or a tensor of another kind.
    """
    if not tensors:
        raise KernelError(
            "squared_norms: there are no tensors, and so no device for the "
            "result; give at least one"
        )
    for index, tensor in enumerate(tensors):
        if tensor.dtype not in _DTYPES:
            raise KernelError(
                f"squared_norms: tensor {index} is {tensor.dtype}; give one of "
                f"{', '.join(map(str, _DTYPES))}"
            )
        if not tensor.is_contiguous():
            raise KernelError(
                f"squared_norms: tensor {index} has strides {tensor.stride()}; make it contiguous"
            )
        if tensor.device != tensors[0].device:
            raise KernelError(
                f"squared_norms: tensor {index} is on {tensor.device} and tensor 0 on "
                f"{tensors[0].device}; move it there"
            )
    return torch.ops.hf_zero.flat_squared_norms(list(tensors))


@torch.library.custom_op("hf_zero::flat_squared_norms", mutates_args=())
def _squared_norms(tensors: Sequence[Tensor]) -> Tensor:
    together: dict[tuple[int, torch.dtype], list[int]] = defaultdict(list)
    for index, tensor in enumerate(tensors):
        together[tensor.untyped_storage()._cdata, tensor.dtype].append(index)
    sums = []
    order = []
    for indices in together.values():
        first = tensors[indices[0]]
        base = first.detach().as_strided(
            (first.untyped_storage().nbytes() // first.element_size(),), (1,), 0
        )
        places = tuple(
            (tensors[index].storage_offset(), tensors[index].numel()) for index in indices
        )
        sums.append(RUNS(base, *run_tables(places, first.device)))
        order += indices
    whole = torch.cat(sums)
    if order == list(range(len(order))):
        return whole
    return torch.stack(
        [part for _, part in sorted(zip(order, whole.unbind()), key=lambda pair: pair[0])]
    )


@_squared_norms.register_fake
def _(tensors: Sequence[Tensor]) -> Tensor:
    return torch.empty(len(tensors), dtype=torch.float64, device=tensors[0].device)


@functools.lru_cache(maxsize=64)
def run_tables(places: tuple[tuple[int, int], ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the runs [runs, RUN_COLUMNS] of ranges (first element, length) of one buffer, and the
    index of the first run of each range [ranges + 1].
    """
    tables, bounds = [torch.empty(0, RUN_COLUMNS, dtype=torch.int64)], [0]
    for offset, length in places:
        starts = torch.arange(0, length, RUN, dtype=torch.int64)
        table = torch.zeros(starts.numel(), RUN_COLUMNS, dtype=torch.int64)
        table[:, 0] = starts + offset
        table[:, 1] = (length - starts).clamp(max=RUN)
        table[:, 2] = (table[:, 1] == RUN) & (offset % PHASE == 0)
        tables.append(table)
        bounds.append(bounds[-1] + starts.numel())
    return upload(torch.cat(tables), device), upload(
        torch.tensor(bounds, dtype=torch.int64), device
    )
