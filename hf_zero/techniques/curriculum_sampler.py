"""Samplers for data loaders that draw samples by difficulty."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, Sampler

from hf_zero.errors import ConfigError
from hf_zero.techniques.sample_order import SampleOrder


@dataclass
class _Training:
    """The training that a sampler and its copies follow."""

    order: SampleOrder | None = None
    steps_done: Callable[[], int] = int
    finish: Callable[[Any], Any] | None = None


class CurriculumSampler(Sampler[int]):
    """Sampler of all ranks' samples in the order of the training: a step takes the next
    ``batch_size`` samples, whatever their division into micro-batches and ranks.

    The length, an epoch of the loader, is the number of samples in the dataset, in whole batches;
    the order decides which samples these are. An iteration starts with the first sample of the
    training's next step: a resumed run continues at its position, and the samples of an
    accumulation window without a step are drawn again.
    """

    def __init__(self, dataset: Any, batch_size: int, drop_last: bool = False):
        self.dataset = dataset
        self.batch_size = batch_size
        self._skipped = 0
        self._training = _Training()
        whole, rest = divmod(len(dataset), batch_size)
        self._length = max(1, whole + bool(rest and not drop_last)) * batch_size

    def follow(
        self,
        order: SampleOrder,
        steps_done: Callable[[], int],
        finish: Callable[[Any], Any] | None = None,
    ) -> None:
        """Draw in ``order``, for a training that has completed ``steps_done()`` steps; ``finish``
        post-processes the batches of a :class:`CurriculumLoader`.
        """
        training = self._training
        training.order, training.steps_done, training.finish = order, steps_done, finish

    def finish(self, batch: Any) -> Any:
        """Return the batch that a loader yields for ``batch``: post-processed by ``finish`` if one
        is set.
        """
        return batch if self._training.finish is None else self._training.finish(batch)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        order = self._training.order
        if order is None:
            raise ConfigError(
                "a loader that draws by difficulty was iterated before there was an engine; "
                "prepare the model that it trains first"
            )
        consumed = self._training.steps_done() * self.batch_size - self._skipped
        return islice(order.after(max(0, consumed)), self._length)

    def set_epoch(self, epoch: int) -> None:
        """No-op: the step determines where an iteration starts."""

    def before_skipping(self, samples: int) -> CurriculumSampler:
        """Return a copy for a loader that drops its first ``samples`` samples, which a resumed
        training has consumed: the first sample after them belongs to the training's next step.
        """
        other = copy.copy(self)
        other._skipped += samples
        return other


class RankBatches(Sampler[list[int]]):
    """Yield one rank's share of the micro-batches: every ``ranks``-th, starting at number
    ``rank``.
    """

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


class CurriculumLoader(DataLoader[Any]):
    """A loader over :class:`RankBatches` that post-processes batches with the training's function
    (``set_data_post_process_func``) in this process.
    """

    def __iter__(self) -> Any:
        sampler: Any = self.batch_sampler
        return map(sampler.batches.sampler.finish, super().__iter__())
