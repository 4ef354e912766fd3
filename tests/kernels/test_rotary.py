"""Rotary embedding: the kernel against its reference, and both against what transformers
computes.
"""

from __future__ import annotations

import importlib

import pytest
import torch

from hf_zero.errors import KernelError
from hf_zero.ops.rotary import ROTARY, rotary, split_rotary
from tests.helpers.errors_beside_torch import assert_no_worse_than_torch, gradients

pytestmark = pytest.mark.usefixtures("checked_triton")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def plain(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The formula of transformers, for a rotary width that may be smaller; the results side by
    side.
    """
    rotated = cos.shape[-1]
    results = []
    for x in (q, k):
        turned, rest = x[..., :rotated], x[..., rotated:]
        first, second = turned.chunk(2, dim=-1)
        turned = turned * cos.unsqueeze(1) + torch.cat((-second, first), dim=-1) * sin.unsqueeze(1)
        results.append(torch.cat((turned, rest), dim=-1))
    return torch.cat(results, dim=1)


def both(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return torch.cat(rotary(q, k, cos, sin), dim=1)


def heads(
    batch: int, heads: int, sequence: int, width: int, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """[batch, heads, sequence, width] as a view of a projection's output."""
    return torch.randn(batch, sequence, heads, width).to(dtype).transpose(1, 2)


# heads, key heads, width, rotary width; the angles' halves are not equal, which no model has and no
# kernel may rely on
SHAPES = [(4, 4, 16, 16), (6, 2, 12, 12), (3, 1, 10, 4), (2, 2, 16, 6)]


@pytest.mark.turns
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("angles", [1, 2])
@pytest.mark.parametrize(("queries", "keys", "width", "rotated"), SHAPES)
def test_is_the_formula(body, queries, keys, width, rotated, angles, dtype):
    cos, sin = torch.randn(angles, 3, rotated).to(dtype), torch.randn(angles, 3, rotated).to(dtype)

    def widened(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return plain(q, k, cos.to(q.dtype), sin.to(q.dtype))

    inputs = [heads(2, queries, 3, width, dtype), heads(2, keys, 3, width, dtype)]
    assert_no_worse_than_torch(lambda q, k: both(q, k, cos, sin), widened, inputs)


@pytest.mark.turns
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3", "gemma", "mixtral", "phi"])
def test_is_what_transformers_computes(body, name):
    theirs = importlib.import_module(
        f"transformers.models.{name}.modeling_{name}"
    ).apply_rotary_pos_emb
    angle = torch.randn(2, 5, 8).repeat(1, 1, 2)
    cos, sin = angle.cos(), angle.sin()
    inputs = [heads(2, 4, 5, 16), heads(2, 2, 5, 16)]
    ours = gradients(lambda q, k: both(q, k, cos, sin), inputs)
    want = gradients(lambda q, k: torch.cat(theirs(q, k, cos, sin), dim=1), inputs)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(ours, want))


def test_any_strides(body):
    """Contiguous heads, every second token, a width that is not contiguous; one row of angles
    for a batch, expanded or strided.
    """
    cos, sin = torch.randn(1, 4, 32)[..., ::2], torch.randn(1, 4, 16).expand(2, 4, 16)
    for q, k in (
        (torch.randn(2, 4, 4, 16), torch.randn(2, 2, 4, 16)),
        (torch.randn(2, 4, 8, 16)[:, :, ::2], torch.randn(2, 4, 4, 24)[:, 1:3, :, 5:21]),
        (torch.randn(2, 4, 16, 4).transpose(2, 3), torch.randn(1, 1, 4, 16).expand(2, 3, 4, 16)),
    ):
        want = plain(q, k, cos.expand(2, 4, 16), sin)
        assert torch.allclose(both(q, k, cos.expand(2, 4, 16), sin), want, atol=1e-6)
        q_out, k_out = rotary(q, k, cos.expand(2, 4, 16), sin)
        assert q_out.transpose(1, 2).is_contiguous() and k_out.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_packed_projection_is_split_and_rotated(body, dtype):
    qkv, cos, sin = (
        torch.randn(2, 3, 10 * 12).to(dtype),
        torch.randn(1, 3, 8).to(dtype),
        torch.randn(1, 3, 8).to(dtype),
    )

    def whole(qkv: torch.Tensor) -> torch.Tensor:
        return torch.cat(split_rotary(qkv, cos, sin, 6, 2), dim=1)

    def by_hand(qkv: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.unflatten(2, (-1, 12)).transpose(1, 2) for part in qkv.split([72, 24, 24], dim=2)
        )
        return torch.cat((plain(q, k, cos.to(q.dtype), sin.to(q.dtype)), v), dim=1)

    assert_no_worse_than_torch(whole, by_hand, [qkv])


def test_the_projection_is_not_kept(body):
    kept: list[torch.Tensor] = []
    qkv, cos, sin = (
        torch.randn(1, 3, 64, requires_grad=True),
        torch.randn(1, 3, 16),
        torch.randn(1, 3, 16),
    )
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        outs = split_rotary(qkv, cos, sin, 2, 1)
    assert {t.data_ptr() for t in kept} == {cos.data_ptr(), sin.data_ptr()}
    assert len({t.untyped_storage().data_ptr() for t in (qkv, *outs)}) == 4


def test_an_unused_result_gets_a_gradient_of_zero(body):
    q, k = heads(1, 2, 3, 8).requires_grad_(), heads(1, 1, 3, 8).requires_grad_()
    rotary(q, k, torch.randn(1, 3, 8), torch.randn(1, 3, 8))[0].sum().backward()
    assert q.grad.abs().sum() > 0 and torch.equal(k.grad, torch.zeros_like(k))


@pytest.mark.parametrize(("batch", "sequence"), [(0, 3), (2, 0)])
def test_empty_inputs(body, batch, sequence):
    q, angle = heads(batch, 2, sequence, 8).requires_grad_(), torch.randn(1, sequence, 8)
    both(q, q, angle, angle).sum().backward()
    assert q.grad.shape == q.shape
    assert [
        t.shape for t in split_rotary(torch.randn(batch, sequence, 32), angle, angle, 2, 1)
    ] == [
        (batch, 2, sequence, 8),
        (batch, 1, sequence, 8),
        (batch, 1, sequence, 8),
    ]


def test_ops_are_registered_as_torch_wants_them(body):
    q, k, angle = heads(1, 2, 3, 8), heads(1, 1, 3, 8), torch.randn(1, 3, 8)
    qkv = torch.randn(1, 3, 32, requires_grad=True)
    for op, arguments in (
        (
            torch.ops.hf_zero.rotary,
            (q.clone().requires_grad_(), k.clone().requires_grad_(), angle, angle),
        ),
        (torch.ops.hf_zero.rotary_backward, (q, k, angle, angle)),
        (torch.ops.hf_zero.split_rotary, (qkv, angle, angle, 2, 1)),
        (torch.ops.hf_zero.split_rotary_backward, (q, k, k.clone(), angle, angle)),
    ):
        torch.library.opcheck(op.default, arguments)


def test_compiles_whole():
    qkv, angle = torch.randn(1, 3, 32), torch.randn(1, 3, 8)

    def block(qkv: torch.Tensor) -> torch.Tensor:
        q, k, v = split_rotary(qkv, angle, angle, 2, 1)
        return torch.cat((both(q, k, angle, angle), v), dim=1)

    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    assert all(
        torch.equal(a, b) for a, b in zip(gradients(compiled, [qkv]), gradients(block, [qkv]))
    )


def test_bad_input_is_named():
    q, k, angle = heads(1, 2, 3, 8), heads(1, 1, 3, 8), torch.randn(1, 3, 8)
    for call, said in (
        (lambda: rotary(q.int(), k, angle, angle), "rotary: q is torch.int32"),
        (lambda: rotary(q, k.half(), angle, angle), "q is torch.float32 and k torch.float16"),
        (lambda: rotary(q, k.to("meta"), angle, angle), "k is on meta and q on cpu"),
        (lambda: rotary(q[0], k, angle, angle), r"q has shape \[2, 3, 8\]"),
        (lambda: rotary(q, k[:, :, :2], angle, angle), r"k \[1, 1, 2, 8\]"),
        (
            lambda: rotary(q, k, angle[:, :2], angle),
            r"cos has shape \[1, 2, 8\] and sin \[1, 3, 8\]",
        ),
        (lambda: rotary(q, k, angle.expand(2, 3, 8), angle.expand(2, 3, 8)), "give both as"),
        (
            lambda: rotary(q, k, angle[..., :3], angle[..., :3]),
            "the rotary width is 3; give an even one, at most 8",
        ),
        (
            lambda: rotary(q, k, angle.clone().requires_grad_(), angle),
            "cos or sin asks for a gradient",
        ),
        (
            lambda: split_rotary(torch.randn(1, 3, 30), angle, angle, 2, 1),
            r"qkv has shape \[1, 3, 30\] for 2 \+ 2 \* 1 heads",
        ),
    ):
        with pytest.raises(KernelError, match=said):
            call()


def test_the_example_runs(body):
    ROTARY(*ROTARY.example(torch.device("cpu")))


def test_heads_further_apart_than_31_bits_are_brought_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from hf_zero.ops.triton_kernels import rotary as kernels

    given: list[torch.Tensor] = []

    class Launched:
        def __getitem__(self, grid: tuple[int, ...]) -> object:
            return lambda *args, **kwargs: given.extend(args[:3])

    monkeypatch.setattr(kernels, "_rotary", Launched())
    far = torch.empty_strided((1, 3, 1, 16), (1, 2**30, 16, 1), dtype=torch.bfloat16, device="meta")
    near = torch.empty(1, 1, 2, 16, device="meta").transpose(1, 2)
    angle = torch.empty(1, 1, 16, device="meta")
    kernels.rotary(far, near, far, angle, angle, False, far, near, far)
    assert [x.stride(1) for x in given] == [16, 16, 16] and given[1] is near
