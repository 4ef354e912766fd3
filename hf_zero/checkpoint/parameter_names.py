"""Parameter names without what wrappers add to them, and pairs of names that differ in that."""

from __future__ import annotations

from collections.abc import Iterable

WRAPPERS = frozenset(["_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"])


DDP_PREFIX = "module."  # what DDP puts before every name


def strip_wrappers(name: str) -> str:
    """Return ``name`` without the components that wrappers add."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def pair_names(names: Iterable[str], others: Iterable[str]) -> dict[str, str]:
    """Map each of ``names`` to its name in ``others``: an equal one, else the one that is equal
    without wrappers, if it is the only one and no other of ``names`` equals either. Names without
    one are left out.
    """
    own, exact = dict.fromkeys(names), dict.fromkeys(others)
    pairs = {name: name for name in own if name in exact}
    within = _by_innermost(exact)
    for inner, (name, *rivals) in _by_innermost(own).items():
        candidates = within.get(inner, [])
        if not rivals and len(candidates) == 1:
            pairs[name] = candidates[0]
    return pairs


def _by_innermost(names: Iterable[str]) -> dict[str, list[str]]:
    result: dict[str, list[str]] = {}
    for name in names:
        result.setdefault(strip_wrappers(name).removeprefix(DDP_PREFIX), []).append(name)
    return result
