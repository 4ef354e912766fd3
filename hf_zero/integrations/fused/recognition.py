"""Recognition of modules by what they compute, and the proof that a fused forward computes it too.

A name, a signature or a source says nothing about the next release. So a small copy of a module,
with random weights, is called with random tensors: the calls of its submodules and the values
between them show which expression of :mod:`.sublayers` it computes. The fused forward is then
installed in another copy and compared with the module's own code, outputs and gradients, in
training and in evaluation. A forward that has not agreed is never installed.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import random
import types
from collections.abc import Hashable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from hf_zero.device import kinds
from hf_zero.integrations.fused.shells import (
    CONTAINERS,
    ModuleCall,
    attributes,
    calls,
    is_constant,
    names_used,
    shell,
)
from hf_zero.integrations.fused.sublayers import (
    ACTIVATIONS,
    Expression,
    Forward,
    Mlp,
    Norm,
    Sum,
    while_unchanged,
)

LARGEST = 12  # submodules of a module that is tried
ANY = 8  # the width of inputs where a module has none of its own
BOUND = 1e-4  # of the largest number, in fp32
BOUND_TF32 = 1e-2
OTHER_INPUTS: tuple[tuple[tuple[int, ...], float], ...] = (
    ((2, 5), 40.0), ((3,), 1.0), ((3, 1), 1.0), ((2, 3, 4), 1.0),
)  # fmt: skip
"""Leading sizes and scales of inputs on which code may branch, or clamp. None is 1 or a multiple of
16 rows, for which Triton would compile again.
"""


@dataclass(frozen=True)
class Recognition:
    """The expression that a module computes for inputs of ``dims`` dimensions, or ``why_not`` if it
    looks like one and is none, or the fused forward ``disagrees``.
    """

    expression: Expression | None = None
    dims: frozenset[int] = frozenset()
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
    key = (type(module).forward, tuple(_description(name, value) for name, value in parts))
    if key not in _verdicts:
        with _surroundings():
            _verdicts[key] = _judge(module)
    return _verdicts[key]


@contextmanager
def _surroundings() -> Iterator[None]:
    """Set the modes that a script may have changed to their defaults, and restore random states."""
    state = random.getstate()
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.device("cpu"))
        for kind in {"cpu", kinds.accelerator() or "cpu"}:
            stack.enter_context(torch.autocast(kind, enabled=False))
        try:
            yield
        finally:
            random.setstate(state)


def _description(name: str, module: nn.Module) -> Hashable:
    """Return everything of a module that its class may branch on, other than values of tensors."""
    settings = tuple((key, _setting(value)) for key, value in attributes(module))
    tensors = tuple((key, t is None) for key, t in (module._parameters | module._buffers).items())
    return name, type(module), settings, tensors


def _setting(value: object) -> Hashable:
    if is_constant(value):
        return value  # type: ignore[no-any-return]
    if isinstance(value, (tuple, list)):
        return tuple(_setting(item) for item in value)
    if hasattr(value, "to_dict"):  # a configuration of transformers
        return repr(value.to_dict())
    return object()  # equal to nothing, so its module is judged by itself


def _judge(module: nn.Module) -> Recognition:
    arguments = _arguments(module)
    if arguments not in (1, 2) or any(communicates(type(child)) for child in module.modules()):
        return Recognition()
    try:
        sizes = _sizes(module)
        for widths in _widths(module, sizes, arguments):
            reduced = _small(module, sizes)
            inputs = _random(widths)
            reduced.train()
            before = _state(reduced)
            try:
                with calls(reduced, outermost=True) as recorded:
                    out = reduced(*inputs)
            except Exception:  # another width, or code that a small copy cannot run
                continue
            if not isinstance(out, torch.Tensor) or _state(reduced) != before:
                return Recognition()
            expression = _expression(reduced, inputs, out, recorded)
            if isinstance(expression, str):
                return Recognition(why_not=expression)
            if expression is None:
                return Recognition()
            wrong = _disagreement(module, expression, sizes, widths)
            if wrong:
                return Recognition(disagrees=wrong)
            dims = _dims(module, expression, sizes, widths)
            if isinstance(dims, str):
                return Recognition(why_not=dims)
            return Recognition(expression, dims)
    except _Unfit:
        pass
    return Recognition()


def _state(module: nn.Module) -> list[object]:
    """Return all that a forward without side effects leaves as it is. A forward that draws random
    numbers has one, because dropouts are marks.
    """
    state: list[object] = [random.getstate(), torch.get_rng_state().tolist()]
    for submodule in module.modules():
        for key, value in submodule.__dict__.items():
            size = len(value) if isinstance(value, CONTAINERS) else 0
            state.append((key, _Same(value), size))
    return state


class _Same:
    """An object that equals itself alone, and lives as long as this."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value


