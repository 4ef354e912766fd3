"""A check that the bytes of an engine fit into free memory, and the search for a configuration
that fits, from the fastest placement to the slowest.

The verdict is pure arithmetic, so that ranks that have agreed on the free bytes reach the same one.
In the search, state on the device is fastest, then, for a step of one micro-batch without clipping,
with updates in the backward; then the optimizer on the CPU, with as much of it as fits left on the
device; then smaller moments, which need less memory traffic and lose a little precision; then
parameters on the CPU; then files. For a given placement the smaller stage is tried first, since it
communicates less. Last, where the caller has plans of them, come moments in 8 bits and master
weights in bf16, which change what is trained the most.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Literal

from hf_zero.config import OffloadOptimizer, OffloadParam
from hf_zero.config.activations import CAPTURE, CompileSection
from hf_zero.config.features import conflicts, switched_on
from hf_zero.config.offload import Moments
from hf_zero.device.free_memory import FreeBytes
from hf_zero.errors import ConfigError
from hf_zero.logging import JsonObject, in_units
from hf_zero.optim.one_bit import one_bit_at_one
from hf_zero.planning.narrow_state import NarrowState
from hf_zero.planning.needs import NamedBytes, Needs, needs
from hf_zero.zero.layout.engine_plan import EnginePlan
from hf_zero.zero.layout.planner import replan

# usable share of a host's free memory: page tables, loaders and the allocator need some too
RAM_SHARE = 0.96
# share of the device left for activations, whose size depends on the batch
ACTIVATIONS = 0.2
# share of the device left if activations are counted: for fragmentation, communicators' buffers
BESIDE_ACTIVATIONS = 0.1
MOMENTS: tuple[Moments, ...] = ("fp32", "bf16", "int8")
UPDATE_IN_BACKWARD = {"zero_optimization": {"update_in_backward": True}}
STEP = 0.05  # proposed offload ratios are multiples of this


@dataclass(frozen=True)
class TierVerdict:
    """One tier: the bytes needed, made up of ``parts``, and the free bytes.

    ``limited_by`` names the source of the limit.
    """

    tier: str
    needed: int
    free: int
    parts: tuple[NamedBytes, ...]
    limited_by: str = ""

    @property
    def fits(self) -> bool:
        return self.needed <= self.free


@dataclass(frozen=True)
class MemoryVerdict:
    """One row for each tier of which something is needed.

    ``notes`` are remarks that refuse nothing.
    """

    rows: tuple[TierVerdict, ...]
    notes: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        return all(row.fits for row in self.rows)

    @property
    def largest_share(self) -> float:
        """The largest share of a tier's free bytes that is needed: more than 1 unless it fits."""
        needed = (row for row in self.rows if row.needed)
        shares = (row.needed / row.free if row.free > 0 else math.inf for row in needed)
        return max(shares, default=0.0)

    @property
    def short(self) -> tuple[TierVerdict, ...]:
        """The tiers that are too small."""
        return tuple(row for row in self.rows if not row.fits)


def judge(needed: Needs, free: FreeBytes, margin: float = 0.0) -> MemoryVerdict:
    """Return whether ``needed`` fits into ``free``, both of one rank, row by row. ``margin`` is the
    share of the device that is left free.

    If the device computes in host memory, both are one tier. A folder with unknown free bytes is
    not judged.
    """
    return MemoryVerdict(tuple(_rows(needed, free, margin)), tuple(_notes(needed, free)))


def _rows(needed: Needs, free: FreeBytes, margin: float) -> Iterator[TierVerdict]:
    ram = int(free.ram * RAM_SHARE)
    reserve = f"{1 - RAM_SHARE:.0%} reserved for the rest of the process"
    why = f"{free.limited_by}; {reserve}" if free.limited_by else reserve
    if free.host_device:
        parts = tuple(NamedBytes(f"{part.what} (device)", part.nbytes) for part in needed.device)
        yield TierVerdict(
            "memory", needed.device_bytes + needed.ram_bytes, ram, (*parts, *needed.ram), why
        )
    else:
        note = f"{margin:.0%} reserved for activations" if margin else ""
        yield TierVerdict(
            "device", needed.device_bytes, int(free.device * (1 - margin)), needed.device, note
        )
        if needed.ram:
            yield TierVerdict("RAM", needed.ram_bytes, ram, needed.ram, why)
    written = dict(needed.files)
    for number in dict.fromkeys(disk.disk for disk in free.disks):
        shared = [disk for disk in free.disks if disk.disk == number]
        nbytes = sum(written.get(disk.path, 0) for disk in shared)
        if nbytes:
            yield TierVerdict(
                f"disk of {', '.join(disk.path for disk in shared)}",
                nbytes,
                min(disk.nbytes for disk in shared),
                needed.disk,
            )


