"""Ranks that wait for each other in a circle, over their hosts and their streams, are told apart
from ranks that are slow.

A thread in each process looks whether anything goes on. Where nothing has for a while, it writes
down what each of its threads and streams waits for, where the other ranks of its communicators can
read it, and reads theirs. What waits in a circle never ends: that is a report, and every wait of
the job raises.

    thread of a rank -> a stream      it is in a synchronisation
    stream           -> a stream      it waits for an event
    stream           -> a thread      its collective waits for a rank that has not issued it: for
                                      the thread that issues on that communicator, if it waits
    stream           -> a stream      its collective waits for a rank that has issued it, behind
                                      other work

What a rank has written down may be long over where the machine leaves its threads no time. So a
circle counts once all of its ranks have looked twice since it was first seen, and stood still.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any

QUIET = 1.0  # seconds without anything going on
LOOK = 0.2
LOOKS = 2  # of each rank, after a circle was seen

Status = dict[str, Any]
Edge = tuple[str, str, str]  # who waits, for whom, because of what


def status_of(
    rank: int, waits: Mapping[str, Any], communicators: Iterable[Mapping[str, Any]], looks: int = 0
) -> Status:
    """The waits and collectives of a process, for JSON; ``looks`` counts its watch's checks."""
    ends = {}
    for each in communicators:
        outstanding, missing = list(each["outstanding"])[:8], list(each["missing"].items())[:8]
        ends[str(each["index"])] = {
            **{name: each[name] for name in ("name", "rank", "issued")},
            "issuers": list(each["issuers"]),
            "outstanding": {str(number): [stream, what] for number, stream, what in outstanding},
            "missing": {str(number): list(ranks) for number, ranks in missing},
        }
    hosts, streams = ([list(each) for each in waits[kind]] for kind in ("hosts", "streams"))
    stands = {"moved": waits["moved"], "hosts": hosts, "streams": streams}
    return {"rank": rank, "looks": looks, **stands, "communicators": ends}


def edges(statuses: Mapping[int, Status], members: Mapping[str, Mapping[int, int]]) -> list[Edge]:
    """Return the waits between threads, streams and ranks as edges.

    ``members`` has, by name of a communicator, the process of each of its ranks.
    """
    found: list[Edge] = []
    for rank, status in statuses.items():
        for issuer, thread, site, stream, number in status["hosts"]:
            why = f"{thread} synchronises with task #{number} [{site}]"
            found.append((_thread(rank, issuer), _stream(rank, stream), why))
        for stream, other, number, communicator, collective in status["streams"]:
            end = status["communicators"].get(str(communicator))
            if other >= 0:
                why = f"waits for its task #{number}"
                found.append((_stream(rank, stream), _stream(rank, other), why))
            elif end is not None:
                of = members.get(end["name"], {})
                found += _collective_edges(rank, stream, collective, end, statuses, of)
    return found


def _collective_edges(
    rank: int,
    stream: int,
    collective: int,
    end: Mapping[str, Any],
    statuses: Mapping[int, Status],
    members: Mapping[int, int],
) -> list[Edge]:
    what = end["outstanding"].get(str(collective), [stream, "?"])[1]
    why = f"{end['name']} #{collective} {what}"
    found = []
    for absent in end["missing"].get(str(collective), ()):
        process = members.get(absent)
        theirs = statuses.get(process) if process is not None else None
        if process is None or theirs is None:
            continue
        ends = [each for each in theirs["communicators"].values() if each["name"] == end["name"]]
        far = ends[0] if ends else None
        if far is None or far["issued"] < collective:
            issuer = _issuer(theirs, far)
            if issuer is not None:
                there = _thread(process, issuer)
                missing = f"{why}: rank {process} has not issued it"
                found.append((_stream(rank, stream), there, missing))
        elif str(collective) in far["outstanding"]:
            queued = far["outstanding"][str(collective)][0]
            if (process, queued) != (rank, stream):
                behind = f"{why}: rank {process} has issued it behind other work"
                found.append((_stream(rank, stream), _stream(process, queued), behind))
    return found


