"""Activations, dropout + residual, rotary embedding and packed layers at the sizes models have,
kernel beside reference and torch.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hf_zero.ops.activations import geglu, gelu, swiglu, swiglu_packed
from hf_zero.ops.packed_linear import adjacent, pack_, packed_linear, packed_linear_whole
from hf_zero.ops.philox import kept_rows
from hf_zero.ops.residual import dropout_add
from hf_zero.ops.rotary import rotary, split_rotary
from tests.helpers.gpu_parity import compare

GPU = torch.device("cuda", 0)
DTYPES = [torch.bfloat16, torch.float32]


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, device=GPU).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("shape", [(4096, 4096), (8, 509, 3072), (1001, 1003)])
def test_gelu(shape, approximate, dtype, monkeypatch):
    x, bias = randn(*shape, dtype=dtype) * 3, randn(shape[-1], dtype=dtype)
    compare(
        lambda x, bias: gelu(x, bias, approximate=approximate),
        lambda x, bias: F.gelu(x + bias, approximate=approximate),
        [x, bias],
        monkeypatch,
    )
    compare(
        lambda x: gelu(x, approximate=approximate),
        lambda x: F.gelu(x, approximate=approximate),
        [x],
        monkeypatch,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(4096, 8192), (4, 509, 5632), (1001, 1003)])
def test_gates(shape, dtype, monkeypatch):
    gate, up = randn(*shape, dtype=dtype) * 3, randn(*shape, dtype=dtype)
    compare(swiglu, lambda gate, up: F.silu(gate) * up, [gate, up], monkeypatch)
    compare(geglu, lambda gate, up: F.gelu(gate, approximate="tanh") * up, [gate, up], monkeypatch)
    compare(
        swiglu_packed,
        lambda both: F.silu(both.chunk(2, -1)[0]) * both.chunk(2, -1)[1],
        [torch.cat((gate, up), -1)],
        monkeypatch,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(16_384, 1024), (8, 509, 768), (1001, 1003)])
def test_dropout_add(shape, dtype, monkeypatch):
    seed = torch.tensor([2026], device=GPU)
    kept = kept_rows(
        seed, shape[0] if len(shape) == 2 else shape[0] * shape[1], shape[-1], 0.1
    ).view(shape)

    def plain(x: torch.Tensor, residual: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return residual + (x + bias) * kept.to(x.dtype) / 0.9

    inputs = [randn(*shape, dtype=dtype), randn(*shape, dtype=dtype), randn(shape[-1], dtype=dtype)]
    compare(
        lambda x, r, b: dropout_add(x, r, b, dropout=0.1, training=True, seed=seed),
        plain,
        inputs,
        monkeypatch,
    )


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    rotated, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    first, second = rotated.chunk(2, dim=-1)
    rotated = rotated * cos.to(x.dtype).unsqueeze(1) + torch.cat((-second, first), -1) * sin.to(
        x.dtype
    ).unsqueeze(1)
    return torch.cat((rotated, rest), dim=-1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "key_heads", "width", "rotated"),
    [(32, 8, 64, 64), (32, 8, 128, 128), (8, 1, 256, 256), (32, 32, 80, 32), (14, 2, 64, 64)],
)
def test_rotary(heads, key_heads, width, rotated, dtype, monkeypatch):
    batch, sequence = 2, 1021
    angle = torch.outer(
        torch.arange(sequence, device=GPU),
        10_000 ** -torch.linspace(0, 1, rotated // 2, device=GPU),
    ).repeat(1, 2)[None]
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

    compare(
        lambda qkv: torch.cat(split_rotary(qkv, cos, sin, heads, key_heads), dim=1),
        plain,
        [qkv],
        monkeypatch,
    )
    compare(by_views, plain, [qkv], monkeypatch)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("packed", [True, False])
def test_packed_layers(packed, dtype):
    weights = [nn.Parameter(randn(n, 2048, dtype=dtype) / 45) for n in (2048, 512, 512)]
    biases = [nn.Parameter(randn(n, dtype=dtype)) for n in (2048, 512, 512)]
    if packed:
        pack_(weights)
        pack_(biases)
    assert adjacent(weights) == packed
    x = randn(4, 1021, 2048, dtype=dtype)
    results = []
    for function in (
        lambda x: packed_linear(x, weights, biases),
        lambda x: [F.linear(x, w, b) for w, b in zip(weights, biases)],
    ):
        leaf = x.clone().requires_grad_()
        outs = function(leaf)
        grads = torch.autograd.grad(
            sum(out.float().square().mean() for out in outs), [leaf, *weights, *biases]
        )
        results.append([*outs, *grads])
    limit = 1e-2 if dtype == torch.bfloat16 else 2e-3  # fp32 products may take TF32
    for number, (ours, theirs) in enumerate(zip(*results)):
        distance = ((ours.double() - theirs.double()).norm() / theirs.double().norm()).item()
        assert distance < limit, f"{number}: {distance:.3g}"


def test_a_compiled_block_is_the_plain_one():
    weights = [nn.Parameter(randn(512, 256, dtype=torch.bfloat16) / 16) for _ in range(2)]
    down = nn.Parameter(randn(256, 512, dtype=torch.bfloat16) / 22)
    pack_(weights)

    def block(x: torch.Tensor) -> torch.Tensor:
        return dropout_add(
            F.linear(swiglu_packed(packed_linear_whole(x, weights)), down), x
        ) + gelu(x)

    compiled = torch.compile(block, fullgraph=True)
    x = randn(64, 256, dtype=torch.bfloat16)
    for a, b in zip(
        *(
            torch.autograd.grad((f(x) ** 2).float().mean(), [*weights, down])
            for f in (compiled, block)
        )
    ):
        assert ((a - b).norm() / b.norm()).item() < 2e-2


def test_beyond_32_bits_of_elements():
    """More elements than int32 counts, in the last of which the result is still right."""
    if torch.cuda.mem_get_info()[0] < 40 * 2**30:
        pytest.skip("needs 40 GiB")
    x = torch.zeros(2**31 + 4096, dtype=torch.bfloat16, device=GPU).view(-1, 4096)
    x[-1] = 2
    assert (gelu(x)[-1] == F.gelu(x[-1])).all()
    assert (swiglu(x, x)[-1].float() - 2 * F.silu(x[-1].float())).abs().max() < 0.02
    y = dropout_add(x, x, dropout=0.5, training=True, seed=torch.tensor([1], device=GPU))
    assert set(y[-1].unique().tolist()) == {2.0, 6.0}


def test_heads_further_apart_than_31_bits():
    """A stride of heads that spans a whole sequence, as in [batch, heads, sequence, width]."""
    if torch.cuda.mem_get_info()[0] < 12 * 2**30:
        pytest.skip("needs 12 GiB")
    apart = 2**30
    q = torch.empty(2 * apart + 16, dtype=torch.bfloat16, device=GPU).as_strided(
        (1, 3, 1, 16), (1, apart, 16, 1)
    )
    q.copy_(randn(1, 3, 1, 16))
    angle = randn(1, 1, 16)
    for one, other in zip(
        rotary(q, q, angle, angle), rotary(q.contiguous(), q.contiguous(), angle, angle)
    ):
        assert torch.equal(one, other)
