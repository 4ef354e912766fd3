"""No silent wait: a warning each minute, an error as soon as it is proved that nobody will come, or
at the timeout.

[Note: interrupting]
A thread looks at waits that last a second or more; shorter ones cost nothing. Where a backend's
wait orders a stream and returns at once, it polls an event after the wait. What waits in a
backend's native code cannot be told to stop: gloo knows only timeouts, which close its connections.
So, with a proof at hand, all lanes are broken off from here (``Lane.break_off``), the wait raises,
and :meth:`Watch.explain` says why. The lanes are lost with it; so is the job.
"""

from __future__ import annotations

import atexit
import os
import signal
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from hf_zero.distributed import whereabouts
from hf_zero.distributed.lane import Lane, Wait
from hf_zero.distributed.presence import PATIENCE_SECONDS, POLL_SECONDS, Presence, Verdict
from hf_zero.errors import RankMismatchError
from hf_zero.logs import logger

WARN_SECONDS = 60.0
LOOK_SECONDS = 1.0  # a wait of this length is looked at, and again after as long
FOLLOWED = 64  # collectives of a lane that are followed at once: the oldest ones and the newest
RANKS_A_LOOK = 32  # more ranks look less often: they share one store
GRACE_SECONDS = 5.0
JOIN_SECONDS = 5.0


