"""Optimizer states as torch's optimizers save them: groups, step counts, and the parameters, which
are inferred where no names were saved.

Each of the functions that infer returns the names by group, in the optimizer's order, or None if
its arguments do not determine them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from hf_zero.checkpoint.foreign.assembled import OptimizerGroup
from hf_zero.checkpoint.manifest import pair_names
from hf_zero.optim.segment_table import plain_settings

Shape = tuple[int, ...]
Names = list[list[str]]
# Elements compared at each end of a parameter: reading a mapped file whole would hold it in memory.
COMPARED = 4096


def shapes_in(base: Mapping[str, Any]) -> list[list[Shape | None]]:
    """Return the shape of each parameter's state in ``base``, torch's state dict of an optimizer,
    by group; None for a parameter without a state that has dimensions.
    """
    state = base.get("state", {})
    return [
        [_shape(state.get(index, {})) for index in group["params"]]
        for group in base.get("param_groups", ())
    ]


def _shape(state: Mapping[str, Any]) -> Shape | None:
    return next(
        (
            tuple(value.shape)
            for value in state.values()
            if isinstance(value, torch.Tensor) and value.ndim
        ),
        None,
    )


def as_asked(
    wanted: Sequence[Sequence[Shape | None]],
    asked: Sequence[Sequence[str]],
    held: Mapping[str, Shape],
) -> Names | None:
    """Return the groups of the model that loads, if each parameter has the shape of the state at
    its position.
    """
    if [len(group) for group in wanted] != [len(group) for group in asked]:
        return None
    there = pair_names([name for names in asked for name in names], held)
    pairs = [pair for shapes, names in zip(wanted, asked) for pair in zip(shapes, names)]
    fits = all(name in there and shape in (None, held[there[name]]) for shape, name in pairs)
    return [[there[name] for name in names] for names in asked] if fits else None


def by_shapes(wanted: Sequence[Sequence[Shape | None]], held: Mapping[str, Shape]) -> Names | None:
    """Assign parameters in the model's order, each to the only group whose next shape equals its
    own. Returns None if this is ambiguous: several groups fit, or an unassigned parameter has the
    shape of an assigned one.
    """
    if not wanted or any(shape is None for shapes in wanted for shape in shapes):
        return None
    made: Names = [[] for _ in wanted]
    left = set()
    for name, shape in held.items():
        takers = [
            names
            for names, shapes in zip(made, wanted)
            if len(names) < len(shapes) and shapes[len(names)] == shape
        ]
        if len(takers) > 1:
            return None
        if takers:
            takers[0].append(name)
        else:
            left.add(shape)
    complete = all(len(names) == len(shapes) for names, shapes in zip(made, wanted))
    return (
        made if complete and not left & {held[name] for names in made for name in names} else None
    )


def by_contents(
    groups: Sequence[Sequence[torch.Tensor]], held: Mapping[str, torch.Tensor]
) -> Names | None:
    """Find the parameters of fp32 master weights by value: those in ``held`` equal the masters
    after rounding. ``groups`` has one tensor per parameter, or several parameters in one flat
    tensor.

    Among parameters with equal values the next one in the model's order is taken.
    """
    order, made = list(held), []
    free, last = dict.fromkeys(order), -1
    for group in groups:
        names: list[str] = []
        for tensor in group:
            at, values = 0, tensor.detach().reshape(-1)
            while at < values.numel():
                sizes = range(1, values.numel() - at + 1) if len(group) == 1 else (values.numel(),)
                fitting = (
                    name
                    for name in (*order[last + 1 :], *order[: last + 1])
                    if name in free and held[name].numel() in sizes
                )
                name = next((name for name in fitting if _begins(values[at:], held[name])), None)
                if name is None:
                    return None
                del free[name]
                last = order.index(name)
                names.append(name)
                at += held[name].numel()
        made.append(names)
    return made


def _begins(values: torch.Tensor, rounded: torch.Tensor) -> bool:
    """Whether rounded ``values`` begin with ``rounded``; compares ``COMPARED`` elements per end."""
    count, flat = rounded.numel(), rounded.detach().reshape(-1)
    ends = (slice(0, min(COMPARED, count)), slice(max(0, count - COMPARED), count))
    return all(torch.equal(values[end].to(flat.dtype), flat[end]) for end in ends)


def named(groups: Sequence[Mapping[str, Any]], held: Collection[str]) -> Names | None:
    """Return the names that torch stores for an optimizer that was given named parameters."""
    made = [list(group.get("param_names") or ()) for group in groups]
    complete = all(len(names) == len(group["params"]) for names, group in zip(made, groups))
    return (
        made
        if made and complete and all(name in held for names in made for name in names)
        else None
    )


def groups_of(
    base: Mapping[str, Any],
    shapes: Sequence[Mapping[str, Any]],
    steps: Mapping[str, Any] | None = None,
) -> tuple[OptimizerGroup, ...] | None:
    """Return the groups of ``base``, torch's state dict of an optimizer, with their parameters'
    names; None if it has none. ``steps``: step counts by parameter, if they are stored elsewhere.
    """
    if "param_groups" not in base:
        return None
    settings = base["param_groups"]
    # Stage 3 lists parameters by buffer, and a group may have several buffers: join them.
    if len(shapes) > len(settings):
        buffers = iter(shapes)
        shapes = [
            {name: shape for _ in group["params"] for name, shape in next(buffers, {}).items()}
            for group in settings
        ]
    made = []
    for group, names in zip(settings, shapes):
        kept = plain_settings(group)
        shared = kept.pop("step", None)  # FusedAdam keeps the step count in the group
        states = [state_of(base, index) for index in group.get("params", ())]
        counts = [state.get("step", shared) for state in states]
        if steps:
            counts = [steps.get(name) for name in names]
        elif len(counts) != len(names):  # of flat tensors, whose parameters step together
            counts = [*counts, shared][:1] * len(names)
        # an optimizer that counts steps has counted those of each parameter that it has stepped
        none: dict[str, float] | None = None if any(count is not None for count in counts) else {}
        numbers = {
            name: none if count is None else {"step": float(count)}
            for name, count in zip(names, counts)
        }
        made.append(OptimizerGroup.of(kept, numbers))
    return tuple(made)


def steps_of(saved: Mapping[str, Any]) -> float | None:
    """Return the step count of the optimizer in a rank's file; None if it has none."""
    base = torch_state(saved)
    counts = [
        kept["step"]
        for kept in (*base.get("state", {}).values(), *base.get("param_groups", ()))
        if "step" in kept
    ]
    return float(counts[0]) if counts else None


def torch_state(saved: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return torch's state dict of the optimizer in ``saved``.

    With ``elastic_checkpoint`` DeepSpeed writes a list of states without settings, which is
    converted.
    """
    found = saved.get("base_optimizer_state") or saved.get("optimizer_state_dict") or saved
    if isinstance(found, list):
        step = {
            key: saved[name]
            for key, name in (("step", "base_optimizer_state_step"),)
            if name in saved
        }
        return {
            "state": dict(enumerate(found)),
            "param_groups": [{"params": [index], **step} for index in range(len(found))],
        }
    return found if isinstance(found, Mapping) else {}


def state_of(base: Mapping[str, Any], index: int) -> Mapping[str, Any]:
    found: Mapping[str, Any] = base.get("state", {}).get(index, {})
    return found
