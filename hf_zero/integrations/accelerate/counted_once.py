"""Gathers of metrics and steps of schedules: where several ranks train on one batch, samples and
steps are counted once. Imported while ``import accelerate`` runs.
"""

from __future__ import annotations

import itertools
import warnings
from typing import TYPE_CHECKING

import torch

from hf_zero.integrations import finder
from hf_zero.integrations.accelerate.parallel_sizes import sequence_ranks, tensor_ranks
from hf_zero.integrations.seams import Original, replaced

if TYPE_CHECKING:
    from accelerate import Accelerator
    from accelerate.scheduler import AcceleratedScheduler


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


def gather_without_deprecation(original: Original, tensor: object) -> object:
    """Wraps ``_gpu_gather``: suppresses torch's deprecation warning of its collective."""
    with warnings.catch_warnings():
        if finder.chosen():
            message = "`torch.distributed.all_gather_into_tensor` is deprecated"
            warnings.filterwarnings("ignore", message, FutureWarning)
        return original(tensor)


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