def _notes(needed: Needs, free: FreeBytes) -> Iterator[str]:
    if free.memlock is not None and needed.pinned > free.memlock:
        yield (
            f"ulimit -l is {in_units(free.memlock)}, below the {in_units(needed.pinned)} to be "
            "pinned: NVIDIA's driver is not bound by it; where pinning is refused all the same, "
            "transfers go through memory that is not pinned, and are slower"
        )


@dataclass(frozen=True)
class ActivationOption:
    """A way of computing activations: ``name`` and configuration ``keys`` of its settings, ``most``
    bytes at the peak of a micro-batch, ``kept`` of them when its forward ends. The default means
    unknown.
    """

    name: str = ""
    keys: Mapping[str, object] = field(default_factory=dict)
    kept: int = 0
    most: int = 0


@dataclass(frozen=True)
class Trial:
    """One configuration that was tried: its name, its needs, and whether they fit. ``narrow``: its
    state, unless that is in fp32 as configured.
    """

    name: str
    plan: EnginePlan
    needs: Needs
    verdict: MemoryVerdict
    activations: ActivationOption = ActivationOption()
    narrow: NarrowState | None = None

    @property
    def why(self) -> str:
        """The shortages in words; "" if it fits."""
        return "; ".join(
            f"{row.tier}: {in_units(row.needed)} needed, {in_units(row.free)} free"
            for row in self.verdict.short
        )

    def to_config(self) -> JsonObject:
        """Return the configuration in DeepSpeed's dialect: the stage, the offload sections, and the
        keys that reduce activations and select narrow state.
        """
        settings = self.plan.settings
        zero: dict[str, object] = {"stage": settings.stage}
        if settings.zero.update_in_backward:
            zero["update_in_backward"] = True
        for name, section, default in (
            ("offload_optimizer", settings.offload_optimizer, OffloadOptimizer()),
            ("offload_param", settings.offload_param, OffloadParam()),
        ):
            if not section.on:
                continue
            keys = {key: v for key, v in vars(section).items() if v != getattr(default, key)}
            if "nvme_path" in keys:
                keys["nvme_path"] = (
                    keys["nvme_path"][0] if len(keys["nvme_path"]) == 1 else list(keys["nvme_path"])
                )
                if section.device != "nvme":
                    del keys["nvme_path"]
            if "cores" in keys:
                keys["cpuadam_cores_perc"] = keys.pop("cores")
            zero[name] = keys
        config: JsonObject = {"zero_optimization": zero, **self.activations.keys}
        if self.narrow is not None:
            config |= {name: {"enabled": True, **keys} for name, keys in self.narrow.keys.items()}
            if self.narrow.optimizer is not None:
                chosen = self.narrow.optimizer
                config["optimizer"] = {"type": chosen.type, "params": dict(chosen.params)}
        if settings.zero.update_in_backward and settings.gradient_accumulation_steps is None:
            config["gradient_accumulation_steps"] = 1
        return config


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
    plans: Sequence[EnginePlan],
    free: FreeBytes,
    margin: float = ACTIVATIONS,
    stages: Sequence[int] | None = None,
    activations: Sequence[ActivationOption] = (ActivationOption(),),
    narrow: Iterable[tuple[NarrowState, Sequence[EnginePlan]]] = (),
) -> Fit:
    """Find the fastest configuration like that of ``plans`` that fits into ``free`` with ``margin``
    of the device left for unknown activations.

    ``plans``: one for each stage of a pipeline, of which each must fit: the trials are of the stage
    that needs the largest share of a tier.

    Only the stage, placement and moments vary, and ``activations``, the ways of computing them from
    the fastest on. ``stages``: those to try; None: that of ``plans`` and the larger ones that they
    may have. Files are tried in the folders listed in ``free``. A configuration that no engine runs
    is left out. ``narrow``: the same plans with narrow state, which are tried last.
    """
    trials: list[Trial] = []
    plan = plans[0]
    tried_stages = sorted(stages or plan.zero_stages[plan.settings.stage :])
    if one_bit_at_one(plan.settings, plan.optimizer) is not None:
        tried_stages = [1]  # a run would make another one stage 1
    for state, of_state in chain([(None, plans)], narrow):
        plan, *others = of_state
        candidates = _candidates(plan, free, tried_stages, state)
        for trial in _trials(candidates, others, free, margin, activations):
            trials.append(replace(trial, narrow=state))
            if trial.verdict.fits:
                return Fit(tuple(trials), margin)
    return Fit(tuple(trials), margin)


