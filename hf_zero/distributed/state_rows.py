"""States of all ranks in a few rows, for the record of a run: what each rank last posted
(``rank_status.py``). No rank is asked.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from hf_zero.distributed.collective_log import PendingCollective, in_words
from hf_zero.logging import JsonObject

RUNS = "runs"  # in the rows: a rank that waits for nothing, as far as this rank knows


class RankState(StrEnum):
    """The state that a rank posts."""

    HERE = "here"  # waits for nothing
    WAITS = "waits"  # for a collective
    FOLLOWS = "follows"  # waits on its device, while its host may go on
    SCRIPT = "script"  # waits in a collective of its script
    FAILED = "failed"
    BROKEN = "broken"  # ended because of another rank
    ENDED = "ended"
    # posted by others
    DEAD = "dead"  # its process has ended without a post
    UNREACHABLE = "unreachable"  # its host is


ENDS = (RankState.FAILED, RankState.BROKEN, RankState.DEAD, RankState.UNREACHABLE, RankState.ENDED)
"""States of a rank that has ended, or counts as ended."""
STATES = (RUNS, RankState.WAITS, RankState.SCRIPT, *ENDS)
"""States in the rows."""


def rank_states(
    posts: Mapping[int, JsonObject], world: int, pending: PendingCollective | None
) -> list[JsonObject]:
    """Return the ``world`` ranks in groups of one state, as rows ``ranks``, ``state`` and ``what``:
    the collective that they wait for, or the reason of their end.

    ``pending``: what this rank waits for. Ranks whose posts say that they wait for an earlier
    collective have gone on; so have all that wait, if this rank does not.
    """
    groups: dict[tuple[str, str], list[int]] = {}
    for rank in range(world):
        groups.setdefault(_state(posts.get(rank, {}), pending), []).append(rank)
    return [
        {"ranks": ranks, "state": state, "what": what} for (state, what), ranks in groups.items()
    ]


def _state(post: JsonObject, pending: PendingCollective | None) -> tuple[str, str]:
    state = post.get("state", RankState.HERE)
    if state not in (RankState.HERE, RankState.WAITS, RankState.FOLLOWS):
        return state, in_words(str(post["why"]))
    if state == RankState.HERE or "wait" not in post or pending is None:
        return RUNS, ""
    log, number, what, _ = post["wait"]
    if pending.log is not None and log == pending.log.name and number < pending.number:
        return RUNS, ""
    return RankState.WAITS, f"{what} (number {number} of {log})"
