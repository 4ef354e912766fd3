"""Rotation of queries and keys in one launch, in attention layers of any class.

A function that a forward calls by a global name is a rotation if it rotates: it is called with
random queries, keys, cosines and sines. The forward of such a module becomes a copy of its own code
in which this name stands for the fused operation. Where the operation does not apply (other
layouts, dtypes, autocast), the original function is called.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from hf_zero.device import kinds
from hf_zero.integrations.fused.sublayers import takes
from hf_zero.ops.rotary import rotary

Function = Callable[..., Any]
BOUND = 1e-4


def rotating_forward(cls: type) -> Function | None:
    """Return a copy of the forward of ``cls`` that rotates queries and keys in one launch; None if
    it does not rotate, or not in halves as Llama does.
    """
    forward: Any = cls.forward  # type: ignore[attr-defined]
    found = tuple((name, each) for name, each in _functions_called(forward) if rotates(each))
    return _rebound(forward, found) if found else None


def other_rotation(cls: type) -> bool:
    """Return whether the forward of ``cls`` calls a function that is named after rotations."""
    return any("rotary" in name for name, _ in _functions_called(cls.forward))  # type: ignore[attr-defined]


def _layers(function: Any) -> Iterator[types.FunctionType]:
    """Yield ``function`` and the functions that its decorators wrap."""
    seen: list[Any] = [function]
    for each in seen:
        if isinstance(each, types.FunctionType):
            yield each
            seen.extend(
                value
                for cell in each.__closure__ or ()
                if isinstance(value := _content(cell), types.FunctionType) and value not in seen
            )


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _functions_called(forward: Any) -> Iterator[tuple[str, Function]]:
    for function in _layers(forward):
        for name in function.__code__.co_names:
            each = function.__globals__.get(name)
            if isinstance(each, types.FunctionType) and each.__code__.co_argcount >= 4:
                yield name, each


@functools.cache
def rotates(function: Function) -> bool:
    """Return whether ``function(q, k, cos, sin)`` rotates pairs from the first and second half of
    each head, of [batch, heads, sequence, width] by [batch, sequence, width].
    """
    generator = torch.Generator().manual_seed(0)
    device = torch.device(kinds.accelerator() or "cpu")
    q, k, cos, sin = (
        torch.randn(shape, generator=generator).to(device)
        for shape in ((2, 4, 3, 8), (2, 2, 3, 8), (2, 3, 8), (2, 3, 8))
    )
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            found = function(q, k, cos, sin)
    except Exception:  # a function of other arguments
        return False
    if not (isinstance(found, tuple) and len(found) == 2):
        return False
    right = rotary(q, k, cos, sin)
    return all(
        isinstance(a, torch.Tensor) and a.shape == b.shape and float((a - b).abs().max()) < BOUND
        for a, b in zip(found, right)
    )


def _fused(original: Function) -> Function:
    @functools.wraps(original)
    def rotate(*args: Any, **kwargs: Any) -> Any:
        if len(args) != 4 or kwargs or not _fits(*args):
            return original(*args, **kwargs)
        return rotary(*args)

    return rotate


def _fits(q: Any, k: Any, cos: Any, sin: Any) -> bool:
    return (
        q.dim() == k.dim() == 4
        and cos.dim() == 3
        and cos.shape == sin.shape
        and cos.shape[0] in (1, q.shape[0])
        and cos.shape[1] == q.shape[2] == k.shape[2]
        and cos.shape[2] == q.shape[3] == k.shape[3]
        and not (torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad))
        and takes(q, k, cos, sin)
    )


@functools.cache
def _rebound(forward: Any, found: tuple[tuple[str, Function], ...]) -> Function:
    """Return a copy of ``forward`` in which the names of ``found`` stand for fused functions, also
    inside of its decorators.
    """
    fused = {name: _fused(function) for name, function in found}

    def copied(function: Any) -> Any:
        cells = tuple(
            types.CellType(copied(value))
            if isinstance(value := _content(cell), types.FunctionType)
            else cell
            for cell in function.__closure__ or ()
        )
        names = function.__globals__
        ours = {name: each for name, each in fused.items() if names.get(name) is not None}
        new = types.FunctionType(
            function.__code__,
            {**names, **ours} if ours else names,
            function.__name__,
            function.__defaults__,
            cells or None,
        )
        new.__kwdefaults__ = function.__kwdefaults__
        new.__dict__.update(function.__dict__)
        new.__qualname__, new.__module__ = function.__qualname__, function.__module__
        return new

    new: Any = copied(forward)
    new._hf_zero_rotates = True
    return new  # type: ignore[no-any-return]
