"""Names without what a wrapper puts into them: a model that was compiled, or wrapped by FSDP,
DDP or an activation checkpoint, is still that model.
"""

from __future__ import annotations

from collections.abc import Iterable

WRAPPERS = frozenset(["_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"])
WHOLE = "module."  # what DDP puts before every name


def bare(name: str) -> str:
    """``name`` as the module within would give it."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def pairing(wanted: Iterable[str], held: Iterable[str]) -> dict[str, str]:
    """Each of ``wanted`` that is among ``held``, to the name it has there: the same, or the same
    but for wrappers.
    """
    there = list(held)
    exact = set(there)
    within: dict[str, list[str]] = {}
    for name in there:
        within.setdefault(_innermost(name), []).append(name)
    made = {}
    for name in wanted:
        candidates = [name] if name in exact else within.get(_innermost(name), [])
        if len(candidates) == 1:
            made[name] = candidates[0]
    return made


def _innermost(name: str) -> str:
    return bare(name).removeprefix(WHOLE)
