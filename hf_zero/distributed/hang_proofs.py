"""Proofs, from the posts of all ranks (rank_status.py), that a wait will never end.

[Note: proofs]
A rank that has waited for a second posts what it waits for, with the numbers of collectives that it
has issued on each communicator. Posts are never withdrawn, and need not be: each conclusion holds
for an old post, too.

- Two ranks whose collectives of one number on one communicator differ never match again.
- A rank that has ended, or closed the communicator, before it issued a collective will never issue
  it.
- A rank of an unreachable host (host_heartbeats.py, the note) will never issue anything: the only
  conclusion here that is no proof.
- A wait on a communicator that all ranks have left is over. A digest may be older than that.
- On a device the host does not wait for collectives: a thread follows them, and such a rank posts
  "follows" instead of "waits". Its host may go on, so it is never stuck; the first two proofs hold
  all the same.
- A rank is stuck if its collective needs one that is stuck, or is this rank, and has not issued it:
  had its wait ended since its post, that other rank would have issued it. If this rank's wait needs
  a stuck rank that has not issued its collective, the wait never ends.

A rank that computes, compiles, saves or sleeps posts nothing, and that proves nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hf_zero.distributed.collective_log import in_words
from hf_zero.distributed.state_rows import RankState
from hf_zero.logging import JsonObject

StatusPost = JsonObject
REMEDY = (
    "Every rank must run the same forwards, backwards, steps, evaluations, loads and "
    "saves in the same order"
)
# states of a rank that end all other ranks that wait
OVER = (RankState.FAILED, RankState.BROKEN)


class HangDiagnosis(NamedTuple):
    """The reason why a wait cannot end; ``cause`` is published to the other ranks."""

    text: str
    cause: str


def diagnose_hang(
    rank: int,
    own_post: StatusPost,
    posts: Mapping[int, StatusPost],
    stuck_in: Sequence[str] = (RankState.WAITS,),
) -> HangDiagnosis | None:
    """Return what ``posts`` prove about the wait in ``own_post``, the post of ``rank``, or None if
    they prove nothing (see the note).

    ``stuck_in``: states in which a host is taken to issue nothing before its wait is over.
    """
    over = {r: post for r, post in posts.items() if post["state"] in (*OVER, RankState.UNREACHABLE)}
    log, number, what, _ = own_post.get("wait", ("", 0, "the others", ()))
    if over:
        position = f" (number {number} of {log})" if log else ""
        return _in_vain(f"rank {rank} waits for {what}{position}", over)
    if not log:
        return None
    return (
        _different_collectives(rank, own_post, posts)
        or _never_joins(rank, own_post, posts)
        or _stuck(rank, own_post, posts, stuck_in)
    )


def _different_collectives(
    rank: int, own_post: StatusPost, posts: Mapping[int, StatusPost]
) -> HangDiagnosis | None:
    """Diagnose another rank that has issued another collective under the same number."""
    log, number, _, _ = own_post["wait"]
    issued = _issued_as(own_post, log, number)
    for peer, post in posts.items():
        other = _issued_as(post, log, number)
        if issued is not None and other is not None and other != issued:
            return _same(
                f"rank {rank} is at {in_words(issued)}, rank {peer} at {in_words(other)} (both "
                f"number {number} of {log}). {REMEDY}"
            )
    return None


def _never_joins(
    rank: int, own_post: StatusPost, posts: Mapping[int, StatusPost]
) -> HangDiagnosis | None:
    """Diagnose a needed rank that has ended or closed the communicator before the collective."""
    log, number, what, required = own_post["wait"]
    for peer in required:
        if peer == rank or peer not in posts or num_issued(posts[peer], log) > number:
            continue
        post = posts[peer]
        # If this rank has closed it, too, the rest of the shards is being gathered: all ranks that
        # destroyed the engine will come.
        end_reason = "" if own_post["logs"][log][2] else post["logs"].get(log, (0, [], ""))[2]
        if post["state"] == RankState.DEAD:
            position = f"(number {number} of {log})"
            return _in_vain(f"rank {rank} waits for {what} {position}", {peer: post})
        if post["state"] == RankState.ENDED or end_reason:
            how = end_reason or f"ended ({post['why']})"
            return _same(
                f"rank {rank} waits for {what} (number {number} of {log}), which rank {peer} will "
                f"never join: it has {how}. {REMEDY}, and the same number of them"
            )
    return None


def _stuck(
    rank: int, own_post: StatusPost, posts: Mapping[int, StatusPost], stuck_in: Sequence[str]
) -> HangDiagnosis | None:
    """Diagnose a needed rank that waits, directly or through others, for this one."""
    log, number, what, required = own_post["wait"]
    stuck, newly_stuck = {rank: own_post}, {rank: own_post}
    while newly_stuck:  # ranks that were found in the last round
        newly_stuck = {
            peer: post
            for peer, post in posts.items()
            if peer not in stuck and post["state"] in stuck_in and _lacks(post, newly_stuck, peer)
        }
        stuck.update(newly_stuck)
    for peer in required:
        if peer != rank and peer in stuck and num_issued(stuck[peer], log) <= number:
            log_there, at, instead, _ = stuck[peer]["wait"]
            waits = (
                f"rank {rank} waits for {what} (number {number} of {log}), which rank {peer} has "
                "not issued"
            )
            # the other rank names its own collective beside this cause
            return HangDiagnosis(
                f"{waits}: it waits for {instead} (number {at} of {log_there}). {REMEDY}",
                f"{waits}. {REMEDY}",
            )
    return None


def _in_vain(waits: str, posts: Mapping[int, StatusPost]) -> HangDiagnosis:
    cause = end_of(posts) or ""
    return HangDiagnosis(f"{waits}, a wait that cannot end: {cause}", cause)


def _same(text: str) -> HangDiagnosis:
    return HangDiagnosis(text, text)


def _lacks(post: StatusPost, stuck: Mapping[int, StatusPost], rank: int) -> bool:
    """Return whether the wait of ``rank`` requires one of ``stuck`` that has yet to issue it."""
    log, number, _, required = post["wait"]
    return any(
        peer != rank and num_issued(other, log) <= number and peer in required
        for peer, other in stuck.items()
    )


def end_of(posts: Mapping[int, StatusPost]) -> str | None:
    """Return the worst end of another rank, in words; None if there is none."""
    unreachable = (
        str(post["why"]) for post in posts.values() if post["state"] == RankState.UNREACHABLE
    )
    for why in unreachable:
        return why
    dead = [rank for rank, post in posts.items() if post["state"] == RankState.DEAD]
    if dead:
        names = ", ".join(map(str, dead))
        return (
            f"rank{'s' * (len(dead) > 1)} {names} exited without reporting why (killed, out of "
            "memory, crashed in native code, or ended by os._exit)"
        )
    for state in (*OVER, RankState.ENDED):
        for rank, post in posts.items():
            if post["state"] == state == RankState.FAILED:
                return f"rank {rank} has failed: {post['why']}"
            if post["state"] == state == RankState.BROKEN:
                if post["why"].startswith("rank"):
                    return str(post["why"])
                return f"rank {rank} gave up: {post['why']}"
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


def num_issued(post: StatusPost, log: str) -> int:
    """Return the number of collectives of ``log`` that the rank of ``post`` has issued."""
    return int(post["logs"].get(log, (0, [], ""))[0])
