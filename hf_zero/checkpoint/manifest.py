"""The manifest of a checkpoint (FORMAT.md sections 3 and 4): frozen records, read strictly, written
as JSON; and parameter names without the prefixes of wrappers.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import torch

from hf_zero.checkpoint.storage import AnyPath, store_errors
from hf_zero.checkpoint.tensorfile import (
    DEFAULT_HASH,
    METADATA_KEY,
    BlockHashes,
    algorithm_of,
    hash_of,
)
from hf_zero.errors import CheckpointError
from hf_zero.logging import JsonObject, parse_json
from hf_zero.offload.storage import MASTER
from hf_zero.zero.layout.flat_layout import FlatLayout, Slot

SHARD = "shard"  # the weights of a flat without master weights, which others have as MASTER
# prefixes of tensors outside flat buffers
BUFFER, RNG, TENSOR_STATE = "buffer::", "rng::", "factor::"
LOADER = "loader::state"  # state of a rank's loader that has one of its own
AXES = ("tensor", "sequence", "expert", "pipeline")  # optional fields of `world`
_WORLD = ("size", "shard", "replicate", *AXES)


def tensor_state_key(parameter: str, name: str) -> str:
    """Return the name in a file of a state of a whole parameter."""
    return f"{TENSOR_STATE}{parameter}::{name}"


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """Inverse of :func:`dtype_name`. Raises ValueError for a name that is not a dtype."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is not a dtype of torch")
    return dtype


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


WRAPPERS = frozenset(["_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"])
DDP_PREFIX = "module."  # what DDP puts before every name


