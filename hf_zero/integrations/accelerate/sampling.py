"""Loaders of Accelerate that draw samples by difficulty.

Accelerate distributes the batches of one sampler that is equal on all ranks, so only the sampler is
replaced, as Accelerate itself does with ``use_seedable_sampler``; the Trainer prepares its loaders
here, too. Imported while ``import accelerate`` runs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch.utils.data import BatchSampler, RandomSampler

from hf_zero.config import ZeroConfig
from hf_zero.config.techniques import EFFICIENCY
from hf_zero.integrations import finder
from hf_zero.integrations.accelerate.shared_batches import sequence_ranks, tensor_ranks

STEPS = "gradient_accumulation_steps"


def draw_by_difficulty(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps ``Accelerator.prepare_data_loader``: a loader that shuffles a map-style dataset draws
    by difficulty if so configured.
    """

    def prepare_data_loader(
        self: Any, data_loader: Any, device_placement: Any = None, slice_fn_for_dispatch: Any = None
    ) -> Any:
        chosen = finder.chosen() and _chooses_samples(self) and _shuffles(data_loader)
        prepared = original(self, data_loader, device_placement, slice_fn_for_dispatch)

        def choose(shared: Any, size: int) -> Any:
            from hf_zero.techniques.data_sampling import CurriculumSampler

            batches = data_loader.batch_sampler
            ranks = 1 if self.split_batches else self.num_processes // size
            written = self.deepspeed_plugin.deepspeed_config.get(STEPS)
            steps = written if isinstance(written, int) else self.gradient_accumulation_steps
            samples = batches.batch_size * ranks * steps
            sampler = CurriculumSampler(data_loader.dataset, samples, batches.drop_last)
            shared.set_sampler(sampler)
            return shared

        if chosen:
            from hf_zero.parallel.sequence.batches import SHARE

            size = tensor_ranks(self.state)
            choose(prepared, size)
            if share := vars(prepared).get(SHARE):
                size *= sequence_ranks(self.state)
                vars(prepared)[SHARE] = lambda: choose(share(), size)
        if finder.chosen():
            follow_engines(self)
        return prepared

    return prepare_data_loader


def follow_engines(accelerator: Any) -> None:
    """Let the loaders of ``accelerator`` that draw by difficulty follow the training of its
    engine.
    """
    from hf_zero.engine import Engine
    from hf_zero.techniques.registry import follow

    for engine in (each for each in accelerator._models if isinstance(each, Engine)):
        for loader in accelerator._dataloaders:
            follow(engine.techniques, _sampler_of(loader))


def skip_what_was_trained(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps ``skip_first_batches``: the skipped batches are those before the training's next step,
    at which a loader that draws by difficulty starts by itself.
    """

    def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
        from hf_zero.parallel.sequence.batches import SequenceBatches

        if isinstance(dataloader, SequenceBatches):
            whole, rest = divmod(num_batches, dataloader.turns)
            return dataloader.over(skip_first_batches(dataloader.loader, whole), rest)
        skipping = original(dataloader, num_batches)
        from accelerate.data_loader import DataLoaderDispatcher

        if finder.chosen() and type(skipping) is DataLoaderDispatcher:
            # Accelerate constructs it anew without these two
            skipping.state, skipping.slice_fn = dataloader.state, dataloader.slice_fn
        from hf_zero.techniques.data_sampling import CurriculumSampler

        sampler = _sampler_of(dataloader)
        if isinstance(sampler, CurriculumSampler):
            batches = dataloader.batch_sampler
            sampler = sampler.before_skipping(num_batches * _samples_of_a_batch(batches))
            skipping.batch_sampler.batch_sampler = _with_sampler(batches, sampler)
        return skipping

    return skip_first_batches


def _chooses_samples(accelerator: Any) -> bool:
    plugin = getattr(accelerator.state, "deepspeed_plugin", None)
    config = getattr(plugin, "deepspeed_config", None) or {}
    if EFFICIENCY not in config:
        return False
    from hf_zero.techniques.data_sampling import sampled_metrics

    return bool(sampled_metrics(ZeroConfig.coerce(config, allow_auto=True, foreign=True)))


def _shuffles(loader: Any) -> bool:
    batches = loader.batch_sampler
    if getattr(loader, "_is_accelerate_prepared", False) or not isinstance(batches, BatchSampler):
        return False
    return isinstance(batches.sampler, RandomSampler)


def _sampler_of(loader: Any) -> Any:
    """Return the sampler of ``loader``, inside the batch samplers that distribute and skip
    batches.
    """
    batches: Any = getattr(loader, "batch_sampler", None)
    while hasattr(batches, "batch_sampler"):
        batches = batches.batch_sampler
    return getattr(batches, "sampler", None)


def _samples_of_a_batch(batches: Any) -> int:
    """Return the number of samples, over all ranks, that correspond to one batch of this rank."""
    if not hasattr(batches, "batch_size"):  # a batch sampler that skips
        return _samples_of_a_batch(batches.batch_sampler)
    ranks = 1 if getattr(batches, "split_batches", True) else batches.num_processes
    return int(batches.batch_size * ranks)


def _with_sampler(batches: Any, sampler: Any) -> Any:
    """Return a copy of ``batches`` over ``sampler``."""
    other = copy.copy(batches)
    if hasattr(batches, "batch_sampler"):
        other.batch_sampler = _with_sampler(batches.batch_sampler, sampler)
    else:
        other.sampler = sampler
    return other
