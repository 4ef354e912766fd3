"""The figures of a simulated step: its collectives, the bytes of each phase, and the stages of a
pipeline.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from hf_zero.config import OffloadOptimizer, OffloadParam
from hf_zero.measures.collectives import wire_bytes
from hf_zero.planning.needs import needs, state_bytes
from hf_zero.planning.simulation.machine import Machine, Seconds
from hf_zero.planning.simulation.recording import Arrival, Message, Recording
from hf_zero.planning.simulation.store_load import StoreLoad
from hf_zero.zero.layout.engine_plan import EnginePlan
from hf_zero.zero.layout.planner import replan


@dataclass(frozen=True)
class CollectiveCount:
    """The collectives of a step of one kind: ``operation`` on ``unit`` over ``group`` in ``phase``.

    ranks: of the group. nbytes: of their buffers. wire_bytes: sent by this rank.
    """

    phase: str
    operation: str
    unit: str
    group: str
    ranks: int
    count: int
    nbytes: int
    wire_bytes: int


@dataclass(frozen=True)
class PhaseBytes:
    """The most bytes of the device in ``phase``, and where."""

    phase: str
    device: int
    at: str


@dataclass(frozen=True)
class StageFigures:
    """One stage of a pipeline, by a rank of it. parameters: that this rank holds. peak_bytes: as in
    :class:`Simulation`. wire_bytes: sent by this rank.
    """

    stage: int
    rank: int
    parameters: int
    peak_bytes: dict[str, int]
    wire_bytes: int
    seconds: Seconds


@dataclass(frozen=True)
class Simulation:
    """A step of one rank. Made by :func:`simulate`.

    model_state_bytes: the model states of the ZeRO paper, parameters, gradients and optimizer state
    without offload, with gradients in the precision of the parameters. state: the bytes that the
    engine keeps by kind, also without offload; its sums of gradients have 32 bits by default.
    peak_bytes: the most in each tier, "device", "ram" (of which "pinned") and "disk"; peak_at: the
    place of the device's. phases: the device's, phase by phase. flops: of the matrix products.
    seconds: the time on ``machine``. stages: the stages of a pipeline, of which the rank has one;
    () without a pipeline.
    """

    model: str
    parameters: int
    ranks: int
    rank: int
    stage: int
    precision: str
    optimizer: str
    micro_batch: int
    micro_batches: int
    sequence_length: int
    model_state_bytes: int
    state: dict[str, int]
    peak_bytes: dict[str, int]
    peak_at: str
    phases: tuple[PhaseBytes, ...]
    collectives: tuple[CollectiveCount, ...]
    flops: float
    seconds: Seconds
    machine: Machine
    store: StoreLoad
    stages: tuple[StageFigures, ...] = ()

    @property
    def tokens_per_second(self) -> float:
        """Tokens of this rank's micro-batches by the seconds of a step."""
        return self.micro_batch * self.micro_batches * self.sequence_length / self.seconds.step

    def to_dict(self) -> dict[str, object]:
        """Return all of it as values for JSON."""
        return dataclasses.asdict(self) | {"store": self.store.to_dict()}


def figures_of(planned: EnginePlan, recording: Recording, spent: Seconds) -> StageFigures:
    """Return the figures of the rank of ``planned``, whose step takes ``spent``."""
    beside = needs(planned)
    return StageFigures(
        planned.dims.coordinate(planned.rank, "pipeline"),
        planned.rank,
        sum(slot.numel for flat in planned.flats for slot in flat.spec.layout.slots),
        {
            "device": max(phase.device for phase in phase_bytes(planned, recording)),
            "ram": beside.ram_bytes,
            "pinned": beside.pinned,
            "disk": beside.disk_bytes,
        },
        sum(row.wire_bytes for row in collective_counts(recording)),
        spent,
    )


def phase_bytes(planned: EnginePlan, recording: Recording) -> tuple[PhaseBytes, ...]:
    """Return the most bytes of each phase, with the state at rest."""

    def at_rest(phase: str) -> int:
        # a window's first forward finds no gradients
        first = phase == "forward" and recording.micro_batches == 1
        by_tier = state_bytes(planned, between_steps=first).items()
        return sum(n for (_, tier), n in by_tier if tier == "device")

    return tuple(
        PhaseBytes(phase, at_rest(phase) + most, str(peak_at))
        for phase, (most, peak_at) in recording.peaks.items()
    )


def model_states(planned: EnginePlan, narrow: bool = False) -> dict[str, int]:
    """Return the bytes of state by kind, without offload. ``narrow``: with gradients summed in the
    dtype of their parameters.
    """
    without = planned.settings.placed(planned.settings.stage, OffloadOptimizer(), OffloadParam())
    plain = planned if without == planned.settings else replan(planned, without)
    if narrow:
        flats = (dataclasses.replace(flat, gradient_dtype=flat.spec.dtype) for flat in plain.flats)
        plain = dataclasses.replace(plain, flats=tuple(flats))
    by_kind = dict.fromkeys(("parameters", "gradients", "optimizer"), 0)
    for (kind, _), nbytes in state_bytes(plain).items():
        by_kind[kind] += nbytes
    return by_kind


def collective_counts(recording: Recording) -> tuple[CollectiveCount, ...]:
    """Return the messages of a step, by phase, operation, unit and group, in order."""
    by_key: dict[tuple[str, str, str, str], list[Message]] = {}
    for event in recording.step():
        if isinstance(event, Message) and not isinstance(event, Arrival):
            unit = event.unit_name or "(root)"
            key = event.place.phase, event.operation, unit, event.group.name
            by_key.setdefault(key, []).append(event)
    return tuple(
        CollectiveCount(
            *key,
            len(sent[0].group.ranks),
            len(sent),
            sum(one.nbytes for one in sent),
            round(sum(wire_bytes(one.operation, one.nbytes, len(one.group.ranks)) for one in sent)),
        )
        for key, sent in by_key.items()
    )
