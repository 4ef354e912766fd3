"""Tensors that have not been computed: outputs of row-wise modules, above all logits."""

from hf_zero.ops.deferred.tensor import DeferredTensor

__all__ = ["DeferredTensor"]
