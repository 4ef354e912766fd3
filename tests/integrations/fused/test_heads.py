"""Deferred heads against the untouched model: loss and every gradient, in all the ways a model is
called.
"""

from __future__ import annotations

import copy
import inspect
from types import SimpleNamespace
from typing import Any

import numpy as np
import peft
import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

import hf_zero
from hf_zero.integrations.fused.deferred_heads import DeferredCall, defer_head
from hf_zero.integrations.fused.replacement import Replacement
from hf_zero.ops import chunked_head, masked_rows
from hf_zero.ops.deferred import DeferredOutput, losses
from tests.helpers.cells import in_one_item, in_turn
from tests.integrations.fused.languages import (
    LANGUAGES,
    MASKED,
    SEQ2SEQ,
    batch,
    build,
    compare,
    gradients,
    pair,
)


def fuse(model: Any) -> list[Replacement]:
    done = defer_head(model)
    assert not isinstance(done, str), done
    return done


def fused_pair(name: str) -> tuple[Any, Any]:
    """Return the plain model and the fused one."""
    plain, fused = pair(name)
    fuse(fused)
    return plain, fused


def step(model: Any, **inputs: Any) -> Any:
    outputs = model(**inputs)
    outputs.loss.backward()
    return outputs


def is_deferred(outputs: Any) -> bool:
    return isinstance(outputs.logits, DeferredOutput) and outputs.logits.is_live()


def assert_same_step(
    fused: Any, plain: Any, loose: float = 1e-6, called: Any = None, deferred: bool = True
) -> None:
    """``called``: the fused model in a wrapper."""
    expected, found = step(plain, **batch()), step(fused if called is None else called, **batch())
    assert is_deferred(found) == deferred
    torch.testing.assert_close(found.loss, expected.loss, rtol=loose, atol=1e-6)
    compare(gradients(fused), gradients(plain))


@in_one_item(LANGUAGES)
def test_a_family_trains_and_evaluates_as_the_model(name: str) -> None:
    """Logits that are read are the model's, with their gradients."""
    plain, fused = pair(name)
    done = fuse(fused)
    assert inspect.signature(fused.forward) == inspect.signature(plain.forward)
    assert list(fused.state_dict()) == list(plain.state_dict())
    assert all(fused.get_submodule(each.where) is not None for each in done)
    assert_same_step(fused, plain)

    read = []
    for model in (plain, fused):
        model.zero_grad()
        outputs = model(**batch())
        (outputs.loss + outputs.logits.float().square().mean()).backward()
        read.append(outputs.logits.detach() + 0)
    torch.testing.assert_close(*read, rtol=1e-6, atol=1e-6)
    compare(gradients(fused), gradients(plain))

    given = batch()
    for model in (fused, plain):
        model.eval()
    with torch.no_grad():
        found, expected = fused(**given), plain(**given)
        assert is_deferred(found)
        torch.testing.assert_close(found.loss, expected.loss, rtol=1e-6, atol=1e-6)
        assert torch.equal(found.logits, expected.logits)
    for model in (fused, plain):
        model.train()
    if name not in SEQ2SEQ:
        del given["labels"]
        assert torch.equal(fused(**given).logits, plain(**given).logits)

    left = {place: set(each.__dict__) for place, each in plain.named_modules()}
    for _ in range(2):
        for each in done:
            each.undo()
        assert {place: set(each.__dict__) for place, each in fused.named_modules()} == left
    assert type(fused(**batch()).logits) is torch.Tensor


