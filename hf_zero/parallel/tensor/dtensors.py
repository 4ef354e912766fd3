"""Models that transformers has split (``DistributedConfig(tp_size=...)``, ``tp_plan="auto"``): make
their parameters plain local tensors, and restore the layers' own forwards.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from hf_zero.errors import PartitionError
from hf_zero.zero.layout.box import Box
from hf_zero.zero.layout.sharding import Sharding, set_sharding


def unwrap(model: nn.Module, rank: int, size: int) -> None:
    """Replace the DTensors of ``model`` by plain parameters, each with the box it holds.

    The parameters are new objects: an optimizer over the old ones does not see them. Raises
    PartitionError unless they are spread over ``size`` ranks as in tensor parallelism.
    """
    parameters: dict[int, nn.Parameter] = {}
    for path, module in model.named_modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is None or not is_dtensor(parameter):
                continue
            if id(parameter) not in parameters:
                local, dim, packed = local_part(f"{path}.{name}", parameter.data, size)
                plain = nn.Parameter(local, requires_grad=parameter.requires_grad)
                if dim is not None:
                    box = Box.even(tuple(parameter.shape), dim, rank, size, packed)
                    set_sharding(plain, Sharding(("tensor",), box=box))
                parameters[id(parameter)] = plain
            module._parameters[name] = parameters[id(parameter)]
        forward = module.__dict__.get("forward")
        if getattr(forward, "__module__", "").startswith("transformers.distributed."):
            del module.__dict__["forward"]


def is_dtensor(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, DTensor)


def local_part(name: str, tensor: torch.Tensor, size: int) -> tuple[torch.Tensor, int | None, int]:
    """Return the local tensor of a DTensor over ``size`` ranks, the dimension it is sharded along
    (None: replicated), and the number of matrices packed side by side there.

    Raises PartitionError for any other placement.
    """
    assert isinstance(tensor, DTensor)
    spread = [
        placement
        for placement, ranks in zip(tensor.placements, tensor.device_mesh.shape, strict=True)
        if ranks > 1
    ]
    if not spread or spread == [Replicate()]:
        return tensor.to_local(), None, 1
    placement = spread[0]
    if (
        len(spread) > 1
        or not isinstance(placement, Shard | _StridedShard)
        or (tensor.device_mesh.size() != size)
    ):
        raise PartitionError(
            f"parameter {name} is a DTensor {tensor.placements} over a mesh of shape "
            f"{tuple(tensor.device_mesh.shape)}, and tensor_parallel.autotp_size is {size}; split "
            "the model over tensor-parallel ranks alone, as many as that: ZeRO shards it further"
        )
    local = tensor.to_local()
    dim = placement.dim % tensor.dim()
    if local.shape[dim] * size != tensor.shape[dim]:
        raise PartitionError(
            f"dimension {dim} of {name}, of shape {tuple(tensor.shape)}, is cut among {size} ranks "
            "unevenly; choose a size that divides it"
        )
    packed = int(placement.split_factor) if isinstance(placement, _StridedShard) else 1
    return local, dim, packed
