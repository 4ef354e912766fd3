"""Reader of a checkpoint, whoever wrote it: its folder recognized, its files checked against the
manifest, and elements of whole tensors read by the ranges in which they are stored.
"""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from hashlib import sha256
from pathlib import Path

import torch

from hf_zero.checkpoint.copy_ranges import CopyRange, parameter_ranges
from hf_zero.checkpoint.manifest import (
    BUFFER,
    FORMAT,
    MANIFEST_NAME,
    MASTER,
    SHARD,
    FileEntry,
    Manifest,
    tensor_state_key,
)
from hf_zero.checkpoint.manifest_reading import read_manifest
from hf_zero.checkpoint.script_state import join, load_objects
from hf_zero.checkpoint.storage import AnyPath, ClosedAtExit, is_remote, modified_ns, store_errors
from hf_zero.checkpoint.tensorfile import TensorFile, TensorReader, algorithm_of, hash_of_file
from hf_zero.errors import CheckpointError
from hf_zero.logging import JsonObject


class Checkpoint(ClosedAtExit):
    """A checkpoint folder of any program, its content described by ``manifest``."""

    def __init__(self, folder: AnyPath, manifest: Manifest) -> None:
        self.folder, self.manifest = folder, manifest

    def file(self, index: int) -> TensorReader:
        """Return file ``index`` of the manifest."""
        raise NotImplementedError

    def hashed_files(self) -> list[FileEntry]:
        """Return the files of which the manifest has hashes."""
        return []

    def identity(self) -> str:
        """Return a digest that differs for any other checkpoint, and if a file is replaced."""
        raise NotImplementedError

    def client_state(self) -> dict[str, object]:
        raise NotImplementedError

    def scheduler_state(self) -> dict[str, object]:
        raise NotImplementedError

    def verify(
        self, entries: Iterable[FileEntry], tick: Callable[[int], None] | None = None
    ) -> None:
        """Compare the hashes of the files ``entries`` with the manifest.

        Raises CheckpointError for the first file that differs or cannot be read.
        """
        for entry in entries:
            try:
                digest = hash_of_file(self.folder / entry.name, algorithm_of(entry.hash), tick)
            except OSError as error:
                raise CheckpointError(
                    f"{self.folder / entry.name} cannot be read ({error.strerror}); make it "
                    "readable or restore it, or load another tag of this run"
                ) from error
            if digest != entry.hash:
                raise CheckpointError(
                    f"{self.folder / entry.name} is damaged: its hash is {digest}, the manifest "
                    f"says {entry.hash}; restore it, or load another tag of this run"
                )

    def fill(
        self,
        out: torch.Tensor,
        ranges: Iterable[CopyRange],
        tensor: str = MASTER,
        tick: Callable[[int], None] | None = None,
        scratch: Scratch | None = None,
    ) -> None:
        """Copy ``ranges`` into ``out``, 1-D, of any dtype and device. ``tensor`` is the name of an
        optimizer state, or :data:`MASTER` for the weights. ``tick`` is called with the bytes read.
        """
        scratch = Scratch() if scratch is None else scratch
        for stored in ranges:
            file, key = self._locate(stored, tensor)
            filled = out[stored.target : stored.target + stored.length]
            read_range(file, key, stored.source, filled, scratch)
            if tick is not None:
                tick(stored.length * file.entries[key].dtype.itemsize)

    def nbytes(self, ranges: Iterable[CopyRange], tensor: str = MASTER) -> int:
        """Return the bytes that ``ranges`` occupy in the files; ``tensor`` as in :meth:`fill`."""
        places = [(stored.length, *self._locate(stored, tensor)) for stored in ranges]
        return sum(length * file.entries[key].dtype.itemsize for length, file, key in places)

    def _locate(self, stored: CopyRange, tensor: str) -> tuple[TensorReader, str]:
        """Return the file of ``stored``, and the name in it of the tensor to read. :data:`MASTER`
        means the weights, also where they are stored as :data:`SHARD`.
        """
        flat = stored.flat
        file = self.file(flat.chunks[stored.chunk].file)
        return file, f"{flat.key}::{flat.weights if tensor == MASTER else tensor}"

    def states(self, ranges: Iterable[CopyRange]) -> dict[str, list[CopyRange]]:
        """Return by name the optimizer states that the chunks of ``ranges`` have: their ranges."""
        of_states: dict[str, list[CopyRange]] = {}
        for stored in ranges:
            for name in stored.flat.chunks[stored.chunk].tensors:
                if name not in (MASTER, SHARD):
                    of_states.setdefault(name, []).append(stored)
        return of_states

    def tensor_states(self, parameter: str) -> dict[str, torch.Tensor]:
        """Return the states of the whole ``parameter``, by name; {} if none was saved."""
        saved = self.manifest.optimizer
        if saved is None or parameter not in saved.tensor_states:
            return {}
        of, tensors = saved.tensor_states[parameter], {}
        for name, shape in of.shapes.items():
            file, key = self.file(of.file), tensor_state_key(parameter, name)
            tensors[name] = torch.empty(shape, dtype=file.entries[key].dtype)
            file.read_into(key, 0, tensors[name].view(-1))
        return tensors

    def read(
        self, name: str, start: int, out: torch.Tensor, scratch: Scratch | None = None
    ) -> None:
        """Copy elements from ``start`` on of the whole parameter or buffer ``name`` into ``out``,
        1-D, of any dtype and device, through a small buffer.
        """
        if name in self.manifest.buffers:
            file = self.file(0)  # that of rank 0 has the buffers
            read_range(file, BUFFER + name, start, out, scratch or Scratch())
            return
        ranges = parameter_ranges(self.manifest, name, start, start + out.numel())
        self.fill(out, ranges, scratch=scratch)

    def ranges(self, name: str, state: str = MASTER) -> list[CopyRange] | None:
        """Return the ranges that hold all elements of ``state`` of the whole parameter ``name``, or
        its weights; None if the checkpoint lacks some of them.
        """
        numel = torch.Size(self.manifest.slots[name][1].whole).numel()
        ranges = list(parameter_ranges(self.manifest, name, 0, numel))
        complete = all(state in stored.flat.chunks[stored.chunk].tensors for stored in ranges)
        return ranges if complete or state == MASTER else None

    def buffer(self, name: str) -> torch.Tensor:
        """Return the buffer ``name``; some programs save buffers as parameters."""
        if name in self.manifest.buffers:
            dtype, shape = self.manifest.buffers[name]
        else:
            flat, slot = self.manifest.slots[name]
            dtype, shape = flat.dtype, slot.whole
        out = torch.empty(shape, dtype=dtype)
        self.read(name, 0, out.view(-1))
        return out