def _issuer(status: Status, end: Mapping[str, Any] | None) -> int | None:
    """The thread that is to issue on ``end``: the last that has, or that has on any communicator;
    None where one of those that have waits for nothing, and may be about to.
    """
    known = [] if end is None else end["issuers"]
    if not known:
        known = [one for each in status["communicators"].values() for one in each["issuers"]]
    waiting = {issuer for issuer, *_ in status["hosts"]}
    if not known:
        return next(iter(waiting), None)
    return known[-1] if waiting.issuperset(known) else None


def circle(found: Iterable[Edge]) -> list[Edge]:
    """Edges that lead back to where they begin; none if there are no such."""
    by_start: dict[str, list[Edge]] = {}
    for edge in found:
        by_start.setdefault(edge[0], []).append(edge)
    done: set[str] = set()
    for start in by_start:
        path: list[Edge] = []
        if (closed := _walk(start, by_start, path, [], done)) is not None:
            return closed
    return []


def _walk(
    node: str, by_start: dict[str, list[Edge]], path: list[Edge], nodes: list[str], done: set[str]
) -> list[Edge] | None:
    if node in nodes:
        return path[nodes.index(node) :]
    if node in done:
        return None
    for edge in by_start.get(node, ()):
        closed = _walk(edge[1], by_start, [*path, edge], [*nodes, node], done)
        if closed is not None:
            return closed
    done.add(node)
    return None


def describe(closed: Iterable[Edge]) -> str:
    return "the ranks wait for each other in a circle:\n" + "\n".join(
        f"  {start} -> {end}: {why}" for start, end, why in closed
    )


def _thread(rank: int, issuer: int) -> str:
    return f"thread {issuer} of rank {rank}"


def _stream(rank: int, stream: int) -> str:
    return f"stream {stream} of rank {rank}"


class Watch(threading.Thread):
    """Looks in the background: ``module`` is the device's, ``rank`` that of the job."""

    def __init__(self, module: Any, rank: int):
        super().__init__(name="late-deadlocks", daemon=True)
        self.module, self.rank = module, rank
        self._moved, self._since, self._looks = -1, time.monotonic(), 0
        self._seen: tuple[str, dict[int, int]] = ("", {})  # a circle, and each rank's looks then
        # communicators that a circle has ended, here or as another rank says
        self._ended: set[int] = set()
        self._published = False

    def run(self) -> None:
        while True:
            time.sleep(LOOK)
            self._look()

    def _look(self) -> None:
        waits, now = self.module.waits(), time.monotonic()
        for end in self.module.communicators():
            if end["index"] not in self._ended and (why := self.module.given_up(end["index"])):
                self._end(why)
        if waits["moved"] != self._moved or not (waits["hosts"] or waits["streams"]):
            self._moved, self._since = waits["moved"], now
            if self._published:
                self._publish("")
            self._seen = "", {}
            return
        if now - self._since < QUIET:
            return
        ends = self.module.communicators()
        self._looks += 1
        mine = status_of(self.rank, waits, ends, self._looks)
        self._publish(json.dumps(mine))
        statuses, members = {self.rank: mine}, {}
        for end in ends:
            members[end["name"]] = {end["rank"]: self.rank}
            for other in range(end["ranks"]):
                text = self.module.status(end["index"], other)
                if other != end["rank"] and text:
                    theirs = json.loads(text)
                    statuses[theirs["rank"]] = theirs
                    members[end["name"]][other] = theirs["rank"]
        text = describe(closed) if (closed := circle(edges(statuses, members))) else ""
        looks = {rank: status["looks"] for rank, status in statuses.items()}
        before, since = self._seen
        if text != before or any(looks[rank] < since.get(rank, 0) for rank in looks):
            self._seen = text, looks
        elif text and all(looks.get(rank, 0) >= since[rank] + LOOKS for rank in since):
            self._report(text, ends)

    def _publish(self, text: str) -> None:
        self._published = bool(text)
        for end in self.module.communicators():
            self.module.put_status(end["index"], text)

    def _report(self, text: str, ends: Iterable[Mapping[str, Any]]) -> None:
        for end in ends:
            self.module.give_up(end["index"], text)
        self._end(text)

    def _end(self, text: str) -> None:
        self._ended |= {end["index"] for end in self.module.communicators()}
        self.module.tell("deadlock", text)
        self.module.end_waits(text)
