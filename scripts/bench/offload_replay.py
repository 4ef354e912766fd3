"""A discrete-event simulation of recorded schedules (``offload_schedule.py``) on a machine of given
ceilings.

Threads do their ops in program order and streams theirs in the order of their launches. What takes
time are kernels (one after the other on their stream), copies (the two directions of the bus slow
each other down), passes over host memory, and transfers of the disk, one at a time and those first
that somebody waits for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from offload_schedule import Op, Schedule

GPU, H2D, D2H, HOST, DISK = "GPU", "H2D", "D2H", "CPU", "disk"
RESOURCES = (GPU, H2D, D2H, HOST, DISK)
PRIORITIES = ("NEEDED", "AHEAD", "BEHIND")
EPSILON = 1e-12


@dataclass(frozen=True)
class Machine:
    """Ceilings in bytes or operations a second. ``both``: the bus in both directions at once."""

    h2d: float
    d2h: float
    both: float
    host: float
    hbm: float
    flops: float
    disk_write: float
    disk_read: float


@dataclass
class Span:
    """``resource`` was busy with ``label``, in seconds."""

    resource: str
    label: str
    start: float
    end: float


@dataclass
class Result:
    """Spans of everything, and when the steps were over."""

    marks: list[float]
    spans: list[Span]
    waited: dict[str, float]  # seconds by thread and kind of wait

    @property
    def step(self) -> float:
        """Seconds of a step once the schedule repeats itself."""
        return self.marks[-1] - self.marks[-2]

    def busy(self, resource: str) -> float:
        """Seconds in which ``resource`` was busy within the last step."""
        start, end = self.marks[-2], self.marks[-1]
        return sum(
            max(0.0, min(span.end, end) - max(span.start, start))
            for span in self.spans
            if span.resource == resource
        )


@dataclass(eq=False)
class _Task:
    resource: str
    label: str
    left: float  # seconds of a kernel, bytes of the rest
    done: Callable[[], None]
    started: float = 0.0
    bandwidth: float = 1.0


@dataclass
class _Thread:
    ops: Sequence[Op]
    at: int = 0
    busy: bool = False
    since: float | None = None  # waits
    waits: str = ""


@dataclass
class _Disk:
    queue: list[tuple[int, int, Op]] = field(default_factory=list)
    busy: bool = False


class Simulation:
    """One replay. Raises RuntimeError where threads wait for each other for ever."""

    def __init__(self, schedule: Schedule, machine: Machine):
        self._machine = machine
        self._threads = {name: _Thread(ops) for name, ops in schedule.threads.items()}
        self._streams: dict[str, deque[Op]] = {}
        self._held: set[str] = set()  # streams whose first entry is running
        self._fired: set[int] = set()  # events, jobs and transfers that have happened
        self._submitted: set[int] = set()
        self._tasks: list[_Task] = []
        self._disk = _Disk()
        self._now = 0.0
        self._result = Result([], [], {})

    def run(self) -> Result:
        while True:
            while self._progress():
                pass
            if not self._tasks:
                stuck = {
                    name: thread.ops[thread.at]
                    for name, thread in self._threads.items()
                    if thread.at < len(thread.ops)
                }
                if stuck:
                    raise RuntimeError(f"the schedule does not end: {stuck}")
                return self._result
            self._advance()

    # ---- what takes no time ----

    def _progress(self) -> bool:
        moved = False
        for name, thread in self._threads.items():
            while (
                thread.at < len(thread.ops)
                and not thread.busy
                and self._do(name, thread, thread.ops[thread.at])
            ):
                if thread.since is not None:
                    key = f"{name} {thread.waits}"
                    self._result.waited[key] = (
                        self._result.waited.get(key, 0.0) + self._now - thread.since
                    )
                    thread.since = None
                thread.at += 1
                moved = True
        for name in list(self._streams):
            while (
                name not in self._held
                and self._streams[name]
                and self._issue(name, self._streams[name][0])
            ):
                moved = True
        return self._next_transfer() or moved

    def _wait(self, thread: _Thread, op: Op, over: bool) -> bool:
        if not over and thread.since is None:
            thread.since, thread.waits = self._now, op.kind
        return over

    def _do(self, name: str, thread: _Thread, op: Op) -> bool:
        if op.kind == "launch":
            self._streams.setdefault(op.stream, deque()).append(op)
        elif op.kind in ("sync", "join", "landed"):
            return self._wait(thread, op, op.event in self._fired)
        elif op.kind == "begin":
            return self._wait(thread, op, op.event in self._submitted)
        elif op.kind == "submit":
            self._submitted.add(op.event)
        elif op.kind == "end":
            self._fired.add(op.event)
        elif op.kind == "mark":
            self._result.marks.append(self._now)
        elif op.kind == "disk":
            self._disk.queue.append((PRIORITIES.index(op.stream), op.event, op))
        elif op.kind == "host":
            thread.busy = True
            self._start(
                HOST, op.label, op.size, self._machine.host, lambda: setattr(thread, "busy", False)
            )
        else:
            raise ValueError(f"a thread cannot do {op.kind!r}")
        return True

    def _issue(self, stream: str, op: Op) -> bool:
        if op.what == "record":
            self._fired.add(op.event)
        elif op.what == "wait":
            if op.event not in self._fired:
                return False
        else:
            self._held.add(stream)

            def done() -> None:
                self._streams[stream].popleft()
                self._held.discard(stream)

            if op.what == "kernel":
                self._start(
                    GPU,
                    op.label,
                    op.flops / self._machine.flops + op.size / self._machine.hbm,
                    1.0,
                    done,
                )
            else:
                resource, bandwidth = (
                    (H2D, self._machine.h2d) if op.what == "h2d" else (D2H, self._machine.d2h)
                )
                self._start(resource, op.label, op.size, bandwidth, done)
            return True
        self._streams[stream].popleft()
        return True

    def _next_transfer(self) -> bool:
        if self._disk.busy or not self._disk.queue:
            return False
        wanted = {
            thread.ops[thread.at].event
            for thread in self._threads.values()
            if thread.since is not None and thread.waits == "landed"
        }
        first = min(self._disk.queue, key=lambda entry: (entry[1] not in wanted, entry[:2]))
        self._disk.queue.remove(first)
        op = first[2]
        self._disk.busy = True

        def done() -> None:
            self._disk.busy = False
            self._fired.add(op.event)

        bandwidth = self._machine.disk_read if op.what == "read" else self._machine.disk_write
        self._start(DISK, f"{op.what} {op.label}", op.size, bandwidth, done)
        return True

    # ---- what does ----

    def _start(
        self, resource: str, label: str, amount: float, bandwidth: float, done: Callable[[], None]
    ) -> None:
        self._tasks.append(_Task(resource, label, amount, done, self._now, bandwidth))

    def _rate(self, task: _Task) -> float:
        if task.resource == GPU:
            return 1.0
        alike = sum(other.resource == task.resource for other in self._tasks)
        bandwidth = task.bandwidth
        if task.resource in (H2D, D2H) and {H2D, D2H} <= {other.resource for other in self._tasks}:
            bandwidth = min(bandwidth, self._machine.both / 2)
        return bandwidth / alike

    def _advance(self) -> None:
        rates = [self._rate(task) for task in self._tasks]
        seconds = min(task.left / rate for task, rate in zip(self._tasks, rates))
        self._now += seconds
        for task, rate in zip(self._tasks, rates):
            task.left -= seconds * rate
        over = [task for task, rate in zip(self._tasks, rates) if task.left <= EPSILON * rate]
        for task in over:
            self._tasks.remove(task)
            self._result.spans.append(Span(task.resource, task.label, task.started, self._now))
            task.done()


def replay(schedule: Schedule, machine: Machine) -> Result:
    """Run ``schedule`` on ``machine``."""
    return Simulation(schedule, machine).run()


def timeline(result: Result, width: int = 100) -> str:
    """The last step as text: a line a resource, a column a hundredth of the step, dark where it
    is busy.
    """
    start, cell = result.marks[-2], result.step / width
    lines = []
    for resource in RESOURCES:
        spans = [span for span in result.spans if span.resource == resource]
        shares = []
        for column in range(width):
            begin, end = start + column * cell, start + (column + 1) * cell
            shares.append(
                sum(max(0.0, min(span.end, end) - max(span.start, begin)) for span in spans) / cell
            )
        if any(shares):
            lines.append(
                f"{resource:5}|"
                + "".join(" ░▒▓█"[min(4, round(4 * share))] for share in shares)
                + "|"
            )
    return "\n".join(lines)
