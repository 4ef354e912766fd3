"""Transformers models without memory: an architecture built on the meta device from its
configuration alone, or a decoder with a given number of parameters.
"""

from __future__ import annotations

import functools
import json
import math
import numbers
import os
import re
import socket
import textwrap
import urllib.request
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from importlib import resources
from types import SimpleNamespace
from urllib.parse import urlsplit

import torch
import transformers
from huggingface_hub import constants
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module

from hf_zero.errors import ConfigError
from hf_zero.logging import listed, logger
from hf_zero.zero.layout.attributes import AttachedParameter

HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
TUNED = re.compile(r"-(instruct|it|chat|base)(-hf)?$", re.IGNORECASE)
MAX_LAYERS, MAX_MODULES = 100_000, 500_000  # of a model; the largest ones have 100,000 modules
# of bitsandbytes: weights of a scale, and scales of a scale of scales
BLOCK, NESTED_BLOCK = 64, 256
# Transformers' tables of classes with a head, those of pretraining tasks first
HEADS = (
    "SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ", "IMAGE_TEXT_TO_TEXT", "MASKED_LM", "CAUSAL_LM",
    "IMAGE_CLASSIFICATION", "AUDIO_CLASSIFICATION", "PRETRAINING",
)  # fmt: skip


def build_on_meta(model: object, needs_loss: bool = False) -> nn.Module:
    """Build the model described by ``model``: a configuration, a dict of one, a model folder, a
    config.json, or a name on the hub.

    The class is the one that the configuration names in ``architectures``, else the bare model of
    its type, with a warning. Weights that its ``quantization_config`` has in bitsandbytes' 4 bits
    are packed, and all parameters frozen, unless it ``needs_loss``. Raises ConfigError if there is
    no such model, if it has more than :data:`MAX_MODULES` modules, or if the model ``needs_loss``
    and is built without its head.
    """
    config = _configuration(model)
    written = config.architectures or ()
    names = [written] if isinstance(written, str) else written
    try:
        named = [getattr(transformers, name, None) for name in names]
        build = next((cls._from_config for cls in named if cls is not None), None)
        with torch.device("meta"), _few_modules():
            if build is not None:
                return _as_quantized(build(config, dtype=torch.float32), config, needs_loss)
            bare = transformers.AutoModel.from_config(config, dtype=torch.float32)
    except Exception as error:  # a configuration may hold anything
        raise ConfigError(
            f"no model can be built from {_named(model)}: {_described(error)}"
        ) from error
    _tell_bare(model, type(bare).__name__, names, _with_head(config), needs_loss)
    return bare


def _tell_bare(
    model: object, bare: str, names: Collection[str], head: str, needs_loss: bool
) -> None:
    """Warn that ``model`` is built as the class ``bare``, as Transformers has none of ``names``;
    raise ConfigError if it ``needs_loss`` and there is a class with a ``head``.
    """
    unknown = f"only architectures that Transformers does not have ({listed(names)})"
    subject = f"{_source(model)} names {unknown if names else 'no architectures'}; "
    remedy = f'{"write" if names else "add"} "architectures": ["{head}"]'
    if needs_loss and head:
        raise ConfigError(f"{subject}{bare} has no head to compute a loss; {remedy}")
    without = f" without a head; {remedy}" if head else ""
    _warn_once(f"{subject}counted as {bare}{without}")


def _as_quantized(model: PreTrainedModel, config: PreTrainedConfig, runs: bool) -> nn.Module:
    """Return ``model`` with packed weights and their scales, as ``config`` has them quantized. One
    that ``runs`` keeps its weights, with a warning.
    """
    values = getattr(config, "quantization_config", None) or {}
    values = values if isinstance(values, Mapping) else values.to_dict()
    if not values:
        return model
    by_rows = _rows_of(values)
    counted = values.get("load_in_4bit") or by_rows is not None
    if runs or not counted:
        method = values.get("quant_method", "an unknown method")
        without = " in estimates of activations and simulations" if counted else ""
        _warn_once(
            f"the quantization_config ({method}) is not counted{without}: weights are counted as "
            "those of the model that is not quantized"
        )
        return model
    configured = values.get("llm_int8_skip_modules") or values.get("modules_to_not_convert")
    in_fp32 = list(model._keep_in_fp32_modules or ())
    skipped = HfQuantizer.get_modules_to_not_convert(model, configured, in_fp32)
    nested = bool(values.get("bnb_4bit_use_double_quant"))
    for name, module in model.named_modules():
        if type(module) in (nn.Linear, Conv1D) and should_convert_module(name, skipped):
            if by_rows is None:
                _store_in_4_bits(module, nested)
            else:
                _store_by_rows(module, by_rows)
    return model.requires_grad_(False)


