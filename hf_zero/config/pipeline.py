"""Configuration of pipeline parallelism."""

from __future__ import annotations

from dataclasses import dataclass

from hf_zero.config.kinds import choice, integer
from hf_zero.config.rows import key
from hf_zero.errors import ConfigError

PIPELINE = "pipeline"
INTERLEAVED = "interleaved_1f1b"
SCHEDULES = ("1f1b", "gpipe", INTERLEAVED)


@dataclass(frozen=True)
class PipelineSection:
    """Schedule and recomputation of a ``PipelineModule``; see :mod:`hf_zero.parallel.pipeline`."""

    schedule: str | None = key(
        choice(*SCHEDULES),
        None,
        "order of forwards and backwards; null: 1f1b, or interleaved_1f1b where a rank holds "
        "several stages",
    )
    activation_checkpoint_interval: int = key(
        integer(0),
        0,
        "so many layers of a PipelineModule are recomputed together in the backward; 0: as it says",
        unit="layers",
    )

    def schedule_for(self, stages_per_rank: int) -> str:
        """Return the schedule for ranks with ``stages_per_rank`` stages each. Raises ConfigError if
        the written schedule does not support that number.
        """
        if self.schedule is None:
            return INTERLEAVED if stages_per_rank > 1 else "1f1b"
        if (self.schedule == INTERLEAVED) != (stages_per_rank > 1):
            raise ConfigError(
                f"{PIPELINE}.schedule is {self.schedule!r} with stages_per_rank={stages_per_rank}; "
                f'"{INTERLEAVED}" is for ranks with several stages, the others for one: change '
                "one of them, or remove the key"
            )
        return self.schedule
