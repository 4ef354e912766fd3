"""Names of other people's classes, functions and arguments, which kernels do not depend on."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.llama import modeling_llama

import hf_zero
from hf_zero.integrations.fused import candidates, recognition, report
from hf_zero.ops import norms
from tests.helpers.cells import in_one_item
from tests.integrations.fused.animals import BLOCKS, build, inputs


def active(model: nn.Module) -> set[tuple[str, tuple[str, ...]]]:
    return {(line.where, line.kernels) for line in report(model).replaced}


class Gated(nn.Module):
    """An MLP whose names say nothing, with a norm where it likes."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 12), nn.Linear(8, 12), nn.Linear(12, 8)
        self.between = nn.LayerNorm(12)

    def forward(self, signal: torch.Tensor) -> torch.Tensor:
        return self.c(self.between(nn.functional.gelu(self.b(signal)) * self.a(signal)))


class Bare(nn.Module):
    """A norm without a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.eps = 1e-3

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)


class Scaled(nn.Module):
    """An RMSNorm with other defaults than any of transformers."""

    def __init__(self, offset: float, power: float = 2.0) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.randn(8))
        self.tiny, self.offset, self.power = 3e-4, offset, power

    def forward(self, t: torch.Tensor) -> torch.Tensor:
        size = t.abs().pow(self.power).mean(-1, keepdim=True) + self.tiny
        return t * size.pow(-1 / self.power) * (self.offset + self.gain)


KNOWN: list[tuple[nn.Module, str]] = [
    (Gated(), "activations"),
    (Scaled(0.0), "norms"),
    (Scaled(1.0), "norms"),
    (Bare(), "norms"),
    (nn.LayerNorm(8, bias=False), "norms"),
    (nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)), "activations"),
]


@in_one_item(KNOWN)
def test_a_module_of_any_class_has_the_kernel_of_what_it_computes(
    case: tuple[nn.Module, str],
) -> None:
    module, kernel = case
    x = torch.randn(3, 5, 8)
    right = module(x)
    model = hf_zero.optimize(nn.ModuleList([module]), [kernel])
    assert ("0", (kernel,)) in active(model)
    torch.testing.assert_close(module(x), right, rtol=1e-4, atol=1e-5)
    hf_zero.restore(model)
    assert torch.equal(module(x), right)


@in_one_item([Scaled(0.5), Scaled(0.0, power=3.0)])
def test_what_computes_something_else_is_left(module: nn.Module) -> None:
    model = hf_zero.optimize(nn.ModuleList([module]), BLOCKS)
    assert not any(where == "0" for where, _ in active(model))


def test_a_kernel_that_disagrees_is_never_active(
    monkeypatch: pytest.MonkeyPatch, heard_in_full: list[str]
) -> None:
    """It is wrong by a thousandth, in the backward alone."""
    real: Any = norms.rms_norm

    def wrong(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        made: torch.Tensor = real(x, *args, **kwargs)
        return made + (x - x.detach()) * 1e-3

    monkeypatch.setattr(norms, "rms_norm", wrong)
    monkeypatch.setattr(recognition, "_verdicts", {})
    monkeypatch.setattr(candidates, "_warned", set())
    model = hf_zero.optimize(build("llama"), ["norms", "activations"])
    assert {kernels for _, kernels in active(model)} == {("activations",)}
    warned = [each for each in heard_in_full if "stays as it is" in each]
    assert len(warned) == 1 and "LlamaRMSNorm" in warned[0]


def test_random_numbers_are_those_of_a_run_without_kernels() -> None:
    torch.manual_seed(5)
    right = torch.rand(3)
    model = build("bert")
    torch.manual_seed(5)
    hf_zero.optimize(model, BLOCKS, pre_layer_norm=True)
    assert torch.equal(torch.rand(3), right)


CALLED: list[Any] = []


class Recorded(nn.Module):
    """A feed-forward layer that keeps a record."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 12), nn.Linear(12, 8)
        self.seen = [3]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(4)
        out: torch.Tensor = self.second(nn.functional.gelu(self.first(x)))
        return out


class Keeps(Recorded):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.hidden = self.first(x)
        out: torch.Tensor = self.second(nn.functional.gelu(self.hidden))
        return out


