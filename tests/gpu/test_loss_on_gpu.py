"""The loss at real sizes on a GPU."""

from __future__ import annotations

import pytest
import torch

from hf_zero.ops import dispatch
from hf_zero.ops import model_reference as reference
from hf_zero.ops.chunked_head import CROSS_ENTROPY, Terms
from hf_zero.ops.linear_cross_entropy import linear_cross_entropy

DEVICE = torch.device("cuda")
ROUNDING = {torch.float32: 2e-5, torch.bfloat16: 2**-8}
ALL = Terms(label_smoothing=0.1, z_loss=1e-4, softcap=30.0, scale=0.5)


@pytest.fixture(autouse=True)
def exact_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("terms", [Terms(), ALL], ids=["plain", "all"])
@pytest.mark.parametrize("vocabulary", [30_522, 50_257, 128_256])
def test_the_kernel_is_the_reference(dtype: torch.dtype, terms: Terms, vocabulary: int) -> None:
    width = -(-vocabulary // 64) * 64
    logits = (torch.randn(300, width, device=DEVICE) * 4).to(dtype)
    logits[:, vocabulary:] = float("nan")
    labels = torch.randint(0, vocabulary, (300,), device=DEVICE)
    labels[::7] = -100
    one = torch.ones(1, device=DEVICE)
    exact = logits.double()
    expected = reference.cross_entropy_(
        exact, vocabulary, labels, one.double(), None, *terms.numbers()
    )
    found = CROSS_ENTROPY(logits, vocabulary, labels, one, None, *terms.numbers())
    assert "cross_entropy" not in dispatch.broken()
    for each, true in zip(found, expected):
        torch.testing.assert_close(each.double(), true, rtol=1e-5, atol=1e-4)
    error = (logits[:, :vocabulary].double() - exact[:, :vocabulary]).abs().amax(1)
    assert bool((error <= ROUNDING[dtype] * exact[:, :vocabulary].abs().amax(1) + 1e-7).all())


@pytest.mark.parametrize("tokens", [4096, 5000])
def test_rows_whose_offsets_pass_31_bits(tokens: int) -> None:
    vocabulary = 524_288  # 5,000 rows are 2.6e9 elements
    logits = torch.zeros(tokens, vocabulary, device=DEVICE, dtype=torch.bfloat16)
    logits[-1, -1] = 8.0
    labels = torch.full((tokens,), vocabulary - 1, device=DEVICE)
    losses, lse = CROSS_ENTROPY(
        logits, vocabulary, labels, torch.ones(1, device=DEVICE), None, *Terms().numbers()
    )
    expected = torch.logsumexp(torch.tensor([0.0] * (vocabulary - 1) + [8.0]), 0)
    assert abs(float(lse[-1] - expected)) < 1e-4 and abs(float(losses[-1] - (expected - 8))) < 1e-4
    assert abs(float(logits[-1, -1]) - (float(torch.exp(8 - expected)) - 1)) < 4e-3
    assert float(logits[0, -1]) == -1.0


def operands(
    tokens: int, width: int, vocabulary: int, dtype: torch.dtype
) -> tuple[list[torch.Tensor], torch.Tensor]:
    hidden = torch.randn(tokens, width, device=DEVICE).to(dtype).requires_grad_()
    weight = (torch.randn(vocabulary, width, device=DEVICE) / width**0.5).to(dtype).requires_grad_()
    labels = torch.randint(0, vocabulary, (tokens,), device=DEVICE)
    labels[::5] = -100
    return [hidden, weight], labels


@pytest.mark.parametrize("chunk", [None, 1024])
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("vocabulary", [30_522, 50_257])
def test_the_chunked_head_errs_no_more_than_torch(dtype, vocabulary, chunk):
    given, labels = operands(4096, 1024, vocabulary, dtype)
    exact = torch.float64 if dtype == torch.float32 else torch.float32
    wide = [each.detach().to(exact).requires_grad_() for each in given]
    results: list[list[torch.Tensor]] = []
    for each, loss in (
        (wide, reference.linear_cross_entropy(*wide, labels)),
        (given, linear_cross_entropy(*given, labels, chunk=chunk)),
        (given, reference.linear_cross_entropy(*given, labels)),
    ):
        results.append([loss.detach(), *torch.autograd.grad(loss, each)])
    for true, ours, torchs in zip(*results):
        error, bound = (
            float((each.double() - true.double()).norm() / true.double().norm())
            for each in (ours, torchs)
        )
        print(f"{dtype} {vocabulary} chunk {chunk}: error {error:.3e}, torch's {bound:.3e}")
        assert error <= 1.1 * bound + 1e-6


def test_whole_logits_are_never_there() -> None:
    given, labels = operands(16_384, 1024, 128_256, torch.bfloat16)
    linear_cross_entropy(*given, labels).backward()
    torch.cuda.synchronize()
    for each in given:
        each.grad = None
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loss = linear_cross_entropy(*given, labels)
    loss.backward()
    peak = torch.cuda.max_memory_allocated() - before
    hidden, weight = (each.nbytes for each in given)
    chunk = 4096 * 128_256 * 2

    assert peak < 1.05 * (chunk + 2 * weight + 2 * hidden) and peak < 16_384 * 128_256 * 2
