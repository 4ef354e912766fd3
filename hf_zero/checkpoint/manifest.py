"""The manifest of a checkpoint (FORMAT.md sections 3 and 4): frozen records, written as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property

import torch

from hf_zero.checkpoint.tensorfile import DEFAULT_HASH, METADATA_KEY, BlockHashes, hash_of
from hf_zero.logging import JsonObject
from hf_zero.offload.storage import MASTER
from hf_zero.zero.layout.flat_layout import FlatLayout, Slot

SHARD = "shard"  # the weights of a flat without master weights, which others have as MASTER
# prefixes of tensors outside flat buffers
BUFFER, RNG, TENSOR_STATE = "buffer::", "rng::", "factor::"
LOADER = "loader::state"  # state of a rank's loader that has one of its own
AXES = ("tensor", "sequence", "expert", "pipeline")  # optional fields of `world`


def tensor_state_key(parameter: str, name: str) -> str:
    """Return the name in a file of a state of a whole parameter."""
    return f"{TENSOR_STATE}{parameter}::{name}"


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class FileEntry:
    """A file of the checkpoint.

    ``rank`` is the rank that wrote it; ``hash`` includes the name of its algorithm.
    ``blocks`` are the block hashes of a tensor file, None if an older release wrote it.
    """

    name: str
    rank: int
    size: int
    hash: str
    blocks: BlockHashes | None = None

    def to_json(self) -> JsonObject:
        blocks = {} if self.blocks is None else {"blocks": self.blocks.to_json()}
        entry = {"name": self.name, "rank": self.rank, "size": self.size, "hash": self.hash}
        return entry | blocks


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
    bf16_masters: bool = False
    outside: bool = False
    """Parameters of the optimizer that are not in the model."""

    @cached_property
    def weights(self) -> str:
        """Name of the tensor with the parameters' values."""
        return MASTER if self.chunks and MASTER in self.chunks[0].tensors else SHARD

    def weights_dtype(self, tensor: str) -> torch.dtype | None:
        """Return the dtype in which the weights must be stored; None for an optimizer state, whose
        dtype is given in the file's header.
        """
        if tensor == MASTER and not self.bf16_masters:
            return torch.float64 if self.dtype == torch.float64 else torch.float32
        if tensor == MASTER:
            return torch.bfloat16
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

    def to_json(self) -> JsonObject:
        chunks = [
            {"file": c.file, "start": c.start, "stop": c.stop, "tensors": list(c.tensors)}
            for c in self.chunks
        ]
        return {
            "key": self.key,
            "trainable": self.trainable,
            "dtype": dtype_name(self.dtype),
            "raw": self.raw,
            **({"bf16_masters": True} if self.bf16_masters else {}),
            **({"outside": True} if self.outside else {}),
            "layout": self.layout.to_json(),
            "chunks": chunks,
        }


@dataclass(frozen=True)
class GroupEntry:
    """An optimizer group: its hyper-parameters, its scalars (numbers that are not per element), and
    the names of its parameters.

    ``overrides`` has the scalars of parameters whose step count differs from the group's, because
    they were unused in some steps.
    """

    hyperparameters: dict[str, object]
    scalars: JsonObject
    parameters: tuple[str, ...]
    overrides: dict[str, JsonObject] = field(default_factory=dict)

    def numbers_of(self, name: str) -> JsonObject:
        """Return the scalars of parameter ``name`` of the group."""
        return self.overrides.get(name, self.scalars)

    @cached_property
    def never_stepped(self) -> frozenset[str]:
        """The parameters without a step: saved state of theirs is as before the first one."""
        return frozenset(name for name, numbers in self.overrides.items() if not numbers)

    def to_json(self) -> JsonObject:
        entry = {
            "hyperparameters": self.hyperparameters,
            "scalars": self.scalars,
            "parameters": list(self.parameters),
        }
        return entry | ({"apart": self.overrides} if self.overrides else {})


@dataclass(frozen=True)
class TensorStateEntry:
    """State of a whole parameter: the index of the file that holds it, and its shapes by name."""

    file: int
    shapes: dict[str, tuple[int, ...]]

    def to_json(self) -> JsonObject:
        shapes = {name: list(shape) for name, shape in self.shapes.items()}
        return {"file": self.file, "shapes": shapes}


@dataclass(frozen=True)
class OptimizerEntry:
    class_name: str
    groups: tuple[GroupEntry, ...]
    # by parameter: states of whole tensors (of Adafactor), which the format calls factors
    tensor_states: dict[str, TensorStateEntry] = field(default_factory=dict)

    def to_json(self) -> JsonObject:
        groups = [group.to_json() for group in self.groups]
        states = {name: state.to_json() for name, state in self.tensor_states.items()}
        entry = {"class": self.class_name, "groups": groups}
        return entry | ({"factors": states} if states else {})


@dataclass(frozen=True)
class Adapter:
    """PEFT's description of one adapter: its configuration, and the map from names in its file to
    names of held tensors.
    """

    config: JsonObject
    tensors: dict[str, str]


@dataclass(frozen=True)
class Export:
    """Changes that Hugging Face's ``save_pretrained`` makes to the names: ``names`` renames tied
    weights, ``skip`` lists dropped ones.

    ``adapters``: the adapters of a PEFT model, by name.
    """

    names: dict[str, str] = field(default_factory=dict)
    skip: tuple[str, ...] = ()
    model_class: str | None = None
    adapters: dict[str, Adapter] = field(default_factory=dict)


