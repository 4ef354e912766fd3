"""The reference engine under DeepSpeed's names, for scripts that import deepspeed, and for
Accelerate and Transformers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hf_zero.deepspeed.engine_getters import Getters
from hf_zero.distributed import process_group
from hf_zero.parity.driven_reference import DrivenReference
from hf_zero.parity.precision import LossScale
from hf_zero.parity.reference import LATEST
from hf_zero.zero.layout.parameter import ZeroParamStatus

if TYPE_CHECKING:
    _ReferenceBase = DrivenReference  # the getters are typed as those of an engine
else:

    class _ReferenceBase(Getters, DrivenReference):
        pass


class DeepSpeedReference(_ReferenceBase):
    """A :class:`DrivenReference` with the methods of DeepSpeed's engine."""

    # arguments of ``deepspeed.initialize``
    collate_fn: Any = None
    mpu: Any = None

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if self.config.stage == 0:
            self.scaler = LossScale(self.config, hysteresis=1)
        if self.optimizer is not None:
            shown: Any = self.optimizer
            shown.cur_scale = shown.loss_scale = self.scaler.scale
        at_stage_3 = self.module.parameters() if self.config.stage == 3 else ()
        for number, parameter in enumerate(at_stage_3):
            whole: Any = parameter  # which scripts ask each parameter there
            whole.ds_status, whole.ds_id = ZeroParamStatus.AVAILABLE, number
            whole.ds_shape, whole.ds_numel = parameter.shape, parameter.numel()
            whole.ds_persist, whole.ds_active_sub_modules = True, set[int]()

    def backward(
        self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True
    ) -> torch.Tensor:
        """Run :meth:`Reference.backward`; return the loss divided by the accumulation steps."""
        super().backward(loss, retain_graph, scale_wrt_gas)
        steps = self.accumulation_steps
        return loss / steps if scale_wrt_gas and steps != 1 else loss

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """Run :meth:`Reference.step`; ``lr_kwargs`` are passed to the scheduler."""
        scheduler = self.lr_scheduler
        if lr_kwargs:
            self.lr_scheduler = None
        super().step()
        self.lr_scheduler = scheduler
        if lr_kwargs and scheduler is not None and self._applied:
            scheduler.step(**lr_kwargs)
        if self.optimizer is not None:
            shown: Any = self.optimizer
            shown.overflow, shown._global_grad_norm = not self._applied, self._norm
            shown.cur_scale = shown.loss_scale = self.scaler.scale

    def load_checkpoint(
        self, load_dir: Any = None, tag: str | None = None, *args: Any, **kwargs: Any
    ) -> tuple[str | None, dict[str, Any]]:
        """Run :meth:`Reference.load_checkpoint`; return None and {} for a folder without any."""
        if tag is None and not Path(self._folder(load_dir), LATEST).is_file():
            return None, {}
        return super().load_checkpoint(load_dir, tag, *args, **kwargs)

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        return loss  # its backward gets the scale at the outputs of the model

    @contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        with self.no_sync():
            yield

    def allreduce_gradients(self, bucket_size: int | None = None) -> None:
        """Do nothing: a step averages what is not averaged yet."""

    def _zero3_consolidated_16bit_state_dict(
        self, exclude_frozen_parameters: bool = False
    ) -> dict[str, Any] | None:
        state = self.module_state_dict(exclude_frozen_parameters=exclude_frozen_parameters)
        return state if self.global_rank == 0 else None

    _consolidated_16bit_state_dict = _zero3_consolidated_16bit_state_dict

    def offload_states(self, include: Iterable[Any] | None = None, **unused: Any) -> None:
        """Do nothing: state stays on the device."""

    def reload_states(self, non_blocking: bool = False) -> None:
        """Do nothing: state is on the device."""

    def empty_partition_cache(self) -> None:
        """Do nothing: nothing is cached."""

    def get_data_parallel_rank(self) -> int:
        return self.global_rank

    @property
    def dp_world_size(self) -> int:
        return process_group.get_world_size()

    def get_wall_clock_timers(self) -> dict[str, float]:
        return {}
