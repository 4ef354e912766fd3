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
from typing import Any

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
from hf_zero.checkpoint.foreign.torch_files import Opaque, SavedTensor, damaged, load
from hf_zero.checkpoint.manifest import MASTER, SHARD
from hf_zero.errors import CheckpointError, HfZeroError
from hf_zero.logging import logger
from hf_zero.optim.group_settings import plain_settings

Record = tuple[str, Any]  # the name under which it is stored, and torch's record of it
States = Mapping[Any, Mapping[str, Record]]
METADATA = ".metadata"
PARTS = ("pytorch_model_fsdp*", "optimizer_*")
MODEL, OPTIMIZER = ("model", "module", "state_dict"), ("optimizer", "optim", "optimizers")
SCHEDULER, STEP = ("lr_scheduler", "scheduler"), "step"
COUNTERS = "hf_zero_counters"  # of an engine: not all optimizers count steps
# The record classes of torch.distributed.checkpoint and the classes of their fields. Everything
# else in a pickle is refused.
ALLOWED = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata", "MetadataIndex", "StorageMeta", "ChunkStorageMetadata", "TensorStorageMetadata",
        "BytesStorageMetadata", "TensorProperties",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath", "Path"},
    "collections": {"OrderedDict"},
    "torch": {"Size",
    *(str(dtype).removeprefix("torch.") for dtype in vars(torch).values() if isinstance(dtype,
    torch.dtype))},
}  # fmt: skip


def open_checkpoint(folder: Path, model_groups: ModelGroups = ()) -> Assembled:
    """Open ``folder`` as a checkpoint.

    Raises CheckpointError for a damaged one, and for one that holds no model.
    """
    parts = sorted(path for pattern in PARTS for path in folder.glob(f"{pattern}/{METADATA}"))
    metadata = parts or [folder / METADATA]
    try:
        return Assembled(_Reading(folder, metadata, model_groups).contents())
    except HfZeroError:
        raise
    except (AttributeError, LookupError, TypeError, ValueError) as error:  # of what it lacks
        raise damaged(metadata[0], f"{type(error).__name__}: {error}") from error


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        module = "pathlib" if module == "pathlib._local" else module  # written on Python 3.13
        if name in ALLOWED.get(module, ()):
            # Paths are not used, and a path class of another system cannot be instantiated here.
            return Opaque if module == "pathlib" else super().find_class(module, name)
        raise pickle.UnpicklingError(f"it holds {module}.{name}")