FORMAT = "hf-zero/checkpoint"
BF16_VERSION = 5  # written if there are master weights in bf16
PADDED_VERSION = 4  # written otherwise if there is padding between parameters
PARTS_VERSION = 3  # written otherwise if the manifest has parts of tensors
VERSION = 2  # written otherwise
MANIFEST_NAME = "manifest.json"
DIGEST = "digest"  # the field with the hash of the whole file
_BLANK = f"{DEFAULT_HASH}:{'0' * 32}"  # placeholder of the digest while it is computed


@dataclass(frozen=True)
class Manifest:
    save_id: str
    tag: str
    world: dict[str, int]
    stage: int
    precision: str
    files: tuple[FileEntry, ...]
    flats: tuple[FlatEntry, ...]
    parameters: dict[str, torch.dtype]
    buffers: dict[str, tuple[torch.dtype, tuple[int, ...]]]
    aliases: dict[str, str]
    excluded: tuple[str, ...]
    export: Export
    optimizer: OptimizerEntry | None
    scaler: dict[str, float] | None
    lr_scheduler: JsonObject | None
    counters: dict[str, int]
    client_state: JsonObject
    objects: FileEntry | None
    software: dict[str, str]
    features: JsonObject = field(default_factory=dict)
    """State of each ``Feature`` by name, of techniques and others: JSON calls it ``techniques``."""
    loader: dict[str, int] = field(default_factory=dict)
    batch: dict[str, int] = field(default_factory=dict)
    order: int = 0  # one more than the largest in its folder; 0: of a version that wrote none
    attempt: int = 0
    """Start of the attempt that saved, which JSON calls ``begun``; 0: of a run without checkpoints
    in memory.
    """

    @cached_property
    def slots(self) -> dict[str, tuple[FlatEntry, Slot]]:
        """The flat entry and slot of each parameter, or of its first part."""
        return {name: parts[0] for name, parts in self.parts.items()}

    @cached_property
    def parts(self) -> dict[str, list[tuple[FlatEntry, Slot]]]:
        """The flat entries and slots of each parameter: a single one, or one per part."""
        by_parameter: dict[str, list[tuple[FlatEntry, Slot]]] = {}
        for flat in self.flats:
            for slot in flat.layout.slots:
                by_parameter.setdefault(slot.name, []).append((flat, slot))
        return by_parameter

    @cached_property
    def outside(self) -> frozenset[str]:
        """The parameters of the optimizer that are not in the model."""
        slots = (slot for flat in self.flats if flat.outside for slot in flat.layout.slots)
        return frozenset(slot.name for slot in slots)

    @property
    def version(self) -> int:
        """Version of the format in which this manifest is written."""
        if any(flat.bf16_masters for flat in self.flats):
            return BF16_VERSION
        if any(flat.layout.end > flat.layout.numel for flat in self.flats):
            return PADDED_VERSION
        cut = any(slot.box is not None for parts in self.parts.values() for _, slot in parts)
        return PARTS_VERSION if cut else VERSION

    def to_json(self) -> JsonObject:
        return {
            "format": FORMAT,
            "version": self.version,
            "software": self.software,
            "save_id": self.save_id,
            "tag": self.tag,
            **({"order": self.order} if self.order else {}),
            **({"begun": self.attempt} if self.attempt else {}),
            "world": self.world,
            "stage": self.stage,
            "precision": self.precision,
            "counters": self.counters,
            **({"techniques": self.features} if self.features else {}),
            **({"loader": self.loader} if self.loader else {}),
            **({"batch": self.batch} if self.batch else {}),
            "files": [file.to_json() for file in self.files],
            "objects": self.objects and self.objects.to_json(),
            "optimizer": self.optimizer and self.optimizer.to_json(),
            "scaler": self.scaler,
            "lr_scheduler": self.lr_scheduler,
            "client_state": self.client_state,
            "export": asdict(self.export) | {"skip": list(self.export.skip)},
            "aliases": self.aliases,
            "excluded": list(self.excluded),
            "buffers": {
                name: {"dtype": dtype_name(dtype), "shape": list(shape)}
                for name, (dtype, shape) in self.buffers.items()
            },
            "parameters": {name: dtype_name(dtype) for name, dtype in self.parameters.items()},
            "flats": [flat.to_json() for flat in self.flats],
        }

    def dumps(self) -> bytes:
        """Return the file's content, with the digest as its last field."""
        return sealed(self.to_json())

    def all_files(self) -> list[FileEntry]:
        """Return every listed file."""
        return [*self.files, *([self.objects] if self.objects else [])]


def sealed(data: Mapping[str, object]) -> bytes:
    """Return ``data`` as JSON, with the hash of the text as its last field, :data:`DIGEST`."""
    blank = json.dumps({**data, DIGEST: _BLANK}, indent=1).encode()
    before, _, after = blank.rpartition(_BLANK.encode())
    return before + hash_of(blank).encode() + after


def is_as_written(content: bytes, digest: object) -> bool:
    """Return whether ``digest``, the last field of ``content``, is the hash of ``content`` with
    zeros in its place.
    """
    if not isinstance(digest, str) or not digest or not digest.isascii():
        return False
    before, _, after = content.rpartition(digest.encode())
    return hash_of(before + _BLANK.encode() + after) == digest


def is_tensor_name(name: str) -> bool:
    """Return whether a parameter or buffer can be saved under ``name``."""
    return name.isprintable() and name != METADATA_KEY


def class_name(instance: object) -> str:
    return f"{type(instance).__module__}.{type(instance).__qualname__}"
