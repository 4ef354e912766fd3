"""What an engine saves and loads: whole state dicts, and checkpoints in shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from hf_zero.core.consolidate import consolidated, whole_state_dict
from hf_zero.core.trouble import refuse_half_done
from hf_zero.errors import PartitionError


class Saving(nn.Module):
    """Methods of :class:`hf_zero.core.engine.Engine` that take the model out whole or in shards."""

    module: nn.Module
    _micro: int
    zero_grad: Callable[..., None]
    _publish_scale: Callable[[], None]

    def state_dict(self, *args: Any, rank0_only: bool = False, **kwargs: Any) -> dict[str, Any] | None:  # type: ignore[override]
        """The consolidated model's state dict, as the bare model's. ``rank0_only``: others get None, and hold one unit at a time."""
        if rank0_only:
            return whole_state_dict(self, everywhere=False)
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        return self.module.load_state_dict(state_dict, strict=strict, assign=assign)

    def consolidated(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Whole parameters on the CPU, one unit at a time, under their first names (collective: exhaust it on every rank)."""
        return consolidated(self, dtype)

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any] | None:
        return whole_state_dict(self, everywhere=False, exclude_frozen=exclude_frozen_parameters)

    _consolidated_16bit_state_dict = _zero3_consolidated_16bit_state_dict

    def save_16bit_model(self, save_dir: str, save_filename: str = "model.safetensors", exclude_frozen_parameters: bool = False) -> bool:
        """Write the consolidated model in its working precision to one file, from rank 0. Always True."""
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
    ) -> bool:
        """Save model, optimizer, scheduler and counters, sharded, into ``save_dir/tag`` (collective); see checkpoint/FORMAT.md."""
        from hf_zero import checkpoint

        engine: Any = self
        refuse_half_done(engine.updater, "save_checkpoint()")
        checkpoint.save(engine, save_dir, tag, client_state or {}, exclude_frozen_parameters, save_latest)
        return True

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
        """Resume from ``load_dir`` on any number of ranks and any stage (collective): (path, client_state).

        ``verify`` checks the hashes of all files first; ``load_rng`` restores this rank's random generators, too.
        """
        from hf_zero import checkpoint

        if unused:
            raise PartitionError(f"load_checkpoint does not know {sorted(unused)}; drop these arguments")
        engine: Any = self
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
