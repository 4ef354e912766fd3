"""Recognition of modules by what they compute, and the proof that a fused forward computes it too.

A name, a signature or a source says nothing about the next release. So a small copy of a module,
with random weights, is called with random tensors: the calls of its submodules and the values
between them show which expression of :mod:`.sublayers` it computes. The fused forward is then
installed in another copy and compared with the module's own code, outputs and gradients, in
training and in evaluation. A forward that has not agreed is never installed.
"""

from __future__ import annotations

import inspect
import itertools
import types
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hf_zero.device import kinds
from hf_zero.integrations.fused.shells import CONTAINERS, HOOKS, ModuleCall, calls, shell
from hf_zero.integrations.fused.sublayers import ACTIVATIONS, Expression, Mlp, Norm, Sum

LARGEST = 12  # submodules of a module that is tried
ANY = 8  # the width of inputs where a module has none of its own
BOUND = 1e-4  # of the largest number, in fp32


@dataclass(frozen=True)
class Recognition:
    """The expression that a module computes, or ``why_not`` if it looks like one and is none, or
    the fused forward ``disagrees``.
    """

    expression: Expression | None = None
    why_not: str = ""
    disagrees: str = ""


class _Unfit(Exception):
    """A module of which there is no small copy."""


_verdicts: dict[Hashable, Recognition] = {}


def verdict_on(module: nn.Module) -> Recognition:
    """Return what ``module`` computes; once for each class and configuration in this process."""
    parts = list(module.named_modules())
    if len(parts) > LARGEST + 1:
        return Recognition()
    key = (type(module).forward, tuple(_description(name, each) for name, each in parts))
    if key not in _verdicts:
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            _verdicts[key] = _judge(module)
    return _verdicts[key]


def _description(name: str, module: nn.Module) -> Hashable:
    """Return everything of a module that its class may branch on, other than values of tensors."""
    settings = tuple(
        (key, _setting(value))
        for key, value in module.__dict__.items()
        if key != "training" and not key.startswith("_") and not isinstance(value, torch.Tensor)
    )
    tensors = tuple((key, each is None) for key, each in module._parameters.items())
    return name, type(module), settings, tensors


def _setting(value: Any) -> Hashable:
    if value is None or isinstance(value, (bool, int, float, str, type, types.FunctionType)):
        return value
    if isinstance(value, (tuple, list)):
        return tuple(_setting(each) for each in value)
    if hasattr(value, "to_dict"):  # a configuration of transformers
        return repr(value.to_dict())
    return object()  # equal to nothing, so its module is judged by itself


def _judge(module: nn.Module) -> Recognition:
    arguments = _arguments(module)
    if arguments not in (1, 2) or any(communicates(type(each)) for each in module.modules()):
        return Recognition()
    try:
        sizes = _sizes(module)
        for widths in _widths(module, sizes, arguments):
            made = _small(module, sizes)
            inputs = _random(widths)
            made.train()
            before = _held(made)
            try:
                with calls(made, outermost=True) as recorded:
                    out = made(*inputs)
            except Exception:  # another width, or code that a small copy cannot run
                continue
            if not isinstance(out, torch.Tensor) or _held(made) != before:
                return Recognition()
            found = _expression(made, inputs, out, recorded)
            if isinstance(found, str):
                return Recognition(why_not=found)
            if found is None:
                return Recognition()
            wrong = _disagreement(module, found, sizes, widths)
            return Recognition(disagrees=wrong) if wrong else Recognition(found)
    except _Unfit:
        pass
    return Recognition()


def _held(module: nn.Module) -> list[tuple[Any, ...]]:
    """Describe what a forward may leave behind in ``module``: attributes, containers, buffers."""
    return [
        (name, key, id(value), len(value) if isinstance(value, CONTAINERS) else 0)
        for name, each in module.named_modules()
        for key, value in each.__dict__.items()
        if key not in HOOKS
    ] + [(name, each._version) for name, each in module.named_buffers()]


