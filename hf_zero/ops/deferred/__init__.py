"""Tensors that have not been computed: outputs of row-wise modules, above all logits."""

from hf_zero.ops.deferred import functions as _functions  # noqa: F401  # fill the table of handlers
from hf_zero.ops.deferred import gradients as _gradients  # noqa: F401
from hf_zero.ops.deferred import losses as _losses  # noqa: F401
from hf_zero.ops.deferred.tensor import DeferredOutput

__all__ = ["DeferredOutput"]
