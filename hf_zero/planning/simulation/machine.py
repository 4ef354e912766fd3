"""A machine, as a simulation sees it: rates of computation and links; and the time that a recorded
step takes on it.

[Note: time]
Computation and messages run beside each other, as on a device with streams of its own for
collectives. Computation follows the order of the host. A message begins when the host has launched
it and its link is free, and takes a latency, and the bytes that a ring sends by the speed of its
link. Computation stops at a wait until its message is over: that time is exposed, as is the part of
a message that does not overlap because processors move its bytes. Between hosts the ranks of a host
share its network: a group with some of them has that part of it.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from hf_zero.errors import ConfigError
from hf_zero.measures.collectives import wire_bytes
from hf_zero.planning.simulation.recording import Group, Message, Recording, Work


@dataclass(frozen=True)
class Machine:
    """Rates of one rank and its links, per second; by default the peaks of a DGX-2, the machine of
    the ZeRO paper.

    flops: operations of matrix products. memory: bytes that other operations read and write.
    node: bytes that a rank sends to others of its host. network: bytes that a host sends to other
    hosts. latency: seconds of a message for each doubling of its ranks. operation: seconds in which
    the host launches an operation. overlap: the share of a message that runs beside computation;
    the rest takes the time of the processor. asynchronous: operations run on a device while the
    host launches the next ones. sources: where values come from, by name; others are the defaults.
    """

    flops: float = 125e12
    memory: float = 900e9
    node: float = 150e9
    network: float = 100e9
    latency: float = 5e-6
    operation: float = 0.0
    ranks_per_host: int = 16
    overlap: float = 1.0
    asynchronous: bool = True
    sources: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("flops", "memory", "node", "network", "ranks_per_host"):
            if not getattr(self, name) > 0:
                raise ConfigError(
                    f"{name} = {getattr(self, name)!r} is no rate of a machine; write a number "
                    "above 0"
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
        return self.latency * math.ceil(math.log2(ranks)) + sent / self.bandwidth(message.group)


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


def seconds(recording: Recording, machine: Machine) -> Seconds:
    """Return the time of ``recording`` on ``machine``, by the note above."""
    now = compute = sent = exposed = 0.0
    free: dict[bool, float] = defaultdict(float)
    ends: dict[Message, float] = {}
    phases: dict[str, float] = defaultdict(float)
    for event in recording.step():
        before = now
        if isinstance(event, Work):
            took = machine.computing(event)
            compute += took
            now += took
        elif isinstance(event, Message):
            link = machine.bandwidth(event.group) == machine.node
            took = machine.sending(event)
            sent += took
            ends[event] = free[link] = max(now, free[link]) + took
            stolen = (1.0 - machine.overlap) * took
            exposed += stolen
            now += stolen
        else:
            end = ends.get(event.message, now)
            exposed += max(0.0, end - now)
            now = max(now, end)
        phases[event.place.phase] += now - before
    last = max([now, *free.values()])
    exposed += last - now
    return Seconds(last, compute, sent, exposed, dict(phases))