class Watch:
    """Watches the waits of one rank from a daemon thread, started at the first wait."""

    def __init__(
        self,
        enabled: bool = True,
        warn_after: float = WARN_SECONDS,
        presence: Presence | None = None,
    ):
        self._enabled = enabled
        self._warn_after = warn_after
        self.presence = presence
        self.verdict = ""  # what ends this rank: sticky, because a lane has been broken off for it
        self._current: tuple[Wait, float] | None = None
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._told: tuple[Wait, float] | None = None
        self._warned = 0.0
        self._looked = 0.0
        self._posted: tuple[Wait, float] | None = None
        self._attended = 0.0
        self._followed: dict[Lane, deque[tuple[tuple[Wait, float], Callable[[], bool]]]] = {}
        self._following = threading.Lock()
        self._hinted: tuple[Wait, float] | None = None
        if presence is not None:
            _watches.add(self)

    @contextmanager
    def over(self, wait: Wait) -> Iterator[None]:
        """Mark the enclosed block as waiting."""
        if not self._enabled:
            yield
            return
        self._start()
        outer, self._current = self._current, (wait, time.monotonic())
        try:
            yield
        finally:
            self._current = outer

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(
                target=_run, args=(weakref.ref(self), self._stop), name="hf_zero-watch", daemon=True
            )
            self._thread.start()

    def follow(self, wait: Wait, is_over: Callable[[], bool]) -> None:
        """Watch a collective for which only a stream waits until ``is_over``. Those of a lane are
        over in their order.

        ``is_over`` is asked on other threads, and should keep no tensor alive.
        """
        if not self._enabled or wait.lane is None:
            return
        self._start()
        with self._following:
            followed = self._followed.setdefault(wait.lane, deque())
            while followed and followed[0][1]():
                followed.popleft()
            # the oldest ones tell where a lane stands, the newest when all are over
            if len(followed) == FOLLOWED:
                followed.pop()
            followed.append(((wait, time.monotonic()), is_over))

    def _oldest_followed(self) -> tuple[Wait, float] | None:
        with self._following:
            oldest = []
            for followed in self._followed.values():
                while followed and followed[0][1]():
                    followed.popleft()
                oldest += [followed[0][0]] if followed else []
        return min(oldest, key=lambda entry: entry[1], default=None)

    def check(self) -> None:
        """Raise what the watch has found, where nothing waits in a backend."""
        if self.verdict:
            raise RankMismatchError(self.verdict)

    def explain(self, wait: Wait, error: BaseException) -> RankMismatchError:
        """What to raise for ``error``, which ``wait`` has raised: who is the reason, if that can
        be found.
        """
        _take_time_to_speak()
        if self.verdict:
            return RankMismatchError(self.verdict)
        cause = self.presence.cause() if self.presence is not None else None
        if cause is None:
            others = whereabouts.of(
                rank for rank in wait.needs if self.presence is None or rank != self.presence.rank
            )
            cause = (
                f"a connection was lost ({error}): a rank has ended or died, or its network; "
                f"see the output of {others}"
            )
        elif not cause.startswith("rank"):
            cause = f"lost while it waited: {cause}"
        text = (
            f"rank {self.presence.rank if self.presence is not None else '?'} could not "
            f"finish {wait}: {cause}"
        )
        self._conclude(text, cause)
        return RankMismatchError(text)

    def disagree(self, wait: Wait) -> RankMismatchError:
        """What to raise where ranks have met in different collectives: all of them know, and
        tell each other what theirs is.
        """
        presence = self.presence
        if presence is not None and not self.verdict:
            presence.say("waits", wait=wait)
            limit = time.monotonic() + PATIENCE_SECONDS
            found = presence.verdict(wait)
            while found is None and time.monotonic() < limit:
                time.sleep(POLL_SECONDS)
                found = presence.verdict(wait)
            text = f"rank {presence.rank} is at {wait}, another rank elsewhere"
            self._conclude(*(found or Verdict(text, text)))
        return RankMismatchError(self.verdict)

    def _conclude(self, verdict: str, cause: str) -> None:
        self.verdict = verdict
        if self.presence is not None:
            self.presence.say("broken", cause)
        logger.error(verdict)  # whatever becomes of the exception: some launchers never print it
        if self.presence is not None:
            # All lanes, not only the one waited on: a group in which something is still under way
            # joins its thread when it is freed.
            for lane in list(self.presence.lanes.values()):
                if not lane.closed:
                    self._break_off(lane)

    @staticmethod
    def _break_off(lane: Lane) -> None:
        try:
            lane.break_off()
        except Exception:
            # the other lanes must raise all the same, and this thread goes on for engines made
            # later
            logger.exception("could not break off %s", lane.name)

    def end(self, verdict: str) -> None:
        """End this rank, and all that it waits for, for a reason that another thread or rank has
        found.
        """
        if not self.verdict:
            self._conclude(verdict, verdict)

    def attend(self) -> None:
        """Answer ranks that go on after an exception; asked for all the time, and looked after
        once a second.
        """
        presence, now = self.presence, time.monotonic()
        if (
            presence is None
            or not hasattr(presence, "resumptions")
            or self.verdict
            or now - self._attended < self._every(presence)
        ):
            return
        self._attended = now
        try:
            presence.resumptions.look(self.end)
        except RuntimeError:
            pass  # the store is gone: nobody can ask

    def close(self) -> None:
        self._stop.set()

    @property
    def pause(self) -> float:
        """Seconds between looks."""
        return min(LOOK_SECONDS, self._warn_after) / 4

    def look(self) -> None:
        """Warn if the wait under way has lasted long since it began or was last warned of; end
        it if it can never end.
        """
        current = self._current or self._oldest_followed()
        if current is None:
            return
        wait, now = current[0], time.monotonic()
        waited = now - current[1]
        if current is not self._told:
            self._told, self._warned, self._looked = current, 0.0, current[1]
        if (
            self.presence is not None
            and not self.verdict
            and now - self._looked >= self._every(self.presence)
        ):
            self._looked = now
            self._judge(current, waited, self.presence)
        if not wait.warns and waited - self._warned >= self._warn_after:
            self._warned = waited
            lacking = self.presence.lacking(wait) if self.presence is not None else []
            who = (
                f"rank{'s' * (len(lacking) > 1)} {', '.join(map(str, lacking))}"
                if lacking
                else "another rank"
            )
            logger.warning(
                "waiting for %s since %.0f s: %s has not joined it (is it dead, or "
                "elsewhere in the script?)",
                wait,
                waited,
                who,
            )

    @staticmethod
    def _every(presence: Presence) -> float:
        return LOOK_SECONDS * max(1.0, presence.world / RANKS_A_LOOK)

    def _judge(self, current: tuple[Wait, float], waited: float, presence: Presence) -> None:
        wait, lane = current[0], current[0].lane
        follows = current is not self._current
        if lane is not None and self._posted is not current:
            presence.say("follows" if follows else "waits", wait=wait)
            self._posted = current
        verdict = presence.verdict(wait, () if follows else ("waits",))
        if verdict is None and follows and self._hinted is not current:
            likely = presence.verdict(wait, ("waits", "follows"))
            if likely is not None:
                self._hinted = current
                logger.warning(
                    "%s (nothing will end this if the hosts of these ranks wait "
                    "for their devices now)",
                    likely.text,
                )
        if verdict is None and lane is not None and waited >= lane.timeout:
            others = whereabouts.of(rank for rank in wait.needs if rank != presence.rank)
            text = (
                f"rank {presence.rank} has waited {waited:.0f} s, which is the timeout, for "
                f"{wait}; it needs {others}, of which one has not "
                "come. See where it stands (py-spy dump), or set a longer timeout in the config"
            )
            verdict = Verdict(text, text)
        if verdict is not None and (self._current or self._oldest_followed()) is current:
            self._conclude(*verdict)


def _run(owner: weakref.ref[Watch], stop: threading.Event) -> None:
    pause = 0.0
    while not stop.wait(pause) and not _ending.is_set():
        watch = owner()
        if watch is None:
            return
        watch.look()
        watch.attend()
        pause = watch.pause
        del watch


_watches: weakref.WeakSet[Watch] = weakref.WeakSet()
_ending = threading.Event()


@atexit.register
def _leave() -> None:
    """Say how this rank ends.

    A thread that comes back from the store's C++ while the interpreter shuts down would abort the
    process.
    """
    _ending.set()
    for watch in list(_watches):
        watch.close()
        if watch._thread is not None:
            watch._thread.join(JOIN_SECONDS)
        told = watch.presence.leave() if watch.presence is not None else None
        if told:
            logger.error("this rank has lost a connection because %s", told)


def _take_time_to_speak() -> None:
    """A launcher that sees one rank end ends the others at once; this one is about to say why,
    and ends a little later.
    """
    if (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    ):
        signal.signal(signal.SIGTERM, _end_soon)


def _end_soon(number: int, frame: Any) -> None:
    signal.signal(number, signal.SIG_DFL)
    timer = threading.Timer(GRACE_SECONDS, os.kill, (os.getpid(), number))
    timer.daemon = True
    timer.start()