def strip_wrappers(name: str) -> str:
    """Return ``name`` without the components that wrappers add."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def pair_names(names: Iterable[str], others: Iterable[str]) -> dict[str, str]:
    """Map each of ``names`` to its name in ``others``: an equal one, else the one that is equal
    without wrappers, if it is the only one and no other of ``names`` equals either. Names without
    one are left out.
    """
    own, exact = dict.fromkeys(names), dict.fromkeys(others)
    pairs = {name: name for name in own if name in exact}
    within = _by_innermost(exact)
    for inner, (name, *rivals) in _by_innermost(own).items():
        candidates = within.get(inner, [])
        if not rivals and len(candidates) == 1:
            pairs[name] = candidates[0]
    return pairs


def _by_innermost(names: Iterable[str]) -> dict[str, list[str]]:
    result: dict[str, list[str]] = {}
    for name in names:
        result.setdefault(_innermost(name), []).append(name)
    return result


def _innermost(name: str) -> str:
    return strip_wrappers(name).removeprefix(DDP_PREFIX)


FORMAT = "hf-zero/checkpoint"
BF16_VERSION = 5  # written if there are master weights in bf16
PADDED_VERSION = 4  # written otherwise if there is padding between parameters
PARTS_VERSION = 3  # written otherwise if the manifest has parts of tensors
VERSION = 2  # written otherwise
READ = (1, 2, 3, 4, 5)  # versions that can be read; version 1 has SHA-256 alone
MANIFEST_NAME = "manifest.json"
MAX_ELEMENTS = 1 << 56  # of a tensor; its bytes then fit 64 bits
MAX_MANIFEST = 1 << 30  # bytes; a larger manifest is damage, not a model
DIGEST = "digest"  # the field with the hash of the whole file
_BLANK = f"{DEFAULT_HASH}:{'0' * 32}"  # placeholder of the digest while it is computed

T = TypeVar("T")


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

    @classmethod
    def read(cls, path: AnyPath) -> Manifest:
        """Read and check ``path``.

        Raises CheckpointError with the file and the field that is wrong.
        """
        try:
            with store_errors(path):
                size = path.stat().st_size
                if size > MAX_MANIFEST:
                    raise CheckpointError(
                        f"{path} has {size} bytes and is not a manifest; restore "
                        "it, or load another tag"
                    )
                content = path.read_bytes()
        except OSError as error:
            raise CheckpointError(
                f"{path} cannot be read ({error.strerror}); restore it, or load "
                "another tag of this run"
            ) from error
        return cls.parse(content, path)

    @classmethod
    def parse(cls, content: bytes, source: AnyPath) -> Manifest:
        """Inverse of :meth:`dumps`; ``source`` is named in errors."""
        try:
            data = parse_json(content)
        except ValueError as error:
            raise CheckpointError(
                f"{source} is damaged: no JSON ({error}); restore it, or load "
                "another tag of this run"
            ) from error
        if isinstance(data, dict) and DIGEST in data and not is_as_written(content, data[DIGEST]):
            raise CheckpointError(
                f"{source} is damaged: what it holds is not what its field {DIGEST!r} says; "
                "restore it, or load another tag of this run (or "
                "take the field out, if you have changed the file yourself)"
            )
        manifest = cls.from_json(data, source)
        if not manifest.files:
            raise CheckpointError(
                f"{source} is damaged: no files are listed; restore it, or load another tag of "
                "this run"
            )
        return manifest

    @classmethod
    def from_json(cls, data: object, source: AnyPath) -> Manifest:
        """Inverse of :meth:`to_json`; ``source`` is named in errors."""
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise CheckpointError(
                f"{source} is not a manifest of hf-zero (its format is not {FORMAT!r}); name a "
                "folder that save_checkpoint wrote"
            )
        if type(data.get("version")) is not int or data["version"] not in READ:
            raise CheckpointError(
                f"{source} has format version {data.get('version')!r}, this hf-zero reads versions "
                f"{READ[0]} to {READ[-1]}; "
                f"load it with the hf-zero that wrote it ({data.get('software')})"
            )
        try:
            manifest = _parse(data)
            _check(manifest)
        except (ValueError, TypeError, KeyError, OverflowError) as error:
            detail = f"field {error} is absent" if isinstance(error, KeyError) else str(error)
            raise CheckpointError(
                f"{source} is damaged: {detail}; restore it, or load another tag of this run"
            ) from error
        return manifest


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


def _typed(value: object, kind: type[T], where: str) -> T:
    # bool is a subclass of int: a flag in place of a size is damage.
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise TypeError(f"{where} is {type(value).__name__}, expected {kind.__name__}")
    return value


def _get(data: Mapping[str, object], key: str, kind: type[T]) -> T:
    return _typed(data[key], kind, key)


def _optional(data: Mapping[str, object], key: str, read: Callable[[JsonObject], T]) -> T | None:
    return None if data[key] is None else read(_get(data, key, dict))


def _items(data: Mapping[str, object], key: str, kind: type[T]) -> tuple[T, ...]:
    return tuple(_typed(item, kind, f"an item of {key}") for item in _get(data, key, list))


def _values(data: Mapping[str, object], key: str, kind: type[T]) -> dict[str, T]:
    return {
        name: _typed(value, kind, f"{key}[{name!r}]")
        for name, value in _get(data, key, dict).items()
    }


def _size(data: Mapping[str, object], key: str) -> int:
    value = _get(data, key, int)
    if value < 0:
        raise ValueError(f"{key} is {value}")
    return value


def _shape(data: Mapping[str, object], key: str) -> tuple[int, ...]:
    shape = _items(data, key, int)
    if not all(0 <= size <= MAX_ELEMENTS for size in shape) or math.prod(shape) > MAX_ELEMENTS:
        raise ValueError(f"{key} is {list(shape)}, which no tensor has")
    return shape


def _numbers(data: Mapping[str, object], where: str) -> JsonObject:
    for name, value in data.items():
        if not isinstance(value, (int, float)) or (type(value) is int and abs(value) >= 1 << 63):
            raise ValueError(f"{name} of {where} is {value!r:.40}, expected a number")
    return dict(data)


def is_plain(name: str) -> bool:
    """Return whether ``name`` is one path component that is not hidden."""
    return Path(name).name == name and name[:1] not in ("", ".") and name.isprintable()


def is_tensor_name(name: str) -> bool:
    """Return whether a parameter or buffer can be saved under ``name``."""
    return name.isprintable() and name != METADATA_KEY


def read_file_entry(
    data: dict[str, object], version: int = VERSION, rank: int | None = None
) -> FileEntry:
    """Inverse of :meth:`FileEntry.to_json`. Raises ValueError, TypeError or KeyError."""
    name = _get(data, "name", str)
    if not is_plain(name):
        raise ValueError(f"the file name {name!r} leads out of the folder")
    text = f"sha256:{_get(data, 'sha256', str)}" if version == 1 else _get(data, "hash", str)
    algorithm_of(text)
    return FileEntry(
        name,
        _size(data, "rank") if rank is None else rank,
        _size(data, "size"),
        text,
        BlockHashes.from_json(_get(data, "blocks", dict)) if "blocks" in data else None,
    )


def read_flat(data: dict[str, object], version: int = PADDED_VERSION) -> FlatEntry:
    """Inverse of :meth:`FlatEntry.to_json`, in a manifest of ``version``. Raises ValueError,
    TypeError or KeyError.
    """
    chunks = tuple(
        Chunk(_size(c, "file"), _size(c, "start"), _size(c, "stop"), _items(c, "tensors", str))
        for c in _items(data, "chunks", dict)
    )
    layout = _get(data, "layout", dict)
    for slot in _items(layout, "slots", dict):
        _get(slot, "name", str), _size(slot, "offset"), _shape(slot, "shape")
    _size(layout, "shards")
    return FlatEntry(
        _get(data, "key", str),
        _get(data, "trainable", bool),
        dtype_of(_get(data, "dtype", str)),
        FlatLayout.from_json(layout, adjacent=version < PADDED_VERSION),
        chunks,
        _typed(data.get("raw", False), bool, "raw"),
        _typed(data.get("bf16_masters", False), bool, "bf16_masters"),
        _typed(data.get("outside", False), bool, "outside"),
    )


def _adapter(name: str, data: dict[str, object]) -> Adapter:
    if not is_plain(name):
        raise ValueError(f"the adapter's name {name!r} leads out of the folder")
    return Adapter(_get(data, "config", dict), _values(data, "tensors", str))


def _optimizer(data: dict[str, object]) -> OptimizerEntry:
    groups = tuple(
        GroupEntry(
            _get(g, "hyperparameters", dict),
            _numbers(_get(g, "scalars", dict), "scalars"),
            _items(g, "parameters", str),
            {
                name: _numbers(of, f"apart[{name!r}]")
                for name, of in (_values(g, "apart", dict) if "apart" in g else {}).items()
            },
        )
        for g in _items(data, "groups", dict)
    )
    tensor_states = {
        name: TensorStateEntry(
            _size(entry, "file"),
            {key: _shape(entry["shapes"], key) for key in _get(entry, "shapes", dict)},
        )
        for name, entry in (_values(data, "factors", dict) if "factors" in data else {}).items()
    }
    return OptimizerEntry(_get(data, "class", str), groups, tensor_states)


def _state(data: dict[str, object]) -> JsonObject:
    return {"json": _get(data, "json", dict), "objects": list(_items(data, "objects", str))}


def read_export(data: dict[str, object]) -> Export:
    """Inverse of ``asdict`` of an :class:`Export`. Raises ValueError, TypeError or KeyError."""
    model_class = data["model_class"]
    adapters = _values(data, "adapters", dict) if "adapters" in data else {}
    return Export(
        _values(data, "names", str),
        _items(data, "skip", str),
        None if model_class is None else _typed(model_class, str, "model_class"),
        {name: _adapter(name, spec) for name, spec in adapters.items()},
    )


def _parse(data: JsonObject) -> Manifest:
    world = _get(data, "world", dict)
    return Manifest(
        save_id=_get(data, "save_id", str),
        tag=_get(data, "tag", str),
        world={key: _size(world, key) for key in _WORLD if key in world or key not in AXES},
        stage=_get(data, "stage", int),
        precision=_get(data, "precision", str),
        files=tuple(read_file_entry(file, data["version"]) for file in _items(data, "files", dict)),
        flats=tuple(read_flat(flat, data["version"]) for flat in _items(data, "flats", dict)),
        parameters={
            name: dtype_of(dtype) for name, dtype in _values(data, "parameters", str).items()
        },
        buffers={
            name: (dtype_of(_get(spec, "dtype", str)), _shape(spec, "shape"))
            for name, spec in _values(data, "buffers", dict).items()
        },
        aliases=_values(data, "aliases", str),
        excluded=_items(data, "excluded", str),
        export=read_export(_get(data, "export", dict)),
        optimizer=_optional(data, "optimizer", _optimizer),
        scaler=_optional(data, "scaler", dict),
        lr_scheduler=_optional(
            data,
            "lr_scheduler",
            lambda d: {"class": _get(d, "class", str), "state": _state(_get(d, "state", dict))},
        ),
        counters=_values(data, "counters", int),
        features=_get(data, "techniques", dict) if "techniques" in data else {},
        loader=_values(data, "loader", int) if "loader" in data else {},
        batch=_values(data, "batch", int) if "batch" in data else {},
        order=_size(data, "order") if "order" in data else 0,
        attempt=_size(data, "begun") if "begun" in data else 0,
        client_state=_state(_get(data, "client_state", dict)),
        objects=_optional(data, "objects", lambda d: read_file_entry(d, data["version"], rank=0)),
        software=_values(data, "software", str),
    )


def _check_parts(name: str, slots: Sequence[Slot]) -> None:
    """Raise ValueError unless ``slots`` hold each element of parameter ``name`` exactly once."""
    if len(slots) == 1 and slots[0].box is None:
        return  # held whole, once
    whole, numel = slots[0].whole, sum(slot.numel for slot in slots)
    if any(slot.box is None for slot in slots):
        raise ValueError(f"parameter {name!r} is held twice")
    if any(slot.whole != whole for slot in slots) or numel != math.prod(whole):
        raise ValueError(f"the parts of parameter {name!r} do not make one of shape {whole}")
    boxes = [slot.box for slot in slots if slot.box is not None]
    for one, other in itertools.combinations(boxes, 2):
        if one.meets(other):
            raise ValueError(f"parts of parameter {name!r} hold the same elements")


def _check_chunks(flat: FlatEntry, files: int) -> None:
    """Raise ValueError unless the chunks of ``flat`` cover it exactly once, in listed files, of
    which there are ``files``.
    """
    at = 0
    for chunk in flat.chunks:
        if (
            chunk.start != at
            or chunk.stop < at
            or chunk.file >= files
            or flat.weights not in chunk.tensors
        ):
            raise ValueError(
                f"chunk [{chunk.start}, {chunk.stop}) of flat {flat.key!r} does not continue "
                f"at {at} in a listed file with weights"
            )
        at = chunk.stop
    if at < flat.layout.end:
        raise ValueError(
            f"flat {flat.key!r} has {flat.layout.end} elements, its chunks end at {at}"
        )


def _check_tensor_names(manifest: Manifest) -> None:
    """Raise ValueError for names that no tensor can have, or that two would have in an export."""
    names, renamed = list(manifest.parts), manifest.export.names
    for name in (*names, *manifest.buffers, *manifest.aliases, *renamed.values()):
        if not is_tensor_name(name):
            raise ValueError(f"{name!r} is not the name of a tensor")
    exported = [name for name in (*names, *manifest.buffers) if name not in manifest.export.skip]
    if len({renamed.get(name, name) for name in exported}) < len(exported):
        raise ValueError("export.names gives two tensors one name")


def _check_optimizer(manifest: Manifest) -> None:
    """Raise ValueError for an optimizer whose groups or whole states refer to nothing."""
    groups = manifest.optimizer.groups if manifest.optimizer else ()
    all_names = {*manifest.parts, *manifest.excluded}
    if unknown := {name for group in groups for name in group.parameters} - all_names:
        raise ValueError(f"optimizer groups name {sorted(unknown)}, which no flat holds")
    for name, entry in manifest.optimizer.tensor_states.items() if manifest.optimizer else ():
        if entry.file >= len(manifest.files) or name not in manifest.parameters:
            raise ValueError(
                f"state of the whole parameter {name!r} is promised in file {entry.file}; there "
                f"are {len(manifest.files)} files, and the parameters are others"
            )


def _check(manifest: Manifest) -> None:
    """Check the rules across fields: each name is held once, the chunks cover each flat
    exactly once, references resolve.

    Raises ValueError.
    """
    ranks, size = [file.rank for file in manifest.files], manifest.world["size"]
    # no ranks: the common part of records in memory
    if ranks and (len(ranks) != size or ranks != [*range(size)]):
        raise ValueError(
            f"files are listed of ranks {ranks[:8]}, and those of ranks 0 to {size - 1} are due"
        )
    names = list(manifest.parts)
    for name, parts in manifest.parts.items():
        _check_parts(name, [slot for _, slot in parts])
    if set(names) != set(manifest.parameters):
        raise ValueError(
            f"flats and parameters disagree on {sorted(set(names) ^ set(manifest.parameters))}"
        )
    if unknown := set(manifest.aliases.values()) - set(names) - set(manifest.excluded):
        raise ValueError(f"aliases name {sorted(unknown)}, which no flat holds")
    for flat in manifest.flats:
        _check_chunks(flat, len(manifest.files))
    _check_tensor_names(manifest)
    for name, value in manifest.counters.items():
        if not 0 <= value < 1 << 63:
            raise ValueError(f"{name} is {value:.3g}")
    _check_optimizer(manifest)
    if (
        manifest.client_state["objects"]
        or (manifest.lr_scheduler and manifest.lr_scheduler["state"]["objects"])
    ) and not manifest.objects:
        raise ValueError("keys are promised in objects.pt, which is not listed")


def class_name(instance: object) -> str:
    return f"{type(instance).__module__}.{type(instance).__qualname__}"
