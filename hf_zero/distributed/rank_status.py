"""Posts of a rank in the store while it waits and when it ends, and the digest of all posts.
The conclusions from posts are in hang_proofs.py.

[Note: the digest]
Each rank posts under a key of its own and counts its post in "version". Reading all posts on all
ranks would cost the store the square of their number, so one rank, the "leader", reads them by one
request and writes the "digest", in which ranks with equal posts share one. A poll
(:meth:`RankStatus._poll`) is one request, which tells whether there is a newer digest. A rank that
polls takes the lead if there is no leader, or if the digest has stayed old for
:data:`PATIENT_POLLS` polls: the leader has left its wait, or has died. Ranks that have failed,
given up or died need no leader: they are in the list "ends", which each poll reads. A rank on the
same host sees a process die, and the heartbeats between hosts see one exit; a rank that sees it
reads the last post of the ended rank itself, and adds it to the list.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_zero.distributed.collective_log import CollectiveLog, PendingCollective, in_words
from hf_zero.distributed.hang_detection import RankStatus
from hf_zero.distributed.hang_proofs import (
    OVER,
    REMEDY,
    HangDiagnosis,
    StatusPost,
    diagnose_hang,
    end_of,
    num_issued,
)
from hf_zero.distributed.host_heartbeats import HostHeartbeats
from hf_zero.distributed.state_rows import ENDS, RankState, rank_states
from hf_zero.distributed.store import StoreSilent
from hf_zero.errors import PartitionError, RankMismatchError
from hf_zero.logging import JsonObject, first_line

PATIENCE_SECONDS = 5.0  # wait for the post of a rank whose connection was lost
# wait of a failing rank until the others have read its post, and of them until it has ended
WAIT_FOR_PEERS_SECONDS = 4.0
POLL_SECONDS, LAST_POLL_SECONDS = 0.05, 1.0  # between polls for the cause of a failure
PATIENT_POLLS = 2
POLLED = ["version", "digested", "leader", "ends", "resumes"]


class PostedStatus(RankStatus):
    """One rank's entry in ``store``, and its view of the entries of the others.

    ``store_host``: the rank that hosts the store; None: the launcher does.
    """

    def __init__(self, store: Any, rank: int, world: int, store_host: int | None = None):
        super().__init__(rank, world)
        self._store, self.store_host = store, store_host
        self.logs: dict[str, CollectiveLog] = {}
        self._left = set[str]()  # names of communicators that all ranks have left
        self._state: str = RankState.HERE
        self._posts: dict[int, StatusPost] = {}  # of the last digest
        self._ends: dict[int, tuple[str, str]] = {}  # state and reason
        self._last_posts: dict[int, StatusPost] = {}  # of ranks on this host that have died
        self._identities: dict[int, str] = {}
        self._neighbors: list[int] = []  # other ranks on this host
        # version of the last digest that was read, its maker, and polls since that found no newer
        self._digested, self._leader, self._old_polls = 0, "", 0
        self._opened = False
        self.heartbeats: HostHeartbeats | None = None  # between hosts, if there are several
        self.statements = 0  # of ranks that go on after an exception (recovery.py)
        self._diagnosed: tuple[object, HangDiagnosis | None] = (None, None)
        self._gone = False  # the store is gone: torch prints a stack for every failing call
        self._silent = False  # whether it has left the last poll without an answer
        self._lock, self._posting = threading.RLock(), threading.RLock()
        self._process = os.getpid()
        self.identity = _identity(self._process)
        self._newest = json.dumps(self.post(None))
        self._ask("set", str(rank), self._newest)
        self._ask("append", "who", json.dumps([rank, self.identity]) + "\n")

    def register(self, log: CollectiveLog) -> CollectiveLog:
        """Register the log of a communicator under its name, by which other ranks find it.

        Raises PartitionError if another communicator in use has that name.
        """
        before = self.logs.get(log.name)
        if before not in (None, log) and before.has_communicator and not before.end_reason:
            raise PartitionError(
                f"two communicators in use are named {log.name!r}: what one has issued would prove "
                "to other ranks that the other hangs; close the first, or give the second another "
                "name"
            )
        self.logs[log.name] = log
        self._left.discard(log.name)
        return log

    def unregister(self, logs: Sequence[CollectiveLog]) -> None:
        """Remove the logs of communicators that no rank will use again."""
        for log in logs:
            if self.logs.get(log.name) is log:
                del self.logs[log.name]
                self._left.add(log.name)

    def watch_hosts(self, heartbeats: HostHeartbeats) -> None:
        """Count the ranks of hosts that ``heartbeats`` finds unreachable as ended. A store that
        does not answer is gone once the host of rank 0, which has the store, is unreachable, or
        after the time for which the process of the store may be stopped.
        """
        self.heartbeats = heartbeats
        self._store.wait_for_host(heartbeats.timeout, lambda: 0 in heartbeats.unreachable())

    def publish(self, state: str, why: str = "", pending: PendingCollective | None = None) -> None:
        """Post the state of this rank. A failed or broken rank stays so."""
        # The training's thread and the watchdog's post; neither waits for the other's calls.
        with self._posting:
            if self._state in OVER and state not in OVER:
                return
            self._state = state
            self._newest = json.dumps(self.post(pending, why))
        if state in OVER:
            self._ask("append", "ends", json.dumps([self.rank, state, why]) + "\n")
        written = None
        while written is not self._newest:  # the other thread's may be newer: it is written last
            written = self._newest
            self._set(str(self.rank), written)

    def post_logs(self) -> None:
        """Post the logs of this rank, which waits for nothing."""
        self.publish(RankState.HERE)

    def _set(self, key: str, value: str) -> None:
        self._ask("set", key, value)
        self._ask("add", "version", 1)

    def _ask(self, call: str, *args: object) -> object:
        """Return the answer of the store to ``call``; None once it is gone."""
        try:
            return None if self._gone else getattr(self._store, call)(*args)
        except StoreSilent:
            return None  # it is read once the store answers
        except RuntimeError:
            self._gone = True  # no rank can read
            return None

    def post(self, pending: PendingCollective | None, why: str = "") -> StatusPost:
        logs = {
            name: [log.num_issued, list(log.recent), log.end_reason]
            for name, log in list(self.logs.items())
        }
        post: StatusPost = {"state": self._state, "why": why, "logs": logs}
        if pending is not None and pending.log is not None:
            what = in_words(pending.what)
            post["wait"] = [pending.log.name, pending.number, what, list(pending.required)]
        return post

    def read(self) -> dict[int, StatusPost] | None:
        """Return what is known of the other ranks; None if the store is gone."""
        with self._lock:
            try:
                if not self._gone:
                    self._poll()
                    self._silent = False
            except StoreSilent:
                self._silent = True
            except RuntimeError:
                self._gone = True
            return None if self._gone and not self._unreachable() else self._known()

    def _known(self) -> dict[int, StatusPost]:
        posts = {rank: post for rank, post in self._posts.items() if rank != self.rank}
        for rank, post in posts.items():
            if post.get("wait", ("",))[0] in self._left:
                posts[rank] = {**post, "state": RankState.HERE}
        for rank, (state, why) in self._ends.items():
            if rank != self.rank:
                logs = posts.get(rank, {}).get("logs", {})
                posts[rank] = {"state": state, "why": why, "logs": logs}
        return {**posts, **self._last_posts, **self._unreachable()}

    def _unreachable(self) -> dict[int, StatusPost]:
        """Return the posts of ranks on unreachable hosts."""
        ranks = self.heartbeats.unreachable() if self.heartbeats is not None else []
        why = self.heartbeats.cause() if self.heartbeats is not None and ranks else ""
        post = {"state": RankState.UNREACHABLE, "why": why, "logs": {}}
        return {rank: post for rank in ranks if rank != self.rank}

    def _poll(self) -> None:
        """Bring what is known of the other ranks up to date (see the note)."""
        store = self._store
        if not self._opened:
            for key in ("leader", "ends"):
                store.append(key, "")
            for key in ("version", "digested", "resumes"):
                store.add(key, 0)
            self._opened = True
        answers = [answer.decode() for answer in store.multi_get(POLLED)]
        version, digested, self.statements = (int(answers[at]) for at in (0, 1, 4))
        leader, ends = answers[2:4]
        for line in ends.splitlines()[len(self._ends) :]:
            rank, state, why = json.loads(line)
            self._ends.setdefault(rank, (state, why))
        if digested != self._digested:
            head, _, packed = store.get("digest").partition(b"\n")
            # Not if it is older: a leader that was held up has overwritten the digest of the next
            # leader. Then this rank goes on counting old polls, and takes the lead.
            if int(head) > self._digested:
                self._old_polls = 0
                groups = json.loads(zlib.decompress(packed))
                self._posts = {rank: post for ranks, post in groups for rank in ranks}
                self._digested = int(head)
        if self._digested < version and self._leads(leader):
            self._digest(version)
        self._find_dead()

    def _leads(self, leader: str) -> bool:
        """Return whether this rank makes the next digest; it takes the lead if it must."""
        name = str(self.rank)
        if leader != self._leader:
            self._leader, self._old_polls = leader, 0
        self._old_polls += 1
        if leader == name:
            return True
        if leader and self._old_polls <= PATIENT_POLLS and int(leader) not in self._ends:
            return False
        return bool(self._store.compare_set("leader", leader, name).decode() == name)

    def _digest(self, version: int) -> None:
        """Write the digest of all posts, the first ``version`` at least."""
        self._learn_identities(range(self.world))
        ranks = list(self._identities)
        alike: dict[bytes, list[int]] = {}
        for rank, post in zip(ranks, self._store.multi_get([str(rank) for rank in ranks])):
            alike.setdefault(post, []).append(rank)
        groups = [(ranks, json.loads(post)) for post, ranks in alike.items()]
        self._posts = {rank: post for ranks, post in groups for rank in ranks}
        text = b"%d\n" % version + zlib.compress(json.dumps(groups).encode())
        self._store.set("digest", text)
        self._store.set("digested", str(version))
        self._digested, self._old_polls = version, 0

    def _learn_identities(self, ranks: Iterable[int]) -> None:
        if any(rank not in self._identities for rank in ranks) and self._store.check(["who"]):
            lines = self._store.get("who").decode().splitlines()
            self._set_identities(dict(map(json.loads, lines)))

    def _set_identities(self, identities: dict[int, str]) -> None:
        host = self.identity.split()[0]
        self._identities = identities
        self._neighbors = [
            rank
            for rank, identity in identities.items()
            if rank != self.rank and identity.split()[0] == host != "?"
        ]

    def know(self, identities: Sequence[str]) -> None:
        """Take the hosts and processes of all ranks from an exchange, not from the store."""
        with self._lock:
            self._set_identities(dict(enumerate(identities)))

    def learn_identity(self, rank: int) -> bool:
        """Read the host and process of ``rank``; return False if it has not published them."""
        try:
            if not self._gone:
                self._learn_identities([rank])
        except StoreSilent:
            pass
        except RuntimeError:
            self._gone = True
        return rank in self._identities

    def _dead(self, rank: int) -> bool:
        """Return whether the process of ``rank`` is known to be dead: it ran on this host, or the
        heartbeats between hosts have found its exit.
        """
        if self.heartbeats is not None and rank in self.heartbeats.exited():
            return True
        if not self.learn_identity(rank) or rank not in self._neighbors:
            return False
        _, process, started = self._identities[rank].split()
        return _identity(int(process)).split()[2] != started

    def _find_dead(self) -> None:
        """Read the last posts of ranks whose processes are known to be dead, and tell the others of
        those that say nothing of an end.
        """
        self._learn_identities([self.rank, *self._posts])
        exited = self.heartbeats.exited() if self.heartbeats is not None else ()
        for rank in (*self._neighbors, *exited):
            if rank in self._last_posts or not self._dead(rank):
                continue
            post = json.loads(self._store.get(str(rank)))
            if post["state"] not in (*OVER, RankState.ENDED):
                post = {**post, "state": RankState.DEAD, "why": ""}
                if rank not in self._ends:
                    self._store.append("ends", json.dumps([rank, RankState.DEAD, ""]) + "\n")
            self._last_posts[rank] = post

    def states(self, pending: PendingCollective | None) -> list[JsonObject]:
        """Return the states of all ranks at the last poll, while this one waits for ``pending``."""
        with self._lock:
            posts = self._known()
        post = json.loads(self._newest) if self._state in OVER else self.post(pending)
        return rank_states({**posts, self.rank: post}, self.world, pending)

    @property
    def all_live(self) -> bool:  # type: ignore[override]
        """Return whether no rank is known to have failed, given up or died."""
        return not self._ends

    def diagnose(
        self, pending: PendingCollective, stuck_in: Sequence[str] = (RankState.WAITS,)
    ) -> HangDiagnosis | None:
        """Return the proof that ``pending`` will never end; None if there is none.

        ``stuck_in`` as for :func:`diagnose_hang`.
        """
        log = pending.log
        posts = self.read()
        if posts is None:
            # The backend may report a dead peer itself, and messages in flight may still arrive.
            if log is not None and not log.reports_dead_peers:
                return HangDiagnosis(self._without_store(), self._without_store())
            return None
        reports_dead_peers = log is None or log.reports_dead_peers
        if reports_dead_peers:
            posts = {rank: post for rank, post in posts.items() if post["state"] != RankState.DEAD}
        own_post = self.post(pending)
        away = sum(post["state"] == RankState.UNREACHABLE for post in posts.values())
        counts = self._digested, len(self._ends), len(self._last_posts)
        key = (own_post, *counts, away, stuck_in, reports_dead_peers)
        if self._diagnosed[0] != key:
            self._diagnosed = (key, diagnose_hang(self.rank, own_post, posts, stuck_in))
        return self._diagnosed[1]

    def elsewhere(self, ranks: Sequence[int]) -> list[int]:
        """Return those of ``ranks`` that cannot arrive before this rank goes on: they have ended,
        wait in a collective that this rank has not issued, or in a collective of their script.
        """
        posts = self.read()
        if posts is None:
            return list(ranks)
        return [
            rank for rank in ranks if self._is_elsewhere(posts.get(rank, {"state": RankState.HERE}))
        ]

    def _is_elsewhere(self, post: StatusPost) -> bool:
        if post["state"] in (*ENDS, RankState.SCRIPT):
            return True
        log, number, _, required = post.get("wait", ("", 0, "", ()))
        log_here = self.logs.get(log)
        return log_here is not None and self.rank in required and log_here.num_issued <= number

    def missing_ranks(self, pending: PendingCollective) -> list[int]:
        """Return the ranks that ``pending`` needs and that are not known to have issued it; a rank
        that waits in it has posted that.
        """
        posts, log = self._posts, pending.log
        return [
            rank
            for rank in pending.required
            if rank != self.rank
            and log is not None
            and (rank not in posts or num_issued(posts[rank], log.name) <= pending.number)
        ]

    def _without_store(self) -> str:
        if self.store_host is None or self.store_host == self.rank:
            return "the launcher, which hosts the ranks' store, is gone or cannot be reached"
        how = "died or ended" if self._dead(self.store_host) else "cannot be reached"
        return (
            f"rank {self.store_host}, which hosts the ranks' store, {how}; its own output says "
            f"why, if it could speak. Where its script was over before: {REMEDY}, and the same "
            "number of them"
        )

    def exit_reasons(self, ranks: Sequence[int]) -> dict[int, str]:
        """Return why no thread of some of ``ranks`` will say anything more: they have died, or
        their interpreters have ended. Others may.
        """
        posts = self.read()
        if posts is None:
            return dict.fromkeys(ranks, self._without_store())
        over = {
            rank: post
            for rank, post in posts.items()
            if rank in ranks and post["state"] in ENDS and post["state"] != RankState.BROKEN
        }
        return {rank: str(end_of({rank: post})) for rank, post in over.items()}

    def failure_cause(self, patience: float = PATIENCE_SECONDS) -> str | None:
        """Return why a connection was lost: the rank that has failed, died or ended.

        None if no such rank is known within ``patience`` seconds.
        """
        limit = time.monotonic() + patience
        for pause in poll_pauses():
            posts = self.read()
            text = end_of(self._known() if posts is None else posts)
            if text is not None:
                return text
            if posts is None:
                return self._without_store()
            if time.monotonic() >= limit:
                return self._without_store() if self._silent else None
            time.sleep(pause)
        raise AssertionError("pauses are endless")

    def publish_exit(self) -> str | None:
        """Post the end of the interpreter.

        Returns the cause of an end that other ranks have caused; else None.
        """
        if os.getpid() != self._process:
            return None  # a forked child that inherited this object
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        failed_rank = getattr(error, "failed_rank", None)
        if error is not None and failed_rank is not None:
            self.publish(RankState.BROKEN, first_line(error))
        # a launcher reports the first rank that ends as the reason
        if self._state == RankState.BROKEN:
            self._wait_for_peers(
                lambda posts: all(
                    self._dead(rank)
                    for rank, post in posts.items()
                    if post["state"] == RankState.FAILED or rank == failed_rank
                )
            )
        if self._state in OVER:
            return None
        cause = None
        if (
            error is not None
            and "Connection" in str(error)
            and not isinstance(error, RankMismatchError)
        ):
            cause = self.failure_cause()  # lost in a collective outside hf-zero
        if cause is not None:
            self.publish(RankState.BROKEN, cause)
        elif error is not None:
            self.publish(RankState.FAILED, first_line(error))
            # The launcher ends the other ranks when this one ends: let them read the post first.
            self._wait_for_peers(
                lambda posts: all(
                    posts.get(rank, {}).get("state") in ENDS
                    for rank in range(self.world)
                    if rank != self.rank
                )
            )
        elif (
            self.store_host is None
            or self.store_host == self.rank
            or not self._dead(self.store_host)
        ):
            self.publish(
                RankState.ENDED,
                f"after {self.last_error}"
                if self.last_error
                else "its script has finished, or its own output says why",
            )
        return cause

    def _wait_for_peers(self, enough: Callable[[Mapping[int, StatusPost]], bool]) -> None:
        limit = time.monotonic() + WAIT_FOR_PEERS_SECONDS
        for pause in poll_pauses():
            posts = self.read()
            if posts is None or enough(posts) or time.monotonic() > limit:
                return
            time.sleep(pause)


def poll_pauses() -> Iterator[float]:
    """Yield the seconds between polls of a rank that must answer soon: many may poll at once."""
    pause = POLL_SECONDS
    while True:
        yield pause
        pause = min(1.5 * pause, LAST_POLL_SECONDS)


def _identity(process: int) -> str:
    """Return the host (with its process name space), the process and its start time; "gone" if no
    such process runs.
    """
    try:
        host = Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink(
            "/proc/self/ns/pid"
        )
    except OSError:
        return f"? {process} ?"  # not available on this system: proves nothing
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return f"{host} {process} gone"
    return f"{host} {process} {'gone' if fields[0] in 'ZX' else fields[19]}"
