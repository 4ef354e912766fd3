"""Loaders of Accelerate for ranks that train on the same batches, and loaders that draw samples by
difficulty; metrics that count each sample once, schedulers that count each batch once; the refusal
of loaders that give ranks different numbers of batches.

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

[Note: difficulty]
Accelerate distributes the batches of one sampler that is equal on all ranks, so only the sampler is
replaced, as Accelerate itself does with ``use_seedable_sampler``; the Trainer prepares its loaders
here, too.

Imported while ``import accelerate`` runs.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import BatchSampler, RandomSampler

from hf_zero.config import ZeroConfig
from hf_zero.config.files import value_at
from hf_zero.config.sections import TENSOR, TENSOR_ALIASES, TENSOR_SIZE
from hf_zero.config.techniques import EFFICIENCY
from hf_zero.errors import ConfigError
from hf_zero.integrations import finder
from hf_zero.integrations.accelerate.state import sequence_size
from hf_zero.integrations.engine_protocol import is_engine
from hf_zero.integrations.seams import Original, replaced
from hf_zero.logging import JsonObject, counted

if TYPE_CHECKING:
    from accelerate import Accelerator
    from accelerate.data_loader import (
        BatchSamplerShard,
        DataLoaderAdapter,
        DataLoaderShard,
        SkipBatchSampler,
    )
    from accelerate.scheduler import AcceleratedScheduler
    from torch.utils.data import DataLoader, Sampler

    from hf_zero.parallel.sequence.batches import SequenceBatches

STEPS = "gradient_accumulation_steps"
# attribute of an Accelerator that has prepared a loader; the Trainer empties its list of them
DIVIDES = "_hf_zero_divides_batches"


def name_the_size(config: JsonObject) -> None:
    """Rename an alias of ``tensor_parallel.autotp_size`` to that key, in place: Accelerate
    distributes the data, and the Trainer counts batches, by that key alone.
    """
    section, size = config.get(TENSOR), TENSOR_SIZE.rpartition(".")[2]
    if not isinstance(section, Mapping):
        return
    for alias in TENSOR_ALIASES:
        inner, name = alias.split(".")[1:]
        other = section.get(inner)
        if isinstance(other, Mapping) and name in other and size not in section:
            outer = {key: value for key, value in section.items() if key != inner}
            keys = {key: value for key, value in other.items() if key != name}
            config[TENSOR] = {**outer, **({inner: keys} if keys else {}), size: other[name]}


def tensor_ranks(state: object) -> int:
    """Return the tensor-parallel ranks in the configuration of the AcceleratorState ``state``."""
    plugin = getattr(state, "deepspeed_plugin", None) if finder.chosen() else None
    written = None if plugin is None else value_at(plugin.deepspeed_config, TENSOR_SIZE)
    return written or 1


def sequence_ranks(state: object) -> int:
    """Return the number of sequence-parallel ranks in Accelerate's ParallelismConfig."""
    parallelism = getattr(state, "parallelism_config", None) if finder.chosen() else None
    return 1 if parallelism is None else sequence_size(parallelism)


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


def count_samples_once(
    original: Original, self: Accelerator, input_data: object, use_gather_object: bool = False
) -> object:
    """Wraps ``Accelerator.gather_for_metrics``: of ranks with the same batches only the first one's
    results are returned.
    """
    size = tensor_ranks(self.state)
    if size == 1:
        return original(self, input_data, use_gather_object)
    if use_gather_object or not _all_tensors(input_data):
        return original(self, [] if self.process_index % size else input_data, True)
    from accelerate.utils import recursively_apply

    whole, ranks = self.gather, self.num_processes

    def gather(data: object) -> object:
        return recursively_apply(lambda tensor: torch.cat(tensor.chunk(ranks)[::size]), whole(data))

    with replaced(self, gather=gather):
        return original(self, input_data)


def count_batches_once(
    original: Original, self: AcceleratedScheduler, *args: object, **kwargs: object
) -> None:
    """Wraps ``AcceleratedScheduler.step``, which steps once for each process: of the processes that
    train on the same batch, or on parts of its sequences, one counts.
    """
    from accelerate.state import AcceleratorState

    state, inner = AcceleratorState(), self.scheduler
    size = tensor_ranks(state) * sequence_ranks(state)
    if size == 1 or self.split_batches or not self.step_with_optimizer:
        original(self, *args, **kwargs)
        return
    inner_step, calls = inner.step, itertools.count()
    # for the call alone: a scheduler's state dict would include it
    with replaced(inner, step=lambda *a, **k: None if next(calls) % size else inner_step(*a, **k)):
        original(self, *args, **kwargs)


def _all_tensors(data: object) -> bool:
    from accelerate.utils import recursively_apply

    try:
        recursively_apply(lambda tensor: tensor, data, error_on_other_type=True)
    except TypeError:
        return False
    return True


