"""States of all ranks in a few rows, for the record of a run: what each rank last posted
(``rank_status.py``). No rank is asked.
"""

from __future__ import annotations

from collections.abc import Mapping

from hf_zero.distributed.collective_log import PendingCollective, in_words
from hf_zero.logging import JsonObject

RUNS, WAITS = "runs", "waits"
STATES = (RUNS, WAITS, "script", "failed", "broken", "dead", "unreachable", "ended")
"""``script``: in a collective of its script; ``broken``: ended because of another rank."""


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
    state = post.get("state", "here")
    if state not in ("here", "waits", "follows"):
        return state, in_words(str(post["why"]))
    if state == "here" or "wait" not in post or pending is None:
        return RUNS, ""
    log, number, what, _ = post["wait"]
    if pending.log is not None and log == pending.log.name and number < pending.number:
        return RUNS, ""
    return WAITS, f"{what} (number {number} of {log})"