@pytest.mark.parametrize("beside", [(), ("norms", "activations", "qkv")])
@in_turn("name", MASKED)
def test_a_masked_head_runs_for_labeled_tokens_alone(
    name: str, beside: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fused norm or activation before the decoder would compute all tokens."""
    _, fused = pair(name)
    hf_zero.optimize(fused, [*beside, "loss"])
    given, rows = batch(), []
    plain = DeferredCall.run

    def run(call: DeferredCall, hidden: torch.Tensor, body: Any) -> Any:
        rows.append(hidden.shape[0])
        return plain(call, hidden, body)

    monkeypatch.setattr(DeferredCall, "run", run)
    step(fused, **given)
    assert len(rows) >= 3 and set(rows) == {int((given["labels"] != -100).sum())}


class Counted:
    """The count of labels on a device, read at once."""

    def __init__(self, labels: torch.Tensor, ignored: int = -100) -> None:
        self.tokens, self.number = labels.numel(), int((labels != ignored).sum())

    def read(self) -> int:
        return self.number


@pytest.mark.parametrize("inference", [False, True])
def test_a_count_whose_forward_ended_before_its_loss_is_not_that_of_later_labels(
    inference: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in the same memory, as an allocator gives it, and of labels that count no writes."""
    monkeypatch.setattr(losses, "kinds", SimpleNamespace(is_synchronous=lambda _: False))
    monkeypatch.setattr(losses, "RowCount", Counted)
    monkeypatch.setattr(masked_rows, "GRANULE", 1)
    plain, fused = fused_pair("bert")
    given = batch()
    labels = given.pop("labels").flatten()
    memory = np.full(labels.numel(), -100)
    memory[0] = 7

    def now() -> torch.Tensor:
        with torch.inference_mode(inference):
            return torch.from_numpy(memory).view_as(given["input_ids"])

    def fail(*_: object) -> None:
        raise InterruptedError

    hook = fused.bert.register_forward_pre_hook(fail)
    early = now()
    with pytest.raises(InterruptedError):
        fused(**given, labels=early)
    hook.remove()
    del early
    memory[:] = labels.numpy()
    logits = fused.cls(fused.bert(**given)[0])  # by the parts of the model, without its hook
    found = F.cross_entropy(logits.flatten(0, 1), now().flatten())
    expected = F.cross_entropy(plain(**given).logits.flatten(0, 1), labels)
    found.backward(), expected.backward()
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    compare(gradients(fused), gradients(plain))

    head, later = fused.cls.predictions.decoder, now()
    losses.count_early(head, later)
    assert inference == (head not in losses._COUNTS)
    fused(**given)
    assert head not in losses._COUNTS


@pytest.mark.parametrize("name", ["llama", "distilbert"])
def test_by_the_kernel_in_the_interpreter_too(
    name: str, monkeypatch: pytest.MonkeyPatch, checked_triton: Any
) -> None:
    monkeypatch.setenv("HF_ZERO_TRITON", "1")
    plain, fused = fused_pair(name)
    assert_same_step(fused, plain)


@in_one_item(["llama", "mixtral, with its routers' loss", "bert", "t5"])
def test_the_model_divides_as_it_does_by_itself(name: str) -> None:
    for count in (23, torch.tensor(23)):
        plain, fused = fused_pair(name)
        expected, found = (
            step(each, **batch(), num_items_in_batch=count).loss for each in (plain, fused)
        )
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
        compare(gradients(fused), gradients(plain))


@in_one_item(["llama", "bert", "t5"])
def test_without_any_label_that_counts_the_loss_is_nan_and_no_gradient_is(name: str) -> None:
    plain, fused = fused_pair(name)
    given = batch()
    if name == "t5":
        given["decoder_input_ids"] = given["labels"].clamp(min=0)
    given["labels"] = torch.full_like(given["labels"], -100)
    assert step(fused, **given).loss.isnan() and step(plain, **given).loss.isnan()
    compare(gradients(fused), gradients(plain))


def test_an_evaluation_computes_no_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """And has the loss of a forward with them, bit for bit."""
    wanted, compute = [], chunked_head.losses_and_gradients

    def watched(*given: Any) -> Any:
        wanted.append(given[5].any)
        return compute(*given)

    monkeypatch.setattr(chunked_head, "losses_and_gradients", watched)
    _, fused = fused_pair("llama")
    with torch.no_grad():
        loss = fused(**batch()).loss
    assert torch.equal(loss, fused(**batch()).loss.detach()) and wanted == [False, True]


def test_ways_to_call_a_model() -> None:
    """Labels that are shifted already, another ignored label, positional arguments, a tuple, some
    of the logits, a loss function of the script, checkpointed layers.
    """
    plain, fused = fused_pair("llama")
    given = batch()
    given["labels"] = given["labels"].where(given["labels"] != -100, 5)
    more: list[dict[str, Any]] = [
        {"ignore_index": 5}, {"shift_labels": given["labels"].roll(3, 1)}, {"return_dict": False},
    ]  # fmt: skip
    for each in more:
        found, expected = (model(**given, **each)["loss" if each.get("return_dict", True) else 0]
                           for model in (fused, plain))  # fmt: skip
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    last = {**batch(), "logits_to_keep": 4, "labels": batch()["input_ids"][:, -4:]}
    found, expected = fused(**last), plain(**last)
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-6, atol=1e-6)
    assert torch.equal(found.logits, expected.logits)
    for model in (fused, plain):
        model.loss_function = lambda logits, labels, vocab_size, **kwargs: logits.logsumexp(
            -1
        ).sum()
    assert_same_step(fused, plain)
    fused.gradient_checkpointing_enable({"use_reentrant": False})
    fused.zero_grad(), plain.zero_grad()
    assert_same_step(fused, plain)


