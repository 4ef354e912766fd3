"""DeepSpeed's getters of an engine: what it computes, what its configuration says, its data loaders
and whole weights; and the reasons why other ones are missing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.utils.data import DataLoader, DistributedSampler

from hf_zero.config.techniques import CURRICULUM, TOKEN_DROP
from hf_zero.deepspeed.checkpoint_files import TorchCheckpointEngine
from hf_zero.deepspeed.groups import (
    get_data_parallel_group,
    get_data_parallel_world_size,
    get_sequence_parallel_group,
    get_tensor_parallel_rank,
    get_tensor_parallel_world_size,
)
from hf_zero.deepspeed.modules import LEFT_OUT
from hf_zero.deepspeed.moe_utils import has_moe_layers
from hf_zero.deepspeed.timers import SynchronizedWallClockTimer, ThroughputTimer
from hf_zero.deepspeed.zero_sections import ZERO, DeepSpeedZeroConfig
from hf_zero.device import kinds
from hf_zero.distributed.backends import native_backend
from hf_zero.distributed.parallel_groups import readers
from hf_zero.engine import Engine
from hf_zero.errors import ConfigError
from hf_zero.measures.flops_profiler import FlopsProfiler, StepProfile
from hf_zero.measures.monitors import DeepSpeedMonitorConfig, MonitorMaster
from hf_zero.measures.step import EngineMeasures
from hf_zero.setup.training_loader import Collate, data_loader
from hf_zero.techniques.data_sampling import follow
from hf_zero.techniques.layer_drop import KEY as LAYER_DROP
from hf_zero.techniques.layer_drop import LayerDrop
from hf_zero.zero.layout.precision import COMPUTE

GETTERS: dict[str, tuple[str, object]] = {
    "autotp_size": ("tensor_parallel.autotp_size", 0),
    "curriculum_learning_enabled": (f"{CURRICULUM}.enabled", False),
    "managed_gradient_accumulation": ("managed_gradient_accumulation", True),
    "random_ltd_enabled": (f"{TOKEN_DROP}.enabled", False),
    "steps_per_print": ("steps_per_print", None),
    "wall_clock_breakdown": ("wall_clock_breakdown", False),
}
"""Methods that return the value of a key of the configuration: (its path, its default)."""

SWITCHED_OFF = {"flops_profiler": "flops_profiler.enabled is false; write true"}
"""Attributes that an engine lacks by its configuration, and why."""

if TYPE_CHECKING:
    from torch.utils.data import Dataset, Sampler

    class _AnyEngine(Engine):
        """Any engine with the methods of ours: also the reference of hf_zero/parity."""

else:
    _AnyEngine = object


class Getters(_AnyEngine):
    """DeepSpeed's getters of an engine."""

    # arguments of ``deepspeed.initialize``
    collate_fn: Collate | None = None
    mpu: object = None
    # set while a Trainer writes one of its checkpoints
    saving_in_checkpoint = False
    loaded_checkpoint_tag: str | None = None  # of the last load
    losses: object = None  # DeepSpeed's sum for its monitors; not kept here

    @cached_property
    def timers(self) -> SynchronizedWallClockTimer:
        """Timers for the script; :meth:`get_wall_clock_timers` has those of the engine."""
        return SynchronizedWallClockTimer()

    @cached_property
    def checkpoint_engine(self) -> TorchCheckpointEngine:
        """Writer of the script's files; :meth:`save_checkpoint` writes checkpoints."""
        return TorchCheckpointEngine(self.config)

    @property
    def progressive_layer_drop(self) -> ProgressiveLayerDrop | None:
        """The engine's layer drop under DeepSpeed's names; None if it is off."""
        drop = self.feature_set.get(LAYER_DROP, LayerDrop)
        return None if drop is None else ProgressiveLayerDrop(drop)

    def get_sequence_parallel_group(self) -> object:
        """Return the process group of the ranks that read parts of the same sequences. Raises
        ConfigError if the job is not sequence parallel.
        """
        return get_sequence_parallel_group()

    def get_mom(self) -> list[object]:
        """Return each group's momentum or betas, whichever its optimizer has; None for neither."""
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        return [group.get("betas", group.get("momentum")) for group in groups]

    def gradient_clipping(self) -> float:
        """Return the norm that gradients are clipped to; 0.0: never."""
        return float(self.config.gradient_clipping or 0.0)

    def dynamic_loss_scale(self) -> bool:
        return bool(self.scaler.dynamic)

    def fp16_enabled(self) -> bool:
        return self.config.precision == "fp16"

    def bfloat16_enabled(self) -> bool:
        return self.config.precision == "bf16"

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """Return the dtypes of the model and of accumulated gradients."""
        summed = self.config.gradient_accumulation_dtype
        return COMPUTE[self.config.precision], COMPUTE[summed or self.config.precision]

    @property
    def communication_data_type(self) -> torch.dtype:
        """The dtype of reductions."""
        return COMPUTE[self.config.communication_data_type or self.config.precision]

    def zero_optimization(self) -> bool:
        return bool(self.stage > 0)

    def zero_optimization_stage(self) -> int:
        return self.config.stage

    def zero_optimization_partition_gradients(self) -> bool:
        return bool(self.stage >= 2)

    def zero_optimization_partition_weights(self) -> bool:
        return bool(self.stage == 3)

    def zero_offload_optimizer(self) -> object:
        """Return the section ``offload_optimizer``: its keys are attributes; None without it."""
        return self._zero_section().offload_optimizer

    def zero_offload_param(self) -> object:
        """Return the section ``offload_param``, with its keys as attributes; None without it."""
        return self._zero_section().offload_param

    def _zero_section(self) -> DeepSpeedZeroConfig:
        return DeepSpeedZeroConfig(**self.config.to_dict().get(ZERO, {}))

    def zero_cpu_offload(self) -> bool:
        """Return whether optimizer state is offloaded to host memory."""
        return self.config.offload_optimizer.device == "cpu"

    def zero_use_cpu_optimizer(self) -> bool:
        """Return whether the update runs on the host."""
        return bool(self.config.offload_optimizer.on)

    def get_model_parallel_rank(self) -> int:
        """Return the tensor-parallel rank of this process."""
        return get_tensor_parallel_rank()

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """Return whether a save of the model gathers whole weights: always if a script asks for it.
        The key decides for checkpoints of a Trainer at stage 3, which write the model beside the
        shards (:attr:`saving_in_checkpoint`).
        """
        return (
            not self.saving_in_checkpoint
            or self.config.stage < 3
            or self.config.zero.gather_16bit_weights_on_model_save
        )

    def optimizer_name(self) -> str | None:
        """Return the class name of the optimizer; None without one."""
        return None if self.optimizer is None else type(self.optimizer).__name__

    def get_data_parallel_rank(self) -> int:
        return readers()[1]

    @property
    def dp_world_size(self) -> int:
        """Number of ranks that data is divided among, by :meth:`get_data_parallel_rank`."""
        return get_data_parallel_world_size()

    @property
    def sparse_tensor_module_names(self) -> set[str]:
        """Modules whose gradients are sparse: embeddings with ``sparse=True``."""
        named = self.module.named_modules()
        return {name for name, module in named if getattr(module, "sparse", False) is True}

    @property
    def seq_dp_world_size(self) -> int:
        """The value of :attr:`dp_world_size`: ranks with parts of a sequence count there."""
        return self.dp_world_size

    @property
    def data_parallel_group(self) -> object:
        """The process group of all ranks."""
        return get_data_parallel_group()

    @property
    def basic_optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer: no other object wraps it."""
        return self.optimizer

    @property
    def inside_no_sync_ctxt(self) -> bool:
        return bool(self.in_no_sync)

    @property
    def param_names(self) -> dict[torch.nn.Parameter, str]:
        """The names of the model's parameters."""
        return {parameter: name for name, parameter in self.module.named_parameters()}

    @property
    def mp_world_size(self) -> int:
        """Number of ranks that share a layer."""
        return get_tensor_parallel_world_size()

    pipeline_parallelism = False

    @property
    def has_moe_layers(self) -> bool:
        """Return whether the model has layers of the class MoE."""
        return has_moe_layers(self.module)[0]

    @property
    def dist_backend(self) -> str:
        return native_backend(self.device)

    @cached_property
    def tput_timer(self) -> ThroughputTimer:
        """Timer of samples a second. It runs from its first access on, because a step then waits
        for the device several times.
        """
        return ThroughputTimer(
            batch_size=self.train_batch_size(), steps_per_output=self.config.steps_per_print
        )

    def get_wall_clock_timers(self) -> dict[str, float]:
        """Return the milliseconds of the last micro-batch (``fwd_microstep``, ``bwd_microstep``,
        ``step_microstep``) and of the last accumulation window (``fwd``, ``bwd``, ``step``); empty
        without ``wall_clock_breakdown``. Reductions are part of the backward, which they overlap.
        On a device they are read a step late.
        """
        if not isinstance(self.measures, EngineMeasures):
            return {}
        times = self.measures.times
        return {f"{part}_microstep": ms for part, ms in times.micro_batch.items()} | times.window

    @cached_property
    def monitor(self) -> MonitorMaster:
        """The enabled monitors, to which a script may write events of its own, too."""
        if isinstance(self.measures, EngineMeasures):
            return self.measures.monitor
        return MonitorMaster(DeepSpeedMonitorConfig.from_config(self.config))

    @property
    def flops_profiler(self) -> FlopsProfiler:
        """The profiler of the section ``flops_profiler``. Raises AttributeError if it is off."""
        profile = getattr(self.measures, "profile", None)
        if profile is None:
            raise AttributeError("flops_profiler")  # :meth:`__getattr__` says why
        return cast(StepProfile, profile).profiler

    def log_level(self) -> str | None:
        """Return ``log_level`` of the configuration, such as "ERROR"; None: it is unchanged."""
        return self.config.log_level and self.config.log_level.upper()

    def deepspeed_io(
        self,
        dataset: Dataset[object],
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Sampler[int] | None = None,
        collate_fn: Collate | None = None,
        num_local_io_workers: int | None = None,
    ) -> DataLoader[object]:
        """Return a loader that gives each rank its share of ``dataset`` in micro-batches, shuffled
        only for the route "train", whose loader reads in this process, into memory that is not
        pinned. Raises ConfigError if it is no Dataset.
        """
        micro = self.train_micro_batch_size_per_gpu() if batch_size is None else batch_size
        collate = collate_fn or self.collate_fn
        if data_sampler is None and route == "train":
            config = self.config_with_batches(micro, self.gradient_accumulation_steps())
            loader = data_loader(dataset, collate, config)
            assert loader is not None
            follow(self.feature_set, getattr(loader, "data_sampler", None))
            return loader
        if not hasattr(dataset, "__getitem__"):
            raise ConfigError(f"dataset is a {type(dataset).__name__}; pass a torch Dataset")
        sampler = data_sampler or DistributedSampler(dataset, *readers(), shuffle=False)
        return DataLoader(
            dataset,
            batch_size=micro,
            sampler=sampler,
            collate_fn=collate,
            num_workers=num_local_io_workers or 0,
            pin_memory=pin_memory and not kinds.is_synchronous(self.device),
            drop_last=bool(self.config.dataloader_drop_last),
        )

    def module_state_dict(
        self,
        destination: dict[str, object] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, object]:
        """Return the whole model's state dict (collective at stage 3)."""
        options: dict[str, Any] = {} if destination is None else {"destination": destination}
        state: dict[str, object] | None = self.state_dict(
            prefix=prefix, keep_vars=keep_vars, **options
        )
        assert state is not None  # which rank0_only gives
        if exclude_frozen_parameters:
            for name, parameter in self.module.named_parameters():
                if not parameter.requires_grad:
                    state.pop(prefix + name, None)
        return state

    def save_fp16_model(self, save_dir: str, save_filename: str = "pytorch_model.bin") -> bool:
        """Call :meth:`save_16bit_model`, whose former name this is."""
        return self.save_16bit_model(save_dir, save_filename)

    # visible to type checkers, which do not see the methods of GETTERS
    def __getattr__(self, name: str) -> Any:  # type: ignore[override]
        try:
            return super().__getattr__(name)  # type: ignore[misc]
        except AttributeError:
            reason = LEFT_OUT["DeepSpeedEngine"].get(name) or SWITCHED_OFF.get(name)
            if reason is None:
                raise
            raise AttributeError(f"the engine has no attribute {name!r}: {reason}") from None


def getter(path: str, default: object) -> Callable[[object], object]:
    """Return a method that returns the configuration's value under ``path``."""

    def get(self: Any) -> object:
        value: object = self.config.to_dict("default")
        for part in path.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return default if value is None else value

    get.__doc__ = f"``{path}`` of the configuration; {default!r} where it is not written."
    return get


for _name, (_path, _default) in GETTERS.items():
    setattr(Getters, _name, getter(_path, _default))


class ReportingEngine(Getters, Engine):  # type: ignore[misc]
    """An :class:`hf_zero.Engine` with DeepSpeed's getters."""


class ProgressiveLayerDrop:
    """The schedule of layer drop, for scripts; models need not read it to drop their blocks."""

    def __init__(self, technique: LayerDrop):
        self._technique = technique

    def get_theta(self) -> float:
        """Return theta(t) of the next forward: the probability that the last block is kept."""
        return self._technique.theta

    def get_state(self) -> dict[str, object]:
        """Return the keywords that DeepSpeed's engine passed to a model's forward."""
        return {"progressive_layer_drop": True, "pld_theta": self.get_theta()}
