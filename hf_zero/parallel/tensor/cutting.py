"""Parameters of which a rank keeps its part, in place: whether their values are here, or still in
files.
"""

from __future__ import annotations

import torch
from torch import nn

from hf_zero.distributed import world_group
from hf_zero.errors import ConfigError, PartitionError
from hf_zero.loading.lazy import LazyTensor
from hf_zero.parameters.box import Box
from hf_zero.parameters.parameter import owner_of
from hf_zero.parameters.pending import source_of
from hf_zero.parameters.sharding import Sharding, set_sharding


def box_of(name: str, parameter: torch.Tensor, dim: int, packed: int, rank: int, size: int) -> Box:
    """The part of ``rank``. Raises ConfigError where the dimension does not divide, and for a
    quantised parameter, whose elements do not stand in its layer's places.
    """
    shape = tuple(parameter.shape)
    if not parameter.is_floating_point():
        raise ConfigError(
            f"{name} is {parameter.dtype}: tensor_parallel.autotp_size = {size} cannot cut a "
            "quantised layer; load the model in bf16, or remove the key"
        )
    try:
        return Box.even(shape, dim, rank, size, packed)
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


@torch.no_grad()
def cut(parameter: nn.Parameter, box: Box) -> None:
    """Keep of ``parameter`` what is in ``box``. Collective where its values are here: they are
    rank 0's.
    """
    owner = owner_of(parameter)
    if owner is not None and not owner.retired:
        raise PartitionError(
            "a parameter that is to be cut among tensor-parallel ranks belongs to an engine; call "
            "hf_zero.tensor_parallel before hf_zero.initialize"
        )
    source = source_of(parameter)
    if source is None:
        whole = parameter.data
        world_group.broadcast(whole, 0)
        parameter.data = box.take(whole).clone(memory_format=torch.contiguous_format)
    else:
        part = box.take(LazyTensor(source)).expression  # type: ignore[arg-type]
        parameter.data = torch.zeros((), dtype=source.dtype).expand(box.shape)
        parameter.__dict__["_hf_zero_source"] = part
    set_sharding(parameter, Sharding(("tensor",), box=box))
