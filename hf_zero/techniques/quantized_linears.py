"""torchao's linear layers in place of torch's, for quantization-aware training and float8.

torchao is imported only if the configuration enables one of them. Its layers hold the parameters of
the layers they replace, so optimizers, checkpoints and ranks see the same model; they remain on the
model when the engine is destroyed.
"""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hf_zero.config import ZeroConfig
from hf_zero.config.low_bits import FLOAT8, QAT, Float8Training, QuantizationAware
from hf_zero.device import kinds
from hf_zero.distributed import process_group
from hf_zero.errors import ConfigError
from hf_zero.techniques.blocks import linears_of_blocks
from hf_zero.techniques.float8_weights import Float8Gathers, mark_float8
from hf_zero.zero.feature import EngineInputs, Feature

if TYPE_CHECKING:
    from types import ModuleType


class QuantizationAwareLinears(Feature):
    """Linear layers in blocks that simulate the quantization they are trained for."""

    def __init__(self, settings: ZeroConfig):
        self._section = settings.section_of(QuantizationAware)

    def check_inputs(self, inputs: EngineInputs) -> None:
        """Raise ConfigError without torchao, for a model without such layers, and for sizes that
        ``group_size`` does not divide.
        """
        names = _linears(inputs.model, QAT)
        _torchao("torchao.quantization.qat", QAT)
        _refuse_sizes(names, inputs.model, self._section)

    def prepare(self, model: nn.Module) -> None:
        names, name = _linears(model, QAT), str(self._section.config)
        _refuse_sizes(names, model, self._section)
        with torch.random.fork_rng(devices=[]):  # torchao initializes weights before it takes ours
            prepare = _torchao("torchao.quantization.qat", QAT).QATConfig
            _torchao("torchao.quantization", QAT).quantize_(
                model,
                prepare(base_config(name, self._section.group_size), step="prepare"),
                filter_fn=lambda module, name: name in names,
            )


class Float8Linears(Feature):
    """Linear layers in blocks that multiply in float8, some with weights gathered in float8."""

    def __init__(self, settings: ZeroConfig):
        self._section = settings.section_of(Float8Training)

    def check_inputs(self, inputs: EngineInputs) -> None:
        """Raise ConfigError without torchao, for a model without such layers, and for a device
        without float8.
        """
        _linears(inputs.model, FLOAT8)
        _torchao("torchao.float8", FLOAT8)
        if not self._section.emulate and not kinds.has_float8(
            device := process_group.default_device()
        ):
            raise ConfigError(
                f"{FLOAT8} needs a GPU of compute capability 8.9 or more, and this device "
                f"({device.type}) has no float8; remove it, or write emulate: true to compute the "
                "same values slowly"
            )

    def mark(self, model: nn.Module) -> None:
        """Mark the weights that gathers send in float8: those of linear layers in blocks that no
        other module holds. An embedding that is tied to one reads all its numbers.
        """
        if not self._section.gather_weights:
            return
        linears: set[Any] = {model.get_submodule(name) for name in linears_of_blocks(model)}
        others = {
            id(parameter)
            for module in model.modules()
            if module not in linears
            for parameter in module._parameters.values()
        }
        for linear in linears:
            if id(linear.weight) not in others:
                mark_float8(linear.weight)

    def prepare(self, model: nn.Module) -> None:
        self.mark(model)  # before torchao's layers are in place of those it looks for
        names, float8 = _linears(model, FLOAT8), _torchao("torchao.float8", FLOAT8)
        recipe = float8.Float8LinearConfig.from_recipe_name(str(self._section.recipe))
        with torch.random.fork_rng(devices=[]):  # torchao initializes weights before it takes ours
            float8.convert_to_float8_training(
                model,
                config=replace(recipe, emulate=self._section.emulate),
                module_filter_fn=lambda module, name: name in names,
            )


def float8_gathers(config: ZeroConfig, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """Gathers in float8 of the weights of float8 layers, as an extension."""
    return {"codecs": (Float8Gathers(),)}


def _linears(model: nn.Module, key: str) -> set[str]:
    """Return the names of the linear layers of blocks, which ``key`` replaces. Raises ConfigError
    if there are none.
    """
    names = set(linears_of_blocks(model))
    if not names:
        raise ConfigError(
            f"{key} replaces the linear layers of blocks, and this model has none there (those of "
            "adapters and of other libraries stay as they are); remove it"
        )
    return names


def base_config(name: str, group_size: int) -> object:
    """Return torchao's configuration of the quantized model that ``name`` trains for."""
    quantization = _torchao("torchao.quantization", QAT)
    granularity = _torchao("torchao.quantization.granularity", QAT)
    int4 = name.endswith("int4_weight")
    weights = torch.int4 if int4 else torch.int8  # type: ignore[attr-defined]
    parts = granularity.PerGroup(group_size) if int4 else granularity.PerAxis(0)
    if name.startswith("int8_dynamic"):
        return quantization.Int8DynamicActivationIntxWeightConfig(
            weight_dtype=weights, weight_granularity=parts
        )
    return quantization.IntxWeightOnlyConfig(weight_dtype=weights, granularity=parts)


def _refuse_sizes(chosen: set[str], model: nn.Module, aware: QuantizationAware) -> None:
    for name in sorted(chosen) if "int4" in str(aware.config) else ():
        inputs: Any = model.get_submodule(name).in_features
        if inputs % aware.group_size:
            raise ConfigError(
                f"{QAT}.group_size = {aware.group_size} does not divide the {inputs} inputs of "
                f"{name}; write a divisor of the inputs of all linear layers in blocks"
            )


def _torchao(name: str, key: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"{key} needs torchao, which cannot be imported here ({error}); "
            "`pip install hf-zero[torchao]`, or remove the key"
        ) from None
