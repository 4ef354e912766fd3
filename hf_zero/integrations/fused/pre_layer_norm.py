"""Norms before attention and MLP (pre-LN) in models that have them after the sums (post-LN).

[Note: pre-LN]
Post-LN, as in BERT, is x = norm(x + f(x)): the gradient passes through a norm in each layer, is
largest near the output, and needs a small or slowly rising learning rate. Pre-LN is x = x +
f(norm(x)) with one norm at the end (Xiong et al. 2020, "On Layer Normalization in the Transformer
Architecture", https://arxiv.org/abs/2002.04745; DeepSpeed's BERT recipes use it). Both have two
norms in each layer and one more, so no parameter is added or left over: the norm after a sum
normalizes the input of the sublayer before that sum, and the norm of the embeddings is applied
last. It is not needed elsewhere: the first layer normalizes the embeddings anyway. Each layer uses
only its own parameters, so layers remain units of ZeRO. Weights trained as post-LN do not fit
pre-LN: this is for training from scratch.

[Note: which norms move]
A forward without values shows which modules of a block are called with which tensor, so classes and
names do not matter. A block is post-LN if its output is that of a LayerNorm. The first of its norms
moves to the modules that are called with the block's input and do not contain it, the next one to
those that are called with the output of the first. A copy of the block whose parameters, except
those of norms, are zero then returns its input, or the model is refused.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from hf_zero.errors import KernelError
from hf_zero.integrations.fused.replacement import Replacement
from hf_zero.integrations.fused.shells import ModuleCall, shell
from hf_zero.integrations.fused.sublayers import takes
from hf_zero.ops import norms
from hf_zero.zero.layout.wrap import repeated_blocks

NORM = "_hf_zero_norm"
FORMER = "_hf_zero_former_forward"
Keys = tuple[int | str, ...]


@dataclass(frozen=True)
class _Moved:
    """A norm of a block, and the modules whose arguments ``keys`` it normalizes instead; names
    within the block.
    """

    norm: str
    takers: tuple[tuple[str, Keys], ...]


@dataclass(frozen=True)
class PreLayerNorm:
    """Changes of a model: the norms of each block, the last norm, and the module whose output it
    normalizes.
    """

    blocks: dict[str, tuple[_Moved, ...]]
    last: str
    encoder: str

    def norms(self, model: nn.Module) -> set[nn.Module]:
        names = [f"{block}.{move.norm}" for block, moved in self.blocks.items() for move in moved]
        return {model.get_submodule(name) for name in (*names, self.last)}

    def install(self, model: nn.Module, fused: bool) -> list[Replacement]:
        """Move the norms; ``fused``: they are computed by our kernel."""
        replacements: list[Replacement] = []
        for name, moved in self.blocks.items():
            replacements += _install(model.get_submodule(name), moved, fused, f"{name}.")
        last, encoder = model.get_submodule(self.last), model.get_submodule(self.encoder)
        replacements.append(_replace(encoder, self.encoder, _encode(fused), last))
        replacements.append(_replace(last, self.last, _pass_by))
        return replacements


def plan(model: nn.Module, calls: list[ModuleCall] | str) -> PreLayerNorm:
    """Return how ``model`` becomes pre-LN, from the calls of its forward, or why they are not
    known.

    Raises:
        KernelError: its blocks do not end with a norm after a sum, form no single stack, or compute
            something else.
    """
    if isinstance(calls, str):
        raise KernelError(f"pre_layer_norm: {calls}; leave it out")
    names = [name for name, _ in repeated_blocks(model)]
    moved = {name: _moved(model, name, calls) for name in names}
    stacks = sorted({name.rpartition(".")[0] for name in names})
    if len(stacks) != 1:
        several = f"several stacks of layers, {', '.join(stacks)}, and each would need a last norm"
        raise KernelError(
            f"pre_layer_norm: {type(model).__name__} has "
            f"{several if stacks else 'no layers that repeat'}; leave it out"
        )
    firsts = [i for i, c in enumerate(calls) if c.name.startswith(tuple(f"{n}." for n in names))]
    before = [c for c in calls[: firsts[0]] if _is_layer_norm(c.module)] if firsts else []
    called, encoder = {call.name for call in calls}, stacks[0]
    while encoder and encoder not in called:
        encoder = encoder.rpartition(".")[0]
    if not before or not encoder:
        raise KernelError(
            f"pre_layer_norm: {type(model).__name__} has no LayerNorm of its embeddings, which "
            "would be the last one; leave it out"
        )
    for name in names:
        _prove(model.get_submodule(name), name, moved[name], calls)
    return PreLayerNorm(moved, before[-1].name, encoder)


def _refused(model: nn.Module, name: str, why: str) -> KernelError:
    kind = type(model.get_submodule(name)).__name__
    return KernelError(f"pre_layer_norm: {name} ({kind}) {why}; leave it out")


def _moved(model: nn.Module, name: str, calls: list[ModuleCall]) -> tuple[_Moved, ...]:
    whole = [call for call in calls if call.name == name]
    inside = [call for call in calls if call.name.startswith(f"{name}.")]
    norms = [call for call in inside if _is_layer_norm(call.module)]
    if len(whole) != 1 or not norms or norms[-1].outputs[0] is not whole[0].outputs[0]:
        raise _refused(model, name, "does not end with a LayerNorm after a sum, as BERT's layer")
    unused = {
        f"{name}.{path}"
        for path, module in model.get_submodule(name).named_modules()
        if _is_layer_norm(module)
    } - {call.name for call in norms}
    if unused:
        raise _refused(model, name, f"has a norm that a forward does not use, {min(unused)}")
    stream, moves = whole[0].inputs[0], []
    for norm in norms:
        takers = [
            call
            for call in inside
            if any(tensor is stream for tensor in call.inputs)
            and not f"{norm.name}.".startswith(f"{call.name}.")
        ]
        outer = {call.name for call in takers}
        takers = [
            call for call in takers if not any(call.name.startswith(f"{other}.") for other in outer)
        ]
        if not takers:
            raise _refused(model, name, f"calls no module with the input of {norm.name}'s sum")
        cut = len(name) + 1
        keys = [(call.name[cut:], _keys(call, stream)) for call in takers]
        for taker, found in keys:
            if not found:
                raise _refused(model, name, f"calls {taker} with hidden states inside a collection")
        moves.append(_Moved(norm.name[cut:], tuple(keys)))
        stream = norm.outputs[0]
    return tuple(moves)


def _is_layer_norm(module: nn.Module) -> TypeGuard[nn.LayerNorm]:
    """Return whether the forward of ``module`` is that of :class:`torch.nn.LayerNorm`."""
    return isinstance(module, nn.LayerNorm) and type(module).forward is nn.LayerNorm.forward


def _keys(call: ModuleCall, stream: torch.Tensor) -> Keys:
    args, kwargs = call.arguments
    return (
        *(i for i, value in enumerate(args) if value is stream),
        *(key for key, value in kwargs.items() if value is stream),
    )


def _prove(block: nn.Module, name: str, moved: tuple[_Moved, ...], calls: list[ModuleCall]) -> None:
    """Raise KernelError unless a copy of ``block``, with its norms moved and all parameters but
    theirs zero, returns its input.
    """
    call = next(call for call in calls if call.name == name)
    generator = torch.Generator().manual_seed(0)

    def real(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype.is_floating_point:
            return torch.randn(tensor.shape, generator=generator, device="cpu")
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu")

    copied = shell(block, real, real).eval()
    for module in copied.modules():
        if not isinstance(module, nn.LayerNorm):
            for parameter in module.parameters(recurse=False):
                parameter.data.zero_()
    _install(copied, moved, False, "")
    args, kwargs = tree_map_only(torch.Tensor, real, call.arguments)
    first = next(value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            out = copied(*args, **kwargs)
        out = out[0] if isinstance(out, tuple) else out
        same = torch.allclose(out, first, atol=1e-5)
    except Exception as error:
        raise KernelError(f"pre_layer_norm: {name} does not run by itself: {error}") from error
    if not same:
        raise KernelError(
            f"pre_layer_norm: {name} ({type(block).__name__}) is not norm(x + f(x)) alone; leave "
            "it out"
        )


def _install(
    block: nn.Module, moved: tuple[_Moved, ...], fused: bool, prefix: str
) -> list[Replacement]:
    replacements = []
    for move in moved:
        norm = block.get_submodule(move.norm)
        for name, keys in move.takers:
            taker = block.get_submodule(name)
            replacements.append(_replace(taker, prefix + name, _normed(keys, fused), norm))
        replacements.append(_replace(norm, prefix + move.norm, _pass_by))
    return replacements


def _replace(
    module: nn.Module, name: str, function: Callable[..., object], norm: nn.Module | None = None
) -> Replacement:
    if norm is not None:
        module.__dict__[NORM] = norm  # not as a submodule: its parameters keep one name
    module.__dict__[FORMER] = module.__dict__.get("forward")
    module.forward = types.MethodType(function, module)
    return Replacement(type(module).__name__, name, functools.partial(_put_back, module))


def _put_back(module: nn.Module) -> None:
    if FORMER in module.__dict__:
        module.__dict__.pop("forward", None)
        former = module.__dict__.pop(FORMER)
        if former is not None:
            module.forward = former
        module.__dict__.pop(NORM, None)


def _former(module: nn.Module, *args: object, **kwargs: object) -> Any:
    former = module.__dict__[FORMER]
    if former is None:
        return type(module).forward(module, *args, **kwargs)
    return former(*args, **kwargs)


def _apply(norm: nn.LayerNorm, x: torch.Tensor, fused: bool) -> torch.Tensor:
    if fused and norm.weight is not None and takes(x, *norm.parameters(recurse=False)):
        return norms.layer_norm(x, norm.weight, norm.bias, norm.eps)
    return nn.LayerNorm.forward(norm, x)


@functools.cache
def _normed(keys: Keys, fused: bool) -> Callable[..., object]:
    def forward(self: nn.Module, *args: object, **kwargs: object) -> object:
        norm = self.__dict__[NORM]
        normed: object = None
        positional: list[object] = list(args)
        for key in keys:
            arguments: Any = positional if isinstance(key, int) else kwargs
            if normed is None:
                normed = _apply(norm, arguments[key], fused)
            arguments[key] = normed
        return _former(self, *positional, **kwargs)

    return forward


@functools.cache
def _encode(fused: bool) -> Callable[..., object]:
    def forward(self: nn.Module, *args: object, **kwargs: object) -> object:
        """Apply the last norm to the output of the module's own forward."""
        outputs, norm = _former(self, *args, **kwargs), self.__dict__[NORM]
        if isinstance(outputs, torch.Tensor):
            return _apply(norm, outputs, fused)
        if isinstance(outputs, tuple):
            return (_apply(norm, outputs[0], fused), *outputs[1:])
        outputs.last_hidden_state = _apply(norm, outputs.last_hidden_state, fused)
        return outputs

    return forward


def _pass_by(self: nn.Module, input: torch.Tensor) -> torch.Tensor:
    return input
