"""``deepspeed.runtime.sequence_parallel.ulysses_sp``: sequence parallelism by attention heads under
DeepSpeed's names.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from hf_zero.config.feature_rows import provided
from hf_zero.distributed.parallel_groups import get_parallel
from hf_zero.errors import ConfigError
from hf_zero.parallel.sequence.batches import SequenceBatches, on_cpu, share_among_groups
from hf_zero.parallel.sequence.division import SEQUENCE_CONTEXT, Division
from hf_zero.parallel.sequence.exchanges import gather
from hf_zero.parallel.sequence.sequence_parallel import SequenceParallel, sequence_parallel

_MARK = "_hf_zero_sequence"


class UlyssesSPAttentionHF:
    """Ulysses attention, which exchanges heads for tokens, in models of transformers."""

    @classmethod
    def register_with_transformers(
        cls,
        model_name_or_path: object,
        core_attn_implementation: str | None = None,
        sequence_parallel_size: int = 1,
        micro_batch_size: int | None = None,
        seq_length: int | None = None,
        seq_length_is_variable: bool = True,
        disable_in_eval: bool = False,
    ) -> SequenceParallel | None:
        """Return the ``mpu`` for ``initialize``, which changes the attention of its model; None for
        a size of 1. Collective over all ranks. Of the ranks that Accelerate counts some may form a
        ring.

        Batches are checked for a fixed ``seq_length``. Raises ConfigError for sizes that do not
        divide.
        """
        if sequence_parallel_size == 1:
            return None
        accelerated = "accelerate" in sys.modules
        division = provided("accelerate_division")() if accelerated else None
        if division is None or division.ranks != sequence_parallel_size:
            division = Division(sequence_parallel_size)
        mpu = sequence_parallel(
            division.sequence,
            context_parallel_size=division.context,
            attention=core_attn_implementation,
            in_evaluation=not disable_in_eval,
        )
        if not seq_length_is_variable:
            mpu.length = seq_length
        _gather_losses()
        return mpu


class UlyssesSPDataLoaderAdapter(SequenceBatches):
    """This rank's parts of the batches of the loaders of a sequence-parallel group, with
    ``shift_labels`` and without ``labels``. A loader that Accelerate has prepared is divided among
    such groups, whose ranks then read the same batches; those of other loaders are read in turn.
    """

    def __init__(
        self,
        dl: Iterable[object],
        sp_rank: int | None = None,
        sp_group: object = None,
        sp_world_size: int | None = None,
        device: torch.device | None = None,
    ):
        self._sequence = sequence_parallel()
        super().__init__(dl, self._sequence.dim, self._sequence.division, device)
        self._alike = share_among_groups(dl)
        if sp_world_size not in (None, self.dim.size):
            raise ConfigError(
                f"UlyssesSPDataLoaderAdapter(sp_world_size={sp_world_size}) in a job whose ranks "
                f"are sequence parallel in groups of {self.dim.size}; pass that"
            )

    @property
    def turns(self) -> int:
        return 1 if self._alike else super().turns

    def __iter__(self) -> Iterator[dict[str, object]]:
        if not self._alike:
            return super().__iter__()
        return (self._placed(self._sequence.shard(on_cpu(batch))) for batch in self.loader)

    def _placed(self, batch: dict[str, object]) -> dict[str, object]:
        batch.pop("labels", None)
        return super()._placed(batch)


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
    def all_gather(tensor: torch.Tensor, *args: object, **kwargs: object) -> Sequence[torch.Tensor]:
        group = kwargs.get("group", args[0] if args else None)
        groups = get_parallel()
        if group is None or groups is None or group is not groups.group(SEQUENCE_CONTEXT):
            return original(tensor, *args, **kwargs)
        return gather(groups.along(SEQUENCE_CONTEXT), "losses", tensor)

    setattr(all_gather, _MARK, True)
    functional.all_gather = all_gather
