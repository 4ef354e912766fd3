"""Recovery after a pass that broke: a rank compares its issued collectives with the others before
it issues another one.

[Note: after an exception]
The k-th collective of a rank on a communicator matches the k-th of the others, whatever they are.
If an exception has broken a forward or backward of a rank and its script goes on, the collectives
of its next pass must not match those that the others still issue for the broken one, of which it
may have issued none. It knows that its pass broke, they do not. So before it begins the next pass,
or issues anything else, it states its sequence numbers and its next pass or collective in the
store, and waits. A thread of every other rank finds the statement
(:meth:`RecoveryBoard.answer_statements`, while its rank waits) and answers as soon as its own rank
has come as far: yes, if that rank has begun the same pass at the same numbers, or has issued the
same collective and as much as the other in the pass that broke; else the reason why not, which ends
both. While nothing breaks, a pass costs one entry in a list. An engine that ends takes its broken
pass with it: no rank could answer for it any more. Two ranks compare the communicators that both
are in: messages of a pipeline are between two ranks.
"""

from __future__ import annotations

import itertools
import json
import time
import weakref
from collections.abc import Callable, Mapping, Sequence

from hf_zero.distributed.collective_log import CollectiveLog, PendingCollective
from hf_zero.distributed.pass_tracker import PassTracker, TrackedPass
from hf_zero.distributed.store import TimeoutStore, next_pause, read_entries
from hf_zero.distributed.watchdog import PollingWatchdog
from hf_zero.errors import HfZeroError, RankMismatchError
from hf_zero.logging import JsonObject

REMEDY = (
    "After an exception every rank must go on alike: catch it on all of them at the same "
    "place, or let the job end"
)
Numbers = dict[str, int]


class RecoverablePasses(PassTracker):
    """The passes of one engine, whose ranks compare themselves after a broken one."""

    _watchdog: PollingWatchdog

    def __init__(
        self,
        name: str,
        rank: int,
        ranks: Sequence[int],
        logs: Mapping[str, CollectiveLog],
        watchdog: PollingWatchdog,
        timeout: float,
        board: RecoveryBoard | None = None,
    ):
        """``logs``: the communicators, by purpose; ``board``: the recovery board of this rank, None
        if ranks share no store.
        """
        super().__init__(logs, watchdog, shared=board is not None)
        self.name = name
        self._rank, self._ranks, self._timeout = rank, tuple(ranks), timeout
        self._serials = itertools.count()
        self._board = board
        if board is not None:
            board.add(self)

    def resume(self, kind: str, first: Sequence[object] | None, what: str) -> None:
        board, broken = self._board, self._broken
        assert board is not None and broken is not None
        for log in self._logs.values():
            log.hold_back(None)
        self._broken = None
        post = {"kind": kind, "first": first, "what": what, "broken": self._described(broken)}
        statement = {
            "serial": next(self._serials),
            "at": self.numbers(),
            "last": self.last(),
            **post,
        }
        peers = [rank for rank in self._ranks if rank != self._rank]
        pending = PendingCollective(
            "all ranks to come to where this one goes on after an exception", required=tuple(peers)
        )
        try:
            # shows ranks that wait for it which collectives the exception has left
            self._watchdog.rank_status.post_logs()
            board.state(self.name, self._rank, statement)
            with self._watchdog.watching(pending):
                self._await_answers(peers, statement)
        except RuntimeError as error:
            if isinstance(error, HfZeroError):
                raise
            raise self._watchdog.conclude_failure(pending, error) from error  # the store is gone
        board.stated.pop(self.name, None)

    def _await_answers(self, peers: Sequence[int], statement: JsonObject) -> None:
        board, rank_status = self._board, self._watchdog.rank_status
        assert board is not None
        begun = time.monotonic()
        while True:
            answers = board.answers(self.name, self._rank, statement["serial"])
            missing = [peer for peer in peers if peer not in answers]
            text = next(filter(None, answers.values()), None)
            if text is None and not missing:
                return
            if text is None:  # else it says more than a verdict that came from the same rank
                self._watchdog.check()
            waited = time.monotonic() - begun
            gone = rank_status.exit_reasons(missing) if text is None else {}
            if text is None and not gone and waited >= self._timeout:
                late = missing[0]
                gone = {late: f"rank {late} has not come there within {self._timeout:g} s"}
            if text is not None or gone:
                text = (
                    text
                    or f"rank {self._rank} cannot go on after an exception, having issued "
                    f"{statement['last']}: {next(iter(gone.values()))}. {REMEDY}"
                )
                self._watchdog.end(text)
                raise RankMismatchError(text)
            self._watchdog.sleep(next_pause(waited, len(peers)))

    def _described(self, one: TrackedPass) -> tuple[str, Numbers, Numbers]:
        began, ended = (dict(zip(self._logs, at)) for at in (one.began, one.ended or ()))
        return str(one), began, ended

    def numbers(self) -> Numbers:
        return {role: log.num_issued for role, log in self._logs.items()}

    def last(self) -> str:
        """Return the last collective on each communicator that has had one, in words."""
        collectives = [
            f"{log.recent[-1]} (number {log.num_issued - 1} of {role})"
            for role, log in self._logs.items()
            if log.recent
        ]
        return "; ".join(collectives) or "nothing"

    def answer_to(self, peer: int, statement: JsonObject) -> str | None:
        """Return this rank's answer to ``statement`` of ``peer``: "" is yes; None: unknown yet."""
        shared = self._logs.keys() & statement["at"].keys()

        def of_both(numbers: Numbers) -> Numbers:
            return {role: number for role, number in numbers.items() if role in shared}

        # read before the passes: a pass is recorded before its first collective
        at, theirs = of_both(self.numbers()), of_both(statement["at"])
        ours = self._board.stated.get(self.name) if self._board is not None else None
        passes = [
            (kind, of_both(began), of_both(ended))
            for kind, began, ended in map(self._described, list(self._passes))
        ]
        together = ours is not None and of_both(ours["at"]) == theirs
        alike = ours is not None and all(ours[key] == statement[key] for key in ("kind", "first"))
        if together and alike:
            same = True  # this rank's pass broke as well, and it awaits the other's answer
        elif statement["first"] is not None:
            role, number, what = statement["first"]
            log = self._logs[role]
            index = number - (log.num_issued - len(log.recent))
            same = 0 <= index < len(log.recent) and log.recent[index] == what
            kind, began, ended = statement["broken"]
            same = same and (kind, of_both(began), of_both(ended)) in passes
        else:
            same = (statement["kind"], theirs) in [(kind, began) for kind, began, _ in passes]
        if same:
            return ""
        # this rank may still reach the same place
        if not (together and not alike) and all(at[role] <= theirs[role] for role in at):
            return None
        # its training thread has issued more meanwhile, so that these reads do not fit together
        if of_both(self.numbers()) != at:
            return None
        return (
            f"rank {peer} goes on with another {statement['what']} after an exception, having "
            f"issued {statement['last']}, but rank {self._rank} has issued {self.last()}. {REMEDY}"
        )


