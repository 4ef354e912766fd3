"""The two passes of LAMB (You et al. 2019, arXiv:1904.00962) over a list of tensors: by the native
core on the CPU, by Triton on a GPU, else by torch's operations over lists.

Per tensor, with the gradient ``g``, moments ``m`` and ``v`` and weights ``w``::

    m <- beta1 * m + (1 - beta1) * g;    v <- beta2 * v + (1 - beta2) * g * g
    u = m / (sqrt(v) + eps) + decay * w          (eps_inside: m / sqrt(v + eps))

The first pass sums the squares of ``w`` and ``u``, the second subtracts ``u`` times a number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from hf_zero.device.pinned import upload
from hf_zero.ops import flat_reference as reference
from hf_zero.ops import host, native
from hf_zero.ops.dispatch import Kernel, wanted
from hf_zero.ops.flat_tiles import SUMS


@dataclass(frozen=True)
class LambSettings:
    """The settings that the tensors of one call share."""

    beta1: float
    beta2: float
    eps: float
    decay: float
    eps_inside: bool = False


def _example(device: torch.device) -> list[list[Tensor]]:
    return [[torch.rand(20, device=device), torch.rand(8, device=device)] for _ in range(4)]


def _not_fp32(*lists: object, **_: object) -> str:
    tensors = [tensor for of in lists if isinstance(of, list) for tensor in of]
    fits = all(tensor.dtype == torch.float32 and tensor.is_contiguous() for tensor in tensors)
    return "" if fits else "a tensor is not fp32 and contiguous"


def _measure(*arrays: Any) -> tuple[Tensor, Tensor]:
    """Return the sums of the reference, as the kernel does its partial sums: one for each."""
    sums = reference.lamb_measure(*arrays).t().reshape(-1)
    return sums, torch.arange(sums.numel() + 1, dtype=torch.int64, device=sums.device)


# Returns partial sums and the bounds of those of each sum: SUMS, another kernel, adds them up. A
# kernel that moves the moments may have no second launch: were that one not to compile, the
# reference would move them again.
MEASURE = Kernel(
    "lamb_measure",
    "lamb:measure",
    _measure,
    _not_fp32,
    lambda device: (*_example(device), 0.9, 0.999, 1e-8, 0.1, False, 1.0),
)
APPLY = Kernel(
    "lamb_apply",
    "lamb:apply",
    reference.lamb_apply,
    _not_fp32,
    lambda device: (*_example(device)[1:], torch.ones(2, device=device), 1e-8, 0.1, False),
)


def measure_(
    weights: Sequence[Tensor],
    grads: Sequence[Tensor],
    means: Sequence[Tensor],
    squares: Sequence[Tensor],
    settings: LambSettings,
    *,
    divisor: float = 1.0,
    kernels: str | tuple[str, ...] = "auto",
) -> Tensor:
    """Run the first pass, in place; return the sums of squares [tensors, 2] of the weights and of
    the update, in fp64 on their device.

    Args:
        grads: in any float type; divided by ``divisor``.
        kernels: the configuration's ``kernels``.
    """
    arrays = [list(of) for of in (weights, grads, means, squares)]
    if _on_the_host(weights, *arrays[2:]) and all(g.is_cpu and g.is_contiguous() for g in grads):
        sums = [
            host.lamb_measure(*map(_flat, tensors), divisor=divisor, **asdict(settings))
            for tensors in zip(*arrays)
        ]
        return torch.tensor(sums, dtype=torch.float64, device="cpu").view(-1, 2)
    numbers = *asdict(settings).values(), divisor
    takes = wanted("optimizer", kernels, weights[0].device)
    run: Callable[..., tuple[Tensor, Tensor]] = MEASURE if takes else _measure
    partials, bounds = run(*arrays, *numbers)
    total = SUMS(partials, bounds) if takes else partials
    return total.view(2, len(weights)).t()


def apply_(
    weights: Sequence[Tensor],
    means: Sequence[Tensor],
    squares: Sequence[Tensor],
    step_sizes: Tensor,
    settings: LambSettings,
    *,
    kernels: str | tuple[str, ...] = "auto",
) -> None:
    """Run the second pass: subtract from each of ``weights`` its update times its number of
    ``step_sizes`` [tensors].
    """
    arrays = [list(of) for of in (weights, means, squares)]
    numbers = asdict(settings)
    if _on_the_host(*arrays):
        for step_size, tensors in zip(step_sizes.tolist(), zip(*arrays)):
            host.lamb_apply(*map(_flat, tensors), step_size=step_size, **numbers)
        return
    takes = wanted("optimizer", kernels, weights[0].device)
    run: Callable[..., None] = APPLY if takes else reference.lamb_apply
    sizes = step_sizes.to(weights[0].device, weights[0].dtype)
    run(*arrays, sizes, settings.eps, settings.decay, settings.eps_inside)


def _on_the_host(*arrays: Sequence[Tensor]) -> bool:
    return native.available() and all(
        tensor.is_cpu and tensor.dtype == torch.float32 and tensor.is_contiguous()
        for of in arrays
        for tensor in of
    )


def _flat(tensor: Tensor) -> Tensor:
    return tensor.detach().view(-1)


TILE = 4096
# addresses of weights, gradient and two moments; length; the part; whether the tile is whole: TILE
# elements, each array at a multiple of ALIGNED bytes; 0
COLUMNS = 8
ALIGNED = 16


def tile_table(*arrays: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the tiles [tiles, COLUMNS] int64 of lists of fp32 tensors, and the bounds [2 * parts +
    1] of the sums over each part: first one number a tile, then the other one.
    """
    places = tuple(zip(*(tuple(tensor.data_ptr() for tensor in of) for of in arrays)))
    lengths = tuple(tensor.numel() for tensor in arrays[0])
    return _table(places, lengths, arrays[0][0].device)


@lru_cache(maxsize=64)
def _table(
    places: tuple[tuple[int, ...], ...], lengths: tuple[int, ...], device: torch.device
) -> tuple[Tensor, Tensor]:
    with torch.device("cpu"):  # whatever the default device is
        tables, bounds = [], [0]
        for part, (at, length) in enumerate(zip(places, lengths)):
            starts = torch.arange(0, length, TILE, dtype=torch.int64)
            table = torch.zeros(starts.numel(), COLUMNS, dtype=torch.int64)
            for column, address in enumerate(at):
                table[:, column] = starts * 4 + address
            table[:, 4] = (length - starts).clamp(max=TILE)
            table[:, 5] = part
            table[:, 6] = (table[:, 4] == TILE) & all(address % ALIGNED == 0 for address in at)
            tables.append(table)
            bounds.append(bounds[-1] + starts.numel())
        bounds += [bounds[-1] + bound for bound in bounds[1:]]
        sum_bounds = torch.tensor(bounds)
    return upload(torch.cat(tables), device), upload(sum_bounds, device)
