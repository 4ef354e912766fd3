"""A machine, as a simulation sees it: rates of computation and links; and the time that a recorded
step takes on it.

[Note: time]
Computation and messages run beside each other, as on a device with streams of its own for
collectives. Computation follows the order of the host. A message begins when the host has launched
it and its link is free, and takes a latency, and the bytes that a ring sends by the speed of its
link. Computation stops at a wait until its message is over: that time is exposed, as is the part of
a message that does not overlap because processors move its bytes. Between hosts the ranks of a host
share its network: a group with some of them has that part of it.

The stages of a pipeline run beside each other. A message from one to the next, or one over several
stages, begins when the last of its ranks has launched it; an arrival takes the sender's link.

A device leaves the gathers of updated parameters to the next step: a step begins with those of the
one before, and each unit is used once its own is over.

Offloaded state is updated on the host, unit by unit, while the next step runs: a step begins with
the updates of the one before, and each unit is used once its own is over. Copies between device and
host follow each other.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from hf_zero.errors import ConfigError
from hf_zero.measures.collectives import MESSAGES, TO_ONE_RANK, wire_bytes
from hf_zero.planning.simulation.recording import (
    FORWARD,
    STEP,
    Arrival,
    Group,
    Message,
    Recording,
    Work,
)
from hf_zero.zero.layout.engine_plan import EnginePlan

# parts of the names of messages: of gathers of updated parameters, and of flat buffers that stay
# whole at stage 3
UPDATED, PERSISTENT = "updated ", "|whole"
RATES = (
    "flops", "memory", "node", "network", "ranks_per_host", "host_link", "host_memory", "disk",
    "store",
)  # fmt: skip


@dataclass(frozen=True)
class Machine:
    """Rates of one rank and its links, per second; by default the peaks of a DGX-2, the machine of
    the ZeRO paper.

    flops: operations of matrix products. memory: bytes that other operations read and write.
    node: bytes that a rank sends to others of its host. network: bytes that a host sends to other
    hosts. latency: seconds of a message for each doubling of its ranks. operation: seconds in which
    the host launches an operation. host_link: bytes between a rank's device and its host's memory.
    host_memory, disk: bytes that the processors of a host read and write of its memory, and of its
    disks, for all its ranks. overlap: the share of a message that runs beside computation;
    the rest takes the time of the processor. first_write: seconds of a byte that a gather writes to
    memory which was released before. asynchronous: operations run on a device while the
    host launches the next ones. store: requests that the job's store answers, None if unknown.
    sources: where values come from, by name; others are the defaults.
    """

    flops: float = 125e12
    memory: float = 900e9
    node: float = 150e9
    network: float = 100e9
    latency: float = 5e-6
    operation: float = 0.0
    ranks_per_host: int = 16
    host_link: float = 8e9
    host_memory: float = 256e9
    disk: float = 10e9
    overlap: float = 1.0
    first_write: float = 0.0
    asynchronous: bool = True
    store: float | None = None
    sources: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in RATES:
            value = getattr(self, name)
            unknown = value is None and name == "store"
            if not unknown and not (isinstance(value, (int, float)) and 0 < value < math.inf):
                raise ConfigError(
                    f"{name} = {value!r} is no rate of a machine; write a finite number above 0"
                )
        for name in ("latency", "operation", "first_write"):
            value = getattr(self, name)
            if not (isinstance(value, (int, float)) and 0 <= value < math.inf):
                raise ConfigError(
                    f"{name} = {value!r} is no time of a machine; write finite seconds from 0"
                )
        if not (isinstance(self.overlap, (int, float)) and 0 <= self.overlap <= 1):
            raise ConfigError(
                f"overlap = {self.overlap!r} is no share of a message; write a number from 0 to 1"
            )

    def bandwidth(self, group: Group) -> float:
        """Return the bytes a second that a rank of ``group`` sends in a collective."""
        hosts = {rank // self.ranks_per_host for rank in group.ranks}
        if len(hosts) == 1:
            return self.node
        share = len(group.ranks) / len(hosts) / self.ranks_per_host
        return min(self.node, self.network * share)

    def computing(self, work: Work) -> float:
        """Return the seconds of ``work``."""
        busy = work.flops / self.flops + work.nbytes / self.memory
        launching = work.operations * self.operation
        return max(busy, launching) if self.asynchronous else busy + launching

    def replaced(self, values: dict[str, Any], source: str) -> Machine:
        """Return this machine with ``values``, which come from ``source``."""
        sources = self.sources | dict.fromkeys(values, source)
        return dataclasses.replace(self, **values, sources=sources)

    def sending(self, message: Message) -> float:
        """Return the seconds of ``message`` on a free link."""
        ranks = len(message.group.ranks)
        sent = wire_bytes(message.operation, message.nbytes, ranks)
        hops = 1 if message.operation in TO_ONE_RANK else math.ceil(math.log2(ranks))
        return self.latency * hops + sent / self.bandwidth(message.group)


@dataclass(frozen=True)
class Seconds:
    """Seconds of one step: ``step`` = ``compute`` + ``exposed``. ``messages``: those of all
    messages one after the other; ``exposed``: the part of them that computation waits for;
    ``phases``: those of each phase.
    """

    step: float
    compute: float
    messages: float
    exposed: float
    phases: dict[str, float]


@dataclass(frozen=True)
class OffloadTimes:
    """Seconds that offload takes for each unit, by name. update: of its state, on the host, with
    the way of its parameters to the device. gradient: the way of its gradient to the host. fetch:
    the way of its offloaded shard to the device, for a gather.
    """

    update: Mapping[str, float] = field(default_factory=dict)
    gradient: Mapping[str, float] = field(default_factory=dict)
    fetch: Mapping[str, float] = field(default_factory=dict)


def offload_times(plan: EnginePlan, machine: Machine) -> OffloadTimes:
    """Return the transfers of the offload of ``plan`` on ``machine``."""
    share = 1.0 / min(machine.ranks_per_host, plan.dims.world)
    rates = {"ram": machine.host_memory * share, "disk": machine.disk * share}
    update, gradient, fetch = (defaultdict[str, float](float) for _ in range(3))
    for flat in plan.flats:
        name, away = flat.unit.name, flat.shard_tier != "device"
        shard = flat.spec.owned_numel * flat.spec.dtype.itemsize
        if away:
            fetch[name] += shard / machine.host_link
            fetch[name] += shard / rates["disk"] if flat.shard_tier == "disk" else 0.0
        if flat.sub_groups is None:
            continue
        for tier, nbytes in plan.optimizer_bytes(flat).items():
            update[name] += 2 * nbytes / rates[tier] if tier in rates else 0.0
        update[name] += 0.0 if away else shard / machine.host_link
        gradient[name] += flat.gradient_bytes()["ram"] / machine.host_link
    return OffloadTimes(update, gradient, fetch)


_Key = tuple[str, tuple[int, ...], int]  # operation, ranks, and the number among those like it


class _Meetings:
    """The messages over several of ``ranks``, those that are simulated."""

    def __init__(self, ranks: Collection[int]):
        self._ranks = frozenset(ranks)
        self._ready: dict[_Key, list[tuple[float, dict[str, float], str]]] = {}
        self._launched: Counter[tuple[int, str, tuple[int, ...]]] = Counter()
        self.ends: dict[_Key, float] = {}

    def key(self, rank: int, message: Message) -> _Key:
        """Return the identifier of a message that ``rank`` launches, the same on its other ranks,
        which launch those of a group in the same order.
        """
        kind = message.operation, message.group.ranks
        number = self._launched[rank, *kind]
        self._launched[rank, *kind] += 1
        return *kind, number

    def alone(self, message: Message) -> bool:
        """Return whether one rank alone of those that are simulated launches ``message``."""
        return len(self._ranks.intersection(message.group.ranks)) == 1

    def join(
        self, key: _Key, begins: float, took: float, links: dict[str, float], link: str
    ) -> None:
        """Have a rank join a message that it could begin at ``begins``. ``links``: when each link
        of the rank is free; the message is busy on ``link``, none if that is "".
        """
        arrivals = self._ready.setdefault(key, [])
        arrivals.append((begins, links, link))
        if len(arrivals) >= len(self._ranks.intersection(key[1])):
            end = self.ends[key] = took + max(ready for ready, _, _ in self._ready.pop(key))
            for _, free, name in arrivals:
                if name:
                    free[name] = max(free[name], end)


class _Timeline:
    """The time of one step of one rank, event by event."""

    def __init__(self, machine: Machine, away: OffloadTimes, rank: int, meetings: _Meetings):
        self._machine, self._away = machine, away
        self._rank, self._meetings = rank, meetings
        self.now = self.compute = self.sent = self.exposed = 0.0
        self._free: dict[str, float] = defaultdict(float)  # when each link is free
        self._keys: dict[Message, _Key] = {}
        # when the update of each unit by the step before is over, which began with this one
        self._updated: dict[str, float] = {}
        over = 0.0
        for unit, took in away.update.items():
            over += took
            self._updated[unit] = over
        self._unit_of: dict[str, str] = {}
        self._phases: dict[str, float] = defaultdict(float)

    @property
    def seconds(self) -> Seconds:
        return Seconds(self.now, self.compute, self.sent, self.exposed, dict(self._phases))

    def run(self, recording: Recording) -> Iterator[None]:
        """Run a step; yield where it waits for a message that other ranks have yet to launch."""
        phase = FORWARD
        overlapped = self._gather_updated(recording) if self._machine.asynchronous else ()
        for event in recording.step():
            if not isinstance(event, Work) and getattr(event, "message", event) in overlapped:
                continue
            before, phase = self.now, event.place.phase
            if isinstance(event, Work):
                self._work(event)
            elif isinstance(event, Message):
                self._launch(event)
            else:
                key = self._keys.get(event.message)
                while key is not None and key not in self._meetings.ends:
                    yield
                self._end_of(event.message, key)
            self._phases[phase] += self.now - before
        before = self.now
        self._wait(max([self.now, *self._free.values(), *self._updated.values()]))
        self._phases[phase] += self.now - before

    def _gather_updated(self, recording: Recording) -> frozenset[Message]:
        """Begin with the gathers of parameters that the step before has updated, and return those
        of ``recording``, which belong to the next step.
        """
        gathers = [
            event
            for event in recording.events
            if isinstance(event, Message)
            and event.place.phase == STEP
            and event.unit.startswith(UPDATED)
            and PERSISTENT not in event.unit
            and self._meetings.alone(event)
        ]
        for message in gathers:
            self._launch(message)
            unit = message.unit_name.removeprefix(UPDATED)
            self._updated[unit] = self._meetings.ends[self._keys[message]]
        self._phases[FORWARD] += self.now
        return frozenset(gathers)

    def _work(self, work: Work) -> None:
        if self._updated and work.place.phase == FORWARD:
            self._wait(self._updated.get(self._unit(work.place.block), 0.0))
        took = self._machine.computing(work)
        self.compute += took
        self.now += took

    def _launch(self, message: Message) -> None:
        unit = message.unit_name
        link = "node" if self._machine.bandwidth(message.group) == self._machine.node else "network"
        arrives = isinstance(message, Arrival)
        begins = self.now if arrives else max(self.now, self._free[link])
        if message.operation == "all_gather":
            begins = max(begins, self._updated.get(unit, 0.0))
            if unit in self._away.fetch:
                begins = max(begins, self._copy(self._away.fetch[unit], begins))
        sending = self._machine.sending(message)
        writing = message.anew * self._machine.first_write  # time of the processor
        took = sending + writing
        self.sent += 0.0 if arrives else took
        key = self._keys[message] = self._meetings.key(self._rank, message)
        self._meetings.join(key, begins, took, self._free, "" if arrives else link)
        stolen = (1.0 - self._machine.overlap) * sending + writing
        self._wait(self.now + stolen)

    def _end_of(self, message: Message, key: _Key | None) -> None:
        self._wait(self.now if key is None else self._meetings.ends[key])
        if message.operation not in ("all_gather", *MESSAGES):
            unit = message.unit_name
            self._copy(self._away.gradient.get(unit, 0.0), self.now)

    def _copy(self, took: float, after: float) -> float:
        """Return when a copy between device and host is over."""
        self._free["host"] = max(self._free["host"], after) + took
        return self._free["host"]

    def _wait(self, until: float) -> None:
        self.exposed += max(0.0, until - self.now)
        self.now = max(self.now, until)

    def _unit(self, block: str) -> str:
        """Return the name of the unit of ``block``, a module within it."""
        if block not in self._unit_of:
            inside = (unit for unit in self._updated if f"{block}.".startswith(f"{unit}."))
            self._unit_of[block] = max(inside, key=len, default="")
        return self._unit_of[block]


def seconds_of_stages(
    recordings: Mapping[int, Recording], machine: Machine, away: Mapping[int, OffloadTimes]
) -> dict[int, Seconds]:
    """Return the time of the recordings of ranks that wait for each other, by rank. ``away``:
    transfers of the offload of each. Raises ConfigError if one waits for a message that another
    does not launch.
    """
    meetings = _Meetings(recordings)
    lines = {rank: _Timeline(machine, away[rank], rank, meetings) for rank in recordings}
    running = {rank: line.run(recordings[rank]) for rank, line in lines.items()}
    while running:
        ended = len(meetings.ends)
        going = {r: steps for r, steps in running.items() if next(steps, steps) is None}
        if len(going) == len(running) and len(meetings.ends) == ended:
            raise ConfigError(
                f"the simulated ranks {', '.join(map(str, going))} wait for each other: one waits "
                "for a message that another does not launch; simulate a model whose stages pass "
                "on their outputs alike"
            )
        running = going
    return {rank: line.seconds for rank, line in lines.items()}
