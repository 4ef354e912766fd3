"""Which parameters the state of an optimizer belongs to that was saved without names, as torch's
own optimizers save theirs.

Each function returns the names by group, in the order of the optimizer, or None where they do not
follow from its arguments.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from hf_zero.checkpoint.records import pair_names

Shape = tuple[int, ...]
Names = list[list[str]]
COMPARED = 4096  # elements of each parameter: reading a mapped file whole would hold it in memory


def shapes_in(base: Mapping[str, Any]) -> list[list[Shape | None]]:
    """The shape of each parameter's state in ``base``, torch's state dict of an optimizer; None
    for one without.
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
    """The groups of the model that loads, if each of its parameters has the shape of the state
    at its place.
    """
    if [len(group) for group in wanted] != [len(group) for group in asked]:
        return None
    there = pair_names([name for names in asked for name in names], held)
    pairs = [pair for shapes, names in zip(wanted, asked) for pair in zip(shapes, names)]
    fits = all(name in there and shape in (None, held[there[name]]) for shape, name in pairs)
    return [[there[name] for name in names] for names in asked] if fits else None


def by_shapes(wanted: Sequence[Sequence[Shape | None]], held: Mapping[str, Shape]) -> Names | None:
    """Parameters in the model's order, each in the one group whose next shape is its own. None
    where that is ambiguous: several groups fit, or a parameter that is left has the shape of one
    taken.
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
    """``groups`` are fp32 master weights, one tensor a parameter or several end to end; their
    parameters are those whose values in ``held`` are the same, rounded.

    Of parameters with equal values the next one in the model's order is taken.
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
    """Whether ``values`` begin with ``rounded``, as far as the elements that are compared show."""
    count, flat = rounded.numel(), rounded.detach().reshape(-1)
    ends = (slice(0, min(COMPARED, count)), slice(max(0, count - COMPARED), count))
    return all(torch.equal(values[end].to(flat.dtype), flat[end]) for end in ends)


def named(groups: Sequence[Mapping[str, Any]], held: Collection[str]) -> Names | None:
    """The names that torch writes for an optimizer that was given named parameters."""
    made = [list(group.get("param_names") or ()) for group in groups]
    complete = all(len(names) == len(group["params"]) for names, group in zip(made, groups))
    return (
        made
        if made and complete and all(name in held for names in made for name in names)
        else None
    )
