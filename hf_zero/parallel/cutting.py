"""Parameters of which a rank keeps its part, in place: whether their values are here, or still in
files.
"""

from __future__ import annotations

import torch
from torch import nn

from hf_zero.distributed import world_group
from hf_zero.errors import PartitionError
from hf_zero.loading.lazy import LazyTensor
from hf_zero.parameters.box import Box
from hf_zero.parameters.parameter import owner_of
from hf_zero.parameters.pending import source_of


@torch.no_grad()
def keep(parameter: nn.Parameter, box: Box) -> None:
    """Keep of ``parameter`` what is in ``box``. Collective over all ranks of the job where its
    values are here: they are rank 0's.

    Raises PartitionError for a parameter that belongs to an engine.
    """
    owner = owner_of(parameter)
    if owner is not None and not owner.retired:
        raise PartitionError(
            "a parameter that is to be cut among ranks belongs to an engine; cut the model before "
            "hf_zero.initialize"
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
