"""A checkpoint put together from tensors that lie in other files: each parameter a flat of its own, each piece of it a chunk."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hf_zero.checkpoint.contents import BUFFER
from hf_zero.checkpoint.manifest import MASTER, SHARD, Chunk, Export, FileEntry, FlatEntry, GroupEntry, Manifest, OptimizerEntry
from hf_zero.checkpoint.opened import Checkpoint
from hf_zero.checkpoint.tensorfile import Entry
from hf_zero.core.layout import FlatLayout
from hf_zero.errors import CheckpointError


@dataclass(frozen=True)
class Later:
    """A tensor of ``length`` elements that is read when it is asked for, and let go then."""

    dtype: torch.dtype
    length: int
    read: Callable[[], torch.Tensor]

    def numel(self) -> int:
        return self.length


@dataclass(frozen=True)
class Piece:
    """A run of elements of one parameter, in file number ``file``: tensors of one length, by state; ``master`` or ``shard`` among them."""

    file: int
    tensors: Mapping[str, torch.Tensor | Later]

    @property
    def numel(self) -> int:
        return next(iter(self.tensors.values())).numel()


@dataclass(frozen=True)
class Parameter:
    """A parameter as a foreign checkpoint holds it: its pieces in the order of its elements."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Group:
    """An optimizer group: hyper-parameters, the numbers its parameters share (``step``), and its parameters' names."""

    hyperparameters: dict[str, Any]
    scalars: dict[str, float]
    parameters: tuple[str, ...]


@dataclass(frozen=True)
class Found:
    """All that was read out of a foreign folder. ``files`` are those the pieces point to, the first one also holds the buffers."""

    folder: Path
    writer: str
    files: tuple[str, ...]
    parameters: tuple[Parameter, ...]
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    groups: tuple[Group, ...] | None = None
    lr_scheduler: dict[str, Any] | None = None
    scaler: dict[str, Any] | None = None
    counters: dict[str, int] = field(default_factory=dict)
    client_state: dict[str, Any] = field(default_factory=dict)
    world: int = 1
    stage: int = 0
    precision: str = "fp32"


class Table:
    """Tensors in memory, mapped, or to be read, with the face of ``tensorfile.TensorFile``. Of those to be read the last one is kept."""

    def __init__(self, path: Path, tensors: Mapping[str, torch.Tensor | Later]) -> None:
        self.path, self._tensors = path, dict(tensors)
        self.entries = {name: Entry(name, t.dtype, (t.numel(),), 0, t.numel() * t.dtype.itemsize) for name, t in self._tensors.items()}
        self._last: tuple[str, torch.Tensor] | None = None
        self._lock = threading.Lock()

    def read_into(self, name: str, start: int, out: torch.Tensor) -> None:
        out.copy_(self._values(name)[start : start + out.numel()])

    def _values(self, name: str) -> torch.Tensor:
        held = self._tensors[name]
        if isinstance(held, torch.Tensor):
            return held.detach().reshape(-1)
        with self._lock:
            if self._last is None or self._last[0] != name:
                self._last = None
                values = held.read()
                if not isinstance(values, torch.Tensor) or (values.numel(), values.dtype) != (held.length, held.dtype):
                    raise CheckpointError(f"{self.path} is damaged: {name!r} is not {held.length} elements of {held.dtype}; restore it")
                self._last = (name, values.detach().reshape(-1))
            return self._last[1]

    def close(self) -> None:
        self._tensors, self._last = {}, None


class Assembled(Checkpoint):
    """``found`` with the face of our own checkpoints. Raises CheckpointError if a parameter's pieces are not the whole of it."""

    def __init__(self, found: Found) -> None:
        self.folder, self._found = found.folder, found
        flats = tuple(self._flat(parameter) for parameter in found.parameters)
        self.manifest = _manifest(found, flats)
        held: list[dict[str, torch.Tensor | Later]] = [{} for _ in found.files]
        for parameter in found.parameters:
            for piece in parameter.pieces:
                held[piece.file] |= {f"{parameter.name}::{state}": tensor for state, tensor in piece.tensors.items()}
        held[0] |= {BUFFER + name: tensor for name, tensor in found.buffers.items()}
        self._tables = [Table(found.folder / name, tensors) for name, tensors in zip(found.files, held)]

    def _flat(self, parameter: Parameter) -> FlatEntry:
        layout = FlatLayout.build([(parameter.name, parameter.shape)], 1)
        chunks, at = [], 0
        for piece in parameter.pieces:
            lengths = {tensor.numel() for tensor in piece.tensors.values()}
            if len(lengths) > 1:
                raise self._damaged(
                    f"the states of {parameter.name!r} in {self._found.files[piece.file]} differ in length: {sorted(lengths)}"
                )
            chunks.append(Chunk(piece.file, at, at + piece.numel, tuple(piece.tensors)))
            at += piece.numel
        if at != layout.numel:
            raise self._damaged(f"parameter {parameter.name!r} of shape {list(parameter.shape)} has {at} elements in its files")
        return FlatEntry(parameter.name, parameter.trainable, parameter.dtype, layout, tuple(chunks))

    def _damaged(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self.folder}, written by {self._found.writer}, is not whole: {what}; restore its files, or name another checkpoint"
        )

    def listed(self) -> list[FileEntry]:
        """None: there are no hashes to compare."""
        return []

    def file(self, index: int) -> Any:
        return self._tables[index]

    def objects(self) -> dict[str, dict[str, Any]]:
        return {}

    def client_state(self) -> dict[str, Any]:
        return dict(self._found.client_state)

    def scheduler_state(self) -> dict[str, Any]:
        return dict(self._found.lr_scheduler or {})

    def close(self) -> None:
        for table in self._tables:
            table.close()


def _manifest(found: Found, flats: tuple[FlatEntry, ...]) -> Manifest:
    groups = found.groups
    return Manifest(
        save_id="",
        tag=found.folder.name,
        world={"size": found.world, "shard": found.world, "replicate": 1},
        stage=found.stage,
        precision=found.precision,
        files=tuple(FileEntry(name, index, 0, "") for index, name in enumerate(found.files)),
        flats=flats,
        parameters={parameter.name: parameter.dtype for parameter in found.parameters},
        buffers={name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in found.buffers.items()},
        aliases=found.aliases,
        excluded=(),
        export=Export(),
        optimizer=None if groups is None else OptimizerEntry("", tuple(GroupEntry(g.hyperparameters, dict(g.scalars), g.parameters) for g in groups)),
        scaler=found.scaler,
        lr_scheduler=None if found.lr_scheduler is None else {"class": "", "state": {"json": {}, "objects": []}},
        counters=found.counters,
        client_state={"json": {}, "objects": []},
        objects=None,
        software={"written_by": found.writer},
    )  # fmt: skip


def states(values: Iterable[tuple[str, torch.Tensor]], numel: int) -> dict[str, torch.Tensor]:
    """Of an optimizer's state of one tensor, what has an entry for each of its ``numel`` elements, without padding behind them."""
    kept = ((name, tensor) for name, tensor in values if isinstance(tensor, torch.Tensor) and tensor.ndim > 0 and tensor.numel() >= numel)
    return {name: tensor.reshape(-1)[:numel] for name, tensor in kept}


__all__ = ["MASTER", "SHARD", "Assembled", "Found", "Group", "Later", "Parameter", "Piece", "states"]
