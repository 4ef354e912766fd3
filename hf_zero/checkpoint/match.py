"""Match between a checkpoint and an engine, or one that is planned: parameters by name and shape,
buffers, the optimizer's class and groups, the schedule.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from hf_zero.checkpoint.manifest import GroupEntry, Manifest, class_name, pair_names, strip_wrappers
from hf_zero.config.optimizers import STATE_OF
from hf_zero.errors import CheckpointError
from hf_zero.logging import counted, listed, log_rank0
from hf_zero.offload.storage import COMPENSATION
from hf_zero.optim.state import kept_states
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
        live = (engine.elsewhere, engine.optimizer, group_of, engine.lr_scheduler)
        return cls(engine.module, specs, aliases, *live)

    @classmethod
    def planned(cls, plan: EnginePlan, scheduler: object) -> LoadTarget:
        """Return the target of ``plan``, whose model has whole tensors."""
        specs = [flat.spec for flat in plan.flats]
        live = (getattr(plan.model, "elsewhere", ()), plan.optimizer, plan.group_of, scheduler)
        return cls(plan.model, specs, plan.aliases, *live)

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
    optimizer: bool,
    schedule: bool,
    warns: bool = False,
) -> LoadMatch:
    """Match ``checkpoint`` with ``target``, with the state of its ``optimizer`` and ``schedule``;
    ``strict`` as for :func:`match_names`; ``warns``: of names and a schedule that only one has.
    Raises CheckpointError for what does not fit.
    """
    manifest, where = checkpoint.manifest, str(checkpoint.folder)
    names = match_names(target, manifest, where, strict, warns, optimizer)
    groups: Sequence[int] = ()
    if optimizer and target.optimizer is not None:
        groups = check_optimizer(
            target.optimizer, target.group_of, manifest, names.saved_names, where
        )
    state = scheduler_to_load(target.scheduler, checkpoint, where) if schedule else None
    if schedule and warns:
        _warn_of_lost_schedule(target.scheduler, manifest, where)
    if state is not None and not optimizer and target.optimizer is not None:
        groups = _groups_of_schedule(target, manifest, names.saved_names, state, where)
    return replace(names, groups=groups, schedule=reorder_schedule(state, groups))


def match_names(
    live: LoadTarget,
    manifest: Manifest,
    where: str,
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
    own = {slot.name: spec for spec in live.specs for slot in spec.layout.slots}
    shapes = {slot.name: slot.whole for spec in live.specs for slot in spec.layout.slots}
    names = WholeNames(live.module)
    there, others = _pair(
        (*own, *live.aliases), names, (*manifest.slots, *manifest.aliases, *manifest.excluded)
    )
    saved_names, missing, differing, recoded = _match_parameters(
        own, shapes, live.aliases, manifest, there
    )
    buffers = persistent_buffers(live.module)
    # Some programs do not distinguish buffers from parameters, and write tied weights under both
    # names.
    kept, other_buffers = _pair(buffers, names, (*manifest.buffers, *manifest.slots))
    # Former releases saved the scales of quantized weights as buffers.
    raw = {name for name, spec in own.items() if spec.raw}
    scales, _ = _pair(raw.intersection(missing), names, manifest.buffers)
    missing = [name for name in missing if name not in scales]
    kept |= scales
    shapes |= {name: tuple(buffer.shape) for name, buffer in buffers.items()}
    other_scales: list[str] = []
    for buffer, name in kept.items():
        shape = (
            manifest.buffers[name][1] if name in manifest.buffers else manifest.slots[name][1].whole
        )
        if tuple(shape) != shapes[buffer]:
            # The offset of nested scales is written as text, whose length differs with its value.
            beside = buffer in buffers and belongs(buffer, own)
            (other_scales if beside else differing).append(_shapes(buffer, shape, shapes[buffer]))
    _refuse_other_values(where, differing, recoded, other_scales)
    excluded = frozenset(strip_wrappers(name) for name in manifest.excluded)
    missing += [
        name for name in buffers if name not in kept and not belongs(strip_wrappers(name), excluded)
    ]
    if strict or warns:
        tied = {
            there[tied]
            for tied, first in live.aliases.items()
            if first in saved_names and tied in there
        }
        elsewhere = {*live.elsewhere, *others, *other_buffers}
        used = {*saved_names.values(), *tied, *kept.values(), *elsewhere}
        if live.optimizer is None or not optimizer:
            used |= manifest.outside
        _report_one_sided(manifest, where, missing, used, strict)
    return LoadMatch(saved_names, kept)


def _pair(
    live: Iterable[str], names: WholeNames, there: Collection[str]
) -> tuple[dict[str, str], set[str]]:
    """Map each name of ``live`` that the checkpoint holds to its name ``there``. Also return the
    names there that match only names held on other ranks.
    """
    live = list(live)
    found = pair_names([each for every in names.every_of(live).values() for each in every], there)
    own = {name: found[each] for name, each in names.own_of(live).items() if each in found}
    return own, set(found.values()) - set(own.values())


def _match_parameters(
    own: Mapping[str, FlatSpec],
    shapes: Mapping[str, Sequence[int]],
    aliases: Mapping[str, str],
    manifest: Manifest,
    there: Mapping[str, str],
) -> tuple[dict[str, str], list[str], list[str], list[str]]:
    """Return the parameters ``own``, of ``shapes``, matched by name with the checkpoint's, as a
    map, and those that it lacks, that have another shape there, and that are quantized in another
    way there.
    """
    saved_names, missing, differing, recoded = {}, [], [], []
    saved_shapes = {name: slot.whole for name, (_, slot) in manifest.slots.items()}
    also: dict[str, list[str]] = {}
    for tied, first in aliases.items():
        also.setdefault(first, []).append(tied)
    for own_name, spec in own.items():
        known = [there[name] for name in (own_name, *also.get(own_name, [])) if name in there]
        firsts = (manifest.aliases.get(name, name) for name in known)
        name = next((each for each in firsts if each in manifest.slots), None)
        if name is None:
            if spec.trainable or there.get(own_name) not in manifest.excluded:
                missing.append(own_name)
            continue
        saved, _ = manifest.slots[name]
        if saved_shapes[name] != shapes[own_name]:
            differing.append(_shapes(own_name, saved_shapes[name], shapes[own_name]))
        elif (spec.raw or saved.raw) and saved.dtype != spec.dtype:
            recoded.append(f"{own_name} (checkpoint {saved.dtype}, model {spec.dtype})")
        else:
            saved_names[own_name] = name
    return saved_names, missing, differing, recoded


def _shapes(name: str, saved: Sequence[int], live: Sequence[int]) -> str:
    return f"{name} (checkpoint {list(saved)}, model {list(live)})"


def _refuse_other_values(
    where: str, differing: Sequence[str], recoded: Sequence[str], other_scales: Sequence[str]
) -> None:
    """Raise CheckpointError for ``differing`` shapes, for weights quantized in another way there,
    which are ``recoded``, and for ``other_scales`` of quantized weights.
    """
    if differing:
        raise CheckpointError(
            f"{where} is of another model: shapes differ: {listed(differing)}; build the model "
            "with the configuration it was saved with"
        )
    if recoded:
        raise CheckpointError(
            f"{where} has quantized weights of another kind, which are bytes and are not cast: "
            f"{listed(recoded)}; quantize the model as it was at the save"
        )
    if other_scales:
        raise CheckpointError(
            f"{where} has quantized weights of other values or another kind: "
            f"{listed(other_scales)}; load the base that it was saved over, quantized as it was"
        )


def _report_one_sided(
    manifest: Manifest, where: str, missing: Sequence[str], used: Collection[str], strict: bool
) -> None:
    """Raise CheckpointError for names that are ``missing`` in the checkpoint, and for those of the
    checkpoint that are not ``used``; log a warning of them unless ``strict``.
    """
    unexpected = [name for name in (*manifest.parameters, *manifest.buffers) if name not in used]
    if not missing and not unexpected:
        return
    said = [f"it lacks {listed(missing)}"] if missing else []
    of_model = [name for name in unexpected if name not in manifest.outside]
    said += [f"the model lacks {listed(of_model)}"] if of_model else []
    others = [name for name in unexpected if name in manifest.outside]
    said += [f"the optimizer lacks {listed(others)}, outside the model there"] if others else []
    text = f"{where} is of another model ({manifest.export.model_class}): {'; '.join(said)}; "
    if strict:
        raise CheckpointError(
            f"{text}build the model it was saved from, "
            "or pass load_module_strict=False to load what both have"
        )
    log_rank0(f"{text}what both have is loaded", logging.WARNING)


def check_optimizer(
    optimizer: torch.optim.Optimizer,
    group_of: Mapping[str, int],
    manifest: Manifest,
    saved_names: Mapping[str, str],
    where: str,
) -> list[int]:
    """Return, for each group of ``optimizer``, the index of the saved group to resume from: the one
    with the same parameters. ``group_of``: the group of each parameter.

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
    live, groups = class_name(optimizer), optimizer.param_groups
    if saved.class_name and _kind(live) != _kind(saved.class_name):  # others do not record it
        raise CheckpointError(
            f"{where} was saved with optimizer {saved.class_name}, this engine has {live}; use "
            f"{_short(saved.class_name)}, {remedy}"
        )
    # A known class implies its states. Where it is not recorded, each saved state is looked up.
    states = (
        ()
        if saved.class_name
        else sorted({name for flat in manifest.flats for name in flat.states} - {COMPENSATION})
    )
    kept = set[str]().union(*(kept_states(optimizer, group) for group in groups if states))
    if unknown := [name for name in states if name not in kept]:
        raise CheckpointError(
            f"{where} has the optimizer states {listed(states)}, of which {live} keeps no "
            f"{listed(unknown)}; use the optimizer it was saved with, {remedy}"
        )
    of_wholes = {name for of in saved.factors.values() for name in of.shapes}
    if unknown := sorted(of_wholes - {*tensor_state_names(optimizer)}):
        raise CheckpointError(
            f"{where} has {listed(unknown)} of whole parameters, of which {live} keeps none "
            "(torch's Adafactor is not transformers'); use the optimizer it was saved with, "
            f"{remedy}"
        )
    if len(groups) != len(saved.groups):
        raise CheckpointError(
            f"{where} has {len(saved.groups)} optimizer groups, this engine {len(groups)}; build "
            f"the same groups, {remedy}"
        )
    order, moved = pair_groups(group_of, len(groups), saved.groups, saved_names)
    if moved:
        raise CheckpointError(
            f"{where} has parameters in other optimizer groups: {listed(moved)}; put the same "
            f"parameters together (the order of groups is free), {remedy}"
        )
    return order


