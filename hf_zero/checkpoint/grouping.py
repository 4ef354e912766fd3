"""Optimizer groups of a checkpoint and of an engine, paired by the parameters in them: their
order is nobody's business.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from hf_zero.checkpoint.records import GroupEntry

# What torch's schedules keep as one value per group.
_PER_GROUP = {
    "base_lrs",
    "_last_lr",
    "lr_lambdas",
    "min_lrs",
    "max_lrs",
    "base_momentums",
    "max_momentums",
}


def pair(
    group_of: Mapping[str, int], count: int, saved: Sequence[GroupEntry], held: Mapping[str, str]
) -> tuple[list[int], list[str]]:
    """For each of ``count`` groups of an engine the index of the saved group that it goes on from,
    and what does not fit that.

    ``group_of`` is the engine's, ``held`` maps its names to the checkpoint's. Groups with the most
    parameters in common are paired first, then those at the same place, then in order. The second
    answer describes each parameter that was in another group than its pair; a checkpoint that does
    not say where a parameter was fits anything.
    """
    there = {name: index for index, group in enumerate(saved) for name in group.parameters}
    shared = Counter(
        (group, there[held[name]]) for name, group in group_of.items() if held.get(name) in there
    )
    paired: dict[int, int] = {}
    for live, old in sorted(shared, key=lambda both: (-shared[both], both[0] != both[1], both)):
        if live not in paired and old not in paired.values():
            paired[live] = old
    for live in sorted(set(range(count)) - set(paired)):
        free = [old for old in range(count) if old not in paired.values()]
        paired[live] = live if live in free else free[0]
    moved = [
        f"{name} ({there[held[name]]} there, {group} here)"
        for name, group in group_of.items()
        if held.get(name) in there and there[held[name]] != paired[group]
    ]
    return [paired[live] for live in range(count)], moved


def reordered(state: Any, order: Sequence[int]) -> Any:
    """The state of a schedule with its values per group in the order of the engine's groups."""
    if isinstance(state, list):
        return [reordered(each, order) for each in state]
    if not isinstance(state, dict):
        return state
    return {
        key: [value[at] for at in order]
        if key in _PER_GROUP and isinstance(value, (list, tuple)) and len(value) == len(order)
        else reordered(value, order)
        for key, value in state.items()
    }
