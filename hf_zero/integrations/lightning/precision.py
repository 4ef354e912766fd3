"""``precision=`` of Lightning's Trainer and of Fabric for an engine: weights are in that dtype; the
engine has fp32 master weights and the loss scale.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn

from hf_zero.errors import ConfigError
from hf_zero.integrations.engine_protocol import EngineProtocol, trains
from hf_zero.zero.layout.parameter import OwnedParameter
from hf_zero.zero.layout.precision import COMPUTE
from hf_zero.zero.layout.tree import map_tensors

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule
from hf_zero.integrations.lightning.settings import KINDS


def step_if_due(engine: EngineProtocol) -> None:
    """Step ``engine`` if backwards have left gradients: those that were clipped as they are, others
    with the limit of the configuration; else run the hooks of its optimizer (collective).
    """
    engine.set_gradient_accumulation_boundary(True)
    if engine.holds_gradients():
        engine.step()
    else:
        engine.run_step_hooks()


class PrecisionMethods:
    """Implementation of ``Trainer(precision=…)`` for an engine.

    ``bf16-mixed`` and ``16-mixed``: the engine holds 16-bit weights and trains fp32 master weights;
    buffers keep their dtype. ``bf16-true`` and ``16-true``: the module itself is cast too, before
    the master weights are copied from it. A model evaluated before any training has cast it runs
    under autocast.
    """

    package: str
    caller, strategy = "Trainer", "ZeroStrategy"
    engine: EngineProtocol  # assigned by the strategy

    def __init__(self, precision: object) -> None:
        if precision not in KINDS:
            raise ConfigError(
                f"{self.caller}(precision={precision!r}) cannot run under {self.strategy}; choose "
                f"one of {', '.join(KINDS)}"
            )
        self.precision = precision
        self.kind = KINDS[precision]
        self.dtype = COMPUTE[self.kind]
        self._true = precision.endswith("true")

    def convert_module(self, module: nn.Module) -> nn.Module:
        if self._true and self.kind != "fp32":
            _cast(module, self.dtype)
        return module

    def convert_input(self, data: object) -> object:
        return map_tensors(
            data, lambda tensor: tensor.to(self.dtype) if tensor.is_floating_point() else tensor
        )

    @contextmanager
    def tensor_init_context(self) -> Iterator[None]:
        before = torch.get_default_dtype()
        if self._true:
            torch.set_default_dtype(self.dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(before)

    def module_init_context(self) -> AbstractContextManager[None]:
        return self.tensor_init_context()

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        if self.engine.config.precision == self.kind:
            yield
            return
        with torch.autocast(self.engine.device.type, self.dtype, enabled=self.kind != "fp32"):
            yield

    def backward(
        self,
        tensor: torch.Tensor,
        model: LightningModule,
        optimizer: torch.optim.Optimizer,
        *args: object,
        **kwargs: object,
    ) -> None:
        helpers = importlib.import_module(f"{self.package}.utilities.model_helpers")
        if args or kwargs.keys() - {"retain_graph"} or helpers.is_overridden("backward", model):
            model.backward(tensor, *args, **kwargs)
        else:
            # Lightning has divided it, also in the short window at the end of an epoch
            steps = model.trainer.accumulate_grad_batches
            self.engine.measures.divided_by(steps if model.automatic_optimization else None)
            retain_graph = bool(kwargs.get("retain_graph"))
            self.engine.backward(tensor, retain_graph, scale_wrt_gas=False)

    def optimizer_step(
        self,
        optimizer: torch.optim.Optimizer,
        model: torch.nn.Module,
        closure: Callable[[], object],
        **kwargs: object,
    ) -> object:
        engine = self.engine
        loss = closure()
        self._after_closure(model, optimizer)  # type: ignore[attr-defined]
        if not trains(engine):
            return loss  # nothing trains
        # Not the value of the closure: a module may have called it before ``optimizer.step()``.
        step_if_due(engine)
        return loss

    def clip_gradients(
        self, optimizer: object, clip_val: float = 0.0, gradient_clip_algorithm: object = "norm"
    ) -> None:
        """Clip the gradient that the engine holds to this norm over all ranks (collective). Raises
        ConfigError for clipping by value.
        """
        if clip_val <= 0:
            return
        if getattr(gradient_clip_algorithm, "value", gradient_clip_algorithm) != "norm":
            raise ConfigError(
                f"gradient_clip_algorithm={gradient_clip_algorithm!r} is not built; a sharded "
                "gradient is clipped by its norm: use 'norm'"
            )
        if self.engine.holds_gradients():
            self.engine.clip_gradient(float(clip_val))


def _cast(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast the modules without parameters of an engine; sharded parameters are cast by the engine
    that trains them.
    """
    if not any(isinstance(parameter, OwnedParameter) for parameter in module.parameters()):
        module.to(dtype)
        return
    for child in module.children():
        _cast(child, dtype)
