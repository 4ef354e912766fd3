"""Records of a manifest (FORMAT.md sections 3 and 4), and parameter names without the prefixes of
wrappers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from hf_zero.checkpoint.hashes import BlockHashes
from hf_zero.zero.layout.flat_layout import FlatLayout

MASTER, SHARD = "master", "shard"  # the two names under which the weights of a flat are stored
# prefixes of tensors outside flat buffers
BUFFER, RNG, FACTOR = "buffer::", "rng::", "factor::"


def factor_key(parameter: str, name: str) -> str:
    """Return the name in a file of a state of a whole parameter."""
    return f"{FACTOR}{parameter}::{name}"


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """Inverse of :func:`dtype_name`. Raises ValueError for a name that is not a dtype."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is no dtype of torch")
    return dtype


@dataclass(frozen=True)
class FileEntry:
    """A file of the checkpoint.

    ``rank`` is the rank that wrote it; ``hash`` includes the name of its algorithm (``hashes``).
    ``blocks`` are the block hashes of a tensor file, None if an older release wrote it.
    """

    name: str
    rank: int
    size: int
    hash: str
    blocks: BlockHashes | None = None

    def to_json(self) -> dict[str, Any]:
        blocks = {} if self.blocks is None else {"blocks": self.blocks.to_json()}
        told = {"name": self.name, "rank": self.rank, "size": self.size, "hash": self.hash}
        return told | blocks


@dataclass(frozen=True)
class Chunk:
    """Elements ``[start, stop)`` of a flat: in ``files[file]``, under each name in ``tensors``."""

    file: int
    start: int
    stop: int
    tensors: tuple[str, ...]


@dataclass(frozen=True)
class FlatEntry:
    key: str
    trainable: bool
    dtype: torch.dtype
    layout: FlatLayout
    chunks: tuple[Chunk, ...]
    raw: bool = False
    """Bytes that only their module can read: never cast."""

    @property
    def weights(self) -> str:
        """Name of the tensor with the parameters' values."""
        return MASTER if self.chunks and MASTER in self.chunks[0].tensors else SHARD

    def weights_dtype(self, tensor: str) -> torch.dtype | None:
        """Return the dtype in which the weights must be stored; None for an optimizer state, whose
        dtype is given in the file's header.
        """
        if tensor == MASTER:
            return torch.float64 if self.dtype == torch.float64 else torch.float32
        return self.dtype if tensor == SHARD else None

    @cached_property
    def starts(self) -> list[int]:
        return [chunk.start for chunk in self.chunks]

    @cached_property
    def states(self) -> tuple[str, ...]:
        """Names of the optimizer states that at least one chunk holds."""
        return tuple(
            sorted({name for chunk in self.chunks for name in chunk.tensors} - {MASTER, SHARD})
        )

    def to_json(self) -> dict[str, Any]:
        chunks = [
            {"file": c.file, "start": c.start, "stop": c.stop, "tensors": list(c.tensors)}
            for c in self.chunks
        ]
        return {
            "key": self.key,
            "trainable": self.trainable,
            "dtype": dtype_name(self.dtype),
            "raw": self.raw,
            "layout": self.layout.to_json(),
            "chunks": chunks,
        }


@dataclass(frozen=True)
class GroupEntry:
    """An optimizer group: its hyper-parameters, its scalars (numbers that are not per element), and
    the names of its parameters.

    ``apart`` has the scalars of parameters whose step count differs from the group's, because they
    were unused in some steps.
    """

    hyperparameters: dict[str, Any]
    scalars: dict[str, Any]
    parameters: tuple[str, ...]
    apart: dict[str, dict[str, Any]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        told = {
            "hyperparameters": self.hyperparameters,
            "scalars": self.scalars,
            "parameters": list(self.parameters),
        }
        return told | ({"apart": self.apart} if self.apart else {})


@dataclass(frozen=True)
class FactorEntry:
    """State of a whole parameter: the index of the file that holds it, and its shapes by name."""

    file: int
    shapes: dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class OptimizerEntry:
    class_name: str
    groups: tuple[GroupEntry, ...]
    factors: dict[str, FactorEntry] = field(default_factory=dict)  # by parameter


@dataclass(frozen=True)
class Adapter:
    """PEFT's description of one adapter: its configuration, and the map from names in its file to
    names of held tensors.
    """

    config: dict[str, Any]
    tensors: dict[str, str]


@dataclass(frozen=True)
class Export:
    """Changes that Hugging Face's ``save_pretrained`` makes to the names: ``names`` renames tied
    weights, ``skip`` lists dropped ones.

    ``adapters`` are those of a PEFT model, by name.
    """

    names: dict[str, str] = field(default_factory=dict)
    skip: tuple[str, ...] = ()
    model_class: str | None = None
    adapters: dict[str, Adapter] = field(default_factory=dict)


WRAPPERS = frozenset(["_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"])
DDP_PREFIX = "module."  # what DDP puts before every name


def strip_wrappers(name: str) -> str:
    """Return ``name`` without the components that wrappers add."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def pair_names(wanted: Iterable[str], held: Iterable[str]) -> dict[str, str]:
    """Map each of ``wanted`` to its name in ``held``: an equal one, else the only one that is equal
    without wrappers. Others are left out.
    """
    there = list(held)
    exact = set(there)
    within: dict[str, list[str]] = {}
    for name in there:
        within.setdefault(_innermost(name), []).append(name)
    made = {}
    for name in wanted:
        candidates = [name] if name in exact else within.get(_innermost(name), [])
        if len(candidates) == 1:
            made[name] = candidates[0]
    return made


def _innermost(name: str) -> str:
    return strip_wrappers(name).removeprefix(DDP_PREFIX)
