"""Folders of ``torch.distributed.checkpoint``: those of FSDP, FSDP2, and Accelerate's sharded ones.

[Note: file layout]
``.metadata`` is a pickle of torch's own records: for each name its shape and chunks (offsets and
sizes along each dimension), and the ``*.distcp`` file and byte position of each chunk, which was
written by ``torch.save``. Names are paths into the dict that was saved: ``model.<parameter>``,
``optimizer.state.<parameter>.<state>``, ``optimizer.param_groups.<n>.<setting>``. Accelerate writes
two such folders side by side, ``pytorch_model_fsdp_0`` and ``optimizer_0``. Nothing marks the
tensors of the model that are buffers, and tied weights may be stored under both names: the model
that loads them resolves this.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hf_zero.checkpoint.foreign.assembled import (
    Assembled,
    FolderContents,
    ModelGroups,
    OptimizerGroup,
    Parameter,
    ParameterPart,
    Ranged,
)
from hf_zero.checkpoint.foreign.optimizer_states import Shape, as_in_model, named
from hf_zero.checkpoint.foreign.tensor_ranges import SavedTensor
from hf_zero.checkpoint.foreign.torch_files import Opaque, damaged, load_range
from hf_zero.checkpoint.manifest import MASTER, SHARD
from hf_zero.errors import CheckpointError, HfZeroError
from hf_zero.logging import listed, logger
from hf_zero.optim.group_settings import plain_settings

METADATA = ".metadata"
PARTS = ("pytorch_model_fsdp*", "optimizer_*")
MODEL, OPTIMIZER = ("model", "module", "state_dict"), ("optimizer", "optim", "optimizers")
SCHEDULER, STEP = ("lr_scheduler", "scheduler"), "step"
COUNTERS = "hf_zero_counters"  # of an engine: not all optimizers count steps
# The record classes of torch.distributed.checkpoint and the classes of their fields. Everything
# else in a pickle is refused.
ALLOWED = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "ChunkStorageMetadata",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "TensorProperties",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath", "Path"},
    "collections": {"OrderedDict"},
    "torch": {"Size"}
    | {name for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
}


class SavedRecord(NamedTuple):
    """A saved value: the name that it is stored under, and torch's record of it."""

    name: str
    entry: Any

    @property
    def shape(self) -> Shape | None:
        """Return the shape of a tensor; None for any other value."""
        return tuple(self.entry.size) if hasattr(self.entry, "chunks") else None


Keys = tuple[Any, ...]  # a path into the dict that was saved
States = Mapping[Any, Mapping[str, SavedRecord]]  # records of states by parameter


class ChunkPlace(NamedTuple):
    """The bytes of a value, or of a chunk of a tensor, in a file. ``index`` is torch's."""

    index: Any
    path: Path
    offset: int
    length: int


class TensorPiece(NamedTuple):
    """The elements from ``start`` to ``stop`` of a flattened tensor, in file number ``file``."""

    start: int
    stop: int
    file: int
    values: Ranged


def open_checkpoint(folder: Path, model_groups: ModelGroups = ()) -> Assembled:
    """Open ``folder`` as a checkpoint.

    Raises CheckpointError for a damaged one, and for one that holds no model.
    """
    parts = sorted(path for pattern in PARTS for path in folder.glob(f"{pattern}/{METADATA}"))
    metadata = parts or [folder / METADATA]
    try:
        return Assembled(_Records(folder, metadata, model_groups).contents())
    except HfZeroError:
        raise
    except (AttributeError, LookupError, TypeError, ValueError) as error:  # of what it lacks
        raise damaged(metadata[0], f"{type(error).__name__}: {error}") from error


class _Unpickler(pickle.Unpickler):
    """The unpickler of ``.metadata``, which makes objects of the classes in ``ALLOWED`` alone."""

    def find_class(self, module: str, name: str) -> Any:
        module = "pathlib" if module == "pathlib._local" else module  # written on Python 3.13
        if name in ALLOWED.get(module, ()):
            # Paths are not used, and a path class of another system cannot be instantiated here.
            return Opaque if module == "pathlib" else super().find_class(module, name)
        raise pickle.UnpicklingError(f"it holds {module}.{name}")


