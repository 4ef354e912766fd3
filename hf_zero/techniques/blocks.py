"""The blocks of a model for techniques, found as for units and checkpoints."""

from __future__ import annotations

import inspect
from dataclasses import dataclass

import torch
from torch import nn

from hf_zero.errors import ConfigError
from hf_zero.zero.layout.wrap import find_blocks, repeated_blocks


@dataclass(frozen=True, eq=False)
class Layer:
    """A repeated block, number ``place`` of ``of`` in its stack, counted from 1."""

    block: nn.Module
    stack: str  # path of the containing module
    place: int
    of: int
    keeps: bool  # must run on all tokens: it returns more than a hidden state


def layers_of(model: nn.Module, key: str) -> list[Layer]:
    """Return the repeated blocks of ``model``, from stacks of two or more, whose hidden state keeps
    its length; this excludes the strided convolutions before the layers of wav2vec 2.0. Raises
    ConfigError, naming ``key``, if there are none.
    """
    stacks: dict[str, list[nn.Module]] = {}
    for path, block in repeated_blocks(model):
        if not _has_strides(block):
            stacks.setdefault(path.rpartition(".")[0], []).append(block)
    found = [
        Layer(block, stack, place, len(blocks), place == 1 and not _returns_a_tensor(block))
        for stack, blocks in stacks.items()
        if len(blocks) > 1
        for place, block in enumerate(blocks, 1)
    ]
    if not found:
        raise ConfigError(
            f"{key}.enabled concerns the repeated blocks of a model, and {type(model).__name__} "
            "has none (layers of transformers, _no_split_modules, or items of a ModuleList); "
            "remove the key"
        )
    return found


def layers_at(model: nn.Module, path: str | None, key: str) -> list[nn.Module]:
    """Return the items of the list of layers at ``path`` in ``model``, or for None its repeated
    blocks. Raises ConfigError, naming ``key``, if there are none.
    """
    try:
        found = [] if path is None else list(model.get_submodule(path).children())
    except AttributeError:
        found = []
    found = found or [block for _, block in repeated_blocks(model) if path is None]
    if not found:
        raise ConfigError(
            f"{key} concerns layers of a model, and {type(model).__name__} has no list of them"
            f"{'' if path is None else f' at {path!r}'}; write where it stands, such as "
            "model.layers"
        )
    return found


def linears_of_blocks(model: nn.Module) -> list[str]:
    """Return the names of the layers of class ``nn.Linear`` in blocks of ``model``; in a model
    without repeated blocks, in the modules that it is cut into.
    """
    blocks = [block for _, block in find_blocks(model)]
    inside = {part for block in blocks for part in block.modules() if type(part) is nn.Linear}
    return [name for name, module in model.named_modules() if module in inside]


def _has_strides(block: nn.Module) -> bool:
    convolutions = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
    return any(isinstance(m, convolutions) and set(m.stride) != {1} for m in block.modules())


def _returns_a_tensor(block: nn.Module) -> bool:
    """Return whether the forward of ``block`` is annotated to return a single tensor."""
    said = inspect.signature(type(block).forward).return_annotation
    return said in (torch.Tensor, "torch.Tensor", "Tensor", torch.FloatTensor, "torch.FloatTensor")
