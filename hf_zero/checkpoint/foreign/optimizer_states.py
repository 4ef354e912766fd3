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
from hf_zero.checkpoint.parameter_names import pair_names
from hf_zero.optim.group_settings import plain_settings
from hf_zero.optim.segments import ParamGroup, StateArrays

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


def _shape(state: Mapping[str, object]) -> Shape | None:
    return next(
        (
            tuple(value.shape)
            for value in state.values()
            if isinstance(value, torch.Tensor) and value.ndim
        ),
        None,
    )


def as_in_model(
    groups: Sequence[Sequence[Shape | None]],
    model_groups: Sequence[Sequence[str]],
    model: Mapping[str, Shape],
) -> Names | None:
    """Return the groups of the model that loads, if each parameter has the shape of the state at
    its position.
    """
    if [len(group) for group in groups] != [len(group) for group in model_groups]:
        return None
    names_of = pair_names([name for names in model_groups for name in names], model)
    pairs = [pair for shapes, names in zip(groups, model_groups) for pair in zip(shapes, names)]
    fits = all(name in names_of and shape in (None, model[names_of[name]]) for shape, name in pairs)
    return [[names_of[name] for name in names] for names in model_groups] if fits else None


def by_shapes(groups: Sequence[Sequence[Shape | None]], model: Mapping[str, Shape]) -> Names | None:
    """Assign parameters in the model's order, each to the only group whose next shape equals its
    own. Returns None if this is ambiguous: several groups fit, or an unassigned parameter has the
    shape of an assigned one.
    """
    if not groups or any(shape is None for shapes in groups for shape in shapes):
        return None
    result: Names = [[] for _ in groups]
    free = set()
    for name, shape in model.items():
        takers = [
            names
            for names, shapes in zip(result, groups)
            if len(names) < len(shapes) and shapes[len(names)] == shape
        ]
        if len(takers) > 1:
            return None
        if takers:
            takers[0].append(name)
        else:
            free.add(shape)
    complete = all(len(names) == len(shapes) for names, shapes in zip(result, groups))
    if complete and not free & {model[name] for names in result for name in names}:
        return result
    return None


def by_contents(
    groups: Sequence[Sequence[torch.Tensor]], weights: Mapping[str, torch.Tensor]
) -> Names | None:
    """Find the parameters of fp32 master weights by value: those in ``weights`` equal the masters
    after rounding. ``groups`` has one tensor per parameter, or several parameters in one flat
    tensor.

    Among parameters with equal values the next one in the model's order is taken.
    """
    order, result = list(weights), []
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
                    if name in free and weights[name].numel() in sizes
                )
                name = next((name for name in fitting if _begins(values[at:], weights[name])), None)
                if name is None:
                    return None
                del free[name]
                last = order.index(name)
                names.append(name)
                at += weights[name].numel()
        result.append(names)
    return result


def _begins(values: torch.Tensor, rounded: torch.Tensor) -> bool:
    """Return whether rounded ``values`` begin with ``rounded``; compares ``COMPARED`` per end."""
    count, flat = rounded.numel(), rounded.detach().reshape(-1)
    ends = (slice(0, min(COMPARED, count)), slice(max(0, count - COMPARED), count))
    return all(torch.equal(values[end].to(flat.dtype), flat[end]) for end in ends)


def named(groups: Sequence[ParamGroup], parameters: Collection[str]) -> Names | None:
    """Return the names that torch stores for an optimizer that was given named parameters."""
    result = [list(group.get("param_names") or ()) for group in groups]
    complete = all(len(names) == len(group["params"]) for names, group in zip(result, groups))
    if result and complete and all(name in parameters for names in result for name in names):
        return result
    return None


def groups_of(
    base: Mapping[str, Any],
    shapes: Sequence[Mapping[str, object]],
    steps: Mapping[str, object] | None = None,
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
    result = []
    for group, names in zip(settings, shapes):
        options = plain_settings(group)
        shared = options.pop("step", None)  # FusedAdam keeps the step count in the group
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
        result.append(OptimizerGroup.of(options, numbers))
    return tuple(result)


def steps_of(saved: Mapping[str, object]) -> float | None:
    """Return the step count of the optimizer in a rank's file; None if it has none."""
    base = torch_state(saved)
    counts = [
        holder["step"]
        for holder in (*base.get("state", {}).values(), *base.get("param_groups", ()))
        if "step" in holder
    ]
    return float(counts[0]) if counts else None


def torch_state(saved: Mapping[str, object]) -> Mapping[str, Any]:
    """Return torch's state dict of the optimizer in ``saved``.

    With ``elastic_checkpoint`` DeepSpeed writes a list of states without settings, which is
    converted.
    """
    state = saved.get("base_optimizer_state") or saved.get("optimizer_state_dict") or saved
    if isinstance(state, list):
        name = "base_optimizer_state_step"
        step = {"step": saved[name]} if name in saved else {}
        return {
            "state": dict(enumerate(state)),
            "param_groups": [{"params": [index], **step} for index in range(len(state))],
        }
    return state if isinstance(state, Mapping) else {}


def state_of(base: Mapping[str, Any], index: int) -> StateArrays:
    state: StateArrays = base.get("state", {}).get(index, {})
    return state
