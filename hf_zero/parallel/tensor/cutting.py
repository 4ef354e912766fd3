"""Which part of a parameter a tensor-parallel rank keeps."""

from __future__ import annotations

import torch

from hf_zero.errors import ConfigError
from hf_zero.parameters.sharding import Sharding, sharding_of


def spread(
    name: str, parameter: torch.Tensor, dim: int, packed: int, rank: int, size: int
) -> Sharding:
    """How ``parameter`` is spread once ``rank`` has its part. Raises ConfigError where
    the dimension does not divide, and for a quantised parameter, whose elements do not stand in
    its layer's places.
    """
    shape = tuple(parameter.shape)
    if not parameter.is_floating_point():
        raise ConfigError(
            f"{name} is {parameter.dtype}: tensor_parallel.autotp_size = {size} cannot cut a "
            "quantised layer; load the model in bf16, or remove the key"
        )
    try:
        return sharding_of(parameter).further(shape, "tensor", dim, rank, size, packed)
    except ValueError:
        length = shape[dim] // packed
        remedy = (
            f"model.resize_token_embeddings(pad_to_multiple_of={size}) makes a vocabulary divide, "
            if "embed" in name or "lm_head" in name or "wte" in name or "decoder" in name
            else ""
        )
        raise ConfigError(
            f"{name} of shape {shape} is cut along dimension {dim}, whose {length} "
            f"{'elements' if packed == 1 else f'elements of each of {packed} matrices'} "
            f"tensor_parallel.autotp_size = {size} does not divide; {remedy}"
            f"or choose a size that divides {length}"
        ) from None
