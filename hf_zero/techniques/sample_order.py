"""The order of samples chosen by difficulty, a function of the seed, the samples of a step and the
number of consumed samples. Each step draws from the *pool*, the samples that are admitted then:

- Initially each sample of the dataset is due once. A draw takes a sample that is in the pool and
  due, with equal probabilities, and it is due no longer. A draw that finds none starts another
  epoch: all are due again. So no sample is drawn twice in an epoch, however the pool changes
  meanwhile, and if the pool is the whole dataset the order is a shuffle per epoch.
- A batch may hold a sample twice where an epoch ends within it, and more often if the pool is
  smaller than the batch.

All ranks have the same order; the samplers of data loaders distribute it among them. A resumed run,
on any number of ranks with the same number of samples a step, replays only the sizes of its draws:
one permutation and one pass over the rows for each change of the pool, nothing for the samples in
between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from hf_zero.errors import ConfigError
from hf_zero.techniques.difficulty_index import RankedSamples


@dataclass(frozen=True)
class Criterion:
    """The limit of one metric: samples up to ``difficulty(step)`` are admitted, steps counted from
    1. The difficulty is a value of the metric or, if the highest percentile is given as
    ``percentiles``, a percentile.
    """

    name: str
    index: RankedSamples
    difficulty: Callable[[int], float]
    percentiles: float | None = None
    # cache by difficulty: a search of the index in each step would cost more than the draws
    _counts: dict[float, int] = field(default_factory=dict, init=False, repr=False, compare=False)

    def admitted(self, step: int) -> int:
        """Return the number of the index's samples, easiest first, admitted at ``step``."""
        difficulty = self.difficulty(step)
        if difficulty not in self._counts:
            self._counts[difficulty] = (
                self.index.count_up_to(difficulty)
                if self.percentiles is None
                else self.index.count_of(difficulty, self.percentiles)
            )
        return self._counts[difficulty]

    def describe(self, step: int) -> str:
        """Return the limit at ``step`` and how many samples it admits, for errors."""
        limit, count = self._limit(step), self.admitted(step)
        return f"{limit} ({count} sample{'s' * (count != 1)})"

    def _limit(self, step: int) -> str:
        difficulty = self.difficulty(step)
        if self.percentiles is None:
            return f"{self.name} ≤ {difficulty:g}"
        return f"percentile {difficulty:g} of {self.percentiles:g} of {self.name}"


class SampleOrder:
    """The order of ``rows`` samples under ``criteria``; a step takes ``batch_size`` samples over
    all ranks.
    """

    def __init__(self, rows: int, criteria: Sequence[Criterion], batch_size: int, seed: int):
        self.rows = rows
        self.criteria = tuple(criteria)
        self.batch_size = batch_size
        self.seed = seed

    def after(self, consumed: int) -> Iterator[int]:
        """Yield the samples from number ``consumed`` on, endlessly.

        Raises ConfigError at a step that admits no sample.
        """
        drawn, within = divmod(consumed, self.batch_size)
        draws, admitted, step = _Draws(self.rows, self.seed), None, 0
        while True:
            step += 1
            counts = [criterion.admitted(step) for criterion in self.criteria]
            if counts != admitted:
                admitted = counts
                draws.change_pool(self._pool(counts, step), step)
            if step <= drawn:
                draws.skip(self.batch_size)
            else:
                yield from draws.take(self.batch_size)[within:].tolist()
                within = 0

    def pool(self, step: int) -> np.ndarray:
        """Return the samples admitted at ``step``, counted from 1, in ascending order."""
        return self._pool([criterion.admitted(step) for criterion in self.criteria], step)

    def _pool(self, counts: list[int], step: int) -> np.ndarray:
        admitted = np.ones(self.rows, dtype=bool)
        for criterion, count in zip(self.criteria, counts):
            if count < self.rows:
                easy = np.zeros(self.rows, dtype=bool)
                easy[criterion.index.order[:count]] = True
                admitted &= easy
        pool = np.flatnonzero(admitted)
        if not len(pool):
            limits = " and ".join(criterion.describe(step) for criterion in self.criteria)
            if not self.rows:
                raise ConfigError("the dataset has no samples")
            raise ConfigError(
                f"no sample is admitted at step {step}, which asks for {limits}; raise the "
                "difficulty of the schedule there, for example its min_difficulty (`hf-zero "
                "analyze` shows the values)"
            )
        return pool


class _Draws:
    """The draws as defined at the head of the file, from one pool at a time."""

    def __init__(self, rows: int, seed: int):
        self._seed = seed
        self._due = np.ones(rows, dtype=bool)
        self._pool = np.empty(0, dtype=np.int64)
        self._key = 0  # step at which the pool was set
        self._epochs = 0  # epochs started since
        # the pool's samples due in this epoch, shuffled on first use
        self._order: np.ndarray | None = None
        self._size = self._at = 0

    def change_pool(self, pool: np.ndarray, step: int) -> None:
        """Draw from ``pool`` from ``step`` on; what was drawn in this epoch is not due."""
        if self._at:
            self._due[self._shuffled()[: self._at]] = False
        self._pool, self._key, self._epochs, self._order = pool, step, 0, None
        self._size, self._at = int(self._due[pool].sum()), 0

    def skip(self, count: int) -> None:
        """Advance by ``count`` draws without returning the samples."""
        beyond = self._at + count - self._size
        if beyond <= 0:
            self._at += count
            return
        # an epoch ends only with the next draw after its last sample
        epochs, at = divmod(beyond - 1, len(self._pool))
        self._due[:] = True
        self._epochs += epochs + 1
        self._order, self._size, self._at = None, len(self._pool), at + 1

    def take(self, count: int) -> np.ndarray:
        """Return the next ``count`` samples: [count]."""
        taken = []
        while count:
            count_here = min(count, self._size - self._at) or min(count, len(self._pool))
            self.skip(count_here)
            taken.append(self._shuffled()[self._at - count_here : self._at])
            count -= count_here
        return np.concatenate(taken)

    def _shuffled(self) -> np.ndarray:
        if self._order is None:
            random = np.random.default_rng((self._seed, self._key, self._epochs))
            self._order = random.permutation(self._pool[self._due[self._pool]])
        return self._order
