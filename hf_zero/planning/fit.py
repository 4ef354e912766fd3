"""Search for a configuration that fits, from the fastest placement to the slowest.

State on the device is fastest; then the optimizer on the CPU, with as much of it as fits left on
the device; then smaller moments, which need less memory traffic and lose a little precision; then
parameters on the CPU; then files. For a given placement the smaller stage is tried first, since it
communicates less.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hf_zero.config import OffloadOptimizer, OffloadParam
from hf_zero.config.offload import Moments
from hf_zero.device.free_memory import Free
from hf_zero.logging import in_units
from hf_zero.planning.needs import NamedBytes, Needs, needs
from hf_zero.planning.plan import FlatParameters, MemoryPlan
from hf_zero.planning.verdict import ACTIVATIONS, MemoryVerdict, judge

MOMENTS: tuple[Moments, ...] = ("fp32", "bf16", "int8")
STEP = 0.05  # proposed offload ratios are multiples of this


@dataclass(frozen=True)
class ActivationWay:
    """A way of computing activations: ``name`` and configuration ``keys`` of its settings, ``most``
    bytes at the peak of a micro-batch, ``kept`` of them when its forward ends. The default means
    unknown.
    """

    name: str = ""
    keys: Mapping[str, Any] = field(default_factory=dict)
    kept: int = 0
    most: int = 0


@dataclass(frozen=True)
class Trial:
    """One configuration that was tried: its name, its needs, and whether they fit."""

    name: str
    plan: MemoryPlan
    needs: Needs
    verdict: MemoryVerdict
    activations: ActivationWay = ActivationWay()

    @property
    def why(self) -> str:
        """The shortages in words; "" if it fits."""
        return "; ".join(
            f"{row.tier}: {in_units(row.needed)} needed, {in_units(row.free)} free"
            for row in self.verdict.short
        )

    def to_config(self) -> dict[str, Any]:
        """Return the configuration in DeepSpeed's dialect: the stage, the offload sections, and the
        keys that reduce activations.
        """
        zero: dict[str, Any] = {"stage": self.plan.stage}
        for name, section, default in (
            ("offload_optimizer", self.plan.optimizer, OffloadOptimizer()),
            ("offload_param", self.plan.param, OffloadParam()),
        ):
            if not section.on:
                continue
            own = {
                key: value for key, value in vars(section).items() if value != getattr(default, key)
            }
            if "nvme_path" in own:
                own["nvme_path"] = (
                    own["nvme_path"][0] if len(own["nvme_path"]) == 1 else list(own["nvme_path"])
                )
                if section.device != "nvme":
                    del own["nvme_path"]
            if "cores" in own:
                own["cpuadam_cores_perc"] = own.pop("cores")
            zero[name] = own
        return {"zero_optimization": zero, **self.activations.keys}


@dataclass(frozen=True)
class Fit:
    """All trials up to the first that fits, in order.

    ``chosen`` is None if none fits.
    """

    trials: tuple[Trial, ...]
    margin: float

    @property
    def chosen(self) -> Trial | None:
        return self.trials[-1] if self.trials and self.trials[-1].verdict.fits else None


def fit(
    groups: Sequence[FlatParameters],
    plan: MemoryPlan,
    free: Free,
    margin: float = ACTIVATIONS,
    stages: Sequence[int] | None = None,
    activations: Sequence[ActivationWay] = (ActivationWay(),),
) -> Fit:
    """Find the fastest configuration like ``plan`` that fits into ``free`` with ``margin`` of the
    device left for unknown activations.

    Only the stage, placement and moments vary, and ``activations``, the ways of computing them from
    the fastest on. ``stages``: those to try; None: that of ``plan`` and the larger ones. Files are
    tried in the folders listed in ``free``.
    """
    trials: list[Trial] = []
    for name, candidate in _candidates(plan, free, sorted(stages or plan.stages[plan.stage :])):
        for way in activations:
            left = free.with_room(device=-way.most)
            for ratio, tried in _ratios(groups, candidate, left, margin):
                own = _with_activations(needs(groups, tried), way)
                what = ", ".join(filter(None, (name + ratio, way.name)))
                trial = Trial(what, tried, own, judge(own, free, margin), way)
                trials.append(trial)
                if trial.verdict.fits:
                    return Fit(tuple(trials), margin)
    return Fit(tuple(trials), margin)


def _with_activations(own: Needs, way: ActivationWay) -> Needs:
    if not way.most:
        return own
    return replace(own, device=(*own.device, NamedBytes("activations", way.most)))


def _candidates(
    plan: MemoryPlan, free: Free, stages: Sequence[int]
) -> Iterator[tuple[str, MemoryPlan]]:
    folders = tuple(disk.path for disk in free.disks)
    # Without accumulation stage 1 has no advantage over stage 2 when offloading: it keeps whole
    # gradients on the device, and stage 2 sends as much.
    away = [stage for stage in stages if stage >= 2 or 2 not in stages or plan.accumulation > 1]
    kinds = MOMENTS if plan.moments else MOMENTS[:1]
    # If the plan already has small moments, larger ones are not tried.
    if plan.optimizer.on and plan.optimizer.moments in kinds:
        kinds = kinds[kinds.index(plan.optimizer.moments) :]
    own_optimizer, own_param = replace(plan.optimizer, ratio=1.0), plan.param

    def at(stage: int, optimizer: OffloadOptimizer, param: OffloadParam) -> MemoryPlan:
        return replace(plan, stage=stage, optimizer=optimizer, param=param)

    for stage in stages:
        yield f"stage {stage}, all on the device", at(stage, OffloadOptimizer(), OffloadParam())
    for kind in kinds:
        for stage in away:
            yield (
                f"stage {stage}, optimizer on the CPU, {kind} moments",
                at(stage, replace(own_optimizer, device="cpu", moments=kind), OffloadParam()),
            )
    if 3 in stages:
        for kind in kinds:
            optimizer = replace(own_optimizer, device="cpu", moments=kind)
            yield (
                f"stage 3, optimizer and parameters on the CPU, {kind} moments",
                at(3, optimizer, replace(own_param, device="cpu")),
            )
    if not folders:
        return
    for kind in kinds:
        in_files = replace(own_optimizer, device="nvme", nvme_path=folders, moments=kind)
        for stage in away:
            yield (
                f"stage {stage}, optimizer in files, {kind} moments",
                at(stage, in_files, OffloadParam()),
            )
        if 3 in stages:
            on_cpu, parameters = (
                replace(own_param, device="cpu"),
                replace(own_param, device="nvme", nvme_path=folders),
            )
            yield (
                f"stage 3, optimizer in files, parameters on the CPU, {kind} moments",
                at(3, in_files, on_cpu),
            )
            yield (
                f"stage 3, optimizer and parameters in files, {kind} moments",
                at(3, in_files, parameters),
            )
            yield (
                f"stage 3, optimizer and parameters in files alone, {kind} moments",
                at(3, in_files, replace(parameters, max_in_cpu=0)),
            )


def _ratios(
    groups: Sequence[FlatParameters], plan: MemoryPlan, free: Free, margin: float
) -> Iterator[tuple[str, MemoryPlan]]:
    """Yield ``plan`` with the optimizer fully offloaded (ratio "auto", which training then tunes),
    and with only as much offloaded as does not fit on the device.
    """
    if not plan.optimizer.on or free.host_device:
        yield "", plan
        return
    whole = judge(needs(groups, plan), free, margin)
    yield ", ratio auto", replace(plan, optimizer=replace(plan.optimizer, ratio="auto"))
    if any(row.tier == "device" for row in whole.short):
        return
    least = _least_ratio(groups, plan, free, margin)
    if least < 1.0:
        yield f", ratio {least:g}", replace(plan, optimizer=replace(plan.optimizer, ratio=least))


def _least_ratio(
    groups: Sequence[FlatParameters], plan: MemoryPlan, free: Free, margin: float
) -> float:
    """Return the smallest offload ratio, a multiple of STEP, with which the device has enough room.
    Device bytes fall as the ratio grows, so this is a binary search.
    """
    room = free.device * (1 - margin)
    low, high = 1, math.ceil(1 / STEP)
    while low < high:
        middle = (low + high) // 2
        tried = replace(plan, optimizer=replace(plan.optimizer, ratio=middle * STEP))
        low, high = (
            (low, middle) if needs(groups, tried).device_bytes <= room else (middle + 1, high)
        )
    return round(low * STEP, 2)
