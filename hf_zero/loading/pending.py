"""Checkpoint files opened as lazy tensors; and lazy tensors of a model made real, or pending: an
engine then fills the parameters, or they are read at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn

from hf_zero.checkpoint.tensorfile import TensorFile
from hf_zero.loading.expressions import Expression, InFile, InMemory
from hf_zero.loading.lazy import LazyTensor
from hf_zero.zero.layout.initial_values import pending, source_of
from hf_zero.zero.layout.parameter_classes import parameter_classes


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
                values = _load_bin(path).items()  # such as a number of the script, too
                self.tensors.update(
                    (name, LazyTensor(InMemory(value)))
                    for name, value in values
                    if isinstance(value, torch.Tensor)
                )

    def close(self) -> None:
        for file in self._files:
            file.close()
        self.tensors.clear()


def _load_bin(path: Path) -> dict[str, object]:
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError as error:
        if "mmap" not in str(error):
            raise
        return torch.load(path, map_location="cpu", weights_only=True)


def make_real(model: nn.Module) -> None:
    """Read the lazy buffers of ``model`` whole: the initialization computes with their values."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if isinstance(buffer, LazyTensor):
                real = buffer.read_whole()
                # without this flag transformers would initialize the buffer again
                initialized = getattr(buffer, "_is_hf_initialized", False)
                real._is_hf_initialized = initialized  # type: ignore[attr-defined]
                module._buffers[name] = real


def make_pending(model: nn.Module) -> int:
    """Replace the lazy parameters of ``model`` by pending ones, which an engine fills, and return
    the number of pending ones. Tied parameters stay tied.
    """
    parameters: dict[int, nn.Parameter] = {}
    classes = parameter_classes()
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if not isinstance(parameter, LazyTensor):
                classes.make_pending(parameter, _expression_of)
                continue
            if id(parameter) not in parameters:
                new = pending(parameter.shape, parameter.expression)
                new.requires_grad_(parameter.requires_grad)
                # the flag by which transformers skips initialization
                new._is_hf_initialized = True  # type: ignore[attr-defined]
                parameters[id(parameter)] = new
            module._parameters[name] = parameters[id(parameter)]
    return sum(source_of(parameter) is not None for parameter in model.parameters())


def _expression_of(tensor: torch.Tensor) -> Expression | None:
    return tensor.expression if isinstance(tensor, LazyTensor) else None


def read_pending(model: nn.Module) -> None:
    """Read the values of the pending parameters of ``model`` now."""
    for parameter in model.parameters():
        source = parameter.__dict__.pop("_hf_zero_source", None)
        if source is not None:
            parameter.data = source.whole()
