"""Linear head and cross-entropy in chunks, against whole logits and autograd."""

from __future__ import annotations

import itertools
import os
from typing import Any

import pytest
import torch

from hf_zero.ops import chunked_head
from hf_zero.ops.chunked_head import CROSS_ENTROPY, Terms, rows_of_a_chunk
from hf_zero.ops.model_reference import cross_entropy_
from tests.helpers.linear_heads import (
    chunked_log_probabilities,
    chunked_loss,
    plain_log_probabilities,
    plain_loss,
    whole_logits,
)

ALL = {"label_smoothing": 0.1, "softcap": 2.0, "scale": 0.3, "ignore_index": 5}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "smoothed": {"label_smoothing": 0.1},
    "capped": {"softcap": 2.0},
    "scaled": {"scale": 0.3},
    "summed": {"reduction": "sum"},
    "divided": {"num_items": torch.tensor(11)},
    "all": {**ALL, "num_items": torch.tensor(11)},
}
TOKENS, WIDTH, VOCABULARY, CHUNK = 23, 24, 101, 10


@pytest.fixture(params=["kernel", "host"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "kernel":
        pytest.importorskip("triton")
        request.getfixturevalue("checked_triton")
        if os.environ.get("TRITON_INTERPRET") != "1":
            pytest.skip("kernels of this process run on the GPU, not in the interpreter")
    else:
        monkeypatch.setenv("HF_ZERO_TRITON", "0")
    return request.param


def operands(
    dtype: torch.dtype = torch.float32, ignored: int = -100, tokens: int = TOKENS
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """([hidden, weight, bias], labels), a third of them ignored."""
    made = [
        torch.randn(shape).to(dtype).requires_grad_()
        for shape in ((tokens, WIDTH), (VOCABULARY, WIDTH), (VOCABULARY,))
    ]
    labels = torch.randint(0, VOCABULARY, (tokens,))
    labels[::3] = ignored
    return made, labels


def grads(loss: torch.Tensor, operands: list[torch.Tensor], **more: Any) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss, operands, **more))


def test_loss_and_gradients_are_those_of_whole_logits(form: str) -> None:
    for number, (name, options) in enumerate(OPTIONS.items()):
        given, labels = operands(ignored=options.get("ignore_index", -100))
        bias = None if number % 3 == 1 else given[2]
        given = given[: 2 if bias is None else 3]
        told = {"bias": bias, **options}
        loss = chunked_loss(*given[:2], labels, chunk=(CHUNK, 16, 1000)[number % 3], **told)
        expected = plain_loss(*given[:2], labels, **told)
        assert loss.dtype == torch.float32 and loss.shape == ()
        torch.testing.assert_close(loss, expected.reshape(()), rtol=1e-6, atol=1e-6, msg=name)
        for found, exact in zip(grads(loss, given), grads(expected, given)):
            limit = 1e-6 * float(exact.abs().max())
            torch.testing.assert_close(found, exact, rtol=1e-5, atol=limit, msg=name)


def test_graphs_that_are_kept_tied_or_partly_wanted(form: str) -> None:
    """A second backward gives the same; a tied weight gets both gradients; what nobody asks for is
    not computed.
    """
    given, labels = operands()
    loss = chunked_loss(*given[:2], labels, bias=given[2], chunk=CHUNK) * 3
    first = [each.clone() for each in grads(loss, given, retain_graph=True)]
    assert all(torch.equal(one, other) for one, other in zip(first, grads(loss, given)))

    (hidden, weight, _), ids = given, torch.randint(0, VOCABULARY, (TOKENS,))

    def loss_by(head: Any, **more: Any) -> torch.Tensor:
        return head(torch.nn.functional.embedding(ids, weight).tanh(), weight, labels, **more)

    found = grads(loss_by(chunked_loss, chunk=CHUNK), [weight])
    exact = grads(loss_by(plain_loss), [weight])
    torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-7)

    weight.requires_grad_(False)
    numbers = (-100, 0.0, 0.0, 1.0, CHUNK, True, False, False)
    total = torch.ops.hf_zero.linear_cross_entropy(hidden, weight, None, labels, *numbers)
    assert [each.numel() for each in total] == [1, hidden.numel(), 0, 0]
    with torch.no_grad():
        loss = chunked_loss(hidden, weight, labels, chunk=CHUNK)
    exact = plain_loss(hidden, weight, labels).detach()
    torch.testing.assert_close(loss, exact, rtol=1e-6, atol=1e-6)