def communicates(cls: type) -> bool:
    """Return whether the forward of ``cls`` names torch.distributed, so that a trial call of one
    rank could wait for others.
    """
    return any(
        name == "distributed" or getattr(value, "__name__", "").startswith("torch.distributed")
        for _, name, value in names_used(cls.forward)  # type: ignore[attr-defined]
    )


def _arguments(module: nn.Module) -> int:
    """Return how many arguments the forward requires; 0 if it cannot be known."""
    try:
        parameters = inspect.signature(type(module).forward).parameters.values()
    except (TypeError, ValueError):
        return 0
    required = [p for p in parameters if p.default is p.empty and p.kind in (0, 1)]
    return len(required) - 1


def linear_sizes(module: nn.Module) -> tuple[int, int] | None:
    """Return (inputs, outputs) of a linear layer: torch's, an adapter's, a quantized one, or the
    Conv1D of GPT-2.
    """
    for names in (("in_features", "out_features"), ("nx", "nf")):
        pair = tuple(getattr(module, name, None) for name in names)
        if all(type(size) is int for size in pair):
            return pair  # type: ignore[return-value]
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
    module without linear layers keeps its widths. One that has tensors other than parameters is
    unfit, because it may add them, or branch on their values.
    """
    widths: set[int] = set()
    for submodule in module.modules():
        sizes = linear_sizes(submodule)
        if sizes is not None:
            widths.update(sizes)
            continue
        others = (*submodule._buffers.values(), *submodule.__dict__.values())
        if any(isinstance(other, torch.Tensor) for other in others):
            raise _Unfit
        shape = getattr(submodule, "normalized_shape", None)
        if isinstance(shape, tuple) and len(shape) == 1:
            widths.add(shape[0])
        for parameter in submodule.parameters(recurse=False):
            if parameter.dim() > 1:
                raise _Unfit
            widths.add(parameter.numel())
    if all(linear_sizes(submodule) is None for submodule in module.modules()):
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
            sizes[widths[0]],
            sizes[widths[1]],
            bias=getattr(old, "bias", None) is not None,
            dtype=torch.float32,
        )
        for parameter in new.parameters():
            parameter.data.normal_(std=0.7, generator=generator)
        return new

    def parameter(old: torch.Tensor) -> torch.Tensor:
        shape = (sizes[old.numel()],) if old.dim() else ()
        return torch.randn(shape, generator=generator, dtype=torch.float32)

    def buffer(old: torch.Tensor) -> torch.Tensor:
        return torch.zeros(old.shape, dtype=old.dtype)

    reduced = shell(module, parameter, buffer, instead)
    for submodule in reduced.modules():
        shape = submodule.__dict__.get("normalized_shape")
        if isinstance(shape, tuple) and len(shape) == 1:
            submodule.__dict__["normalized_shape"] = (sizes.get(shape[0], shape[0]),)
    return reduced


def _widths(module: nn.Module, sizes: dict[int, int], arguments: int) -> Iterator[tuple[int, ...]]:
    """Yield the widths that the arguments may have, likely ones first."""
    ins = [sizes[w[0]] for child in module.modules() if (w := linear_sizes(child)) is not None]
    wide = list(dict.fromkeys(ins)) or list(sizes.values())
    for first in wide:
        if arguments == 1:
            yield (first,)
        else:
            yield from ((first, second) for second in dict.fromkeys(sizes.values()))


def _random(
    widths: tuple[int, ...], scale: float = 1.0, leading: tuple[int, ...] = (2, 5)
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    normal = functools.partial(torch.randn, generator=generator, dtype=torch.float32)
    return [(normal(*leading, width) + 0.3) * scale for width in widths]


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a is b or (a.shape == b.shape and torch.allclose(a, b, rtol=1e-5, atol=2e-6))


def _expression(
    module: nn.Module, inputs: list[torch.Tensor], out: torch.Tensor, recorded: list[ModuleCall]
) -> Expression | str | None:
    with torch.no_grad():
        if len(inputs) == 1 and not recorded:
            return _norm(module, inputs[0].shape[-1])
        if any("." in call.name or len(call.inputs) != 1 for call in recorded):
            return None
        mlp = _mlp(inputs[0], out, recorded) if len(inputs) == 1 else None
        return mlp or _sum(inputs, out, recorded)


def _norm(module: nn.Module, width: int) -> Norm | None:
    parameters = {name: p for name, p in module._parameters.items() if p is not None}
    if len(parameters) > 2 or len({parameter.shape for parameter in parameters.values()}) > 1:
        return None
    weight, bias = (*parameters, "", "")[:2]
    constants: list[tuple[str | float, float]] = [
        (key, v) for key, v in module.__dict__.items() if isinstance(v, float) and 0 < v < 0.1
    ]
    tried = [
        (Norm(weight, bias, key, offset, centered), eps)
        for key, eps in (*constants, (1e-5, 1e-5), (1e-6, 1e-6))
        for offset, centered in ((0.0, True), (0.0, False), (1.0, False))
        if centered or not bias
    ]
    inputs = [_random((width,), scale)[0] for scale in (1.0, 2e-3)]  # of the smaller, eps counts
    for norm, eps in tried:
        if all(_computes(norm, module, x, parameters, eps) for x in inputs):
            return norm
    return None


def _computes(
    norm: Norm,
    module: nn.Module,
    x: torch.Tensor,
    parameters: Mapping[str, torch.Tensor],
    eps: float,
) -> bool:
    x64, weight = x.double(), parameters[norm.weight].double() if norm.weight else torch.ones(())
    if norm.centered:
        x64 = x64 - x64.mean(-1, keepdim=True)
    right = x64 * torch.rsqrt(x64.square().mean(-1, keepdim=True) + eps) * (norm.offset + weight)
    if norm.bias:
        right = right + parameters[norm.bias].double()
    return _same(module(x), right.float())


def _chained(recorded: list[ModuleCall], last: torch.Tensor) -> bool:
    """Return whether each call gets what the one before returned, and the last returns ``last``."""
    for call, following in itertools.pairwise(recorded):
        if len(call.outputs) != 1 or not _same(call.outputs[0], following.inputs[0]):
            return False
    return not recorded or (len(recorded[-1].outputs) == 1 and _same(recorded[-1].outputs[0], last))


def _mlp(x: torch.Tensor, out: torch.Tensor, recorded: list[ModuleCall]) -> Mlp | str | None:
    firsts = [c for c in recorded if isinstance(c.module, nn.Linear) and _same(c.inputs[0], x)]
    if len(firsts) not in (1, 2) or any(len(c.outputs) != 1 for c in recorded):
        return None
    names = [c.name for c in firsts]
    results = [c.outputs[0] for c in firsts]
    others = [c for c in recorded if c not in firsts]
    acts = [c for c in others if _has_no_weights(c.module) and not isinstance(c.module, _Marked)]
    after = [c for c in others if c not in acts]
    hidden = after[0].inputs[0] if after else out
    if not _chained(after, out):
        return None
    after_names, skipped = tuple(c.name for c in after), tuple(c.name for c in acts)
    for name, act in ACTIVATIONS.items():
        for gate, up in ((0, 1), (1, 0)) if len(firsts) == 2 else ():
            if _same(act(results[gate]) * results[up], hidden):
                return Mlp(name, names[gate], names[up], after=after_names, skipped=skipped)
        if len(firsts) == 2:
            continue
        if name != "silu" and _same(act(results[0]), hidden):
            return Mlp(name, names[0], after=after_names, skipped=skipped)
        if results[0].shape[-1] == 2 * hidden.shape[-1]:
            a, b = results[0].chunk(2, dim=-1)
            for halves, gate_half, up_half in ((1, a, b), (-1, b, a)):
                if _same(act(gate_half) * up_half, hidden):
                    return Mlp(name, names[0], halves=halves, after=after_names, skipped=skipped)
    if acts and after_names:
        act_module: object = acts[0].module
        return f"its activation is {getattr(act_module, '__name__', type(act_module).__name__)}"
    return None


def _has_no_weights(module: nn.Module) -> bool:
    return next(module.parameters(), None) is None


def _sum(inputs: list[torch.Tensor], out: torch.Tensor, recorded: list[ModuleCall]) -> Sum | None:
    """Find the sum at the end of a module; without a dropout before or a norm after it there is
    nothing to fuse.
    """
    residual = inputs[-1]
    last = recorded[-1] if recorded else None
    normed = len(inputs) == 2 and last is not None and isinstance(last.module, nn.LayerNorm)
    branch = recorded[:-1] if normed else recorded
    if not branch or not _same(branch[0].inputs[0], inputs[0]) or len(branch[-1].outputs) != 1:
        return None
    total = recorded[-1].inputs[0] if normed else out
    ends = branch[-1].outputs[0]
    if (
        not _chained(branch, ends)
        or ends.shape != residual.shape
        or not _same(ends + residual, total)
        or (normed and not _same(recorded[-1].outputs[0], out))
    ):
        return None
    dropout = branch[-1].name if isinstance(branch[-1].module, _Marked) else ""
    if len(inputs) != 1 + normed or not (dropout or normed):
        return None
    names = tuple(call.name for call in branch)
    return Sum(names[:-1] if dropout else names, dropout, recorded[-1].name if normed else "")


def _disagreement(
    module: nn.Module, expression: Expression, sizes: dict[int, int], widths: tuple[int, ...]
) -> str:
    """Return "" if the fused forward agrees with the module's own, on the device that trains."""
    exact = torch.get_float32_matmul_precision() == "highest"
    for right, fused in _pairs(module, expression, sizes):
        results = [_pass(forward, _random(widths)) for forward in (right, fused)]
        for a, b in zip(*results):
            error = _error(a, b)
            if not error < (BOUND if exact else BOUND_TF32):
                return f"its fused forward is off by {error:.1e} of the largest number"
    return ""