def _trials(
    candidates: Iterable[tuple[str, Callable[[], EnginePlan | None]]],
    others: Sequence[EnginePlan],
    free: FreeBytes,
    margin: float,
    activations: Sequence[ActivationOption],
) -> Iterator[Trial]:
    """Yield each candidate that an engine runs, with each way of computing activations; of a
    pipeline, whose ``others`` are planned alike, the stage that needs the largest share of a tier.
    """
    for name, build in candidates:
        try:
            candidate = build()
            if candidate is None:
                continue
            ways = [way for way in activations if _runs(candidate, way)]
            parts = [candidate, *(replan(other, candidate.settings) for other in others)]
        except ConfigError:
            continue
        for way in ways:
            left = free.plus(device=-way.most)
            for ratio, tried in _ratios(parts, left, margin):
                what = ", ".join(filter(None, (name + ratio, way.name)))
                judged = [_trial(what, part, free, margin, way) for part in tried]
                yield max(judged, key=lambda trial: trial.verdict.largest_share)


def _runs(candidate: EnginePlan, way: ActivationOption) -> bool:
    """Return whether ``initialize`` takes the settings of ``candidate``, with activations computed
    in ``way``. Raises ConfigError for contradictions.
    """
    settings = candidate.settings
    settings.check_stage()
    if settings.section_of(CompileSection).capture is None or candidate.optimizer is None:
        return True
    written = settings.override(way.keys, "proposed").written
    return not conflicts(CAPTURE, switched_on(written), written)


def _trial(
    name: str, tried: EnginePlan, free: FreeBytes, margin: float, way: ActivationOption
) -> Trial:
    needed = _with_activations(needs(tried), way)
    return Trial(name, tried, needed, judge(needed, free, margin), way)


def _with_activations(needed: Needs, way: ActivationOption) -> Needs:
    if not way.most:
        return needed
    return replace(needed, device=(*needed.device, NamedBytes("activations", way.most)))


