"""Programs over rows: the operations that lead from hidden states to a deferred tensor, each of
which computes a row [width] from the same row of its inputs.

A program is a graph of nodes over the same leading dimensions. A selection of rows applies to its
inputs, so a program of fewer rows is made without computing anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

import torch

from hf_zero.errors import KernelError
from hf_zero.ops.dispatch import version_of

T = TypeVar("T")
Select = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Autocast:
    """The autocast state of a device type at one time."""

    device_type: str
    enabled: bool
    dtype: torch.dtype

    @classmethod
    def now(cls, device: torch.device) -> Autocast:
        kind = device.type
        if not torch.amp.is_autocast_available(kind):
            return cls(kind, False, torch.float32)
        return cls(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))

    @contextmanager
    def active(self) -> Iterator[None]:
        with ExitStack() as stack:
            if torch.amp.is_autocast_available(self.device_type) and self != Autocast.now(
                torch.device(self.device_type)
            ):
                stack.enter_context(
                    torch.autocast(self.device_type, dtype=self.dtype, enabled=self.enabled)
                )
            yield

    def during(self, function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """Return ``function``, called in this state."""

        def called(*args: object) -> torch.Tensor:
            with self.active():
                return function(*args)

        return called


def log_softmax(value: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """Step of torch.log_softmax over the last dimension."""
    return torch.log_softmax(value, -1, dtype)


def detached(value: torch.Tensor) -> torch.Tensor:
    """Step of a tensor without a graph."""
    return value.detach()


class VocabularyAxis(Protocol):
    """Tensor-parallel ranks, each with a part of the columns of a module's output."""

    rank: int
    size: int

    def join(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """Join [..., n] of each rank to [..., size * n] on all of them."""


class RowwiseCall(Protocol):
    """A call of a module that computes each row of its output from the same row of its input."""

    autocast: Autocast
    tensors: tuple[torch.Tensor, ...]  # parameters at the time of the call

    @property
    def module(self) -> object:
        """The module that was called."""

    @property
    def axis(self) -> VocabularyAxis | None:
        """The ranks that have parts of its parameters; None: they are whole."""

    @property
    def linear(self) -> bool:
        """Return whether it is a product with a weight [out, in], plus a bias if there are two."""

    @property
    def needs_ranks(self) -> bool:
        """Return whether running it may need other ranks, which hold parts of its parameters."""

    def check(self) -> None:
        """Raise KernelError if a parameter has changed since the call."""

    def renewed(self) -> RowwiseCall:
        """Return the call with the values that the parameters have now."""

    def entering(self, rows: torch.Tensor) -> torch.Tensor:
        """Return ``rows`` as inputs of :meth:`compute`, whose gradients are summed over ranks."""

    def compute(self, rows: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        """Return the output for entering ``rows`` [..., in] with ``tensors`` as parameters."""

    def joined(self, output: torch.Tensor) -> torch.Tensor:
        """Return the whole output of all ranks for the part of this one."""

    def run(self, rows: torch.Tensor, body: Callable[..., T]) -> T:
        """Call the module with ``rows``, and return ``body(rows, *parameters)`` of the entering
        rows, which its forward runs: so hooks on the module gather its parameters.
        """


@dataclass(frozen=True, eq=False)
class RowsNode:
    """A node that reads ``rows`` [*lead, k], and their version at the time of the record."""

    rows: torch.Tensor
    version: int | None = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "version", version_of(self.rows))

    @property
    def has_changed(self) -> bool:
        return version_of(self.rows) != self.version


@dataclass(frozen=True, eq=False)
class CallNode(RowsNode):
    """The output of a module for ``rows`` [*lead, in], themselves plain or deferred."""

    call: RowwiseCall

    def check(self) -> None:
        """Raise KernelError if the rows or a parameter have changed since the call."""
        self.call.check()
        if self.has_changed:
            raise KernelError(
                f"the hidden states {tuple(self.rows.shape)} of deferred logits were changed in "
                "place after the forward; read outputs.logits before, or leave the kernel loss out"
            )


@dataclass(frozen=True, eq=False)
class Operand(RowsNode):
    """An operand [*lead, width] of the function ``name``."""

    name: str

    def check(self) -> None:
        """Raise KernelError if the operand has changed since the function was called."""
        if self.has_changed:
            raise KernelError(
                f"the operand {tuple(self.rows.shape)} of {self.name} of deferred logits was "
                "changed in place; give it a copy of the operand, or leave the kernel loss out"
            )


@dataclass(frozen=True, eq=False)
class Vector:
    """An operand [width] or [] that all rows share, and that nothing else writes to."""

    tensor: torch.Tensor


@dataclass(frozen=True, eq=False)
class Step:
    """``function`` of ``inputs``: nodes, and numbers as they are. ``widens``: it is a cast to the
    dtype in which losses are computed.
    """

    function: Callable[..., torch.Tensor]
    inputs: tuple[Any, ...]
    autocast: Autocast
    widens: bool = False


Node = CallNode | Operand | Vector | Step


def nodes_of(node: Node) -> list[Node]:
    """Return the nodes of a program, inputs first, each once."""
    ordered: dict[int, Node] = {}
    _add_nodes(node, ordered)
    return list(ordered.values())


def _add_nodes(node: Node, ordered: dict[int, Node]) -> None:
    if id(node) not in ordered:
        if isinstance(node, Step):
            for value in node.inputs:
                if isinstance(value, Node):
                    _add_nodes(value, ordered)
        ordered[id(node)] = node


def check(node: object) -> None:
    """Raise KernelError if a call or an operand does not have the values it was recorded with."""
    if isinstance(node, CallNode | Operand):
        node.check()


def selected(node: Node, select: Select) -> Node:
    """Return the program over the rows that ``select`` takes of a tensor [*lead, any width].

    Raises KernelError if the program has changed: a selection must not be of later values.
    """
    for part in nodes_of(node):
        check(part)
    return _with_rows(node, lambda part: replace(part, rows=select(part.rows)))


def renewed(node: Node) -> Node:
    """Return the program over the values that its rows and parameters have now: those of a forward
    that a graph has launched again.
    """

    def renew(part: RowsNode) -> RowsNode:
        rows: torch.Tensor = part.rows
        rows = rows.renewed() if hasattr(rows, "renewed") else rows
        if isinstance(part, CallNode):
            return replace(part, rows=rows, call=part.call.renewed())
        return replace(part, rows=rows)

    return _with_rows(node, renew)


def _with_rows(node: Node, change: Callable[[Any], Any]) -> Node:
    """Return the program with the nodes that read rows changed by ``change``."""
    results: dict[int, Node] = {}
    for part in nodes_of(node):
        if isinstance(part, RowsNode):
            results[id(part)] = change(part)
        elif isinstance(part, Step):
            inputs = tuple(results.get(id(value), value) for value in part.inputs)
            results[id(part)] = replace(part, inputs=inputs)
        else:
            results[id(part)] = part
    return results[id(node)]


def evaluated(node: Node, values: dict[int, torch.Tensor]) -> torch.Tensor:
    """Return the value of ``node``; ``values``: those of its calls and operands, by id."""
    values = dict(values)
    for part in nodes_of(node):
        if isinstance(part, Step):
            inputs = [values.get(id(value), value) for value in part.inputs]
            with part.autocast.active():
                values[id(part)] = part.function(*inputs)
    return values[id(node)]


def run(
    node: Node,
    body: Callable[[Callable[..., torch.Tensor], list[torch.Tensor], list[torch.Tensor]], T],
    rows_of: Callable[[torch.Tensor], torch.Tensor],
) -> T:
    """Run ``body(function, rows, shared)`` inside the calls of the modules of ``node``, where their
    parameters are at hand, and return its result.

    ``function(*rows, *shared)`` computes the value [n, width] of the program from ``rows``, n of
    each, and from the parameters and vectors ``shared``. ``rows_of``: a plain tensor [*lead, k] of
    a plain or deferred one.
    """
    nodes = nodes_of(node)
    calls = [part for part in nodes if isinstance(part, CallNode)]
    operands = [part for part in nodes if isinstance(part, Operand)]
    vectors = [part for part in nodes if isinstance(part, Vector)]

    def function(*tensors: torch.Tensor) -> torch.Tensor:
        remaining = iter(tensors)
        rows_of_calls = [next(remaining) for _ in calls]
        values = {id(operand): next(remaining) for operand in operands}
        for call_node, rows in zip(calls, rows_of_calls):
            call = call_node.call
            parameters = [next(remaining) for _ in call.tensors]
            with call.autocast.active():
                values[id(call_node)] = call.compute(rows, *parameters)
        values |= {id(vector): next(remaining) for vector in vectors}
        return evaluated(node, values)

    def whole(rows: list[torch.Tensor], shared: list[torch.Tensor]) -> T:
        more = [operand.rows.reshape(-1, operand.rows.shape[-1]) for operand in operands]
        return body(function, rows + more, shared + [vector.tensor for vector in vectors])

    return _inside(calls, whole, rows_of, [], [])


def _inside(
    calls: Sequence[CallNode],
    body: Callable[[list[torch.Tensor], list[torch.Tensor]], T],
    rows_of: Callable[[torch.Tensor], torch.Tensor],
    rows: list[torch.Tensor],
    shared: list[torch.Tensor],
) -> T:
    """Return ``body`` of ``rows`` and ``shared``, each with those of ``calls`` added, whose modules
    run around it.
    """
    if not calls:
        return body(rows, shared)
    call = calls[0].call
    call.check()

    def inside(hidden: torch.Tensor, *tensors: torch.Tensor) -> T:
        if call.linear and call.autocast.enabled:  # once, instead of in each chunk
            hidden = hidden.to(call.autocast.dtype)
            tensors = tuple(tensor.to(call.autocast.dtype) for tensor in tensors)
        return _inside(calls[1:], body, rows_of, [*rows, hidden], [*shared, *tensors])

    hidden = rows_of(calls[0].rows)
    return call.run(hidden.reshape(-1, hidden.shape[-1]), inside)


@dataclass(frozen=True, eq=False)
class Affine:
    """A program of the form softcap · tanh(scale · (rows @ weight.T + bias) / softcap)."""

    call: CallNode
    scale: float = 1.0
    softcap: float | None = None
    bias: torch.Tensor | None = None  # beside the module's own

    @property
    def is_plain(self) -> bool:
        """Return whether it is the output of the module, or that in a wider dtype."""
        return self.scale == 1.0 and self.softcap is None and self.bias is None


def affine(node: Node, records: bool) -> Affine | None:
    """Return ``node`` as an :class:`Affine`, or None if it has another form or, if gradients are
    recorded (``records``), a part without a graph. Casts of 16 bits to fp32 are left out, because a
    loss is computed in fp32 in any case.
    """
    if isinstance(node, CallNode):
        return Affine(node) if node.call.linear else None
    if not isinstance(node, Step):
        return None
    name, first = getattr(node.function, "__name__", ""), node.inputs[0]
    if node.widens or (node.function is detached and not records):
        return affine(first, records)
    if not isinstance(first, Node):
        return None
    factor = _factor(name, node.inputs)
    if factor is not None:
        return _scaled(first, factor, records)
    if name in ("add", "__add__") and len(node.inputs) == 2:
        return _with_bias(first, node.inputs[1], records)
    return None


def _scaled(node: Node, factor: float, records: bool) -> Affine | None:
    """Return ``factor`` times ``node``; of a tanh ``factor`` is the soft cap."""
    capped = None
    if isinstance(node, Step) and getattr(node.function, "__name__", "") == "tanh":
        capped = node.inputs[0]
    inside = affine(node if capped is None else capped, records)
    if inside is None or inside.softcap is not None or (capped is not None and factor <= 0):
        return None
    softcap = None if capped is None else factor
    return Affine(inside.call, inside.scale * factor, softcap, inside.bias)


def _with_bias(node: Node, bias: object, records: bool) -> Affine | None:
    """Return the output of a module plus ``bias``, a vector over its columns."""
    inside = affine(node, records)
    if inside is None or not inside.is_plain or not isinstance(bias, Vector):
        return None
    if bias.tensor.shape != inside.call.call.tensors[0].shape[:1]:
        return None
    return Affine(inside.call, bias=bias.tensor)


def _factor(name: str, inputs: Sequence[object]) -> float | None:
    """Return the number that a product or a quotient multiplies its first input by."""
    if len(inputs) != 2:
        return None
    number = inputs[1]
    if isinstance(number, bool) or not isinstance(number, int | float):
        return None
    if name in ("mul", "multiply", "__mul__", "__rmul__"):
        return float(number)
    if name in ("div", "divide", "true_divide", "__truediv__") and number:
        return 1.0 / float(number)
    return None