def _short(class_name: str) -> str:
    return class_name.rpartition(".")[2]


# classes whose state has the format of another class; checkpoints hold moments in fp32
_FORMATS = {name: kind for kind, names in STATE_OF.items() for name in names}


def _kind(class_name: str) -> str:
    return _FORMATS.get(_short(class_name), _short(class_name))


# Keys in the states of torch's schedules that newer versions no longer write.
RETIRED = {"verbose"}


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
        text = "this engine starts from its first step"
        text = f"{where} holds no state of an lr scheduler: {type(scheduler).__name__} of {text}"
        log_rank0(text, logging.WARNING)


def scheduler_to_load(
    scheduler: Any, checkpoint: Checkpoint, where: str
) -> dict[str, object] | None:
    """Return the state of ``checkpoint`` for ``scheduler``, or None if there is nothing to load.

    Raises CheckpointError if another class saved it; keys are compared if no class is named.
    """
    saved = checkpoint.manifest.lr_scheduler
    if saved is None or not hasattr(scheduler, "load_state_dict"):
        return None
    live, state = class_name(scheduler), checkpoint.scheduler_state()
    if not saved["class"]:
        own = scheduler.state_dict()
        state = _with_keys_of(own, state)
        known = own.keys() | RETIRED
        unknown = [str(key) for key in state if str(key)[:1] != "_" and key not in known]
        if unknown:
            raise CheckpointError(
                f"{where} holds the state of another lr scheduler: this engine has {_short(live)}, "
                f"whose state has no {', '.join(unknown[:4])}; use the class that was saved, "
                "or pass load_lr_scheduler_states=False to restart the schedule"
            )
    if saved["class"] and _short(live) != _short(saved["class"]):
        raise CheckpointError(
            f"{where} was saved with lr scheduler {saved['class']}, this engine has {live}; use "
            f"{_short(saved['class'])}, "
            "or pass load_lr_scheduler_states=False to restart the schedule"
        )
    return state


