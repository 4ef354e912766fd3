"""The engine under DeepSpeed's names, as scripts, Accelerate and transformers use it."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from operator import attrgetter
from typing import Any

import torch

from hf_zero.deepspeed.checkpoint_targets import agreed_target, nothing_to_load, tag_of
from hf_zero.deepspeed.engine_getters import ReportingEngine
from hf_zero.deepspeed.loss_scalers import EngineLossScaler
from hf_zero.deepspeed.modules import refuse
from hf_zero.deepspeed.state_offload import StatesAway, checked
from hf_zero.deepspeed.wrapped_optimizer import hide_wrapped, show_wrapped
from hf_zero.device import kinds
from hf_zero.errors import UnreducedGradientsError, UnscalableLossError
from hf_zero.zero.access.consolidate import whole_state_dict
from hf_zero.zero.reduce.losses import Fp16LossScaler


class _ScaledLoss(torch.autograd.Function):
    """A loss times the fp16 scale, whose backward omits that factor: the engine applies it where a
    plain backward reaches the outputs of the model.
    """

    @staticmethod
    def forward(ctx: object, loss: torch.Tensor, scale: float) -> torch.Tensor:
        return loss * scale

    @staticmethod
    def backward(ctx: object, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return grads[0], None


def _counter(name: str) -> Any:
    """Return a property for a counter of the engine, which scripts for DeepSpeed set, too."""

    def write(engine: DeepSpeedEngine, value: int) -> None:
        setattr(engine.counters, name, int(value))
        if name == "micro_steps":  # DeepSpeed derives the place in the window from it
            engine.accumulation.set_micro_steps(int(value))

    return property(attrgetter(f"counters.{name}"), write)


class DeepSpeedEngine(ReportingEngine):
    """An :class:`hf_zero.Engine` with the methods and properties of DeepSpeed's engine."""

    global_steps: int = _counter("global_steps")
    global_samples: int = _counter("global_samples")
    micro_steps: int = _counter("micro_steps")
    skipped_steps: int = _counter("skipped_steps")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._states_away = StatesAway()

    def _loss_scaler(self) -> Fp16LossScaler:
        """Return the native scaler; at stage 0 each overflow halves it, whatever ``hysteresis``."""
        config = self.config
        if config.stage == 0:
            config = replace(config, fp16=replace(config.fp16, hysteresis=1))
        return Fp16LossScaler.from_config(config)

    def set_scale_on_optimizer(self) -> None:
        """Set the loss scale on the optimizer, also as the object of DeepSpeed's optimizers."""
        super().set_scale_on_optimizer()
        if self.optimizer is not None and self._shown_scaler is None:
            counters = self.counters
            self._shown_scaler = EngineLossScaler(self.scaler, lambda: counters.global_steps)
            self.optimizer.loss_scaler = self._shown_scaler
            self.optimizer.loss_scale_config = self._shown_scaler
            self.optimizer.needs_scaler = self._shown_scaler.needs_scaler
            self.optimizer.dynamic_loss_scale = self._shown_scaler.dynamic
            if self.config.stage or self.config.precision != "fp32":
                show_wrapped(self.optimizer)

    _shown_scaler: EngineLossScaler | None = None

    def forward(self, *args: object, **kwargs: object) -> Any:
        if self.training and "tput_timer" in self.__dict__:
            self.tput_timer.start()
        return super().forward(*args, **kwargs)

    def backward(
        self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True
    ) -> torch.Tensor:
        """Run :meth:`hf_zero.Engine.backward`; return the loss divided by the accumulation steps,
        or with ``scale_wrt_gas=False`` the loss itself.
        """
        self.changes.refuse_until_step("a backward")
        super().backward(loss, retain_graph, scale_wrt_gas)
        steps = self.gradient_accumulation_steps()
        return loss / steps if scale_wrt_gas and steps != 1 else loss

    def step(self, lr_kwargs: Mapping[str, object] | None = None) -> None:
        """Run :meth:`hf_zero.Engine.step`. ``lr_kwargs`` are passed to the scheduler's step, which
        an update in the backward has made: it refuses them.
        """
        before = self.accumulation.updates
        self._step(lr_kwargs)
        ends = self.accumulation.updates > before
        if ends and self.optimizer is not None:
            self.optimizer._global_grad_norm = self.grad_norm_tensor()
        if "tput_timer" in self.__dict__:
            self.tput_timer.stop(global_step=ends)

    def _step(self, lr_kwargs: Mapping[str, object] | None) -> None:
        scheduler = self.lr_scheduler
        if not lr_kwargs or scheduler is None:
            super().step()
            return
        self.changes.refuse_unconfirmed("step(lr_kwargs)")
        self.lr_scheduler = None
        try:
            super().step()
        finally:
            self.lr_scheduler = scheduler
        if self.was_step_applied():
            scheduler.step(**lr_kwargs)

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return ``loss`` times the loss scale, for a ``backward()`` of its own, with the same
        gradients as :meth:`backward`. Raises UnscalableLossError without an optimizer, or for
        anything but a scalar with a graph.
        """
        if self.optimizer is None:
            raise UnscalableLossError(
                "scale() needs an optimizer; pass one to deepspeed.initialize"
            )
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise UnscalableLossError(
                "scale() needs a loss that is a scalar tensor with a graph; call "
                "backward(gradient) of other outputs"
            )
        scaled: torch.Tensor = _ScaledLoss.apply(loss, self.loss_scale())
        return scaled

    @contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """Run the enclosed backwards as one step, with gradients reduced at the end of the block
        (collective); at stages 2 and 3 in every backward, as in :meth:`no_sync`, with an equal
        result. Raises UnreducedGradientsError inside another such block, and UnmanagedWindowError
        if every step ends a window.
        """
        self.accumulation.refuse_unmanaged("coalesce_grad_reduction()")
        if self.in_no_sync:
            raise UnreducedGradientsError(
                "coalesce_grad_reduction() cannot be nested inside another no_sync context; leave "
                "that block first"
            )
        with self.no_sync():
            yield
        self.reduce_gradients()

    def allreduce_gradients(self, bucket_size: int | None = None) -> None:
        """Reduce gradients left unreduced by backwards (collective); ``bucket_size`` is ignored."""
        self.reduce_gradients()

    def offload_states(
        self,
        include: Iterable[object] | None = None,
        device: object = "cpu",
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Move training state from the device to host memory until :meth:`reload_states`.

        ``include``: states to move, as :class:`OffloadStateTypeEnum` or its values; None: all.
        Master weights that gathers cast (``keep_parameter_shards`` is false) are ``lp_params``,
        too, and stay unless both are named. Forwards, training, saving and access to state raise
        PartitionError until it is back; GatheredParameters only if parameters are among it.
        Does nothing if the device is the host. Raises ConfigError for a device other than the CPU.
        """
        chosen = checked(include, device)
        if not kinds.is_synchronous(self.device):
            self.sharded_model.wait_until_writable()
            self._states_away.send(self, chosen, pin_memory, non_blocking)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Move the state of :meth:`offload_states` back to the device."""
        self._states_away.reload(self, non_blocking)

    def save_checkpoint(  # type: ignore[override]
        self, save_dir: str | os.PathLike[str], tag: object = None, *args: Any, **kwargs: Any
    ) -> bool:
        """Run :meth:`hf_zero.Engine.save_checkpoint` with rank 0's folder and tag."""
        folder, name = agreed_target(self, save_dir, tag)
        return super().save_checkpoint(folder, name, *args, **kwargs)

    def load_checkpoint(  # type: ignore[override]
        self,
        load_dir: str | os.PathLike[str],
        tag: object = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: object = None,
        **more: Any,
    ) -> tuple[str | None, dict[str, object]]:
        """Run :meth:`hf_zero.Engine.load_checkpoint`; return (None, {}), with a warning, if no tag
        is passed and the folder holds no checkpoint. With ``checkpoint.load_universal`` the tag is
        that of ``latest_universal``, if the file exists. Raises NotBuiltError for
        ``custom_load_fn``.
        """
        if self.changes.away:
            self.changes.refuse("a load")
        if custom_load_fn is not None:
            refuse(
                "load_checkpoint(custom_load_fn=...)",
                "call it yourself inside GatheredParameters(model.parameters(), modifier_rank=0)",
            )
        tag = tag_of(self, load_dir, tag)
        resumes = load_optimizer_states and not load_module_only
        if resumes:
            self.generations.note_run(load_dir)
        if tag is None:
            checkpoint = self.generations.choose(self, load_dir, tag, load_module_strict, resumes)
            if checkpoint.in_memory:
                load_dir, tag = str(checkpoint.directory), checkpoint.tag
        if nothing_to_load(load_dir, tag):
            return None, {}
        path, state = super().load_checkpoint(
            os.fspath(load_dir), tag, load_module_strict, load_optimizer_states,
            load_lr_scheduler_states, load_module_only, **more,
        )  # fmt: skip
        self.loaded_checkpoint_tag = os.path.basename(path) if path else None
        return path, state

    def empty_partition_cache(self) -> None:
        """Free unused device memory; the engine itself releases parameters between forwards."""
        gc.collect()
        if not kinds.is_synchronous(self.device):
            kinds.module_of(self.device).empty_cache()

    def destroy(self, gather: bool = False) -> None:
        """Run :meth:`hf_zero.Engine.destroy`, with the state of :meth:`offload_states` brought
        back: shards stay for another engine.
        """
        if not self.destroyed:
            self.reload_states()
        if self.optimizer is not None:
            hide_wrapped(self.optimizer)
        super().destroy(gather)

    def compile(
        self,
        backend: str = "inductor",
        compile_kwargs: dict[str, Any] | None = None,
        schedule: object = None,
        compiled_autograd_enabled: bool = False,
        **options: object,
    ) -> None:
        """Run :meth:`hf_zero.Engine.compile`. Raises NotBuiltError for a schedule of DeepCompile's
        passes, and for compiled autograd.
        """
        if schedule is not None or compiled_autograd_enabled:
            refuse("engine.compile(schedule=..., compiled_autograd_enabled=True)", "leave both out")
        super().compile(backend, compile_kwargs, **options)

    def _zero3_consolidated_16bit_state_dict(
        self, exclude_frozen_parameters: bool = False
    ) -> dict[str, object] | None:
        """Return the whole model's state dict on rank 0, None elsewhere (collective)."""
        return whole_state_dict(self, everywhere=False, exclude_frozen=exclude_frozen_parameters)

    # called by Accelerate if ranks share layers, at any stage
    _consolidated_16bit_state_dict = _zero3_consolidated_16bit_state_dict
