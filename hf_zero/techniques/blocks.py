"""The repeated blocks of a model, for techniques: how they are found, and how their calls are
intercepted.

Blocks are found as for units and checkpoints.

[Note: around everything]
The calls of a block go through a subclass of its class, of the same name, which the block gets in
place of it, as FSDP2 does. ``__call__`` of that class runs outside all hooks of the block (gathers,
marks, activation offload), outside its checkpoint and its compiled forward, so that a call that is
not made costs nothing. ``forward`` stays the very function that it was: transformers asks by it
whether a layer is to be checkpointed. Copies have the class of before; pickles are refused with the
words in which an engine refuses them without a technique
(``hf_zero.zero.gather.model_patches.Override``).
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import nn

from hf_zero.errors import ConfigError
from hf_zero.zero.feature import Feature
from hf_zero.zero.gather.model_patches import Attached, outside_graphs
from hf_zero.zero.gather.unit import OutermostForward
from hf_zero.zero.layout.walk import described
from hf_zero.zero.layout.wrap import find_blocks, repeated_blocks

if TYPE_CHECKING:
    from hf_zero.zero.training_engine import TrainingEngine

Drawn = TypeVar("Drawn")  # by a technique, for one forward
Call = Callable[..., object]
# call(block, run, args, kwargs), instead of run(*args, **kwargs)
TakesOver = Callable[[nn.Module, Call, tuple[object, ...], dict[str, object]], object]


@dataclass(frozen=True, eq=False)
class StackedBlock:
    """A repeated block, number ``place`` of ``of`` in its stack, counted from 1."""

    block: nn.Module
    stack: str  # path of the containing module
    place: int
    of: int
    keeps: bool  # must run on all tokens: it returns more than a hidden state


def stacked_blocks(model: nn.Module, key: str) -> list[StackedBlock]:
    """Return the repeated blocks of ``model``, from stacks of two or more, whose hidden state keeps
    its length; this excludes the strided convolutions before the layers of wav2vec 2.0. Raises
    ConfigError, naming ``key``, if there are none.
    """
    stacks: dict[str, list[nn.Module]] = {}
    for path, block in repeated_blocks(model):
        if not _has_strides(block):
            stacks.setdefault(path.rpartition(".")[0], []).append(block)
    layers = [
        StackedBlock(block, stack, index, len(blocks), index == 1 and not _returns_a_tensor(block))
        for stack, blocks in stacks.items()
        if len(blocks) > 1
        for index, block in enumerate(blocks, 1)
    ]
    if not layers:
        raise ConfigError(
            f"{key}.enabled concerns the repeated blocks of a model, and {type(model).__name__} "
            "has none (layers of transformers, _no_split_modules, or items of a ModuleList); "
            "remove the key"
        )
    return layers


def layers_at(model: nn.Module, path: str | None, key: str) -> list[nn.Module]:
    """Return the items of the list of layers at ``path`` in ``model``, or for None its repeated
    blocks. Raises ConfigError, naming ``key``, if there are none.
    """
    try:
        layers = [] if path is None else list(model.get_submodule(path).children())
    except AttributeError:
        layers = []
    layers = layers or [block for _, block in repeated_blocks(model) if path is None]
    if not layers:
        raise ConfigError(
            f"{key} concerns layers of a model, and {type(model).__name__} has no list of them"
            f"{'' if path is None else f' at {path!r}'}; write where it stands, as model.layers"
        )
    return layers


def linears_of_blocks(model: nn.Module) -> list[str]:
    """Return the names of the layers of class ``nn.Linear`` in blocks of ``model``; in a model
    without repeated blocks, in the modules that it is cut into.
    """
    blocks = [block for _, block in find_blocks(model)]
    inside = {part for block in blocks for part in block.modules() if type(part) is nn.Linear}
    return [name for name, module in model.named_modules() if module in inside]


def _has_strides(block: nn.Module) -> bool:
    convolutions = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
    return any(isinstance(m, convolutions) and set(m.stride) != {1} for m in block.modules())


def _returns_a_tensor(block: nn.Module) -> bool:
    """Return whether the forward of ``block`` is annotated to return a single tensor."""
    annotation = inspect.signature(type(block).forward).return_annotation
    return annotation in (
        torch.Tensor,
        "torch.Tensor",
        "Tensor",
        torch.FloatTensor,
        "torch.FloatTensor",
    )


class BlockCalls:
    """Route the calls of ``blocks`` to ``take_over`` until :meth:`remove`."""

    def __init__(self, blocks: Sequence[nn.Module], take_over: TakesOver):
        self._classes = {block: type(block) for block in blocks}
        subclasses = {base: _subclass(base, take_over) for base in set(self._classes.values())}
        for block, base in self._classes.items():
            block.__class__ = subclasses[base]

    def remove(self) -> None:
        """Restore the classes of the blocks. Idempotent."""
        for block, base in self._classes.items():
            block.__class__ = base
        self._classes = {}


def _subclass(base: type[nn.Module], take_over: TakesOver) -> type[nn.Module]:
    plain = getattr(base, "_hf_zero_plain", base)

    def call(self: nn.Module, *args: object, **kwargs: object) -> object:
        return take_over(self, base.__call__.__get__(self), args, kwargs)

    def reduce(self: nn.Module, protocol: Any) -> tuple[object, ...]:
        subclass = base.__reduce_ex__(self, protocol)
        return _new, (plain, *subclass[1][1:]), *subclass[2:]

    metaclass: type = type(base)
    subclass: type[nn.Module] = metaclass(base.__name__, (base,), {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "__call__": outside_graphs(call),
        "__reduce_ex__": reduce,
        "_hf_zero_plain": plain,
    })  # fmt: skip
    if subclass.forward is not base.forward:  # transformers wraps the forward of each subclass
        subclass.forward = base.forward  # type: ignore[method-assign]
    return subclass


def _new(plain: type[nn.Module], *args: object) -> nn.Module:
    """Construct an instance for a pickle; unlike ``copyreg.__newobj__`` it permits a class other
    than the block's.
    """
    return plain.__new__(plain, *args)


def hidden_state(
    block: nn.Module, args: Sequence[object], kwargs: dict[str, object]
) -> tuple[int | str, torch.Tensor] | None:
    """Return the input hidden state of ``block``, the first floating-point tensor in the order of
    its signature, and its index or name among the arguments; None if there is none.
    """
    for index, value in enumerate(args):
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return index, value
    names = inspect.signature(type(block).forward).parameters if kwargs else ()
    for name in [*(name for name in names if name in kwargs), *kwargs]:
        value = kwargs[name]
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return name, value
    return None


def first_of(output: object) -> Any:
    """Return the output hidden state of a block: the output, or the first item of a tuple."""
    return output[0] if isinstance(output, tuple) and output else output


def with_first(output: object, state: torch.Tensor) -> object:
    """Return a block's ``output`` with its hidden state replaced by ``state``."""
    if not isinstance(output, tuple):
        return state
    others = output[1:]
    return type(output)(state, *others) if hasattr(output, "_fields") else (state, *others)