def _dims(
    module: nn.Module, expression: Expression, sizes: dict[int, int], widths: tuple[int, ...]
) -> frozenset[int] | str:
    """Return the numbers of dimensions of which the module's own code accepts other inputs; or why
    its fused forward does not fit, because it does not compute the same for all of these.
    """
    dims = {3}
    samples = [_random(widths, scale, leading) for leading, scale in OTHER_INPUTS]
    for right, fused in _pairs(module, expression, sizes):
        for inputs in samples:
            try:
                expected = _pass(right, inputs)
            except Exception:  # code that does not take inputs of this shape
                continue
            try:
                ours = _pass(fused, inputs)
            except Exception as error:
                return f"its fused forward fails for {list(inputs[0].shape)}: {error}"[:200]
            if not all(_error(a, b) < BOUND_TF32 for a, b in zip(expected, ours)):
                return f"it computes something else for {list(inputs[0].shape)}, or large numbers"
            dims.add(inputs[0].dim())
        half = [tensor.to(torch.bfloat16) for tensor in _random(widths)]
        try:
            dtype = _pass(right.to(torch.bfloat16), half)[0].dtype
        except Exception:
            continue
        if dtype != torch.bfloat16:
            return f"it returns {dtype} for torch.bfloat16"
    return frozenset(dims)


