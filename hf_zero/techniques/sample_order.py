"""Which samples are drawn in which order when their difficulty is limited, step by step.

Data efficiency by curriculum, as DeepSpeed has it (arXiv 2212.03597): the samples of a step are
drawn from the *pool* of those that every metric admits at its current difficulty. Here the whole
order is a function of the seed, the samples of a step and how many samples have been consumed:

- At first each sample of the dataset is due once. A draw takes one of those that are in the pool
  and due, all equally likely, which then is due no longer. A draw that finds none begins another
  epoch: all are due again. So nothing is drawn twice in an epoch, however the pool changes
  meanwhile, and with the whole dataset as the pool this is a shuffle per epoch.
- A pool that is smaller than a batch is drawn from several times in it.

Every rank has the same order; who takes what of it is a matter of the loader. A run that goes on
later, on any number of ranks with as many samples a step, replays the sizes of its draws alone:
a permutation for each change of the pool, nothing for the samples between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from hf_zero.errors import ConfigError
from hf_zero.techniques.difficulty_index import RankedSamples


@dataclass(frozen=True)
class Criterion:
    """What one metric admits: samples up to ``difficulty(step)``, steps counted from 1. It is a
    value of the metric or, where ``percentiles`` says how many there are, a percentile.
    """

    name: str
    index: RankedSamples
    difficulty: Callable[[int], float]
    percentiles: float | None = None
    # by difficulty: a search of the index in each step would cost more than the draws
    _counts: dict[float, int] = field(default_factory=dict, init=False, repr=False, compare=False)

    def admitted(self, step: int) -> int:
        """How many of the index's samples, the easiest first, are admitted at ``step``."""
        difficulty = self.difficulty(step)
        if difficulty not in self._counts:
            self._counts[difficulty] = (
                self.index.count_up_to(difficulty)
                if self.percentiles is None
                else self.index.count_of(difficulty, self.percentiles)
            )
        return self._counts[difficulty]

    def describe(self, step: int) -> str:
        difficulty = self.difficulty(step)
        if self.percentiles is None:
            return f"{self.name} ≤ {difficulty:g}"
        return f"percentile {difficulty:g} of {self.percentiles:g} of {self.name}"


class SampleOrder:
    """The order of ``rows`` samples under ``criteria``, ``batch_size`` of them a step on all ranks
    together.
    """

    def __init__(self, rows: int, criteria: Sequence[Criterion], batch_size: int, seed: int):
        self.rows = rows
        self.criteria = tuple(criteria)
        self.batch_size = batch_size
        self.seed = seed

    def after(self, consumed: int) -> Iterator[int]:
        """The samples from number ``consumed`` on, without an end.

        Raises ConfigError at a step that admits no sample.
        """
        drawn, within = divmod(consumed, self.batch_size)
        draws, admitted, step = _Draws(self.rows, self.seed), None, 0
        while True:
            step += 1
            counts = [each.admitted(step) for each in self.criteria]
            if counts != admitted:
                admitted = counts
                draws.change_pool(self._pool(counts, step), step)
            if step <= drawn:
                draws.skip(self.batch_size)
            else:
                yield from draws.take(self.batch_size)[within:].tolist()
                within = 0

    def pool(self, step: int) -> np.ndarray:
        """The samples that are admitted at ``step``, counted from 1, in rising order."""
        return self._pool([each.admitted(step) for each in self.criteria], step)

    def _pool(self, counts: list[int], step: int) -> np.ndarray:
        admitted = np.ones(self.rows, dtype=bool)
        for criterion, count in zip(self.criteria, counts):
            if count < self.rows:
                easy = np.zeros(self.rows, dtype=bool)
                easy[criterion.index.order[:count]] = True
                admitted &= easy
        pool = np.flatnonzero(admitted)
        if not len(pool):
            limits = " and ".join(each.describe(step) for each in self.criteria)
            raise ConfigError(
                f"no sample is admitted at step {step}, which asks for {limits}; raise "
                "min_difficulty (`hf-zero analyze` shows the values)"
            )
        return pool


class _Draws:
    """The draws of the module's first lines, from a pool at a time."""

    def __init__(self, rows: int, seed: int):
        self._seed = seed
        self._due = np.ones(rows, dtype=bool)
        self._pool = np.empty(0, dtype=np.int64)
        self._key = 0  # the step with which the pool came
        self._epochs = 0  # that have begun since
        # the samples of the pool that are due in this epoch: in their order once it is needed
        self._order: np.ndarray | None = None
        self._size = self._at = 0

    def change_pool(self, pool: np.ndarray, step: int) -> None:
        if self._at:
            self._due[self._shuffled()[: self._at]] = False
        self._pool, self._key, self._epochs, self._order = pool, step, 0, None
        self._size, self._at = int(self._due[pool].sum()), 0

    def skip(self, count: int) -> None:
        """As :meth:`take`, of samples that nobody asks for."""
        beyond = self._at + count - self._size
        if beyond <= 0:
            self._at += count
            return
        # an epoch that is drawn to its end goes on until the next draw
        epochs, at = divmod(beyond - 1, len(self._pool))
        self._due[:] = True
        self._epochs += epochs + 1
        self._order, self._size, self._at = None, len(self._pool), at + 1

    def take(self, count: int) -> np.ndarray:
        taken = []
        while count:
            here = min(count, self._size - self._at) or min(count, len(self._pool))
            self.skip(here)
            taken.append(self._shuffled()[self._at - here : self._at])
            count -= here
        return np.concatenate(taken)

    def _shuffled(self) -> np.ndarray:
        if self._order is None:
            random = np.random.default_rng((self._seed, self._key, self._epochs))
            self._order = random.permutation(self._pool[self._due[self._pool]])
        return self._order
