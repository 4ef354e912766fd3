"""Checkpoints in the memory of hosts: a generation of rank files each N steps, with copies on other
hosts, from which a restarted job goes on (FORMAT.md section 11).
"""

from __future__ import annotations

from collections.abc import Mapping

from hf_zero.checkpoint.generations import Newest
from hf_zero.checkpoint.memory.choose import newest, newest_in_memory
from hf_zero.checkpoint.memory.saving import checkpoints_of
from hf_zero.checkpoint.run_state import SavedEngine
from hf_zero.errors import CheckpointError

__all__ = ["Newest", "checkpoints_of", "newest", "newest_in_memory", "save"]


def save(
    engine: SavedEngine,
    beside: Mapping[str, bytes] | None = None,
    client_state: Mapping[str, object] | None = None,
    tag: str | None = None,
) -> None:
    """Save ``engine`` into the memory of the hosts; returns once its state is copied there. Every
    rank calls it after the same step.

    Args:
        beside: files by relative name that a resume is to find beside the checkpoint; of a name
            that several ranks give, the lowest rank's content.
        client_state: user state that the load returns; rank 0's is saved.
        tag: name of the checkpoint; by default ``global_step<N>``.

    Raises:
        CheckpointError: checkpoints in memory are off (``checkpoint.memory.every``), ``tag`` cannot
            name a checkpoint, or, at the first save, on all ranks, a host has no room.
    """
    checkpoints = checkpoints_of(engine)
    if checkpoints is None:
        raise CheckpointError(
            "checkpoints in memory are off; write checkpoint.memory.every into the configuration"
        )
    checkpoints.save(engine, beside, client_state, tag)
