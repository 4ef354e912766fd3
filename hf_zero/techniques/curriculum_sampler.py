"""Samplers for data loaders that draw by difficulty."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from itertools import islice

from torch.utils.data import BatchSampler, Sampler

from hf_zero.techniques.sample_order import SampleOrder


class CurriculumSampler(Sampler[int]):
    """The samples of all ranks in the order of ``order``: a step takes the next ``batch_size`` of
    them, however they are cut into micro-batches and shared out among ranks.

    Its length, an epoch of the loader, is as many samples as the dataset has, in whole batches;
    which samples these are is the order's business. An iteration begins with the sample that is
    first in the next step of the training that it follows, which a resumed run knows from its
    checkpoint. Without a training it begins where the epochs before it have ended (`set_epoch`).
    """

    def __init__(self, order: SampleOrder, drop_last: bool = False):
        self.order = order
        self.epoch = 0
        self.steps_done: Callable[[], int] | None = None  # of the training that it follows
        self.skipped = 0
        batches = order.rows / order.batch_size
        whole = int(batches) if drop_last else -int(-batches // 1)
        self._length = max(1, whole) * order.batch_size

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        consumed = (
            self.epoch * self._length
            if self.steps_done is None
            else max(0, self.steps_done() * self.order.batch_size - self.skipped)
        )
        return islice(self.order.after(consumed), self._length)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def before_skipping(self, samples: int) -> CurriculumSampler:
        """The same sampler for a loader that drops its first ``samples``, which a resumed training
        has consumed: what comes after them is the training's next step.
        """
        other = copy.copy(self)
        other.skipped = samples
        return other


class RankBatches(Sampler[list[int]]):
    """Of the micro-batches of all ranks those of one: every ``ranks``-th, from number ``rank``
    on.
    """

    def __init__(self, sampler: CurriculumSampler, micro_batch: int, ranks: int, rank: int):
        self.batches = BatchSampler(sampler, micro_batch, drop_last=True)
        self.batch_size, self.ranks, self.rank = micro_batch, ranks, rank

    def __len__(self) -> int:
        return len(self.batches) // self.ranks

    def __iter__(self) -> Iterator[list[int]]:
        return islice(self.batches, self.rank, None, self.ranks)
