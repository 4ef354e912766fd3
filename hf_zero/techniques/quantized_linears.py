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
from hf_zero.config.sections import TENSOR_SIZE
from hf_zero.config.techniques import FLOAT8, QAT, QUANTIZE, WEIGHTS, QuantizationAware
from hf_zero.device import kinds
from hf_zero.distributed import process_group
from hf_zero.errors import ConfigError
from hf_zero.techniques.blocks import linears_of_blocks
from hf_zero.zero.layout.float8_weights import mark_float8
from hf_zero.zero.layout.stage_policy import POLICIES

if TYPE_CHECKING:
    from types import ModuleType


def check_linears(model: nn.Module, config: ZeroConfig) -> set[str]:
    """Return the names of the linear layers that :func:`quantize_linears` replaces, and mark the
    weights that are gathered in float8.

    Raises ConfigError without torchao, for sizes that ``group_size`` does not divide, for a device
    without float8, for a model without such layers, and where gathers cannot send float8.
    """
    aware, float8 = config.quantization_aware_training, config.float8_training
    if float8.gather_weights:
        _check_gathers(config)
    if aware.config is None and float8.recipe is None:
        return set()
    if aware.config is not None and float8.recipe is not None:
        raise ConfigError(f"{QAT} and {FLOAT8} both replace the linear layers; keep one")
    key = QAT if aware.config is not None else FLOAT8
    if config.tensor_parallel.size > 1:
        raise ConfigError(
            f"{key} replaces the linear layers of blocks, of which each tensor-parallel rank has a "
            f"part ({TENSOR_SIZE} = {config.tensor_parallel.size}); leave one of the two out"
        )
    chosen = set(linears_of_blocks(model))
    if not chosen:
        raise ConfigError(
            f"{key} replaces the linear layers of blocks, and this model has none there (those of "
            "adapters and of other libraries stay as they are); remove it"
        )
    _torchao("torchao.quantization", key)
    if aware.config is not None:
        _refuse_sizes(chosen, model, aware)
    elif not float8.emulate and not kinds.has_float8(device := process_group.default_device()):
        raise ConfigError(
            f"{FLOAT8} needs a GPU of compute capability 8.9 or more, and this device "
            f"({device.type}) has no float8; remove it, or write emulate: true to compute the same "
            "values slowly"
        )
    mark_weights(model, config)
    return chosen


def quantize_linears(model: nn.Module, config: ZeroConfig) -> None:
    """Replace the linear layers in blocks of ``model`` by torchao's, if ``config`` enables it.
    Raises as :func:`check_linears`.
    """
    chosen = check_linears(model, config)
    if not chosen:
        return
    aware, float8 = config.quantization_aware_training, config.float8_training
    with torch.random.fork_rng(devices=[]):  # torchao initializes weights before it takes ours
        if aware.config is not None:
            prepare = _torchao("torchao.quantization.qat", QAT).QATConfig
            _torchao("torchao.quantization", QAT).quantize_(
                model,
                prepare(base_config(aware.config, aware.group_size), step="prepare"),
                filter_fn=lambda module, name: name in chosen,
            )
        else:
            _float8(model, chosen, str(float8.recipe), float8.emulate)


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


def _check_gathers(config: ZeroConfig) -> None:
    key, recipe = f"{FLOAT8}.gather_weights", config.float8_training.recipe
    if recipe != "tensorwise":
        raise ConfigError(
            f"{key} needs {FLOAT8}.recipe = 'tensorwise', where a weight has one scale, not "
            f"{recipe!r}; change the recipe, or remove the key"
        )
    if not POLICIES[config.stage].shards_parameters:
        raise ConfigError(
            f"{key} concerns gathers of weights, which stage {config.stage} does not have; write "
            "zero_optimization.stage: 3, or remove the key"
        )
    if config.precision == "fp16":
        raise ConfigError(
            f"{key} needs weights in bf16 or fp32: fp16 has no room for the small numbers of "
            "float8; write bf16: {enabled: true}, or remove the key"
        )
    changes = {
        QUANTIZE: config.quantize_training.enabled,
        WEIGHTS: config.compression_weights.enabled,
    }
    for other in (name for name, on in changes.items() if on):
        raise ConfigError(
            f"{key} and {other} both change the weights that are multiplied; keep one"
        )


def mark_weights(model: nn.Module, config: ZeroConfig) -> None:
    """Mark the weights that gathers send in float8, if ``config`` enables it: those of linear
    layers in blocks that no other module holds. An embedding that is tied to one reads all its
    numbers.
    """
    if not config.float8_training.gather_weights:
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


def _refuse_sizes(chosen: set[str], model: nn.Module, aware: QuantizationAware) -> None:
    for name in sorted(chosen) if "int4" in str(aware.config) else ():
        inputs: Any = model.get_submodule(name).in_features
        if inputs % aware.group_size:
            raise ConfigError(
                f"{QAT}.group_size = {aware.group_size} does not divide the {inputs} inputs of "
                f"{name}; write a divisor of the inputs of all linear layers in blocks"
            )


def _float8(model: nn.Module, chosen: set[str], recipe: str, emulate: bool) -> None:
    float8 = _torchao("torchao.float8", FLOAT8)
    config = replace(float8.Float8LinearConfig.from_recipe_name(recipe), emulate=emulate)
    float8.convert_to_float8_training(
        model, config=config, module_filter_fn=lambda module, name: name in chosen
    )


def _torchao(name: str, key: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"{key} needs torchao, which cannot be imported here ({error}); "
            "`pip install hf-zero[torchao]`, or remove the key"
        ) from None
