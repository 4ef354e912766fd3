"""Loaders of Accelerate for ranks that train on the same batches, and the refusal of loaders that
give ranks different numbers of batches.

[Note: one data-parallel rank]
Neighboring tensor-parallel ranks are one data-parallel rank: rank r of n reads as rank r // size
of n // size. Accelerate distributes batches by the two numbers passed to ``prepare_data_loader``,
which :func:`share_out` divides. A dispatching loader takes them from the process state instead:
rank 0 reads for all, and every rank slices its part out of the data it is sent. It therefore gets a
state that counts data-parallel ranks, and slices by its own data-parallel rank.

Sequence-parallel ranks evaluate whole sequences of their own, so a loader is distributed among
them, too, until it is known to be for training (``share_among_groups`` in
hf_zero/parallel/sequence): from then on the group is one data-parallel rank, and each of its ranks
slices its part out.

Imported while ``import accelerate`` runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch.utils.data import BatchSampler

from hf_zero.errors import ConfigError
from hf_zero.integrations import finder
from hf_zero.integrations.accelerate.parallel_sizes import sequence_ranks, tensor_ranks
from hf_zero.integrations.seams import Original
from hf_zero.logging import counted

if TYPE_CHECKING:
    from accelerate.data_loader import DataLoaderAdapter, DataLoaderShard
    from torch.utils.data import DataLoader


def share_out(
    original: Original, dataloader: DataLoader[object], *args: object, **kwargs: object
) -> DataLoaderAdapter:
    """Wraps ``prepare_data_loader``: a rank reads the batches of its data-parallel rank, see [Note:
    one data-parallel rank].
    """
    from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard
    from accelerate.state import AcceleratorState

    from hf_zero.parallel.sequence.batches import SHARE

    state = AcceleratorState()
    layers, sequences = tensor_ranks(state), sequence_ranks(state)

    def share(size: int) -> DataLoaderAdapter:
        if size == 1:
            return original(dataloader, *args, **kwargs)
        ranks, rank = state.num_processes // size, state.process_index // size
        counts = {"num_processes": ranks, "process_index": rank, "torch_device_mesh": None}
        prepared = original(dataloader, *args, **kwargs | counts)
        if type(prepared) is DataLoaderDispatcher:
            prepared.state = _DataParallelState(prepared.state, ranks)
            prepared.slice_fn = functools.partial(_own_part, prepared.slice_fn, rank)
        elif ranks == 1 and not kwargs.get("use_seedable_sampler"):
            _shuffle_alike(prepared, dataloader)
        if size > layers and type(prepared) is DataLoaderShard:
            prepared.device = None  # the parts are moved to the device, not the whole batches
        return prepared

    prepared = share(layers)
    plugin = getattr(state, "deepspeed_plugin", None) if finder.chosen() else None
    if sequences > 1:
        vars(prepared)[SHARE] = functools.partial(share, layers * sequences)
    elif plugin is not None and plugin.zero_stage == 3:
        refuse_uneven(prepared, 3)  # also for evaluation, whose forwards gather parameters
    return prepared


def refuse_uneven(loader: object, stage: int, steps: int = 1) -> None:
    """Raise ConfigError if ``even_batches=False`` gives ranks different numbers of collectives at
    ``stage``, whose windows have ``steps`` micro-batches: at stages 0 and 1 only steps are counted.
    """
    from accelerate.data_loader import BatchSamplerShard

    shard: object = getattr(loader, "batch_sampler", None)
    if shard is None:  # batch_size=None, with a batch sampler given as `sampler`
        shard = getattr(loader, "sampler", None)
    while not isinstance(shard, BatchSamplerShard) and hasattr(shard, "batch_sampler"):
        shard = shard.batch_sampler  # inside one that skips
    if not isinstance(shard, BatchSamplerShard) or shard.even_batches or shard.drop_last:
        return
    inner, ranks = shard.batch_sampler, shard.num_processes
    try:
        if shard.split_batches:  # the first ranks fill their parts of a last batch
            if type(inner) is not BatchSampler:
                return  # others may give their last samples to batches of any size
            sampler: Any = inner.sampler
            rounds, rest = divmod(len(sampler), shard.batch_size)
            uneven = 0 < rest <= shard.batch_size // ranks * (ranks - 1)
            what = f"the {counted(rest, 'sample')} of the last batch"
        else:
            rounds, rest = divmod(len(inner), ranks)
            uneven, what = rest > 0, f"the {counted(len(inner), 'batch', 'batches')}"
    except (AttributeError, TypeError):  # a sampler without a length
        return
    if uneven and (stage > 1 or rounds % steps == 0):
        raise ConfigError(
            f"even_batches=False divides {what} of a loader unevenly among {ranks} "
            f"ranks, and at stage {stage} no rank can run one without the others; leave "
            "even_batches true (gather_for_metrics does not count the samples that fill up the "
            "last batches), or set drop_last of the loader, dataloader_drop_last of the Trainer"
        )


def _shuffle_alike(prepared: DataLoaderShard, loader: DataLoader[object]) -> None:
    """Make all ranks shuffle ``loader`` alike: for one data-parallel rank Accelerate omits the
    synchronization that it sets up for several.
    """
    from accelerate.data_loader import get_sampler

    sampler = get_sampler(loader)
    if hasattr(sampler, "generator"):
        kind = "torch" if sampler.generator is None else "generator"
        prepared.synchronized_generator = sampler.generator
        prepared.rng_types = [*(prepared.rng_types or ()), kind]


class _DataParallelState:
    """Process state of a dispatching loader whose ``num_processes`` counts data-parallel ranks."""

    def __init__(self, state: object, ranks: int):
        self._state, self.num_processes = state, ranks

    def __getattr__(self, name: str) -> Any:
        if name == "_state":  # while being copied
            raise AttributeError(name)
        return getattr(self._state, name)


def _own_part(
    cut: Callable[..., object],
    rank: int,
    data: object,
    part: slice,
    process_index: int | None = None,
    num_processes: int | None = None,
) -> object:
    """Return the slice of ``data`` that ``cut`` gives to data-parallel ``rank``; ``part`` is
    computed from ``process_index``, or starts at 0 for all.
    """
    if part.start:
        width = part.stop - part.start
        part = slice(rank * width, (rank + 1) * width)
    return cut(data, part, process_index=rank, num_processes=num_processes)


def rewind_what_was_fetched(original: Original, self: DataLoaderAdapter) -> None:
    """Wraps ``DataLoaderAdapter.adjust_state_dict_for_prefetch``: a dispatching loader has
    prefetched one batch for each data-parallel rank, not one for each process.
    """
    state = self.__dict__.get("state")
    if not isinstance(state, _DataParallelState):
        original(self)
        return
    saved, ahead = self.dl_state_dict, state.num_processes - 1
    for counters, name, size in (
        (saved, "_sampler_iter_yielded", 1),
        (saved, "_num_yielded", 1),
        (saved.get("_index_sampler_state") or {}, "samples_yielded", self.batch_size),
    ):
        if counters.get(name, 0) > 0:
            counters[name] -= size * ahead
