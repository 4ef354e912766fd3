"""Match between a checkpoint and an engine, or one that is planned: parameters by name and shape,
buffers, the optimizer's class and groups, the schedule.
"""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from hf_zero.checkpoint.manifest import GroupEntry, Manifest, class_name, pair_names, strip_wrappers
from hf_zero.config.optimizers import STATE_OF
from hf_zero.errors import CheckpointError
from hf_zero.logging import counted, listed, log_rank0
from hf_zero.offload.storage import COMPENSATION
from hf_zero.optim.initial_state import kept_states
from hf_zero.optim.whole_tensor import tensor_state_names
from hf_zero.zero.layout.sharding import WholeNames, belongs, persistent_buffers

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
    def of(cls, engine: TrainingEngine) -> LoadTarget:
        """Return the target of a load into ``engine``."""
        specs, aliases = [flat.spec for flat in engine.flats], engine.aliases
        group_of = {} if engine.bound is None else engine.bound.group_of
        optimizer, scheduler, elsewhere = engine.optimizer, engine.lr_scheduler, engine.elsewhere
        return cls(engine.module, specs, aliases, elsewhere, optimizer, group_of, scheduler)

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
    *,
    strict: bool,
    optimizer: bool,
    schedule: bool,
    warns: bool = False,
) -> LoadMatch:
    """Match ``checkpoint`` with ``target``, with the state of its ``optimizer`` and ``schedule``;
    ``strict`` as for :func:`match_names`; ``warns``: of names and a schedule that only one has.
    Raises CheckpointError for what does not fit.
    """
    manifest, where = checkpoint.manifest, str(checkpoint.folder)
    names = match_names(target, manifest, where, strict=strict, warns=warns, optimizer=optimizer)
    groups: Sequence[int] = ()
    if optimizer and target.optimizer is not None:
        groups = _match_optimizer(target, target.optimizer, manifest, names.saved_names, where)
    state = _match_schedule(target.scheduler, checkpoint, where) if schedule else None
    if schedule and warns:
        _warn_of_lost_schedule(target.scheduler, manifest, where)
    if state is not None and not optimizer and target.optimizer is not None:
        groups = _groups_of_schedule(
            target, target.optimizer, manifest, names.saved_names, state, where
        )
    return replace(names, groups=groups, schedule=reorder_schedule(state, groups))


# ---- parameters and buffers ----


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
    optimizer: bool = True,
) -> LoadMatch:
    """Pair the names of the model with the checkpoint's. ``warns``: of names that only one side
    has, unless ``strict``; ``optimizer``: also of those that are in the checkpoint alone as
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
        if target.optimizer is None or not optimizer:
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


# ---- the optimizer ----

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
            f"use {_short(saved.class_name)}, {remedy}"
        )
    # A known class implies its states. Where it is not recorded, each saved state is looked up.
    states = (
        ()
        if saved.class_name
        else sorted({name for flat in manifest.flats for name in flat.states} - {COMPENSATION})
    )
    known = set[str]().union(*(kept_states(optimizer, group) for group in groups if states))
    if unknown := [name for name in states if name not in known]:
        raise CheckpointError(
            f"{where} has the optimizer states {listed(states)}, of which {engine_class} keeps no "
            f"{listed(unknown)}; use the optimizer it was saved with, {remedy}"
        )
    tensor_states = {name for state in saved.tensor_states.values() for name in state.shapes}
    if unknown := sorted(tensor_states - {*tensor_state_names(optimizer)}):
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


def _short(class_name: str) -> str:
    return class_name.rpartition(".")[2]


def _state_format(class_name: str) -> str:
    return _FORMATS.get(_short(class_name), _short(class_name))


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


# ---- the schedule ----

# the settings of an optimizer group that a schedule writes, and further ones if it cycles momentum
SCHEDULED = ("lr", "initial_lr", "max_lr", "min_lr")
SCHEDULED_MOMENTUM = ("momentum", "betas", "max_momentum", "base_momentum")
# attributes of torch's schedules that hold one value per group
_PER_GROUP = {
    "base_lrs",
    "_last_lr",
    "lr_lambdas",
    "min_lrs",
    "max_lrs",
    "base_momentums",
    "max_momentums",
}
_RETIRED = {"verbose"}  # keys in the states of torch's schedules that newer versions do not write


def scheduled_settings(
    scheduler: object, group: Mapping[str, Any], others: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the settings of an optimizer ``group`` that ``scheduler`` writes; the ``betas`` after
    the first are those of ``others``.
    """
    names = SCHEDULED + (SCHEDULED_MOMENTUM if _cycles_momentum(scheduler) else ())
    settings = {name: group[name] for name in names if name in group}
    if "betas" in settings.keys() & others.keys():
        settings["betas"] = (settings["betas"][0], *others["betas"][1:])
    return settings


def _cycles_momentum(scheduler: object) -> bool:
    return getattr(scheduler, "cycle_momentum", False) or any(
        map(_cycles_momentum, getattr(scheduler, "_schedulers", ()))
    )


