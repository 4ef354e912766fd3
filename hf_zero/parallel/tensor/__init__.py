"""Tensor parallelism: each rank of a group keeps a part of every matrix (arXiv 1909.08053)."""

from hf_zero.parallel.tensor.model import cuts_of, model_record, tensor_parallel

__all__ = ["cuts_of", "model_record", "tensor_parallel"]