class ShardedCheckpoint(Checkpoint):
    """A checkpoint of hf-zero. Each file is opened, and its header checked, at its first use.

    ``sizes`` checks the sizes of all files at once; ``hashes`` compares what is read with the block
    hashes. Raises CheckpointError for whatever FORMAT.md section 7 rejects.
    """

    def __init__(self, folder: AnyPath, *, sizes: bool = True, hashes: bool = True) -> None:
        super().__init__(folder, read_manifest(folder / MANIFEST_NAME))
        self._hashes = hashes
        self._open: dict[int, TensorFile] = {}
        self._lock = threading.Lock()
        for entry in self.hashed_files() if sizes else ():
            self.check_size(entry)

    def hashed_files(self) -> list[FileEntry]:
        return self.manifest.all_files()

    def identity(self) -> str:
        digest = sha256(self.manifest.dumps())
        for entry in self.hashed_files():
            path = self.folder / entry.name
            digest.update(f"{entry.name} {path.stat().st_size} {modified_ns(path)}\n".encode())
        return digest.hexdigest()

    def check_size(self, entry: FileEntry) -> None:
        """Raise CheckpointError if a file is missing or has another size."""
        path = self.folder / entry.name
        try:
            with store_errors(path):
                size = path.stat().st_size
        except OSError as error:
            raise CheckpointError(
                f"{path} is missing ({error.strerror}); restore it, or load another tag of this run"
            ) from error
        if size != entry.size:
            what = "cut short" if size < entry.size else "longer than it was"
            raise CheckpointError(
                f"{path} is {what}: {size} bytes, the manifest says {entry.size}; restore it, or "
                "load another tag of this run"
            )

    def file(self, index: int) -> TensorFile:
        with self._lock:
            if index not in self._open:
                entry = self.manifest.files[index]
                blocks = entry.blocks if self._hashes else None
                file = TensorFile(self.folder / entry.name, blocks)
                try:
                    self._check_header(index, file)
                    file.compare_header()
                except BaseException:
                    file.close()
                    raise
                self._open[index] = file
            return self._open[index]

    def _check_header(self, index: int, file: TensorFile) -> None:
        """Raise CheckpointError unless the tensors of file ``index`` are those of the manifest."""
        manifest = self.manifest
        written_by = file.metadata.get("format"), file.metadata.get("save_id")
        if written_by != (FORMAT, manifest.save_id):
            raise CheckpointError(
                f"{file.path} belongs to another save than {MANIFEST_NAME} beside it; restore the "
                "file, or load another tag"
            )
        for name, (numel, dtype) in self._expected(index).items():
            entry = file.entries.get(name)
            if entry is not None and entry.numel == numel and dtype in (None, entry.dtype):
                continue
            found = "is absent"
            if entry is not None:
                found = f"has {entry.numel} elements of {entry.dtype}"
            raise CheckpointError(
                f"{file.path} does not fit {MANIFEST_NAME}: tensor {name!r} {found}, "
                f"expected {numel}{'' if dtype is None else f' of {dtype}'}; restore the file, "
                "or load another tag of this run"
            )

    def _expected(self, index: int) -> dict[str, tuple[int, torch.dtype | None]]:
        """Return elements and dtype of each tensor that the manifest says file ``index`` has, by
        name; None for a dtype that it does not say.
        """
        manifest, expected = self.manifest, dict[str, tuple[int, torch.dtype | None]]()
        for flat in manifest.flats:
            for chunk in flat.chunks:
                if chunk.file == index:
                    for name in chunk.tensors:
                        length = chunk.stop - chunk.start
                        expected[f"{flat.key}::{name}"] = length, flat.weights_dtype(name)
        if manifest.files[index].rank == 0:
            for name, (dtype, shape) in manifest.buffers.items():
                expected[BUFFER + name] = torch.Size(shape).numel(), dtype
        for name, of in manifest.optimizer.tensor_states.items() if manifest.optimizer else ():
            if of.file == index:
                for key, shape in of.shapes.items():
                    expected[tensor_state_key(name, key)] = torch.Size(shape).numel(), None
        return expected

    @cached_property
    def objects(self) -> dict[str, dict[str, object]]:
        """The content of ``objects.pt``; {} without one.

        Its hash is always compared: the file is small, and a flipped bit in it would go unnoticed.
        """
        if self.manifest.objects is None:
            return {}
        self.verify([self.manifest.objects])
        return load_objects(self.folder / self.manifest.objects.name)

    def client_state(self) -> dict[str, object]:
        return self._joined("client_state", self.manifest.client_state, "client_state")

    def scheduler_state(self) -> dict[str, object]:
        saved = self.manifest.lr_scheduler
        if saved is None:
            return {}
        return self._joined("the lr scheduler", saved["state"], "lr_scheduler")

    def _joined(self, what: str, state: JsonObject, key: str) -> dict[str, object]:
        """Return the part of ``state`` in the manifest with that of ``key`` in ``objects.pt``."""
        objects = self.manifest.objects
        source = self.folder / (MANIFEST_NAME if objects is None else objects.name)
        return join(what, state, self.objects.get(key, {}), source)

    def close(self) -> None:
        for file in self._open.values():
            file.close()
        self._open.clear()


