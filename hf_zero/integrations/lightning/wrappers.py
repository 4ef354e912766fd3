"""Wrappers of Lightning: names and precision of ZeroStrategy, engines at the ends of fits, and
Lightning's own DeepSpeedStrategy on hf-zero's engine.
"""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING

from hf_zero.errors import ConfigError
from hf_zero.integrations.engine_protocol import is_engine
from hf_zero.integrations.lightning.fits import engine_of, left_in_place
from hf_zero.integrations.lightning.precision import PrecisionMethods
from hf_zero.integrations.lightning.strategy import StrategyMethods, register
from hf_zero.integrations.seams import Original

if TYPE_CHECKING:
    import torch
    from lightning.fabric.connector import _Connector
    from lightning.fabric.wrappers import _FabricOptimizer
    from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, Strategy
    from lightning.pytorch.strategies.strategy_registry import _StrategyRegistry
    from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector


def register_stages(
    original: Original, cls: type[DeepSpeedStrategy], strategy_registry: _StrategyRegistry
) -> None:
    """Wraps ``DeepSpeedStrategy.register_strategies``: adds ``zero_stage_0`` …
    ``zero_stage_3_offload`` to the registry.
    """
    package = original.__module__.partition(".strategies.")[0]  # of the Trainer, or of Fabric
    original(cls, strategy_registry)
    register(strategy_registry, functools.partial(_make, package))


def _make(package: str, **arguments: object) -> Strategy:
    # Imported on use: the names are registered while the library is still being imported.
    home, name = {
        "lightning.fabric": ("lightning", "FabricStrategy"),
        "lightning.pytorch": ("lightning", "ZeroStrategy"),
        "pytorch_lightning": ("pytorch_lightning", "ZeroStrategy"),
    }[package]
    return getattr(importlib.import_module(f"hf_zero.integrations.{home}"), name)(**arguments)


def choose_precision(original: Original, self: _AcceleratorConnector) -> object:
    """Wraps ``_AcceleratorConnector._check_and_init_precision``: a ZeroStrategy gets its own
    precision, fp16 on CPUs too.
    """
    if not isinstance(self.strategy, StrategyMethods):
        return original(self)
    plugin = self._precision_plugin_flag
    if plugin is not None and not isinstance(plugin, PrecisionMethods):
        raise ConfigError(
            f"{type(plugin).__name__} cannot drive a ZeRO engine, which has precision of its "
            "own; write Trainer(precision=...)"
        )
    return plugin or self.strategy.precision_class(self._precision_flag)


def choose_precision_of_fabric(original: Original, self: _Connector) -> object:
    """Wraps Fabric's ``_Connector._check_and_init_precision``: a FabricStrategy gets its own
    precision, fp16 on CPUs too.
    """
    if type(self.strategy).__name__ != "FabricStrategy":
        return original(self)
    plugin = self._precision_instance
    if plugin is not None:
        return plugin  # which the strategy refuses if it is not of its own
    precision = importlib.import_module("hf_zero.integrations.lightning").FabricPrecision
    return precision(self._precision_input)


def zero_grad_by_the_engine(
    original: Original,
    self: _FabricOptimizer,
    optimizer: torch.optim.Optimizer,
    *args: object,
    **kwargs: object,
) -> None:
    """Wraps ``_FabricOptimizer.__init__``: the wrapper's ``zero_grad`` is that of the optimizer's
    class, and would not reach the engine.
    """
    original(self, optimizer, *args, **kwargs)
    if "zero_grad" in vars(optimizer):
        self.zero_grad = optimizer.zero_grad  # type: ignore[attr-defined]


def keep_engines_in_place(original: Original, self: DDPStrategy) -> None:
    """Wraps ``DDPStrategy.teardown``: keeps an engine on its device at the end of a fit."""
    if is_engine(self.model) and self._lightning_module is not None:
        with left_in_place(self):
            original(self)
    else:
        original(self)


def go_on_with_an_engine(original: Original, self: DeepSpeedStrategy) -> None:
    """Wraps ``DeepSpeedStrategy.init_deepspeed``: evaluates with the engine that has trained, and
    trains a model that was evaluated.

    DeepSpeed carries an accumulation window left open by an epoch into the next, while Lightning
    zeroes gradients first; so ``zero_grad`` does nothing here, and the engine clears gradients
    after its steps.
    """
    module = self.lightning_module
    assert module is not None
    engine = engine_of(module)
    if engine is not None and not module.trainer.training:
        self.model = engine  # type: ignore[assignment]
        return
    if engine is not None:
        engine.destroy_and_restore()
    original(self)
    if is_engine(self.model):  # rather than an engine of the real DeepSpeed
        for optimizer in self.optimizers:
            optimizer.zero_grad = _nothing  # type: ignore[method-assign]


def _nothing(set_to_none: bool = True) -> None:
    """Do nothing: ``zero_grad`` in a window that DeepSpeedStrategy carries over an epoch's end."""
