"""The loaders of ``initialize(training_data=...)``, and their place in the data: a checkpoint holds
it, and a resumed run continues with the batch that would have come next.

The place in a map-style dataset counts samples of all ranks, so that other numbers of ranks
continue from it. A stream (an ``IterableDataset``) knows its own place, on each rank.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from hf_zero.checkpoint.run_state import is_stateful
from hf_zero.config import ZeroConfig
from hf_zero.config.feature_rows import FEATURES
from hf_zero.config.features import is_on
from hf_zero.distributed.parallel_groups import readers
from hf_zero.errors import ConfigError
from hf_zero.logging import log_rank0, logger

Collate = Callable[..., object]


class EpochSampler(DistributedSampler[object]):
    """A ``DistributedSampler`` whose next iteration leaves out the first ``skip`` samples of all
    ranks, any number of them: the ranks divide those that follow. ``announced``: the epoch that the
    script has set since the last iteration began.
    """

    skip = 0
    announced: int | None = None

    def __iter__(self) -> Iterator[object]:
        skip, self.skip = self.skip, 0
        whole = copy.copy(self)  # as one rank would draw the epoch
        whole.rank, whole.num_replicas, whole.num_samples = 0, 1, self.total_size
        epoch = list(DistributedSampler.__iter__(whole))
        rest = epoch[skip:]
        if self.drop_last:
            del rest[len(rest) // self.num_replicas * self.num_replicas :]
        else:  # filled up like a whole epoch, with its first samples
            rest += epoch[: -len(rest) % self.num_replicas]
        return iter(rest[self.rank :: self.num_replicas])

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        self.announced = epoch


class TrainingLoader(DataLoader[object]):
    """A loader whose micro-batches ``data_sampler`` gives to ``ranks`` ranks.

    ``epoch``: the epoch that the script has set by ``data_sampler.set_epoch``, else the number of
    whole iterations; after a resume, the epoch to begin the script's loop with. ``samples``:
    samples that all ranks have read of the current iteration. ``iterations``: number of iterations
    begun.
    """

    def __init__(self, data: Any, ranks: int, data_sampler: Any, **options: Any):
        super().__init__(data, **options)
        self.data_sampler, self.ranks = data_sampler, ranks  # DeepSpeed's name for the sampler
        self.epoch = self.samples = self.iterations = 0
        self.resumed = False

    @property
    def samples_of_all_ranks(self) -> int:
        """Number of samples in one micro-batch of every rank."""
        return int(cast(Any, self.batch_sampler).batch_size * self.ranks)

    @property
    def place(self) -> dict[str, int]:
        """``epoch`` and ``samples``; ``order``, the epoch whose order the sampler draws in."""
        order = getattr(self.data_sampler, "epoch", 0)
        return {"epoch": self.epoch, "order": order, "samples": self.samples}

    def continue_from(self, position: dict[str, int]) -> None:
        """Begin the next iteration at ``position``, of a loader over any number of ranks."""
        self.epoch, self.samples = position["epoch"], position["samples"]
        self.data_sampler.set_epoch(position["order"])
        self.data_sampler.announced = None
        self.resumed = self.samples > 0

    def __iter__(self) -> Any:
        resumed, self.resumed = self.resumed, False
        self.iterations += 1
        sampler, announced = self.data_sampler, self.data_sampler.announced
        if resumed:
            if announced not in (None, self.epoch):
                logger.warning(
                    "the run resumes in epoch %d of its training data, after %d samples, and the "
                    "script set epoch %d; begin its loop with range(loader.epoch, epochs)",
                    self.epoch,
                    self.samples,
                    announced,
                )
            sampler.skip = self.samples
        else:
            self.samples = 0
        if announced is not None:
            self.epoch, sampler.announced = announced, None
        # The seed of an epoch's workers is drawn from the default generator when the epoch begins,
        # which was before the save.
        self.generator = torch.Generator() if resumed else None
        post_process = getattr(sampler, "post_process", None)
        for batch in super().__iter__():
            self.samples += self.samples_of_all_ranks
            yield batch if post_process is None else post_process(batch)
        self.epoch, self.samples = self.epoch + 1, 0


class StreamLoader(DataLoader[object]):
    """A loader of an ``IterableDataset`` with ``state_dict`` and ``load_state_dict``. ``epoch``:
    the number of whole iterations. After a resume the next iteration is the rest of its epoch,
    which is empty if the epoch's last batch was saved.
    """

    def __init__(self, data: Any, **options: Any):
        super().__init__(data, **options)
        self.epoch = 0
        self._begun = self.resumed = False
        # A stream of ``datasets`` applies a loaded state in each iteration, others in the next
        # alone: theirs may count epochs.
        streams = getattr(sys.modules.get("datasets"), "IterableDataset", ())
        self._repeats = isinstance(data, streams)
        self._is_placed = False

    def state_dict(self) -> dict[str, object]:
        state = cast(Any, self.dataset).state_dict() if self._begun else None
        return {"epoch": self.epoch, "dataset": state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch = state["epoch"]
        if state["dataset"] is not None:
            cast(Any, self.dataset).load_state_dict(state["dataset"])
            self._begun = self.resumed = self._is_placed = True

    def __iter__(self) -> Any:
        resumed, self.resumed = self.resumed, False
        if self._is_placed and not resumed and self._repeats:
            cast(Any, self.dataset).load_state_dict(None)  # from the first row
            self._is_placed = False
        self.generator = torch.Generator() if resumed else None  # as in TrainingLoader
        self._begun = True
        yield from super().__iter__()
        self.epoch += 1
        self._begun = False


def _is_dataset(data: object) -> bool:
    return isinstance(data, Dataset) or hasattr(data, "__getitem__")


def _is_loader(data: object) -> bool:
    """Return whether ``data`` is a loader with a state of its own."""
    return not _is_dataset(data) and is_stateful(data) and hasattr(data, "__iter__")


def check_data(data: object, config: ZeroConfig) -> None:
    """Raise ConfigError for ``data`` of which :func:`data_loader` makes no loader."""
    if isinstance(data, IterableDataset):
        _drawn_by_features(data, config)
    elif isinstance(data, type) or not (data is None or _is_dataset(data) or _is_loader(data)):
        raise ConfigError(
            f"training_data is a {type(data).__name__}; pass a torch Dataset, or a loader with "
            "state_dict() and load_state_dict(), such as torchdata's StatefulDataLoader"
        )


def data_loader(data: Any, collate_fn: Collate | None, config: ZeroConfig) -> Any:
    """Return the loader of this rank for ``data``: a dataset, None, or a loader with a state of its
    own, which is returned as it is. Raises as :func:`check_data` for anything else.
    """
    check_data(data, config)
    if data is None or _is_loader(data):
        return data
    micro = config.train_micro_batch_size_per_gpu or 1
    drop_last = bool(config.dataloader_drop_last)
    if isinstance(data, IterableDataset):
        kind = StreamLoader if is_stateful(data) else DataLoader
        return kind(data, batch_size=micro, collate_fn=collate_fn, drop_last=drop_last)
    ranks, rank = readers()
    options = _drawn_by_features(data, config)
    if options is None:
        sampler = EpochSampler(data, ranks, rank, seed=int(config.seed or 0))
        samplers = {"data_sampler": sampler, "sampler": sampler}
        options = {**samplers, "batch_size": micro, "drop_last": drop_last}
    return TrainingLoader(data, ranks, collate_fn=collate_fn, **options)


def _drawn_by_features(data: Any, config: ZeroConfig) -> Mapping[str, Any] | None:
    """Return the options of a :class:`TrainingLoader` whose samples a feature chooses, or None.
    Raises ConfigError for data of which it can choose none.
    """
    for row in FEATURES.values():
        if row.loads and is_on(row, config.written):
            options: Mapping[str, Any] | None = row.load(row.loads)(data, config)
            if options is not None:
                return options
    return None


def warn_lost_position(loader: object) -> None:
    """Log that checkpoints do not hold the place of ``loader`` in the data, if so."""
    if loader is not None and not hasattr(loader, "place") and not is_stateful(loader):
        data = getattr(loader, "dataset", loader)
        log_rank0(
            f"checkpoints do not hold the place in training_data: a {type(data).__name__} has no "
            "state_dict() and load_state_dict(); pass a map-style Dataset, or skip batches in the "
            "script after a resume (engine.global_samples)"
        )
