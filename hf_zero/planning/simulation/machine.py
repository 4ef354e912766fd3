"""A machine, as a simulation sees it: rates of computation and links; and the time that a recorded
step takes on it.

[Note: time]
Computation and messages run beside each other, as on a device with streams of its own for
collectives. Computation follows the order of the host. A message begins when the host has launched
it and its link is free, and takes the bytes that a ring sends by the speed of its link, and a
latency. Computation stops at a wait until its message is over: that time is exposed. Between hosts
the ranks of a host share its network: a group with some of them has that part of it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field

from hf_zero.errors import ConfigError
from hf_zero.measures.collectives import wire_bytes
from hf_zero.planning.simulation.recording import Group, Message, Recording, Work

ASSUMED = "assumed: peaks of a DGX-2, the machine of the ZeRO paper"


@dataclass(frozen=True)
class Machine:
    """Rates of one rank and its links, per second.

    flops: operations of matrix products. memory: bytes that other operations read and write.
    node: bytes that a rank sends to others of its host. network: bytes that a host sends to other
    hosts. latency: seconds of a message for each doubling of its ranks. operation: seconds that an
    operation takes at least. sources: where a value comes from, by name; those that are missing are
    assumed.
    """

    flops: float = 125e12
    memory: float = 900e9
    node: float = 150e9
    network: float = 100e9
    latency: float = 5e-6
    operation: float = 0.0
    ranks_per_host: int = 16
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
        return max(busy, work.operations * self.operation)

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
        else:
            end = ends.get(event.message, now)
            exposed += max(0.0, end - now)
            now = max(now, end)
        phases[event.place.phase] += now - before
    last = max([now, *free.values()])
    exposed += last - now
    return Seconds(last, compute, sent, exposed, dict(phases))