def communicates(cls: type) -> bool:
    """Return whether the forward of ``cls`` names torch.distributed, so that a trial call of one
    rank could wait for others.
    """
    code = getattr(inspect.unwrap(cls.forward), "__code__", None)  # type: ignore[attr-defined]
    names = getattr(cls.forward, "__globals__", {})  # type: ignore[attr-defined]
    return code is not None and any(
        name == "distributed"
        or getattr(names.get(name), "__name__", "").startswith("torch.distributed")
        for name in code.co_names
    )


def _arguments(module: nn.Module) -> int:
    """Return how many arguments the forward requires; 0 if it cannot be known."""
    try:
        parameters = inspect.signature(type(module).forward).parameters.values()
    except (TypeError, ValueError):
        return 0
    required = [p for p in parameters if p.default is p.empty and p.kind in (0, 1)]
    return len(required) - 1


# -- small copies ----------------------------------------------------------------------------------


def linear_sizes(module: nn.Module) -> tuple[int, int] | None:
    """Return (inputs, outputs) of a linear layer: torch's, an adapter's, a quantized one, or the
    Conv1D of GPT-2.
    """
    for names in (("in_features", "out_features"), ("nx", "nf")):
        found = tuple(getattr(module, name, None) for name in names)
        if all(type(size) is int for size in found):
            return found  # type: ignore[return-value]
    return None


