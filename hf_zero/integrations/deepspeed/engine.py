"""The engine under DeepSpeed's names: what scripts, Accelerate and transformers ask of theirs."""

from __future__ import annotations

import inspect
from functools import wraps
from typing import Any

from hf_zero.core.engine import Engine
from hf_zero.initialize import initialize as _initialize
from hf_zero.initialize import initialize_as

_SIGNATURE = inspect.signature(_initialize)


class DeepSpeedEngine(Engine):
    """An :class:`hf_zero.Engine` that also answers what DeepSpeed's engine answers."""

    def get_batch_info(self) -> tuple[int, int, int]:
        """Samples of a step, samples of a micro-batch on one rank, micro-batches of a step."""
        return (
            self.train_batch_size(),
            self.train_micro_batch_size_per_gpu(),
            self.gradient_accumulation_steps(),
        )

    def gradient_clipping(self) -> float:
        """The norm that gradients are clipped to; 0.0: never."""
        return float(self.config.gradient_clipping or 0.0)

    def get_mom(self) -> list[Any]:
        """Each group's momentum or betas, whichever its optimizer has; None for neither."""
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        return [group.get("betas", group.get("momentum")) for group in groups]

    def dynamic_loss_scale(self) -> bool:
        return bool(self.scaler.dynamic)

    def fp16_enabled(self) -> bool:
        return self.config.precision == "fp16"

    def bfloat16_enabled(self) -> bool:
        return self.config.precision == "bf16"

    def zero_optimization(self) -> bool:
        return bool(self.stage > 0)

    def zero_optimization_stage(self) -> int:
        return self.config.stage

    def zero_optimization_partition_gradients(self) -> bool:
        return bool(self.stage >= 2)

    def zero_optimization_partition_weights(self) -> bool:
        return bool(self.stage == 3)

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        return bool(self.config.zero.gather_16bit_weights_on_model_save)

    def _zero3_consolidated_16bit_state_dict(
        self, exclude_frozen_parameters: bool = False
    ) -> dict[str, Any] | None:
        """The whole model on rank 0, None elsewhere (collective)."""
        return self._consolidated_16bit_state_dict(exclude_frozen_parameters)


@wraps(_initialize)
def initialize(*args: Any, **kwargs: Any) -> Any:
    """As :func:`hf_zero.initialize`; the engine is a :class:`DeepSpeedEngine`."""
    given = _SIGNATURE.bind(*args, **kwargs)
    given.apply_defaults()
    return initialize_as(DeepSpeedEngine, *given.args)
