"""Models that transformers has split (``DistributedConfig(tp_size=...)``, ``tp_plan="auto"``): make
their parameters plain local tensors, and restore the layers' own forwards.
"""

from __future__ import annotations

from torch import nn

from hf_zero.distributed.dtensors import is_dtensor, local_part
from hf_zero.zero.layout.box import Box
from hf_zero.zero.layout.sharding import Sharding, set_sharding


def unwrap(model: nn.Module, rank: int, size: int) -> None:
    """Replace the DTensors of ``model`` by plain parameters, each with the box it holds.

    The parameters are new objects: an optimizer over the old ones does not see them. Raises
    PartitionError unless they are spread over ``size`` ranks as in tensor parallelism.
    """
    made: dict[int, nn.Parameter] = {}
    for path, module in model.named_modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is None or not is_dtensor(parameter):
                continue
            if id(parameter) not in made:
                local, dim, packed = local_part(f"{path}.{name}", parameter.data, size)
                plain = nn.Parameter(local, requires_grad=parameter.requires_grad)
                if dim is not None:
                    box = Box.even(tuple(parameter.shape), dim, rank, size, packed)
                    set_sharding(plain, Sharding(("tensor",), box=box))
                made[id(parameter)] = plain
            module._parameters[name] = made[id(parameter)]
        forward = module.__dict__.get("forward")
        if getattr(forward, "__module__", "").startswith("transformers.distributed."):
            del module.__dict__["forward"]