def _warn_of_lost_schedule(scheduler: object, manifest: Manifest, where: str) -> None:
    """Warn if only one of the checkpoint and the engine has a scheduler, and the checkpoint the
    state of an optimizer.
    """
    saved = manifest.lr_scheduler
    if manifest.optimizer is None:
        return
    if scheduler is None and saved is not None:
        log_rank0(
            f"{where} holds the state of {_short(saved['class']) or 'an lr scheduler'}, and this "
            "engine has no lr scheduler: the learning rates do not change any more; pass "
            "lr_scheduler= to initialize, or configure a scheduler, to continue the schedule",
            logging.WARNING,
        )
    elif saved is None and hasattr(scheduler, "load_state_dict"):
        log_rank0(
            f"{where} holds no state of an lr scheduler: {type(scheduler).__name__} of this engine "
            "starts from its first step",
            logging.WARNING,
        )


def _match_schedule(scheduler: Any, checkpoint: Checkpoint, where: str) -> dict[str, object] | None:
    """Return the state of ``checkpoint`` for ``scheduler``, or None if there is nothing to load.

    Raises CheckpointError if another class saved it; keys are compared if no class is named.
    """
    saved = checkpoint.manifest.lr_scheduler
    if saved is None or not hasattr(scheduler, "load_state_dict"):
        return None
    engine_class, state = class_name(scheduler), checkpoint.scheduler_state()
    if not saved["class"]:
        current = scheduler.state_dict()
        state = _with_keys_of(current, state)
        known = current.keys() | _RETIRED
        unknown = [str(key) for key in state if str(key)[:1] != "_" and key not in known]
        if unknown:
            raise CheckpointError(
                f"{where} holds the state of another lr scheduler: this engine has "
                f"{_short(engine_class)}, whose state has no {', '.join(unknown[:4])}; use the "
                "class that was saved, or pass load_lr_scheduler_states=False to restart the "
                "schedule"
            )
    elif _short(engine_class) != _short(saved["class"]):
        raise CheckpointError(
            f"{where} was saved with lr scheduler {saved['class']}, this engine has "
            f"{engine_class}; use {_short(saved['class'])}, or pass "
            "load_lr_scheduler_states=False to restart the schedule"
        )
    return state


def _with_keys_of(current: Any, saved: Any) -> Any:
    """Return ``saved`` with the keys of its dictionaries as numbers where those of ``current`` are:
    torch.distributed.checkpoint turns all keys into strings (MultiStepLR's milestones).
    """
    if isinstance(current, list) and isinstance(saved, list):
        return [*map(_with_keys_of, current, saved), *saved[len(current) :]]
    if not (isinstance(current, Mapping) and isinstance(saved, Mapping)):
        return saved
    numbered = any(type(key) is int for key in current)
    state = {
        int(key) if numbered and type(key) is str else key: _with_keys_of(current.get(key), value)
        for key, value in saved.items()
    }
    return Counter(state) if isinstance(current, Counter) else state


def _groups_of_schedule(
    target: LoadTarget,
    optimizer: torch.optim.Optimizer,
    manifest: Manifest,
    saved_names: Mapping[str, str],
    state: Mapping[str, object],
    where: str,
) -> Sequence[int]:
    """Return the saved group for each group of ``optimizer``, of which the schedule's ``state``
    alone is loaded; () if the checkpoint does not describe the groups.

    Raises CheckpointError for a state of another number of groups, or of groups with another kind
    of momentum.
    """
    saved, count = manifest.optimizer, len(optimizer.param_groups)
    states = list(_states_in(state))
    counts = {
        len(value)
        for inner in states
        for key, value in inner.items()
        if key in _PER_GROUP and isinstance(value, (list, tuple))
    }
    if other := sorted(counts - {count}):
        raise CheckpointError(
            f"{where} holds a schedule of {counted(other[0], 'optimizer group')}, this engine "
            f"has {count}; build the same groups, or pass load_lr_scheduler_states=False to "
            "restart the schedule"
        )
    cycled = {
        "betas" if inner.get("use_beta1") else "momentum"
        for inner in states
        if inner.get("cycle_momentum")
    }
    for name in sorted(cycled):
        if not all(name in group for group in optimizer.param_groups):
            raise CheckpointError(
                f"{where} holds a schedule that cycles {name!r}, which groups of this engine's "
                f"{type(optimizer).__name__} do not have; use the optimizer that was "
                "saved, or pass load_lr_scheduler_states=False to restart the schedule"
            )
    if saved is None or len(saved.groups) != count:
        return ()
    return pair_groups(target.group_of, count, saved.groups, saved_names)[0]


def _states_in(state: object) -> Iterator[dict[str, Any]]:
    """Yield the state of a schedule and the states of the schedules inside it."""
    if isinstance(state, list):
        for inner in state:
            yield from _states_in(inner)
    elif isinstance(state, dict):
        yield state
        for inner in state.values():
            yield from _states_in(inner)


def reorder_schedule(state: object, order: Sequence[int]) -> Any:
    """Return the state of a schedule with its per-group values in the engine's order of groups."""
    if isinstance(state, list):
        return [reorder_schedule(inner, order) for inner in state]
    if not (order and isinstance(state, dict)):
        return state
    reordered = copy.copy(state)  # of its class: the milestones of MultiStepLR are a Counter
    for key, value in state.items():
        if key in _PER_GROUP and isinstance(value, (list, tuple)) and len(value) == len(order):
            reordered[key] = [value[index] for index in order]
        else:
            reordered[key] = reorder_schedule(value, order)
    return reordered