class ReturnedBefore:
    """The last tuple returned in each stack of blocks, kept for the next block of the stack. It
    must not outlive a forward, whose graph it would keep alive.
    """

    def __init__(self) -> None:
        self._tuples: dict[str, tuple[int, object]] = {}  # with the place of the block

    def take(self, layer: StackedBlock) -> object:
        """Return and forget the output of the block before ``layer`` if it was a tuple, or None."""
        place, output = self._tuples.pop(layer.stack, (-1, None))
        # recomputations of checkpoints around each block come in the opposite order
        return output if place == layer.place - 1 else None

    def note(self, layer: StackedBlock, output: object) -> object:
        """Record ``output`` of ``layer`` for the next block of its stack, and return it."""
        if isinstance(output, tuple) and layer.place < layer.of:
            self._tuples[layer.stack] = layer.place, output
        return output

    def clear(self) -> None:
        self._tuples.clear()


class AwaitedCalls:
    """The blocks whose calls have not been intercepted yet. ``ran(block, path)`` is called when
    layers of such a block run: a model that calls ``block.forward``, or the layers, never calls the
    block.
    """

    def __init__(
        self, model: nn.Module, blocks: Iterable[nn.Module], ran: Callable[[nn.Module, str], None]
    ):
        self._ran = ran
        self._paths = {module: path for path, module in model.named_modules()}
        uses = Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))
        self._hooks = {
            block: [
                part.register_forward_pre_hook(Attached(self._on_layer, block))
                for part in block.modules()
                # others may call layers that the block shares with them
                if part is not block and uses[id(part)] == 1 and [*part.parameters(False)]
            ]
            for block in blocks
        }

    def _on_layer(self, block: nn.Module, *_: object) -> None:
        self._ran(block, self._paths[block])

    def arrived(self, block: nn.Module) -> None:
        """Stop waiting for ``block``, whose call is under way."""
        for hook in self._hooks.pop(block, ()):
            hook.remove()

    def clear(self) -> None:
        for block in [*self._hooks]:
            self.arrived(block)


