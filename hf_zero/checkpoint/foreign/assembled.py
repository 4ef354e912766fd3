"""A checkpoint assembled from tensors in files of another program: each parameter is a flat of its
own, each part of it a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

import torch

from hf_zero.checkpoint.foreign.tensor_ranges import MappedFiles
from hf_zero.checkpoint.manifest import (
    BUFFER,
    Chunk,
    Export,
    FileEntry,
    FlatEntry,
    GroupEntry,
    Manifest,
    OptimizerEntry,
)
from hf_zero.checkpoint.reader import Checkpoint
from hf_zero.checkpoint.tensorfile import TensorEntry, TensorFile
from hf_zero.errors import CheckpointError
from hf_zero.logging import JsonObject
from hf_zero.optim.group_scalars import report_of
from hf_zero.zero.layout.flat_layout import FlatLayout


@dataclass(frozen=True, eq=False)
class Widened:
    """A tensor in memory, or mapped, that is read as ``dtype``: cast block by block, without a copy
    of the whole.
    """

    dtype: torch.dtype
    values: torch.Tensor

    def numel(self) -> int:
        return self.values.numel()


@dataclass(frozen=True)
class Ranged:
    """A tensor of ``length`` elements that can be read by ranges: ``read(start, out)`` fills
    ``out`` from element ``start`` on.
    """

    dtype: torch.dtype
    length: int
    read: Callable[[int, torch.Tensor], None]

    def numel(self) -> int:
        return self.length


CAST_AT_ONCE = 1 << 20  # elements
# The trained parameters of the model that loads, by optimizer group and in the optimizer's order,
# for programs that store no names.
ModelGroups = Sequence[Sequence[str]]
ForeignTensor = torch.Tensor | Widened | Ranged


@dataclass(frozen=True)
class ParameterPart:
    """A run of elements of one parameter in file number ``file``: tensors of equal length by state
    name, including ``master`` or ``shard``.
    """

    file: int
    tensors: Mapping[str, ForeignTensor]

    @property
    def numel(self) -> int:
        return next(iter(self.tensors.values())).numel()


@dataclass(frozen=True)
class Parameter:
    """A parameter of a foreign checkpoint: its parts, in the order of its elements."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool
    parts: tuple[ParameterPart, ...]


@dataclass(frozen=True)
class OptimizerGroup:
    """An optimizer group: hyper-parameters, scalars that its parameters share (``step``), its
    parameters' names, and the scalars of those that have others, as in a manifest.
    """

    hyperparameters: JsonObject
    scalars: dict[str, float]
    parameters: tuple[str, ...]
    overrides: dict[str, dict[str, float]]

    @classmethod
    def of(
        cls, hyperparameters: dict[str, object], numbers: Mapping[str, dict[str, float] | None]
    ) -> OptimizerGroup:
        """Return the group of the parameters whose scalars are ``numbers``; None for one that has
        never been stepped.
        """
        shared, overrides = report_of(numbers)
        return cls(hyperparameters, shared, tuple(numbers), overrides)


@dataclass(frozen=True, eq=False)
class FolderContents:
    """Contents of a foreign folder.

    ``files`` are those that the parts refer to; the first one also holds the buffers.
    """

    folder: Path
    writer: str
    files: tuple[str, ...]
    parameters: tuple[Parameter, ...]
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    groups: tuple[OptimizerGroup, ...] | None = None
    lr_scheduler: dict[str, object] | None = None
    scaler: dict[str, float] | None = None
    counters: dict[str, int] = field(default_factory=dict)
    client_state: dict[str, object] = field(default_factory=dict)
    world: int = 1
    stage: int = 0
    precision: str = "fp32"
    opened: tuple[TensorFile, ...] = ()
    """Files that parts are read from, closed with the checkpoint."""


class ForeignFile:
    """The tensors of one file, in memory, mapped, or readable by ranges: a ``TensorReader``. Pages
    of mapped tensors are not touched.
    """

    def __init__(
        self, path: Path, tensors: Mapping[str, ForeignTensor], mapped: MappedFiles
    ) -> None:
        self.path, self._tensors, self._mapped = path, dict(tensors), mapped
        self.entries = {
            name: TensorEntry(name, t.dtype, (t.numel(),), 0, t.numel() * t.dtype.itemsize)
            for name, t in self._tensors.items()
        }

    def read_into(self, name: str, start: int, out: torch.Tensor) -> None:
        tensor = self._tensors[name]
        if isinstance(tensor, Ranged):
            tensor.read(start, out)
        elif isinstance(tensor, torch.Tensor):
            self._copy(tensor, start, out)
        else:
            part = torch.empty(min(out.numel(), CAST_AT_ONCE), dtype=tensor.values.dtype)
            for at in range(0, out.numel(), CAST_AT_ONCE):
                block = out[at : at + CAST_AT_ONCE]
                self._copy(tensor.values, start + at, part[: block.numel()])
                block.copy_(part[: block.numel()])

    def _copy(self, tensor: torch.Tensor, start: int, out: torch.Tensor) -> None:
        values = tensor.detach().reshape(-1)
        if not self._mapped.read(values, start, out):
            out.copy_(values[start : start + out.numel()])

    def close(self) -> None:
        self._tensors = {}


