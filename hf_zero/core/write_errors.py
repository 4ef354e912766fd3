"""A disk that did not take what was written to it: all ranks hear of it before the next update, and
none begins that.

The last update is complete all the same, because what could not be written stays in memory
(storage/buffer_pool.py, the note).
"""

from __future__ import annotations

from hf_zero.core.schedule import Schedule
from hf_zero.core.update import Updater
from hf_zero.distributed.mesh import Mesh
from hf_zero.errors import OffloadError, PartitionError
from hf_zero.storage.placement import Placement


def failed_writes(placement: Placement, updater: Updater, schedule: Schedule, mesh: Mesh) -> str:
    """Which writes of the last update have failed, on any rank; "" if none (collective where
    something is in files).
    """
    if not placement.in_files:
        return ""
    updater.finish()
    own = placement.write_error()
    if not schedule.agree("a look at what was written", int(own is not None)):
        return ""
    texts = mesh.all_gather_object("" if own is None else str(own), "writes that failed")
    return "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts) if text)


def refuse_step(failed: str) -> None:
    """Raise OffloadError if there are ``failed`` writes."""
    if failed:
        raise OffloadError(
            f"a write of offloaded state has failed: {failed}. The last step is complete, what "
            "could not be written is in memory: save a "
            "checkpoint now, make room or mend the path, and resume"
        )


def refuse_half_done(updater: Updater, what: str) -> None:
    """Raise PartitionError if a backward has updated a part of the model and no step has
    followed, which has to come before ``what``.
    """
    if updater.early is not None:
        raise PartitionError(
            f"{what} comes after a backward that has updated a part of the model already "
            "(offload_optimizer.update_in_backward) and before "
            "the step() that updates the rest. Call step() first, or switch update_in_backward "
            "off; backwards before the last one of a "
            "step need engine.set_gradient_accumulation_boundary(False). If an exception has "
            "broken that backward, load a checkpoint"
        )
