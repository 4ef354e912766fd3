"""Ranks that train on the same batches: their size where Accelerate looks for it, metrics that
count each sample once, and schedulers that count each batch once.

Imported in the middle of ``import accelerate``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from hf_zero.config.tensor_parallel import ALIASES, TENSOR, TENSOR_SIZE
from hf_zero.integrations import finder


def name_the_size(config: Any) -> None:
    """Write a size that stands under its other name as ``tensor_parallel.autotp_size``, in place:
    Accelerate shares out the data, and the Trainer counts batches, by that alone.
    """
    section, size = config.get(TENSOR), TENSOR_SIZE.rpartition(".")[2]
    for alias in ALIASES:
        inner, name = alias.split(".")[1:]
        other = section.get(inner) if isinstance(section, Mapping) else None
        if isinstance(other, Mapping) and name in other and size not in section:
            rest = {key: value for key, value in section.items() if key != inner}
            left = {key: value for key, value in other.items() if key != name}
            config[TENSOR] = {**rest, **({inner: left} if left else {}), size: other[name]}


def count_samples_once(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps ``Accelerator.gather_for_metrics``: of ranks that read the same batches the first one's
    results are taken.
    """

    def gather_for_metrics(self: Any, input_data: Any, use_gather_object: bool = False) -> Any:
        size = _ranks_of_a_batch(self.state)
        if size == 1:
            return original(self, input_data, use_gather_object)
        if use_gather_object or not _all_tensors(input_data):
            return original(self, [] if self.process_index % size else input_data, True)
        with _gathering_one_of(self, size):
            return original(self, input_data)

    return gather_for_metrics


def count_batches_once(original: Callable[..., None]) -> Callable[..., None]:
    """Wraps ``AcceleratedScheduler.step``, which steps once for each process: of those that train
    on the same batch, also on parts of its sequences, one counts.
    """

    def step(self: Any, *args: Any, **kwargs: Any) -> None:
        from accelerate.state import AcceleratorState

        state, inner = AcceleratorState(), self.scheduler
        size = _ranks_of_a_batch(state)
        if finder.chosen() and state.parallelism_config is not None:
            size *= state.parallelism_config.sp_size
        if size == 1 or self.split_batches or not self.step_with_optimizer:
            original(self, *args, **kwargs)
            return
        inner_step, held, calls = inner.step, {**vars(inner)}, itertools.count()
        inner.step = lambda *a, **k: None if next(calls) % size else inner_step(*a, **k)
        try:
            original(self, *args, **kwargs)
        finally:
            del inner.step  # a state dict has all that a scheduler has
            if "step" in held:
                inner.step = inner_step

    return step


def _ranks_of_a_batch(state: Any) -> int:
    """As the loaders are shared out that ``prepare`` has made."""
    mesh = getattr(state, "ds_device_mesh", None) if finder.chosen() else None
    return 1 if mesh is None else int(mesh["tp"].size())


def _all_tensors(data: Any) -> bool:
    from accelerate.utils import recursively_apply

    try:
        recursively_apply(lambda tensor: tensor, data, error_on_other_type=True)
    except TypeError:
        return False
    return True


@contextmanager
def _gathering_one_of(accelerator: Any, size: int) -> Iterator[None]:
    """Let ``accelerator.gather`` give what each ``size``-th rank has."""
    from accelerate.utils import recursively_apply

    whole, ranks = accelerator.gather, accelerator.num_processes

    def gather(data: Any) -> Any:
        return recursively_apply(lambda each: torch.cat(each.chunk(ranks)[::size]), whole(data))

    accelerator.gather = gather
    try:
        yield
    finally:
        del accelerator.gather
