"""``deepspeed.ops``: optimizers and sparse attention by DeepSpeed's names."""

from . import adagrad, adam, lamb, lion, sparse_attention

__all__ = ["adagrad", "adam", "lamb", "lion", "sparse_attention"]