def _store_by_rows(module: nn.Linear | Conv1D, by_rows: Mapping[str, torch.dtype]) -> None:
    """Give ``module`` a weight in 8 bits, and beside it tensors of one number a row."""
    shape = module.weight.shape
    rows = shape[1] if type(module) is Conv1D else shape[0]
    weight = module._parameters["weight"] = _frozen(shape, torch.int8)
    weight.__dict__["_hf_zero_elements"] = weight.numel()
    for part, dtype in by_rows.items():
        module._parameters[f"weight_{part}"] = _frozen((rows,), dtype)


def _store_in_4_bits(module: nn.Linear | Conv1D, nested: bool) -> None:
    """Give ``module`` a packed weight, with the scales of its blocks, themselves scaled if they are
    ``nested``.
    """
    shape = module.weight.shape
    blocks = -(-math.prod(shape) // BLOCK)
    weight = _frozen((-(-math.prod(shape) // 2), 1), torch.uint8)
    weight.quant_state = SimpleNamespace(shape=shape)  # type: ignore[attr-defined]
    module._parameters["weight"] = weight
    scales = torch.uint8 if nested else torch.float32
    module._parameters["weight.absmax"] = _frozen((blocks,), scales)
    if nested:
        again = _frozen((-(-blocks // NESTED_BLOCK),), torch.float32)
        module._parameters["weight.nested_absmax"] = again


def _rows_of(values: Mapping[str, object]) -> dict[str, torch.dtype] | None:
    """Return the tensors of one number a row beside the bytes of weights in 8 bits; None if
    ``values``, a quantization_config, has them otherwise.
    """
    if values.get("load_in_8bit"):
        return {"SCB": torch.float32}
    kind = values.get("quant_type")
    name = kind.get("default", {}).get("_type") if isinstance(kind, Mapping) else None
    if name == "Int8WeightOnlyConfig":
        return {"scale": torch.float32, "zero_point": torch.int8}
    return {"scale": torch.float32} if name == "Float8WeightOnlyConfig" else None


def _frozen(shape: tuple[int, ...], dtype: torch.dtype) -> nn.Parameter:
    return AttachedParameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=False)


@contextmanager
def _few_modules() -> Iterator[None]:
    """Raise ValueError when more than :data:`MAX_MODULES` modules are built inside."""
    built = 0

    def count(*_: object) -> None:
        nonlocal built
        built += 1
        if built > MAX_MODULES:
            raise ValueError(f"it has more than {MAX_MODULES:,} modules")

    hook = register_module_module_registration_hook(count)
    try:
        yield
    finally:
        hook.remove()


def _described(error: Exception) -> str:
    """Return the message of ``error``, with its class unless its message is meant for users."""
    prefix = "" if isinstance(error, (ValueError, OSError)) else f"{type(error).__name__}: "
    return textwrap.shorten(f"{prefix}{error}", 160)


def _with_head(config: PreTrainedConfig) -> str:
    """Return the name of a class with a head for ``config``, "" if Transformers has none."""
    for task in HEADS:
        entry = getattr(transformers, f"MODEL_FOR_{task}_MAPPING").get(type(config), None)
        if entry is not None:
            first: str = (entry[0] if isinstance(entry, tuple) else entry).__name__
            return first
    return ""


@functools.cache
def _warn_once(message: str) -> None:
    """Log ``message`` once, although a command may build the model again."""
    logger.warning("%s", message)


def _source(model: object) -> str:
    """Return the file or value that describes ``model``, for a message."""
    if not isinstance(model, (str, os.PathLike)):
        return _named(model)
    name = os.fspath(model)
    return name if name.endswith(".json") else os.path.join(name, "config.json")


def _configuration(model: object) -> PreTrainedConfig:
    """Return the configuration that ``model`` is, holds or names. Raises ConfigError if none is."""
    if isinstance(model, PreTrainedConfig):
        return model
    if not isinstance(model, (Mapping, str, os.PathLike)):
        raise ConfigError(
            f"{type(model).__name__} {model!r} describes no model; pass a module, a configuration, "
            "a dict, a folder or a name"
        )
    if isinstance(model, Mapping):
        if model.get("model_type") is None:
            raise ConfigError(
                "a dict without model_type describes no model; add it, or pass a folder with a "
                "config.json"
            )
        return _from_values(model, model)
    name = os.fspath(model)
    hub = bool(HUB_NAME.fullmatch(name)) and not os.path.exists(name)
    offline = _why_offline() if hub else ""
    try:
        values, _ = PreTrainedConfig.get_config_dict(name, local_files_only=bool(offline))
        _refuse_layers(values)
        return AutoConfig.from_pretrained(name, local_files_only=bool(offline))
    except Exception as error:  # the file may hold anything
        why = _described(error)
        if offline:
            why = f"it is not in the cache, and the Hub cannot be reached: {offline}"
        sizes = _known_sizes(name) if hub and isinstance(error, OSError) else None
        if sizes is not None:
            _warn_once(f"{name} is estimated by the sizes that hf-zero knows ({why})")
            return _from_values(model, sizes)
        raise ConfigError(
            f"{_named(model)} is not a model folder, config.json or known model ({why}); pass one "
            "of these"
        ) from error


def _from_values(model: object, values: Mapping[str, object]) -> PreTrainedConfig:
    """Return the configuration that ``values`` describe. Raises ConfigError if none is."""
    kind = str(values["model_type"])
    try:
        _refuse_layers(values)
        fields = {name: value for name, value in values.items() if name != "model_type"}
        return AutoConfig.for_model(kind, **fields)
    except Exception as error:
        raise ConfigError(
            f"{_named(model)} describes no model of Transformers ({_described(error)}); correct it"
        ) from error


def _refuse_layers(values: Mapping[str, object]) -> None:
    """Raise ValueError for more than :data:`MAX_LAYERS` layers: a class of Transformers may make a
    list of them before it checks any.
    """
    for name, value in values.items():
        if "layer" in str(name) and isinstance(value, int) and value > MAX_LAYERS:
            raise ValueError(f"{name} = {value:.6g} is above {MAX_LAYERS:,}")


def _known_sizes(name: str) -> dict[str, object] | None:
    """Return the configuration of the model ``name`` among those that people train most, which
    instruction-tuned versions share; None for another model.
    """
    text = resources.files(__package__).joinpath("known_models.json").read_text("utf-8")
    table = {key.lower(): sizes for key, sizes in json.loads(text).items()}
    for candidate in (name.lower(), TUNED.sub("", name.lower())):
        for key, sizes in table.items():
            if candidate in (key, key.partition("/")[2]):
                return dict(sizes)
    return None


def _why_offline() -> str:
    """Return why the Hub cannot be reached, "" if it can or if a proxy has to be asked: the client
    of the Hub tries again for most of a minute.
    """
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    if urllib.request.getproxies():
        return ""
    endpoint = urlsplit(constants.ENDPOINT)
    try:
        socket.create_connection((endpoint.hostname, endpoint.port or 443), 3.0).close()
    except OSError as error:
        return str(error)
    return ""


def _named(model: object) -> str:
    """Return the name of ``model`` for a message."""
    if isinstance(model, (str, os.PathLike)):
        return repr(os.fspath(model))
    return f"this {type(model).__name__}"


WIDTH_PER_LAYER = 150  # between the 128 of a 7B Llama and the 200 of the ZeRO paper's largest model
HEAD = 128  # width of an attention head, of which that of the model is a multiple
WORDS = 32_000
SMALLEST, LARGE, LARGEST = 1e6, 5e9, 1e15


def sized_model(parameters: float) -> nn.Module:
    """Return a Llama without memory, of ``parameters`` parameters up to a five-hundredth.

    Its depth and width grow together; the width of its MLPs gives it the size. Heads and widths
    divide among 8 tensor-parallel ranks from :data:`LARGE` on, among 2 below. Raises ConfigError
    below :data:`SMALLEST` and above :data:`LARGEST`.
    """
    is_number = isinstance(parameters, numbers.Real)
    if not is_number or not SMALLEST <= parameters <= LARGEST:
        given = f"{parameters:g}" if is_number else f"{parameters!r:.40}"
        raise ConfigError(
            f"params = {given} is no size of a model; write a number from {SMALLEST:g} to "
            f"{LARGEST:g}"
        )
    layers = max(1, round((parameters / 12 / WIDTH_PER_LAYER**2) ** (1 / 3)))
    heads, step = (8, 16) if parameters >= LARGE else (2, 2)
    grain = heads * HEAD
    width = grain * max(1, round(math.sqrt(parameters / 12 / layers) / grain))
    words = min(WORDS, 64 * max(1, int(parameters / 20 / width / 64)))
    in_mlps = parameters - (2 * words + 1) * width - layers * (4 * width + 2) * width
    mlp = step * max(1, round(in_mlps / (3 * width * layers * step)))
    sizes = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": width,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": width // HEAD,
        "vocab_size": words,
        "max_position_embeddings": 1 << 20,
    }
    return build_on_meta(sizes)
