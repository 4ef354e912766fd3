"""Watches over waits: a warning each minute, an error as soon as it is proved that a rank will not
come, or at the timeout.

[Note: interrupting]
A thread polls waits that last a second or more; shorter ones cost nothing. If a backend's wait
orders a stream and returns at once, it polls an event after the wait. A wait in a backend's native
code cannot be stopped: gloo knows only timeouts, which close its connections. So, once there is a
proof, the thread aborts all communicators (``CollectiveLog.abort``), the wait raises, and
:meth:`PollingWatchdog.conclude_failure` gives the reason. The communicators are lost with it; so is
the job.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable

import torch

from hf_zero.device import kinds
from hf_zero.distributed import rank_hosts, uncaught
from hf_zero.distributed.aborting import abort_together
from hf_zero.distributed.collective_log import CollectiveLog, PendingCollective
from hf_zero.distributed.hang_detection import JOIN_SECONDS, Watchdog, watchdogs
from hf_zero.distributed.hang_proofs import HangDiagnosis
from hf_zero.distributed.rank_status import PATIENCE_SECONDS, PostedStatus, poll_pauses
from hf_zero.distributed.state_rows import RankState
from hf_zero.errors import HfZeroError, RankMismatchError
from hf_zero.logging import logger

WARN_SECONDS = 60.0
POLL_SECONDS = 1.0  # a wait is polled after this time
NOTED_SECONDS = 5.0  # a wait as long as that is noted, with the states of all ranks
POLLS_APART = 2.0  # and again each time as many of these have passed: all ranks share one store
FOLLOWED = 64  # collectives of a communicator followed at once: the oldest and the newest
SCRIPTS_COLLECTIVES = "torch.distributed.distributed_c10d"
SCRIPT_POLLS = 4  # consecutive polls that find the script in its own collective
GRACE_SECONDS = 5.0


class PollingWatchdog(Watchdog):
    """Watch the waits of one rank from a daemon thread, started at the first wait."""

    def __init__(
        self,
        enabled: bool = True,
        warn_after: float = WARN_SECONDS,
        rank_status: PostedStatus | None = None,
        answer: Callable[[int, Callable[[str], None]], None] | None = None,
    ):
        """``answer`` is called on the watchdog's thread while this rank waits, with
        :attr:`PostedStatus.statements` and :meth:`end`.
        """
        super().__init__(rank_status)
        self._enabled = enabled
        self._warn_after = warn_after
        self.posts = rank_status
        self._concluded = threading.Event()  # set with the verdict: communicators are aborted then
        self.started = not enabled
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._seen: tuple[PendingCollective, float] | None = None
        self._warned = 0.0
        self._polled, self._polls = 0.0, 0  # time of the last poll of the current wait; their count
        self._posted: tuple[PendingCollective, float] | None = None
        self._answered = 0.0
        self._followed: dict[
            CollectiveLog, deque[tuple[tuple[PendingCollective, float], Callable[[], bool]]]
        ] = {}
        self._following = threading.Lock()
        self._device: torch.device | None = None  # device of the followed collectives
        self._follower: PollingWatchdog | None = None  # that follows in place of this one
        self._answer = answer
        self._hinted: tuple[PendingCollective, float] | None = None
        self._script = threading.get_ident()
        self._script_waits = 0  # polls that found the script in its own collective
        self._noted: list[dict[str, object]] = []
        self.failed = False  # whether a poll has failed, which is logged once
        if rank_status is not None and enabled:
            watchdogs.add(self)
            uncaught.watch(HfZeroError)

    def beside(self) -> PollingWatchdog:
        """Return a watchdog for collectives that another thread issues: it shares the rank status,
        and leaves the watching to the caller that waits for the thread.
        """
        quiet = PollingWatchdog(enabled=False, rank_status=self.posts)
        quiet._follower = self
        return quiet

    def start(self) -> None:
        """Start the thread, at the first wait."""
        self.started = True
        self._thread = threading.Thread(
            target=_run, args=(weakref.ref(self), self._stop), name="hf_zero-watch", daemon=True
        )
        self._thread.start()

    def follow(
        self,
        pending: PendingCollective,
        is_over: Callable[[], bool],
        device: torch.device | None = None,
    ) -> None:
        if self._follower is not None:
            self._follower.follow(pending, is_over, device)
        if not self._enabled or pending.log is None:
            return
        self._device = device
        if not self.started:
            self.start()
        with self._following:
            followed = self._followed.setdefault(pending.log, deque())
            while followed and followed[0][1]():
                followed.popleft()
            # the oldest show the position of a communicator, the newest when all are over
            if len(followed) == FOLLOWED:
                followed.pop()
            followed.append(((pending, time.monotonic()), is_over))

    def begin_poll(self) -> None:
        """Make the device of followed collectives current in this thread: querying an event opens a
        context on the current device, half a GiB for each rank on device 0.
        """
        if self._device is not None and kinds.current_index(self._device) != self._device.index:
            kinds.set_device(self._device)

    def _oldest_followed(self) -> tuple[PendingCollective, float] | None:
        with self._following:
            oldest = []
            for log, followed in list(self._followed.items()):
                while followed and followed[0][1]():
                    followed.popleft()
                if followed:
                    oldest.append(followed[0][0])
                else:
                    del self._followed[log]  # its engine may have ended
        return min(oldest, key=lambda entry: entry[1], default=None)

    def sleep(self, seconds: float) -> None:
        self._concluded.wait(seconds)

    def conclude_failure(
        self, pending: PendingCollective, error: BaseException
    ) -> RankMismatchError:
        _take_time_to_speak()
        if self.verdict:
            return RankMismatchError(self.verdict)
        cause = self.posts.failure_cause() if self.posts is not None else None
        if cause is None and self.posts is not None and pending.log is not None:
            # the groups of a destroyed engine are closed: its connections go without a failure
            self.posts.publish(RankState.WAITS, pending=pending)
            diagnosis = self.posts.diagnose(pending)
            if diagnosis is not None:
                self._conclude(*diagnosis)
                return RankMismatchError(diagnosis.text)
        if cause is None:
            cause = self.lost_connection(pending, error)
        elif not cause.startswith("rank"):
            cause = f"lost while it waited: {cause}"
        self._conclude(self.unfinished(pending, cause), cause)
        return RankMismatchError(self.verdict)

    def report_mismatch(self, pending: PendingCollective) -> RankMismatchError:
        """Return the exception to raise; each rank notices, and publishes its own."""
        rank_status = self.posts
        if rank_status is not None and not self.verdict:
            rank_status.publish(RankState.WAITS, pending=pending)
            limit = time.monotonic() + PATIENCE_SECONDS
            diagnosis = rank_status.diagnose(pending)
            for pause in poll_pauses():
                if diagnosis is not None or time.monotonic() >= limit:
                    break
                time.sleep(pause)
                diagnosis = rank_status.diagnose(pending)
            text = f"rank {rank_status.rank} is at {pending}, another rank elsewhere"
            self._conclude(*(diagnosis or HangDiagnosis(text, text)))
        return RankMismatchError(self.verdict)

    def _conclude(self, verdict: str, cause: str, sever: Callable[[], None] | None = None) -> None:
        self.verdict = verdict
        self._concluded.set()
        logger.error(verdict)  # some launchers never print the exception
        if logger.isEnabledFor(logging.ERROR):
            uncaught.logged.add(verdict)  # the report of the exception refers to this line
        if sever is not None:  # after the line: the backend may end the process by itself then
            sever()
        if self.posts is not None:
            self.posts.publish(RankState.BROKEN, cause)
            self._note_states((self.current or self._oldest_followed() or (None,))[0])
            # All communicators, not only the current one: freeing a group with operations in flight
            # joins its thread.
            logs = list(self.posts.logs.values())
            abort_together({log.name: log.abort for log in logs if not log.end_reason})

    def _note_states(self, pending: PendingCollective | None) -> None:
        """Give the records the states of all ranks, if these have changed."""
        if self.posts is None or not self.records:
            return
        states = self.posts.states(pending)
        if states != self._noted:
            self._noted = states
            for record in list(self.records):
                record.note("ranks", states)

    def _note_end_of_wait(self) -> None:
        if self._noted and not self.verdict:
            self._note_states(None)
            self._noted = []

    def end(self, verdict: str) -> None:
        if not self.verdict:
            self._conclude(verdict, verdict)

    def poll_hosts(self) -> None:
        """End the waits of this rank once a host is unreachable; outside one it raises at its next
        call of the engine.
        """
        rank_status = self.posts
        heartbeats = rank_status.heartbeats if rank_status is not None else None
        if rank_status is None or heartbeats is None or self.verdict:
            return
        heartbeats.report_unheard()
        cause = heartbeats.cause()
        if cause:
            current = self.current or self._oldest_followed()
            waits = f"rank {rank_status.rank} cannot finish {current[0]}: " if current else ""
            self._conclude(waits + cause, cause, heartbeats.sever)

    def answer_others(self) -> None:
        """Call the ``answer`` of the constructor if it is due: this rank waits, and has polled."""
        rank_status, now = self.posts, time.monotonic()
        in_script = self._script_waits >= SCRIPT_POLLS
        if (
            self._answer is None
            or rank_status is None
            or self.verdict
            or now - self._answered < POLLS_APART * POLL_SECONDS
            or not (in_script or self._polls)
        ):
            return
        self._answered = now
        if in_script:
            rank_status.read()
        try:
            self._answer(rank_status.statements, self.end)
        except RuntimeError:
            pass  # the store is gone: no other rank can ask

    def poll_script(self) -> None:
        """Publish when the script waits in a collective of its own, and when it no longer does."""
        rank_status = self.posts
        if rank_status is None or self.verdict:
            return
        frame = sys._current_frames().get(self._script)
        waits = (
            self.current is None
            and frame is not None
            and frame.f_globals.get("__name__") == SCRIPTS_COLLECTIVES
        )
        del frame
        if waits:
            self._script_waits += 1
            if self._script_waits == SCRIPT_POLLS:
                rank_status.publish(RankState.SCRIPT)
                self._posted = None
        elif self._script_waits:
            if self._script_waits >= SCRIPT_POLLS:
                rank_status.publish(RankState.HERE)
            self._script_waits = 0

    def close(self) -> None:
        self._stop.set()

    def leave(self) -> None:
        # A thread that returns from the store's C++ while the interpreter shuts down would abort
        # the process.
        if self._thread is not None:
            self._thread.join(JOIN_SECONDS)
        cause = self.posts.publish_exit() if self.posts is not None else None
        if cause:
            logger.error("this rank has lost a connection because %s", cause)

    @property
    def pause(self) -> float:
        """Seconds between polls."""
        return min(POLL_SECONDS, self._warn_after) / 4

    def check_current_wait(self) -> None:
        """Warn if the current wait has lasted long since it began or since the last warning; end it
        if it can never end.
        """
        current = self.current or self._oldest_followed()
        if current is not self._seen:
            self._note_end_of_wait()
        if current is None:
            self._seen, self._polls = None, 0
            return
        pending, now = current[0], time.monotonic()
        waited = now - current[1]
        if current is not self._seen:
            self._seen, self._warned, self._polled = current, 0.0, current[1]
            self._polls = 0
        every = POLL_SECONDS * (POLLS_APART if self._polls else 1.0)
        if self.posts is not None and not self.verdict and now - self._polled >= every:
            self._polled, self._polls = now, self._polls + 1
            self._judge(current, waited, self.posts)
        if not pending.warns and waited - self._warned >= self._warn_after:
            self._warned = waited
            missing_ranks = self.posts.missing_ranks(pending) if self.posts is not None else []
            who = "another rank"
            if missing_ranks:
                who = f"rank{'s' * (len(missing_ranks) > 1)} {', '.join(map(str, missing_ranks))}"
            logger.warning(
                "still waiting for %s after %.0f s: %s has not joined it (has it died, or is it "
                "elsewhere in the script?)",
                pending,
                waited,
                who,
            )

    def _judge(
        self, current: tuple[PendingCollective, float], waited: float, rank_status: PostedStatus
    ) -> None:
        pending, log = current[0], current[0].log
        follows = current is not self.current
        if log is not None and self._posted is not current:
            rank_status.publish(RankState.FOLLOWS if follows else RankState.WAITS, pending=pending)
            self._posted = current
        verdict = rank_status.diagnose(pending, () if follows else (RankState.WAITS,))
        # hosts of ranks that follow may still go on: a likely hang is only warned of, once
        if verdict is None and follows and self._hinted is not current:
            likely = rank_status.diagnose(pending, (RankState.WAITS, RankState.FOLLOWS))
            if likely is not None:
                self._hinted = current
                logger.warning(
                    "%s (nothing will end this if the hosts of these ranks wait "
                    "for their devices now)",
                    likely.text,
                )
        if verdict is None and log is not None and waited >= log.timeout:
            late = rank_status.missing_ranks(pending)
            required = pending.required or log.ranks
            needed = late or [rank for rank in required if rank != rank_status.rank]
            text = (
                f"rank {rank_status.rank} has waited {waited:.0f} s, which is the timeout, for "
                f"{pending}; {rank_hosts.named(needed)} {'has' if len(needed) == 1 else 'have'} "
                "not joined it. See where such a rank is (py-spy dump): it hangs, or it has "
                "finished a loop of fewer steps than the others. If it is only slow, set a longer "
                "timeout in the config"
            )
            verdict = HangDiagnosis(text, text)
        if waited >= NOTED_SECONDS:
            self._note_states(pending)
        if verdict is not None and (self.current or self._oldest_followed()) is current:
            self._conclude(*verdict)


def _run(owner: weakref.ref[PollingWatchdog], stop: threading.Event) -> None:
    pause = 0.0
    while not stop.wait(pause):
        watchdog = owner()
        if watchdog is None:
            return
        try:
            watchdog.begin_poll()
            watchdog.poll_hosts()
            watchdog.check_current_wait()
            watchdog.poll_script()
            watchdog.answer_others()
        except Exception as error:  # of a query of an event, or of the store: poll again
            if not watchdog.failed:
                watchdog.failed = True
                logger.warning("polling the waits of this rank failed, and goes on: %s", error)
        pause = watchdog.pause
        del watchdog


def _explain_lost_connection(error: BaseException) -> RankMismatchError | None:
    """Return the exception to report in place of ``error``, raised by a collective of the script
    itself as another rank ended; None for other errors, or if the cause is unknown.
    """
    if not isinstance(error, RuntimeError) or "Connection" not in str(error):
        return None
    for rank_status in [watch.rank_status for watch in list(watchdogs)]:
        cause = rank_status.failure_cause() if isinstance(rank_status, PostedStatus) else None
        if isinstance(rank_status, PostedStatus) and cause is not None:
            rank_status.publish(RankState.BROKEN, cause)
            return RankMismatchError(
                f"rank {rank_status.rank} lost a connection in a collective of the script's own: "
                f"{cause}"
            )
    return None


uncaught.explanations.append(_explain_lost_connection)


def _take_time_to_speak() -> None:
    """Delay the default action of SIGTERM: a launcher that sees one rank end ends the others at
    once, and this one is about to report why.
    """
    if (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    ):
        signal.signal(signal.SIGTERM, _end_soon)


def _end_soon(number: int, frame: object) -> None:
    signal.signal(number, signal.SIG_DFL)
    timer = threading.Timer(GRACE_SECONDS, os.kill, (os.getpid(), number))
    timer.daemon = True
    timer.start()
