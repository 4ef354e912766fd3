"""``hf_zero.sequence_parallel``: ranks that read parts of the same sequences, the cutting of their
batches, and the mean of their losses; from a call, or from the configuration and the ``mpu`` of
``initialize``.
"""

from __future__ import annotations

import itertools
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hf_zero.config import ZeroConfig
from hf_zero.config.feature_rows import provided
from hf_zero.config.resolving import TOTAL, warn_of_total
from hf_zero.distributed import process_group
from hf_zero.distributed.init import init_distributed
from hf_zero.distributed.parallel_dims import ParallelDims, check_size
from hf_zero.distributed.parallel_groups import (
    ParallelGroups,
    dims_in_effect,
    get_parallel,
    init_parallel,
)
from hf_zero.errors import ConfigError
from hf_zero.parallel.sequence.attention import Axes
from hf_zero.parallel.sequence.batches import IGNORED, SequenceBatches, cut
from hf_zero.parallel.sequence.division import AXIS, CONTEXT, KEY, RING, SEQUENCE_CONTEXT, Division
from hf_zero.parallel.sequence.exchanges import all_gather
from hf_zero.parallel.sequence.same_batches import SameBatches
from hf_zero.zero.feature import Feature

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from hf_zero.zero.training_engine import TrainingEngine

_numbers = itertools.count(1)
_by_number: weakref.WeakValueDictionary[int, SequenceParallel] = weakref.WeakValueDictionary()


def sequence_parallel(
    size: int | None = None,
    *,
    context_parallel_size: int | None = None,
    attention: str | None = None,
    in_evaluation: bool = False,
) -> SequenceParallel:
    """Create groups of ranks that divide each sequence. The first call with a size is collective
    over all ranks.

    Pass the result to ``hf_zero.initialize(mpu=...)``, or set ``sequence_parallel_size`` and
    ``context_parallel_size`` in the configuration and call this afterwards without a size.

    Args:
        size: number of neighboring ranks that exchange tokens for heads in attention (Ulysses); it
            must divide the number of ranks and the attention heads. None is 1 beside
            ``context_parallel_size``; without either, the current sizes of the job are used.
        context_parallel_size: number of ranks that pass keys and values around a ring in attention;
            a group has ``size`` times as many ranks. None is 1 beside ``size``.
        attention: the implementation of transformers that computes attention within a rank. None
            uses that of the model, or sdpa if the model has eager attention.
        in_evaluation: True makes a model in ``eval()`` read parts of sequences, too. With False
            each rank evaluates its own whole sequences.

    Raises ConfigError for a size that does not divide the ranks, and without a size if the job is
    not sequence parallel.
    """
    init_distributed()
    groups = get_parallel()
    if size is None and context_parallel_size is None:
        if groups is None or groups.dims.sequence_context == 1:
            raise ConfigError(
                f"hf_zero.sequence_parallel() was called without a size, and this job is not "
                f"sequence parallel; pass the number of ranks, or write {KEY} or {CONTEXT} in the "
                "configuration and call it after initialize"
            )
        size, context_parallel_size = groups.dims.sequence, groups.dims.context
    division = Division(_one_of(size, KEY), _one_of(context_parallel_size, CONTEXT))
    dims = sequence_dims(division, dims_in_effect())
    return SequenceParallel(init_parallel(dims), attention, in_evaluation)


def _one_of(size: int | None, key: str) -> int:
    if size is None:
        return 1
    check_size(size, key)
    return size


def sequence_dims(division: Division, dims: ParallelDims) -> ParallelDims:
    """Return ``dims``, those of the job, with sequences split by ``division`` among the ranks that
    tensor and pipeline parallelism leave. Raises ConfigError for sizes that do not divide them, and
    for a second division in a job.
    """
    split = dims.tensor * dims.pipeline
    readers = dims.world // split
    if readers % division.ranks:
        of = f" ({dims.world} / {split} that split the model)" if split > 1 else ""
        raise ConfigError(
            f"{division} does not divide {readers} ranks{of}; choose a divisor of {readers}"
        )
    present = Division(dims.sequence, dims.context)
    if present not in (Division(), division):
        raise ConfigError(
            f"{division} was asked for in a job whose ranks are sequence parallel in groups of "
            f"{present.ranks} ({present}); the size stays for the life of the processes, after "
            "engine.destroy() too: start new ones for another"
        )
    return dims.resized(sequence=division.sequence, context=division.context)