class RecoveryBoard:
    """Statements in ``store`` by ranks that go on after a broken pass, and the others' answers."""

    def __init__(self, store: TimeoutStore, rank: int):
        self._store, self._rank = store, rank
        self._passes = weakref.WeakValueDictionary[str, RecoverablePasses]()  # by engine
        self._seen = 0
        self._unanswered: list[tuple[str, int, JsonObject]] = []  # engine, rank, statement
        self.stated: dict[str, JsonObject] = {}  # by engine, this rank's last statement

    def add(self, passes: RecoverablePasses) -> None:
        self._passes[passes.name] = passes

    def state(self, name: str, rank: int, statement: JsonObject) -> None:
        self.stated[name] = statement
        self._store.set(
            f"resumes/{self._store.add('resumes', 1)}", json.dumps([name, rank, statement])
        )

    def answers(self, name: str, to: int, serial: int) -> dict[int, str]:
        return read_entries(self._store, f"answers/{name}/{to}/{serial}")

    def answer_statements(self, stated: int, conclude: Callable[[str], None]) -> None:
        """Answer the ``stated`` statements of other ranks; ``conclude`` ends this rank if its
        passes differ from theirs. Runs on the watchdog's thread.
        """
        while self._seen < stated:
            if not self._store.check([f"resumes/{self._seen + 1}"]):
                break  # being written
            self._seen += 1
            name, rank, statement = json.loads(self._store.get(f"resumes/{self._seen}"))
            if rank != self._rank:
                self._unanswered.append((name, rank, statement))
        for entry in list(self._unanswered):
            name, rank, statement = entry
            passes = self._passes.get(name)
            answer = passes.answer_to(rank, statement) if passes is not None else None
            if answer is None:
                continue
            self._unanswered = [e for e in self._unanswered if e is not entry]
            key = f"answers/{name}/{rank}/{statement['serial']}"
            self._store.append(key, json.dumps([self._rank, answer]) + "\n")
            if answer:
                conclude(answer)
