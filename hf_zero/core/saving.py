"""What an engine saves and loads: whole state dicts, and checkpoints in shards, written in the call
or by a thread while training goes on.

The functions are methods of :class:`hf_zero.Engine`, under their names.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_zero.core.consolidate import whole_state_dict
from hf_zero.core.schedule import Schedule
from hf_zero.core.trouble import refuse_half_done
from hf_zero.distributed.consensus import STOP
from hf_zero.distributed.mesh import Mesh
from hf_zero.errors import PartitionError
from hf_zero.logs import logger
from hf_zero.spans import span

SAVE_FAILED = STOP - 1  # less the number of the save: the event that ranks agree on


class AsyncSaves:
    """Saves that a thread writes while training goes on, and what is wrong with them.

    ``writer`` is a :class:`hf_zero.checkpoint.async_save.AsyncSaver`, from the first such save on.
    """

    def __init__(self, mesh: Mesh, schedule: Schedule):
        self.writer: Any = None
        self._mesh = mesh
        self._schedule = schedule

    def start(self) -> Any:
        """The writer, made by the first call; every rank must call it."""
        from hf_zero.checkpoint.async_save import AsyncSaver

        if self.writer is None:
            mesh = self._mesh
            self.writer = AsyncSaver(mesh, mesh.rank, mesh.world, mesh.device)
            if mesh.consensus is not None:
                # all ranks hear of a failure after the same step
                mesh.consensus.serve_out_of_order_gathers(self._schedule.read)
        return self.writer

    def wait(self, who: str, below: str | None = None) -> None:
        """Return when no checkpoint, or none in the folder ``below``, is being written. Raises
        CheckpointError, on all ranks, if it could not be; ``who`` waits is logged.
        """
        if self.writer is not None:
            self.writer.wait(who, None if below is None else Path(below))

    def publish_failure(self) -> None:
        """Before the ranks meet at the end of a step: rank 0 has seen that a save has failed."""
        writer, consensus = self.writer, self._mesh.consensus
        if writer is not None and writer.failed and self._mesh.rank == 0 and consensus is not None:
            consensus.broadcast_event(SAVE_FAILED - writer.number)

    def raise_failure(self) -> None:
        """At the end of a step: raise on all ranks what a save has met with."""
        writer, consensus = self.writer, self._mesh.consensus
        if writer is None:
            return
        if writer.failed if consensus is None else SAVE_FAILED - writer.number in consensus.events:
            writer.wait()

    def close(self) -> None:
        """Wait for what is being written, and let its memory go; raises as :meth:`wait`."""
        writer, self.writer = self.writer, None
        if writer is not None:
            writer.wait("destroy")


def state_dict(
    engine: Any, *args: Any, rank0_only: bool = False, **kwargs: Any
) -> dict[str, Any] | None:
    """The consolidated model's state dict, as the bare model's.

    ``rank0_only``: others get None, and hold one unit at a time.
    """
    if rank0_only:
        return whole_state_dict(engine, everywhere=False)
    state: dict[str, Any] = engine.module.state_dict(*args, **kwargs)
    return state


def load_state_dict(
    engine: Any, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
) -> Any:
    """As ``load_state_dict`` of the bare model, over whole values (collective at stage 3)."""
    return engine.module.load_state_dict(state_dict, strict=strict, assign=assign)


def save_16bit_model(
    engine: Any,
    save_dir: str,
    save_filename: str = "model.safetensors",
    exclude_frozen_parameters: bool = False,
) -> bool:
    """Write the consolidated model in its working precision to one file, from rank 0.

    Always True.
    """
    from hf_zero.checkpoint import save_whole

    save_whole(engine, save_dir, save_filename, exclude_frozen_parameters)
    return True


def save_checkpoint(
    engine: Any,
    save_dir: str,
    tag: str | None = None,
    client_state: dict[str, Any] | None = None,
    save_latest: bool = True,
    exclude_frozen_parameters: bool = False,
    blocking: bool | None = None,
    keep: int | None = None,
) -> bool:
    """Save model, optimizer, scheduler and counters, sharded, into ``save_dir/tag``
    (collective); see checkpoint/FORMAT.md.

    ``blocking=False`` (None: as ``checkpoint.async_save`` of the configuration says) returns
    once the state is copied to host memory, and a thread writes it while training goes on. What
    fails then is raised on all ranks at the end of one of the next steps, by the next save or
    load, or by :meth:`wait_for_checkpoint`, whichever comes first. The checkpoint appears when
    it is whole. ``keep``: how many checkpoints stay in ``save_dir`` whose tags differ by their
    numbers alone; where no tag is passed ``checkpoint.keep`` of the configuration is the
    default. Raises CheckpointError on all ranks; what was saved before stays.
    """
    from hf_zero import checkpoint

    refuse_half_done(engine.updater, "save_checkpoint()")
    engine.take_user_writes()
    if keep is None and tag is None:
        keep = engine.config.checkpoint.keep
    if engine.window_is_open and engine.global_rank == 0:
        logger.warning(
            "the save of %s is in the middle of an accumulation window: the gradients of its "
            "%d micro-batches so far are not saved, and a "
            "run that resumes begins the window anew; save after the step that ends a window",
            save_dir,
            engine.accumulation.micro_batches,
        )
    engine.wait_for_checkpoint(f"the save of {save_dir}")
    in_background = engine.config.checkpoint.async_save if blocking is None else not blocking
    with span("save", str(tag or save_dir)):
        checkpoint.save(
            engine,
            save_dir,
            tag,
            client_state or {},
            exclude_frozen_parameters,
            save_latest,
            keep,
            engine.async_saves.start() if in_background else None,
        )
    return True


def load_checkpoint(
    engine: Any,
    load_dir: str,
    tag: str | None = None,
    load_module_strict: bool = True,
    load_optimizer_states: bool = True,
    load_lr_scheduler_states: bool = True,
    load_module_only: bool = False,
    verify: bool = False,
    load_rng: bool = False,
    **unused: Any,
) -> tuple[str | None, dict[str, Any]]:
    """Resume from ``load_dir`` on any number of ranks and any stage (collective): (path,
    client_state).

    ``verify`` checks the hashes of all files first; ``load_rng`` restores this rank's random
    generators, too.
    """
    from hf_zero import checkpoint

    if unused:
        raise PartitionError(
            f"load_checkpoint does not know {sorted(unused)}; drop these arguments"
        )
    engine.wait_for_checkpoint(f"the load of {load_dir}")
    if engine.updater is not None:
        engine.updater.drop_early()
    with engine.schedule.writing():
        answer = checkpoint.load(
            engine,
            load_dir,
            tag,
            load_module_strict,
            load_optimizer_states,
            load_lr_scheduler_states,
            load_module_only,
            verify=verify,
            load_rng=load_rng,
        )
    engine.accumulation.micro_batches = 0
    engine.zero_grad()
    engine.publish_scale()
    return answer