class SequenceParallel:
    """The sequence-parallel ranks of one job; the ``mpu`` of an ``initialize``."""

    def __init__(self, groups: ParallelGroups, attention: str | None, in_evaluation: bool):
        self.dim = groups.along(SEQUENCE_CONTEXT)
        self.group = groups.group(SEQUENCE_CONTEXT)
        self.axes = Axes(groups.along(AXIS), groups.along(RING))
        self.division = self.axes.division
        self.stats = groups.stats[SEQUENCE_CONTEXT]
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

    def shard(self, batch: Any) -> dict[str, object]:
        """Return this rank's part of ``batch``, a mapping of tensors [rows, tokens, ...] equal on
        all ranks of the group; see :func:`hf_zero.parallel.sequence.batches.cut`. Not collective; a
        forward over parts of batches that differ raises RankMismatchError.
        """
        part = cut(batch, self.rank, self.division)
        self.agreement.remember(batch, part)
        return part

    def batches(self, loader: object) -> SequenceBatches:
        """Return an iterable over this rank's parts of the batches of ``loader`` and of those of
        the other ranks of the group, in turn. Iterating it is collective.
        """
        return SequenceBatches(loader, self.dim, self.division, process_group.default_device())

    def mean_loss(
        self, loss: torch.Tensor, labels: torch.Tensor, ignore_index: int = IGNORED
    ) -> torch.Tensor:
        """Return the mean loss over the labeled tokens of all ranks of the group, from the mean
        ``loss`` over those of this rank. Collective over the group.

        ``labels``: this rank's, shifted. The gradient is ``size`` times that of this rank's share;
        the engine's average over all ranks divides it back.
        """
        count = (labels != ignore_index).sum()
        loss = torch.where(count > 0, loss, torch.zeros_like(loss))
        pair = torch.stack([loss.detach().double(), count.double()])
        pairs = all_gather(self.dim, "losses", pair)
        total = pairs[:, 1].sum().clamp(min=1)
        mean = ((pairs[:, 0] * pairs[:, 1]).sum() / total).to(loss.dtype)
        weighted = loss * (count * self.size / total).to(loss.dtype)
        return mean + (weighted - weighted.detach())  # + 0: the same bits on all ranks

    def get_sequence_parallel_group(self) -> ProcessGroup | None:
        return self.group

    def get_sequence_parallel_world_size(self) -> int:
        return self.size

    def get_sequence_parallel_rank(self) -> int:
        return self.rank


class SplitAttention(Feature):
    """Sequence parallelism of attention on the model of one engine."""

    def __init__(self, sequence: SequenceParallel):
        self.sequence = sequence
        self._installed: Any = None

    def apply(self, engine: TrainingEngine) -> None:
        self._installed = provided("sequence_attention").install(engine.module, self.sequence)

    def remove(self) -> None:
        if self._installed is not None:
            self._installed.undo()
            self._installed = None


def with_sequence_size(config: ZeroConfig, mpu: object, dims: ParallelDims) -> ZeroConfig:
    """Return ``config`` with the division of sequences of it or of ``mpu``. ``dims``: sizes of the
    other axes.

    A train batch size beside an ``mpu`` is computed anew: Accelerate computes it from the sizes of
    its own ParallelismConfig, which may not match the number of ranks. Raises ConfigError if the
    two contradict each other.
    """
    if not isinstance(mpu, SequenceParallel):
        return config
    mpu_sizes = {KEY: mpu.division.sequence, CONTEXT: mpu.division.context}
    written = {KEY: config.sequence_parallel_size, CONTEXT: config.context_parallel_size}
    for key, size in written.items():
        if size not in (1, mpu_sizes[key]):
            raise ConfigError(
                f"{key} = {size} ({config.sources[key]}) contradicts the mpu of {mpu.division} "
                "that initialize was given; remove one of them"
            )
    _refuse_former_groups(mpu, sequence_dims(mpu.division, dims))
    config = config.override(mpu_sizes, "the mpu of initialize")
    micro, steps = config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps
    if config.train_batch_size is not None and micro is not None and steps is not None:
        total = micro * steps * (process_group.get_world_size() // mpu.size)
        if total != config.train_batch_size:
            warn_of_total(config.train_batch_size, config.sources[TOTAL], total, mpu.size)
            config = config.without(TOTAL)
    return config


def sequence_of(config: ZeroConfig, mpu: object) -> SequenceParallel | None:
    """Return the ranks of :func:`with_sequence_size`, None for size 1. Collective."""
    if config.ranks_of_a_sequence == 1:
        return None
    if isinstance(mpu, SequenceParallel):
        return mpu
    return sequence_parallel(
        config.sequence_parallel_size, context_parallel_size=config.context_parallel_size
    )


def division_of(config: ZeroConfig) -> Division:
    """Return the division of sequences that ``config`` asks for."""
    return Division(config.sequence_parallel_size, config.context_parallel_size)


def _refuse_former_groups(mpu: SequenceParallel, dims: ParallelDims) -> None:
    """Raise ConfigError if other parallelism, set up after ``mpu``, changes its groups' ranks."""
    if dims.ranks_along(process_group.get_rank(), SEQUENCE_CONTEXT) != tuple(mpu.dim.ranks):
        raise ConfigError(
            "hf_zero.sequence_parallel was called before this job became tensor or "
            "pipeline parallel, which has moved the ranks that share a sequence; call it "
            "afterwards, as after hf_zero.tensor_parallel(model, size)"
        )


def check_model(model: nn.Module, division: Division, dims: ParallelDims) -> None:
    """Raise ConfigError for attention that ``division`` cannot split in a job of ``dims``."""
    if division.ranks > 1:
        provided("sequence_attention").check(model, division, dims.tensor)


def features_of(sequence: SequenceParallel | None) -> dict[str, SplitAttention]:
    """Return the features for an engine to apply to its model for sequence parallelism."""
    return {} if sequence is None else {KEY: SplitAttention(sequence)}
