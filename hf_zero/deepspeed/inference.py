"""``deepspeed.init_inference``: a model for inference, in one dtype, on the device, its layers
optionally split over ranks and with fused kernels.

Needs pydantic, whose ValidationError the configuration raises.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pkgutil import resolve_name
from typing import Any

import torch
from pydantic import Field, field_validator
from torch import nn

from hf_zero.config.files import load_file
from hf_zero.deepspeed.config_model import DeepSpeedConfigModel
from hf_zero.deepspeed.modules import refuse
from hf_zero.distributed import init
from hf_zero.distributed.process_group import default_device
from hf_zero.errors import ConfigError
from hf_zero.parallel.tensor import tensor_parallel
from hf_zero.zero.engine_parts import ModelWrapper

DTYPES = {
    torch.float32: ("fp32", "float32", "float"),
    torch.float16: ("fp16", "float16", "half"),
    torch.bfloat16: ("bf16", "bfloat16", "bfloat"),
    torch.int8: ("int8",),
}


class DeepSpeedTPConfig(DeepSpeedConfigModel):
    """The number of ranks that layers are split over. hf-zero makes the groups itself."""

    enabled: bool = True
    tp_size: int = Field(1, ge=1)
    tp_grain_size: int = 64
    mpu: object = None
    tp_group: object = None


class DeepSpeedMoEConfig(DeepSpeedConfigModel):
    """Accepted for mixtures of experts, which are computed unchanged on each rank."""

    enabled: bool = True
    ep_size: int = 1
    moe_experts: list[int] = Field([1], alias="num_experts")
    type: str = "standard"
    ep_mp_group: object = None
    ep_group: object = Field(None, alias="expert_group")


class DeepSpeedInferenceConfig(DeepSpeedConfigModel):
    """The configuration of :func:`init_inference`.

    ``dtype``, ``tensor_parallel`` and ``replace_with_kernel_inject`` take effect. Limits of tokens,
    masks and policies are the model's own here; :class:`InferenceEngine` refuses keys for features
    of DeepSpeed's engine.
    """

    replace_with_kernel_inject: bool = Field(False, alias="kernel_inject")
    dtype: torch.dtype = torch.float16
    tensor_parallel: DeepSpeedTPConfig = Field({}, alias="tp")  # type: ignore[assignment]
    moe: bool | DeepSpeedMoEConfig = True
    # the model's own
    max_out_tokens: int = Field(1024, alias="max_tokens", gt=0)
    min_out_tokens: int = Field(1, alias="min_tokens")
    triangular_masking: bool = Field(True, alias="tm")
    return_tuple: bool = True
    injection_policy: object = Field(None, alias="injection_dict")
    injection_policy_tuple: object = None
    replace_method: str = Field("auto", json_schema_extra={"deprecated": True})
    training_mp_size: int = 1
    base_dir: str = ""
    config: object = Field(None, alias="args")
    # not built
    checkpoint: object = None
    enable_cuda_graph: bool = False
    keep_module_on_host: bool = False
    quant: object = None
    save_mp_checkpoint_path: str | None = None
    set_empty_params: bool = False
    use_triton: bool = False
    zero: object = None
    # former names
    mp_size: int = Field(
        1, json_schema_extra={"deprecated": True, "new_param": "tensor_parallel.tp_size"}
    )
    ep_size: int = Field(1, json_schema_extra={"deprecated": True, "new_param": "moe.ep_size"})

    @field_validator("dtype", mode="before")
    @classmethod
    def _named(cls, value: object) -> torch.dtype:
        """Return the dtype for a dtype or one of its names."""
        name = str(value).removeprefix("torch.")
        matching = [dtype for dtype, names in DTYPES.items() if name in names]
        if not matching:
            choices = ", ".join(name for names in DTYPES.values() for name in names)
            raise ValueError(f"dtype is {value!r}; known are {choices}")
        return matching[0]

    @field_validator("moe")
    @classmethod
    def _section(cls, value: object) -> object:
        """Convert a boolean to the section with that ``enabled``."""
        if isinstance(value, bool):
            return DeepSpeedMoEConfig.model_validate({"enabled": value})
        return value


_INSTEAD = {
    "checkpoint": "load the weights into the model first",
    "enable_cuda_graph": "compile the model with torch.compile(mode='reduce-overhead')",
    "keep_module_on_host": "call init_inference where the whole model fits on the device",
    "quant": "load the model with its weights quantized",
    "save_mp_checkpoint_path": "save the model with save_pretrained before",
    "set_empty_params": "load the weights into the model first",
    "use_triton": "write replace_with_kernel_inject, which puts in fused kernels",
    "zero": "train with initialize at stage 3, and generate with the engine",
}


class InferenceEngine(ModelWrapper):
    """``module``, ready for inference; other attributes, ``generate`` and ``config`` among them,
    are the module's. Collective over all ranks if layers are split: the ranks of a group must read
    the same inputs.

    Raises NotBuiltError for features of DeepSpeed's engine: checkpoints that it reads or writes,
    CUDA graphs, int8, ZeRO.
    """

    def __init__(self, model: nn.Module, config: DeepSpeedInferenceConfig) -> None:
        super().__init__()
        if not isinstance(model, nn.Module):
            raise ConfigError(
                f"init_inference was given a {type(model).__name__}; pass a torch.nn.Module"
            )
        for name, instead in _INSTEAD.items():
            section = getattr(config, name)
            if section and not (isinstance(section, Mapping) and section.get("enabled") is False):
                refuse(f"init_inference({name}=...)", instead)
        if config.dtype is torch.int8:
            refuse("init_inference(dtype=torch.int8)", _INSTEAD["quant"])
        self._config = config
        size = config.tensor_parallel.tp_size if config.tensor_parallel.enabled else 1
        if size > 1:
            init.init_distributed()
            tensor_parallel(model, size)
        model.to(device=default_device(), dtype=config.dtype)
        if config.replace_with_kernel_inject:
            resolve_name("hf_zero.integrations.fused:optimize")(model)
        self.module = model
        self.eval()

    def forward(self, *inputs: object, **kwargs: object) -> object:
        return self.module(*inputs, **kwargs)


def init_inference(
    model: nn.Module,
    config: str | os.PathLike[str] | Mapping[str, object] | None = None,
    **more: object,
) -> InferenceEngine:
    """Return an engine for ``model``, which is changed in place. ``config`` is a dict or the path
    of a JSON file; ``more`` are further keys. Raises ConfigError for a key with two different
    values, by its name or its alias.
    """
    if isinstance(config, (str, os.PathLike)):
        config = load_file(config)
    if not isinstance(config, Mapping | None):
        raise ConfigError(
            f"init_inference was given a configuration of the type {type(config).__name__}; pass a "
            "dict, or the path of a JSON file"
        )
    names = {field.alias: name for name, field in DeepSpeedInferenceConfig.model_fields.items()}
    values: dict[str, Any] = {}
    written: dict[str, str] = {}
    for source, keys in (("in config", config or {}), ("as an argument", more)):
        for key, value in keys.items():
            name, here = names.get(key, key), f"{key} is {value!r} {source}"
            if values.setdefault(name, value) != value:
                raise ConfigError(f"{written[name]} and {here}; pass one")
            written[name] = here
    return InferenceEngine(model, DeepSpeedInferenceConfig(**values))
