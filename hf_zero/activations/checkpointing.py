"""Activation checkpointing of a model's blocks: the backward recomputes a block's forward (arXiv
1604.06174).

[Note: inside the hooks, inside the compiler]
The ``forward`` of a block is replaced on the instance. The module's hooks stay outside, so gathers
and marks happen once per call: the gather for a block's backward serves its recomputation, and
checkpointing costs no further gather. torch.compile is applied outside: it traces the checkpoint
with the block and removes the recomputed tensors from its graph, while a compiled function inside a
checkpoint would save its tensors a second time and hide its products from the selective policy.

Checkpoints are torch's non-reentrant ones: they preserve the state of the random generators, so
dropout masks are equal, and need no input that requires grad. :func:`repeatable` does the same for
random states by name.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from hf_zero.config.activations import ActivationCheckpointing
from hf_zero.device import kinds
from hf_zero.errors import ConfigError
from hf_zero.logging import logger
from hf_zero.zero.gather.model_patches import Override
from hf_zero.zero.layout.tree import transformed
from hf_zero.zero.layout.walk import attribute_of
from hf_zero.zero.layout.wrap import repeated_blocks

PRODUCTS = frozenset(
    ("mm", "addmm", "bmm", "baddbmm", "linear", "convolution", "_scaled_mm", "_grouped_mm")
)
_inside = threading.local()  # depth of the script's own checkpoints around the current code


class NamedStates(Protocol):
    """States of random generators by name, beside the current ones that torch preserves."""

    def get_states(self) -> dict[str, torch.Tensor]: ...

    def set_states(self, states: dict[str, torch.Tensor]) -> None: ...


named_states: list[NamedStates] = []  # all that a forward may draw from


def repeatable(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` for one checkpoint: its recomputations draw from the named random states
    that its forward drew from, and leave them unchanged. Where the script's own torch.compile
    traces the checkpoint, ``function`` itself: the note of a forward would break the graph.
    """
    if torch.compiler.is_compiling():
        return function
    kept = [(states, states.get_states()) for states in named_states]
    if not any(saved for _, saved in kept):
        return function
    ran = False

    def run(*args: object, **kwargs: object) -> object:
        nonlocal ran
        if not ran:
            ran = True
            return function(*args, **kwargs)
        now = [(states, states.get_states()) for states, _ in kept]
        _restore(kept)
        try:
            return function(*args, **kwargs)
        finally:  # torch ends a recomputation early, by an exception
            _restore(now)

    return run


def _restore(kept: Sequence[tuple[NamedStates, dict[str, torch.Tensor]]]) -> None:
    for states, saved in kept:
        states.set_states(saved)


def is_kept(operator: str) -> bool:
    """Return whether the selective policy saves the results of ``operator``: those that cost FLOPs
    rather than bandwidth. A call that draws random numbers is recomputed all the same.
    """
    name = operator.split(".")[0]
    return name in PRODUCTS or "attention" in name or "attn" in name or "packed_linear" in name


def _draws(operator: Any, args: tuple[object, ...], kwargs: dict[str, object]) -> bool:
    """Return whether this call of ``operator`` draws random numbers: the generator would not
    advance in a recomputation that reads its saved results.
    """
    schema = getattr(operator, "_schema", None)  # a higher-order operator has none
    for index, argument in enumerate(() if schema is None else schema.arguments):
        if argument.name == "dropout_p":
            given = args[index] if index < len(args) else kwargs.get("dropout_p")
            return bool(argument.default_value if given is None else given)
    return torch.Tag.nondeterministic_seeded in getattr(operator, "tags", ())


def _policy(context: object, operator: Any, *args: object, **kwargs: object) -> CheckpointPolicy:
    kept = is_kept(operator.__name__) and not _draws(operator, args, kwargs)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


SELECTIVE = partial(create_selective_checkpoint_contexts, _policy)


