"""What the integrations call on an engine: hf-zero's, or the reference that ``hf-zero parity`` puts
in its place.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard, cast

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from hf_zero.checkpoint.generations import Generations
from hf_zero.config import ZeroConfig
from hf_zero.engine import Engine
from hf_zero.zero.engine_parts import EngineFeatures
from hf_zero.zero.layout.flat_buffer import owner_of
from hf_zero.zero.layout.parameter import HOLDER, holder_of_whole
from hf_zero.zero.step.step_interfaces import StepMeasures


class EngineProtocol(Protocol):
    """An engine in a loop of Accelerate, Transformers or Lightning. The methods and properties are
    those of :class:`hf_zero.Engine`.
    """

    config: ZeroConfig
    data_ranks: int
    group_parameters: list[list[nn.Parameter]]
    kept_when_frozen: frozenset[str]
    lr_scheduler: Any
    max_norm: float
    measures: StepMeasures[Any]
    generations: Generations
    stop_requests: Any
    feature_set: EngineFeatures[Any]
    training: bool

    # ---- properties of Engine ----

    @property
    def module(self) -> nn.Module: ...
    @property
    def optimizer(self) -> Any: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def destroyed(self) -> bool: ...
    @property
    def shard_only(self) -> bool: ...
    @property
    def stage(self) -> int: ...
    @property
    def global_steps(self) -> int: ...
    @property
    def figures(self) -> Mapping[str, Any]: ...
    @property
    def stop_requested(self) -> bool: ...
    @property
    def in_no_sync(self) -> bool: ...
    @property
    def window_is_open(self) -> bool: ...
    @property
    def held_micro_batches(self) -> int: ...
    @property
    def pass_is_under_way(self) -> bool: ...

    # ---- a step ----

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...
    def backward(
        self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True
    ) -> torch.Tensor: ...
    def no_sync(self) -> AbstractContextManager[None]: ...
    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None: ...
    def holds_gradients(self) -> bool: ...
    def measure_gradient(self) -> torch.Tensor: ...
    def clip_gradient(self, limit: float) -> torch.Tensor: ...
    def rebuild_if_unfrozen(self, loads: bool = False) -> None: ...
    def step(self) -> None: ...
    def run_step_hooks(self) -> None: ...
    def zero_grad(self, set_to_none: bool = True) -> None: ...
    def was_step_applied(self) -> bool: ...
    def get_global_grad_norm(self) -> float: ...
    def grad_norm_tensor(self) -> torch.Tensor: ...
    def prepare_batch(self, batch: object) -> Any: ...
    def gradient_accumulation_steps(self) -> int: ...
    def train_micro_batch_size_per_gpu(self) -> int: ...
    def set_batches(self, micro: int, accumulation_steps: int) -> None: ...
    def trust_loader(self) -> None: ...

    # ---- state, stopping ----

    def save_checkpoint(self, save_dir: Any, *args: Any, **kwargs: Any) -> bool: ...
    def load_checkpoint(self, load_dir: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]: ...
    def wait_for_checkpoint(self, who: str = "", below: str | None = None) -> None: ...
    def state_dict(
        self, *args: Any, rank0_only: bool = False, dtype: torch.dtype | None = None, **kwargs: Any
    ) -> dict[str, Any] | None: ...
    def add_param_group(self, group: Any) -> None: ...
    def stop_on(self, *signals: int) -> None: ...
    def destroy(self, gather: bool = False) -> None: ...
    def destroy_and_restore(self) -> None: ...
    def register_forward_pre_hook(self, hook: Any) -> RemovableHandle: ...


if TYPE_CHECKING:
    _conforms: type[EngineProtocol] = Engine


def is_engine(value: object) -> TypeGuard[EngineProtocol]:
    """Return whether ``value`` is an engine, recognised by a property that no other module has."""
    return isinstance(value, nn.Module) and hasattr(type(value), "held_micro_batches")


def trains(engine: EngineProtocol) -> bool:
    """Return whether ``engine`` has an optimizer and still exists."""
    return engine.optimizer is not None and not engine.destroyed


def holder_of(parameters: Iterable[torch.Tensor]) -> EngineProtocol | None:
    """Return the engine that has the first of ``parameters`` that an engine has."""
    for parameter in parameters:
        flat = owner_of(parameter)
        engine = holder_of_whole(parameter) if flat is None else flat.engine_as(Engine)
        if engine is not None:
            return cast(EngineProtocol, engine)
    return None


def hold(engine: EngineProtocol) -> None:
    """Have :func:`holder_of` find ``engine`` by the parameters of its model."""
    for parameter in engine.module.parameters():
        setattr(parameter, HOLDER, weakref.ref(engine))
