"""Proofs, from the posts of ranks (rank_status.py), that a wait will never end.

[Note: proofs]
A rank that has waited for a second posts what it waits for, with the numbers of collectives that it
has issued on each communicator. Posts are never withdrawn, and need not be: each conclusion holds
for an old post, too.

- Two ranks whose collectives of one number on one communicator differ never match again.
- A rank that has ended, or closed the communicator, before it issued a collective will never issue
  it.
- On a device the host does not wait for collectives: a thread follows them, and such a rank posts
  "follows" instead of "waits". Its host may go on, so it is never stuck; the first two proofs hold
  all the same.
- A rank is stuck if its collective needs one that is stuck, or is this rank, and has not issued it:
  had its wait ended since its post, that other rank would have issued it. If this rank's wait needs
  a stuck rank that has not issued its collective, the wait never ends.

Everything else (a rank that computes, compiles, saves, sleeps) is silence, which proves nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

StatusPost = dict[str, Any]
REMEDY = (
    "Every rank must run the same forwards, backwards, steps, evaluations and "
    "saves in the same order"
)
OVER = ("failed", "broken")  # states of a rank that end all other ranks that wait


class HangDiagnosis(NamedTuple):
    """The reason why a wait cannot end; ``cause`` is published to the other ranks."""

    text: str
    cause: str


def diagnose_hang(
    rank: int,
    own: StatusPost,
    posts: Mapping[int, StatusPost],
    stuck_in: Sequence[str] = ("waits",),
) -> HangDiagnosis | None:
    """Return what ``posts`` prove about the wait in ``own``, the post of ``rank``, or None if they
    prove nothing (see the note).

    ``stuck_in``: states in which a host is taken to issue nothing before its wait is over.
    """
    over = {each: post for each, post in posts.items() if post["state"] in OVER}
    log, number, what, _ = own.get("wait", ("", 0, "the others", ()))
    if over:
        place = f" (number {number} of {log})" if log else ""
        return _for_ever(f"rank {rank} waits for {what}{place}, and", over, [])
    if not log:
        return None
    return (
        _different_collectives(rank, own, posts)
        or _never_joins(rank, own, posts)
        or _stuck(rank, own, posts, stuck_in)
    )


def _different_collectives(
    rank: int, own: StatusPost, posts: Mapping[int, StatusPost]
) -> HangDiagnosis | None:
    """Diagnose another rank that has issued another collective under the same number."""
    log, number, _, _ = own["wait"]
    said = _issued_as(own, log, number)
    for each, post in posts.items():
        other = _issued_as(post, log, number)
        if said is not None and other is not None and other != said:
            return _same(
                f"rank {rank} is at {said}, rank {each} at {other} (both number {number} "
                f"of {log}). {REMEDY}"
            )
    return None


def _never_joins(
    rank: int, own: StatusPost, posts: Mapping[int, StatusPost]
) -> HangDiagnosis | None:
    """Diagnose a needed rank that has ended or closed the communicator before the collective."""
    log, number, what, needs = own["wait"]
    for each in needs:
        if each == rank or each not in posts or sequence_number(posts[each], log) > number:
            continue
        post = posts[each]
        # If this rank has closed it, too, the rest of the shards is being gathered: all ranks that
        # destroyed the engine will come.
        closed = "" if own["logs"][log][2] else post["logs"].get(log, (0, [], ""))[2]
        if post["state"] == "dead":
            place = f"(number {number} of {log})"
            return _for_ever(f"rank {rank} waits for {what} {place}, and", {each: post}, [each])
        if post["state"] == "ended" or closed:
            how = closed or f"ended ({post['why']})"
            return _same(
                f"rank {rank} waits for {what} (number {number} of {log}), which rank {each} will "
                f"never join: it has {how}. {REMEDY}, and the "
                "same number of them"
            )
    return None


def _stuck(
    rank: int, own: StatusPost, posts: Mapping[int, StatusPost], stuck_in: Sequence[str]
) -> HangDiagnosis | None:
    """Diagnose a needed rank that waits, directly or through others, for this one."""
    log, number, what, needs = own["wait"]
    stuck = {rank: own}
    while True:
        more = {
            each: post
            for each, post in posts.items()
            if each not in stuck and post["state"] in stuck_in and _lacks(post, stuck, each)
        }
        if not more:
            break
        stuck.update(more)
    for each in needs:
        if each != rank and each in stuck and sequence_number(stuck[each], log) <= number:
            there, at, instead, _ = stuck[each]["wait"]
            return _same(
                f"rank {rank} waits for {what} (number {number} of {log}), which rank {each} has "
                f"not issued: it waits for {instead} "
                f"(number {at} of {there}). {REMEDY}"
            )
    return None


def _for_ever(waits: str, posts: Mapping[int, StatusPost], dead: list[int]) -> HangDiagnosis:
    cause = end_of(posts, dead) or ""
    return HangDiagnosis(f"{waits} will do so for ever: {cause}", cause)


def _same(text: str) -> HangDiagnosis:
    return HangDiagnosis(text, text)


def _lacks(post: StatusPost, stuck: Mapping[int, StatusPost], rank: int) -> bool:
    """Whether the wait of ``rank`` needs a rank of ``stuck`` that has not issued its collective."""
    log, number, _, needs = post["wait"]
    return any(
        each in stuck and each != rank and sequence_number(stuck[each], log) <= number
        for each in needs
    )


def end_of(posts: Mapping[int, StatusPost], dead: list[int]) -> str | None:
    """Return the worst end of another rank, in words; None if there is none."""
    silent = [
        rank for rank in dead if posts.get(rank, {}).get("state", "here") not in (*OVER, "ended")
    ]
    if silent:
        names = ", ".join(map(str, silent))
        return (
            f"rank{'s' * (len(silent) > 1)} {names} died without a word (killed, out of memory, "
            "or crashed in native code)"
        )
    for state in (*OVER, "ended"):
        for rank, post in posts.items():
            if post["state"] == state == "failed":
                return f"rank {rank} has failed: {post['why']}"
            if post["state"] == state == "broken":
                return (
                    str(post["why"])
                    if post["why"].startswith("rank ")
                    else f"rank {rank} gave up: {post['why']}"
                )
            if post["state"] == state:
                return (
                    f"rank {rank} has ended ({post['why']}). {REMEDY}, and the same number of them"
                )
    return None


def _issued_as(post: StatusPost, log: str, number: int) -> str | None:
    """Return collective ``number`` on ``log`` as the rank of ``post`` issued it, or None."""
    issued, recent, _ = post["logs"].get(log, (0, [], ""))
    at = number - (issued - len(recent))
    return recent[at] if 0 <= at < len(recent) else None


def sequence_number(post: StatusPost, log: str) -> int:
    """Return the number of collectives of ``log`` that the rank of ``post`` has issued."""
    return int(post["logs"].get(log, (0, [], ""))[0])
