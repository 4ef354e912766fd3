"""``deepspeed.ops``: optimizers by DeepSpeed's names."""

from . import adagrad, adam, lamb, lion

__all__ = ["adagrad", "adam", "lamb", "lion"]