class Scratch:
    """Buffers into which ranges are read before they are cast or copied to a device, by dtype."""

    ELEMENTS = 1 << 20

    def __init__(self) -> None:
        self._buffers: dict[torch.dtype, torch.Tensor] = {}

    def get(self, dtype: torch.dtype, count: int) -> torch.Tensor:
        if dtype not in self._buffers:
            self._buffers[dtype] = torch.empty(self.ELEMENTS, dtype=dtype)
        return self._buffers[dtype][:count]


def read_range(
    file: TensorReader, name: str, start: int, out: torch.Tensor, scratch: Scratch
) -> None:
    """Read elements of ``name`` from ``start`` on into ``out``: directly if it is contiguous, on
    the CPU and of the stored dtype, else block by block with a cast.
    """
    dtype = file.entries[name].dtype
    if out.device.type == "cpu" and out.dtype == dtype and out.is_contiguous():
        file.read_into(name, start, out)
        return
    for at in range(0, out.numel(), scratch.ELEMENTS):
        part = scratch.get(dtype, min(scratch.ELEMENTS, out.numel() - at))
        file.read_into(name, start + at, part)
        out[at : at + part.numel()].copy_(part)


# Glob pattern that identifies a kind of folder -> the module of ``foreign`` that opens it. Beside
# that, torch.distributed.checkpoint itself loads its folders into the state dicts of
# ``torch_state_dict.py``.
SIGNS = {
    "*mp_rank_*_model_states.pt": "deepspeed",
    ".metadata": "dcp",
    "pytorch_model_fsdp*/.metadata": "dcp",
    "model.safetensors": "huggingface",
    "model.safetensors.index.json": "huggingface",
}