class Timing:
    """Synchronize with the device at both ends of a checkpointed region; with ``profile``, log the
    seconds, one line for each backward.
    """

    def __init__(self, device: torch.device, profile: bool, tells: bool = True):
        self._device, self._profile, self._tells = device, profile, tells
        self._seconds, self._counts = [0.0, 0.0], [0, 0]  # of forwards, of recomputations

    @contextmanager
    def region(self) -> Iterator[None]:
        again = int(torch._C._current_graph_task_id() != -1)
        if not again and self._counts[1]:
            self.tell()
        self._wait()
        start = time.perf_counter()
        try:
            yield
        finally:  # torch ends a recomputation early, by an exception
            self._wait()
            self._seconds[again] += time.perf_counter() - start
            self._counts[again] += 1
            if self._counts[0] == self._counts[1]:
                self.tell()

    def _wait(self) -> None:
        kinds.synchronize(self._device)

    def tell(self) -> None:
        if self._profile and self._tells:
            logger.info(
                "activation checkpointing: %d forwards in %.4f s, %d recomputations in %.4f s",
                self._counts[0], self._seconds[0], self._counts[1], self._seconds[1],
            )  # fmt: skip
        self._seconds, self._counts = [0.0, 0.0], [0, 0]


def _call(
    function: Callable[..., object], timing: Timing | None, names: tuple[str, ...], *values: object
) -> object:
    """Call ``function`` with the last of ``values`` as keyword arguments ``names``: a checkpoint
    saves tensors among its positional arguments as autograd does.
    """
    first = len(values) - len(names)
    kwargs = dict(zip(names, values[first:]))
    if timing is None:
        return function(*values[:first], **kwargs)
    with timing.region():
        return function(*values[:first], **kwargs)


def _unchanged(function: Callable[..., object], block: nn.Module) -> Callable[..., object]:
    """Return ``function`` with ConfigError for a saved result that ``block`` changes in place."""

    def run(*args: object, **kwargs: object) -> object:
        try:
            return function(*args, **kwargs)
        except RuntimeError as error:
            if "selective activation checkpoint has been mutated" not in str(error):
                raise
            raise ConfigError(
                f'activation_checkpointing.blocks is "selective", and {type(block).__name__} '
                "changes the result of a matrix product or of attention in place, which the "
                "backward needs as it was; set blocks to true, or compute a new tensor there"
            ) from error

    return run


def _checkpoint(
    function: Callable[..., object],
    timing: Timing | None,
    selective: nn.Module | None,
    args: tuple[object, ...],
    kwargs: dict[str, Any],
) -> object:
    """Checkpoint a call of ``function``, of the block ``selective`` without what costs FLOPs."""
    values = (*args, *kwargs.values())
    function = repeatable(function)
    # torch.compile recognizes a context_fn only in the call itself.
    if selective is not None:
        return torch.utils.checkpoint.checkpoint(
            _call,
            function if torch.compiler.is_compiling() else _unchanged(function, selective),
            timing,
            tuple(kwargs),
            *values,
            use_reentrant=False,
            context_fn=SELECTIVE,
        )
    return torch.utils.checkpoint.checkpoint(
        _call, function, timing, tuple(kwargs), *values, use_reentrant=False
    )


def checkpoint(
    function: Callable[..., object],
    timing: Timing | None,
    args: tuple[object, ...],
    kwargs: dict[str, object],
) -> object:
    """Run a script's own checkpoint: return ``function(*args, **kwargs)``, recomputed in the
    backward.

    Blocks inside it are not checkpointed again.
    """

    def alone(*args: object, **kwargs: object) -> object:
        _inside.depth = getattr(_inside, "depth", 0) + 1
        try:
            return function(*args, **kwargs)
        finally:
            _inside.depth -= 1

    return _checkpoint(alone, timing, None, args, kwargs)


def _is_cache(value: object) -> bool:
    """Return whether ``value`` is a key-value cache, which a forward appends to: recomputation
    would append again.
    """
    return hasattr(value, "get_seq_length") and hasattr(value, "update")


class _Checkpointed(Override):
    """The checkpointed ``forward`` of a block."""

    def __init__(self, blocks: Checkpoints, block: nn.Module):
        super().__init__(block.forward, block, "forward")
        self._blocks = blocks
        # a forward set on the instance, in place of the class's
        self.before = block.__dict__.get("forward")

    def __call__(self, *args: object, **kwargs: Any) -> Any:
        blocks, block = self._blocks, self._module
        if (
            not torch.is_grad_enabled()
            or transformed()
            or not blocks.recompute
            or not (torch.compiler.is_compiling() or _alone())
        ):
            return self._fn(*args, **kwargs)
        if not getattr(block, "_can_checkpoint_with_cache", False):
            caches = [value for value in (*args, *kwargs.values()) if _is_cache(value)]
            if caches and (not block.training or any(cache.get_seq_length() for cache in caches)):
                return self._fn(*args, **kwargs)  # the cache's contents are part of the result
            if caches:
                blocks.tell_of_caches()
                args = tuple(None if _is_cache(value) else value for value in args)
                kwargs = {
                    name: None if _is_cache(value) else value for name, value in kwargs.items()
                }
                if kwargs.get("use_cache"):
                    kwargs["use_cache"] = False
        selective = block if blocks.selective else None
        return _checkpoint(self._fn, blocks.timing, selective, args, kwargs)


