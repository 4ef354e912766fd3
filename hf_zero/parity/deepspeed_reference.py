"""The reference engine under DeepSpeed's names, for scripts that import deepspeed, and for
Accelerate and Transformers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, DistributedSampler

from hf_zero.deepspeed.engine_getters import Getters
from hf_zero.distributed import process_group
from hf_zero.parity.reference import LossScale, Reference
from hf_zero.techniques.training_loader import data_loader

if TYPE_CHECKING:
    _ReferenceBase = Reference  # the getters are typed as those of an engine
else:

    class _ReferenceBase(Getters, Reference):
        pass


class DeepSpeedReference(_ReferenceBase):
    """A :class:`Reference` with the methods of DeepSpeed's engine."""

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

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        return loss  # its backward gets the scale at the outputs of the model

    @contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        with self.no_sync():
            yield

    def allreduce_gradients(self, bucket_size: int | None = None) -> None:
        """Do nothing: a step averages what is not averaged yet."""

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Any = None,
        collate_fn: Any = None,
        num_local_io_workers: int | None = None,
    ) -> Any:
        """Return a loader of this rank's share of ``dataset``."""
        micro = batch_size or self.train_micro_batch_size_per_gpu()
        collate = collate_fn or self.collate_fn
        if data_sampler is None and route == "train":
            sizes = {"train_micro_batch_size_per_gpu": micro, "train_batch_size": None}
            return data_loader(dataset, collate, self.config.override(sizes, "set by the script"))
        ranks = self.world_size, self.global_rank
        sampler = data_sampler or DistributedSampler(dataset, *ranks, shuffle=False)
        return DataLoader(
            dataset,
            batch_size=micro,
            sampler=sampler,
            collate_fn=collate,
            num_workers=num_local_io_workers or 0,
            drop_last=bool(self.config.dataloader_drop_last),
        )

    def module_state_dict(
        self,
        destination: dict[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Any]:
        state = self.module.state_dict(prefix=prefix, keep_vars=keep_vars)
        if exclude_frozen_parameters:
            for name, parameter in self.module.named_parameters():
                if not parameter.requires_grad:
                    state.pop(prefix + name, None)
        return state

    def _zero3_consolidated_16bit_state_dict(
        self, exclude_frozen_parameters: bool = False
    ) -> dict[str, Any] | None:
        state = self.module_state_dict(exclude_frozen_parameters=exclude_frozen_parameters)
        return state if self.global_rank == 0 else None

    _consolidated_16bit_state_dict = _zero3_consolidated_16bit_state_dict

    def save_fp16_model(self, save_dir: str, save_filename: str = "pytorch_model.bin") -> bool:
        return self.save_16bit_model(save_dir, save_filename)

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
