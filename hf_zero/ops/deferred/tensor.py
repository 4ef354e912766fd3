"""``DeferredOutput``: a tensor that has not been computed.

[Note: what a deferred tensor is to autograd]
It is an ordinary citizen of the graph. Its ``grad_fn`` is a node that computes the gradients of its
program for whole rows, so code that torch functions do not reach (``autograd.Function.apply``, DDP,
reentrant checkpoints, C++) loses no gradient: it gets plain values from ``__torch_dispatch__``, and
its gradient arrives at that node. Losses that are computed in chunks bypass the node. If another
node adopts the tensor (the output of a reentrant checkpoint), it is read through that node alone.

[Note: views and writes]
A deferred view is read as a view of what it was taken of, so that writes reach it. A deferred copy
(a product, a cast, a clone) is computed from its program, or before a write to what it was made of.
Once a tensor has been computed (``whole``), everything else is done with the plain tensor.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch.autograd.graph import GradientEdge
from torch.utils._pytree import tree_leaves, tree_map

from hf_zero.errors import KernelError
from hf_zero.logging import log_rank0
from hf_zero.ops.chunked_head import accumulator_dtype, rows_of_a_chunk
from hf_zero.ops.deferred import facts, programs
from hf_zero.ops.deferred.chunks import by_rows, recorded
from hf_zero.ops.deferred.programs import Autocast, CallNode, Node, RowwiseCall, Select, Step
from hf_zero.ops.deferred.uses import SELF, ChunkedUse, History
from hf_zero.ops.operators import GradientContext

# by function of torch: what takes its arguments, or returns NotImplemented
HANDLERS: dict[object, Callable[..., object]] = {}
OF_GRADIENTS: dict[object, Callable[..., object]] = {}  # the same, of computed ones too
_grad_fn: Any = torch.Tensor.grad_fn
_materialized: set[str] = set()  # operations that were named in the log


class Derivation(NamedTuple):
    """How the plain value of a deferred tensor is computed: ``function(*inputs)``.

    parents: the deferred tensors of which it is a copy or, with ``alias``, a view; they come first
    among the inputs. The output of a call has none.
    """

    function: Callable[..., torch.Tensor]
    inputs: tuple[torch.Tensor, ...]
    parents: tuple[DeferredOutput, ...] = ()
    alias: bool = False


class DeferredOutput(torch.Tensor):
    """The value of a program over rows, [*lead, width]; see the notes of this module."""

    program: Node
    parents: tuple[DeferredOutput, ...]
    replay: Callable[..., torch.Tensor]  # its value from those of its parents, or of the inputs
    alias: bool  # a view of its parent
    whole: torch.Tensor | None
    raw: torch.Tensor | None  # the value without a graph, for code below torch functions
    history: History
    copies: weakref.WeakSet[DeferredOutput]  # made of it, and not views of it
    sources: tuple[DeferredOutput, ...]  # its parents, or the deferred input of its call
    uses: list[ChunkedUse]  # of it, and of what was made of it
    versions: tuple[int, ...]  # of the parents' plain tensors
    plain_grad_fn: object  # its node of autograd, if no other node has adopted it

    __hash__ = torch.Tensor.__hash__

    @classmethod
    def of_call(cls, call: RowwiseCall, rows: torch.Tensor, like: torch.Tensor) -> DeferredOutput:
        """Return the output of ``call`` for ``rows`` [*lead, in]; ``like`` has its dtype and, as
        last dimension, its width.
        """
        shape = (*rows.shape[:-1], like.shape[-1])
        empty = torch.empty(shape, dtype=like.dtype, device="meta")
        node = CallNode(rows, call)

        def compute(*tensors: torch.Tensor) -> torch.Tensor:
            node.check()
            rows, *parameters = tensors
            return call.compute(call.entering(rows), *parameters)

        derivation = Derivation(call.autocast.during(compute), (rows, *call.tensors))
        return cls._create(node, empty, rows.device, derivation)

    @classmethod
    def _create(
        cls,
        program: Node,
        like: torch.Tensor,
        device: torch.device,
        derivation: Derivation,
        detached: bool = False,
    ) -> DeferredOutput:
        """Return a tensor on ``device`` with the shape, strides and dtype of ``like``, whose rows
        ``program`` computes.
        """
        replay, inputs, parents, alias = derivation
        records = (
            not detached
            and torch.is_grad_enabled()
            and like.is_floating_point()
            and any(item.requires_grad for item in inputs)
        )
        if not records and any(item.requires_grad for item in inputs):
            program = Step(programs.detached, (program,), Autocast.now(device))

        def new() -> DeferredOutput:
            tensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
                cls, like.shape, strides=like.stride(), dtype=like.dtype, device=device
            )
            torch._C._set_throw_on_mutable_data_ptr(tensor)  # for C code that would read its memory
            return tensor  # type: ignore[no-any-return]

        with torch._C.DisableTorchFunctionSubclass():
            output = _DeferredNode.apply(new, replay, *inputs) if records else new()
            output.plain_grad_fn = _grad_fn.__get__(output)
        output.program, output.parents, output.alias, output.whole = program, parents, alias, None
        output.replay = replay
        output.sources = parents or tuple(item for item in inputs[:1] if isinstance(item, cls))
        constants = () if parents else inputs[1:]
        shape = like.shape
        output.history = History(
            lambda: _computed(program).reshape(shape),
            lambda *values: replay(*values, *constants),
            tuple(item.history for item in output.sources),
        )
        output.raw = None
        output.copies, output.uses = weakref.WeakSet(), []
        output.versions = tuple(
            item.whole._version if item.whole is not None else 0 for item in parents
        )
        if not alias:
            for root in {id(item._root): item._root for item in parents}.values():
                root.copies.add(output)  # once: a set would compare it with itself, by elements
        return output

    @property
    def _root(self) -> DeferredOutput:
        return self.parents[0]._root if self.alias else self

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., object],
        types: object,
        args: Any = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        if function in facts.METADATA:
            first = args[0]
            if first.whole is not None:
                return function(first.whole, *args[1:], **kwargs)
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **kwargs)
        handler, of_gradients = HANDLERS.get(function), OF_GRADIENTS.get(function)
        if handler is not None:
            deferred = [item for item in tree_leaves((args, kwargs)) if isinstance(item, cls)]
            if all(item.is_live() for item in deferred):
                result = handler(function, args, kwargs)
                if result is not NotImplemented:
                    return result
        if of_gradients is not None:
            result = of_gradients(function, args, kwargs)
            if result is not NotImplemented:
                return result
        return cls._materialized_call(function, args, kwargs)

    @classmethod
    def _materialized_call(
        cls, function: Callable[..., object], args: object, kwargs: Mapping[str, object]
    ) -> object:
        """Return ``function`` of plain tensors, and say once that they were computed for it."""
        deferred = [item for item in tree_leaves((args, kwargs)) if isinstance(item, cls)]
        name = torch.overrides.resolve_name(function) or getattr(function, "__name__", "?")
        if facts.shows(function) and any(
            item.whole is None and item.needs_ranks for item in deferred
        ):
            return facts.shown(function, deferred[0], name)
        if facts.writes(function, args, kwargs):
            for item in deferred:
                item._root._compute_copies()
        for item in deferred:
            if item.whole is None:
                tell(name, item)
        arguments = tree_map(
            lambda one: one.materialize() if isinstance(one, cls) else one, (args, kwargs)
        )
        return function(*arguments[0], **arguments[1])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        function: Any,
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Return ``function`` of plain values, for code below torch functions; autograd has
        recorded it already.
        """
        if function._schema.is_mutable:
            raise KernelError(
                f"{function} writes into a {cls.__name__}, which has no memory; write into "
                "tensor.clone(), or leave the kernel loss out"
            )
        arguments = tree_map(
            lambda one: one._raw_value() if isinstance(one, cls) else one, (args, kwargs or {})
        )
        return function(*arguments[0], **arguments[1])

    @property
    def needs_ranks(self) -> bool:
        """Return whether reading it may be a collective."""
        return any(
            node.call.needs_ranks
            for node in programs.nodes_of(self.program)
            if isinstance(node, CallNode)
        )

    def is_live(self) -> bool:
        """Return whether it and all that it was made of are neither computed nor adopted."""
        return (
            self.whole is None
            and not self._adopted
            and all(item.is_live() for item in self.parents)
        )

    @property
    def _adopted(self) -> bool:
        with torch._C.DisableTorchFunctionSubclass():
            return _grad_fn.__get__(self) is not self.plain_grad_fn

    @property
    def records(self) -> bool:
        """Return whether gradients with respect to it are recorded."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.requires_grad

    def recording(self) -> AbstractContextManager[object]:
        """Return a context in which gradients are recorded if those of this tensor are."""
        return torch.set_grad_enabled(torch.is_grad_enabled() and self.records)

    def ends(self) -> list[torch.Tensor | GradientEdge]:
        """Return what receives its gradient in a graph: its node, and its plain values."""
        with torch._C.DisableTorchFunctionSubclass():
            node = _grad_fn.__get__(self)
            ends: list[torch.Tensor | GradientEdge] = (
                [] if node is None else [GradientEdge(node, self.output_nr)]
            )
        if self.whole is None and not ends:
            return [self.materialize()]  # torch refuses it: it requires no gradient
        return ends if self.whole is None or self._adopted else [*ends, self.whole]

    def materialize(self) -> torch.Tensor:
        """Return the plain tensor: computed once, with its graph.

        Raises:
            KernelError: a parameter or an input of the program has changed since.
        """
        if self.whole is not None:
            return self.whole
        with torch.inference_mode(False), torch.set_grad_enabled(self.records):
            if self._adopted:
                whole: torch.Tensor = _Read.apply(self)
            elif self.parents:
                whole = self.replay(*map(self._unchanged, self.parents, self.versions))
            else:
                whole = self.value()
        self.whole = whole
        return whole

    def _unchanged(self, parent: DeferredOutput, version: int) -> torch.Tensor:
        """Return the plain ``parent``; refuse one that was written to since this copy was made."""
        whole = parent.materialize()
        if not self.alias and whole._version != version:
            raise KernelError(
                f"values {tuple(whole.shape)} were changed in place after a copy of them was "
                "deferred; use the copy before, or leave out the kernel loss"
            )
        return whole

    def value(self) -> torch.Tensor:
        """Return the values computed from the program, without keeping them."""
        return _computed(self.program).reshape(self.shape)

    def renewed(self) -> DeferredOutput:
        """Return a tensor without a graph of the same program over the values that its rows and
        parameters have now: those of a forward that a graph of the device has launched again.
        """
        step = Step(programs.detached, (programs.renewed(self.program),), Autocast.now(self.device))
        with torch._C.DisableTorchFunctionSubclass():
            like = torch.empty(self.shape, dtype=self.dtype, device="meta")

        def replay(*_: torch.Tensor) -> torch.Tensor:
            return _computed(step).reshape(like.shape)

        return self._create(step, like, self.device, Derivation(replay, ()), detached=True)

    def _raw_value(self) -> torch.Tensor:
        """Return the plain value without a graph."""
        if self.whole is not None:
            return self.whole.detach()
        if self.raw is None:
            with torch.no_grad():
                self.raw = (
                    self.value()
                    if not self._adopted or not self.parents
                    else self.replay(*(item._raw_value() for item in self.parents))
                )
        return self.raw

    def _compute_copies(self) -> None:
        """Compute the tensors made of this one, but for its views, before a write to it."""
        for item in list(self.copies):
            if item.whole is None:
                item.materialize()
            item._root._compute_copies()

    def selected(
        self,
        function: Select,
        select: Select,
        like: torch.Tensor,
        alias: bool,
        detached: bool = False,
    ) -> DeferredOutput:
        """Return the rows that ``select`` takes of any tensor [*lead, k]; ``function`` takes them
        of the plain tensor, and ``like`` has their metadata.
        """
        program = programs.selected(self.program, select)
        derivation = Derivation(function, (self,), (self,), alias)
        return self._create(program, like, self.device, derivation, detached)

    def step(
        self,
        function: Callable[..., torch.Tensor],
        inputs: tuple[object, ...],
        like: torch.Tensor,
        derivation: Derivation,
        widens: bool = False,
    ) -> DeferredOutput:
        """Return ``function(*inputs)``, of nodes and numbers, recorded as a step; ``derivation``
        has the same on plain tensors, and ``like`` the dtype and width of rows.
        """
        node = Step(function, inputs, Autocast.now(self.device), widens)
        whole = torch.empty((*self.shape[:-1], like.shape[-1]), dtype=like.dtype, device="meta")
        derivation = derivation._replace(function=node.autocast.during(derivation.function))
        return self._create(node, whole, self.device, derivation)

    def reduced(self, function: Callable[..., torch.Tensor], *extras: torch.Tensor) -> torch.Tensor:
        """Return ``function(rows, *extras)`` [*lead, ...], computed in chunks; ``rows`` [n, width],
        ``extras`` [*lead, k].
        """
        lead, width = self.shape[:-1], self.shape[-1]
        state = Autocast.now(self.device)
        size = rows_of_a_chunk(
            max(1, lead.numel()), width, accumulator_dtype(self.dtype).itemsize, self.device
        )
        number = len(extras)

        def body(
            program: Callable[..., torch.Tensor],
            rows: list[torch.Tensor],
            shared: list[torch.Tensor],
        ) -> torch.Tensor:
            def of_chunk(*tensors: torch.Tensor) -> torch.Tensor:
                chunked = tensors[: len(tensors) - len(shared)]
                value = program(*chunked[: len(chunked) - number], *tensors[len(chunked) :])
                with state.active():
                    return function(value, *chunked[len(chunked) - number :])

            more = [item.reshape(-1, item.shape[-1]) for item in extras]
            return by_rows(of_chunk, [*rows, *more], shared, size)

        _check(self.program)
        with self.recording():
            flat = programs.run(self.program, body, plain_rows)
            return flat.reshape((*lead, *flat.shape[1:]))

    def rows(self, select: Select) -> torch.Tensor:
        """Return the values [n, width] of the rows that ``select`` takes, and compute no others."""

        def chosen(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.rows(select) if isinstance(tensor, DeferredOutput) else select(tensor)

        return _computed(programs.selected(self.program, chosen))

    def used(
        self, result: torch.Tensor, function: Callable[..., object], args: object, kwargs: object
    ) -> torch.Tensor:
        """Note that ``result`` is ``function`` of this tensor, for gradients with respect to it."""
        if result.requires_grad:
            arguments = tree_map(lambda one: SELF if one is self else one, (args, kwargs))
            use = ChunkedUse(result, self.history, function, *arguments)
            origins: dict[int, DeferredOutput] = {}
            self._add_origins(origins)
            for item in origins.values():
                item.uses.append(use)
        return result

    def _add_origins(self, origins: dict[int, DeferredOutput]) -> None:
        """Add it and all that it was made of, if gradients are recorded, to ``origins``."""
        if self.records and id(self) not in origins:
            origins[id(self)] = self
            for item in self.sources:
                item._add_origins(origins)


# torch.compile of a function of deferred tensors runs each operation on one outside its graphs.
_method: Any
for _method in (DeferredOutput.__torch_function__, DeferredOutput.__torch_dispatch__):
    _method.__func__._torchdynamo_disable = True
    set_code_exec_strategy(
        _method.__func__.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
    )


def plain_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return a plain tensor of a plain or deferred one, computed without being kept."""
    if not isinstance(tensor, DeferredOutput):
        return tensor
    return tensor.value() if tensor.is_live() else tensor.materialize()


