"""The manifest of a checkpoint read strictly: its JSON with the type of each field, and the rules
across fields.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import torch

from hf_zero.checkpoint.manifest import (
    AXES,
    DIGEST,
    FORMAT,
    PADDED_VERSION,
    VERSION,
    Adapter,
    Chunk,
    Export,
    FileEntry,
    FlatEntry,
    GroupEntry,
    Manifest,
    OptimizerEntry,
    TensorStateEntry,
    is_as_written,
    is_tensor_name,
)
from hf_zero.checkpoint.storage import AnyPath, store_errors
from hf_zero.checkpoint.tensorfile import BlockHashes, algorithm_of
from hf_zero.errors import CheckpointError
from hf_zero.logging import JsonObject, parse_json
from hf_zero.zero.layout.flat_layout import FlatLayout, Slot

_WORLD = ("size", "shard", "replicate", *AXES)


def dtype_of(name: str) -> torch.dtype:
    """Inverse of :func:`dtype_name`. Raises ValueError for a name that is not a dtype."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is not a dtype of torch")
    return dtype


READ = (1, 2, 3, 4, 5)  # versions that can be read; version 1 has SHA-256 alone


MAX_ELEMENTS = 1 << 56  # of a tensor; its bytes then fit 64 bits


MAX_MANIFEST = 1 << 30  # bytes; a larger manifest is damage, not a model


T = TypeVar("T")


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


def read_manifest(path: AnyPath) -> Manifest:
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
            f"{path} cannot be read ({error.strerror}); restore it, or load another tag of this run"
        ) from error
    return parse_manifest(content, path)


def parse_manifest(content: bytes, source: AnyPath) -> Manifest:
    """Inverse of :meth:`dumps`; ``source`` is named in errors."""
    try:
        data = parse_json(content)
    except ValueError as error:
        raise CheckpointError(
            f"{source} is damaged: no JSON ({error}); restore it, or load another tag of this run"
        ) from error
    if isinstance(data, dict) and DIGEST in data and not is_as_written(content, data[DIGEST]):
        raise CheckpointError(
            f"{source} is damaged: what it holds is not what its field {DIGEST!r} says; "
            "restore it, or load another tag of this run (or "
            "take the field out, if you have changed the file yourself)"
        )
    manifest = manifest_of(data, source)
    if not manifest.files:
        raise CheckpointError(
            f"{source} is damaged: no files are listed; restore it, or load another tag of this run"
        )
    return manifest


def manifest_of(data: object, source: AnyPath) -> Manifest:
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
