"""``deepspeed.runtime.sequence_parallel.ulysses_sp``: the interface that Accelerate and the Trainer
call for ``ParallelismConfig(sp_size=..., sp_backend="deepspeed")``.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator
from typing import Any

import torch

from hf_zero.distributed.parallel_groups import get_parallel
from hf_zero.errors import ConfigError
from hf_zero.parallel.sequence.batches import SequenceBatches, on_cpu, share_among_groups
from hf_zero.parallel.sequence.exchange import gather
from hf_zero.parallel.sequence.sequence_parallel import (
    AXIS,
    SequenceParallel,
    sequence_parallel,
)

_MARK = "_hf_zero_sequence"


class UlyssesSPAttentionHF:
    """Ulysses attention, which exchanges heads for tokens, in models of transformers."""

    @classmethod
    def register_with_transformers(
        cls,
        model_name_or_path: Any,
        core_attn_implementation: str | None = None,
        sequence_parallel_size: int = 1,
        micro_batch_size: int | None = None,
        seq_length: int | None = None,
        seq_length_is_variable: bool = True,
        disable_in_eval: bool = False,
    ) -> SequenceParallel | None:
        """Return the ``mpu`` for ``initialize``, which changes the attention of its model; None for
        a size of 1. Collective over all ranks.

        Batches are checked for a fixed ``seq_length``. Raises ConfigError for sizes that do not
        divide.
        """
        if sequence_parallel_size == 1:
            return None
        made = sequence_parallel(
            sequence_parallel_size,
            attention=core_attn_implementation,
            in_evaluation=not disable_in_eval,
        )
        if not seq_length_is_variable:
            made.length = seq_length
        _gather_losses()
        return made


class UlyssesSPDataLoaderAdapter(SequenceBatches):
    """This rank's parts of the batches of the loaders of a sequence-parallel group, with
    ``shift_labels`` and without ``labels``. A loader that Accelerate has prepared is divided among
    such groups, whose ranks then read the same batches; those of other loaders are read in turn.
    """

    def __init__(
        self,
        dl: Any,
        sp_rank: int | None = None,
        sp_group: Any = None,
        sp_world_size: int | None = None,
        device: Any = None,
    ):
        self._sequence = sequence_parallel()
        super().__init__(dl, self._sequence.dim, device)
        self._alike = share_among_groups(dl)
        if sp_world_size not in (None, self.dim.size):
            raise ConfigError(
                f"UlyssesSPDataLoaderAdapter(sp_world_size={sp_world_size}) in a job whose ranks "
                f"are sequence parallel in groups of {self.dim.size}; pass that"
            )

    @property
    def turns(self) -> int:
        return 1 if self._alike else super().turns

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if not self._alike:
            return super().__iter__()
        return (self._placed(self._sequence.shard(on_cpu(batch))) for batch in self.loader)

    def _placed(self, batch: dict[str, Any]) -> dict[str, Any]:
        batch.pop("labels", None)
        return super()._placed(batch)


def get_group() -> Any:
    """Return the process group of the ranks that read parts of the same sequences. Raises
    ConfigError if the job is not sequence parallel.
    """
    return sequence_parallel().group


def get_world_size() -> int:
    """Return the number of ranks that read parts of the same sequences."""
    groups = get_parallel()
    return 1 if groups is None else groups.along(AXIS).size


def get_rank() -> int:
    """Return this rank among them."""
    groups = get_parallel()
    return 0 if groups is None else groups.along(AXIS).rank


def _gather_losses() -> None:
    """Patch ``torch.distributed.nn.functional.all_gather``, by which Accelerate's loops and the
    Trainer sum the losses of a sequence-parallel group, to use our collectives over that group.

    On gloo torch's own backward takes group ranks for global ranks, and fails if there is more than
    one group. All other groups still use it. Idempotent.
    """
    functional: Any = importlib.import_module("torch.distributed.nn.functional")
    original = functional.all_gather
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def all_gather(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        group = kwargs.get("group", args[0] if args else None)
        groups = get_parallel()
        if group is None or groups is None or group is not groups.group(AXIS):
            return original(tensor, *args, **kwargs)
        return gather(groups.along(AXIS), "losses", tensor)

    setattr(all_gather, _MARK, True)
    functional.all_gather = all_gather
