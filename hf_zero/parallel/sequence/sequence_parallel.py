"""``hf_zero.sequence_parallel``: ranks that read parts of the same sequences, the cutting of their
batches, and the mean of their losses.
"""

from __future__ import annotations

import importlib
import itertools
import weakref
from typing import Any

import torch

from hf_zero.distributed import process_group
from hf_zero.distributed.init import init_distributed
from hf_zero.distributed.parallel_dims import ParallelDims
from hf_zero.distributed.parallel_groups import get_parallel, init_parallel
from hf_zero.errors import ConfigError
from hf_zero.parallel.sequence.agreement import SameBatches
from hf_zero.parallel.sequence.attention import KEY
from hf_zero.parallel.sequence.batches import IGNORED, SequenceBatches, cut
from hf_zero.parallel.sequence.exchange import all_gather
from hf_zero.zero.gather.model_patches import Stateless

AXIS = "sequence"
_OTHERS = ("tensor", "expert", "pipeline")
_numbers = itertools.count(1)
_by_number: weakref.WeakValueDictionary[int, SequenceParallel] = weakref.WeakValueDictionary()


def sequence_parallel(
    size: int | None = None,
    *,
    attention: str | None = None,
    in_evaluation: bool = False,
) -> SequenceParallel:
    """Make groups of ``size`` neighbouring ranks that read parts of the same sequences (Ulysses).
    The first call with a size is collective over all ranks.

    Pass the result to ``hf_zero.initialize(mpu=...)``, or set ``sequence_parallel_size`` in the
    configuration and call this afterwards without a size.

    Args:
        size: ranks of a group; a divisor of the number of ranks and of the attention heads. None:
            the current size of the job.
        attention: the implementation of transformers that computes attention within a rank; None:
            that of the model, or sdpa for a model with eager attention.
        in_evaluation: a model in ``eval()`` reads parts of sequences, too; False: each rank
            evaluates whole sequences of its own.

    Raises ConfigError for a size that does not divide the ranks, and without a size if the job is
    not sequence parallel.
    """
    if not process_group.is_initialized():
        init_distributed()
    held = get_parallel()
    if size is None:
        if held is None or held.dims.sequence == 1:
            raise ConfigError(
                f"hf_zero.sequence_parallel() was called without a size, and this job is not "
                f"sequence parallel; pass the number of ranks, or write {KEY} in the configuration "
                "and call it after initialize"
            )
        size = held.dims.sequence
    ranks = process_group.get_world_size()
    others = {} if held is None else {axis: held.dims.size(axis) for axis in _OTHERS}
    # sequences are split among the ranks that tensor and pipeline parallelism leave
    split = others.get("tensor", 1) * others.get("pipeline", 1)
    readers = ranks // split
    if size < 1 or readers % size:
        of = f" ({ranks} / {split} that split the model)" if split > 1 else ""
        raise ConfigError(
            f"{KEY} = {size} does not divide {readers} ranks{of}; choose a divisor of {readers}"
        )
    if held is not None and held.dims.sequence not in (1, size):
        raise ConfigError(
            f"{KEY} = {size} was asked for in a job whose ranks are sequence parallel in groups of "
            f"{held.dims.sequence}; the size stays for the life of the processes, after "
            "engine.destroy() too: start new ones for another"
        )
    dims = ParallelDims.over(ranks, sequence=size, **others)
    return SequenceParallel(init_parallel(dims), attention, in_evaluation)


class SequenceParallel:
    """The sequence-parallel ranks of one job; the ``mpu`` of an ``initialize``."""

    def __init__(self, groups: Any, attention: str | None, in_evaluation: bool):
        self.dim = groups.along(AXIS)
        self.group = groups.group(AXIS)
        self.stats = groups.stats[AXIS]
        self.size, self.rank = self.dim.size, self.dim.rank
        self.attention, self.in_evaluation = attention, in_evaluation
        self.length: int | None = None  # tokens of every sequence, if known
        self.agreement = SameBatches.along(self.dim)
        self.number = next(_numbers)
        _by_number[self.number] = self

    @staticmethod
    def numbered(number: int) -> SequenceParallel:
        """Return the instance with this :attr:`number`."""
        return _by_number[number]

    def shard(self, batch: Any) -> dict[str, Any]:
        """Return this rank's part of ``batch``, a mapping of tensors [rows, tokens, ...] equal on
        all ranks of the group; see :func:`hf_zero.parallel.sequence.batches.cut`. Not collective; a
        forward over parts of batches that differ raises RankMismatchError.
        """
        part = cut(batch, self.rank, self.size)
        self.agreement.remember(batch, part)
        return part

    def batches(self, loader: Any) -> SequenceBatches:
        """Return an iterable over this rank's parts of the batches of ``loader`` and of those of
        the other ranks of the group, in turn. Iterating it is collective.
        """
        return SequenceBatches(loader, self.dim, process_group.default_device())

    def mean_loss(
        self, loss: torch.Tensor, labels: torch.Tensor, ignore_index: int = IGNORED
    ) -> torch.Tensor:
        """Return the mean loss over the labelled tokens of all ranks of the group, from the mean
        ``loss`` over those of this rank. Collective over the group.

        ``labels``: this rank's, shifted. The gradient is ``size`` times that of this rank's share;
        the engine's average over all ranks divides it back.
        """
        own = (labels != ignore_index).sum()
        loss = torch.where(own > 0, loss, torch.zeros_like(loss))
        pair = torch.stack([loss.detach().double(), own.double()])
        pairs = all_gather(self.dim, "losses", pair)
        total = pairs[:, 1].sum().clamp(min=1)
        mean = ((pairs[:, 0] * pairs[:, 1]).sum() / total).to(loss.dtype)
        weighted = loss * (own * self.size / total).to(loss.dtype)
        return mean + weighted - weighted.detach()

    # ---- Megatron's method names ----

    def get_sequence_parallel_group(self) -> Any:
        return self.group

    def get_sequence_parallel_world_size(self) -> int:
        return self.size

    def get_sequence_parallel_rank(self) -> int:
        return self.rank


def attention_of_models() -> Any:
    """Import and return the module that replaces the attention of models: code of Hugging Face,
    which this layer does not import statically.
    """
    return importlib.import_module("hf_zero.integrations.fused.sequence_attention")


class OnModel(Stateless):
    """Technique of one engine: sequence parallelism on its model."""

    def __init__(self, sequence: SequenceParallel):
        self.sequence = sequence
        self._installed: Any = None

    def install(self, engine: Any) -> None:
        self._installed = attention_of_models().install(engine.module, self.sequence)

    def remove(self) -> None:
        if self._installed is not None:
            self._installed.undo()
            self._installed = None
