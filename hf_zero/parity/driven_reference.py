"""The reference engine with what the integrations call on an engine
(:class:`hf_zero.integrations.engine_protocol.EngineProtocol`): clipping between a backward and its
step, counts of micro-batches, and measures and techniques that do nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hf_zero.checkpoint.generations import Generations
from hf_zero.config import ZeroConfig
from hf_zero.config.resolving import ACCUMULATION, MICRO, TOTAL
from hf_zero.engine import Engine
from hf_zero.errors import ConfigError, PartitionError
from hf_zero.integrations.engine_protocol import HOLDER, EngineProtocol, hold
from hf_zero.parity.precision import DTYPES
from hf_zero.parity.reference import Reference
from hf_zero.zero.engine_parts import EngineFeatures
from hf_zero.zero.feature import FeatureSet
from hf_zero.zero.step.step_interfaces import StepMeasures


class DrivenReference(Reference):
    """A :class:`Reference` in a loop of Accelerate, Transformers or Lightning."""

    measures: StepMeasures[Any] = StepMeasures()
    generations = Generations()
    kept_when_frozen: frozenset[str] = frozenset()
    shard_only = False
    nbytes = 0  # of weights, gradients and the optimizer's state on this rank
    pass_is_under_way = False
    figures: Mapping[str, Any] = {}
    stop_requests: Any = SimpleNamespace(received=())

    def __init__(
        self, module: nn.Module, optimizer: torch.optim.Optimizer | None, config: ZeroConfig
    ):
        groups = [] if optimizer is None else optimizer.param_groups
        # the norm before a clipping by the script, in place of which the step does not clip
        self._unclipped_norm: torch.Tensor | None = None
        super().__init__(module, optimizer, config)
        self.group_parameters: list[list[nn.Parameter]] = [[*group["params"]] for group in groups]
        self.feature_set: EngineFeatures[Any] = FeatureSet()
        self.data_ranks = self.world_size
        hold(self)

    @property
    def in_no_sync(self) -> bool:
        return not self._syncs

    @property
    def held_micro_batches(self) -> int:
        return self._backwards

    @property
    def window_is_open(self) -> bool:
        return self._backwards > 0

    def holds_gradients(self) -> bool:
        return self._backwards > 0

    def _drop_gradients(self) -> None:
        super()._drop_gradients()
        self._unclipped_norm = None

    def set_batches(self, micro: int, accumulation_steps: int) -> None:
        self.config = self.config_with_batches(micro, accumulation_steps)
        self.accumulation_steps = accumulation_steps

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        self.set_batches(micro_batch_size, self.accumulation_steps)

    def trust_loader(self) -> None:
        """Do nothing: the reference compares no batches."""

    def rebuild_if_unfrozen(self, loads: bool = False) -> None:
        """Do nothing: what is unfrozen has a gradient from the next backward on."""

    def config_with_batches(self, micro: int, accumulation_steps: int) -> ZeroConfig:
        total = micro * accumulation_steps * self.world_size
        sizes = {MICRO: micro, ACCUMULATION: accumulation_steps, TOTAL: total}
        return self.config.override(sizes, "set by the script")

    def run_step_hooks(self) -> None:
        if self.optimizer is not None:
            self.zero_grad()
            type(self.optimizer).step(self.optimizer)

    def measure_gradient(self) -> torch.Tensor:
        self._finish_gradients()
        return nn.utils.get_total_norm(self._gradients()) / self.scaler.scale

    def _gradients(self) -> list[torch.Tensor]:
        grads = [self.updated(parameter).grad for parameter in self.trained]
        return [gradient for gradient in grads if gradient is not None]

    def gradient_norm(self) -> float:
        return float(self.measure_gradient())

    def clip_gradient(self, limit: float) -> torch.Tensor:
        norm = self.measure_gradient()
        if self._unclipped_norm is None:
            self._unclipped_norm = norm
        if not math.isinf(limit):
            updated = [self.updated(parameter) for parameter in self.trained]
            nn.utils.clip_grads_with_norm_(updated, limit, norm)
        return norm

    def _update(self, optimizer: torch.optim.Optimizer) -> None:
        limit, norm = self.max_norm, self._unclipped_norm
        if norm is not None:
            self.max_norm = 0.0
        try:
            super()._update(optimizer)
        finally:
            self.max_norm = limit
        if norm is not None:
            self._norm = norm

    def updated(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return what the optimizer updates in place of ``parameter``: its master weights in 16
        bits.
        """
        known: Mapping[Any, torch.Tensor] = self.masters
        return known.get(parameter, parameter)

    @torch.no_grad()
    def full_gradient(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Return the gradient of ``parameter`` between a backward and its step: averaged, without
        the loss scale.
        """
        self._finish_gradients()
        if not self._gradients() or not any(parameter is trained for trained in self.trained):
            return None
        updated = self.updated(parameter)
        gradient = torch.zeros_like(updated) if updated.grad is None else updated.grad
        return gradient / self.scaler.scale

    @torch.no_grad()
    def set_full_gradient(self, parameter: torch.Tensor, value: torch.Tensor) -> None:
        self._finish_gradients()
        updated = self.updated(parameter)
        updated.grad = (value * self.scaler.scale).to(updated.dtype)

    def full_optimizer_state(self, parameter: torch.Tensor, kind: str) -> torch.Tensor:
        """Return the state ``kind`` of ``parameter``. Raises PartitionError if there is none."""
        states: Mapping[Any, Any] = {} if self.optimizer is None else self.optimizer.state
        known = states.get(self.updated(parameter), {})
        if kind not in known:
            raise PartitionError(
                f"the optimizer keeps no state {kind!r} for a parameter of shape "
                f"{tuple(parameter.shape)}; it keeps {sorted(known)} (empty before the first step)"
            )
        value: torch.Tensor = known[kind]
        return value

    @torch.no_grad()
    def consolidated(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self.module.named_parameters():
            value = self.updated(parameter) if dtype is torch.float32 else parameter
            yield name, value.detach().to("cpu", dtype or parameter.dtype, copy=True)

    def state_bytes(self) -> dict[str, int]:
        states = [] if self.optimizer is None else self.optimizer.state.values()
        optimizer = [v for of in states for v in of.values() if isinstance(v, torch.Tensor)]
        return {
            "parameters": sum(parameter.nbytes for parameter in self.module.parameters()),
            "gradients": sum(gradient.nbytes for gradient in self._gradients()),
            "optimizer": sum(value.nbytes for value in (*optimizer, *self.masters.values())),
        }

    def bytes_by_tier(self) -> dict[str, int]:
        return {"device": sum(self.state_bytes().values()), "ram": 0, "disk": 0}

    def trace(self, steps: int = 1, folder: str = "") -> None:
        """Do nothing: a trace of the reference shows nothing of the engine."""

    def set_custom_curriculum_learning_schedule(self, schedule_func_dict: object) -> None:
        """Do nothing: both runs are without a curriculum."""

    def set_data_post_process_func(self, post_process_func: object) -> None:
        """Do nothing: both runs choose no samples by difficulty."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            if not hasattr(Engine, name):
                raise
            raise AttributeError(
                f"hf-zero parity does not compare a script that uses engine.{name}, which nothing "
                "in torch corresponds to: leave it out for the comparison"
            ) from error

    @torch.no_grad()
    def iter_weights(
        self,
        bucket: str | int = "512MiB",
        dtype: str | torch.dtype | None = "bf16",
        names: str = "hf",
        adapters: str = "merged",
        rank0_only: bool = False,
        changed_only: bool = False,
    ) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """Yield all weights, as one bucket. Raises ConfigError for adapters by the names of the
        model without them, which are not merged here.
        """
        if names == "hf" and hasattr(self.module, "peft_config"):
            raise ConfigError(
                "the reference of hf-zero parity merges no adapters: pass "
                'names="model" to iter_weights for the comparison'
            )
        chosen = DTYPES.get(dtype, None) if isinstance(dtype, str) else dtype
        if not (rank0_only and self.global_rank):
            values = [
                (name, self.masters.get(p, p) if chosen is torch.float32 else p)
                for name, p in self.module.named_parameters()
            ]
            yield [(name, value.detach().to(chosen or value.dtype)) for name, value in values]

    def add_param_group(self, group: Any) -> None:
        """Train the parameters of ``group``, which the model has, too."""
        assert self.optimizer is not None
        given = group["params"]
        parameters: list[nn.Parameter] = [given] if isinstance(given, nn.Parameter) else [*given]
        self.group_parameters.append(parameters)
        self.trained += parameters
        if self.config.precision != "fp32":
            for parameter in parameters:
                master = parameter.detach().to(torch.float32, copy=True)
                self.masters[parameter] = nn.Parameter(master)
        updated = [self.masters.get(parameter, parameter) for parameter in parameters]
        type(self.optimizer).add_param_group(self.optimizer, {**group, "params": updated})

    def destroy(self, gather: bool = False) -> None:
        super().destroy(gather)
        for parameter in self.module.parameters():
            vars(parameter).pop(HOLDER, None)

    @torch.no_grad()
    def destroy_and_restore(self) -> None:
        masters = self.masters
        self.destroy()
        for parameter, master in masters.items():
            parameter.data = master.detach()


if TYPE_CHECKING:
    _conforms: type[EngineProtocol] = DrivenReference
