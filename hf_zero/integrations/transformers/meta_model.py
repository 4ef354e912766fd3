"""Transformers models without memory: an architecture built on the meta device from its
configuration alone.
"""

from __future__ import annotations

import functools
import os
import re
import socket
import textwrap
import urllib.request
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import torch
import transformers
from huggingface_hub import constants
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import AutoConfig, PreTrainedConfig

from hf_zero.errors import ConfigError
from hf_zero.logging import listed, logger

HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
# Transformers' tables of classes with a head, those of pretraining tasks first
HEADS = (
    "SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ", "IMAGE_TEXT_TO_TEXT", "MASKED_LM", "CAUSAL_LM",
    "IMAGE_CLASSIFICATION", "AUDIO_CLASSIFICATION", "PRETRAINING",
)  # fmt: skip


def build_on_meta(model: Any, needs_loss: bool = False) -> nn.Module:
    """Build the model described by ``model``: a configuration, a dict of one, a model folder, a
    config.json, or a name on the hub.

    The class is the one that the configuration names in ``architectures``, else the bare model of
    its type, with a warning. Raises ConfigError if there is no such model, or if the model
    ``needs_loss`` and is built without its head.
    """
    config = _configuration(model)
    names = config.architectures or ()
    named = [getattr(transformers, name, None) for name in names]
    build: Any = next((cls._from_config for cls in named if cls is not None), None)
    try:
        with torch.device("meta"):
            if build is not None:
                return build(config, dtype=torch.float32)
            bare = transformers.AutoModel.from_config(config, dtype=torch.float32)
    except ValueError as error:
        raise ConfigError(f"no model can be built from {_named(model)}: {error}") from error
    head = _with_head(config)
    unknown = f"only architectures that Transformers does not have ({listed(names)})"
    said = f"{_source(model)} names {unknown if names else 'no architectures'}; "
    remedy = f'{"write" if names else "add"} "architectures": ["{head}"]'
    if needs_loss and head:
        raise ConfigError(f"{said}{type(bare).__name__} has no head to compute a loss; {remedy}")
    without = f" without a head; {remedy}" if head else ""
    _warn_once(f"{said}counted as {type(bare).__name__}{without}")
    return bare


def _with_head(config: PreTrainedConfig) -> str:
    """Return the name of a class with a head for ``config``, "" if Transformers has none."""
    for task in HEADS:
        found = getattr(transformers, f"MODEL_FOR_{task}_MAPPING").get(type(config), None)
        if found is not None:
            first: str = (found[0] if isinstance(found, tuple) else found).__name__
            return first
    return ""


@functools.cache
def _warn_once(message: str) -> None:
    """Log ``message`` once, although a command may build the model again."""
    logger.warning("%s", message)


def _source(model: Any) -> str:
    """Return the file or value that describes ``model``, for a message."""
    if not isinstance(model, (str, os.PathLike)):
        return _named(model)
    name = os.fspath(model)
    return name if name.endswith(".json") else os.path.join(name, "config.json")


def _configuration(model: Any) -> PreTrainedConfig:
    if isinstance(model, PreTrainedConfig):
        return model
    offline = ""
    try:
        if isinstance(model, Mapping):
            values = dict(model)
            kind = values.pop("model_type", None)
            if kind is None:
                raise ConfigError(
                    "a dict without model_type describes no model; add it, or pass a "
                    "folder with a config.json"
                )
            return AutoConfig.for_model(kind, **values)
        if isinstance(model, (str, os.PathLike)):
            name = os.fspath(model)
            offline = (
                _why_offline() if HUB_NAME.fullmatch(name) and not os.path.exists(name) else ""
            )
            return AutoConfig.from_pretrained(name, local_files_only=bool(offline))
    except (OSError, ValueError, StrictDataclassError) as error:
        if isinstance(error, ConfigError):
            raise
        said = textwrap.shorten(str(error), 160)
        if offline:
            said = f"it is not in the cache, and the Hub cannot be reached: {offline}"
        raise ConfigError(
            f"{_named(model)} is not a model folder, config.json or known model "
            f"({said}); pass one of these"
        ) from error
    raise ConfigError(
        f"{type(model).__name__} {model!r} describes no model; pass a module, a configuration, a "
        "dict, a folder or a name"
    )


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


def _named(model: Any) -> str:
    return (
        repr(os.fspath(model))
        if isinstance(model, (str, os.PathLike))
        else f"this {type(model).__name__}"
    )
