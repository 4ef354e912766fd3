"""Whole tensors that a conversion writes: those of a checkpoint, under the names of
``save_pretrained``, selected by patterns; and what a format leaves out.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from math import prod
from typing import Literal

import torch

from hf_zero.checkpoint.manifest import Export, Manifest
from hf_zero.checkpoint.parameter_names import strip_wrappers
from hf_zero.checkpoint.reader import Checkpoint
from hf_zero.checkpoint.tensorfile import FilePlan, plan_file
from hf_zero.errors import ConfigError
from hf_zero.logging import listed, logger

DtypeName = Literal["float32", "bfloat16", "float16"]
CONVERT_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class OutputTensor:
    """A whole tensor to write as ``name`` in ``dtype``; ``held`` is its name in the checkpoint. A
    ``raw`` parameter is bytes that no cast may change, such as weights in few bits.
    """

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
    several = isinstance(only, Iterable) and not isinstance(only, str)
    given: list[object] = [*only] if several else [only]
    patterns = [pattern for pattern in given if isinstance(pattern, str)]
    if len(patterns) < len(given):
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
    """Return words for the ``names`` most like ``pattern``, or for how many there are."""
    bare = pattern.strip("*")
    near = [name for name in names if bare and bare.lower() in name.lower()]
    near = near or difflib.get_close_matches(bare, names, 3, 0.4)
    if near:
        return f"names near it are {', '.join(near[:3])}"
    if names:
        return f"there are {len(names)} names, such as {', '.join(names[:3])}"
    return "there are none"
