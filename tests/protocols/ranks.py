"""What the ranks of several protocols share: their store, their collectives, and what is allowed at
the end of a schedule.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from hf_zero.errors import HfZeroError
from tests.protocols.simulation import START, Process, Simulation
from tests.protocols.store import Client, PrefixStore, Server

LOST = "a connection was lost"


def named(error: BaseException) -> set[int]:
    """Return the ranks that ``error`` names."""
    lists = re.findall(r"ranks? \[?(\d[\d, ]*)", str(error))
    return {int(number) for each in lists for number in re.findall(r"\d+", each)}


class CollectiveFailed(HfZeroError):
    """A collective of the simulated backend that some rank never joins."""


class World:
    """``size`` ranks of one attempt, on a store that the launcher hosts.

    call(world, rank): what each rank runs. timeout: of each wait, in seconds. name: of the tasks,
    before the number of their rank.
    """

    def __init__(
        self,
        simulation: Simulation,
        size: int,
        call: Callable[[World, int], None],
        timeout: float,
        hosts: Sequence[str] = (),
        name: str = "rank",
    ) -> None:
        self.simulation, self.size, self.timeout = simulation, size, timeout
        self.server = Server(simulation)
        self.processes = [Process(rank, (hosts or ["host"] * size)[rank]) for rank in range(size)]
        self.results: dict[int, Any] = {}
        self.kept: list[Any] = []  # objects that live as long as the run
        self.fault = ""  # found by a rank
        self._joined: dict[Any, dict[int, Any]] = {}
        self._times: dict[tuple[int, str], int] = {}
        for rank, process in enumerate(self.processes):
            simulation.spawn(f"{name} {rank}", partial(call, self, rank), process)

    def store(self, prefix: str = "engine") -> PrefixStore:
        return PrefixStore(prefix, Client(self.server))

    def collective(
        self,
        name: str,
        rank: int,
        what: Any,
        aborted: Callable[[], bool] = lambda: False,
        said: str = "",
    ) -> list[Any]:
        """Return what all ranks give to their next collective on the communicator ``name``; what
        those have given that have come, if it is ``aborted``. ``said``: the collective in messages,
        by default ``what``. Raises CollectiveFailed if one has died or does not come.
        """
        number = self._times[rank, name] = self._times.get((rank, name), 0) + 1
        joined = self._joined.setdefault((name, number), {})
        joined[rank] = what

        def over() -> bool:
            return (
                len(joined) == self.size
                or aborted()
                or any(
                    not process.alive for process in self.processes if process.rank not in joined
                )
            )

        said = f"{said or what} ({name})"
        self.simulation.point(said)
        self.simulation.wait(over, self.timeout, said)
        if len(joined) < self.size and not aborted():
            late = [each for each in range(self.size) if each not in joined]
            raise CollectiveFailed(f"{LOST}: ranks {late} have not come to {said}")
        return [joined[each] for each in sorted(joined)]

    def errors(self) -> dict[str, BaseException]:
        ended = self.simulation.ended
        return {task.name: task.error for task in ended if task.error is not None}

    def judge(
        self,
        end: str,
        result: Callable[[], str] = lambda: "",
        grace: float = 10.0,
        ends_well: bool = True,
    ) -> str:
        """Return what is wrong at the end: a wait without an end, an error that is none of hf-zero
        or names no other rank, an error of ranks that should end well, as all live and none was
        held up; then ``result()``.
        """
        simulation = self.simulation
        if end or self.fault:
            return end or self.fault
        errors = self.errors()
        for name, error in errors.items():
            if not isinstance(error, (HfZeroError, KeyboardInterrupt)):
                return f"{name} raises {error!r}"
            if isinstance(error, HfZeroError) and named(error) <= {int(name.split()[-1])}:
                return f"the error of {name} names no rank: {error}"
        interrupted = any(isinstance(error, KeyboardInterrupt) for error in errors.values())
        if ends_well and errors and simulation.untroubled(self.timeout / 2) and not interrupted:
            return f"an error though nothing has happened: {errors}"
        if simulation.now - START > 3 * self.timeout + simulation.delayed + grace:
            return f"the ranks end after {simulation.now - START:.0f} s"
        return result()


def run_attempts(
    simulation: Simulation, attempts: int, start: Callable[[int], World], ended: Callable[[], None]
) -> None:
    """Start all ranks as an agent does, again once one of them was killed or all have ended, when
    it ends those that are left. ``ended()``: called after each attempt, outside of the simulation.
    """

    def over(world: World) -> bool:
        alive = [process.alive for process in world.processes]
        return not any(alive) or any(process in world.processes for process in simulation.killed)

    def run() -> None:
        for attempt in range(attempts):
            world = start(attempt)
            simulation.wait(partial(over, world), None, "the end of a rank")
            simulation.sleep(0.1)
            for process in world.processes:
                simulation.exit(process)
            simulation.point("all ranks have ended")
            current, simulation.current = simulation.current, None
            ended()
            simulation.current = current

    simulation.spawn("agent", run, Process(-1, mortal=False))