def test_where_no_label_counts_the_loss_is_nan_and_the_gradients_are_zero(form: str) -> None:
    """As torch has it; without tokens a sum is zero."""
    given, labels = operands()
    labels[:] = -100
    loss = chunked_loss(*given[:2], labels, bias=given[2], chunk=CHUNK)
    assert loss.isnan() and all(not each.any() for each in grads(loss, given))
    given, labels = operands(tokens=0)
    loss = chunked_loss(*given[:2], labels, bias=given[2], reduction="sum")
    assert loss == 0 and all(not each.any() for each in grads(loss, given))
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    sizes = ((16_384, 128_256, 2, cuda), (4096, 30_522, 2, cuda), (0, 50_257, 4, cpu))
    assert [rows_of_a_chunk(*each) for each in sizes] == [4096, 4096, 1]
    assert rows_of_a_chunk(2048, 50_257, 4, cpu) <= 512


def test_in_16_bits_the_error_is_no_larger_than_torchs(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for the gradient of a weight in bf16 on a CPU, whose every chunk rounds a product: twice
    torch's variance. And a small gradient does not underflow in fp16.
    """
    tokens, vocabulary = 64, 128
    for dtype, spread in ((torch.bfloat16, 0.02), (torch.float16, 0.3)):
        wide = [torch.randn(tokens, WIDTH), torch.randn(vocabulary, WIDTH) * spread]
        labels = torch.randint(0, vocabulary, (tokens,))
        narrow = [each.to(dtype).requires_grad_() for each in wide]
        exact = [each.detach().double().requires_grad_() for each in narrow]
        truth = plain_loss(*exact, labels)
        torchs = plain_loss(*narrow, labels)
        for chunk, product in ((16, True), (tokens, True), (16, False)):
            monkeypatch.setattr(chunked_head, "has_bf16_products", lambda product=product: product)
            ours = chunked_loss(*narrow, labels, chunk=chunk)
            losses = ((truth, exact), (ours, narrow), (torchs, narrow))
            values = ([loss, *grads(loss, given, retain_graph=True)] for loss, given in losses)
            for number, (true, our, their) in enumerate(zip(*values)):
                error, bound = (float((x - true).norm() / true.norm()) for x in (our, their))
                rounds = dtype == torch.bfloat16 and number == 2 and chunk < tokens and product
                most = 2**0.5 if rounds else 1.1
                assert error <= most * bound + 1e-6, (dtype, chunk, number, error, bound)
    given, labels = operands(torch.float16)
    wide, many = [each.double() for each in given[:2]], torch.tensor(10_000_000)
    loss = chunked_loss(*given[:2], labels, num_items=many)
    expected = plain_loss(*wide, labels, num_items=many)
    scaled, true = (grads(each * 2.0**20, given[:2]) for each in (loss, expected))
    for found, exact in zip(scaled, true):
        assert float((found.double() - exact).norm() / exact.norm()) < 2e-3


def test_log_probabilities_and_their_gradients(form: str) -> None:
    given, labels = operands()
    told: dict[str, Any] = {"softcap": 4.0, "scale": 0.5}
    hidden, weight, bias = given
    found = chunked_log_probabilities(hidden, weight, labels, bias=bias, chunk=CHUNK, **told)
    exact = plain_log_probabilities(whole_logits(hidden, weight, bias, **told), labels)
    torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-6)
    above = torch.randn(TOKENS)
    for one, other in zip(*(grads(each, given, grad_outputs=above) for each in (found, exact))):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("view", ["strided", "expanded"])
def test_labels_that_are_views(form: str, view: str) -> None:
    given, labels = operands()
    views = labels[:, None].expand(-1, 3).contiguous()[:, 1], labels[1:2].expand(TOKENS)
    chosen = views[view == "expanded"]
    told: dict[str, Any] = {"bias": given[2]}
    pairs = (
        (chunked_loss, plain_loss),
        (
            lambda *args, **more: chunked_log_probabilities(*args, chunk=CHUNK, **more).sum(),
            lambda hidden, weight, at, bias: plain_log_probabilities(
                whole_logits(hidden, weight, bias, 0.0, 1.0), at
            ).sum(),
        ),
    )
    for ours, plain in pairs:
        found, exact = (each(*given[:2], chosen, **told) for each in (ours, plain))
        torch.testing.assert_close(found, exact.reshape(()), rtol=1e-5, atol=1e-5)
        for one, other in zip(grads(found, given), grads(exact, given)):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_autocast_around_the_operator_casts_nothing(form: str) -> None:
    """The operands have been cast before, as autocast casts those of a linear layer."""
    given, labels = operands()
    with torch.autocast("cpu", torch.bfloat16):
        loss = chunked_loss(*given[:2], labels, bias=given[2], chunk=CHUNK)
    expected = chunked_loss(*given[:2], labels, bias=given[2], chunk=CHUNK)
    assert torch.equal(loss, expected)
    assert all(torch.equal(*each) for each in zip(grads(loss, given), grads(expected, given)))


PLAIN = Terms()
EVERY = Terms(ignore_index=3, label_smoothing=0.1, softcap=5.0, scale=0.7)
# of a gradient, whose largest is near 1
DTYPES = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}


def rows_of_logits(rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(rows, width) * 3).to(dtype)


def both(
    logits: torch.Tensor, vocabulary: int, labels: torch.Tensor, factors: Any, lse: Any, terms: Any
) -> Any:
    """(kernel's losses, lse and logits), (the reference's, from the same logits in fp64)."""
    exact = logits.double()
    wide = [None if each is None else each.double() for each in (factors, lse)]
    expected = cross_entropy_(exact, vocabulary, labels, *wide, *terms.numbers())
    found = CROSS_ENTROPY(logits, vocabulary, labels, factors, lse, *terms.numbers())
    return (*found, logits), (*expected, exact)


def test_losses_and_gradients_are_the_references(checked_triton: Any) -> None:
    """Types take turns; rows longer than a block are read twice, in either direction."""
    sizes = [(1, 64), (101, 128), (128, 128), (300, 320)]
    for number, (terms, (vocabulary, width)) in enumerate(itertools.product((PLAIN, EVERY), sizes)):
        dtype = [*DTYPES][number % 3]
        logits = rows_of_logits(5, width, dtype)
        logits[:, vocabulary:] = float("nan")  # padding is never looked at
        labels = torch.randint(0, vocabulary, (5,))
        labels[2] = terms.ignore_index
        found, expected = both(logits, vocabulary, labels, torch.full((1,), 0.5), None, terms)
        for each, exact in zip(found[:2], expected[:2]):
            torch.testing.assert_close(each.double(), exact, rtol=1e-5, atol=1e-5)
        grad, exact = (each[2][:, :vocabulary].double() for each in (found, expected))
        limit = DTYPES[dtype]
        torch.testing.assert_close(grad, exact, rtol=limit, atol=limit / 4)
    logits = rows_of_logits(2, 33_024, torch.float32)
    logits[0, 32_999], logits[1, 0] = 40.0, 40.0  # the largest comes last, and first
    found, expected = both(
        logits, 33_000, torch.tensor([32_999, 16_384]), torch.ones(1), None, PLAIN
    )
    for each, exact in zip(found[:2], expected[:2]):
        torch.testing.assert_close(each.double(), exact, rtol=1e-5, atol=1e-5)
    grad, exact = (each[2][:, :33_000].double() for each in (found, expected))
    torch.testing.assert_close(grad, exact, rtol=1e-5, atol=1e-6)


def test_labels_outside_and_logits_far_out(checked_triton: Any) -> None:
    """Only an outside label's loss is NaN; huge logits give finite ones; no rows launch nothing."""
    logits, labels = rows_of_logits(3, 64, torch.float32), torch.tensor([50, 1, -7])
    loss, _ = CROSS_ENTROPY(logits, 50, labels, torch.ones(1), None, *PLAIN.numbers())
    assert loss.isnan().tolist() == [True, False, True] and not logits[:, :50].isnan().any()
    logits = torch.full((2, 64), -3e4)
    logits[0, 7], logits[1, :10], logits[1, 11] = 3e4, float("-inf"), -3e4 - 1
    found, expected = both(logits, 60, torch.tensor([7, 20]), torch.ones(1), None, PLAIN)
    torch.testing.assert_close(found[0].double(), expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[2][:, :60].double(), expected[2][:, :60], rtol=1e-5, atol=1e-6)
    assert expected[2][1, 11] > 0
    none, labels = torch.empty(0, 64), torch.empty(0, dtype=torch.int64)
    loss, lse = CROSS_ENTROPY(none, 50, labels, torch.ones(1), None, *PLAIN.numbers())
    assert loss.shape == lse.shape == (0,)
