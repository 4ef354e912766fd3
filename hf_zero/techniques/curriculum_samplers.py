"""Samplers of data loaders that draw in the order of a training by difficulty."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

from torch.utils.data import BatchSampler, Sampler

from hf_zero.errors import ConfigError
from hf_zero.techniques.sample_order import SampleOrder


@dataclass
class _Training:
    """The training that a sampler and its copies follow."""

    order: SampleOrder | None = None
    steps_done: Callable[[], int] = int
    post_process: Callable[[object], object] | None = None


class CurriculumSampler(Sampler[int]):
    """Sampler of all ranks' samples in the order of the training: a step takes the next
    ``batch_size`` samples, whatever their division into micro-batches and ranks.

    The length, an epoch of the loader, is the number of samples in the dataset, in whole batches;
    the order decides which samples these are. An iteration starts with the first sample of the
    training's next step: a resumed run continues at its position, and the samples of an
    accumulation window without a step are drawn again.

    ``skip`` and ``announced``: as in :class:`hf_zero.setup.training_loader.EpochSampler`.
    """

    skip = 0
    announced: int | None = None
    follows_steps = True  # an iteration begins with the samples of the next step

    def __init__(self, dataset: Any, batch_size: int, drop_last: bool = False):
        self.dataset = dataset
        self.batch_size = batch_size
        self._skipped = 0
        self._training = _Training()
        whole, remainder = divmod(len(dataset), batch_size)
        self._length = max(1, whole + bool(remainder and not drop_last)) * batch_size

    def follow(
        self,
        order: SampleOrder,
        steps_done: Callable[[], int],
        post_process: Callable[[object], object] | None = None,
    ) -> None:
        """Draw in ``order``, for a training that has completed ``steps_done()`` steps.
        ``post_process`` changes the batches of a
        :class:`hf_zero.setup.training_loader.TrainingLoader`.
        """
        training = self._training
        training.order, training.steps_done, training.post_process = order, steps_done, post_process

    def post_process(self, batch: object) -> object:
        """Return the batch that a loader yields for ``batch``, which may be post-processed."""
        return batch if self._training.post_process is None else self._training.post_process(batch)

    def __len__(self) -> int:
        return self._length

    @property
    def total_size(self) -> int:
        """The number of samples of an epoch, over all ranks."""
        return self._length

    def __iter__(self) -> Iterator[int]:
        order = self._training.order
        if order is None:
            raise ConfigError(
                "a loader that draws by difficulty was iterated before there was an engine; "
                "prepare the model that it trains first"
            )
        consumed = self._training.steps_done() * self.batch_size - self._skipped
        skip, self.skip = self.skip, 0
        return islice(order.after(max(0, consumed)), max(0, self._length - skip))

    def set_epoch(self, epoch: int) -> None:
        """Announce the script's epoch; the step determines where an iteration starts."""
        self.announced = epoch

    def before_skipping(self, samples: int) -> CurriculumSampler:
        """Return a copy for a loader that drops its first ``samples`` samples, which a resumed
        training has consumed: the first sample after them belongs to the training's next step.
        """
        other = copy.copy(self)
        other._skipped += samples
        return other


class RankBatches(Sampler[list[int]]):
    """Yield one rank's share of the micro-batches: every ``ranks``-th, from number ``rank``."""

    def __init__(self, sampler: CurriculumSampler, micro_batch: int, ranks: int, rank: int):
        self.batches = BatchSampler(sampler, micro_batch, drop_last=True)
        self.batch_size, self.ranks, self.rank = micro_batch, ranks, rank

    def __len__(self) -> int:
        return len(self.batches) // self.ranks

    def __iter__(self) -> Iterator[list[int]]:
        return islice(self.batches, self.rank, None, self.ranks)


class RankSamples(Sampler[int]):
    """Yield the samples of ``batches`` one by one, for loaders that build micro-batches of that
    size themselves.
    """

    def __init__(self, batches: RankBatches):
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches) * self.batches.batch_size

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(self.batches)
