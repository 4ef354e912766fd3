"""Updates of the native core against the torch reference, bit for bit."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hf_zero.ops import native
from hf_zero.ops.host import adagrad, adam, lion, sgd
from hf_zero.ops.moment_blocks import Blocks, Moment
from tests.helpers.buffers import Guarded, reference, same_bits
from tests.helpers.cells import in_turn

SIZES = [0, 1, 15, 16, 17, 255, 256, 257, 513, 1025, 40_001]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FIRST = 256 * 12_345_678_901  # above 2^32, at a block
Update = Callable[..., None]
State = dict[str, Any]


def numbers(numel: int, seed: int) -> Tensor:
    """Values over many magnitudes, with denormals, zeros and their signs among them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(numel, generator=generator)
    x *= torch.randn(numel, generator=generator).mul(4).exp()
    x[::7] *= 1e-38
    x[3::31] = 0.0
    x[5::31] = -0.0
    return x


def moment(kind: str, values: Tensor, signed: bool, guarded: Guarded) -> Moment:
    if kind != "int8":
        return guarded(values.to(torch.float32 if kind == "fp32" else torch.bfloat16))
    blocks = Blocks.zeros(values.numel(), signed)
    blocks.encode(values)
    return replace(blocks, codes=guarded(blocks.codes), scales=guarded(blocks.scales))


def parts(state: State) -> list[Tensor]:
    found = []
    for value in state.values():
        if isinstance(value, Blocks):
            found += [value.codes, value.scales]
        elif isinstance(value, Tensor):
            found.append(value)
    return found


def state_of(
    update: Update,
    numel: int,
    guarded: Guarded,
    grad: torch.dtype,
    out: torch.dtype | None,
    kind: str = "fp32",
) -> State:
    state: State = {"master": guarded(numbers(numel, 1))}
    state["grad"] = guarded(numbers(numel, 2).to(grad))
    if update is adam:
        state["exp_avg"] = moment(kind, numbers(numel, 3) * 1e-2, True, guarded)
        state["exp_avg_sq"] = moment(kind, numbers(numel, 4).square() * 1e-4, False, guarded)
    elif update is lion:
        state["exp_avg"] = moment(kind, numbers(numel, 3) * 1e-2, True, guarded)
    elif update is adagrad:
        state["total"] = guarded(numbers(numel, 4).square())
    else:
        state["momentum_buffer"] = guarded(numbers(numel, 3))
    if out is not None:
        state["out"] = guarded(torch.zeros(numel, dtype=out))
    return state


def compare(
    update: Update, make: Callable[[Guarded], State], offset: int = 0, **settings: Any
) -> None:
    guarded = Guarded(offset)
    native_state, torch_state = make(guarded), make(Guarded())
    update(**native_state, **settings)
    with reference():
        update(**torch_state, **settings)
    for name, ours, theirs in zip([*native_state, "", ""], parts(native_state), parts(torch_state)):
        assert same_bits(ours, theirs), name
    guarded.check()


SHARED: State = {"lr": 1e-3, "weight_decay": 0.1, "divisor": 3.0}
ROUNDED: State = {**SHARED, "seed": 5, "first": FIRST}
SETTINGS: dict[Update, State] = {
    adam: {**ROUNDED, "step": 7, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "decoupled": True},
    lion: {**ROUNDED, "beta1": 0.9, "beta2": 0.99},
    adagrad: {**SHARED, "step": 7, "lr": 1e-2, "lr_decay": 0.1, "eps": 1e-10},
    sgd: {**SHARED, "lr": 1e-2, "momentum": 0.9, "dampening": 0.1},
}
NARROW = ("fp32", "bf16", "int8")
CASES = [(update, kind) for update in (adam, lion) for kind in NARROW]
CASES += [(adagrad, "fp32"), (sgd, "fp32")]
OPTIONS: list[tuple[Update, State]] = [
    (adam, {"decoupled": False}),
    (adam, {"decoupled": False, "weight_decay": 0.0, "maximize": True}),
    (adam, {"beta1": 0.3, "beta2": 0.5, "divisor": 1.0, "step": 1}),
    (adam, {"beta1": 0.0, "eps": 0.0}),
    (lion, {"maximize": True, "weight_decay": 0.0}),
    (adagrad, {"maximize": True, "weight_decay": 0.0, "divisor": 1.0}),
    (sgd, {"nesterov": True, "dampening": 0.0}),
    (sgd, {"first_step": True}),
    (sgd, {"first_step": True, "nesterov": True, "dampening": 0.0, "maximize": True}),
]