class _Records:
    """The records of one or two folders, in the metadata files ``metadata``.

    records: by path into the dict that was saved. places: of the chunks of each record, by its
    name. files: those that parts refer to.
    """

    def __init__(self, folder: Path, metadata: list[Path], model_groups: ModelGroups = ()) -> None:
        self.folder, self.model_groups = folder, model_groups
        self.files: list[Path] = []
        self.records: dict[Keys, SavedRecord] = {}
        self.places: dict[str, list[ChunkPlace]] = {}
        for path in metadata:
            self._add(path)
        self._strip_common_key()

    def _add(self, path: Path) -> None:
        """Add the records of the metadata file ``path``. Raises CheckpointError if it is damaged,
        or if a file is missing, cut short or out of its folder.
        """
        try:
            with open(path, "rb") as file:
                data = _Unpickler(file).load()
            for fqn, entry in data.state_dict_metadata.items():
                keys = tuple((data.planner_data or {}).get(fqn, tuple(fqn.split("."))))
                self.records[keys] = SavedRecord(f"{path.parent.name}/{fqn}", entry)
            sizes: dict[str, int] = {}
            for index, info in data.storage_data.items():
                name = info.relative_path
                if Path(name).name != name or getattr(info, "transform_descriptors", None):
                    raise pickle.UnpicklingError(
                        f"it points to {name!r}, which leads out of its folder or is compressed"
                    )
                if name not in sizes:
                    sizes[name] = _size(path.parent / name)
                if info.offset + info.length > sizes[name]:
                    raise damaged(
                        path.parent / name,
                        f"it ends at byte {sizes[name]}, {index.fqn!r} at "
                        f"{info.offset + info.length}",
                    )
                place = ChunkPlace(index, path.parent / name, info.offset, info.length)
                self.places.setdefault(f"{path.parent.name}/{index.fqn}", []).append(place)
        except CheckpointError:
            raise
        except Exception as error:  # a damaged file can make the unpickler raise anything
            raise CheckpointError(
                f"{path} is damaged, or not what torch.distributed.checkpoint writes ({error}); "
                "restore it, or name another checkpoint"
            ) from error

    def _strip_common_key(self) -> None:
        """Strip the common first key if everything was saved inside one object, as in torch's own
        recipe: ``{"app": Stateful}``.
        """
        first = {keys[0] for keys in self.records}
        inner = {keys[1:]: record for keys, record in self.records.items()}
        has_model = all(inner) and any(keys[0] in MODEL for keys in inner)
        if len(first) == 1 and not first & {*MODEL} and has_model:
            self.records = inner

    def contents(self) -> FolderContents:
        model = self._under(MODEL)
        if not model and all(record.shape is not None for record in self.records.values()):
            model = self.records  # a bare state dict of a model
        if not model:
            raise CheckpointError(
                f"{self.folder} holds no model: its names begin with "
                f"{sorted({str(keys[0]) for keys in self.records})[:5]}, none of "
                f'{", ".join(MODEL)}; save it as {{"model": ..., "optimizer": ...}}'
            )
        tensors = {
            ".".join(map(str, keys)): record
            for keys, record in model.items()
            if record.shape is not None
        }
        shapes: dict[str, Shape] = {name: tuple(r.entry.size) for name, r in tensors.items()}
        groups, states = self._optimizer(shapes)
        parameters = tuple(
            self._parameter(name, record, shapes[name], states.get(name))
            for name, record in tensors.items()
        )
        client_state = {} if model is self.records else self._client_state()
        steps = max((int(group.scalars.get(STEP, 0)) for group in groups or ()), default=0)
        counters = client_state.pop(COUNTERS, None) or ({"global_steps": steps} if steps else {})
        return FolderContents(
            folder=self.folder,
            writer="torch.distributed.checkpoint",
            files=tuple(str(path.relative_to(self.folder)) for path in self.files) or (METADATA,),
            parameters=parameters,
            groups=groups,
            lr_scheduler=next(filter(None, map(client_state.get, SCHEDULER)), None),
            counters=counters,
            client_state=client_state,
            world=len({place.path for places in self.places.values() for place in places}) or 1,
        )

    def _client_state(self) -> dict[str, Any]:
        """Return what was saved beside the model and the optimizer, with its nesting. Tensors there
        are not read; a warning names them.
        """
        tree: dict[str, Any] = {}
        skipped = []
        weights = {".".join(map(str, keys)) for keys in self._under(MODEL)}
        for keys, record in self.records.items():
            if keys[0] in (*MODEL, *OPTIMIZER):
                continue
            if record.shape is not None:
                name = ".".join(map(str, keys))
                if name not in weights:  # torchtitan's names of the same tensors
                    skipped.append(name)
            else:
                inner = tree
                for key in keys[:-1]:
                    inner = inner.setdefault(key, {})
                inner[keys[-1]] = self._value(record)
        if skipped:
            logger.warning(
                "%s holds tensors beside the model, which the client state is without: %s",
                self.folder,
                listed(skipped),
            )
        return {str(key): _with_lists(value) for key, value in tree.items()}

    def _under(self, first: tuple[str, ...]) -> dict[Keys, SavedRecord]:
        """Return the records whose first key is one of ``first``, by the keys after it."""
        return {
            keys[1:]: record
            for keys, record in self.records.items()
            if keys[0] in first and len(keys) > 1
        }

    def _parameter(
        self, name: str, record: SavedRecord, shape: Shape, state: Mapping[str, SavedRecord] | None
    ) -> Parameter:
        """Return the parameter ``name`` with those of the records of its ``state`` that have its
        shape; it is frozen without any. Raises CheckpointError if these are cut in other places.
        """
        elementwise = {key: r for key, r in (state or {}).items() if r.shape == shape}
        main = SHARD if state is None else MASTER
        pieces = {key: self._pieces(r) for key, r in {main: record, **elementwise}.items()}
        cuts = [[(piece.start, piece.stop) for piece in of_one] for of_one in pieces.values()]
        if any(cut != cuts[0] for cut in cuts):
            raise CheckpointError(
                f"{self.folder} holds {name!r} and its optimizer's state cut in different places; "
                "load and save it again with torch"
            )
        parts = tuple(
            ParameterPart(piece.file, {key: of_one[i].values for key, of_one in pieces.items()})
            for i, piece in enumerate(pieces[main])
        )
        return Parameter(name, shape, record.entry.properties.dtype, state is not None, parts)

    def _pieces(self, record: SavedRecord) -> list[TensorPiece]:
        """Return the chunks of a tensor in the order of its elements.

        Raises CheckpointError for a tensor cut along another dimension than the first.
        """
        name, entry = record
        shape, pieces = torch.Size(entry.size), []
        row = shape[1:].numel() if shape else 1
        for index, path, offset, length in self.places.get(name, ()):
            chunks = (
                chunk
                for chunk in entry.chunks
                if index.offset is None or tuple(chunk.offsets) == tuple(index.offset)
            )
            chunk = next(chunks, None)
            if chunk is None or tuple(chunk.sizes)[1:] != tuple(shape)[1:]:
                raise CheckpointError(
                    f"{self.folder} holds {name!r} cut along another dimension than the first "
                    "(tensor parallelism); load and save it again with torch"
                )
            start = (chunk.offsets[0] if shape else 0) * row
            numel = torch.Size(chunk.sizes).numel()
            if path not in self.files:
                self.files.append(path)
            tensor = SavedTensor(name, path, offset, length, entry.properties.dtype, numel)
            values = Ranged(tensor.dtype, numel, tensor.read)
            pieces.append(TensorPiece(start, start + numel, self.files.index(path), values))
        return sorted(pieces, key=lambda piece: (piece.start, piece.stop))

    def _optimizer(
        self, shapes: Mapping[str, Shape]
    ) -> tuple[tuple[OptimizerGroup, ...] | None, States]:
        """Return the optimizer's groups and, by parameter, the records of its states. Groups are
        None if the parameters cannot be told; a warning says so.

        ``shapes``: the shapes of the model's parameters.
        """
        groups, states = self._optimizer_records()
        saved_groups = bool(groups)
        if any(not isinstance(key, str) for group in groups for key in group.get("params") or ()):
            groups, states = self._with_names(groups, states, shapes)
        if saved_groups and (not groups or not states.keys() <= shapes.keys()):
            logger.warning(
                "%s does not say which parameters its optimizer's state belongs to: the weights "
                "are read, the optimizer's state is not; load it into an engine with the same "
                "model and optimizer groups, or save it with torch's get_optimizer_state_dict",
                self.folder,
            )
            return None, {}
        scalars = self._scalars(states, shapes)
        groups_of_model = [
            OptimizerGroup.of(
                plain_settings(values),
                {name: scalars.get(name) for name in values.get("params") or ()},
            )
            for values in groups
        ]
        return tuple(groups_of_model) or None, states

    def _optimizer_records(self) -> tuple[list[dict[str, Any]], dict[Any, dict[str, SavedRecord]]]:
        """Return the settings of the optimizer's groups, and the records of states by the keys in
        ``params`` of these: names, or numbers in the order of the optimizer.
        """
        settings: dict[Any, dict[str, Any]] = {}
        states: dict[Any, dict[str, SavedRecord]] = {}
        by_parameter: dict[str, dict[str, Any]] = {}
        for keys, record in self._under(OPTIMIZER).items():
            part, _, path = str(keys[0]).partition(".")
            if len(keys) == 3 and part == "state":
                states.setdefault(keys[1], {})[keys[2]] = record
            elif len(keys) == 3 and part == "param_groups":
                settings.setdefault(keys[1], {})[keys[2]] = self._value(record)
            elif len(keys) == 1 and part in ("state", "param_groups"):
                # flatten_optimizer_state_dict: a path in one name
                name, _, last = path.rpartition(".")
                if part == "state":
                    states.setdefault(name, {})[last] = record
                else:
                    by_parameter.setdefault(name, {})[last] = self._value(record)
        if not settings:  # that format records no groups: equal settings form one
            for name, values in by_parameter.items():
                group = settings.setdefault(repr(sorted(values.items())), {**values, "params": []})
                group["params"].append(name)
        return list(settings.values()), states

    def _with_names(
        self,
        groups: list[dict[str, Any]],
        states: dict[Any, dict[str, SavedRecord]],
        shapes: Mapping[str, Shape],
    ) -> tuple[list[dict[str, Any]], dict[Any, dict[str, SavedRecord]]]:
        """Return ``groups`` and ``states`` with names of parameters in place of numbers; both are
        empty if the names cannot be told.
        """
        numbered = [[str(key) for key in group.get("params") or ()] for group in groups]
        expected = [[_shape_of(states.get(key, {})) for key in keys] for keys in numbered]
        names = named(groups, shapes) or as_in_model(expected, self.model_groups, shapes) or []
        pairs = [pair for keys, of_group in zip(numbered, names) for pair in zip(keys, of_group)]
        groups = [{**group, "params": of_group} for group, of_group in zip(groups, names)]
        return groups, {name: states[key] for key, name in pairs if key in states}

    def _scalars(
        self, states: dict[Any, dict[str, SavedRecord]], shapes: Mapping[str, Shape]
    ) -> dict[Any, dict[str, float]]:
        """Return the scalars of each parameter's state, and take them out of ``states``. In the
        state of a parameter without dimensions, the names tell them from its moments.
        """
        names = {STEP} | {
            key
            for name, state in states.items()
            for key, record in state.items()
            if shapes.get(name) and not record.shape
        }
        return {
            name: {key: float(self._value(state.pop(key))) for key in names & state.keys()}
            for name, state in states.items()
        }

    def _value(self, record: SavedRecord) -> Any:
        """Return a value that is no tensor."""
        place = self.places[record.name][0]
        return load_range(place.path, place.offset, place.length)


def _with_lists(tree: object) -> Any:
    """Return ``tree`` with dictionaries of integer keys as lists; missing items are None."""
    if not isinstance(tree, dict):
        return tree
    items = {key: _with_lists(value) for key, value in tree.items()}
    if items and all(isinstance(key, int) for key in items):
        return [items.get(index) for index in range(max(items) + 1)]
    return items


def _shape_of(states: Mapping[str, SavedRecord]) -> Shape | None:
    """Return the shape of a parameter by its state; None if none of that has dimensions."""
    return next((record.shape for record in states.values() if record.shape), None)


def _size(path: Path) -> int:
    """Return the bytes of the file. Raises CheckpointError if it is missing."""
    try:
        return path.stat().st_size
    except OSError as error:
        raise damaged(path, str(error.strerror)) from error
