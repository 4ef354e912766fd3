"""Match between the state of a schedule in a checkpoint and the schedule of an engine: its class,
its groups, and the settings of optimizer groups that it writes.
"""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hf_zero.checkpoint.manifest import Manifest, class_name
from hf_zero.errors import CheckpointError
from hf_zero.logging import counted, log_rank0

if TYPE_CHECKING:
    import torch

    from hf_zero.checkpoint.reader import Checkpoint


# the settings of an optimizer group that a schedule writes, and further ones if it cycles momentum
SCHEDULED = ("lr", "initial_lr", "max_lr", "min_lr")
SCHEDULED_MOMENTUM = ("momentum", "betas", "max_momentum", "base_momentum")
# attributes of torch's schedules that hold one value per group
PER_GROUP = frozenset(
    ["base_lrs", "_last_lr", "lr_lambdas", "min_lrs", "max_lrs", "base_momentums", "max_momentums"]
)
RETIRED = {"verbose"}  # keys in the states of torch's schedules that newer versions do not write


def saved_state(scheduler: Any, checkpoint: Checkpoint, where: str) -> dict[str, object] | None:
    """Return the state of ``checkpoint`` for ``scheduler``; None if it has none, or ``scheduler``
    takes none.

    Raises CheckpointError if another class saved it, or, where the checkpoint names no class, for
    a key that the state of ``scheduler`` does not have.
    """
    saved = checkpoint.manifest.lr_scheduler
    if saved is None or not hasattr(scheduler, "load_state_dict"):
        return None
    engine_class, state = class_name(scheduler), checkpoint.scheduler_state()
    if not saved["class"]:
        current = scheduler.state_dict() or {}
        state = _with_keys_of(current, state)
        known = current.keys() | RETIRED
        unknown = [str(key) for key in state if str(key)[:1] != "_" and key not in known]
        if unknown:
            raise CheckpointError(
                f"{where} holds the state of another lr scheduler: this engine has "
                f"{_short(engine_class)}, whose state has no {', '.join(unknown[:4])}; use "
                "the class that was saved, or pass load_lr_scheduler_states=False to restart the "
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


def _states_in(state: object) -> Iterator[dict[str, Any]]:
    """Yield the state of a schedule and the states of the schedules inside it."""
    if isinstance(state, list):
        for inner in state:
            yield from _states_in(inner)
    elif isinstance(state, dict):
        yield state
        for inner in state.values():
            yield from _states_in(inner)


def refuse_other_groups(
    state: Mapping[str, object], optimizer: torch.optim.Optimizer, where: str
) -> None:
    """Raise CheckpointError for the ``state`` of a schedule of another number of groups than
    ``optimizer`` has, or of groups with another kind of momentum.
    """
    count, states = len(optimizer.param_groups), list(_states_in(state))
    counts = {
        len(value)
        for inner in states
        for key, value in inner.items()
        if key in PER_GROUP and isinstance(value, (list, tuple))
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


def reorder(state: object, order: Sequence[int]) -> Any:
    """Return the state of a schedule with its per-group values in the engine's order of groups:
    ``order`` has the saved index of each; empty: the orders are equal.
    """
    if isinstance(state, list):
        return [reorder(inner, order) for inner in state]
    if not (order and isinstance(state, dict)):
        return state
    reordered = copy.copy(state)  # of its class: the milestones of MultiStepLR are a Counter
    for key, value in state.items():
        if key in PER_GROUP and isinstance(value, (list, tuple)) and len(value) == len(order):
            reordered[key] = [value[index] for index in order]
        else:
            reordered[key] = reorder(value, order)
    return reordered


def warn_of_one_side(scheduler: object, manifest: Manifest, where: str) -> None:
    """Warn if only one of the checkpoint and the engine has a scheduler, and the checkpoint the
    state of an optimizer.
    """
    saved = manifest.lr_scheduler
    if manifest.optimizer is None:
        return
    if scheduler is None and saved is not None:
        log_rank0(
            f"{where} holds the state of {_short(saved['class']) or 'an lr scheduler'}, and "
            "this engine has no lr scheduler: the learning rates do not change any more; pass "
            "lr_scheduler= to initialize, or configure a scheduler, to continue the schedule",
            logging.WARNING,
        )
    elif saved is None and hasattr(scheduler, "load_state_dict"):
        log_rank0(
            f"{where} holds no state of an lr scheduler: {type(scheduler).__name__} of this engine "
            "starts from its first step",
            logging.WARNING,
        )


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


def _short(class_name: str) -> str:
    return class_name.rpartition(".")[2]
