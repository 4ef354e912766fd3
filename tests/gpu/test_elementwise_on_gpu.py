"""Activations, dropout + residual, rotary embedding and packed layers at the sizes models have,
kernel beside reference and torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hf_zero.ops import dispatch
from hf_zero.ops.activations import geglu, gelu, swiglu, swiglu_packed
from hf_zero.ops.packed_linear import pack_, packed_linear
from hf_zero.ops.philox import draw_seed, kept_rows
from hf_zero.ops.residual import dropout_add
from hf_zero.ops.rotary import rotary
from tests.helpers.errors_beside_torch import assert_no_worse_than_torch, gradients

GPU = torch.device("cuda", 0)
DTYPES = [torch.bfloat16, torch.float32]


# Relative in norm: a reference computes in fp32 with other functions, and rounds as the kernel
# does.
LIMITS = {torch.float32: 2e-6, torch.bfloat16: 2e-3, torch.float16: 3e-4}


def compare(
    function: Callable[..., torch.Tensor],
    torchs: Callable[..., torch.Tensor],
    inputs: Sequence[torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the kernel and by the reference, alike; the kernel's no worse than torch's."""
    kernel = gradients(function, inputs)
    assert not dispatch.broken(), dispatch.broken()
    with monkeypatch.context() as context:
        context.setenv("HF_ZERO_TRITON", "0")
        reference = gradients(function, inputs)
    for number, (one, other) in enumerate(zip(kernel, reference)):
        apart = (one.double() - other.double()).norm() / other.double().norm().clamp_min(1e-30)
        assert apart.item() <= LIMITS[inputs[0].dtype], f"output {number}: {apart.item():.3g}"
    assert_no_worse_than_torch(function, torchs, inputs)


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, device=GPU).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("shape", [(4096, 4096), (8, 509, 3072), (1001, 1003)])
def test_gelu(shape, approximate, dtype, monkeypatch):
    x, bias = randn(*shape, dtype=dtype) * 3, randn(shape[-1], dtype=dtype)
    ours = partial(gelu, approximate=approximate)
    torchs = partial(F.gelu, approximate=approximate)
    compare(ours, lambda x, bias: torchs(x + bias), [x, bias], monkeypatch)
    compare(ours, torchs, [x], monkeypatch)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(4096, 8192), (4, 509, 5632), (1001, 1003)])
def test_gates(shape, dtype, monkeypatch):
    gate, up = randn(*shape, dtype=dtype) * 3, randn(*shape, dtype=dtype)
    compare(swiglu, lambda gate, up: F.silu(gate) * up, [gate, up], monkeypatch)
    compare(geglu, lambda gate, up: F.gelu(gate, approximate="tanh") * up, [gate, up], monkeypatch)

    def packed(both: torch.Tensor) -> torch.Tensor:
        return F.silu(both.chunk(2, -1)[0]) * both.chunk(2, -1)[1]

    compare(swiglu_packed, packed, [torch.cat((gate, up), -1)], monkeypatch)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(16_384, 1024), (8, 509, 768), (1001, 1003)])
def test_dropout_add(shape, dtype, monkeypatch):
    torch.manual_seed(2026)
    seed = draw_seed(GPU)
    kept = kept_rows(seed, math.prod(shape[:-1]), shape[-1], 0.1).view(shape)

    def plain(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return residual + x * kept.to(x.dtype) / 0.9

    def ours(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(2026)
        return dropout_add(x, residual, dropout=0.1, training=True)

    compare(ours, plain, [randn(*shape, dtype=dtype), randn(*shape, dtype=dtype)], monkeypatch)


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    rotated, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    first, second = rotated.chunk(2, dim=-1)
    cos, sin = (each.to(x.dtype).unsqueeze(1) for each in (cos, sin))
    rotated = rotated * cos + torch.cat((-second, first), -1) * sin
    return torch.cat((rotated, rest), dim=-1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "key_heads", "width", "rotated"),
    [(32, 8, 64, 64), (32, 8, 128, 128), (8, 1, 256, 256), (32, 32, 80, 32), (14, 2, 64, 64)],
)
def test_rotary(heads, key_heads, width, rotated, dtype, monkeypatch):
    batch, sequence = 2, 1021
    rates = 10_000 ** -torch.linspace(0, 1, rotated // 2, device=GPU)
    angle = torch.outer(torch.arange(sequence, device=GPU), rates).repeat(1, 2)[None]
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    qkv = randn(batch, sequence, (heads + 2 * key_heads) * width, dtype=dtype)

    def parts(qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
        each = qkv.unflatten(2, (-1, width)).transpose(1, 2)
        return each.split([heads, key_heads, key_heads], dim=1)

    def plain(qkv: torch.Tensor) -> torch.Tensor:
        q, k, v = parts(qkv)
        return torch.cat((turned(q, cos, sin), turned(k, cos, sin), v), dim=1)

    def by_views(qkv: torch.Tensor) -> torch.Tensor:
        q, k, v = parts(qkv)
        return torch.cat((*rotary(q, k, cos, sin), v), dim=1)

    compare(by_views, plain, [qkv], monkeypatch)


def test_a_compiled_block_is_the_plain_one():
    weights = [nn.Parameter(randn(512, 256, dtype=torch.bfloat16) / 16) for _ in range(2)]
    down = nn.Parameter(randn(256, 512, dtype=torch.bfloat16) / 22)
    pack_(weights)

    def block(x: torch.Tensor) -> torch.Tensor:
        hidden = swiglu_packed(packed_linear(x, weights))
        return dropout_add(F.linear(hidden, down), x) + gelu(x)

    x, trained = randn(64, 256, dtype=torch.bfloat16), [*weights, down]
    losses = [(f(x) ** 2).float().mean() for f in (torch.compile(block, fullgraph=True), block)]
    for a, b in zip(*(torch.autograd.grad(loss, trained) for loss in losses)):
        assert ((a - b).norm() / b.norm()).item() < 2e-2


def test_beyond_32_bits_of_elements():
    """More elements than int32 counts, in the last of which the result is still right."""
    if torch.cuda.mem_get_info()[0] < 40 * 2**30:
        pytest.skip("needs 40 GiB")
    x = torch.zeros(2**31 + 4096, dtype=torch.bfloat16, device=GPU).view(-1, 4096)
    x[-1] = 2
    assert (gelu(x)[-1] == F.gelu(x[-1])).all()
    assert (swiglu(x, x)[-1].float() - 2 * F.silu(x[-1].float())).abs().max() < 0.02
    y = dropout_add(x, x, dropout=0.5, training=True)
    assert set(y[-1].unique().tolist()) == {2.0, 6.0}


def test_heads_further_apart_than_31_bits():
    """A stride of heads that spans a whole sequence, as in [batch, heads, sequence, width]."""
    if torch.cuda.mem_get_info()[0] < 12 * 2**30:
        pytest.skip("needs 12 GiB")
    apart = 2**30
    whole = torch.empty(2 * apart + 16, dtype=torch.bfloat16, device=GPU)
    q = whole.as_strided((1, 3, 1, 16), (1, apart, 16, 1))
    q.copy_(randn(1, 3, 1, 16))
    near, angle = q.contiguous(), randn(1, 1, 16)
    for one, other in zip(rotary(q, q, angle, angle), rotary(near, near, angle, angle)):
        assert torch.equal(one, other)
