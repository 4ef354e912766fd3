"""Find the whole parameters that are computed with parts of activations: their gradients are
partial, terms of a sum over the tensor-parallel ranks.

This follows from the graph that autograd records in a rehearsal of the cut model
(:mod:`hf_zero.parallel.tensor.rehearsal`), with :data:`hf_zero.parallel.tensor.axis.BORDERS`:

    the output of an operation    is a part if one of its inputs is: a cut parameter, or the output
                                  of ``split`` or ``own_part``; ``sum_over`` and ``gather`` return
                                  whole tensors
    the gradient of a whole       is complete if whole operations read it, partial if operations
    tensor                        that make parts do; ``copy_to``, ``copy_last_to`` and ``split``
                                  make that of their input complete, ``own_part`` does not

No sum corrects the gradient of a whole parameter that is complete in one place and partial in
another.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping
from collections.abc import Set as AbstractSet
from enum import Enum

import torch
from torch import nn
from torch.autograd.graph import Node, get_gradient_edge

from hf_zero.errors import ConfigError
from hf_zero.parallel.tensor.axis import border_of
from hf_zero.parallel.tensor.layers import MAKE_PARTS
from hf_zero.parallel.tensor.plan import Target
from hf_zero.zero.layout.sharding import sharding_of

PARTIAL_STYLE = "replicated_with_grad_allreduce"
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


class GradientKind(Enum):
    """The gradient that one use of a whole tensor gives it on each rank."""

    COMPLETE = "equal on all ranks"
    PARTIAL = "a term of a sum over the ranks"


def kinds_in(outputs: Iterable[torch.Tensor]) -> dict[nn.Parameter, set[GradientKind]]:
    """Return, for each parameter in the graph of ``outputs``, the kinds of gradient that its uses
    give it. Raises ConfigError for a layer that receives parts although its style takes whole
    tensors, and vice versa.
    """
    ends = [get_gradient_edge(output).node for output in outputs]  # of a parameter: its own node
    order = _from_leaves(ends)
    parts = _nodes_of_parts(order)
    kinds: dict[Node, set[GradientKind]] = {node: set() for node in order}
    for end in ends:
        if end not in parts:
            kinds[end].add(GradientKind.COMPLETE)
    for node in reversed(order):
        given = _kinds_of_inputs(node, node in parts, kinds[node])
        for child in _children(node):
            if child not in parts:
                kinds[child] |= given
    return {node.variable: kinds[node] for node in order if hasattr(node, "variable")}


def of_whole(
    model: nn.Module, kinds_of: Mapping[nn.Parameter, AbstractSet[GradientKind]]
) -> dict[nn.Parameter, bool]:
    """Return for each whole parameter of ``model`` that has a gradient whether it is partial, by
    the result ``kinds_of`` of :func:`kinds_in`. Raises ConfigError for one of both kinds.
    """
    whole = {p: kinds for p, kinds in kinds_of.items() if "tensor" not in sharding_of(p).axes}
    mixed = [name for name, p in model.named_parameters() if len(whole.get(p, ())) > 1]
    if mixed:
        raise ConfigError(
            f"{mixed[-1]} is computed with parts of activations in one place and with whole ones "
            f"in another ({len(mixed)} such parameters), so that no sum over the tensor-parallel "
            "ranks makes its gradient right: a layer of which each rank has a part reads a whole "
            "tensor that the plan does not hand it; cut that layer by a style that takes whole "
            "inputs, or leave it whole, by hf_zero.tensor_parallel(model, size, plan=...)"
        )
    return {p: GradientKind.PARTIAL in kinds for p, kinds in whole.items() if kinds}


def check_unplaced(
    model: nn.Module,
    planned: Iterable[Target],
    placed: Iterable[nn.Parameter],
    ran: Container[str],
    reason: str,
) -> None:
    """Raise ConfigError for a trainable parameter whose kind of gradient nobody knows, for
    ``reason``: it lies among layers of ``model`` that make parts, its module has not run (``ran``),
    :func:`of_whole` has not found it (``placed``), and the plan does not name it
    (``planned``).
    """
    targets = list(planned)
    placed = {*placed, *(p for t in targets for p in t.module.parameters(recurse=False))}
    parents = {t.parent for t in targets if t.style.runs and issubclass(t.style.runs, MAKE_PARTS)}
    for path, module in model.named_modules():
        if path in ran or not any(f"{path}.".startswith(f"{parent}.") for parent in parents):
            continue
        for name, parameter in module.named_parameters(path, recurse=False):
            if parameter.requires_grad and parameter not in placed:
                raise ConfigError(
                    f"{name} is whole and lies among layers of which each tensor-parallel rank has "
                    f"a part; the plan does not name it, and {reason}, so that nobody knows "
                    "whether it is computed with parts: give it the style 'replicate' if its "
                    f"inputs are whole, or {PARTIAL_STYLE!r} if they are parts, by "
                    "hf_zero.tensor_parallel(model, size, "
                    f"plan={{{_NUMBER.sub('*', name)!r}: ...}})"
                )


def _from_leaves(ends: Iterable[Node]) -> list[Node]:
    """Return the nodes of a graph in topological order, each after the nodes that it reads."""
    order: list[Node] = []
    visited: set[Node] = set()
    waiting = [(end, False) for end in ends]
    while waiting:
        node, is_done = waiting.pop()
        if is_done:
            order.append(node)
        elif node not in visited:
            visited.add(node)
            waiting.append((node, True))
            waiting += [(child, False) for child in _children(node)]
    return order


def _children(node: Node) -> list[Node]:
    return [child for child, _ in node.next_functions if child is not None]


def _nodes_of_parts(order: Iterable[Node]) -> set[Node]:
    """Return the nodes of a graph in topological ``order`` whose outputs are parts."""
    parts: set[Node] = set()
    for node in order:
        if _makes_parts(node, not parts.isdisjoint(_children(node))):
            parts.add(node)
    return parts


def _makes_parts(node: Node, reads_parts: bool) -> bool:
    """Return whether the output of ``node`` is a part. Raises ConfigError for an input of the other
    kind than its function takes.
    """
    if hasattr(node, "variable"):
        return "tensor" in sharding_of(node.variable).axes
    border = border_of(node)
    if border is None:
        return reads_parts
    if border.takes_parts and not reads_parts:
        raise ConfigError(
            f"{node.name} sums or joins what the tensor-parallel ranks have made with their parts, "
            "and all that it is given is whole: the plan gives it a style for parts, and cuts "
            "nothing before it"
        )
    if reads_parts and not border.takes_parts:
        raise ConfigError(
            f"{node.name} takes whole inputs by its style of the tensor-parallel plan, and is "
            "given the parts of a layer before it; let that layer give whole outputs "
            "('colwise_gather_output', 'rowwise')"
        )
    return border.makes_parts


def _kinds_of_inputs(
    node: Node, is_part: bool, kinds: set[GradientKind]
) -> AbstractSet[GradientKind]:
    """Return the kinds of gradient that ``node`` gives its whole inputs, if its output has
    gradients of ``kinds``. Raises ConfigError if it sums gradients that are complete.
    """
    border = border_of(node)
    if border is not None and border.sums_gradient and GradientKind.COMPLETE in kinds:
        raise ConfigError(
            f"{node.name} sums the gradient of its inputs over the tensor-parallel ranks, and "
            "what it gives is read by layers that are whole, too; have these read what comes "
            "before it, or cut them"
        )
    if border is not None and border.completes_gradient and (is_part or kinds):
        return {GradientKind.COMPLETE}
    return {GradientKind.PARTIAL} if is_part else kinds