class _Reading:
    """Records of one or two folders.

    entries: name in the folder and torch's record, by path into the dict that was saved. places:
    index, file, offset and length of each chunk, by name. files: those that parts refer to.
    """

    def __init__(self, folder: Path, metadata: list[Path], model_groups: ModelGroups = ()) -> None:
        self.folder, self.model_groups = folder, model_groups
        self.files: list[Path] = []
        self.entries: dict[tuple[Any, ...], tuple[str, Any]] = {}
        self.places: dict[str, list[tuple[Any, Path, int, int]]] = {}
        for path in metadata:
            self._take(path)
        self._lift()

    def _take(self, path: Path) -> None:
        """Add the records of the metadata file ``path``. Raises CheckpointError if it is damaged,
        or if a file is missing, cut short or out of its folder.
        """
        try:
            with open(path, "rb") as file:
                data = _Unpickler(file).load()
            for fqn, entry in data.state_dict_metadata.items():
                keys = tuple((data.planner_data or {}).get(fqn, tuple(fqn.split("."))))
                self.entries[keys] = (f"{path.parent.name}/{fqn}", entry)
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
                self.places.setdefault(f"{path.parent.name}/{index.fqn}", []).append(
                    (index, path.parent / name, info.offset, info.length)
                )
        except CheckpointError:
            raise
        except Exception as error:  # a damaged file can make the unpickler raise anything
            raise CheckpointError(
                f"{path} is damaged, or not what torch.distributed.checkpoint writes ({error}); "
                "restore it, or name another checkpoint"
            ) from error

    def _lift(self) -> None:
        """Strip the common first key if everything was saved inside one object, as in torch's own
        recipe: ``{"app": Stateful}``.
        """
        tops = {keys[0] for keys in self.entries}
        while (
            len(tops) == 1 and not tops & {*MODEL} and all(len(keys) > 1 for keys in self.entries)
        ):
            lifted = {keys[1:]: record for keys, record in self.entries.items()}
            if not any(keys[0] in MODEL for keys in lifted):
                return
            self.entries, tops = lifted, {keys[0] for keys in lifted}

    def contents(self) -> FolderContents:
        model = self._under(MODEL)
        if not model and all(hasattr(entry, "chunks") for _, entry in self.entries.values()):
            model = self.entries  # a bare state dict of a model
        if not model:
            raise CheckpointError(
                f"{self.folder} holds no model: its names begin with "
                f"{sorted({str(keys[0]) for keys in self.entries})[:5]}, none of "
                f"{', '.join(MODEL)}; "
                'save it as {"model": ..., "optimizer": ...}'
            )
        shapes = {
            ".".join(map(str, keys)): tuple(record[1].size)
            for keys, record in model.items()
            if hasattr(record[1], "chunks")
        }
        groups, states = self._optimizer(shapes)
        parameters = tuple(
            self._parameter(".".join(map(str, keys)), record, states)
            for keys, record in model.items()
            if hasattr(record[1], "chunks")
        )
        beside = {} if model is self.entries else self._beside()
        steps = max((int(group.scalars.get(STEP, 0)) for group in groups or ()), default=0)
        counters = beside.pop(COUNTERS, None) or ({"global_steps": steps} if steps else {})
        return FolderContents(
            folder=self.folder,
            writer="torch.distributed.checkpoint",
            files=tuple(str(path.relative_to(self.folder)) for path in self.files) or (METADATA,),
            parameters=parameters,
            groups=groups,
            lr_scheduler=next((beside[name] for name in SCHEDULER if beside.get(name)), None),
            counters=counters,
            client_state=beside,
            world=len({path for places in self.places.values() for _, path, _, _ in places}) or 1,
        )

    def _beside(self) -> dict[str, Any]:
        """Return what was saved beside the model and the optimizer, with its nesting. Tensors there
        are not read; a warning names them.
        """
        tree: dict[str, Any] = {}
        skipped = []
        weights = {".".join(map(str, keys)) for keys in self._under(MODEL)}
        for keys, (fqn, entry) in self.entries.items():
            if keys[0] in (*MODEL, *OPTIMIZER):
                continue
            if hasattr(entry, "chunks"):
                name = ".".join(map(str, keys))
                if name not in weights:  # torchtitan's names of the same tensors
                    skipped.append(name)
            else:
                inner = tree
                for key in keys[:-1]:
                    inner = inner.setdefault(key, {})
                inner[keys[-1]] = self._value(fqn)
        if skipped:
            logger.warning(
                "%s holds tensors beside the model, which the client state is without: %s",
                self.folder,
                ", ".join(skipped[:8]),
            )
        return {str(key): _with_lists(value) for key, value in tree.items()}

    def _under(self, names: tuple[str, ...]) -> dict[tuple[Any, ...], tuple[str, Any]]:
        return {
            keys[1:]: r for keys, r in self.entries.items() if keys[0] in names and len(keys) > 1
        }

    def _parameter(self, name: str, record: Record, states: States) -> Parameter:
        """Return the parameter ``name`` with those of its ``states`` that have its shape. Raises
        CheckpointError if these are cut in other places.
        """
        fqn, entry = record
        dtype, shape, state = entry.properties.dtype, tuple(entry.size), states.get(name)
        main = MASTER if state is not None else SHARD
        elementwise = {
            key: r
            for key, r in (state or {}).items()
            if hasattr(r[1], "chunks") and tuple(r[1].size) == shape
        }
        chunks = {
            key: self._chunks(each_fqn, r)
            for key, (each_fqn, r) in {main: (fqn, entry), **elementwise}.items()
        }
        cuts = [[(start, stop) for start, stop, _, _ in pieces] for pieces in chunks.values()]
        if any(cut != cuts[0] for cut in cuts):
            raise CheckpointError(
                f"{self.folder} holds {name!r} and its optimizer's state cut in different places; "
                "load and save it again with torch"
            )
        pieces = tuple(
            ParameterPart(chunks[main][i][2], {key: record[i][3] for key, record in chunks.items()})
            for i in range(len(chunks[main]))
        )
        return Parameter(name, shape, dtype, state is not None, pieces)

    def _chunks(self, fqn: str, entry: Any) -> list[tuple[int, int, int, Ranged]]:
        """Return (start, stop, file number, values) of each chunk, in order; start and stop count
        elements of the flattened tensor.

        Raises CheckpointError for a tensor cut along another dimension than the first.
        """
        boxes = []
        shape = torch.Size(entry.size)
        row = shape[1:].numel() if shape else 1
        for index, path, offset, length in self.places.get(fqn, ()):
            chunk = next(
                (
                    c
                    for c in entry.chunks
                    if index.offset is None or tuple(c.offsets) == tuple(index.offset)
                ),
                None,
            )
            if chunk is None or tuple(chunk.sizes)[1:] != tuple(shape)[1:]:
                raise CheckpointError(
                    f"{self.folder} holds {fqn!r} cut along another dimension than the first "
                    "(tensor parallelism); load and save it again with torch"
                )
            start = (chunk.offsets[0] if shape else 0) * row
            numel = torch.Size(chunk.sizes).numel()
            if path not in self.files:
                self.files.append(path)
            values = SavedTensor(fqn, path, offset, length, entry.properties.dtype, numel)
            boxes.append(
                (
                    start,
                    start + numel,
                    self.files.index(path),
                    Ranged(values.dtype, numel, values.read),
                )
            )
        return sorted(boxes, key=lambda box: box[:2])

    def _optimizer(
        self, shapes: Mapping[str, Shape]
    ) -> tuple[tuple[OptimizerGroup, ...] | None, States]:
        """Return the optimizer's groups and, by parameter, the records of its states. Groups are
        None if the parameters cannot be told; a warning says so.

        ``shapes``: the shapes of the model's parameters.
        """
        settings: dict[Any, dict[str, Any]] = {}
        states: dict[Any, dict[str, Record]] = {}
        apart: dict[str, dict[str, Any]] = {}
        for keys, record in self._under(OPTIMIZER).items():
            part, _, path = str(keys[0]).partition(".")
            if len(keys) == 3 and part == "state":
                states.setdefault(keys[1], {})[keys[2]] = record
            elif len(keys) == 3 and part == "param_groups":
                settings.setdefault(keys[1], {})[keys[2]] = self._value(record[0])
            elif len(keys) == 1 and part in ("state", "param_groups"):
                # flatten_optimizer_state_dict: a path in one name
                name, _, last = path.rpartition(".")
                if part == "state":
                    states.setdefault(name, {})[last] = record
                else:
                    apart.setdefault(name, {})[last] = self._value(record[0])
        # That format does not record groups: parameters with equal settings form one group.
        for name, values in ({} if settings else apart).items():
            settings.setdefault(repr(sorted(values.items())), {**values, "params": []})[
                "params"
            ].append(name)
        groups = list(settings.values())
        if any(not isinstance(key, str) for group in groups for key in group.get("params") or ()):
            places = [[str(key) for key in group.get("params") or ()] for group in groups]
            expected = [[_shape_of(states.get(key, {})) for key in keyed] for keyed in places]
            matched = (
                named(groups, shapes) or as_in_model(expected, self.model_groups, shapes) or []
            )
            states = {
                name: states[key]
                for keyed, names in zip(places, matched)
                for key, name in zip(keyed, names)
                if key in states
            }
            groups = [{**group, "params": names} for group, names in zip(groups, matched)]
        if settings and (not groups or not states.keys() <= shapes.keys()):
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

    def _scalars(
        self, states: dict[Any, dict[str, Record]], shapes: Mapping[str, Shape]
    ) -> dict[Any, dict[str, float]]:
        """Return the scalars of each parameter's state, and take them out of ``states``. In the
        state of a parameter without dimensions, the names tell them from its moments.
        """
        names = {STEP} | {
            key
            for name, state in states.items()
            for key, (_, entry) in state.items()
            if shapes.get(name) and not len(getattr(entry, "size", ()))
        }
        return {
            name: {key: float(self._value(state.pop(key)[0])) for key in names & state.keys()}
            for name, state in states.items()
        }

    def _value(self, fqn: str) -> Any:
        """Return a value that is no tensor."""
        _, path, offset, length = self.places[fqn][0]
        return load(path, offset, length)


def _with_lists(tree: object) -> Any:
    """Return ``tree`` with dictionaries of integer keys as lists; missing items are None."""
    if not isinstance(tree, dict):
        return tree
    items = {key: _with_lists(value) for key, value in tree.items()}
    if items and all(isinstance(key, int) for key in items):
        return [items.get(index) for index in range(max(items) + 1)]
    return items


def _shape_of(states: Mapping[str, Record]) -> Shape | None:
    """Return the shape of a parameter by its state; None if none of that has dimensions."""
    return next(
        (tuple(entry.size) for _, entry in states.values() if len(getattr(entry, "size", ()))), None
    )


def _size(path: Path) -> int:
    """Return the bytes of the file. Raises CheckpointError if it is missing."""
    try:
        return path.stat().st_size
    except OSError as error:
        raise damaged(path, str(error.strerror)) from error
