"""The kernel over rows of logits in the checked interpreter, against the reference in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from hf_zero.ops.chunked_head import CROSS_ENTROPY, Terms
from hf_zero.ops.model_reference import cross_entropy_

pytestmark = pytest.mark.usefixtures("checked_triton")

PLAIN = Terms()
ALL = Terms(ignore_index=3, label_smoothing=0.1, z_loss=1e-2, softcap=5.0, scale=0.7)
# of a gradient, whose largest is near 1
DTYPES = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}


def rows_of_logits(rows: int, width: int, dtype: torch.dtype, spread: float = 3.0) -> torch.Tensor:
    return (torch.randn(rows, width) * spread).to(dtype)


def both(
    logits: torch.Tensor,
    vocabulary: int,
    labels: torch.Tensor,
    factors: Any,
    lse: Any,
    terms: Terms,
) -> Any:
    """(kernel's losses, lse and logits), (the reference's, from the same logits in fp64)."""
    exact = logits.double()
    wide = None if factors is None else factors.double()
    expected = cross_entropy_(
        exact, vocabulary, labels, wide, None if lse is None else lse.double(), *terms.numbers()
    )
    found = CROSS_ENTROPY(logits, vocabulary, labels, factors, lse, *terms.numbers())
    return (*found, logits), (*expected, exact)


@pytest.mark.turns
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("terms", [PLAIN, ALL], ids=["plain", "all"])
@pytest.mark.parametrize(("vocabulary", "width"), [(1, 64), (101, 128), (128, 128), (300, 320)])
def test_losses_and_gradients_are_the_references(
    dtype: torch.dtype, terms: Terms, vocabulary: int, width: int
) -> None:
    logits = rows_of_logits(5, width, dtype)
    logits[:, vocabulary:] = float("nan")  # padding is never looked at
    labels = torch.randint(0, vocabulary, (5,))
    labels[2] = terms.ignore_index
    factors = torch.full((1,), 0.5)
    (loss, lse, grad), (exact_loss, exact_lse, exact_grad) = both(
        logits, vocabulary, labels, factors, None, terms
    )
    torch.testing.assert_close(loss.double(), exact_loss, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        grad[:, :vocabulary].double(),
        exact_grad[:, :vocabulary],
        rtol=DTYPES[dtype],
        atol=DTYPES[dtype] / 4,
    )


def test_rows_longer_than_a_block_are_read_twice_in_either_direction() -> None:
    logits = rows_of_logits(2, 33_024, torch.float32)
    logits[0, 32_999], logits[1, 0] = 40.0, 40.0  # the largest comes last, and first
    labels = torch.tensor([32_999, 16_384])
    found, expected = both(logits, 33_000, labels, torch.ones(1), None, PLAIN)
    for each, exact in zip(found[:2], expected[:2]):
        torch.testing.assert_close(each.double(), exact, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        found[2][:, :33_000].double(), expected[2][:, :33_000], rtol=1e-5, atol=1e-6
    )


def test_without_factors_the_logits_stay() -> None:
    logits = rows_of_logits(3, 64, torch.bfloat16)
    before = logits.clone()
    both(logits, 50, torch.tensor([1, -100, 49]), None, None, PLAIN)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("terms", [PLAIN, Terms(softcap=5.0, scale=0.7)], ids=["plain", "capped"])
def test_a_known_logsumexp_and_a_factor_for_each_row(terms: Terms) -> None:
    logits = rows_of_logits(4, 128, torch.float32)
    labels = torch.tensor([5, -100, 100, 0])
    _, lse = cross_entropy_(logits.clone(), 101, labels, None, None, *terms.numbers())
    (_, _, grad), (_, _, exact) = both(logits, 101, labels, torch.randn(4), lse, terms)
    torch.testing.assert_close(grad[:, :101].double(), exact[:, :101], rtol=1e-5, atol=1e-6)


def test_a_label_outside_the_vocabulary_makes_its_loss_nan_and_no_other() -> None:
    logits = rows_of_logits(3, 64, torch.float32)
    loss, _ = CROSS_ENTROPY(
        logits, 50, torch.tensor([50, 1, -7]), torch.ones(1), None, *PLAIN.numbers()
    )
    assert loss.isnan().tolist() == [True, False, True] and not logits[:, :50].isnan().any()


def test_huge_and_infinite_logits_give_finite_losses() -> None:
    logits = torch.full((2, 64), -3e4)
    logits[0, 7], logits[1, :10], logits[1, 11] = 3e4, float("-inf"), -3e4 - 1
    found, expected = both(logits, 60, torch.tensor([7, 20]), torch.ones(1), None, PLAIN)
    torch.testing.assert_close(found[0].double(), expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[2][:, :60].double(), expected[2][:, :60], rtol=1e-5, atol=1e-6)
    assert expected[2][1, 11] > 0


def test_no_rows_launch_nothing() -> None:
    loss, lse = CROSS_ENTROPY(
        torch.empty(0, 64),
        50,
        torch.empty(0, dtype=torch.int64),
        torch.ones(1),
        None,
        *PLAIN.numbers(),
    )
    assert loss.shape == lse.shape == (0,)
