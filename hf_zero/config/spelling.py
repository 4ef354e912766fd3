"""Spelling suggestions: the known names closest to a misspelt one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

# Resemblance at which an unknown name is taken for a misspelt one: 97 % of 1,680 known names with
# one letter wrong reach it, and 3 of the 284 names of other programs that published files hold.
MISSPELT = 0.83
LISTED = 16  # names in a message at most


def closest(name: str, names: Iterable[str], limit: int = 3, least: float = 0.7) -> list[str]:
    """Return the ``names`` that resemble ``name``, most similar first; similarity is at
    least ``least`` on a scale from 0 to 1. Dotted names are also compared by their last part.
    """
    bare = _bare(name)
    scored = []
    for candidate in names:
        leaf = _bare(candidate.rpartition(".")[2])
        score = max(_resemblance(bare, part, least) for part in {leaf, _bare(candidate)})
        if score >= least:
            scored.append((-score, len(candidate), candidate))
    scored.sort()
    if not scored:
        return []
    # a name that is clearly meant is suggested alone: stage for "stag", not stage3_... as well
    near = 0.05 if -scored[0][0] >= MISSPELT else 0.12
    return [candidate for score, _, candidate in scored if score <= scored[0][0] + near][:limit]


def is_comment(name: str) -> bool:
    """Return whether a key is a comment in a format that has none."""
    return name.startswith(("_", "//", "#")) or name.lower() in ("comment", "comments")


def is_foreign(name: str, candidates: Iterable[str]) -> bool:
    """Return whether ``name`` is a comment, or resembles none of ``candidates`` and is the last
    part of none: a key of another program, not a misspelt or misplaced one.
    """
    if is_comment(name):
        return True
    names = list(candidates)
    similar = closest(name, names, least=MISSPELT)
    return not similar and name not in {candidate.rpartition(".")[2] for candidate in names}


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """Return «; did you mean 'a' or 'b'?», or names to choose from, :data:`LISTED` at most, if none
    resembles ``name``.
    """
    names = list(candidates)
    similar = closest(name, names)
    if similar:
        return "; did you mean " + " or ".join(repr(candidate) for candidate in similar) + "?"
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return f"; known here: {', '.join(sorted(names)[:LISTED])}{more}"


def _bare(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")


def _resemblance(left: str, right: str, least: float) -> float:
    """Return the similarity of two names, or 0 for one below ``least``."""
    # a ratio is at most that of the lengths: most of the thousand known names need no comparison
    most = 2.0 * min(len(left), len(right)) / max(len(left) + len(right), 1)
    ratio = difflib.SequenceMatcher(None, left, right).ratio() if most >= least else 0.0
    # abbreviations: "zero" for zero_optimization, "bucket_size" for reduce_bucket_size
    if len(left) >= 4 and right.startswith(left):
        return max(ratio, 0.8)
    if len(left) >= 6 and right.endswith(left):
        return max(ratio, 0.75)
    return ratio
