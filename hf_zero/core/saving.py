"""What an engine saves and loads: whole state dicts, and checkpoints in shards; those that a
thread writes beside the training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hf_zero.core.consolidate import consolidated, whole_state_dict
from hf_zero.core.trouble import refuse_half_done
from hf_zero.distributed.consensus import STOP
from hf_zero.errors import PartitionError
from hf_zero.logs import logger
from hf_zero.spans import span

SAVE_FAILED = STOP - 1  # less the number of the save: what ranks tell each other of it


class Saving(nn.Module):
    """Methods of :class:`hf_zero.core.engine.Engine` that take the model out whole or in shards."""

    module: nn.Module
    _micro: int
    zero_grad: Callable[..., None]
    _publish_scale: Callable[[], None]

    def __init__(self) -> None:
        super().__init__()
        # a hf_zero.checkpoint.async_save.AsyncSaver, from the first save beside the training on
        self._behind: Any = None

    def state_dict(  # type: ignore[override]
        self, *args: Any, rank0_only: bool = False, **kwargs: Any
    ) -> dict[str, Any] | None:
        """The consolidated model's state dict, as the bare model's.

        ``rank0_only``: others get None, and hold one unit at a time.
        """
        if rank0_only:
            return whole_state_dict(self, everywhere=False)
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        return self.module.load_state_dict(state_dict, strict=strict, assign=assign)

    def consolidated(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Whole parameters on the CPU, one unit at a time, under their first names (collective:
        exhaust it on every rank).
        """
        return consolidated(self, dtype)

    def _zero3_consolidated_16bit_state_dict(
        self, exclude_frozen_parameters: bool = False
    ) -> dict[str, Any] | None:
        return whole_state_dict(self, everywhere=False, exclude_frozen=exclude_frozen_parameters)

    _consolidated_16bit_state_dict = _zero3_consolidated_16bit_state_dict

    def save_16bit_model(
        self,
        save_dir: str,
        save_filename: str = "model.safetensors",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write the consolidated model in its working precision to one file, from rank 0.

        Always True.
        """
        from hf_zero.checkpoint import save_whole

        engine: Any = self
        save_whole(engine, save_dir, save_filename, exclude_frozen_parameters)
        return True

    def save_checkpoint(
        self,
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

        engine: Any = self
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
                engine._micro,
            )
        self.wait_for_checkpoint(f"the save of {save_dir}")
        beside = engine.config.checkpoint.async_save if blocking is None else not blocking
        behind = self._beside_the_training() if beside else None
        with span("save", str(tag or save_dir)):
            checkpoint.save(
                engine,
                save_dir,
                tag,
                client_state or {},
                exclude_frozen_parameters,
                save_latest,
                keep,
                behind,
            )
        return True

    def wait_for_checkpoint(self, who: str = "", below: str | None = None) -> None:
        """Return when no checkpoint is being written any more. Raises CheckpointError, on all
        ranks, if it could not be.

        ``who`` waits is logged where it takes time. ``below``: wait only for what is being written
        in this folder. Every rank must call it, or none.
        """
        if self._behind is not None:
            self._behind.wait(who, None if below is None else Path(below))

    def _last_save(self) -> Exception | None:
        """Let staging memory go once nothing is being written; what was wrong with the last
        save.
        """
        behind, self._behind = self._behind, None
        try:
            if behind is not None:
                behind.wait("destroy")
        except Exception as error:
            return error
        return None

    def _beside_the_training(self) -> Any:
        """The thread's side of saves."""
        from hf_zero.checkpoint.async_save import AsyncSaver

        engine: Any = self
        if self._behind is None:
            self._behind = AsyncSaver(
                engine.mesh, engine.global_rank, engine.world_size, engine.device
            )
            if engine.mesh.consensus is not None:
                # all ranks hear of a failure after the same step
                engine.mesh.consensus.serve_out_of_order_gathers(engine.schedule.read)
        return self._behind

    def _tell_of_failed_save(self) -> None:
        """Before the ranks meet at the end of a step: rank 0 has seen that a save has failed."""
        engine: Any = self
        if (
            self._behind is not None
            and self._behind.failed
            and engine.global_rank == 0
            and engine.mesh.consensus is not None
        ):
            engine.mesh.consensus.broadcast_event(SAVE_FAILED - self._behind.number)

    def _raise_failed_save(self) -> None:
        """At the end of a step: raise what a save beside the training has met with, on all ranks
        after the same step.
        """
        engine: Any = self
        if self._behind is None:
            return
        consensus = engine.mesh.consensus
        if (
            self._behind.failed
            if consensus is None
            else SAVE_FAILED - self._behind.number in consensus.events
        ):
            self._behind.wait()

    def load_checkpoint(
        self,
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
        engine: Any = self
        self.wait_for_checkpoint(f"the load of {load_dir}")
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
        self._micro = 0
        self.zero_grad()
        self._publish_scale()
        return answer
