"""Transformers models without memory: an architecture built on the meta device from its
configuration alone.
"""

from __future__ import annotations

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

HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


def build_on_meta(model: Any) -> nn.Module:
    """Build the model described by ``model``: a configuration, a dict of one, a model folder, a
    config.json, or a name on the hub.

    The class is the one that the configuration names in ``architectures``, else the bare model of
    its type. Raises ConfigError if there is no such model.
    """
    config = _configuration(model)
    named = [getattr(transformers, name, None) for name in config.architectures or ()]
    build: Any = next(
        (cls._from_config for cls in named if cls is not None), transformers.AutoModel.from_config
    )
    try:
        with torch.device("meta"):
            return build(config, dtype=torch.float32)
    except ValueError as error:
        raise ConfigError(f"no model can be built from {_named(model)}: {error}") from error


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
