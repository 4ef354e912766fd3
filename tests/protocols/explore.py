"""Schedules of a protocol: the default one, those that deviate from it once, and random ones; a
failing one is shrunk and told in full.
"""

from __future__ import annotations

import gc
import inspect
import itertools
import os
import random
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.protocols.simulation import Replay, Schedule, Simulation, entered

# what a protocol returns: its judge, which says what is wrong at the end, or ""
Judge = Callable[[str], str]
TOLD = 60  # lines of a trace
RATES = (0.0, 0.01, 0.05)  # of delays and deaths
RATES_AT = (0.1, 0.3, 0.5)  # at certain operations alone
STICKS = (0.0, 0.5, 0.9)  # probability that a task goes on
STICKS_AT = (0.7, 0.9, 1.0)


class Walk:
    """A random order; ``stick``: the probability that a task goes on, ``rate``: that of a fault."""

    def __init__(self, seed: int, stick: float, rate: float) -> None:
        self._random, self._stick, self._rate = random.Random(seed), stick, rate
        self._draw = 0.0

    def deviates(self) -> bool:
        self._draw = self._random.random()
        return self._draw < self._rate or self._draw > self._stick

    def choose(self, runs: int, faults: int) -> int:
        if faults and self._draw < self._rate:
            return runs + int(self._random.random() * faults)
        return int(self._random.random() * runs) if self._draw > self._stick else 0


class Few:
    """A schedule that deviates from the default at ``count`` of the first ``length`` decisions."""

    def __init__(self, seed: int, count: int, length: int) -> None:
        self._random, self._at = random.Random(seed), -1
        self._places = {self._random.randrange(max(1, length)) for _ in range(count)}

    def deviates(self) -> bool:
        self._at += 1
        return self._at in self._places

    def choose(self, runs: int, faults: int) -> int:
        return 1 + self._random.randrange(runs + faults - 1) if runs + faults > 1 else 0


@dataclass(frozen=True)
class Failure:
    """A schedule, as its ``choices``, that ends in the fault ``text``."""

    text: str
    choices: dict[int, int]
    schedules: int = 0  # until it was found

    @property
    def kind(self) -> str:
        return re.sub(r"[\d.]+", "#", self.text)[:60]


class Explorer:
    """Runs of ``protocol``, a function that spawns the tasks of a simulation and returns their
    judge.
    """

    def __init__(self, protocol: Callable[[Simulation], Judge], **settings: Any) -> None:
        self.protocol, self.settings = protocol, settings
        self.runs = 0

    def run(
        self, schedule: Schedule, traced: bool = False, measured: bool = False
    ) -> tuple[str, Simulation]:
        """Return what is wrong at the end of one schedule, or "", and its simulation."""
        self.runs += 1
        simulation = Simulation(schedule, **self.settings)
        simulation.trace = [] if traced else None
        simulation.widths = {} if measured else None
        with entered(simulation):
            judge = self.protocol(simulation)
            return judge(simulation.run()), simulation

    def search(self, schedules: int, seed: int = 0) -> Failure | None:
        """Return the first failure of ``schedules``, shrunk; None if all end well."""
        for made in itertools.islice(self._schedules(schedules, seed), schedules):
            text, simulation = self.run(made)
            if self.runs % 200 == 0:
                gc.collect()
            if self.runs % 10_000 == 0:
                print(f"{self.runs} of {schedules} schedules end well", file=sys.stderr, flush=True)
            if text:
                found = self.runs
                return self.shrink(Failure(text, simulation.taken, found))
        return None

    def _schedules(self, count: int, seed: int) -> Iterator[Schedule]:
        yield Replay()
        _, first = self.run(Replay(), measured=True)
        widths = first.widths or {}
        singles = [(at, choice) for at, width in widths.items() for choice in range(1, width)]
        random.Random(seed).shuffle(singles)
        for at, choice in singles[: count // 3]:
            yield Replay({at: choice})
        certain = bool(self.settings.get("at"))
        rates, sticks = (RATES_AT, STICKS_AT) if certain else (RATES, STICKS)
        for number in itertools.count(seed * 1_000_003):
            if number % 2 and not certain:
                yield Few(number, 2 + number // 2 % 2, first.decisions)
            else:
                yield Walk(number, sticks[number // 2 % 3], rates[number // 6 % 3])

    def shrink(self, failure: Failure) -> Failure:
        """Drop choices while the run fails in the same way."""
        choices, changed = dict(failure.choices), True
        size = max(1, len(choices) // 2)
        while size and len(choices) > 1:
            changed = False
            places = sorted(choices)
            for start in range(0, len(places), size):
                dropped = set(places[start : start + size])
                fewer = {at: choice for at, choice in choices.items() if at not in dropped}
                text, simulation = self.run(Replay(fewer))
                if text and Failure(text, {}).kind == failure.kind:
                    choices, changed = simulation.taken, True
                    break
            if not changed:
                size //= 2
            size = min(size, max(1, len(choices) // 2)) if size else 0
        text, _ = self.run(Replay(choices))
        return Failure(text, choices, failure.schedules)

    def told(self, failure: Failure) -> str:
        """Return the failure with the operations of its schedule, for a reader."""
        _, simulation = self.run(Replay(failure.choices), traced=True)
        lines = simulation.trace or []
        return "\n".join(
            [
                f"{failure.text}",
                f"found by schedule {failure.schedules}; replay it with {failure.choices}",
                *(["..."] if len(lines) > TOLD else []),
                *lines[-TOLD:],
            ]
        )


def explore(
    protocol: Callable[[Simulation], Judge], schedules: int, seed: int = 0, **settings: Any
) -> None:
    """Run ``schedules`` of ``protocol``; raise AssertionError with the first that fails.
    ``HF_ZERO_REPLAY`` in the environment, choices as a failure tells them, replays one.
    """
    explorer = Explorer(protocol, **settings)
    replay = os.environ.get("HF_ZERO_REPLAY")
    if replay:
        choices = {int(at): int(choice) for at, choice in re.findall(r"(\d+): *(\d+)", replay)}
        text, _ = explorer.run(Replay(choices))
        assert not text, explorer.told(Failure(text, choices))
        return
    failure = explorer.search(schedules, seed)
    assert failure is None, explorer.told(failure)


def find(protocol: Callable[[Simulation], Judge], schedules: int, **settings: Any) -> Failure:
    """Return the failure that ``schedules`` of a protocol with a fault find."""
    failure = Explorer(protocol, **settings).search(schedules)
    assert failure is not None, f"{schedules} schedules of a protocol with a fault end well"
    return failure


def seed_fault(patch: pytest.MonkeyPatch, owner: Any, name: str, *edits: tuple[str, str]) -> None:
    """Replace the function ``name`` of ``owner``, a module or a class, by one with ``edits``: pairs
    of a text that occurs in its source and the text in its place.
    """
    function = getattr(owner, name)
    source = textwrap.dedent(inspect.getsource(function))
    for text, other in edits:
        assert source.count(text) == 1, f"{name} has changed: seed its fault anew"
        source = source.replace(text, other)
    made: dict[str, Any] = {}
    names = vars(sys.modules[function.__module__])
    exec(compile("from __future__ import annotations\n" + source, name, "exec"), names, made)
    patch.setattr(owner, name, made[name])
