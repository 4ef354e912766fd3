"""Match between a checkpoint and an engine, or one that is planned: parameters and buffers by name
and shape, the optimizer by class and groups.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from hf_zero.checkpoint import match_schedule
from hf_zero.checkpoint.manifest import GroupEntry, Manifest, class_name
from hf_zero.checkpoint.parameter_names import pair_names, strip_wrappers
from hf_zero.config.optimizers import STATE_OF
from hf_zero.errors import CheckpointError
from hf_zero.logging import listed, log_rank0
from hf_zero.offload.storage import COMPENSATION
from hf_zero.optim.initial_state import moment_names
from hf_zero.optim.whole_tensor import tensor_state_names
from hf_zero.zero.layout.whole_names import WholeNames, belongs, persistent_buffers

if TYPE_CHECKING:
    from torch import nn

    from hf_zero.checkpoint.reader import Checkpoint
    from hf_zero.zero.layout.engine_plan import EnginePlan
    from hf_zero.zero.layout.flat_spec import FlatSpec
    from hf_zero.zero.training_engine import TrainingEngine


@dataclass(frozen=True)
class LoadMatch:
    """The match of an engine with a checkpoint. saved_names: names in the engine -> names in the
    checkpoint of the parameters that can be loaded. buffers: the same for buffers, and for scales
    of quantized weights that were saved as such. groups: the saved group of each group of the
    optimizer, if its state or the schedule is loaded. schedule: the state of the schedule, in the
    engine's order of groups.
    """

    saved_names: dict[str, str]
    buffers: dict[str, str]
    groups: Sequence[int] = ()
    schedule: dict[str, object] | None = None


@dataclass(frozen=True, eq=False)
class LoadTarget:
    """The parts of an engine, or of a planned one, that a checkpoint must fit: its module, the
    properties of its flat buffers, other names of tied parameters, names ``elsewhere`` in a
    pipeline; the optimizer with the group of each parameter that it trains, in its order, and the
    scheduler.
    """

    module: nn.Module
    specs: Sequence[FlatSpec]
    aliases: Mapping[str, str]
    elsewhere: Collection[str]
    optimizer: torch.optim.Optimizer | None
    group_of: Mapping[str, int]
    scheduler: object

    @classmethod
    def of(cls, engine: TrainingEngine, module_only: bool = False) -> LoadTarget:
        """Return the target of a load into ``engine``; ``module_only``: without parameters of its
        optimizer outside the model.
        """
        specs = [flat.spec for flat in engine.flats if not (module_only and flat.spec.outside)]
        group_of = {} if engine.bound is None else engine.bound.group_of
        optimizer, scheduler, elsewhere = engine.optimizer, engine.lr_scheduler, engine.elsewhere
        return cls(engine.module, specs, engine.aliases, elsewhere, optimizer, group_of, scheduler)

    @classmethod
    def planned(cls, plan: EnginePlan, scheduler: object) -> LoadTarget:
        """Return the target of ``plan``, whose model has whole tensors."""
        specs, elsewhere = [f.spec for f in plan.flats], getattr(plan.model, "elsewhere", ())
        group_of, optimizer = plan.group_of, plan.optimizer
        return cls(plan.model, specs, plan.aliases, elsewhere, optimizer, group_of, scheduler)

    def grouped(self) -> list[list[str]]:
        """Return the parameter names in each optimizer group, in the optimizer's order, in which
        torch numbers states; [] without an optimizer.
        """
        groups = () if self.optimizer is None else self.optimizer.param_groups
        names: list[list[str]] = [[] for _ in groups]
        for name, index in self.group_of.items() if names else ():
            names[index].append(name)
        return names


def match(
    target: LoadTarget,
    checkpoint: Checkpoint,
    strict: bool,
    loads_optimizer: bool,
    loads_schedule: bool,
    warns: bool = False,
) -> LoadMatch:
    """Match ``checkpoint`` with ``target``, also the state of the optimizer (``loads_optimizer``)
    and of the schedule (``loads_schedule``); ``strict`` as for :func:`match_names`; ``warns``: of
    names and a schedule that only one has. Raises CheckpointError for what does not fit.
    """
    manifest, where = checkpoint.manifest, str(checkpoint.folder)
    names = match_names(
        target, manifest, where, strict=strict, warns=warns, loads_optimizer=loads_optimizer
    )
    groups, optimizer, saved = list[int](), target.optimizer, manifest.optimizer
    if loads_optimizer and optimizer is not None:
        groups = _match_optimizer(target, optimizer, manifest, names.saved_names, where)
    state = None
    if loads_schedule and not (target.scheduler is None and manifest.lr_scheduler is None):
        state = match_schedule.saved_state(target.scheduler, checkpoint, where)
        if warns:
            match_schedule.warn_of_one_side(target.scheduler, manifest, where)
    if state is not None and not loads_optimizer and optimizer is not None:
        match_schedule.refuse_other_groups(state, optimizer, where)
        count = len(optimizer.param_groups)
        if saved is not None and len(saved.groups) == count:
            groups, _ = pair_groups(target.group_of, count, saved.groups, names.saved_names)
    if state is not None:
        state = match_schedule.reorder(state, groups)
    return replace(names, groups=groups, schedule=state)


@dataclass
class _Mismatches:
    """Names in the engine that do not fit the checkpoint: ``missing`` there; of another shape
    (``differing``); weights quantized in another way (``recoded``); scales of other quantized
    weights. All but ``missing`` are texts with the values of both.
    """

    missing: list[str] = field(default_factory=list)
    differing: list[str] = field(default_factory=list)
    recoded: list[str] = field(default_factory=list)
    other_scales: list[str] = field(default_factory=list)

    def refuse(self, where: str) -> None:
        """Raise CheckpointError for values that do not fit."""
        if self.differing:
            raise CheckpointError(
                f"{where} is of another model: shapes differ: {listed(self.differing)}; build the "
                "model with the configuration it was saved with"
            )
        if self.recoded:
            raise CheckpointError(
                f"{where} has quantized weights of another kind, which are bytes and are not cast: "
                f"{listed(self.recoded)}; quantize the model as it was at the save"
            )
        if self.other_scales:
            raise CheckpointError(
                f"{where} has quantized weights of other values or another kind: "
                f"{listed(self.other_scales)}; load the base that it was saved over, quantized as "
                "it was"
            )


def match_names(
    target: LoadTarget,
    manifest: Manifest,
    where: str,
    *,
    strict: bool,
    warns: bool = False,
    loads_optimizer: bool = True,
) -> LoadMatch:
    """Pair the names of the model with the checkpoint's. ``warns``: of names that only one side
    has, unless ``strict``; ``loads_optimizer``: also of those that are in the checkpoint alone as
    parameters of its optimizer outside the model.

    Raises CheckpointError for shapes that differ, for weights quantized in another way and, if
    ``strict``, for names that only one side has. Frozen parameters that the checkpoint left out on
    request do not count as missing.
    """
    specs = {slot.name: spec for spec in target.specs for slot in spec.layout.slots}
    names, mismatches = WholeNames(target.module), _Mismatches()
    pairs, of_other_ranks = _pair(
        (*specs, *target.aliases), names, (*manifest.slots, *manifest.aliases, *manifest.excluded)
    )
    saved_names = _match_parameters(specs, target.aliases, manifest, pairs, mismatches)
    buffers, buffers_of_other_ranks = _match_buffers(target, specs, names, manifest, mismatches)
    mismatches.refuse(where)
    if strict or warns:
        tied = {
            pairs[name]
            for name, first in target.aliases.items()
            if first in saved_names and name in pairs
        }
        used = {*saved_names.values(), *tied, *buffers.values()}
        used |= {*target.elsewhere, *of_other_ranks, *buffers_of_other_ranks}
        if target.optimizer is None or not loads_optimizer:
            used |= manifest.outside
        _report_one_sided(manifest, where, mismatches.missing, used, strict=strict)
    return LoadMatch(saved_names, buffers)


def _pair(
    names: Iterable[str], whole_names: WholeNames, saved: Collection[str]
) -> tuple[dict[str, str], set[str]]:
    """Map each of the engine's ``names`` that is among the ``saved`` ones to its name there. Also
    return the saved names that match only names on other ranks.
    """
    names = list(names)
    everywhere = [name for every in whole_names.every_of(names).values() for name in every]
    paired = pair_names(everywhere, saved)
    of_this_rank = whole_names.own_of(names).items()
    pairs = {name: paired[whole] for name, whole in of_this_rank if whole in paired}
    return pairs, set(paired.values()) - set(pairs.values())


def _match_parameters(
    specs: Mapping[str, FlatSpec],
    aliases: Mapping[str, str],
    manifest: Manifest,
    pairs: Mapping[str, str],
    mismatches: _Mismatches,
) -> dict[str, str]:
    """Map the parameters of ``specs`` that can be loaded to their names in the checkpoint, of the
    ``pairs`` of equal names, and add the others to ``mismatches``. A tied parameter may be saved
    under any of its names.
    """
    saved_names: dict[str, str] = {}
    shapes = {name: spec.layout.by_name[name].whole for name, spec in specs.items()}
    saved_shapes = {name: slot.whole for name, (_, slot) in manifest.slots.items()}
    tied_names: dict[str, list[str]] = {}
    for tied, first in aliases.items():
        tied_names.setdefault(first, [first]).append(tied)
    for name, spec in specs.items():
        candidates = (pairs[tied] for tied in tied_names.get(name, [name]) if tied in pairs)
        firsts = (manifest.aliases.get(candidate, candidate) for candidate in candidates)
        saved_name = next((first for first in firsts if first in manifest.slots), None)
        if saved_name is None:
            if spec.trainable or pairs.get(name) not in manifest.excluded:
                mismatches.missing.append(name)
            continue
        saved, _ = manifest.slots[saved_name]
        if saved_shapes[saved_name] != shapes[name]:
            mismatches.differing.append(_shapes(name, saved_shapes[saved_name], shapes[name]))
        elif (spec.raw or saved.raw) and saved.dtype != spec.dtype:
            mismatches.recoded.append(f"{name} (checkpoint {saved.dtype}, model {spec.dtype})")
        else:
            saved_names[name] = saved_name
    return saved_names


def _match_buffers(
    target: LoadTarget,
    specs: Mapping[str, FlatSpec],
    names: WholeNames,
    manifest: Manifest,
    mismatches: _Mismatches,
) -> tuple[dict[str, str], set[str]]:
    """Map the buffers of the model, and scales of quantized weights that are missing as parameters,
    to their names in the checkpoint, and add the others to ``mismatches``. Also return the saved
    names that match only names on other ranks.
    """
    buffers = persistent_buffers(target.module)
    # Some programs do not distinguish buffers from parameters, and write tied weights under both
    # names.
    saved_names, of_other_ranks = _pair(buffers, names, (*manifest.buffers, *manifest.slots))
    # Former releases saved the scales of quantized weights as buffers.
    raw = {name for name in mismatches.missing if specs[name].raw}
    scales, _ = _pair(raw, names, manifest.buffers)
    mismatches.missing = [name for name in mismatches.missing if name not in scales]
    saved_names |= scales
    for name, saved_name in saved_names.items():
        if saved_name in manifest.buffers:
            saved_shape: Sequence[int] = manifest.buffers[saved_name][1]
        else:
            saved_shape = manifest.slots[saved_name][1].whole
        shape = buffers[name].shape if name in buffers else specs[name].layout.by_name[name].whole
        if tuple(saved_shape) != tuple(shape):
            # The offset of nested scales is written as text, whose length differs with its value.
            of_quantized = name in buffers and belongs(name, specs)
            differing = mismatches.other_scales if of_quantized else mismatches.differing
            differing.append(_shapes(name, saved_shape, shape))
    excluded = frozenset(strip_wrappers(name) for name in manifest.excluded)
    mismatches.missing += [
        name
        for name in buffers
        if name not in saved_names and not belongs(strip_wrappers(name), excluded)
    ]
    return saved_names, of_other_ranks


def _shapes(name: str, saved: Sequence[int], model: Sequence[int]) -> str:
    return f"{name} (checkpoint {list(saved)}, model {list(model)})"


def _report_one_sided(
    manifest: Manifest, where: str, missing: Sequence[str], used: Collection[str], *, strict: bool
) -> None:
    """Raise CheckpointError for names that are ``missing`` in the checkpoint, and for those of the
    checkpoint that are not ``used``; log a warning of them unless ``strict``.
    """
    unexpected = [name for name in (*manifest.parameters, *manifest.buffers) if name not in used]
    if not missing and not unexpected:
        return
    differences = [f"it lacks {listed(missing)}"] if missing else []
    of_model = [name for name in unexpected if name not in manifest.outside]
    differences += [f"the model lacks {listed(of_model)}"] if of_model else []
    others = [name for name in unexpected if name in manifest.outside]
    differences += (
        [f"the optimizer lacks {listed(others)}, outside the model there"] if others else []
    )
    text = (
        f"{where} is of another model ({manifest.export.model_class}): {'; '.join(differences)}; "
    )
    if strict:
        raise CheckpointError(
            f"{text}build the model it was saved from, "
            "or pass load_module_strict=False to load what both have"
        )
    log_rank0(f"{text}what both have is loaded", logging.WARNING)


# classes whose state has the format of another class; checkpoints hold moments in fp32
_FORMATS = {name: kind for kind, names in STATE_OF.items() for name in names}


def _match_optimizer(
    target: LoadTarget,
    optimizer: torch.optim.Optimizer,
    manifest: Manifest,
    saved_names: Mapping[str, str],
    where: str,
) -> list[int]:
    """Return, for each group of ``optimizer``, the index of the saved group to resume from: the one
    with the same parameters.

    Raises CheckpointError if ``optimizer`` cannot resume from the saved optimizer: another class,
    unknown states, other groups.
    """
    saved = manifest.optimizer
    remedy = "or pass load_optimizer_states=False to go on with the optimizer state of this engine"
    if saved is None:
        raise CheckpointError(
            f"{where} was saved without an optimizer, or does not say which parameters its state "
            f"belongs to; load it with load_module_only=True, {remedy}"
        )
    engine_class, groups = class_name(optimizer), optimizer.param_groups
    # programs other than hf-zero do not record the class
    if saved.class_name and _state_format(engine_class) != _state_format(saved.class_name):
        raise CheckpointError(
            f"{where} was saved with optimizer {saved.class_name}, this engine has {engine_class}; "
            f"use {saved.class_name.rpartition('.')[2]}, {remedy}"
        )
    # A known class implies its states. Where it is not recorded, each saved state is looked up.
    names = {name for flat in manifest.flats for name in flat.states} - {COMPENSATION}
    states = () if saved.class_name else sorted(names)
    known = set[str]().union(*(moment_names(optimizer, group) for group in groups if states))
    if unknown := [name for name in states if name not in known]:
        raise CheckpointError(
            f"{where} has the optimizer states {listed(states)}, of which {engine_class} keeps no "
            f"{listed(unknown)}; use the optimizer it was saved with, {remedy}"
        )
    tensor_states = {name for state in saved.tensor_states.values() for name in state.shapes}
    if tensor_states and (unknown := sorted(tensor_states - {*tensor_state_names(optimizer)})):
        raise CheckpointError(
            f"{where} has {listed(unknown)} of whole parameters, of which {engine_class} keeps "
            "none (torch's Adafactor is not transformers'); use the optimizer it was saved with, "
            f"{remedy}"
        )
    if len(groups) != len(saved.groups):
        raise CheckpointError(
            f"{where} has {len(saved.groups)} optimizer groups, this engine {len(groups)}; build "
            f"the same groups, {remedy}"
        )
    order, moved = pair_groups(target.group_of, len(groups), saved.groups, saved_names)
    if moved:
        raise CheckpointError(
            f"{where} has parameters in other optimizer groups: {listed(moved)}; put the same "
            f"parameters together (the order of groups is free), {remedy}"
        )
    return order


def _state_format(class_name: str) -> str:
    name = class_name.rpartition(".")[2]
    return _FORMATS.get(name, name)


def pair_groups(
    group_of: Mapping[str, int],
    count: int,
    saved: Sequence[GroupEntry],
    saved_names: Mapping[str, str],
) -> tuple[list[int], list[str]]:
    """Return the index of the saved group that each of the engine's ``count`` groups resumes from,
    and the mismatches.

    ``group_of`` maps parameter to group in the engine, ``saved_names`` the engine's names to the
    checkpoint's. Groups with the most parameters in common are paired first, then those with the
    same index, then in order. The mismatches describe each parameter that was saved in another
    group than the paired one; a parameter without a saved group never mismatches.
    """
    saved_group_of = {name: index for index, group in enumerate(saved) for name in group.parameters}
    both = {  # (group in the engine, saved group) by parameter of both
        name: (group, saved_group_of[saved_names[name]])
        for name, group in group_of.items()
        if saved_names.get(name) in saved_group_of
    }
    shared = Counter(both.values())
    paired: dict[int, int] = {}
    for pair in sorted(shared, key=lambda pair: (-shared[pair], pair[0] != pair[1], pair)):
        group, saved_group = pair
        if group not in paired and saved_group not in paired.values():
            paired[group] = saved_group
    for group in sorted(set(range(count)) - set(paired)):
        free = [index for index in range(count) if index not in paired.values()]
        paired[group] = group if group in free else free[0]
    moved = [
        f"{name} ({saved_group} there, {group} here)"
        for name, (group, saved_group) in both.items()
        if saved_group != paired[group]
    ]
    return [paired[group] for group in range(count)], moved