def recognize(folder: AnyPath) -> str:
    """Return the module of ``foreign`` that reads ``folder``, or "" if none does. A run's folder,
    which has a ``latest`` file, gives "" too.

    In an object store only checkpoints of hf-zero can be read.
    """
    if is_remote(folder) or (folder / "latest").is_file():
        return ""
    return next(
        (module for sign, module in SIGNS.items() if next(folder.glob(sign), None) is not None), ""
    )


def open_checkpoint(
    folder: AnyPath,
    grouped: Callable[[], Sequence[Sequence[str]]] = tuple,
    *,
    hashes: bool = True,
    sizes: bool = True,
) -> Checkpoint:
    """Open the checkpoint in ``folder``, written by hf-zero or a program that ``foreign`` supports.
    ``grouped`` returns the parameter names in each optimizer group of the engine that loads.
    ``hashes`` compares what is read with the block hashes, which only hf-zero's checkpoints have;
    ``sizes`` checks the sizes of all files at once.

    Raises CheckpointError.
    """
    if not (folder / MANIFEST_NAME).is_file() and (module := recognize(folder)):
        _refuse_pipes(folder)
        program = importlib.import_module(f"hf_zero.checkpoint.foreign.{module}")
        opened: Checkpoint = program.open_checkpoint(folder, grouped())
        return opened
    return ShardedCheckpoint(folder, sizes=sizes, hashes=hashes)


def _refuse_pipes(folder: AnyPath) -> None:
    """Raise CheckpointError for a pipe, socket or device in ``folder``: a read could wait for ever.
    Sizes in the manifest refuse them in checkpoints of hf-zero.
    """
    for directory, _, names in os.walk(folder):
        for path in (Path(directory, name) for name in names):
            if path.exists() and not path.is_file():
                raise CheckpointError(f"{path} is not a regular file; remove it, or restore it")