def _computed(program: Node) -> torch.Tensor:
    """Return the values [rows, width] of ``program``."""
    _check(program)
    output: torch.Tensor = programs.run(
        program, lambda function, rows, shared: function(*rows, *shared), plain_rows
    )
    return output


def _check(program: Node) -> None:
    """Raise KernelError if the program would not compute what it did at the time of its calls."""
    for node in programs.nodes_of(program):
        programs.check(node)


def tell(name: str, tensor: DeferredOutput) -> None:
    """Log once for each operation ``name`` that it has ``tensor`` computed whole."""
    if name not in _materialized:
        _materialized.add(name)
        log_rank0(
            f"{name} reads logits {tuple(tensor.shape)} that the kernel loss has deferred: they "
            "are computed whole for it, as without the kernel",
            logging.INFO,
        )


class _DeferredNode(torch.autograd.Function):
    """The node of a deferred tensor: gradients of its value for whole rows."""

    @staticmethod
    def forward(
        ctx: GradientContext, new: Callable[[], object], replay: object, *inputs: object
    ) -> object:
        ctx.replay, ctx.inputs = replay, inputs
        return new()

    @staticmethod
    def backward(ctx: GradientContext, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        values = [
            item.materialize() if isinstance(item, DeferredOutput) else item for item in ctx.inputs
        ]
        return None, None, *recorded(ctx.replay, values, ctx.needs_input_grad[2:], grad)


class _Read(torch.autograd.Function):
    """The plain values of a deferred tensor that another node has adopted."""

    @staticmethod
    def forward(ctx: GradientContext, tensor: DeferredOutput) -> torch.Tensor:
        return tensor._raw_value().clone()

    @staticmethod
    def backward(ctx: GradientContext, grad: torch.Tensor) -> torch.Tensor:
        return grad