def _alone() -> bool:
    return not getattr(_inside, "depth", 0)


def blocks_to_checkpoint(model: nn.Module, section: ActivationCheckpointing) -> list[nn.Module]:
    """Return the first ``section.number`` repeated blocks, whose activations are held longest.

    Raises ConfigError if the model has no repeated blocks.
    """
    if section.number == 0:
        return []
    blocks = [module for _, module in repeated_blocks(model)]
    if not blocks:
        key = "number_checkpoints" if section.blocks is None else "blocks"
        raise ConfigError(
            f"activation_checkpointing.{key} asks for checkpoints of blocks, and "
            f"{type(model).__name__} has no repeated ones (layers of "
            "transformers, _no_split_modules, or items of a ModuleList); remove the key and use "
            "torch.utils.checkpoint in the model's forward"
        )
    return blocks[: section.number]


class Checkpoints:
    """The checkpointed ``blocks`` of one model.

    They are disabled while the model checkpoints by itself (transformers'
    ``gradient_checkpointing``), which is checked in each forward.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[nn.Module],
        section: ActivationCheckpointing,
        device: torch.device,
        tells: bool = True,
    ):
        self.recompute = self.left_to_model = False
        self.timing = (
            Timing(device, section.profile, tells)
            if section.profile or section.synchronize
            else None
        )
        self.selective = section.selective
        self._carriers = [
            module
            for module in model.modules()
            if attribute_of(module, "gradient_checkpointing") is not None
        ]
        self._blocks = list(blocks)
        self._tells = self._tells_of_caches = tells
        for block in blocks:
            block.forward = _Checkpointed(self, block)  # type: ignore[method-assign, assignment]
        self.look()
        if self.recompute and tells:
            how = "all but products and attention of " if section.selective else ""
            logger.info(
                "activation checkpointing: the backward recomputes %s%d blocks", how, len(blocks)
            )

    @property
    def on(self) -> bool:
        """Return whether checkpoints are active, ours or the model's own."""
        return self.recompute or self.left_to_model

    def look(self) -> None:
        """Update ``left_to_model``, whether the model checkpoints by itself, and ``recompute``,
        whether the blocks do.
        """
        self.left_to_model = any(module.gradient_checkpointing for module in self._carriers)
        self.recompute = bool(self._blocks) and not self.left_to_model
        if self._blocks and self.left_to_model and self._tells:
            self._tells = False
            logger.info(
                "activation_checkpointing: the model checkpoints by itself "
                "(gradient_checkpointing), and goes on to do so"
            )

    def check_caches(
        self, model: nn.Module, args: tuple[object, ...], kwargs: dict[str, Any]
    ) -> None:
        """Raise ConfigError for an empty cache among the arguments of a forward in training: the
        checkpointed blocks would not fill it.
        """
        if not self.recompute or not model.training:
            return
        for name, value in (*enumerate(args), *kwargs.items()):
            if _is_cache(value) and not value.get_seq_length():
                raise ConfigError(
                    f"{type(model).__name__} is to fill {name} ({type(value).__name__}) in "
                    "training, and blocks that are recomputed in the backward would fill it twice; "
                    "leave it out, or remove activation_checkpointing.blocks"
                )

    def tell_of_caches(self) -> None:
        """Warn, once, that the cache that a model has made itself stays empty."""
        if self._tells_of_caches:
            self._tells_of_caches = False
            logger.warning(
                "activation checkpointing: the model makes a key-value cache in training, which "
                "recomputed blocks leave empty; pass use_cache=False"
            )

    def remove(self) -> None:
        for block in self._blocks:
            forward = block.__dict__.get("forward")
            if not isinstance(forward, _Checkpointed):
                continue  # wrapped since; the wrapper still calls it
            del block.__dict__["forward"]
            if forward.before is not None:
                block.forward = forward.before  # type: ignore[method-assign]
        self._blocks = []
        self.look()  # wrappers then call the plain forward
