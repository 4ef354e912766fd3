"""Derive placements: find the whole parameters that are computed with parts of activations, so that
their gradients are partial (to be summed over the ranks).

A copy of the model without memory is cut like the model and runs once, on the meta device, with its
collectives left out. The rest follows from the graph recorded by autograd:

    the output of an operation    is a part if one of its inputs is: a cut parameter, or the output
                                  of ``split`` or ``own_part``; ``sum_over`` and ``gather`` return
                                  whole tensors
    the gradient of a whole       is partial if an operation that makes a part reads it, and
    tensor                        complete if whole operations do; ``copy_to`` sums it

No sum corrects the gradient of a whole parameter that is complete in one place and partial in
another.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import nn
from torch.autograd.graph import Node

from hf_zero.errors import ConfigError
from hf_zero.parallel.tensor import axis as borders
from hf_zero.parallel.tensor import layers
from hf_zero.parallel.tensor.axis import TensorAxis
from hf_zero.parallel.tensor.layers import is_sharded, put_on, take_off
from hf_zero.parallel.tensor.plan import Target
from hf_zero.zero.gather.model_patches import HOOKS
from hf_zero.zero.layout.meta_run import (
    GROUPED,
    META,
    NUMBERS,
    MetaAnswers,
    copy_on_meta,
    inputs_on_meta,
)
from hf_zero.zero.layout.sharding import Sharding, set_sharding, sharding_of
from hf_zero.zero.layout.tree import tensors_in

M = TypeVar("M", bound=nn.Module)

TOKENS = 8  # length of the sequence that runs
SUMMED = "replicated_with_grad_allreduce"
_COMPLETE, _PARTIAL = "complete", "partial"
_TAKE_PARTS = (borders._SumOver, borders._Gather)
_TAKE_WHOLE = (borders._CopyTo, borders._CopyLast, borders._Split, borders._OwnPart)
_MAKE_PARTS = (borders._Split, borders._OwnPart)
_MAKE = (layers.Colwise, layers.KeyValueHeads)
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


class RehearsedAxis(TensorAxis):
    """Rank ``rank`` of ``size``, with collectives that only produce shapes."""

    is_rehearsed = True

    def __init__(self, rank: int, size: int):
        super().__init__(SimpleNamespace(rank=rank, size=size))  # type: ignore[arg-type]

    def sum(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    def join(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x.new_empty(*x.shape[:-1], self.size * x.shape[-1])


def without_memory(
    model: nn.Module, present: TensorAxis | None, axis: RehearsedAxis
) -> tuple[nn.Module, dict[nn.Parameter, nn.Parameter]]:
    """Return a copy of ``model`` on the meta device, in fp32, with ``axis`` in place of
    ``present``, and a map from its parameters to those of ``model``.
    """
    memo: dict[int, Any] = {} if present is None else {id(present): axis}
    tensors = (*model.named_parameters(), *model.named_buffers())
    dtypes = {name: torch.float32 for name, tensor in tensors if tensor.is_floating_point()}
    twin = _bare(model, dtypes, memo).eval()
    for parameter in twin.parameters():
        parameter.requires_grad_(parameter.is_floating_point())
    originals = {memo[id(parameter)]: parameter for parameter in model.parameters()}
    return twin, originals


def copied(model: M) -> M:
    """Return a copy of ``model`` whose parameters have no memory, without hooks and without
    forwards set on its modules.
    """
    return _bare(model, {}, {id(buffer): buffer.clone() for buffer in model.buffers()})


def _bare(model: M, dtypes: Mapping[str, torch.dtype], memo: dict[int, Any]) -> M:
    for module in model.modules():
        for name in HOOKS:
            memo[id(module.__dict__[name])] = OrderedDict()
    twin = copy_on_meta(model, dtypes, memo)
    for parameter in model.parameters():
        set_sharding(memo[id(parameter)], sharding_of(parameter))
    for module in twin.modules():  # a forward set on a module may be bound to the original module
        module.__dict__.pop("forward", None)
    return twin


def _all_elements(
    func: Callable[..., object], args: tuple[torch.Tensor, ...], kwargs: Mapping[str, object]
) -> object:
    if not args[0].is_meta:
        return func(*args, **kwargs)
    return torch.empty(args[0].numel(), args[0].dim(), dtype=torch.int64, device=META)


# Experts choose the rows that they compute: here all.
_ANSWERS = {**NUMBERS, **GROUPED, torch.ops.aten.nonzero.default: _all_elements}


def shrink(parameter: nn.Parameter, sharding: Sharding) -> None:
    """Keep only the shape of the part in the box of ``sharding``."""
    assert sharding.box is not None
    parameter.data = parameter.data.new_empty(sharding.box.shape)
    set_sharding(parameter, sharding)


def run(twin: Any) -> tuple[list[torch.Tensor], set[str]]:
    """Run ``twin``, a copy without memory, on a sequence of zeros; return its differentiable
    outputs and the names of the modules that ran.
    """
    ran: set[str] = set()
    for name, module in twin.named_modules():
        _leave_out_experts(module)
        module.register_forward_pre_hook(partial(_note, ran, name))
    inputs = inputs_on_meta(twin, 1, TOKENS)
    with torch.enable_grad(), META, MetaAnswers(_ANSWERS):
        outputs = twin(**inputs)
    first = outputs[0] if isinstance(outputs, tuple) else next(iter(outputs.values()))
    return [tensor for tensor in tensors_in(first) if tensor.requires_grad], ran


def _note(ran: set[str], name: str, *_: object) -> None:
    ran.add(name)


def _leave_out_experts(module: torch.nn.Module) -> None:
    """Replace experts spread over ranks, to which tokens would be sent, by a function of the
    tokens, their routing weights and the parameters.
    """
    if not any(
        "expert" in sharding_of(parameter).axes for parameter in module.parameters(recurse=False)
    ):
        return
    around = take_off(module) if is_sharded(module) else None
    module.__class__ = _AbsentExperts
    if around is not None:
        put_on(module, *around)


class _AbsentExperts(nn.Module):
    def forward(self, hidden_states: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        read = [*tensors_in((args, kwargs)), *self.parameters()]
        return hidden_states * sum(p.sum() for p in read if p.is_floating_point())


def gradients(outputs: Iterable[torch.Tensor]) -> dict[nn.Parameter, set[str]]:
    """Return for each whole parameter in the graph of ``outputs`` whether its gradient is complete,
    partial, or both, in several places. Raises ConfigError for a layer that receives parts although
    its style takes whole tensors, and vice versa.
    """
    order = _from_leaves(output.grad_fn for output in outputs if output.grad_fn is not None)
    parts: dict[object, bool] = {}
    for node in order:
        parts[node] = _makes_parts(node, any(parts[child] for child in _children(node)))
    by_node: dict[object, set[str]] = {node: set() for node in order}
    for output in outputs:
        if not parts[output.grad_fn]:
            by_node[output.grad_fn].add(_COMPLETE)
    for node in reversed(order):
        kind, states = _border(node), by_node[node]
        if kind is borders._CopyTo and _COMPLETE in states:
            raise ConfigError(
                f"{node.name} sums the gradient of its inputs over the tensor-parallel ranks, and "
                "what it gives is read by layers that are whole, too; have these read what comes "
                "before it, or cut them"
            )
        if parts[node]:
            states = {_COMPLETE if kind is borders._Split else _PARTIAL}
        elif kind in (borders._CopyTo, borders._CopyLast) and states:
            states = {_COMPLETE}
        for child in _children(node):
            if not parts[child]:
                by_node[child] |= states
    return {node.variable: by_node[node] for node in order if hasattr(node, "variable")}


def _border(node: object) -> type | None:
    return getattr(node, "_forward_cls", None)


def _children(node: Node) -> list[Node]:
    return [child for child, _ in node.next_functions if child is not None]


def _makes_parts(node: Node, reads_parts: bool) -> bool:
    """Return whether the output of ``node`` is a part."""
    if hasattr(node, "variable"):
        return "tensor" in sharding_of(node.variable).axes
    kind = _border(node)
    if kind in _TAKE_PARTS and not reads_parts:
        raise ConfigError(
            f"{node.name} sums or joins what the tensor-parallel ranks have made with their parts, "
            "and all that it is given is whole: the plan gives it a style for parts, and cuts "
            "nothing before it"
        )
    if kind in _TAKE_WHOLE and reads_parts:
        raise ConfigError(
            f"{node.name} takes whole inputs by its style of the tensor-parallel plan, and is "
            "given the parts of a layer before it; let that layer give whole outputs "
            "('colwise_gather_output', 'rowwise')"
        )
    return kind in _MAKE_PARTS or (kind not in (*_TAKE_PARTS, *_TAKE_WHOLE) and reads_parts)


def _from_leaves(roots: Iterable[Node]) -> list[Node]:
    """Return the nodes of a graph in topological order, each after the nodes that it reads."""
    order: list[Node] = []
    visited: set[Node] = set()
    waiting = [(root, False) for root in roots]
    while waiting:
        node, is_done = waiting.pop()
        if is_done:
            order.append(node)
        elif node not in visited:
            visited.add(node)
            waiting.append((node, True))
            waiting += [(child, False) for child in _children(node)]
    return order


def placements(
    model: nn.Module, kinds_of: Mapping[nn.Parameter, set[str]]
) -> dict[nn.Parameter, bool]:
    """Return for each whole parameter of ``model`` whether its gradient is partial, by the result
    ``kinds_of`` of :func:`gradients`. Raises ConfigError for one with both kinds of use.
    """
    mixed = [
        name
        for name, parameter in model.named_parameters()
        if len(kinds_of.get(parameter, ())) > 1 and "tensor" not in sharding_of(parameter).axes
    ]
    if mixed:
        raise ConfigError(
            f"{mixed[-1]} is computed with parts of activations in one place and with whole ones "
            f"in another ({len(mixed)} such parameters), so that no sum over the tensor-parallel "
            "ranks makes its gradient right: a layer of which each rank has a part reads a whole "
            "tensor that the plan does not hand it; cut that layer by a style that takes whole "
            "inputs, or leave it whole, by hf_zero.tensor_parallel(model, size, plan=...)"
        )
    return {
        parameter: _PARTIAL in kinds
        for parameter, kinds in kinds_of.items()
        if kinds and "tensor" not in sharding_of(parameter).axes
    }


def check_unplaced(
    model: nn.Module,
    planned: Iterable[Target],
    placed: Iterable[nn.Parameter],
    ran: Container[str],
    reason: str,
) -> None:
    """Raise ConfigError for a whole, trainable parameter beside layers that are cut into parts, if
    the plan does not name it (``planned``), it is not in ``placed``, and its module is not in
    ``ran``.
    """
    targets = list(planned)
    named = {*placed, *(p for t in targets for p in t.module.parameters(recurse=False))}
    between = {
        t.parent for t in targets if t.style.runs is not None and issubclass(t.style.runs, _MAKE)
    }
    for path, module in model.named_modules():
        inside = any(path == prefix or path.startswith(f"{prefix}.") for prefix in between)
        if path in ran or not inside:
            continue
        for name, parameter in module.named_parameters(path, recurse=False):
            if parameter in named or not parameter.requires_grad:
                continue
            raise ConfigError(
                f"{name} is whole and lies among layers of which each tensor-parallel rank has a "
                f"part; the plan does not name it, and {reason}, so that nobody knows whether it "
                "is computed with parts: give it the style 'replicate' if its inputs are whole, or "
                f"{SUMMED!r} if they are parts, by hf_zero.tensor_parallel(model, size, "
                f"plan={{{_NUMBER.sub('*', name)!r}: ...}})"
            )
