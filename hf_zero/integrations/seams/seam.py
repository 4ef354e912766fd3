"""Row of the table of seams, and the notation of its signatures."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from types import ModuleType
from typing import Any


@dataclass(frozen=True)
class Seam:
    """One wrapped symbol."""

    target: str
    """``module:attribute``, the attribute possibly dotted:
    ``accelerate.state:PartialState._prepare_backend``.
    """
    signature: str
    """Parameters as ``describe`` writes them: names, kinds and defaults, no annotations."""
    wrapper: str
    """``module:function`` that takes the original and returns the replacement."""
    versions: str
    """Releases of the target's package that the seam was read against, as a requirement
    specifier.
    """
    why: str

    @property
    def module(self) -> str:
        return self.target.partition(":")[0]

    @property
    def package(self) -> str:
        return self.module.partition(".")[0]

    def locate(self, module: ModuleType) -> tuple[Any, str, Any]:
        """Return ``(holder, name, original)`` in the executed module. Raises AttributeError if the
        symbol is missing.
        """
        *path, name = self.target.partition(":")[2].split(".")
        holder: Any = module
        for part in path:
            holder = getattr(holder, part)
        return holder, name, inspect.getattr_static(holder, name)


def describe(function: Any) -> str:
    """Return the signature of ``function`` without annotations."""
    signature = inspect.signature(getattr(function, "__func__", function))
    bare = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in signature.parameters.values()
    ]
    return str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))
