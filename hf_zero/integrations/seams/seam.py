"""Row of the table of seams, and the comparison of a wrapper with the installed symbol."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

TESTED = {
    "torch": ">=2.11,<2.16",
    "transformers": ">=5.17,<=5.24.0",
    "accelerate": ">=1.12,<1.16",
    "trl": ">=1.16,<1.17",
    "peft": ">=0.21,<0.22",
    "lightning": ">=2.6,<2.7",
    "pytorch_lightning": ">=2.6,<2.7",
}
"""Releases that the tests have run with, by library, as requirement specifiers."""
OPEN = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}


@dataclass(frozen=True)
class Seam:
    """One wrapped symbol."""

    target: str
    """``module:attribute``, the attribute possibly dotted:
    ``accelerate.state:PartialState._prepare_backend``.
    """
    wrapper: str
    """``module:function`` that is called in place of the target, with the original before the
    arguments of the call.
    """
    why: str
    uses: tuple[str, ...] = ()
    """Parameters that the wrapper looks up by name in ``*args, **kwargs``."""
    prepare: str = ""
    """``module:function`` that takes the original when the row is applied, and returns what the
    wrapper gets in its place. Raises ConfigError if the original does not behave as the wrapper
    needs.
    """

    @property
    def module(self) -> str:
        return self.target.partition(":")[0]

    @property
    def package(self) -> str:
        return self.module.partition(".")[0]

    @property
    def versions(self) -> str:
        """Releases of the target's package that the tests have run with."""
        return TESTED[self.package]

    def locate(self, module: ModuleType) -> tuple[Any, str, Any]:
        """Return ``(holder, name, original)`` in the executed module. Raises AttributeError if the
        symbol is missing.
        """
        *path, name = self.target.partition(":")[2].split(".")
        holder: object = module
        for part in path:
            holder = getattr(holder, part)
        return holder, name, inspect.getattr_static(holder, name)

    def fits(self, call: object, original: object) -> bool:
        """Return whether ``call``, the wrapper with its first argument, takes each call that
        ``original`` takes, with the same defaults. A side with ``*args, **kwargs`` takes whatever
        it does not name.
        """
        ours, theirs = (_parameters(function) for function in (call, original))
        if {kind for _, kind, _ in theirs} >= OPEN:
            return True
        if {kind for _, kind, _ in ours} >= OPEN:
            ours = [parameter for parameter in ours if parameter[1] not in OPEN]
            theirs, optional = theirs[: len(ours)], theirs[len(ours) :]
            return theirs == ours and {*self.uses} <= {name for name, _, _ in optional}
        return theirs == ours


def _parameters(function: Any) -> list[tuple[str, Any, Any]]:
    """Return the name, kind and default of each parameter; ``*`` and ``**`` have no name."""
    return [
        ("" if parameter.kind in OPEN else parameter.name, parameter.kind, parameter.default)
        for parameter in inspect.signature(function).parameters.values()
    ]


def describe(function: Callable[..., object]) -> str:
    """Return the signature of ``function`` without annotations."""
    signature = inspect.signature(getattr(function, "__func__", function))
    bare = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in signature.parameters.values()
    ]
    return str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))
