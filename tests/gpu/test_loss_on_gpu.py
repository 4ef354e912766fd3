"""The loss at real sizes on a GPU: the kernel against the reference, the chunked head against
whole logits, memory, and that nothing waits.
"""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hf_zero
from hf_zero.ops import dispatch
from hf_zero.ops import model_reference as reference
from hf_zero.ops.chunked_head import CROSS_ENTROPY, Terms
from hf_zero.ops.masked_rows import RowCapacity, RowCount, select_rows
from tests.helpers.linear_heads import (
    chunked_log_probabilities,
    chunked_loss,
    plain_log_probabilities,
    plain_loss,
)

DEVICE = torch.device("cuda")
ROUNDING = {torch.float32: 2e-5, torch.bfloat16: 2**-8}
ALL = Terms(label_smoothing=0.1, softcap=30.0, scale=0.5)


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
        (wide, plain_loss(*wide, labels)),
        (given, chunked_loss(*given, labels, chunk=chunk)),
        (given, plain_loss(*given, labels)),
    ):
        results.append([loss.detach(), *torch.autograd.grad(loss, each)])
    for true, ours, torchs in zip(*results):
        error, bound = (
            float((each.double() - true.double()).norm() / true.double().norm())
            for each in (ours, torchs)
        )
        print(f"{dtype} {vocabulary} chunk {chunk}: error {error:.3e}, torch's {bound:.3e}")
        assert error <= 1.1 * bound + 1e-6


def test_log_probabilities() -> None:
    given, labels = operands(2048, 1024, 50_257, torch.float32)
    found = chunked_log_probabilities(*given, labels)
    exact = plain_log_probabilities(given[0] @ given[1].t(), labels)
    torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-4)
    above = torch.randn_like(found)
    gradients = (torch.autograd.grad(each, given, above) for each in (found, exact))
    for one, other in zip(*gradients):
        assert float((one - other).norm() / other.norm()) < 1e-4


@pytest.mark.parametrize("read", ["log_softmax", "logsumexp"])
def test_log_probabilities_of_a_model_are_computed_in_chunks(read: str) -> None:
    """As trainers of preferences and policies read them."""
    torch.manual_seed(0)
    shape = {"vocab_size": 128_256, "hidden_size": 256, "intermediate_size": 512}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    plain = LlamaForCausalLM(LlamaConfig(**shape, **heads)).to(DEVICE)
    deferred = hf_zero.optimize(copy.deepcopy(plain), ["loss"])
    ids = torch.randint(0, shape["vocab_size"], (4, 2048), device=DEVICE)  # four chunks
    advantages = torch.randn(4, 2047, device=DEVICE)
    found, peaks = [], []
    for model in (plain, deferred):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        logits, at = model(input_ids=ids).logits[:, :-1], ids[:, 1:, None]
        if read == "log_softmax":
            values = logits.log_softmax(-1).gather(-1, at)[..., 0]
        else:
            values = logits.gather(-1, at)[..., 0] - logits.logsumexp(-1)
        (values * advantages).sum().backward()
        peaks.append(torch.cuda.max_memory_allocated() - before)
        found.append([values.detach(), *(each.grad for each in model.parameters())])
        del logits, values
    assert peaks[1] < 0.5 * peaks[0], peaks
    for ours, theirs in zip(*found):
        scale = float(theirs.abs().max())
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5 * scale)


def test_nothing_but_the_count_of_rows_is_waited_for() -> None:
    given, labels = operands(4096, 512, 50_257, torch.bfloat16)
    capacity = RowCapacity()
    count = torch.tensor(3000, device=DEVICE)

    def step() -> torch.Tensor:
        places = capacity.places(RowCount(labels))
        rows, kept, _ = select_rows(given[0], labels, capacity=places)
        loss = chunked_loss(rows, given[1], kept, num_items=count)
        loss = loss + chunked_loss(*given, labels, chunk=1024)
        loss.backward()
        return loss

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_whole_logits_are_never_there() -> None:
    given, labels = operands(16_384, 1024, 128_256, torch.bfloat16)
    chunked_loss(*given, labels).backward()
    torch.cuda.synchronize()
    for each in given:
        each.grad = None
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loss = chunked_loss(*given, labels)
    loss.backward()
    peak = torch.cuda.max_memory_allocated() - before
    hidden, weight = (each.nbytes for each in given)
    chunk = 4096 * 128_256 * 2

    assert peak < 1.05 * (chunk + 2 * weight + 2 * hidden) and peak < 16_384 * 128_256 * 2


def test_labels_on_the_device_are_counted_before_what_is_queued_behind_them() -> None:
    capacity = RowCapacity()
    busy = torch.randn(8192, 8192, device=DEVICE)
    for rows, places in ((800, 896), (4000, 4096), (0, 128), (8192, 8192)):
        labels = torch.full((8192,), -100, device=DEVICE)
        labels[:rows] = 1
        count = RowCount(labels)
        for _ in range(20):
            busy = (busy @ busy).clamp(-1, 1)
        done = torch.cuda.Event()
        done.record()
        assert capacity.places(count) == places
        assert not done.query()  # the host has not waited for the products
