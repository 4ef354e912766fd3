"""Checkpoint files opened for reading ranges, and the conversion of the lazy tensors in a model
loaded from them.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn

from hf_zero.checkpoint.tensorfile import TensorFile
from hf_zero.loading.expressions import InFile, InMemory
from hf_zero.loading.lazy import LazyTensor
from hf_zero.zero.layout.pending import pending


class Opened:
    """The tensors of checkpoint files, unread, as ``tensors`` by name. Open until :meth:`close`.

    From safetensors each rank reads the ranges it needs. ``.bin`` files (read with weights_only)
    are mapped into memory, or read whole by every rank if they are of torch's oldest format, which
    cannot be mapped.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._files: list[TensorFile] = []

    def add(self, paths: Iterable[str]) -> None:
        """Open ``paths``. If several have a name, the last one counts."""
        for path in map(Path, paths):
            if path.suffix == ".safetensors":
                file = TensorFile(path)
                self._files.append(file)
                self.tensors.update({name: LazyTensor(InFile(file, name)) for name in file.entries})
            else:
                self.tensors.update(
                    {name: LazyTensor(InMemory(tensor)) for name, tensor in _load_bin(path).items()}
                )

    def close(self) -> None:
        for file in self._files:
            file.close()
        self.tensors.clear()


def _load_bin(path: Path) -> dict[str, torch.Tensor]:
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError as error:
        if "mmap" not in str(error):
            raise
        return torch.load(path, map_location="cpu", weights_only=True)


def make_real(model: nn.Module) -> None:
    """Read the lazy buffers of ``model`` whole: computations in a model's initialisation use their
    values.
    """
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if isinstance(buffer, LazyTensor):
                real = buffer.read_whole()
                # without this flag transformers would initialise the buffer again
                initialized = getattr(buffer, "_is_hf_initialized", False)
                real._is_hf_initialized = initialized  # type: ignore[attr-defined]
                module._buffers[name] = real


def make_pending(model: nn.Module) -> int:
    """Replace the lazy parameters of ``model`` by pending ones, which an engine fills, and return
    their number. Tied parameters stay tied.
    """
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if not isinstance(parameter, LazyTensor):
                continue
            if id(parameter) not in made:
                new = pending(parameter.shape, parameter.expression)
                new.requires_grad_(parameter.requires_grad)
                # the flag by which transformers skips initialisation
                new._is_hf_initialized = True  # type: ignore[attr-defined]
                made[id(parameter)] = new
            module._parameters[name] = made[id(parameter)]
    return len(made)


def read_pending(model: nn.Module) -> None:
    """Read the values of the pending parameters of ``model`` now."""
    for parameter in model.parameters():
        source = parameter.__dict__.pop("_hf_zero_source", None)
        if source is not None:
            parameter.data = source.whole()