class Assembled(Checkpoint):
    """A foreign folder with the interface of hf-zero's own checkpoints.

    Raises CheckpointError if the parts of a parameter do not make up the whole of it.
    """

    def __init__(self, contents: FolderContents) -> None:
        flats = tuple(_flat(contents, parameter) for parameter in contents.parameters)
        super().__init__(contents.folder, _manifest(contents, flats))
        self._contents = contents
        tensors: list[dict[str, ForeignTensor]] = [{} for _ in contents.files]
        for parameter in contents.parameters:
            for part in parameter.parts:
                tensors[part.file] |= {
                    f"{parameter.name}::{state}": tensor for state, tensor in part.tensors.items()
                }
        tensors[0] |= {BUFFER + name: tensor for name, tensor in contents.buffers.items()}
        self._mapped = MappedFiles()
        self._files = [
            ForeignFile(contents.folder / name, of_file, self._mapped)
            for name, of_file in zip(contents.files, tensors)
        ]

    def identity(self) -> str:
        """Return a digest of the sizes and modification times of all files in the folder, which
        distinguishes it from any other checkpoint.
        """
        digest = sha256(str(self.folder.resolve()).encode())
        for path in sorted(
            path
            for path in self.folder.rglob("*")
            if path.is_file() and not path.name.startswith(".hf-zero-")
        ):
            status = path.stat()
            digest.update(
                f"{path.relative_to(self.folder)} {status.st_size} {status.st_mtime_ns}\n".encode()
            )
        return digest.hexdigest()

    def file(self, index: int) -> ForeignFile:
        return self._files[index]

    def client_state(self) -> dict[str, object]:
        return dict(self._contents.client_state)

    def scheduler_state(self) -> dict[str, object]:
        return dict(self._contents.lr_scheduler or {})

    def close(self) -> None:
        for file in self._files:
            file.close()
        self._mapped.close()
        for opened in self._contents.opened:
            opened.close()


def _flat(contents: FolderContents, parameter: Parameter) -> FlatEntry:
    layout = FlatLayout.build([(parameter.name, parameter.shape)], 1)
    chunks, at = [], 0
    for part in parameter.parts:
        lengths = {tensor.numel() for tensor in part.tensors.values()}
        if len(lengths) > 1:
            raise _incomplete(
                contents,
                f"the states of {parameter.name!r} in {contents.files[part.file]} differ in "
                f"length: {sorted(lengths)}",
            )
        chunks.append(Chunk(part.file, at, at + part.numel, tuple(part.tensors)))
        at += part.numel
    if at != layout.numel:
        raise _incomplete(
            contents,
            f"parameter {parameter.name!r} of shape {list(parameter.shape)} has {at} elements in "
            "its files",
        )
    return FlatEntry(parameter.name, parameter.trainable, parameter.dtype, layout, tuple(chunks))


def _incomplete(contents: FolderContents, what: str) -> CheckpointError:
    return CheckpointError(
        f"{contents.folder}, written by {contents.writer}, is not complete: {what}; restore its "
        "files, or name another checkpoint"
    )


def _manifest(contents: FolderContents, flats: tuple[FlatEntry, ...]) -> Manifest:
    optimizer = None
    if contents.groups is not None:
        groups = (
            GroupEntry(g.hyperparameters, dict(g.scalars), g.parameters, g.overrides)
            for g in contents.groups
        )
        optimizer = OptimizerEntry("", tuple(groups))
    nothing: JsonObject = {"json": {}, "objects": []}
    return Manifest(
        save_id="",
        tag=contents.folder.name,
        world={"size": contents.world, "shard": contents.world, "replicate": 1},
        stage=contents.stage,
        precision=contents.precision,
        files=tuple(FileEntry(name, index, 0, "") for index, name in enumerate(contents.files)),
        flats=flats,
        parameters={parameter.name: parameter.dtype for parameter in contents.parameters},
        buffers={name: (t.dtype, tuple(t.shape)) for name, t in contents.buffers.items()},
        aliases=contents.aliases,
        excluded=(),
        export=Export(),
        optimizer=optimizer,
        scaler=contents.scaler,
        lr_scheduler=None if contents.lr_scheduler is None else {"class": "", "state": nothing},
        counters=contents.counters,
        client_state=nothing,
        objects=None,
        software={"written_by": contents.writer},
    )


def states(values: Iterable[tuple[str, torch.Tensor]], numel: int) -> dict[str, torch.Tensor]:
    """Return the per-element tensors of an optimizer state, cut to ``numel``: unpadded."""
    kept_states = (
        (name, tensor)
        for name, tensor in values
        if isinstance(tensor, torch.Tensor) and tensor.ndim > 0 and tensor.numel() >= numel
    )
    return {name: tensor.reshape(-1)[:numel] for name, tensor in kept_states}
