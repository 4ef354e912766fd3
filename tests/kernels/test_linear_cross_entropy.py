"""Linear head and cross-entropy in chunks, against whole logits and autograd: by the kernel and
by the forms for CPUs.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from hf_zero.errors import KernelError
from hf_zero.ops import model_reference as reference
from hf_zero.ops.chunked_head import rows_of_a_chunk
from hf_zero.ops.linear_cross_entropy import linear_cross_entropy, linear_log_probs

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "smoothed": {"label_smoothing": 0.1},
    "z-loss": {"z_loss": 1e-2},
    "capped": {"softcap": 2.0},
    "scaled": {"scale": 0.3},
    "summed": {"reduction": "sum"},
    "divided": {"num_items": 11},
    "divided by a tensor": {"num_items": torch.tensor(11)},
    "all": {
        "label_smoothing": 0.1,
        "z_loss": 1e-2,
        "softcap": 2.0,
        "scale": 0.3,
        "ignore_index": 5,
        "num_items": 11,
    },
}
TOKENS, WIDTH, VOCABULARY, CHUNK = 37, 24, 101, 10


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


@pytest.mark.turns
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("biased", [True, False])
def test_loss_and_gradients_are_those_of_whole_logits(
    form: str, options: dict[str, Any], biased: bool
) -> None:
    given, labels = operands(ignored=options.get("ignore_index", -100))
    given = given if biased else given[:2]
    bias = given[2] if biased else None
    loss = linear_cross_entropy(*given[:2], labels, bias=bias, chunk=CHUNK, **options)
    expected = reference.linear_cross_entropy(*given[:2], labels, bias=bias, **options)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
    for found, exact in zip(grads(loss, given), grads(expected, given)):
        torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-6 * float(exact.abs().max()))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_in_double_precision_the_gradients_are_exact(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ZERO_TRITON", "0")
    given, labels = operands(torch.float64, options.get("ignore_index", -100))
    loss = linear_cross_entropy(*given[:2], labels, bias=given[2], chunk=CHUNK, **options)
    expected = reference.linear_cross_entropy(*given[:2], labels, bias=given[2], **options)
    for found, exact in zip([loss, *grads(loss, given)], [expected, *grads(expected, given)]):
        torch.testing.assert_close(found, exact, rtol=1e-12, atol=1e-14)


@pytest.mark.turns
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("spread", [0.02, 0.3])
def test_in_16_bits_the_error_is_no_larger_than_torchs(
    form: str, dtype: torch.dtype, spread: float, record_property: pytest.RecordProperty
) -> None:
    tokens, vocabulary = 256, 512
    wide = [torch.randn(tokens, WIDTH), torch.randn(vocabulary, WIDTH) * spread]
    labels = torch.randint(0, vocabulary, (tokens,))
    narrow = [each.to(dtype).requires_grad_() for each in wide]
    exact = [each.detach().double().requires_grad_() for each in narrow]
    truth = reference.linear_cross_entropy(*exact, labels)
    ours = linear_cross_entropy(*narrow, labels, chunk=64)
    torchs = reference.linear_cross_entropy(*narrow, labels)
    for true, our, their in zip(
        *(
            [loss, *grads(loss, given)]
            for loss, given in ((truth, exact), (ours, narrow), (torchs, narrow))
        )
    ):
        error, bound = (
            float((each - true).detach().norm() / true.detach().norm()) for each in (our, their)
        )
        record_property("relative error, ours and torch's", (error, bound))
        assert error <= 1.1 * bound + 1e-6


def test_a_small_gradient_does_not_underflow_in_fp16(form: str) -> None:
    given, labels = operands(torch.float16)
    loss = linear_cross_entropy(*given[:2], labels, num_items=10_000_000)
    expected = reference.linear_cross_entropy(
        *(each.double() for each in given[:2]), labels, num_items=10_000_000
    )
    scaled = grads(loss * 2.0**20, given[:2])
    for found, exact in zip(scaled, grads(expected * 2.0**20, given[:2])):
        assert float((found.double() - exact).norm() / exact.norm()) < 2e-3


def test_log_probabilities_and_their_gradients(form: str) -> None:
    given, labels = operands()
    labels = labels[:36].view(4, 9)
    hidden = given[0][:36].view(4, 9, WIDTH)
    found = linear_log_probs(
        hidden, given[1], labels, bias=given[2], softcap=4.0, scale=0.5, chunk=CHUNK
    )
    logits = 4.0 * torch.tanh((hidden @ given[1].t() + given[2]) * 0.5 / 4.0)
    exact = (
        torch.log_softmax(logits, -1)
        .gather(-1, labels.clamp(min=0)[..., None])[..., 0]
        .where(labels != -100, 0.0)
    )
    torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-6)
    above = torch.randn(4, 9)
    for one, other in zip(
        grads(found, given, grad_outputs=above), grads(exact, given, grad_outputs=above)
    ):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_where_no_label_counts_the_loss_is_nan_and_the_gradients_are_zero_as_torch_has_it(
    form: str,
) -> None:
    given, labels = operands()
    labels[:] = -100
    loss = linear_cross_entropy(*given[:2], labels, bias=given[2], chunk=CHUNK)
    assert loss.isnan()
    assert all(not each.any() for each in grads(loss, given))


def test_no_tokens_at_all(form: str) -> None:
    given, labels = operands(tokens=0)
    loss = linear_cross_entropy(*given[:2], labels, bias=given[2], reduction="sum")
    assert loss == 0 and all(not each.any() for each in grads(loss, given))


def test_a_gradient_nobody_asks_for_is_not_computed(form: str) -> None:
    (hidden, weight, _), labels = operands()
    weight.requires_grad_(False)
    total = torch.ops.hf_zero.linear_cross_entropy(
        hidden, weight, None, labels, -100, 0.0, 0.0, 0.0, 1.0, CHUNK, True, False, False
    )  # fmt: skip
    assert [each.numel() for each in total] == [1, hidden.numel(), 0, 0]
    with torch.no_grad():
        loss = linear_cross_entropy(hidden, weight, labels, chunk=CHUNK)
    torch.testing.assert_close(
        loss, reference.linear_cross_entropy(hidden, weight, labels).detach(), rtol=1e-6, atol=1e-6
    )


def test_a_second_backward_over_a_kept_graph_gives_the_same(form: str) -> None:
    given, labels = operands()
    loss = linear_cross_entropy(*given[:2], labels, bias=given[2], chunk=CHUNK) * 3
    first = [each.clone() for each in grads(loss, given, retain_graph=True)]
    for one, other in zip(first, grads(loss, given)):
        assert torch.equal(one, other)


def test_a_tied_weight_gets_both_gradients(form: str) -> None:
    (_, weight, _), labels = operands()
    ids = torch.randint(0, VOCABULARY, (TOKENS,))

    def loss_by(head: Any, **more: Any) -> torch.Tensor:
        return head(torch.nn.functional.embedding(ids, weight).tanh(), weight, labels, **more)

    found = grads(loss_by(linear_cross_entropy, chunk=CHUNK), [weight])
    exact = grads(loss_by(reference.linear_cross_entropy), [weight])
    torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-7)


def test_autocast_casts_as_it_does_for_a_linear_layer(form: str) -> None:
    given, labels = operands()
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(*given[:2], labels, bias=given[2], chunk=CHUNK)
    expected = reference.linear_cross_entropy(
        *(each.bfloat16() for each in given[:2]), labels, bias=given[2].bfloat16()
    )
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    for found, exact in zip(grads(loss, given), grads(expected, given)):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, exact, rtol=2e-2, atol=2e-3 * float(exact.abs().max()))


@pytest.mark.turns
@pytest.mark.parametrize("chunk", [1, 16, 1000])
def test_the_chunk_changes_nothing_but_rounding(form: str, chunk: int) -> None:
    given, labels = operands()
    one, other = (linear_cross_entropy(*given[:2], labels, chunk=size) for size in (chunk, None))
    torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def test_the_operators_pass_opcheck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ZERO_TRITON", "0")
    (hidden, weight, bias), labels = operands(tokens=12)
    torch.library.opcheck(
        torch.ops.hf_zero.linear_cross_entropy.default,
        (hidden, weight, bias, labels, -100, 0.1, 1e-3, 5.0, 0.7, 5, True, True, True),
    )
    torch.library.opcheck(
        torch.ops.hf_zero.linear_log_probs.default,
        (hidden, weight, bias, labels, -100, 5.0, 0.7, 5),
    )
    torch.library.opcheck(
        torch.ops.hf_zero.linear_cross_entropy_backward.default,
        (torch.tensor(0.5), [torch.randn(3, 4), torch.randn(2)], torch.bfloat16),
    )


def test_compiled_without_a_break_it_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ZERO_TRITON", "0")
    given, labels = operands()

    def step(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return (
            linear_cross_entropy(hidden * 2, weight, labels, bias=bias, chunk=CHUNK)
            + linear_log_probs(hidden, weight, labels).mean()
        )

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    one, other = compiled(*given), step(*given)
    torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
    for found, exact in zip(grads(one, given), grads(other, given)):
        torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-6)


def test_chunks_are_even_and_grow_with_what_the_device_takes() -> None:
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert rows_of_a_chunk(16_384, 128_256, 2, cuda) == 4096
    assert rows_of_a_chunk(4096, 30_522, 2, cuda) == 4096
    assert rows_of_a_chunk(2048, 50_257, 4, cpu) <= 512
    assert rows_of_a_chunk(0, 50_257, 4, cpu) == 1
    assert rows_of_a_chunk(10**6, 10**7, 2, cuda) >= 1024


HIDDEN, WEIGHT, LABELS = torch.zeros(4, 8), torch.zeros(16, 8), torch.zeros(4, dtype=torch.int64)
REFUSED: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
    ((HIDDEN, torch.zeros(16, 7), LABELS), {}, r"hidden \(4, 8\) with weight \(16, 7\)"),
    ((HIDDEN, WEIGHT, LABELS[:3]), {}, r"labels \(3,\) for hidden"),
    ((HIDDEN, WEIGHT, LABELS.float()), {}, "labels are torch.float32"),
    ((HIDDEN, WEIGHT, LABELS + 16), {}, "label 16 with a vocabulary of 16"),
    ((HIDDEN, WEIGHT, LABELS - 1), {}, "label -1 with a vocabulary"),
    ((HIDDEN, WEIGHT.bfloat16(), LABELS), {}, "hidden, weight are torch.float32, torch.bfloat16"),
    ((HIDDEN, WEIGHT, LABELS.to("meta")), {}, "labels is on meta and hidden on cpu"),
    ((HIDDEN, WEIGHT, LABELS), {"bias": torch.zeros(8)}, r"bias \(8,\) with weight"),
    ((HIDDEN, WEIGHT, LABELS), {"label_smoothing": 1.5}, "label_smoothing=1.5"),
    ((HIDDEN, WEIGHT, LABELS), {"reduction": "none"}, "reduction='none'"),
    (
        (HIDDEN, WEIGHT, LABELS),
        {"reduction": "sum", "num_items": 3},
        "num_items with reduction='sum'",
    ),
    ((HIDDEN, WEIGHT, LABELS), {"chunk": 0}, "chunk=0"),
]


@pytest.mark.parametrize(("given", "options", "says"), REFUSED, ids=[says for *_, says in REFUSED])
def test_what_does_not_fit_is_named(
    given: tuple[Any, ...], options: dict[str, Any], says: str
) -> None:
    with pytest.raises(KernelError, match=says):
        linear_cross_entropy(*given, **options)
