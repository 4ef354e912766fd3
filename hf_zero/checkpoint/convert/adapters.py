"""Adapters alone, as PEFT lays them out: which tensors of a checkpoint they are, and the names they
have in PEFT's file.

Our own checkpoints say it (``export.adapters`` in the manifest). In others the names of LoRA and
IA3 say it, with the configuration that lies beside the checkpoint.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace

from hf_zero.checkpoint.convert.card import json_object, places
from hf_zero.checkpoint.convert.outputs import OutputTensor
from hf_zero.checkpoint.manifest import Manifest, is_plain
from hf_zero.checkpoint.records import Adapter, strip_wrappers
from hf_zero.checkpoint.storage import AnyPath
from hf_zero.errors import CheckpointError
from hf_zero.logs import logger

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
# the adapter that PEFT writes into the folder itself, others into folders of their names
DEFAULT = "default"
BASE = "base_model.model."
KINDS = ("LORA", "IA3")

# …lora_A.<adapter>.weight, …ia3_l.<adapter>, …lora_magnitude_vector.<adapter>.weight
_OF_LAYER = re.compile(
    r"(.*\.(?:lora_[A-Za-z_]+|ia3_l|trainable_tokens_delta))\.([^.]+)(?:\.([^.]+))?"
)
_WHOLE = re.compile(r"(.*)\.modules_to_save\.([^.]+)\.(.+)")


def written_name(held: str) -> tuple[str, str] | None:
    """(adapter, name in PEFT's file) of the parameter ``held``; None for one that is no part of
    an adapter.
    """
    if found := _WHOLE.fullmatch(held):
        module, adapter, leaf = found.groups()
        return adapter, _based(f"{module}.{leaf}")
    if found := _OF_LAYER.fullmatch(held):
        stem, adapter, leaf = found.groups()
        # DoRA's magnitudes were a parameter once and are still written under that name.
        return adapter, _based(
            stem if leaf is None or stem.endswith(".lora_magnitude_vector") else f"{stem}.{leaf}"
        )
    return None


def _based(name: str) -> str:
    return name if name.startswith(BASE) else BASE + name


def adapters_in(
    manifest: Manifest, folder: AnyPath, held: Iterable[str], needed: bool
) -> dict[str, Adapter]:
    """The adapters of a checkpoint whose tensors are named ``held``; empty where there are none.

    Raises CheckpointError if they are ``needed`` and are not there, or are of a kind that the names
    alone do not tell.
    """
    if manifest.export.adapters:
        return manifest.export.adapters
    found: dict[str, dict[str, str]] = {}
    for name in held:
        if (place := written_name(strip_wrappers(name))) is not None and is_plain(place[0]):
            found.setdefault(place[0], {})[place[1]] = name
    config, source = _beside(folder, found) if found else ({}, None)
    trouble = None
    if not found:
        trouble = f"{folder} holds no adapter that PEFT made"
    elif source is None:
        trouble = f"{folder} holds the adapter {next(iter(found))!r} and no {CONFIG} lies beside it"
    elif config.get("peft_type") not in KINDS or config.get("bias", "none") != "none":
        trouble = (
            f"{source} describes an adapter of kind {config.get('peft_type')}, bias "
            f"{config.get('bias', 'none')!r}, whose tensors their names do not tell"
        )
    if trouble is None:
        return {
            DEFAULT if len(found) == 1 else adapter: Adapter(dict(config), tensors)
            for adapter, tensors in found.items()
        }
    if needed:
        raise CheckpointError(
            f"{trouble}; convert it whole (adapters=False, --whole), or put the {CONFIG} of "
            "save_pretrained beside it"
        )
    if found:
        logger.warning("%s: it is converted whole, under the names of the wrapped model", trouble)
    return {}


def _beside(
    folder: AnyPath, found: Mapping[str, object]
) -> tuple[dict[str, object], AnyPath | None]:
    """The configuration of a single adapter, nearest first; of several each would need its own."""
    for place in places(folder) if len(found) == 1 else ():
        path = place / CONFIG
        if path.is_file():
            return json_object(path), path
    return {}, None


def adapter_parts(
    adapters: Mapping[str, Adapter], held: Mapping[str, OutputTensor], folder: AnyPath
) -> tuple[dict[str, list[OutputTensor]], dict[str, bytes]]:
    """The tensors of each weight file, and the contents of the configurations, by path in the
    target.

    An adapter of which the checkpoint lacks tensors is left out, and the log says so. Raises
    CheckpointError if none is whole.
    """
    parts: dict[str, list[OutputTensor]] = {}
    configs: dict[str, bytes] = {}
    lacks = {}
    for adapter, entry in adapters.items():
        below = "" if adapter == DEFAULT else f"{adapter}/"
        missing = [name for name in entry.tensors.values() if name not in held]
        if missing:
            lacks[adapter] = missing[0]
            continue
        parts[below + WEIGHTS] = [
            replace(held[own], name=written) for written, own in entry.tensors.items()
        ]
        configs[below + CONFIG] = (
            json.dumps(entry.config, indent=2, sort_keys=True).encode() + b"\n"
        )
    told = ", ".join(f"{adapter!r} lacks {name}" for adapter, name in lacks.items())
    if not parts:
        raise CheckpointError(
            f"{folder} holds no adapter that is whole: {told}; save it without "
            "exclude_frozen_parameters"
        )
    if lacks:
        logger.warning(
            "%s was saved without parts of adapters, which are left out: %s", folder, told
        )
    return parts, configs