class DrawsForBlocks(Feature, ABC, Generic[Drawn]):
    """Base of techniques that draw at random for the repeated blocks of a model. All state is
    computed from the counters.
    """

    key: str  # the section, for messages

    def __init__(self) -> None:
        self._returned = ReturnedBefore()
        self._calls: BlockCalls | None = None
        self._awaited: AwaitedCalls | None = None
        self._engine: TrainingEngine  # from apply to remove

    def _take_over(
        self, engine: TrainingEngine, blocks: Sequence[nn.Module], chosen: Iterable[nn.Module]
    ) -> None:
        """Call :meth:`_draw` for each forward of ``engine``, and :meth:`_change` for each call of
        ``blocks`` in training. Layers of one of the ``chosen`` that run without a call of their
        block raise ConfigError.
        """
        self._engine = engine
        self._calls = BlockCalls(blocks, self._call)
        self._awaited = AwaitedCalls(engine.module, chosen, self._refuse_uncalled)
        engine.pass_runner.module_hooks.left_out.sources.append(self._draw)

    def _call(
        self, block: nn.Module, run: Call, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> object:
        forward = self._engine.pass_runner.module_hooks.current_forward
        drawn: Any = None if forward is None else forward.drawn.get(self)
        if drawn is None or not block.training:
            return run(*args, **kwargs)
        if self._awaited is not None:
            self._awaited.arrived(block)
        return self._change(drawn, block, run, args, kwargs)

    def _refuse_uncalled(self, block: nn.Module, path: str) -> None:
        forward = self._engine.pass_runner.module_hooks.current_forward
        if forward is None or self not in forward.drawn or not block.training:
            return
        # a script may call a block, or a part of it
        if not forward.path or path.startswith(f"{forward.path}."):
            raise ConfigError(
                f"{self.key} has no effect on {described(block)}: the model runs its layers and "
                "never calls it (but block.forward, or the layers); call the block itself, or "
                "remove the section"
            )

    @abstractmethod
    def _draw(self, forward: OutermostForward) -> Collection[nn.Module]:
        """Draw for ``forward``; return the blocks that all ranks skip."""

    @abstractmethod
    def _change(
        self,
        drawn: Drawn,
        block: nn.Module,
        run: Call,
        args: tuple[object, ...],
        kwargs: dict[str, object],
    ) -> object:
        """Return the result of ``block`` for these arguments and the draws of the forward;
        ``run(*args, **kwargs)`` executes the block.
        """

    def remove(self) -> None:
        if self._calls is not None and self._awaited is not None:
            self._calls.remove()
            self._awaited.clear()
            self._engine.pass_runner.module_hooks.left_out.sources.remove(self._draw)
            del self._engine
        self._calls, self._awaited = None, None
