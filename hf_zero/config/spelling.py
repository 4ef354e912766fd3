"""«Did you mean»: the known names that a misspelt one most likely stands for."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def closest(name: str, known: Iterable[str], limit: int = 3) -> list[str]:
    """Names of ``known`` that resemble ``name``, the likeliest first; dotted names are compared
    by their last part too.
    """
    bare = _bare(name)
    scored = []
    for candidate in known:
        leaf = _bare(candidate.rpartition(".")[2])
        score = max(_resemblance(bare, leaf), _resemblance(bare, _bare(candidate)))
        if score >= 0.7:
            scored.append((-score, len(candidate), candidate))
    scored.sort()
    best = [candidate for score, _, candidate in scored if score <= scored[0][0] + 0.12]
    return best[:limit]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """«; did you mean 'a' or 'b'?», or the names to choose from when none resembles ``name``."""
    names = list(known)
    found = closest(name, names)
    if found:
        return "; did you mean " + " or ".join(repr(candidate) for candidate in found) + "?"
    return "; known here: " + ", ".join(sorted(names))


def _bare(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")


def _resemblance(left: str, right: str) -> float:
    ratio = difflib.SequenceMatcher(None, left, right).ratio()
    # an abbreviation: "zero" for zero_optimization, "bucket_size" for reduce_bucket_size
    if len(left) >= 4 and right.startswith(left):
        return max(ratio, 0.8)
    if len(left) >= 6 and right.endswith(left):
        return max(ratio, 0.75)
    return ratio
