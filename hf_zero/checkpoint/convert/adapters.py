"""Adapters of a PEFT model as a conversion writes them: under the names of PEFT's files.

Checkpoints of hf-zero list the adapters' tensors (``export.adapters`` in the manifest). In others
they are recognized by the names of LoRA and IA3 and the configuration beside the checkpoint.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace

from hf_zero.checkpoint.convert.card import json_object, searched_folders
from hf_zero.checkpoint.convert.outputs import OutputTensor
from hf_zero.checkpoint.manifest import Adapter, Manifest
from hf_zero.checkpoint.manifest_reading import is_plain
from hf_zero.checkpoint.parameter_names import strip_wrappers
from hf_zero.checkpoint.storage import AnyPath
from hf_zero.errors import CheckpointError
from hf_zero.logging import listed, logger

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
# PEFT writes this adapter into the folder itself, others into subfolders of their names.
DEFAULT = "default"
BASE = "base_model.model."
KINDS = ("LORA", "IA3")

# …lora_A.<adapter>.weight, …ia3_l.<adapter>, …lora_magnitude_vector.<adapter>.weight
_OF_LAYER = re.compile(
    r"(.*\.(?:lora_[A-Za-z_]+|ia3_l|trainable_tokens_delta))\.([^.]+)(?:\.([^.]+))?"
)
_WHOLE = re.compile(r"(.*)\.modules_to_save\.([^.]+)\.(.+)")


def written_name(key: str) -> tuple[str, str] | None:
    """Return (adapter, name in PEFT's file) of the parameter ``key``; None if it is of none."""
    if match := _WHOLE.fullmatch(key):
        module, adapter, leaf = match.groups()
        return adapter, _based(f"{module}.{leaf}")
    if match := _OF_LAYER.fullmatch(key):
        stem, adapter, leaf = match.groups()
        # DoRA's magnitudes used to be a bare parameter and are still written under that name.
        return adapter, _based(
            stem if leaf is None or stem.endswith(".lora_magnitude_vector") else f"{stem}.{leaf}"
        )
    return None


def _based(name: str) -> str:
    """Return ``name`` below PEFT's wrapper, which every name in its files begins with."""
    return name if name.startswith(BASE) else BASE + name


def adapters_in(
    manifest: Manifest, folder: AnyPath, names: Iterable[str], needed: bool
) -> dict[str, Adapter]:
    """Return the adapters of a checkpoint whose tensors have ``names``; {} if there are none, or if
    the checkpoint is of another program and does not tell enough of them, as a warning says.

    Raises CheckpointError for none if they are ``needed``.
    """
    if manifest.export.adapters:
        return manifest.export.adapters
    tensors_of: dict[str, dict[str, str]] = {}
    for key in names:
        written = written_name(strip_wrappers(key))
        if written is not None and is_plain(written[0]):
            tensors_of.setdefault(written[0], {})[written[1]] = key
    paths = [parent / CONFIG for parent in searched_folders(folder)]
    path = next((path for path in paths if path.is_file()), None)
    remedy = "convert it whole (adapters=False, --whole)"
    if not tensors_of:
        reason = f"{folder} holds no adapter that PEFT made"
    elif len(tensors_of) > 1:
        reason = f"{folder} holds the adapters {listed(sorted(tensors_of))}, not one alone"
    elif path is None:
        reason = f"{folder} holds the adapter {next(iter(tensors_of))!r} and no {CONFIG} beside it"
        remedy += f", or put the {CONFIG} of save_pretrained beside it"
    else:
        config = json_object(path)
        kind, bias = config.get("peft_type"), config.get("bias", "none")
        if kind in KINDS and bias == "none":
            return {DEFAULT: Adapter(dict(config), next(iter(tensors_of.values())))}
        reason = (
            f"{path} describes an adapter of kind {kind}, bias {bias!r}, whose tensors their names "
            "do not tell"
        )
    if needed:
        raise CheckpointError(f"{reason}; {remedy}")
    if tensors_of:
        logger.warning("%s: it is converted whole, under the names of the wrapped model", reason)
    return {}


def adapter_parts(
    adapters: Mapping[str, Adapter], tensors: Mapping[str, OutputTensor], folder: AnyPath
) -> tuple[dict[str, list[OutputTensor]], dict[str, bytes]]:
    """Return the tensors of each weight file, and the contents of each configuration file, by path
    in the target.

    An adapter with tensors missing from the checkpoint is left out, with a warning. Raises
    CheckpointError if no adapter is complete.
    """
    parts: dict[str, list[OutputTensor]] = {}
    configs: dict[str, bytes] = {}
    lacks = []
    for adapter, entry in adapters.items():
        below = "" if adapter == DEFAULT else f"{adapter}/"
        missing = [name for name in entry.tensors.values() if name not in tensors]
        if missing:
            lacks.append(f"{adapter!r} lacks {missing[0]}")
            continue
        parts[below + WEIGHTS] = [
            replace(tensors[key], name=written) for written, key in entry.tensors.items()
        ]
        configs[below + CONFIG] = (
            json.dumps(entry.config, indent=2, sort_keys=True).encode() + b"\n"
        )
    reasons = ", ".join(lacks)
    if not parts:
        raise CheckpointError(
            f"{folder} holds no complete adapter: {reasons}; save it without "
            "exclude_frozen_parameters"
        )
    if lacks:
        logger.warning(
            "%s was saved without parts of adapters, which are left out: %s", folder, reasons
        )
    return parts, configs
