"""The samples of a Trainer's step: data-parallel ranks that read them, and the accumulation with
which a resumed run keeps their number.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from hf_zero.checkpoint.failures import decide_on_rank_0
from hf_zero.checkpoint.manifest import MANIFEST_NAME
from hf_zero.checkpoint.manifest_reading import read_manifest
from hf_zero.checkpoint.storage import AnyPath
from hf_zero.config.resolving import ACCUMULATION, TOTAL
from hf_zero.distributed.world_group import get_world_group
from hf_zero.integrations.accelerate.parallel_sizes import tensor_ranks
from hf_zero.integrations.transformers.trainer_route import under_zero
from hf_zero.logging import counted, log_rank0

if TYPE_CHECKING:
    from transformers import Trainer


def data_ranks(trainer: Trainer) -> int:
    """Return the number of ranks that read batches of their own. ``accelerate/state.py`` counts the
    ranks of rings (``cp_size``) in the size of sequence parallelism.
    """
    return int(trainer.args.world_size // trainer.get_tp_size() // trainer.get_sp_size())


def adopt_accumulation(trainer: Trainer, folder: Path, checkpoint: AnyPath) -> None:
    """Set the accumulation of this run so that a step has as many samples as in the run that saved
    ``folder`` with the engine's ``checkpoint`` on another number of data-parallel ranks; log the
    settings under which they are other samples. Collective. Raises ConfigError if micro-batches of
    ``per_device_train_batch_size`` do not make that number.
    """

    def batch_of() -> dict[str, int]:
        path = checkpoint / MANIFEST_NAME
        return read_manifest(path).batch if path.is_file() else {}

    saved, readers = decide_on_rank_0(get_world_group(), batch_of), data_ranks(trainer)
    if not saved or readers == saved["readers"]:
        return
    args = trainer.args
    micro = args.per_device_train_batch_size
    if micro * readers * args.gradient_accumulation_steps != saved["samples"]:
        from hf_zero.checkpoint.resume import micro_batches

        steps = micro_batches(saved, micro, readers, str(folder), "per_device_train_batch_size")
        _set_accumulation(trainer, steps)
    before = saved["readers"]
    if causes := _settings_with_other_rows(trainer, before, saved["micro_batch"]):
        log_rank0(
            f"resume on {counted(readers, 'data-parallel rank')}, {before} before: steps train on "
            "other rows than they would have, some of them again, because "
            f"{' and '.join(causes)}; resume on {before}, or begin a run without that setting, "
            "where this matters",
            logging.WARNING,
        )


def _set_accumulation(trainer: Trainer, steps: int) -> None:
    """Write ``steps`` into the arguments, the plugin and the configuration of ``trainer``."""
    args, plugin = trainer.args, trainer.accelerator.state.deepspeed_plugin
    args.gradient_accumulation_steps = plugin.gradient_accumulation_steps = steps
    config = plugin.hf_ds_config.config
    config[ACCUMULATION] = steps
    if isinstance(config.get(TOTAL), int):
        # As Transformers fills it in, which counts all ranks; ``resolve`` corrects it for those
        # that share batches.
        config[TOTAL] = args.per_device_train_batch_size * steps * args.world_size


def _settings_with_other_rows(trainer: Trainer, before: int, micro_before: int) -> list[str]:
    """Return the settings under which the ranks of this run read other rows than ``before`` ranks
    with micro-batches of ``micro_before`` would have, as clauses of a sentence.
    """
    from torch.utils.data import IterableDataset

    args, data, accelerator = trainer.args, trainer.train_dataset, trainer.accelerator
    readers, causes = data_ranks(trainer), []
    if isinstance(data, IterableDataset):
        fewest = min(ranks for ranks in (before, readers) if ranks > 1)
        sharded = accelerator.dispatch_batches is False and not accelerator.split_batches
        if sharded and getattr(data, "num_shards", 1) >= fewest:
            causes.append("dispatch_batches=False gives each rank shards of its own")
    elif data is not None:
        if args.train_sampling_strategy == "group_by_length":
            causes.append("train_sampling_strategy='group_by_length' sorts the rows of one rank")
        rows_before = _rows_of_epoch(trainer, before, micro_before)
        rows = _rows_of_epoch(trainer, readers, args.per_device_train_batch_size)
        if args.dataloader_drop_last and rows != rows_before:
            causes.append(f"dataloader_drop_last leaves an epoch {rows} rows, {rows_before} before")
        elif rows != rows_before and not accelerator.dispatch_batches:
            causes.append(
                f"Accelerate fills the last step of an epoch up to {rows} rows, {rows_before} "
                "before"
            )
    return causes


def _rows_of_epoch(trainer: Trainer, ranks: int, micro_batch: int) -> int:
    """Return the rows that ``ranks`` read in an epoch by ``micro_batch`` each."""
    rows, together = len(trainer.train_dataset), micro_batch * ranks  # type: ignore[arg-type]
    if trainer.args.dataloader_drop_last:
        return rows // together * together
    if trainer.accelerator.even_batches and ranks > 1:  # fills up with repeated rows
        return -(-rows // together) * together
    return rows


def know_the_tensor_ranks(original: Callable[[Trainer], int], self: Trainer) -> int:
    """Wraps ``Trainer.get_tp_size``: returns the tensor parallel size of the configuration, from
    any route; at least 1.
    """
    if not under_zero(self):
        return original(self)
    return max(original(self), tensor_ranks(self.accelerator.state))
