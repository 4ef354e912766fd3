"""Stand-ins of the modules ``time``, ``threading``, ``queue`` and the like for code that runs in a
simulation.

Modules of the package call them as ``time.monotonic()`` or ``threading.Event()``: these names of a
module are the seam at which the stand-ins replace them. Outside a simulation they do what the
modules do.
"""

from __future__ import annotations

import fcntl
import queue
import random
import secrets
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from tests.protocols.files import LOCKS
from tests.protocols.simulation import START, Task, running


class Times:
    """The clock of the simulation."""

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def monotonic(self) -> float:
        simulation = running()
        return time.monotonic() if simulation is None else simulation.now

    perf_counter = monotonic

    def time(self) -> float:
        simulation = running()
        return time.time() if simulation is None else simulation.now + 1.7e9

    def sleep(self, seconds: float) -> None:
        simulation = running()
        if simulation is None or simulation.current is None:
            time.sleep(seconds)
        else:
            simulation.point("sleep")
            simulation.sleep(seconds)


class Event:
    """``threading.Event``."""

    def __init__(self) -> None:
        self._set = False

    def set(self) -> None:
        self._set = True

    def clear(self) -> None:
        self._set = False

    def is_set(self) -> bool:
        return self._set

    def wait(self, timeout: float | None = None) -> bool:
        simulation = running()
        assert simulation is not None
        return self._set or simulation.wait(self.is_set, timeout, "an event")


class Lock:
    """``threading.Lock`` and ``RLock``."""

    def __init__(self) -> None:
        self._owner: Task | None = None
        self._depth = 0

    def _free(self) -> bool:
        return self._owner is None or self._owner.done or not self._owner.process.alive

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        simulation = running()
        task = None if simulation is None else simulation.current
        if task is None:
            return True
        if self._owner is not task:
            simulation.point("a lock")  # type: ignore[union-attr]
            while not self._free():
                if not blocking:
                    return False
                simulation.wait(self._free, None, "a lock")  # type: ignore[union-attr]
            self._owner, self._depth = task, 0
        self._depth += 1
        return True

    def release(self) -> None:
        self._depth -= 1
        if self._depth <= 0:
            self._owner = None

    def __enter__(self) -> Lock:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Thread:
    """``threading.Thread``: a task of the process that starts it."""

    def __init__(
        self,
        target: Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        name: str = "thread",
        daemon: bool = False,
    ) -> None:
        self._call = lambda: target(*args, **(kwargs or {}))
        self.name, self.daemon = name, daemon
        self.task: Task | None = None

    def start(self) -> None:
        simulation = running()
        assert simulation is not None and simulation.current is not None
        rank = simulation.current.process.rank
        self.task = simulation.spawn(f"{self.name} of {rank}", self._call, daemon=self.daemon)
        self._call = lambda: None

    def is_alive(self) -> bool:
        return self.task is not None and not self.task.done

    def join(self, timeout: float | None = None) -> None:
        simulation = running()
        assert simulation is not None
        simulation.wait(lambda: not self.is_alive(), timeout, f"the end of {self.name}")


class Threads:
    """The module ``threading``."""

    def __getattr__(self, name: str) -> Any:
        simulated = {"Event": Event, "Lock": Lock, "RLock": Lock, "Thread": Thread}
        return simulated[name] if name in simulated and running() else getattr(threading, name)

    def get_ident(self) -> int:
        simulation = running()
        return id(simulation.current if simulation is not None else None)

    def current_thread(self) -> Any:
        simulation = running()
        return simulation.current if simulation is not None else threading.current_thread()


class Queue:
    """``queue.SimpleQueue``."""

    def __init__(self) -> None:
        self._items: deque[Any] = deque()

    def put(self, item: Any) -> None:
        self._items.append(item)

    def get(self) -> Any:
        simulation = running()
        assert simulation is not None
        if not self._items:
            simulation.wait(lambda: bool(self._items), None, "a queue")
        return self._items.popleft()


class Queues:
    """The module ``queue``."""

    def __getattr__(self, name: str) -> Any:
        return Queue if name == "SimpleQueue" and running() else getattr(queue, name)


class SimulatedFuture(Future):  # type: ignore[type-arg]
    """``concurrent.futures.Future``."""

    def result(self, timeout: float | None = None) -> Any:
        simulation = running()
        if not self.done() and simulation is not None and simulation.current is not None:
            simulation.point("a result")
            if not simulation.wait(self.done, timeout, "a result"):
                raise TimeoutError
        return super().result(0)


class Secrets:
    """The module ``secrets``: the same tokens in each run of a schedule."""

    def token_hex(self, size: int = 16) -> str:
        simulation = running()
        if simulation is None:
            return secrets.token_hex(size)
        seed = f"{simulation.now - START:.6f} {simulation.steps}"
        return random.Random(seed).randbytes(size).hex()


STAND_INS = {
    fcntl: LOCKS,
    time: Times(),
    threading: Threads(),
    queue: Queues(),
    secrets: Secrets(),
    Future: SimulatedFuture,
}


@contextmanager
def installed() -> Iterator[None]:
    """Put the stand-ins in the place of what the loaded modules of the package have imported."""
    by_id = {id(real): stand_in for real, stand_in in STAND_INS.items()}
    changed = []
    for name, module in list(sys.modules.items()):
        if name.startswith("hf_zero"):
            for key, value in list(vars(module).items()):
                if id(value) in by_id:
                    setattr(module, key, by_id[id(value)])
                    changed.append((module, key, value))
    try:
        yield
    finally:
        for module, key, value in changed:
            setattr(module, key, value)
