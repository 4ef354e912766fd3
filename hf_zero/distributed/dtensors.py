"""Local parts of parameters that another library has distributed over ranks as DTensors."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from hf_zero.errors import PartitionError


def is_dtensor(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, DTensor)


def local_part(name: str, tensor: torch.Tensor, size: int) -> tuple[torch.Tensor, int | None, int]:
    """Return the local tensor of a DTensor over ``size`` ranks, the dimension it is sharded along
    (None: replicated), and the number of matrices packed side by side there.

    Raises PartitionError for any other placement.
    """
    assert isinstance(tensor, DTensor)
    spread = [
        place
        for place, ranks in zip(tensor.placements, tensor.device_mesh.shape, strict=True)
        if ranks > 1
    ]
    if not spread or spread == [Replicate()]:
        return tensor.to_local(), None, 1
    place = spread[0]
    if (
        len(spread) > 1
        or not isinstance(place, Shard | _StridedShard)
        or (tensor.device_mesh.size() != size)
    ):
        raise PartitionError(
            f"parameter {name} is a DTensor {tensor.placements} over a mesh of shape "
            f"{tuple(tensor.device_mesh.shape)}, and tensor_parallel.autotp_size is {size}; split "
            "the model over tensor-parallel ranks alone, as many as that: ZeRO shards it further"
        )
    local = tensor.to_local()
    dim = place.dim % tensor.dim()
    if local.shape[dim] * size != tensor.shape[dim]:
        raise PartitionError(
            f"dimension {dim} of {name}, of shape {tuple(tensor.shape)}, is cut among {size} ranks "
            "unevenly; choose a size that divides it"
        )
    packed = int(place.split_factor) if isinstance(place, _StridedShard) else 1
    return local, dim, packed
