"""The sum of squares of a tensor in host memory, by the native core or in torch."""

from __future__ import annotations

from torch import Tensor

from hf_zero.ops import native
from hf_zero.ops.native import DTYPE_CODES, FLOATS, flat


def squared_norm(tensor: Tensor) -> float:
    """Return the sum of squares in float64; not finite if an element is not.

    Equal for any number of threads. Raises KernelError, naming the tensor, for a wrong device,
    layout or dtype.
    """
    flat("squared_norm", "tensor", tensor, FLOATS)
    core = native.core()
    if core is None:
        return reference(tensor)
    norm: float = core.squared_norm(tensor.data_ptr(), DTYPE_CODES[tensor.dtype], tensor.numel())
    return norm


def reference(tensor: Tensor) -> float:
    """Return the same in torch, whose sums have another order."""
    return float(tensor.double().square().sum())
