"""What scripts and libraries do with logits, on deferred ones beside the untouched model: value,
exception, set of gradients and each gradient are equal.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from hf_zero.errors import KernelError
from hf_zero.integrations.fused.deferred_heads import defer_head
from hf_zero.ops.deferred import DeferredOutput, heads, tensor
from tests.helpers.cells import in_one_item, runs_long
from tests.integrations.fused import uses_of_logits
from tests.integrations.fused.languages import compare, gradients
from tests.integrations.fused.uses_of_logits import (
    COMPILED,
    IDS,
    NEXT,
    TEACHER,
    USES,
    VECTOR,
    WORDS,
    ce,
    logits,
    shifted,
)

RAISES = (  # from the plain model, too
    "loss: one label too few",
    "rows: a view that torch refuses",
    *(name for name in USES if name.startswith("refused: ")),
)
IN_16_BITS = ("autocast", "autocast_before_a_function", "half_precision")


def build(tied: bool = False) -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=WORDS, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
            tie_word_embeddings=tied, initializer_range=0.1,
        )
    ).train()  # fmt: skip


def deferred(tied: bool = False) -> Any:
    model = build(tied)
    assert not isinstance(defer_head(model), str)
    return model


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor, "rows_of_a_chunk", lambda *_: 5)
    monkeypatch.setattr(heads.chunked_head, "rows_of_a_chunk", lambda *_: 5)


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def outcome(model: Any, use: uses_of_logits.Use) -> tuple[Any, dict[str, torch.Tensor]]:
    torch.manual_seed(5)
    try:
        made = use(model)
        if isinstance(made, torch.Tensor) and made.requires_grad:
            made.backward()
    except Exception as error:
        if use not in [USES[name] for name in RAISES]:
            raise
        return f"{type(error).__name__}: {error}", {}
    return float(made.detach()) if isinstance(made, torch.Tensor) else made, gradients(model)


def check(use: uses_of_logits.Use) -> None:
    (expected, grads), (found, ours) = outcome(build(), use), outcome(deferred(), use)
    if isinstance(expected, float):
        torch.testing.assert_close(found, expected, rtol=2e-5, atol=1e-6, equal_nan=True)
    else:
        assert found == expected
    assert ours.keys() == grads.keys()
    if grads:
        rounded = use in [USES[name] for name in IN_16_BITS]
        compare(ours, grads, 0.05 if rounded else 1e-4)


@in_one_item(USES)
def test_a_use_does_what_it_does_to_plain_logits(name: str) -> None:
    check(USES[name])


@in_one_item(COMPILED)
def test_compiled_code(name: str) -> None:
    torch._dynamo.reset()
    check(COMPILED[name])


@pytest.mark.parametrize(
    "loss",
    [
        ce,
        lambda made: made.log_softmax(-1).gather(-1, IDS[..., None]).mean(),
        lambda made: ce(made, weight=VECTOR, label_smoothing=0.1),
        lambda made: uses_of_logits.Identity.apply(made).square().mean(),
    ],
    ids=["summed", "log-probabilities", "chunks", "whole"],
)
def test_second_derivatives_of_a_tied_head(loss: Any) -> None:
    """The weight has two paths to the loss, as head and through the hidden states."""

    def penalized(model: Any) -> torch.Tensor:
        model.set_attn_implementation("eager")  # the others have no second derivative
        value = loss(logits(model))
        grads = torch.autograd.grad(value, list(model.parameters()), create_graph=True)
        return value + torch.stack([grad.square().sum() for grad in grads]).sum()  # type: ignore[no-any-return]

    (expected, grads), (found, ours) = (
        outcome(model, penalized) for model in (build(tied=True), deferred(tied=True))
    )
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=1e-6)
    compare(ours, grads, 1e-4)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_weighted_losses_in_fp16_are_summed_in_fp32(
    smoothing: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The losses of 22,000 tokens add up to more than the largest number of fp16."""
    for module in (tensor, heads.chunked_head):
        monkeypatch.setattr(module, "rows_of_a_chunk", lambda *_: 4096)
    many = torch.arange(NEXT.numel() * 1000) % NEXT.numel()
    rows, weight = shifted(logits(deferred().half()).detach())[many], torch.ones(WORDS)
    expected = ce(logits(build().half()).detach().float(), label_smoothing=smoothing)
    found = F.cross_entropy(rows, NEXT[many], weight.half(), label_smoothing=smoothing)
    assert found.dtype == torch.float16
    torch.testing.assert_close(found.float(), expected, rtol=2e-3, atol=0)


LEFT_WHOLE = {"loss: classes in the middle", "loss: distillation", "loss: one label too few"}


@in_one_item([name for name in USES if name.startswith("loss: ") and name not in LEFT_WHOLE])
def test_losses_compute_no_whole_logits(name: str) -> None:
    seen: list[torch.Size] = []
    plain = DeferredOutput.materialize
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            DeferredOutput, "materialize", lambda one: seen.append(one.shape) or plain(one)
        )
        USES[name](deferred()).backward()
    assert not seen


IN_THE_INTERPRETER = ("by gather, capped", "by logsumexp, kept", "of a masked word", "by weights")


