"""Rotation of queries and keys in one launch, in attention layers of any class.

A function that a forward calls by a global name is a rotation if it rotates: it is called with
random queries, keys, cosines and sines. The forward of such a module becomes a copy of its own code
in which this name stands for the fused operation. Where the operation does not apply (other
layouts, dtypes, autocast), the original function is called.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hf_zero.device import kinds
from hf_zero.integrations.fused.shells import content, names_used
from hf_zero.integrations.fused.sublayers import takes
from hf_zero.ops.rotary import rotary

Function = Callable[..., object]
BOUND = 1e-4  # difference from a rotation of random numbers, whose elements are about 1
EFFECTS = {"IMPORT_NAME", "STORE_GLOBAL", "DELETE_GLOBAL", "STORE_ATTR", "DELETE_ATTR"}
NAMES_WITH_EFFECTS = {"distributed", "save", "open", "print", "input", "exec", "eval", "setattr"}


def rotating_forward(cls: type) -> Function | None:
    """Return a copy of the forward of ``cls`` that rotates queries and keys in one launch; None if
    it does not rotate, or not in halves as Llama does.
    """
    forward: types.FunctionType = cls.forward  # type: ignore[attr-defined]
    # a code has one name for a global and for an attribute: both would be renamed
    attributes = {name for operation, name, _ in names_used(forward) if operation != "LOAD_GLOBAL"}
    rotations = {
        name: function
        for name, function in _functions_called(forward)
        if name not in attributes and rotation_of(function)
    }
    return _rebound(forward, tuple(rotations.items())) if rotations else None


def other_rotation(cls: type) -> bool:
    """Return whether the forward of ``cls`` calls a function that is named after rotations."""
    return any("rotary" in name for name, _ in _functions_called(cls.forward))  # type: ignore[attr-defined]


def _functions_called(forward: object) -> Iterator[tuple[str, Function]]:
    for _, name, value in names_used(forward):
        if (
            isinstance(value, types.FunctionType)
            and value.__code__.co_argcount >= 4
            and _is_of_torch_alone(value, set())
        ):
            yield name, value


def _is_of_torch_alone(function: types.FunctionType, visited: set[types.FunctionType]) -> bool:
    """Return whether ``function`` names nothing but torch, builtins without effects and functions
    like itself, so that a call with random tensors has no effect: no collective, file, log, import.
    """
    visited.add(function)
    for operation, name, value in names_used(function):
        if operation in EFFECTS or name in NAMES_WITH_EFFECTS:
            return False
        if operation != "LOAD_GLOBAL" or value is None or value is torch:
            continue
        if not isinstance(value, types.FunctionType):
            return False
        if value not in visited and not _is_of_torch_alone(value, visited):
            return False
    return True


@dataclass(frozen=True)
class Rotation:
    """Rotation of pairs from the first and second half of each head: by ``sign`` times the sine; by
    cosines of half the width if ``doubled``; only the first columns of wider heads if ``partial``.
    """

    sign: int = 1
    doubled: bool = False
    partial: bool = False

    def fits(self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
        """Return whether :meth:`apply` takes what a forward passes, which may be anything."""
        if not all(isinstance(tensor, torch.Tensor) for tensor in (q, k, cos, sin)):
            return False
        if not q.dim() == k.dim() == 4 or cos.dim() != 3 or cos.shape != sin.shape:
            return False
        width = cos.shape[2] * (2 if self.doubled else 1)
        return (
            q.shape[0] == k.shape[0]
            and cos.shape[0] in (1, q.shape[0])
            and cos.shape[1] == q.shape[2] == k.shape[2]
            and (width <= q.shape[3] if self.partial else width == q.shape[3])
            and q.shape[3] == k.shape[3]
            and q.dtype == k.dtype == cos.dtype == sin.dtype
            and not (torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad))
            and takes(q, k, cos, sin)
        )

    def apply(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.doubled:
            cos, sin = torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)
        return rotary(q, k, cos, sin if self.sign > 0 else -sin)


@functools.cache
def rotation_of(function: Function) -> Rotation | None:
    """Return how ``function(q, k, cos, sin)`` rotates [batch, heads, sequence, width] by [batch,
    sequence, width]; None if it does not.
    """
    for doubled in (False, True):
        for sign in (1, -1):
            rotation = Rotation(sign, doubled)
            if _agrees(function, rotation, 4 if doubled else 8):
                partial = Rotation(sign, doubled, partial=True)
                return partial if _agrees(function, partial, 2 if doubled else 4) else rotation
    return None


def _agrees(function: Function, rotation: Rotation, width: int) -> bool:
    """Compare on the CPU, where a function of other arguments raises, then on the accelerator."""
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 4, 3, 8), (2, 2, 3, 8), (2, 3, width), (2, 3, width)
    inputs = [torch.randn(shape, generator=generator, device="cpu") for shape in shapes]
    for device in dict.fromkeys(("cpu", kinds.accelerator() or "cpu")):
        q, k, cos, sin = (tensor.to(device) for tensor in inputs)
        try:
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                outputs = function(q, k, cos, sin)
        except Exception:
            return False
        if not (isinstance(outputs, tuple) and len(outputs) == 2):
            return False
        for a, b in zip(outputs, rotation.apply(q, k, cos, sin)):
            if not isinstance(a, torch.Tensor) or a.shape != b.shape:
                return False
            if float((a - b).abs().max()) >= BOUND:
                return False
    return True


def _fused(original: Function, name: str, names: Mapping[str, Any]) -> Function:
    """Return ``original`` with the kernel, while ``name`` in ``names`` is that function."""
    rotation = rotation_of(original)
    assert rotation is not None

    @functools.wraps(original)
    def rotate(*args: torch.Tensor, **kwargs: object) -> object:
        if len(args) != 4 or kwargs or not rotation.fits(*args) or names[name] is not original:
            return names[name](*args, **kwargs)
        return rotation.apply(*args)

    return rotate


@functools.cache
def _rebound(forward: types.FunctionType, rotations: tuple[tuple[str, Function], ...]) -> Function:
    """Return a copy of ``forward`` that calls functions of other names in place of those of
    ``rotations``, also inside of its decorators.

    The globals stay those of its module, where the fused functions are added under these names: a
    copy of the globals would not follow later changes, and torch.compile does not take it.
    """
    copies: dict[types.FunctionType, types.FunctionType] = {}

    def copied(function: types.FunctionType) -> types.FunctionType:
        if function in copies:
            return copies[function]
        copies[function] = function  # as it is, where it holds itself
        cells = tuple(
            types.CellType(copied(value))
            if isinstance(value := content(cell), types.FunctionType)
            else cell
            for cell in function.__closure__ or ()
        )
        code, names = function.__code__, function.__globals__
        for name, original in rotations:
            if name in code.co_names and names.get(name) is original:
                ours = f"_hf_zero_{name}"
                names[ours] = _fused(original, name, names)
                code = code.replace(co_names=tuple(ours if n == name else n for n in code.co_names))
        new = types.FunctionType(
            code, names, function.__name__, function.__defaults__, cells or None
        )
        new.__kwdefaults__ = function.__kwdefaults__
        new.__dict__.update(function.__dict__)
        new.__qualname__, new.__module__ = function.__qualname__, function.__module__
        copies[function] = new
        return new

    new = copied(forward)
    new.__dict__["_hf_zero_rotates"] = True
    return new