class _Marked(nn.Module):
    """A dropout's place in a small copy: an operation of its own, without randomness."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.factor = 1.5 + 0.25 * number

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor + 0.1 * torch.sin(x)


def _sizes(module: nn.Module) -> dict[int, int]:
    """Return a small even size for each width of ``module``; the double of one stays its double. A
    module without linear layers keeps its widths.
    """
    widths: set[int] = set()
    for each in module.modules():
        sizes = linear_sizes(each)
        if sizes is not None:
            widths.update(sizes)
            continue
        shape = getattr(each, "normalized_shape", None)
        if isinstance(shape, tuple) and len(shape) == 1:
            widths.add(shape[0])
        for parameter in each.parameters(recurse=False):
            if parameter.dim() > 1:
                raise _Unfit
            widths.add(parameter.numel())
    if all(linear_sizes(each) is None for each in module.modules()):
        return {width: width for width in widths} or {ANY: ANY}
    small: dict[int, int] = {}
    for width in sorted(widths):
        half = width // 2 if width % 2 == 0 else None
        small[width] = 2 * small[half] if half in small else 6 + 4 * len(small)
    if len(set(small.values())) < len(small):
        raise _Unfit
    return small


def _small(module: nn.Module, sizes: dict[int, int]) -> nn.Module:
    """Return a copy with random weights in ``sizes``, and marks in place of dropouts."""
    generator = torch.Generator().manual_seed(0)
    marks = 0

    def instead(old: nn.Module) -> nn.Module | None:
        nonlocal marks
        if isinstance(old, nn.Dropout):
            marks += 1
            return _Marked(marks)
        widths = linear_sizes(old)
        if widths is None:
            return None
        if old is module:
            raise _Unfit
        new = nn.Linear(
            sizes[widths[0]], sizes[widths[1]], bias=getattr(old, "bias", None) is not None
        )
        for parameter in new.parameters():
            parameter.data.normal_(std=0.7, generator=generator)
        return new

    def parameter(old: torch.Tensor) -> torch.Tensor:
        return torch.randn(sizes[old.numel()] if old.dim() else (), generator=generator)

    def buffer(old: torch.Tensor) -> torch.Tensor:
        return torch.zeros(old.shape, dtype=old.dtype)

    made = shell(module, parameter, buffer, instead)
    for each in made.modules():
        shape = each.__dict__.get("normalized_shape")
        if isinstance(shape, tuple) and len(shape) == 1:
            each.__dict__["normalized_shape"] = (sizes.get(shape[0], shape[0]),)
    return made


def _widths(module: nn.Module, sizes: dict[int, int], arguments: int) -> Iterator[tuple[int, ...]]:
    """Yield the widths that the arguments may have, likely ones first."""
    ins = [sizes[w[0]] for each in module.modules() if (w := linear_sizes(each)) is not None]
    wide = list(dict.fromkeys(ins)) or list(sizes.values())
    for first in wide:
        if arguments == 1:
            yield (first,)
        else:
            yield from ((first, second) for second in dict.fromkeys(sizes.values()))


def _random(widths: tuple[int, ...], scale: float = 1.0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(2, 5, each, generator=generator) + 0.3) * scale for each in widths]


# -- expressions -----------------------------------------------------------------------------------


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a is b or (a.shape == b.shape and torch.allclose(a, b, rtol=1e-5, atol=2e-6))


def _expression(
    module: nn.Module, inputs: list[torch.Tensor], out: torch.Tensor, made: list[ModuleCall]
) -> Expression | str | None:
    with torch.no_grad():
        if len(inputs) == 1 and not made:
            return _norm(module, inputs[0].shape[-1])
        if any("." in call.name or len(call.inputs) != 1 for call in made):
            return None
        return (_mlp(inputs[0], out, made) if len(inputs) == 1 else None) or _sum(inputs, out, made)


def _norm(module: nn.Module, width: int) -> Norm | None:
    given = {name: each for name, each in module._parameters.items() if each is not None}
    if len(given) > 2 or len({each.shape for each in given.values()}) > 1:
        return None
    weight, bias = (*given, "", "")[:2]
    known: list[tuple[str | float, float]] = [
        (key, value)
        for key, value in module.__dict__.items()
        if isinstance(value, float) and 0 < value < 0.1
    ]
    tried = [
        (Norm(weight, bias, key, offset, centered), eps)
        for key, eps in (*known, (1e-5, 1e-5), (1e-6, 1e-6))
        for offset, centered in ((0.0, True), (0.0, False), (1.0, False))
        if centered or not bias
    ]
    for norm, eps in tried:
        if all(_computes(norm, module, x, given, eps) for x in _norm_inputs(width)):
            return norm
    return None


def _norm_inputs(width: int) -> list[torch.Tensor]:
    """Inputs of which one is so small that its eps counts."""
    return [_random((width,), scale)[0] for scale in (1.0, 2e-3)]


def _computes(
    norm: Norm, module: nn.Module, x: torch.Tensor, given: dict[str, Any], eps: float
) -> bool:
    x64, weight = x.double(), given[norm.weight].double() if norm.weight else torch.ones(())
    if norm.centered:
        x64 = x64 - x64.mean(-1, keepdim=True)
    right = x64 * torch.rsqrt(x64.square().mean(-1, keepdim=True) + eps) * (norm.offset + weight)
    if norm.bias:
        right = right + given[norm.bias].double()
    return _same(module(x), right.float())


def _chained(made: list[ModuleCall], last: torch.Tensor) -> bool:
    """Return whether each call gets what the one before returned, and the last returns ``last``."""
    for call, following in itertools.pairwise(made):
        if len(call.outputs) != 1 or not _same(call.outputs[0], following.inputs[0]):
            return False
    return not made or (len(made[-1].outputs) == 1 and _same(made[-1].outputs[0], last))


def _mlp(x: torch.Tensor, out: torch.Tensor, made: list[ModuleCall]) -> Mlp | str | None:
    firsts = [c for c in made if isinstance(c.module, nn.Linear) and _same(c.inputs[0], x)]
    if len(firsts) not in (1, 2) or any(len(c.outputs) != 1 for c in made):
        return None
    names = [c.name for c in firsts]
    results = [c.outputs[0] for c in firsts]
    others = [c for c in made if c not in firsts]
    acts = [c for c in others if _has_no_weights(c.module) and not isinstance(c.module, _Marked)]
    after = [c for c in others if c not in acts]
    hidden = after[0].inputs[0] if after else out
    if not _chained(after, out):
        return None
    rest = tuple(c.name for c in after)
    for name, act in ACTIVATIONS.items():
        for gate, up in ((0, 1), (1, 0)) if len(firsts) == 2 else ():
            if _same(act(results[gate]) * results[up], hidden):
                return Mlp(name, names[gate], names[up], after=rest)
        if len(firsts) == 2:
            continue
        if name != "silu" and _same(act(results[0]), hidden):
            return Mlp(name, names[0], after=rest)
        if results[0].shape[-1] == 2 * hidden.shape[-1]:
            a, b = results[0].chunk(2, dim=-1)
            for halves, gate_half, up_half in ((1, a, b), (-1, b, a)):
                if _same(act(gate_half) * up_half, hidden):
                    return Mlp(name, names[0], halves=halves, after=rest)
    if acts and rest:
        act_module: Any = acts[0].module
        return f"its activation is {getattr(act_module, '__name__', type(act_module).__name__)}"
    return None


def _has_no_weights(module: nn.Module) -> bool:
    return next(module.parameters(), None) is None


def _sum(inputs: list[torch.Tensor], out: torch.Tensor, made: list[ModuleCall]) -> Sum | None:
    """Find the sum at the end of a module; without a dropout before or a norm after it there is
    nothing to fuse.
    """
    residual = inputs[-1]
    last = made[-1] if made else None
    normed = len(inputs) == 2 and last is not None and isinstance(last.module, nn.LayerNorm)
    branch = made[:-1] if normed else made
    if not branch or not _same(branch[0].inputs[0], inputs[0]) or len(branch[-1].outputs) != 1:
        return None
    total = made[-1].inputs[0] if normed else out
    ends = branch[-1].outputs[0]
    if (
        not _chained(branch, ends)
        or ends.shape != residual.shape
        or not _same(ends + residual, total)
        or (normed and not _same(made[-1].outputs[0], out))
    ):
        return None
    dropout = branch[-1].name if isinstance(branch[-1].module, _Marked) else ""
    if len(inputs) != 1 + normed or not (dropout or normed):
        return None
    names = tuple(call.name for call in branch)
    return Sum(names[:-1] if dropout else names, dropout, made[-1].name if normed else "")


# -- the proof -------------------------------------------------------------------------------------


def _disagreement(
    module: nn.Module, found: Expression, sizes: dict[int, int], widths: tuple[int, ...]
) -> str:
    """Return "" if the fused forward agrees with the module's own, on the device that trains."""
    device = torch.device(kinds.accelerator() or "cpu")
    right, fused = (_without_marks(_small(module, sizes)).to(device) for _ in range(2))
    forwards = (
        [found.forward(packed) for packed in (False, True)]
        if isinstance(found, Mlp)
        else [found.forward()]
    )
    for forward in forwards:
        fused.forward = types.MethodType(forward, fused)
        for training in (True, False):
            results = [_pass(each.train(training), widths, device) for each in (right, fused)]
            for a, b in zip(*results):
                error = float((a - b).abs().max() / a.abs().max().clamp(min=1e-6))
                if not error < BOUND:
                    return f"its fused forward is off by {error:.1e} of the largest number"
    return ""


def _without_marks(module: nn.Module) -> nn.Module:
    for each in module.modules():
        for name, child in each.named_children():
            if isinstance(child, _Marked):
                setattr(each, name, nn.Dropout(0.0))
    return module


def _pass(module: nn.Module, widths: tuple[int, ...], device: torch.device) -> list[torch.Tensor]:
    """Return the output, and the gradients of inputs and parameters."""
    inputs = [each.to(device).requires_grad_() for each in _random(widths)]
    trained = [each for each in module.parameters() if each.requires_grad]
    out = module(*inputs)
    weights = torch.sin(torch.arange(out.numel(), device=device)).view_as(out)
    grads = torch.autograd.grad(
        (out * weights).sum(), [*inputs, *trained], allow_unused=True, materialize_grads=True
    )
    return [out.detach(), *grads]