def test_every_size_dtype_and_start(isa: str) -> None:
    for number, (update, kind) in enumerate(CASES):
        for at, numel in enumerate(SIZES):
            grad = DTYPES[(at + number) % 3]
            for out in (None, DTYPES[at % 3]):
                make = lambda g, n=numel, of=(grad, out): state_of(update, n, g, *of, kind)  # noqa: B023, E731
                compare(update, make, offset=at % 2, **SETTINGS[update])


def test_every_option(isa: str) -> None:
    """The copy may lie where the gradient was."""
    for number, (update, changed) in enumerate(OPTIONS):
        grad = DTYPES[number % 2]
        make = lambda g, d=grad, of=update: state_of(of, 1300, g, d, torch.float16)  # noqa: E731
        compare(update, make, **{**SETTINGS[update], **changed})

    def amsgrad(guarded: Guarded) -> State:
        largest = guarded(numbers(1300, 9).square() * 1e-4)
        return {**state_of(adam, 1300, guarded, torch.float32, None), "max_exp_avg_sq": largest}

    def plain(guarded: Guarded) -> State:
        return {**state_of(sgd, 1300, guarded, torch.float32, None), "momentum_buffer": None}

    compare(adam, amsgrad, **SETTINGS[adam])
    compare(adam, amsgrad, **{**SETTINGS[adam], "decoupled": False})
    compare(sgd, plain, **{**SETTINGS[sgd], "momentum": 0.0})
    apart = state_of(adam, 5000, Guarded(), torch.bfloat16, torch.bfloat16)
    together = state_of(adam, 5000, Guarded(), torch.bfloat16, None)
    adam(**apart, **SETTINGS[adam])
    adam(**together, **SETTINGS[adam], out=together["grad"])
    assert torch.equal(apart["out"], together["grad"])


def test_values_at_the_edges(isa: str) -> None:
    for update, kind in CASES:
        for value in (float("nan"), float("inf"), -float("inf"), 3e38, 1e-45):

            def make(guarded: Guarded, update=update, kind=kind, value=value) -> State:
                state = state_of(update, 700, guarded, torch.float32, torch.float16, kind)
                state["grad"][300::97] = value
                return state

            compare(update, make, **{**SETTINGS[update], "divisor": 1.0})
    for update, kind in itertools.product((adam, lion), NARROW):
        state = state_of(update, 700, Guarded(), torch.float32, None, kind)
        state["grad"][300] = float("nan")
        update(**state, **SETTINGS[update])
        kept = state["exp_avg_sq" if update is adam else "exp_avg"]
        kept = kept.decode() if kind == "int8" else kept
        assert kept[300].isnan() and state["master"][300].isnan(), (update, kind)
        assert state["master"][299].isfinite()


@in_turn(("update", "kind"), CASES)
def test_threads_and_cuts_leave_no_trace(isa: str, update: Update, kind: str) -> None:
    numel = 90_000
    whole = state_of(update, numel, Guarded(), torch.bfloat16, torch.bfloat16, kind)
    native.set_threads(1)
    update(**whole, **SETTINGS[update])
    for threads in (2, 5):
        native.set_threads(threads)
        again = state_of(update, numel, Guarded(), torch.bfloat16, torch.bfloat16, kind)
        update(**again, **SETTINGS[update])
        assert all(same_bits(a, b) for a, b in zip(parts(whole), parts(again)))
    cut = state_of(update, numel, Guarded(), torch.bfloat16, torch.bfloat16, kind)
    borders = [0, 256, 256 * 5, 256 * 300, numel]
    for start, stop in itertools.pairwise(borders):
        piece = {
            name: v.narrow(start, stop - start) if isinstance(v, Blocks) else v[start:stop]
            for name, v in cut.items()
        }
        settings = dict(SETTINGS[update])
        if "first" in settings:
            settings["first"] += start
        update(**piece, **settings)
    assert all(same_bits(a, b) for a, b in zip(parts(whole), parts(cut)))
