"""Values that the configuration of an ``Accelerator`` leaves open, or "auto", while ``prepare``
makes an engine: the clipping norm and batch sizes. Imported while ``import accelerate`` runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import nn
from torch.utils.data import DataLoader

from hf_zero.config.reading import AUTO
from hf_zero.config.resolving import ACCUMULATION, BATCH, MICRO, TOTAL
from hf_zero.integrations.accelerate.parallel_sizes import sequence_ranks, tensor_ranks

if TYPE_CHECKING:
    from accelerate import Accelerator
    from accelerate.utils import DeepSpeedPlugin

CLIPPING = "gradient_clipping"
FILLED_LIMIT = "_hf_zero_filled_limit"  # attribute of a plugin, or of its configuration
FILLED_SIZES = "_hf_zero_filled_sizes"  # also


@contextmanager
def open_values(accelerator: Accelerator, args: Sequence[object]) -> Iterator[bool]:
    """Let Accelerate fill in what the configuration leaves open for one ``prepare`` of ``args``,
    and the next ``prepare`` do so again. Yield whether the clipping norm is left to the script.
    """
    plugin = accelerator.deepspeed_plugin
    # In this order: sizes of an earlier prepare are "auto" again before those without a loader are
    # taken out, and these come back before what this prepare has filled in is noted.
    with (
        _clipping_left_open(plugin) as clipping_is_open,
        _sizes_left_open(plugin, args),
        _without_open_sizes(plugin.deepspeed_config, args),
        _counted_by_data_parallel_ranks(accelerator, args),
    ):
        yield clipping_is_open


@contextmanager
def _clipping_left_open(plugin: DeepSpeedPlugin) -> Iterator[bool]:
    """Yield whether the configuration of ``plugin`` leaves the clipping norm to the script, and
    write DeepSpeed's default where it has none: "auto", 0 and a missing key do; also if the key has
    the value that an earlier ``prepare`` or the Trainer has filled in.
    """
    from hf_zero.deepspeed.zero_config import GRADIENT_CLIPPING_DEFAULT

    config = plugin.deepspeed_config
    filled = [getattr(holder, FILLED_LIMIT, AUTO) for holder in (plugin, config)]
    left_open = config.get(CLIPPING, AUTO) in (AUTO, None, 0, *filled)
    if plugin.gradient_clipping == 0:
        config.setdefault(CLIPPING, 0.0)  # Accelerate drops a zero
    elif config.get(CLIPPING) is None:  # the script may name another, else it is told of this
        config[CLIPPING] = GRADIENT_CLIPPING_DEFAULT
    try:
        yield left_open
    finally:
        if left_open:
            setattr(plugin, FILLED_LIMIT, plugin.deepspeed_config.get(CLIPPING, AUTO))


@contextmanager
def _sizes_left_open(plugin: DeepSpeedPlugin, args: Sequence[object]) -> Iterator[None]:
    """Write "auto" again for batch sizes of the configuration that have the value that an earlier
    ``prepare`` filled in: a later engine has those of its loader and of the accelerator then.
    """
    config, filled = plugin.deepspeed_config, vars(plugin).setdefault(FILLED_SIZES, {})
    refilled = {ACCUMULATION}
    if any(isinstance(value, nn.Module) for value in args):
        refilled.add(TOTAL)
        if any(isinstance(value, DataLoader) for value in args):
            refilled.add(MICRO)
    for key in refilled & filled.keys():
        if filled.pop(key) == config.get(key):
            config[key] = AUTO
    left_open = [key for key in BATCH if config.get(key) == AUTO]
    try:
        yield
    finally:
        filled.update({key: config[key] for key in left_open if config.get(key, AUTO) != AUTO})


@contextmanager
def _without_open_sizes(config: dict[str, object], args: Sequence[object]) -> Iterator[None]:
    """Remove "auto" batch sizes from ``config`` while an engine is prepared without a data loader
    that has a batch size: Accelerate raises for them, and the engine does not need the number.
    """
    loaders = [value for value in args if isinstance(value, DataLoader)]
    taken = {}
    if config.get(MICRO) == AUTO and (
        not loaders or any(loader.batch_size is None for loader in loaders)
    ):
        taken = {key: config.pop(key) for key in (TOTAL, MICRO) if config.get(key) == AUTO}
    made_engine = False
    try:
        yield
        made_engine = any(isinstance(value, nn.Module) for value in args)
    finally:
        if not made_engine:  # a call with a model and a data loader may follow
            config.update(taken)


@contextmanager
def _counted_by_data_parallel_ranks(
    accelerator: Accelerator, args: Sequence[object]
) -> Iterator[None]:
    """Divide by data-parallel ranks, instead of processes, for the configuration: the batches that
    ``split_batches`` splits, and otherwise the steps of a DummyScheduler.
    """
    from accelerate.utils import DummyScheduler

    state, plugin = accelerator.state, accelerator.deepspeed_plugin
    config, size = plugin.deepspeed_config, tensor_ranks(state) * sequence_ranks(state)
    scaled: list[DummyScheduler] = []
    if not accelerator.split_batches:
        dummies = (value for value in args if isinstance(value, DummyScheduler))
        scaled = [scheduler for scheduler in dummies if scheduler.total_num_steps]
    elif size > 1 and config.get(MICRO) == AUTO:
        loaders = [value for value in args if isinstance(value, DataLoader)]
        sizes = [loader.batch_size for loader in loaders if loader.batch_size]
        if sizes and len(sizes) == len(loaders):
            chosen = min(sizes) if plugin.is_train_batch_min else max(sizes)
            config[MICRO] = chosen // (state.num_processes // size)
    for scheduler in scaled:
        scheduler.total_num_steps *= size
    try:
        yield
    finally:
        for scheduler in scaled:
            scheduler.total_num_steps //= size
