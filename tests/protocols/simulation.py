"""Processes in virtual time: tasks that run one at a time, in an order that a schedule chooses.

A task is a greenlet that runs code of the package. It gives way at its operations (requests to the
simulated store, waits, sleeps, changes of files), and nowhere else. At each of them the schedule
may go on with another task, deliver a message that is under way, hold up a task or its process for
longer than the timeouts, or kill the process. The clock moves on only if no task can run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import greenlet

START = 1000.0  # seconds of the clock at the beginning
OPERATION = 1e-6  # seconds that an operation takes
STEPS = 20_000  # operations after which a schedule counts as endless


class Killed(BaseException):
    """The end of a process that is killed: each operation of its tasks raises it."""


class Schedule(Protocol):
    """A schedule: the decisions of a simulation, in order."""

    def deviates(self) -> bool:
        """Whether the next decision is another than to go on with the task that runs, or else with
        the first that can.
        """

    def choose(self, runs: int, faults: int) -> int:
        """Return the decision that deviates: a number below ``runs + faults``; those from ``runs``
        are delays and deaths.
        """


class Replay:
    """The schedule that deviates from the default at the ``choices`` alone."""

    def __init__(self, choices: dict[int, int] | None = None) -> None:
        self._choices, self._at = choices or {}, -1

    def deviates(self) -> bool:
        self._at += 1
        return self._at in self._choices

    def choose(self, runs: int, faults: int) -> int:
        return min(self._choices[self._at], runs + faults - 1)


@dataclass(eq=False)
class Process:
    """A process of one rank. ``host`` is lost as a whole by :meth:`Simulation.lose`."""

    rank: int
    host: str = "host"
    alive: bool = True
    held_until: float = 0.0  # it was stopped
    mortal: bool = True
    # by name: values of module variables of which each process has its own (files.py)
    variables: dict[str, Any] = field(default_factory=dict)
    at_exit: list[Callable[[], None]] = field(default_factory=list)


@dataclass(eq=False)
class Task:
    """A thread of a process. It can run once ``ready`` holds, or the clock shows ``until``."""

    name: str
    process: Process
    daemon: bool
    greenlet: Any = None
    ready: Callable[[], bool] | None = None
    until: float | None = 0.0
    held_until: float = 0.0
    what: str = "begin"
    done: bool = False
    error: BaseException | None = None

    def can_run(self, now: float) -> bool:
        if now < self.held_until or now < self.process.held_until:
            return False
        until, ready = self.until, self.ready
        return (until is not None and now >= until) or (ready is not None and ready())

    def next_time(self) -> float | None:
        """Return when the clock alone lets this task run; None: never."""
        held = max(self.held_until, self.process.held_until)
        if self.until is None:
            return held if held and self.ready is not None and self.ready() else None
        if self.ready is not None and held and self.ready():
            return held
        return max(self.until, held)


class Simulation:
    """One run of processes under ``schedule``.

    delays: seconds for which a task or its process may be held up at an operation.
    deaths: number of processes that may be killed.
    interrupts: number of KeyboardInterrupts that main tasks may get.
    at: parts of names of operations at which these happen.
    seconds: after which, on the virtual clock, a run counts as endless.
    """

    def __init__(
        self,
        schedule: Schedule,
        delays: Sequence[float] = (),
        deaths: int = 0,
        seconds: float = 500.0,
        interrupts: int = 0,
        at: str | Sequence[str] = "",
    ) -> None:
        self._schedule, self._delays = schedule, tuple(delays)
        self._deaths, self._interrupts = deaths, interrupts
        self._seconds, self._at = seconds, [at] if isinstance(at, str) else at
        self.now = START
        self.tasks: list[Task] = []
        self.current: Task | None = None
        self.taken: dict[int, int] = {}  # choices other than 0, by decision
        self.decisions = 0
        self.widths: dict[int, int] | None = None  # number of choices of each, if they are asked
        self.trace: list[str] | None = None
        self.clients: list[Any] = []  # of simulated stores, with messages under way
        self.steps = 0
        self.killed: list[Process] = []
        self.delayed = 0.0  # seconds for which tasks and processes were held up
        self.thread = threading.get_ident()
        self.ended: list[Task] = []  # tasks that have ended, in this order
        self.at_close: list[Callable[[], None]] = []
        self._main = greenlet.getcurrent()
        self._next: Task | None = None
        self._dying: list[Task] = []
        self._ends = ""

    def spawn(
        self, name: str, call: Callable[[], Any], process: Process | None = None, daemon=False
    ) -> Task:
        """Start a task of ``process``, by default of the one that runs."""
        if process is None:
            assert self.current is not None
            process = self.current.process
        task = Task(name, process, daemon, until=self.now)

        def run() -> None:
            try:
                call()
            except Killed:
                pass
            except BaseException as error:
                task.error = error.with_traceback(None)
            task.done = True

        task.greenlet = greenlet.greenlet(run, parent=self._main)
        task.done = not process.alive
        if not task.done:
            self.tasks.append(task)
        return task

    def point(self, what: str) -> None:
        """Give way before the operation ``what``."""
        task = self.current
        if task is None:
            return
        if not task.process.alive:
            raise Killed
        task.what, task.ready, task.until = what, None, self.now
        self._give_way(task)

    def wait(self, ready: Callable[[], bool], seconds: float | None, what: str) -> bool:
        """Wait for ``ready``, ``seconds`` at most; return whether it holds."""
        task = self.current
        if task is None:
            return ready()
        if not task.process.alive:
            raise Killed
        task.what, task.ready = what, ready
        task.until = None if seconds is None else self.now + max(seconds, 0.0)
        self._give_way(task)
        return ready()

    def sleep(self, seconds: float) -> None:
        self.wait(lambda: False, seconds, "sleep")

    def kill(self, process: Process) -> None:
        """Kill ``process``; what it has sent is delivered."""
        if process.alive:
            self.killed.append(process)
            self.exit(process)

    def exit(self, process: Process) -> None:
        """End ``process`` with its threads, and with all that it holds, such as locks."""
        if process.alive:
            process.alive = False
            self._dying += [task for task in self.tasks if task.process is process]
            for action in process.at_exit:
                action()
            process.variables.clear()

    def untroubled(self, seconds: float) -> bool:
        """Whether no process was killed, and all were held up for less than ``seconds``."""
        return not self.killed and self.delayed < seconds

    @property
    def errors(self) -> list[BaseException]:
        """The errors of tasks that have ended."""
        return [task.error for task in self.ended if task.error is not None]

    def wrong(self, end: str, faults: Iterable[str], *expected: type[BaseException]) -> str:
        """Return what is wrong: an ``end`` that is none, what tasks have noted as ``faults``, or
        errors of other classes than ``expected``; "" if nothing is.
        """
        unexpected = [error for error in self.errors if not isinstance(error, expected)]
        noted = "; ".join(filter(None, faults))
        return end or noted or (f"an error: {unexpected}" if unexpected else "")

    def _give_way(self, task: Task) -> None:
        pick = self._pick(task)
        if pick is not task:
            self._next = pick
            self._main.switch()
        if not task.process.alive:
            raise Killed
        if task.what == "interrupted":
            task.what = ""
            raise KeyboardInterrupt

    def run(self) -> str:
        """Run until the tasks that are no daemons have ended; return why they do not end, or ""."""
        while not self._ends:
            for task in self._take_dying():
                self._unwind(task)
            pick = self._next or self._pick(None)
            self._next = None
            if pick is None:
                break
            self.current = task = pick
            task.greenlet.switch()
            self.current = None
            if task.done:
                self.tasks.remove(task)
                if task.error is not None and self.trace is not None:
                    self.trace.append(f"{task.name} ends with {task.error!r}")
                self.ended.append(task)
                if not task.daemon and all(each.daemon for each in self.tasks):
                    break
        return self._ends

    def close(self) -> None:
        """End the tasks that are left, as if their processes were killed."""
        for task in self.tasks:
            task.process.alive = False
        for task in list(self.tasks):
            self._unwind(task)
        for action in self.at_close:
            action()

    def _take_dying(self) -> list[Task]:
        dying, self._dying = self._dying, []
        if dying and self._next in dying:
            self._next = None
        return dying

    def _unwind(self, task: Task) -> None:
        if not task.done:
            self.current = task
            if task.greenlet:  # it has begun
                task.greenlet.throw(Killed)
            self.current, task.done = None, True
        if task in self.tasks:
            self.tasks.remove(task)

    def _pick(self, task: Task | None) -> Task | None:
        """Return the task that goes on; None if the run is over, or a process has just died."""
        while True:
            self.steps += 1
            self.now += OPERATION
            if self.steps > STEPS:
                return self._end("goes on for ever")
            if self.now - START > self._seconds:
                return self._end("does not end in time")
            runs = task is not None and task.process.alive and task.can_run(self.now)
            deviates = self._schedule.deviates()
            self.decisions += 1
            if runs and not deviates and self.widths is None:
                return task
            options: list[Any] = [client for client in self.clients if client.under_way]
            now = self.now
            options += [each for each in self.tasks if each is not task and each.can_run(now)]
            if runs:
                options.insert(0, task)
            if not options:
                if all(each.daemon for each in self.tasks):
                    return None
                times = [each.next_time() for each in self.tasks]
                later = [time for time in times if time is not None]
                if not later:
                    return self._end("waits for ever")
                self.now = max(now, min(later))
                continue
            faults = self._faults(task) if runs and task is not None else ()
            chosen = self._schedule.choose(len(options), len(faults)) if deviates else 0
            if chosen:
                self.taken[self.decisions - 1] = chosen
            if self.widths is not None:
                self.widths[self.decisions - 1] = len(options) + len(faults)
            if chosen < len(options):
                pick = options[chosen]
                if not isinstance(pick, Task):
                    pick.deliver()
                    continue
                if self.trace is not None and pick is not task:
                    self._note(f"{pick.name} ({pick.what})", chosen)
                if pick.daemon and all(each.daemon for each in self.tasks):
                    return None
                return pick
            kind, seconds = faults[chosen - len(options)]
            assert task is not None
            self._note(f"{task.name}: {kind} {seconds or ''} at {task.what}", chosen)
            if kind == "killed":
                self._deaths -= 1
                self.kill(task.process)
                return None
            if kind == "interrupted":
                self._interrupts -= 1
                task.what = kind
                return task
            self.delayed += seconds
            if kind == "held":
                task.held_until = self.now + seconds
            else:
                task.process.held_until = self.now + seconds

    def _faults(self, task: Task) -> list[tuple[str, float]]:
        if not any(part in task.what for part in self._at):
            return []
        found = [(kind, seconds) for seconds in self._delays for kind in ("held", "stopped")]
        if self._deaths and task.process.mortal:
            found.append(("killed", 0.0))
        if self._interrupts and task.name.startswith("rank"):
            found.append(("interrupted", 0.0))
        return found

    def _note(self, text: str, chosen: int) -> None:
        if self.trace is not None:
            self.trace.append(f"{'*' if chosen else ' '} {self.now - START:9.4f} s  {text}")

    def _end(self, why: str) -> Task | None:
        waits = "; ".join(f"{task.name} at {task.what}" for task in self.tasks if not task.daemon)
        self._ends = f"{why}: {waits}"
        return None


_running: list[Simulation] = []


def running() -> Simulation | None:
    """Return the simulation that runs in this thread; None outside of one."""
    return _running[-1] if _running and _running[-1].thread == threading.get_ident() else None


@contextmanager
def entered(simulation: Simulation) -> Iterator[Simulation]:
    """Make ``simulation`` the one that the stand-ins of time, threads and stores belong to."""
    _running.append(simulation)
    try:
        yield simulation
    finally:
        try:
            simulation.close()
        finally:
            _running.pop()
