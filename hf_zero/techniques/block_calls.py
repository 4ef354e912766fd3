"""Calls of a model's repeated blocks, taken over while a technique is installed.

[Note: around everything]
What a block is called with goes through a subclass of its class, of the same name, which the block
gets in place of it, as FSDP2 does. ``__call__`` of that class stands outside all hooks of the block
(gathers, marks, activation offload), outside its checkpoint and its compiled forward, so that a
call that is not made costs nothing. ``forward`` stays the very function that it was: transformers
asks by it whether a layer is to be checkpointed. Copies have the class of before; pickles are
refused with the words in which an engine refuses them without a technique
(``hf_zero.zero.gather.model_patches.Override``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hf_zero.techniques.blocks import Layer
from hf_zero.zero.gather.model_patches import outside_graphs
from hf_zero.zero.layout.unit import RootForward

Call = Callable[..., Any]
# call(block, run, args, kwargs): in place of run(*args, **kwargs)
TakesOver = Callable[[nn.Module, Call, tuple[Any, ...], dict[str, Any]], Any]


class BlockCalls:
    """Lets ``take_over`` make the calls of ``blocks``, until :meth:`remove`."""

    def __init__(self, blocks: Sequence[nn.Module], take_over: TakesOver):
        self._before = {block: type(block) for block in blocks}
        made = {kind: _subclass(kind, take_over) for kind in set(self._before.values())}
        for block, kind in self._before.items():
            block.__class__ = made[kind]

    def remove(self) -> None:
        """Give the blocks their classes back. Idempotent."""
        for block, kind in self._before.items():
            block.__class__ = kind
        self._before = {}


def _subclass(kind: type[nn.Module], take_over: TakesOver) -> type[nn.Module]:
    plain = getattr(kind, "_hf_zero_plain", kind)

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return take_over(self, kind.__call__.__get__(self), args, kwargs)

    def reduce(self: nn.Module, protocol: Any) -> Any:
        made = kind.__reduce_ex__(self, protocol)
        return _new, (plain, *made[1][1:]), *made[2:]

    metaclass: Any = type(kind)
    made: type[nn.Module] = metaclass(kind.__name__, (kind,), {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
        "__call__": outside_graphs(call),
        "__reduce_ex__": reduce,
        "_hf_zero_plain": plain,
    })  # fmt: skip
    if made.forward is not kind.forward:  # transformers wraps that of each subclass
        made.forward = kind.forward  # type: ignore[method-assign]
    return made


def _new(kind: type[nn.Module], *args: Any) -> nn.Module:
    """What a pickle makes; of another class than the block has, which ``copyreg.__newobj__`` is not
    allowed to.
    """
    return kind.__new__(kind, *args)


# ---- what blocks take and return ----


def hidden_state(
    args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[int | str, torch.Tensor] | None:
    """The tensor that a block maps to another, and its place among the arguments: the keyword
    ``hidden_states``, or the first floating-point tensor.
    """
    named = kwargs.get("hidden_states")
    if isinstance(named, torch.Tensor):
        return "hidden_states", named
    every: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    for place, value in every:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return place, value
    return None


def first_of(output: Any) -> Any:
    """The new hidden state in what a block returns: a tensor, or a tuple that begins with it."""
    return output[0] if isinstance(output, tuple) and output else output


def with_first(output: Any, state: torch.Tensor) -> Any:
    """``output`` of a block with another hidden state."""
    if not isinstance(output, tuple):
        return state
    rest = output[1:]
    return type(output)(state, *rest) if hasattr(output, "_fields") else (state, *rest)


class ReturnedBefore:
    """What blocks return beside a hidden state, for the block after them in their stack: never
    beyond a forward, whose graph it would keep.
    """

    def __init__(self) -> None:
        self._tuples: dict[str, Any] = {}

    def take(self, layer: Layer) -> Any:
        """What the block before ``layer`` has returned, where that was a tuple."""
        return self._tuples.pop(layer.stack, None)

    def note(self, layer: Layer, output: Any) -> Any:
        """``output``, which ``layer`` returns."""
        if isinstance(output, tuple) and layer.place < layer.of:
            self._tuples[layer.stack] = output
        return output

    def clear(self) -> None:
        self._tuples.clear()


class DrawsForBlocks(ABC):
    """What techniques have in common that draw at random for the repeated blocks of a model: a
    :class:`hf_zero.techniques.registry.Technique` but for ``install``.
    """

    def __init__(self) -> None:
        self._before = ReturnedBefore()
        self._calls: BlockCalls | None = None
        self._engine: Any = None

    def _take_over(self, engine: Any, blocks: Sequence[nn.Module]) -> None:
        """Let :meth:`_draw` draw for the forwards of ``engine``, and :meth:`_call` make the calls
        of ``blocks``.
        """
        self._engine = engine
        self._calls = BlockCalls(blocks, self._call)
        engine.backward_pass.hooks.draws.append(self._draw)

    @abstractmethod
    def _draw(self, forward: RootForward) -> Collection[nn.Module]:
        """Draw for ``forward``; gives the blocks that all ranks leave out."""

    @abstractmethod
    def _call(
        self, block: nn.Module, run: Call, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """What ``block`` returns, called with these arguments; ``run`` runs it."""

    def end_step(self) -> None:  # noqa: B027
        """Nothing: all is computed from the counters."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027
        """Nothing is kept."""

    def remove(self) -> None:
        if self._calls is not None:
            self._calls.remove()
            self._engine.backward_pass.hooks.draws.remove(self._draw)
        self._calls, self._engine = None, None