def _with_keys_of(live: Any, saved: Any) -> Any:
    """Return ``saved`` with the keys of its dictionaries as numbers where those of ``live`` are:
    torch.distributed.checkpoint turns all keys into strings (MultiStepLR's milestones).
    """
    if isinstance(live, list) and isinstance(saved, list):
        return [*map(_with_keys_of, live, saved), *saved[len(live) :]]
    if not (isinstance(live, Mapping) and isinstance(saved, Mapping)):
        return saved
    numbered = any(type(key) is int for key in live)
    made = {
        int(key) if numbered and type(key) is str else key: _with_keys_of(live.get(key), value)
        for key, value in saved.items()
    }
    return Counter(made) if isinstance(live, Counter) else made


# Attributes of torch's schedules that hold one value per group.
_PER_GROUP = {
    "base_lrs",
    "_last_lr",
    "lr_lambdas",
    "min_lrs",
    "max_lrs",
    "base_momentums",
    "max_momentums",
}


def _groups_of_schedule(
    target: LoadTarget,
    manifest: Manifest,
    saved_names: Mapping[str, str],
    state: Mapping[str, object],
    where: str,
) -> Sequence[int]:
    """Return the saved group for each group of the optimizer, of which the schedule's ``state``
    alone is loaded; () if the checkpoint does not describe the groups.

    Raises CheckpointError for a state of another number of groups, or of groups with another kind
    of momentum.
    """
    assert target.optimizer is not None
    saved, count = manifest.optimizer, len(target.optimizer.param_groups)
    if other := sorted(_group_counts(state) - {count}):
        raise CheckpointError(
            f"{where} holds a schedule of {counted(other[0], 'optimizer group')}, this engine "
            f"has {count}; build the same groups, or pass load_lr_scheduler_states=False to "
            "restart the schedule"
        )
    for name in sorted(_cycled(state)):
        if not all(name in group for group in target.optimizer.param_groups):
            raise CheckpointError(
                f"{where} holds a schedule that cycles {name!r}, which groups of this engine's "
                f"{type(target.optimizer).__name__} do not have; use the optimizer that was "
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


def _group_counts(state: object) -> set[int]:
    """Return the numbers of groups of the per-group values in the state of a schedule."""
    return {
        len(value)
        for own in _states_in(state)
        for key, value in own.items()
        if key in _PER_GROUP and isinstance(value, (list, tuple))
    }


def _cycled(state: object) -> set[str]:
    """Return the settings that the state of a schedule writes as the momentum."""
    return {
        "betas" if own.get("use_beta1") else "momentum"
        for own in _states_in(state)
        if own.get("cycle_momentum")
    }


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
    there = {name: index for index, group in enumerate(saved) for name in group.parameters}
    shared = Counter(
        (group, there[saved_names[name]])
        for name, group in group_of.items()
        if saved_names.get(name) in there
    )
    paired: dict[int, int] = {}
    for live, old in sorted(shared, key=lambda both: (-shared[both], both[0] != both[1], both)):
        if live not in paired and old not in paired.values():
            paired[live] = old
    for live in sorted(set(range(count)) - set(paired)):
        free = [old for old in range(count) if old not in paired.values()]
        paired[live] = live if live in free else free[0]
    moved = [
        f"{name} ({there[saved_names[name]]} there, {group} here)"
        for name, group in group_of.items()
        if saved_names.get(name) in there and there[saved_names[name]] != paired[group]
    ]
    return [paired[live] for live in range(count)], moved


def reorder_schedule(state: object, order: Sequence[int]) -> Any:
    """Return the state of a schedule with its per-group values in the engine's order of groups."""
    if isinstance(state, list):
        return [reorder_schedule(each, order) for each in state]
    if not (order and isinstance(state, dict)):
        return state
    return {
        key: [value[at] for at in order]
        if key in _PER_GROUP and isinstance(value, (list, tuple)) and len(value) == len(order)
        else reorder_schedule(value, order)
        for key, value in state.items()
    }
