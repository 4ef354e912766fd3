"""Table of all symbols of Accelerate, Transformers, PEFT, TRL and Lightning that hf-zero wraps, and
the reasons. The rows are in the files of this folder, by library.

A seam names its target as ``module:attribute`` and its wrapper the same way. The wrapper is called
in place of the target, with the original before the arguments; its module is imported while the
target's package is still being imported, so it may import nothing of Hugging Face at its top.
``finder.py`` calls ``apply`` when a target module has run.

A row holds where the installed symbol takes the calls that the wrapper takes. Where it does
not, the symbol stays as it is, and one warning names the release, the part of hf-zero that is off,
and the remedy. No release is asked for its number.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
from types import ModuleType
from typing import Any

from hf_zero.integrations.seams import accelerate, lightning, transformers
from hf_zero.integrations.seams.seam import Seam as Seam
from hf_zero.integrations.seams.seam import describe

MARK = "__hf_zero_seam__"
left_out: dict[str, str] = {}  # why a symbol was left as it is, by the target of its row

SEAMS: tuple[Seam, ...] = (
    *accelerate.SEAMS,
    *transformers.SEAMS,
    *lightning.SEAMS,
)


@functools.cache
def modules() -> frozenset[str]:
    """Return the names of the modules that have a seam."""
    return frozenset(seam.module for seam in SEAMS)


def apply(module: ModuleType) -> None:
    """Apply every seam of ``module`` that is not applied yet and holds for its release."""
    for seam in SEAMS:
        if seam.module == module.__name__:
            _apply(seam, module)


def _apply(seam: Seam, module: ModuleType) -> None:
    from hf_zero.errors import ConfigError

    try:
        holder, name, original = seam.locate(module)
    except AttributeError:
        _leave(seam, "is gone")
        return
    function = getattr(original, "__func__", original)  # of a staticmethod or classmethod
    if getattr(function, MARK, None) == seam.target:
        return
    try:
        prepared = _named(seam.prepare)(function) if seam.prepare else function
    except ConfigError as error:
        _leave(seam, str(error))
        return
    call = functools.partial(_named(seam.wrapper), prepared)
    if not seam.fits(call, function):
        uses = f" with {', '.join(seam.uses)}" if seam.uses else ""
        expected = f"{describe(call)}{uses}"
        _leave(seam, f"takes {describe(function)}, and hf-zero calls it as {expected}")
        return

    @functools.wraps(function)
    def replacement(*args: object, **kwargs: object) -> Any:
        return call(*args, **kwargs)

    left_out.pop(seam.target, None)
    setattr(replacement, MARK, seam.target)
    setattr(holder, name, type(original)(replacement) if function is not original else replacement)


def _named(path: str) -> Any:
    home, _, name = path.partition(":")
    return getattr(importlib.import_module(home), name)


def _leave(seam: Seam, reason: str) -> None:
    """Record and warn, once, that the symbol of ``seam`` stays as it is."""
    from hf_zero.logging import logger

    if seam.target in left_out:
        return
    left_out[seam.target] = reason
    release = importlib.metadata.version(seam.package)
    logger.warning(
        "%s %s: %s %s. It stays as it is, and this part of hf-zero is off: %s (%s). Install %s%s, "
        "or a release of hf-zero that knows it",
        seam.package,
        release,
        seam.target,
        reason,
        seam.wrapper,
        seam.why,
        seam.package,
        seam.versions,
    )