def _candidates(
    plan: EnginePlan, free: FreeBytes, stages: Sequence[int], state: NarrowState | None = None
) -> Iterator[tuple[str, Callable[[], EnginePlan | None]]]:
    """Yield the names of candidates, with functions that return their plans, or None where a
    candidate changes nothing. They raise ConfigError for a placement that no engine has. With
    narrow ``state`` the optimizer is kept in one format, and not in files, and an unknown number of
    micro-batches counts as one.
    """
    folders = tuple(disk.path for disk in free.disks)
    now, own_param = plan.settings.offload_optimizer, plan.settings.offload_param
    # Without accumulation stage 1 has no advantage over stage 2 when offloading: it keeps whole
    # gradients on the device, and stage 2 sends as much.
    accumulates = (plan.settings.gradient_accumulation_steps or 1) > 1
    away = [stage for stage in stages if stage >= 2 or 2 not in stages or accumulates]
    formats = MOMENTS if plan.compresses_moments and state is None else MOMENTS[:1]
    # If the plan already has small moments, larger ones are not tried.
    if now.on and now.moments in formats:
        formats = formats[formats.index(now.moments) :]
    own_optimizer, on_device = replace(now, ratio=1.0), OffloadParam()

    def titled(stage: int, name: str) -> str:
        return ", ".join([f"stage {stage}", name, *([state.name] if state is not None else [])])

    def of(moments: Moments) -> str:
        return f", {moments} moments" if state is None else ""

    def candidate(
        stage: int, name: str, optimizer: OffloadOptimizer, param: OffloadParam = on_device
    ) -> tuple[str, Callable[[], EnginePlan]]:
        placed = partial(plan.settings.placed, stage, optimizer, param)
        return titled(stage, name), lambda: replan(plan, placed())

    for stage in stages:
        yield candidate(stage, "all on the device", OffloadOptimizer())
    # a step with several micro-batches adds up all gradients in any case
    micros = plan.settings.gradient_accumulation_steps
    if micros == 1 or (micros is None and state is not None):
        for stage in stages:
            yield (
                titled(stage, "all on the device, updates in the backward"),
                partial(_updating_in_backward, plan, stage),
            )
    for moments in formats:
        on_cpu = replace(own_optimizer, device="cpu", moments=moments)
        for stage in away:
            yield candidate(stage, f"optimizer on the CPU{of(moments)}", on_cpu)
    if 3 in stages:
        param_on_cpu = replace(own_param, device="cpu")
        for moments in formats:
            on_cpu = replace(own_optimizer, device="cpu", moments=moments)
            name = f"optimizer and parameters on the CPU{of(moments)}"
            yield candidate(3, name, on_cpu, param_on_cpu)
    if not folders or state is not None:
        return
    for moments in formats:
        in_files = replace(own_optimizer, device="nvme", nvme_path=folders, moments=moments)
        for stage in away:
            yield candidate(stage, f"optimizer in files, {moments} moments", in_files)
        if 3 in stages:
            param_in_files = replace(own_param, device="nvme", nvme_path=folders)
            for name, param in (
                ("optimizer in files, parameters on the CPU", param_on_cpu),
                ("optimizer and parameters in files", param_in_files),
                ("optimizer and parameters in files alone", replace(param_in_files, max_in_cpu=0)),
            ):
                yield candidate(3, f"{name}, {moments} moments", in_files, param)


def _updating_in_backward(plan: EnginePlan, stage: int) -> EnginePlan | None:
    """Return ``plan`` at ``stage`` with all state on the device, updated in the backward; None if
    its updates have to wait.
    """
    # moments that are written stay: nothing on the device contradicts them
    on_device = replace(plan.settings.offload_optimizer, device="none")
    settings = plan.settings.placed(stage, on_device, OffloadParam()).override(
        UPDATE_IN_BACKWARD, "proposed"
    )
    early = replan(plan, settings)
    return early if early.updates_in_backward else None


def _ratios(
    parts: Sequence[EnginePlan], free: FreeBytes, margin: float
) -> Iterator[tuple[str, list[EnginePlan]]]:
    """Yield ``parts`` with the optimizer fully offloaded (ratio "auto", which training then tunes),
    and with only as much offloaded as does not fit on the device.
    """
    if not parts[0].settings.offload_optimizer.on or free.host_device:
        yield "", [*parts]
        return
    short = [row for part in parts for row in judge(needs(part), free, margin).short]
    yield ", ratio auto", [_offloading(part, "auto") for part in parts]
    if any(row.tier == "device" for row in short):
        return
    least = max(_least_ratio(part, free, margin) for part in parts)
    if least < 1.0:
        yield f", ratio {least:g}", [_offloading(part, least) for part in parts]


def _least_ratio(plan: EnginePlan, free: FreeBytes, margin: float) -> float:
    """Return the smallest offload ratio, a multiple of STEP, with which the device has enough room.
    Device bytes fall as the ratio grows, so this is a binary search.
    """
    usable = free.device * (1 - margin)
    low, high = 1, math.ceil(1 / STEP)
    while low < high:
        middle = (low + high) // 2
        fits = needs(_offloading(plan, middle * STEP)).device_bytes <= usable
        low, high = (low, middle) if fits else (middle + 1, high)
    return round(low * STEP, 2)


def _offloading(plan: EnginePlan, ratio: float | Literal["auto"]) -> EnginePlan:
    """Return ``plan`` with another share of the optimizer offloaded."""
    now = plan.settings
    optimizer = replace(now.offload_optimizer, ratio=ratio)
    return replan(plan, now.placed(now.stage, optimizer, now.offload_param))