class SumsOverRanks(Recorded):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        CALLED.append(x)
        torch.distributed.all_reduce(x)
        return x


def test_trial_calls_change_nothing_and_wait_for_nobody() -> None:
    """A forward that leaves something in its module goes on to do so."""
    model = nn.ModuleList([Recorded(), SumsOverRanks(), Keeps()])
    hf_zero.optimize(model, ["activations"])
    assert not active(model) and not hasattr(model[2], "hidden")
    assert [each.seen for each in model] == [[3], [3], [3]] and not CALLED


class InPlace(nn.Module):
    """An attention that writes into its queries, as Longformer does."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.LayerNorm(8), nn.Linear(8, 8)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = self.layers[0](x)
        normed *= 0.5
        out: torch.Tensor = self.layers[1](normed)
        return out


def test_results_of_kernels_may_be_written_into() -> None:
    model, x = InPlace(), torch.randn(2, 3, 8)
    right = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    hf_zero.optimize(model, BLOCKS)
    assert active(model) == {("layers.0", ("norms",))}
    found = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    for a, b in zip(found, right):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


class Written(nn.Module):
    """A gated MLP by hand, with what such modules have beside it: see its subclasses."""

    scale = 1.0

    def __init__(self, scale: float = 1.0, act: Any = None) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 12), nn.Linear(8, 12), nn.Linear(12, 8)
        self.act, self.scale = act or nn.SiLU(), scale

    def forward(self, signal: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.c(self.act(self.a(signal)) * self.b(signal)) * self.scale
        return made


class Flagged(Written):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("flag", torch.tensor(True))

    def forward(self, signal: torch.Tensor) -> torch.Tensor:
        return super().forward(signal) * (2 if self.flag else 1)


class Clamped(Written):
    def forward(self, signal: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.c(self.act(self.a(signal)).clamp(-10, 10) * self.b(signal))
        return made


class Skipped(Written):
    def forward(self, signal: torch.Tensor) -> torch.Tensor:
        return signal if self.training and random.random() < 1e-9 else super().forward(signal)


class Counted(Written):
    def forward(self, signal: torch.Tensor) -> torch.Tensor:
        self.seen = signal.detach()
        return super().forward(signal)


class Shifted(Scaled):
    """A norm that adds a tensor, of which it has ``tensors`` as buffers or attributes."""

    def __init__(self, shift: float, buffer: bool) -> None:
        super().__init__(0.0)
        if buffer:
            self.register_buffer("shift", torch.tensor(shift))
        else:
            self.shift = torch.tensor(shift)

    def forward(self, t: torch.Tensor) -> torch.Tensor:
        return super().forward(t) + self.shift


class Wide(Scaled):
    """A norm that returns fp32."""

    def forward(self, t: torch.Tensor) -> torch.Tensor:
        return super().forward(t).float()


OTHERS = [
    Written(3.0), Flagged(), Clamped(), Skipped(), Counted(), Shifted(1.0, True),
    Shifted(0.0, False), Wide(0.0),
]  # fmt: skip


@in_one_item(OTHERS)
def test_what_a_small_copy_does_not_show_is_left(module: nn.Module) -> None:
    """Attributes before those of the class, values of tensors, limits, chance, side effects."""
    state = random.getstate()
    model = hf_zero.optimize(nn.ModuleList([module]), BLOCKS)
    assert not any(where == "0" for where, _ in active(model)) and random.getstate() == state
    assert not hasattr(module, "seen")


class ByPlace(nn.Module):
    """A norm of the last dimension, or of the channels of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = (nn.Parameter(torch.randn(8)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dim() == 4:
            x = nn.functional.layer_norm(x.transpose(1, 3), (8,), self.weight[:8], self.bias)
            return x[..., :8].transpose(1, 3)
        return nn.functional.layer_norm(x, (8,), self.weight, self.bias)


def test_a_kernel_has_only_inputs_of_proved_dimensions() -> None:
    module, x = ByPlace(), torch.randn(2, 8, 3, 8)
    right = module(x)
    model = hf_zero.optimize(nn.ModuleList([module]), BLOCKS)
    assert active(model) == {("0", ("norms",))}
    assert torch.equal(module(x), right)


class Added(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense, self.drop, self.norm = nn.Linear(8, 8), nn.Dropout(0.0), nn.LayerNorm(8)

    def forward(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.norm(self.drop(self.dense(x)) + other)
        return made


def _hooked(name: str) -> Callable[[Any], Any]:
    return lambda m: getattr(m, name).register_forward_hook(lambda _m, _x, out: out * 2)


def _set(path: str, value: Any) -> Callable[[Any], Any]:
    parent, _, name = path.rpartition(".")
    return lambda m: setattr(m.get_submodule(parent), name, value)


CHANGES: list[tuple[Callable[[], nn.Module], Callable[[Any], Any]]] = [
    (Written, _set("scale", 2.0)),
    (Written, _set("act", nn.ReLU())),
    (Written, _hooked("act")),
    (Written, _set("act.forward", torch.tanh)),
    (Written, lambda m: m.double()),
    (lambda: Written(act=nn.functional.silu), _set("act", torch.tanh)),
    (lambda: nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)), lambda m: m.double()),
    (lambda: Scaled(0.0), _set("offset", 2.0)),
    (Added, _hooked("drop")),
    (Added, _set("drop.forward", torch.tanh)),
    (Added, _set("drop.p", 1.0)),
]


@in_one_item(CHANGES)
def test_a_module_that_changes_later_computes_what_it_says(
    case: tuple[Callable[[], nn.Module], Callable[[Any], Any]],
) -> None:
    build_one, change = case
    module = build_one()
    right = copy.deepcopy(module)
    assert active(hf_zero.optimize(nn.ModuleList([module]), BLOCKS))
    for each in (module, right):
        change(each)
    dtype = next(module.parameters()).dtype
    given = [torch.randn(2, 3, 8, dtype=dtype)] * (2 if isinstance(module, Added) else 1)
    torch.testing.assert_close(module(*given), right(*given))


def test_what_a_script_patches_later_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the classes of transformers and their modules, after kernels are installed."""
    model, called = hf_zero.optimize(build("llama"), BLOCKS), list[str]()

    def count(holder: object, name: str, label: str) -> None:
        own = getattr(holder, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            called.append(label)
            return own(*args, **kwargs)

        monkeypatch.setattr(holder, name, counted)

    count(modeling_llama.LlamaMLP, "forward", "mlp")
    count(modeling_llama.LlamaRMSNorm, "forward", "norm")
    count(modeling_llama, "apply_rotary_pos_emb", "rotary")
    model(**inputs("llama"))
    assert {*called} == {"mlp", "norm", "rotary"}


def test_calls_by_keyword_and_sums_that_broadcast() -> None:
    gated, added, x = Written(), Added(), torch.randn(2, 3, 8)
    right = gated(x), added(x, x[0])
    hf_zero.optimize(nn.ModuleList([gated, added]), BLOCKS)
    torch.testing.assert_close(gated(signal=x), right[0])
    torch.testing.assert_close(added(x, other=x[0]), right[1])
    torch.testing.assert_close(added(x, x[0]), right[1])


@in_one_item(["device", "dtype", "inference", "autocast"])
def test_modes_of_the_script_do_not_matter(mode: str) -> None:
    class Other(Scaled):
        """A class without a verdict."""

    gated, norm, x = Written(), Other(0.0), torch.randn(2, 3, 8)
    modes = {
        "device": torch.device("meta"),
        "inference": torch.inference_mode(),
        "autocast": torch.autocast("cpu", torch.bfloat16),
        "dtype": contextlib.nullcontext(),
    }
    recognition._verdicts.clear()
    if mode == "dtype":
        torch.set_default_dtype(torch.float64)
    try:
        with modes[mode]:
            model = hf_zero.optimize(nn.ModuleList([gated, norm]), BLOCKS)
    finally:
        torch.set_default_dtype(torch.float32)
    assert active(model) == {("0", ("activations", "qkv")), ("1", ("norms",))}
    norm(gated(x)).sum().backward()
    with torch.inference_mode():
        hf_zero.restore(model)
    norm(gated(x)).sum().backward()