LORA = {"target_modules": ["q_proj"]}


@in_one_item([
    ("llama", LORA), ("llama", {"target_modules": ["lm_head"]}),
    ("llama", {**LORA, "modules_to_save": ["lm_head"]}),
    ("distilbert", {"target_modules": ["vocab_transform"]}),
    ("bert", {"target_modules": ["query"], "modules_to_save": ["decoder"]}),
])  # fmt: skip
def test_with_adapters_inside_and_around(case: tuple[str, dict[str, Any]]) -> None:
    name, settings = case
    plain, before = fused_pair(name)
    config = peft.LoraConfig(init_lora_weights=False, r=4, **settings)
    models = []
    for model in (plain, before, copy.deepcopy(plain)):
        torch.manual_seed(5)
        models.append(peft.get_peft_model(model, config).train())
    fuse(models[2])
    for model in models[1:]:
        models[0].zero_grad()
        assert_same_step(model, models[0], 1e-5)


def test_what_cannot_be_deferred_says_why() -> None:
    class Scaled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 2

    other, twice = build("llama"), build("llama")
    other.lm_head = Scaled(32, 67)
    fuse(twice)
    classes = transformers.BertForSequenceClassification(build("bert").config)
    for model, reason in (
        (nn.Linear(2, 2), "Linear has no get_output_embeddings"),
        (classes, "BertForSequenceClassification has no output embedding"),
        (other, f"lm_head is a Scaled of {__name__}, not a linear layer of torch"),
        (twice, "lm_head has a forward of its own already"),
    ):
        assert defer_head(model) == reason


def test_calls_that_are_not_deferred() -> None:
    _, fused = fused_pair("llama")
    hidden = torch.randn(2, 3, 32)
    head: Any = fused.lm_head

    def deferred(given: Any = hidden) -> bool:
        return isinstance(head(given), DeferredOutput)

    assert deferred()
    for register in (
        head.register_forward_hook, head.register_forward_pre_hook,
        nn.modules.module.register_module_forward_hook,
    ):  # fmt: skip
        handle = register(lambda *given: None)
        assert not deferred()
        handle.remove()
    with torch.inference_mode():
        made = hidden * 1
    with torch.no_grad():
        assert not deferred(made) and not deferred(hidden[0, 0])
    head.compile(backend="eager")
    assert not deferred()
    head._compiled_call_impl = None
    nn.utils.parametrizations.weight_norm(head)
    assert not deferred()
