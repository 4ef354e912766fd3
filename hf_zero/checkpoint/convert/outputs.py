"""Tensors that a conversion writes: whole tensors assembled from chunks slice by slice, selected by
patterns, and for a PEFT model the adapters alone, under the names of PEFT's file.

Checkpoints of hf-zero list the adapters' tensors (``export.adapters`` in the manifest). In others
they are recognized by the names of LoRA and IA3 and the configuration beside the checkpoint.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from math import prod
from typing import Any, Literal

import torch

from hf_zero.checkpoint.convert.card import json_object, searched_folders
from hf_zero.checkpoint.manifest import Adapter, Export, Manifest
from hf_zero.checkpoint.manifest_reading import is_plain
from hf_zero.checkpoint.parameter_names import strip_wrappers
from hf_zero.checkpoint.reader import Checkpoint
from hf_zero.checkpoint.storage import AnyPath
from hf_zero.checkpoint.tensorfile import FilePlan, plan_file
from hf_zero.errors import CheckpointError, ConfigError
from hf_zero.logging import listed, logger

DtypeName = Literal["float32", "bfloat16", "float16"]
CONVERT_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class OutputTensor:
    """A whole tensor to write as ``name`` in ``dtype``; ``held`` is its name in the checkpoint."""

    name: str
    held: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    is_buffer: bool = False
    raw: bool = False

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def fill(self, checkpoint: Checkpoint, out: torch.Tensor) -> None:
        """Copy the whole tensor into ``out``, contiguous, on any device and of any dtype."""
        checkpoint.read(self.held, 0, out.detach().view(-1))


def dtype_option(dtype: DtypeName | torch.dtype | None) -> torch.dtype | None:
    """Return ``dtype`` as a torch dtype, or None. Raises ConfigError for an unsupported one."""
    name = str(dtype).removeprefix("torch.")
    if dtype is not None and name not in CONVERT_DTYPES:
        raise ConfigError(
            f"dtype {dtype!r} is not one that a checkpoint can be converted to; pass "
            f"{', '.join(CONVERT_DTYPES)}, or none at all"
        )
    return None if dtype is None else CONVERT_DTYPES[name]


def outputs(
    manifest: Manifest, dtype: torch.dtype | None = None, exclude_frozen: bool = False
) -> list[OutputTensor]:
    """Return the parameters of the model in its order, then the buffers, under their names in the
    checkpoint without the components of wrappers.

    With ``dtype`` None each parameter has the dtype it had when it was handed to training. Only
    floating-point parameters that are not raw are cast; buffers keep their dtype, as in training.
    """
    result = []
    for name, stored in manifest.parameters.items():
        flat, slot = manifest.slots[name]
        if flat.outside or (exclude_frozen and not flat.trainable):
            continue
        chosen = stored if dtype is None or flat.raw or not stored.is_floating_point else dtype
        result.append(OutputTensor(strip_wrappers(name), name, chosen, slot.whole, raw=flat.raw))
    return result + [
        OutputTensor(strip_wrappers(name), name, buffer_dtype, shape, is_buffer=True)
        for name, (buffer_dtype, shape) in manifest.buffers.items()
    ]


def exported(tensors: Sequence[OutputTensor], export: Export) -> list[OutputTensor]:
    """Return ``tensors`` named as ``save_pretrained`` names them, without those it leaves out."""
    skip, names = set(export.skip), export.names
    renamed = [
        replace(output, name=strip_wrappers(names.get(output.held, output.name)))
        for output in tensors
    ]
    return [output for output in renamed if output.name not in skip]


def tied_names(manifest: Manifest) -> dict[str, str]:
    """Return, by the further names of tied tensors, the names under which they are held."""
    return {strip_wrappers(tied): strip_wrappers(first) for tied, first in manifest.aliases.items()}


def all_names(manifest: Manifest) -> dict[str, list[str]]:
    """Return all names of each tied tensor, by each of them."""
    groups: dict[str, list[str]] = {}
    for tied, first in tied_names(manifest).items():
        groups.setdefault(first, [first]).append(tied)
    return {name: group for group in groups.values() for name in group}


def log_left_out(checkpoint: Checkpoint, state: Mapping[str, object]) -> None:
    """Warn of the ``state``, by name, that ``checkpoint`` has and the format has no place for, and
    of frozen parameters that were not saved.
    """
    if names := [name for name, value in state.items() if value]:
        logger.warning(
            "%s in %s is not written: this format has no place for it; load the checkpoint itself",
            listed(names),
            checkpoint.folder,
        )
    log_excluded(checkpoint)


def log_excluded(checkpoint: Checkpoint) -> None:
    """Warn of parameters that a converted model lacks: those outside the model, and all frozen ones
    if ``checkpoint`` was saved without them.
    """
    if checkpoint.manifest.outside:
        logger.warning(
            "%s in %s are not in the model, but of a loss with weights of its own, say: they are "
            "not written; load the checkpoint itself",
            listed(sorted(checkpoint.manifest.outside)),
            checkpoint.folder,
        )
    if checkpoint.manifest.excluded:
        logger.warning(
            "%s was saved without its frozen parameters: the converted folder lacks them",
            checkpoint.folder,
        )


def plan_outputs(chosen: Iterable[OutputTensor]) -> FilePlan:
    """Return the plan of a safetensors file of ``chosen``."""
    return plan_file([(t.name, t.dtype, t.shape) for t in chosen], {"format": "pt"})


def choose(
    tensors: Sequence[OutputTensor], only: str | Sequence[str] | None, remedy: str = ""
) -> list[OutputTensor]:
    """Return those of ``tensors`` whose written or held name matches one of the patterns
    ``only`` (``*``, ``?``, ``[…]``); all of them if ``only`` is None.

    Raises ConfigError for a pattern that matches nothing; the message has similar names, then
    ``remedy``.
    """
    if only is None:
        return list(tensors)
    given: Any = [only] if isinstance(only, str) else only
    patterns = list(given) if isinstance(given, Iterable) else [given]
    if not all(isinstance(pattern, str) for pattern in patterns):
        raise ConfigError(
            f"only={only!r} is no pattern; pass strings such as '*.embed_tokens.*', or none at all"
        )
    if not patterns:
        raise ConfigError(
            "only=[] chooses nothing; pass patterns over the names of tensors, or none at all"
        )
    chosen: set[int] = set()
    for pattern in patterns:
        fitting = {
            index
            for index, output in enumerate(tensors)
            if fnmatchcase(output.name, pattern) or fnmatchcase(output.held, pattern)
        }
        if not fitting:
            raise ConfigError(
                f"only={pattern!r} fits no tensor; "
                f"{_near(pattern, [output.name for output in tensors])}{remedy}"
            )
        chosen |= fitting
    return [output for index, output in enumerate(tensors) if index in chosen]


def _near(pattern: str, names: Sequence[str]) -> str:
    bare = pattern.strip("*")
    near = [
        name for name in names if bare and bare.lower() in name.lower()
    ] or difflib.get_close_matches(bare, names, 3, 0.4)
    shown = ", ".join((near or list(names))[:3])
    return (
        f"names near it are {shown}"
        if near
        else f"there are {len(names)} names, such as {shown}"
        if names
        else "there are none"
    )


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
    """Return (adapter, name in PEFT's file) of parameter ``key``; None if of no adapter."""
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
    return name if name.startswith(BASE) else BASE + name


def adapters_in(
    manifest: Manifest, folder: AnyPath, names: Iterable[str], needed: bool
) -> dict[str, Adapter]:
    """Return the adapters of a checkpoint whose tensors have ``names``; {} if there are none.

    Raises CheckpointError if they are ``needed`` but absent, or of a kind that names alone do not
    identify.
    """
    if manifest.export.adapters:
        return manifest.export.adapters
    by_adapter: dict[str, dict[str, str]] = {}
    for name in names:
        if (parts := written_name(strip_wrappers(name))) is not None and is_plain(parts[0]):
            by_adapter.setdefault(parts[0], {})[parts[1]] = name
    config, source = _beside(folder, by_adapter) if by_adapter else ({}, None)
    trouble = None
    if not by_adapter:
        trouble = f"{folder} holds no adapter that PEFT made"
    elif source is None:
        trouble = (
            f"{folder} holds the adapter {next(iter(by_adapter))!r} and no {CONFIG} lies beside it"
        )
    elif config.get("peft_type") not in KINDS or config.get("bias", "none") != "none":
        trouble = (
            f"{source} describes an adapter of kind {config.get('peft_type')}, bias "
            f"{config.get('bias', 'none')!r}, whose tensors their names do not tell"
        )
    if trouble is None:
        return {
            DEFAULT if len(by_adapter) == 1 else adapter: Adapter(dict(config), tensors)
            for adapter, tensors in by_adapter.items()
        }
    if needed:
        raise CheckpointError(
            f"{trouble}; convert it whole (adapters=False, --whole), or put the {CONFIG} of "
            "save_pretrained beside it"
        )
    if by_adapter:
        logger.warning("%s: it is converted whole, under the names of the wrapped model", trouble)
    return {}


def _beside(
    folder: AnyPath, adapters: Mapping[str, object]
) -> tuple[dict[str, object], AnyPath | None]:
    """Return the nearest configuration of a single adapter, and its path; else {} and None."""
    for parent in searched_folders(folder) if len(adapters) == 1 else ():
        path = parent / CONFIG
        if path.is_file():
            return json_object(path), path
    return {}, None


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
    lacks = {}
    for adapter, entry in adapters.items():
        below = "" if adapter == DEFAULT else f"{adapter}/"
        missing = [name for name in entry.tensors.values() if name not in tensors]
        if missing:
            lacks[adapter] = missing[0]
            continue
        parts[below + WEIGHTS] = [
            replace(tensors[key], name=written) for written, key in entry.tensors.items()
        ]
        configs[below + CONFIG] = (
            json.dumps(entry.config, indent=2, sort_keys=True).encode() + b"\n"
        )
    reasons = ", ".join(f"{adapter!r} lacks {name}" for adapter, name in lacks.items())
    if not parts:
        raise CheckpointError(
            f"{folder} holds no adapter that is whole: {reasons}; save it without "
            "exclude_frozen_parameters"
        )
    if lacks:
        logger.warning(
            "%s was saved without parts of adapters, which are left out: %s", folder, reasons
        )
    return parts, configs
