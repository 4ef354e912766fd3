"""Results of :func:`hf_zero.estimate` and :func:`hf_zero.propose`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from hf_zero.config import OffloadOptimizer, OffloadParam
from hf_zero.device.free_memory import Free
from hf_zero.errors import ConfigError
from hf_zero.planning import Fit, Needs
from hf_zero.planning.activation_memory import LengthEstimate


@dataclass(frozen=True)
class Tiers:
    """Bytes of one rank in each tier.

    ``device`` includes gathered units and gradient buffers; ``pinned`` is part of ``ram``.
    """

    device: int
    pinned: int
    ram: int
    disk: int


@dataclass(frozen=True)
class StageEstimate:
    """Bytes of one rank at one stage.

    ``parameters``, ``gradients`` and ``optimizer`` (fp32 master weights and moments) are there all
    the time; they are what they are without offload, and ``tiers`` says where the bytes lie with
    it. The largest unit is whole while it computes (stage 3), and so are its neighbours ahead.
    ``gradient_buffers`` hold gradients on their way between ranks and stay for the next step; over
    gloo with more than two ranks, chunks from all peers add to it. ``communicators``: how many a
    rank takes on a GPU, at most, whose bytes are in none of these. ``pipeline_stage``: of a
    pipeline, the stage that needs most.
    """

    stage: int
    parameters: int
    gradients: int
    optimizer: int
    largest_unit: int
    largest_unit_name: str
    gradient_buffers: int
    tiers: Tiers
    communicators: int
    pipeline_stage: int = 0

    @property
    def state(self) -> int:
        return self.parameters + self.gradients + self.optimizer

    def to_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "state": self.state}


@dataclass(frozen=True)
class MemoryEstimate:
    """Result of :func:`estimate`: the size of the model, and one row per stage.

    ``moments``: numbers the optimizer keeps per parameter. ``tensor``, ``expert``, ``pipeline``:
    numbers of ranks or stages over which layers, experts and the model are spread.
    """

    model: str
    total_parameters: int
    trainable_parameters: int
    units: int
    ranks: int
    replicas: int
    precision: str
    optimizer: str
    moments: int
    stages: tuple[StageEstimate, ...]
    offload_optimizer: OffloadOptimizer = field(default_factory=OffloadOptimizer)
    offload_param: OffloadParam = field(default_factory=OffloadParam)
    tensor: int = 1
    expert: int = 1
    pipeline: int = 1
    lengths: tuple[LengthEstimate, ...] = ()

    def at(self, stage: int) -> StageEstimate:
        for row in self.stages:
            if row.stage == stage:
                return row
        raise ConfigError(
            f"stage {stage!r} was not estimated; estimated were "
            f"{[row.stage for row in self.stages]}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return everything as values for JSON."""
        plain = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}
        offload = {
            name: dataclasses.asdict(plain[name]) for name in ("offload_optimizer", "offload_param")
        }
        stages = [row.to_dict() for row in self.stages]
        lengths = [dataclasses.asdict(row) for row in self.lengths]
        return {**plain, **offload, "stages": stages, "lengths": lengths}


@dataclass(frozen=True)
class Proposal:
    """Result of :func:`propose`: a configuration that fits, None if none does, and all trials.
    ``cut``: code that cuts the model before ``initialize``, "" if it is not cut.
    """

    model: str
    config: dict[str, Any] | None
    fit: Fit
    free: Free
    cut: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return everything as values for JSON."""
        tried = [
            {
                "name": trial.name,
                "fits": trial.verdict.fits,
                "why_not": trial.why,
                **in_places(trial.needs),
            }
            for trial in self.fit.trials
        ]
        return {
            "model": self.model,
            "config": self.config,
            "cut": self.cut,
            "margin": self.fit.margin,
            "free": dataclasses.asdict(self.free),
            "tried": tried,
        }


def in_places(own: Needs) -> dict[str, int]:
    """Return the bytes of one rank in each tier, by the field names of :class:`Tiers`."""
    return {
        "device": own.device_bytes,
        "pinned": own.pinned,
        "ram": own.ram_bytes,
        "disk": own.disk_bytes,
    }
