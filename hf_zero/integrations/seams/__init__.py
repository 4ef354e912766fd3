"""Table of all symbols of Accelerate, Transformers, PEFT, TRL and Lightning that hf-zero wraps: the
reason, and the signature relied on. The rows are in the files of this folder, by library.

A seam names its target as ``module:attribute`` and its wrapper the same way. The wrapper is called
once with the original and returns the replacement; its module is imported while the target's
package is still being imported, so it may import nothing of Hugging Face at its top. ``finder.py``
calls ``apply`` when a target module has run. A test compares signatures and versions with the
installed libraries: a new release that changes one fails there.
"""

from __future__ import annotations

import functools
import importlib
from types import ModuleType

from hf_zero.integrations.seams import accelerate, lightning, peft, transformers, trl
from hf_zero.integrations.seams.seam import Seam as Seam
from hf_zero.integrations.seams.seam import describe

MARK = "__hf_zero_seam__"

SEAMS: tuple[Seam, ...] = (
    *accelerate.SEAMS,
    *transformers.SEAMS,
    *peft.SEAMS,
    *lightning.SEAMS,
    *trl.SEAMS,
)


@functools.cache
def modules() -> frozenset[str]:
    """Return the names of the modules that have a seam."""
    return frozenset(seam.module for seam in SEAMS)


def apply(module: ModuleType) -> None:
    """Apply every seam of ``module`` that is not applied yet.

    A changed or missing symbol is named in a warning.
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
    function = getattr(original, "__func__", original)  # of a staticmethod or classmethod
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
