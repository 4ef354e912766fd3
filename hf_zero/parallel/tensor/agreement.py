"""Whether tensor-parallel ranks go on alike: they must read the same batches, and hold their
random generators in one state.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from hf_zero.config.tensor_parallel import TENSOR_SIZE
from hf_zero.core.guards import Attached
from hf_zero.device import kinds
from hf_zero.distributed import process_group
from hf_zero.errors import RankMismatchError
from hf_zero.parallel.alike import due, hash_of
from hf_zero.parallel.tensor.axis import TensorAxis
from hf_zero.parallel.tensor.dropout import OwnRandomNumbers


class Agreement:
    """Compares batches and generators of tensor-parallel ranks before those training forwards of a
    model that are :func:`hf_zero.parallel.alike.due`.
    """

    def __init__(self, axis: TensorAxis, random: OwnRandomNumbers | None):
        self._axis, self._random = axis, random
        self._forwards = 0

    def watch(self, model: nn.Module) -> None:
        model.register_forward_pre_hook(Attached(self._before), with_kwargs=True)

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._random is not None:
            self._random.reset()
        if not module.training:
            return
        self._forwards += 1
        if due(self._forwards):
            self.compare(args, kwargs)

    def compare(self, args: Any, kwargs: Any) -> None:
        """Raise RankMismatchError on all ranks of the group where they differ (collective)."""
        device = process_group.default_device()
        batch, random = hash_of(_tensors((args, kwargs))), 0
        if self._random is not None:
            states = [torch.get_rng_state()]
            if not kinds.is_host(device):
                states.append(kinds.module_of(device).get_rng_state(device))
            random = hash_of(states)
        given = [batch, -batch, random, -random]
        most = torch.tensor(given, dtype=torch.float64, device=device)
        self._axis.dim.all_reduce(most, "hashes of batches and generators", maximum=True).wait()
        first, last, drawn, least = most.tolist()
        ranks = f"{self._axis.dim.ranks[0]}-{self._axis.dim.ranks[-1]}"
        size = self._axis.size
        if first != -last:
            raise RankMismatchError(
                f"tensor-parallel ranks {ranks} were given different batches; data is parallel "
                f"over groups of {size} ranks: read it as rank // {size} of ranks // {size} "
                f"(DistributedSampler(data, world_size // {size}, rank // {size})); the Trainer "
                f"and Accelerate do so by {TENSOR_SIZE} = {size} in the configuration"
            )
        if drawn != -least:
            raise RankMismatchError(
                f"the random generators of tensor-parallel ranks {ranks} differ: they would drop "
                "different elements of the same activations; seed them alike "
                "(torch.manual_seed with one number for the ranks of a group, "
                "set_seed(..., device_specific=False))"
            )


def _tensors(values: Any) -> list[torch.Tensor]:
    return [value for value in tree_flatten(values)[0] if isinstance(value, torch.Tensor)]
