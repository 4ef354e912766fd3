"""Facts about functions of torch: those that read no values, those that write, and those that show
or store a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from hf_zero.errors import KernelError

_T: type[torch.Tensor] = torch.Tensor


def named(names: str, *homes: object) -> list[object]:
    """Return the functions of ``names`` that ``homes`` have."""
    functions = (getattr(home, name, None) for name in names.split() for home in homes)
    return [function for function in functions if callable(function)]


_GETTERS = """
shape dtype device layout ndim is_cuda is_cpu is_meta is_sparse is_quantized is_nested is_mkldnn
is_xpu is_mps nbytes itemsize names requires_grad is_leaf grad_fn output_nr is_sparse_csr is_maia
is_ipu is_xla is_mtia is_vulkan _backward_hooks _version
"""
_METHODS = """
size dim numel nelement element_size stride ndimension is_floating_point is_complex is_contiguous
is_same_size get_device __len__ is_signed is_inference storage_offset __hash__ _is_view
"""
METADATA = frozenset(
    [getattr(_T, name).__get__ for name in _GETTERS.split() if hasattr(_T, name)]
    + named(_METHODS, _T, torch)
)


def shows(function: Callable[..., object]) -> bool:
    """Return whether a script calls ``function`` to show or to store a tensor."""
    return function in _SHOWS


def shown(function: Callable[..., object], one: torch.Tensor, name: str) -> str:
    """Return what ``function`` shows of logits whose weight is sharded: a print must not wait for
    other ranks.

    Raises KernelError for a copy or a pickle, which would hold no values.
    """
    if function in (_T.__repr__, _T.__str__, _T.__format__):
        return f"DeferredOutput(shape={tuple(one.shape)}, dtype={one.dtype}, not computed)"
    raise KernelError(
        f"{name} on logits {tuple(one.shape)} that are not computed, and whose weight is sharded "
        "over ranks: this rank alone cannot compute them; call outputs.logits.clone() + 0 on all "
        "ranks first"
    )


def writes(function: Callable[..., object], args: object, kwargs: Mapping[str, object]) -> bool:
    """Return whether ``function`` may write into one of its arguments."""
    name = getattr(function, "__name__", "")
    inside = name.startswith("__i") and name.endswith("__") and name != "__invert__"
    return (
        inside
        or name in ("__setitem__", "__set__")
        or (name.endswith("_") and not name.endswith("__"))
        or "out" in kwargs
        or bool(kwargs.get("inplace"))
    )


_SHOWS = {_T.__repr__, _T.__reduce_ex__, _T.__deepcopy__, _T.__format__}