def _pairs(
    module: nn.Module, expression: Expression, sizes: dict[int, int]
) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Yield copies with the module's own and each fused forward, in training and evaluation."""
    device = torch.device(kinds.accelerator() or "cpu")
    for forward in forwards(expression):
        for training in (True, False):
            right, fused = (
                _without_marks(_small(module, sizes)).to(device).train(training) for _ in range(2)
            )
            checked = while_unchanged(forward, fused, expression, (2, 3, 4))
            fused.forward = types.MethodType(checked, fused)
            yield right, fused


def forwards(expression: Expression) -> list[Forward]:
    if isinstance(expression, Mlp):
        return [expression.forward(packed) for packed in (False, True)]
    return [expression.forward()]


def _error(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the largest difference, relative to the largest number."""
    if a.shape != b.shape:
        return float("inf")
    return float((a - b).abs().max() / a.abs().max().clamp(min=1e-6))


def _without_marks(module: nn.Module) -> nn.Module:
    for submodule in module.modules():
        for name, child in submodule.named_children():
            if isinstance(child, _Marked):
                setattr(submodule, name, nn.Dropout(0.0))
    return module


def _pass(module: nn.Module, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the output, and the gradients of inputs and parameters."""
    device = torch.device(kinds.accelerator() or "cpu")
    inputs = [tensor.to(device).detach().requires_grad_() for tensor in inputs]
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    out = module(*inputs)
    weights = torch.sin(torch.arange(out.numel(), device=device)).view_as(out)
    grads = torch.autograd.grad(
        (out * weights).sum(), [*inputs, *trained], allow_unused=True, materialize_grads=True
    )
    return [out.detach(), *grads]
