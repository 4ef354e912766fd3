"""Check that tensor-parallel ranks stay in step: they must read the same batches and, if the model
draws random numbers, hold their generators in one state.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from hf_zero.config.sections import TENSOR_SIZE
from hf_zero.distributed import process_group
from hf_zero.errors import RankMismatchError
from hf_zero.parallel.alike import Calls, differing, hash_of
from hf_zero.parallel.tensor.axis import TensorAxis
from hf_zero.parallel.tensor.dropout import OwnRandomNumbers, generator_states, set_generator_states
from hf_zero.zero.gather.model_patches import Attached


class Agreement:
    """Compare batches and generators of tensor-parallel ranks before those forwards of a model that
    are due by :class:`hf_zero.parallel.alike.Calls`, which each generation restarts.

    Generators may differ until a forward draws from them: the states before such a forward are kept
    until its end. The ranks run the same code, so all of them find that they have drawn; a rank
    that has not goes on, and its next collective waits for the ranks that have raised.
    """

    def __init__(self, axis: TensorAxis, random: OwnRandomNumbers | None):
        self._axis, self._random = axis, random
        self._forwards = Calls()
        # generator states of this rank before the current forward, if those of the ranks differ
        self._states_before: list[torch.Tensor] = []

    def watch(self, model: nn.Module) -> None:
        """Compare before the forwards of ``model``, for its lifetime; copies of it do not."""
        model.register_forward_pre_hook(Attached(self._before), with_kwargs=True)
        model.register_forward_hook(Attached(self._after))

    def begin_generation(self) -> None:
        """Set the generators of all ranks of the group to those of its first rank (collective), so
        that they draw the same tokens in one generation; their next forwards are compared.
        """
        self._forwards.restart()
        device = process_group.default_device()
        states = generator_states(device)
        local = torch.cat(states).to(device)
        by_rank = local.new_empty(self._axis.size * local.numel())
        self._axis.dim.all_gather([(by_rank, local)], "generators of a generation").wait()
        first = by_rank[: local.numel()].cpu().split([len(state) for state in states])
        set_generator_states([state.clone() for state in first], device)

    def _before(self, module: nn.Module, args: object, kwargs: object) -> None:
        if self._random is not None:
            self._random.reset()
        self._states_before = []  # of a forward that has raised
        if self._forwards.due(module.training):
            self._compare(args, kwargs)

    def _compare(self, args: object, kwargs: object) -> None:
        """Raise RankMismatchError on all ranks of the group if their batches differ; if their
        generators differ, keep this rank's states (collective).
        """
        device = process_group.default_device()
        states = generator_states(device)
        codes = [hash_of(_tensors((args, kwargs))), hash_of(states)]
        batches, generators = differing(
            [self._axis.dim], codes, device, "hashes of batches and generators"
        )
        if batches:
            size = self._axis.size
            raise RankMismatchError(
                f"tensor-parallel ranks {self._ranks_in_words} were given different batches; data "
                f"is parallel over groups of {size} ranks, in eval() and generate(), too: read it, "
                f"and prompts, as rank // {size} of ranks // {size} "
                f"(DistributedSampler(data, world_size // {size}, rank // {size})); the Trainer "
                f"and Accelerate do so by {TENSOR_SIZE} = {size} in the configuration"
            )
        if generators:
            self._states_before = states

    def _after(self, module: nn.Module, args: object, output: object) -> None:
        """Raise RankMismatchError if the forward has drawn from generators that differ."""
        before, self._states_before = self._states_before, []
        if not before:
            return
        now = generator_states(process_group.default_device())
        if not all(map(torch.equal, before, now)):
            raise RankMismatchError(
                f"the random generators of tensor-parallel ranks {self._ranks_in_words} differ: "
                "they would drop different elements of the same activations, or add other noise to "
                "them; seed them alike (torch.manual_seed with one number for the ranks of a "
                "group, set_seed(..., device_specific=False))"
            )

    @property
    def _ranks_in_words(self) -> str:
        """The first and the last rank of the group: its ranks are neighbors, as is the remedy's
        ``rank // size``.
        """
        return f"{self._axis.dim.ranks[0]}-{self._axis.dim.ranks[-1]}"


def _tensors(values: object) -> list[torch.Tensor]:
    """Return the tensors in the inputs of a forward. Those inside objects, such as key-value
    caches, are left out: they may be parts.
    """
    leaves = tree_flatten(values, is_leaf=lambda value: type(value) not in (tuple, list, dict))[0]
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
