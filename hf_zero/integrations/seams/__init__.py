"""Every symbol of Accelerate, Transformers, PEFT and Lightning that hf-zero wraps, in one table:
what, why, and the signature relied on. Its rows lie by library in the files of this folder.

A seam names its target as ``module:attribute`` and its wrapper the same way. The wrapper is called
once with the original and returns the replacement; the module that holds it is imported while the
target's package is still being imported, so it may import nothing of Hugging Face at its top.
``hooks.py`` calls ``apply`` when a target module has run. A test compares signatures and versions
with what is installed: a new release of a library that changes one fails there.
"""

from __future__ import annotations

import functools
import importlib
from types import ModuleType

from hf_zero.integrations.seams import accelerate, lightning, peft, transformers
from hf_zero.integrations.seams.seam import Seam as Seam
from hf_zero.integrations.seams.seam import describe

MARK = "__hf_zero_seam__"

SEAMS: tuple[Seam, ...] = (
    *accelerate.SEAMS,
    *transformers.SEAMS,
    *peft.SEAMS,
    *lightning.SEAMS,
)


@functools.cache
def modules() -> frozenset[str]:
    """Names of the modules that hold a seam."""
    return frozenset(seam.module for seam in SEAMS)


def apply(module: ModuleType) -> None:
    """Put in every seam of ``module`` that is not in yet.

    A symbol that has changed is named in a warning.
    """
    for seam in SEAMS:
        if seam.module == module.__name__:
            _apply(seam, module)


def _apply(seam: Seam, module: ModuleType) -> None:
    from hf_zero.logging import logger

    try:
        holder, name, original = seam.locate(module)
    except AttributeError:
        logger.warning(
            "%s is gone, and hf-zero relies on it (%s). Install %s%s",
            seam.target,
            seam.why,
            seam.package,
            seam.versions,
        )
        return
    function = getattr(original, "__func__", original)  # out of a staticmethod or classmethod
    if getattr(function, MARK, None) == seam.target:
        return
    if (found := describe(function)) != seam.signature:
        logger.warning(
            "%s takes %s, hf-zero was read against %s. Install %s%s",
            seam.target,
            found,
            seam.signature,
            seam.package,
            seam.versions,
        )
    home, _, wrapper = seam.wrapper.partition(":")
    replacement = getattr(importlib.import_module(home), wrapper)(function)
    functools.update_wrapper(replacement, function)
    setattr(replacement, MARK, seam.target)
    setattr(holder, name, type(original)(replacement) if function is not original else replacement)