@pytest.mark.parametrize("form", ["host", "kernel"])
def test_log_probabilities_by_the_operator(
    form: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """By torch's kernels on a CPU, and by Triton's in the interpreter: no chunk of rows is computed
    by autograd, but those in double.
    """
    calls: list[str] = []
    monkeypatch.setattr(heads, "_LogProbabilities", noted(calls, heads._LogProbabilities))
    if form == "kernel":
        monkeypatch.setenv("HF_ZERO_TRITON", "1")
        request.getfixturevalue("checked_triton")
    names = [name for name in USES if name.startswith("log-probabilities: ")]
    whole = form == "host" or runs_long(request.config)
    for name in names if whole else (f"log-probabilities: {each}" for each in IN_THE_INTERPRETER):
        before = len(calls)
        check(USES[name])
        assert (len(calls) > before) == ("double" not in name), name


def noted(calls: list[str], function: Any) -> Any:
    """Return a stand-in for the class of an autograd function, whose calls are added to
    ``calls``.
    """

    class Noted:
        @staticmethod
        def apply(*args: Any) -> Any:
            calls.append(function.__name__)
            return function.apply(*args)

    return Noted


@pytest.mark.parametrize(
    "reader",
    [
        lambda made, loss: made.register_hook(lambda grad: grad * 3),
        lambda made, loss: made.retain_grad(),
        lambda made, loss: loss.backward(inputs=[made]),
    ],
)
@pytest.mark.parametrize("of", [lambda made: made, lambda made: made[:, :-1]])
def test_what_a_loss_in_chunks_would_not_call_is_refused(reader: Any, of: Any) -> None:
    made = of(logits(deferred()))
    loss = F.cross_entropy(made[:, :11].reshape(-1, WORDS) * 2, NEXT)
    with pytest.raises(KernelError, match=r"after cross_entropy .* call .*register_hook .* before"):
        reader(made, loss)


def a_step(model: Any) -> None:
    made = logits(model)
    ce(made).backward()
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    made.argmax(-1)


def of_another_module(model: Any) -> None:
    hidden = torch.randn(2, 3, 32)
    made = model.lm_head(hidden)
    hidden.zero_()
    made.sum()


def of_hidden_states(read: Callable[[Any], Any]) -> Callable[[Any], None]:
    def changed(model: Any) -> None:
        with torch.no_grad():
            outputs = model(input_ids=IDS, output_hidden_states=True)
            outputs.hidden_states[-1].mul_(0.5)
            read(outputs.logits).sum()

    return changed


def of_an_operand(read: Callable[[Any], Any]) -> Callable[[Any], None]:
    """Whole rows of an operand are not copied, and a loss of their later values is wrong."""

    def changed(model: Any) -> None:
        teacher = TEACHER.clone()
        made = logits(model) + teacher
        teacher.zero_()
        read(made)

    return changed


def of_an_operand_before_a_backward(model: Any) -> None:
    teacher = TEACHER.clone()
    total = uses_of_logits.Identity.apply(logits(model) * teacher).sum()
    teacher.zero_()
    total.backward()


def of_an_argument_before_a_gradient(model: Any) -> None:
    made, weight = logits(model), torch.ones(WORDS)
    loss = ce(made, weight=weight)
    weight.zero_()
    torch.autograd.grad(loss, made)


def elsewhere(model: Any) -> None:
    with torch.no_grad():
        made = logits(model)
        double, alias = made * 2, made.detach().view(-1)
        alias.numpy()[:] = 0
        alias.zero_()
        double.topk(2)


def below_torch_functions(model: Any) -> None:
    made = logits(model)
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        made.mul_(2)


HIDDEN, OPERAND = (
    r"the hidden states \(2, 12, 32\) .* were changed",
    r"the operand \(2, 12, 64\) of",
)
CHANGED: list[tuple[str, Callable[[Any], Any]]] = [
    ("the weight of Linear has changed since the forward", a_step),
    (r"the hidden states \(2, 3, 32\) .* were changed", of_another_module),
    (HIDDEN, of_hidden_states(ce)),
    (HIDDEN, of_hidden_states(lambda made: made[:, :-1].logsumexp(-1))),
    (HIDDEN, of_hidden_states(lambda made: made * 2)),
    (OPERAND + " add .* give it a copy", of_an_operand(torch.Tensor.sum)),
    (OPERAND + " add .* give it a copy", of_an_operand(lambda made: made[:, 1:])),
    (OPERAND + " mul", of_an_operand_before_a_backward),
    ("an argument of cross_entropy .* was changed in place", of_an_argument_before_a_gradient),
    ("were changed in place after a copy of them", elsewhere),
    ("which has no memory", below_torch_functions),
]


@in_one_item(CHANGED)
def test_values_that_were_changed_are_refused(row: tuple[str, Callable[[Any], Any]]) -> None:
    said, change = row
    with pytest.raises(KernelError, match=said):
        change(deferred())


def test_logits_end_with_their_last_reference() -> None:
    """Without the collector of cycles: a graph that stays would hold a forward of an engine."""
    model = deferred()
    gc.collect(), gc.disable()
    try:
        made = logits(model)
        loss = ce(made / 0.7) + (made * 2).logsumexp(-1).mean()
        gone = weakref.ref(made)
        del made
        assert gone() is None
        loss.backward()
    finally:
        gc.enable()