def draw_by_difficulty(
    original: Original,
    self: Accelerator,
    data_loader: DataLoader[object],
    device_placement: bool | None = None,
    slice_fn_for_dispatch: object = None,
) -> DataLoaderAdapter:
    """Wraps ``Accelerator.prepare_data_loader``: a loader that shuffles a map-style dataset draws
    by difficulty if so configured.
    """
    chosen = finder.chosen() and _chooses_samples(self)
    batches = _shuffled_batches(data_loader) if chosen else None
    prepared: DataLoaderAdapter = original(
        self, data_loader, device_placement, slice_fn_for_dispatch
    )
    if batches is not None:
        from hf_zero.parallel.sequence.batches import SHARE
        from hf_zero.techniques.curriculum_samplers import CurriculumSampler

        def choose(shared: DataLoaderAdapter, size: int) -> DataLoaderAdapter:
            ranks = 1 if self.split_batches else self.num_processes // size
            written = self.deepspeed_plugin.deepspeed_config.get(STEPS)
            steps = written if isinstance(written, int) else self.gradient_accumulation_steps
            samples = batches.batch_size * ranks * steps
            sampler = CurriculumSampler(data_loader.dataset, samples, batches.drop_last)
            shared.set_sampler(sampler)
            return shared

        size = tensor_ranks(self.state)
        choose(prepared, size)
        if share := vars(prepared).get(SHARE):
            size *= sequence_ranks(self.state)
            vars(prepared)[SHARE] = lambda: choose(share(), size)
    if finder.chosen():
        setattr(self, DIVIDES, True)
        follow_engines(self)
    return prepared


def follow_engines(accelerator: Accelerator) -> None:
    """Let loaders of ``accelerator`` that draw by difficulty follow its engine's training; prepared
    loaders give its ranks batches of their own.
    """
    from hf_zero.techniques.data_sampling import follow

    for engine in (model for model in accelerator._models if is_engine(model)):
        if hasattr(accelerator, DIVIDES) and not engine.destroyed:
            engine.trust_loader()
        for loader in accelerator._dataloaders:
            follow(engine.feature_set, _sampler_of(loader))


def skip_what_was_trained(
    original: Original, dataloader: DataLoaderAdapter | SequenceBatches, num_batches: int = 0
) -> object:
    """Wraps ``skip_first_batches``: the skipped batches are those before the training's next step,
    at which a loader that draws by difficulty starts by itself.
    """
    from hf_zero.parallel.sequence.batches import SequenceBatches

    if isinstance(dataloader, SequenceBatches):
        whole, remainder = divmod(num_batches, dataloader.turns)
        return dataloader.over(skip_what_was_trained(original, dataloader.loader, whole), remainder)
    skipping = original(dataloader, num_batches)
    from accelerate.data_loader import DataLoaderDispatcher

    if finder.chosen() and type(skipping) is DataLoaderDispatcher:
        # Accelerate constructs it anew without these two
        skipping.state, skipping.slice_fn = dataloader.state, dataloader.slice_fn
    from hf_zero.techniques.curriculum_samplers import CurriculumSampler

    sampler = _sampler_of(dataloader)
    if isinstance(sampler, CurriculumSampler):
        batches = dataloader.batch_sampler
        sampler = sampler.before_skipping(num_batches * _samples_of_a_batch(batches))
        skipping.batch_sampler.batch_sampler = _with_sampler(batches, sampler)
    return skipping


def _chooses_samples(accelerator: Accelerator) -> bool:
    plugin = getattr(accelerator.state, "deepspeed_plugin", None)
    config = getattr(plugin, "deepspeed_config", None) or {}
    if EFFICIENCY not in config:
        return False
    from hf_zero.techniques.data_sampling import sampled_metrics

    return bool(sampled_metrics(ZeroConfig.coerce(config, allow_auto=True, foreign=True)))


def _shuffled_batches(loader: DataLoader[object]) -> BatchSampler | None:
    """Return the batch sampler of ``loader`` if it shuffles and Accelerate has not prepared it."""
    batches = loader.batch_sampler
    if getattr(loader, "_is_accelerate_prepared", False) or not isinstance(batches, BatchSampler):
        return None
    return batches if isinstance(batches.sampler, RandomSampler) else None


def _sampler_of(loader: object) -> object:
    """Return the sampler of ``loader``, inside batch samplers that distribute and skip batches."""
    batches: object = getattr(loader, "batch_sampler", None)
    while hasattr(batches, "batch_sampler"):
        batches = batches.batch_sampler
    return getattr(batches, "sampler", None)


def _samples_of_a_batch(batches: BatchSamplerShard | SkipBatchSampler) -> int:
    """Return the number of samples, over all ranks, that correspond to one batch of this rank."""
    if not hasattr(batches, "batch_size"):  # a batch sampler that skips
        return _samples_of_a_batch(batches.batch_sampler)
    ranks = 1 if getattr(batches, "split_batches", True) else batches.num_processes
    return int(batches.batch_size * ranks)


def _with_sampler(
    batches: BatchSamplerShard | SkipBatchSampler, sampler: Sampler[int]
) -> BatchSamplerShard | SkipBatchSampler:
    """Return a copy of ``batches`` over ``sampler``."""
    other = copy.copy(batches)
    if hasattr(batches, "batch_sampler"):
        other.batch_sampler = _with_sampler(batches.batch_sampler, sampler)
    else:
        other.sampler = sampler
    return other
