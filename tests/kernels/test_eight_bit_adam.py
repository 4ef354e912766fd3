"""Adam with moments in dynamic 8-bit blocks."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from hf_zero.ops.host import adam
from hf_zero.ops.moment_blocks import Blocks
from tests.helpers.buffers import Guarded, reference, same_bits

State = dict[str, Any]
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
SIZES = (0, 1, 255, 256, 257, 1024, 2500)
SETTINGS: State = {
    "step": 7, "lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1,
    "decoupled": True, "divisor": 3.0,
}  # fmt: skip
CHANGES: list[State] = [
    {},
    {"decoupled": False, "maximize": True},
    {"beta1": 0.3, "beta2": 0.5, "divisor": 1.0, "step": 1},
    {"beta1": 0.0, "eps": 0.0, "weight_decay": 0.0, "corrected": False},
]


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def numbers(numel: int, seed: int) -> torch.Tensor:
    """Values of many magnitudes, a block of zeros and a block of hardly anything among them."""
    generator = seeded(seed)
    x = torch.randn(numel, generator=generator)
    x *= torch.randn(numel, generator=generator).mul(4).exp()
    x[3::31], x[5::31] = 0.0, -0.0
    x[256:512] = 0.0
    x[1024:1280] *= 1e-30
    return x


def blocks(values: torch.Tensor, signed: bool, guarded: Guarded) -> Blocks:
    with reference():
        made = Blocks.zeros(values.numel(), signed, dynamic=True)
        made.encode(values)
    return replace(made, codes=guarded(made.codes), scales=guarded(made.scales))


def state(numel: int, grad: torch.dtype, out: torch.dtype | None, guarded: Guarded) -> State:
    made: State = {
        "master": guarded(numbers(numel, 1)),
        "grad": guarded(numbers(numel, 2).to(grad)),
        "exp_avg": blocks(numbers(numel, 3) * 1e-2, True, guarded),
        "exp_avg_sq": blocks(numbers(numel, 4).square() * 1e-4, False, guarded),
    }
    return made if out is None else {**made, "out": guarded(torch.zeros(numel, dtype=out))}


def bits(made: State) -> dict[str, torch.Tensor]:
    found = {}
    for name, value in made.items():
        if isinstance(value, Blocks):
            found |= {f"{name}.codes": value.codes, f"{name}.scales": value.scales}
        else:
            found[name] = value
    return found


def compare(made: Callable[[Guarded], State], **changes: Any) -> State:
    """Make a step from the state that ``made`` returns, and the same one by the reference; compare
    all bits. Return the state after the first.
    """
    guarded = Guarded()
    ours, plain = made(guarded), made(Guarded())
    adam(**ours, **{**SETTINGS, **changes})
    with reference(), mock.patch.dict(os.environ, HF_ZERO_TRITON="0"):
        adam(**plain, **{**SETTINGS, **changes})
    expected = bits(plain)
    for name, value in bits(ours).items():
        assert same_bits(value, expected[name]), (name, changes)
    guarded.check()
    return ours


def test_every_body_gives_the_bits_of_the_reference(every_body: str) -> None:
    for number, numel in enumerate(SIZES):
        for at, changes in enumerate(CHANGES):
            out = (None, *FLOATS)[(number + at) % 4]
            grad = FLOATS[(number + at) % 3]
            compare(lambda g, n=numel, of=(grad, out): state(n, *of, g), **changes)


def test_a_value_that_is_not_finite_spoils_its_block_alone(every_body: str) -> None:
    for value in (float("nan"), float("inf"), -float("inf"), 3e38, 1e-45):

        def made(guarded: Guarded, value: float = value) -> State:
            start = state(1300, torch.float32, torch.float16, guarded)
            start["grad"][700] = value
            return start

        after = compare(made, divisor=1.0)
        if value != 1e-45 and value != 3e38:
            moment = after["exp_avg"].decode()
            assert moment[512:768].isnan().all() and moment[:512].isfinite().all()
            assert moment[768:].isfinite().all() and after["master"][699].isfinite()


def test_elements_past_the_end_of_a_block_do_not_raise_its_scale(every_body: str) -> None:
    """The gradient shrinks the only element of the block more than a step shrinks any other."""

    def made(guarded: Guarded) -> State:
        start = state(257, torch.float32, None, guarded)
        start["grad"][256] = -1.0
        ones = torch.ones(257)
        return {**start, "exp_avg": blocks(ones, True, guarded)}

    after = compare(made, divisor=1.0)
    assert float(after["exp_avg"].scales[1]) == pytest.approx(0.8)
