"""Loaders of Accelerate, also the Trainer's, that draw samples by difficulty.

Accelerate distributes the batches of one sampler that is equal on all ranks, so only the sampler is
replaced, as Accelerate itself does with ``use_seedable_sampler``; the Trainer prepares its loaders
here, too. Imported while ``import accelerate`` runs.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

from torch.utils.data import BatchSampler, RandomSampler

from hf_zero.config import ZeroConfig
from hf_zero.config.techniques import EFFICIENCY
from hf_zero.integrations import finder
from hf_zero.integrations.accelerate.parallel_sizes import sequence_ranks, tensor_ranks
from hf_zero.integrations.engine_protocol import is_engine
from hf_zero.integrations.seams import Original

if TYPE_CHECKING:
    from accelerate import Accelerator
    from accelerate.data_loader import BatchSamplerShard, DataLoaderAdapter, SkipBatchSampler
    from torch.utils.data import DataLoader, Sampler

    from hf_zero.parallel.sequence.batches import SequenceBatches


STEPS = "gradient_accumulation_steps"
# attribute of an Accelerator that has prepared a loader; the Trainer empties its list of them
DIVIDES = "_hf_zero_divides_batches"


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
