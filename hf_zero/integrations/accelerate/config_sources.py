"""Values and sources of a DeepSpeed config given to Accelerate or Transformers: files, presets, the
launcher's file or command.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_zero.config import PRESETS, ZeroConfig
from hf_zero.config.accelerate_yaml import is_accelerate
from hf_zero.config.files import load_file, load_text
from hf_zero.config.keys import KEYS
from hf_zero.config.provenance import DICT, SourcedDict, flattened

LAUNCH_FILE = "HF_ZERO_LAUNCH_FILE"  # the configuration file given to accelerate launch
LAUNCHED_BY = "HF_ZERO_LAUNCHED_BY"  # the command that wrote the options of accelerate launch


def mapping_of(given: Any) -> Any:
    """Convert the argument of ``HfDeepSpeedConfig``, which copies it, to a mapping with sources;
    other types are returned unchanged. Raises ConfigError for an invalid configuration.
    """
    if isinstance(given, Mapping):
        return SourcedDict.of(given, DICT)
    if not isinstance(given, (str, Path)):
        return given
    if isinstance(given, str) and (
        given in PRESETS or not (os.path.exists(given) or {os.sep, ".", "{", "="} & {*given})
    ):
        # raises ConfigError, listing the presets, if it is none
        return ZeroConfig.coerce(given, allow_auto=True, foreign=True).to_dict()
    text = load_text(given) if isinstance(given, str) and not os.path.exists(given) else None
    mapping = load_file(given) if text is None else text
    label = f"config file {given}" if text is None else "config string"
    if is_accelerate(mapping) or "stage" in mapping:
        return ZeroConfig.from_dict(mapping, source=label, allow_auto=True, foreign=True).to_dict()
    return SourcedDict.of(mapping, label)


def remember_launch(config: Any) -> None:
    """Record in ``config``, which Accelerate built from the launcher's variables, the sources of
    its values.
    """
    file = os.environ.get(LAUNCH_FILE)
    written = (
        dict(ZeroConfig.from_file(file, allow_auto=True, foreign=True).to_dict().written)
        if file and os.path.isfile(file)
        else {}
    )
    by = os.environ.get(LAUNCHED_BY) or (
        "accelerate launch"
        if "ACCELERATE_DEEPSPEED_ZERO_STAGE" in os.environ
        else "DeepSpeedPlugin"
    )
    for path, value in flattened(config):
        usual = path not in KEYS or KEYS[path].changes_nothing(value)
        if not usual and written.get(path, (None, ""))[0] != value:
            written[path] = (value, by)
    config.remember(written, "Accelerate")
