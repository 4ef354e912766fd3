"""Fused heads against the untouched model: loss and every gradient, in all the ways a model is
called.
"""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F
import transformers

from hf_zero.errors import KernelError
from hf_zero.integrations.fused.heads import HEADS, fuse_head
from hf_zero.integrations.fused.replacement import Replacement
from tests.helpers.cells import in_one_item
from tests.integrations.fused.languages import (
    CAUSAL,
    LANGUAGES,
    SEQ2SEQ,
    VOCABULARY,
    animal_of,
    batch,
    build,
    compare,
    gradients,
    pair,
)


def fuse(model: Any) -> Replacement:
    done = fuse_head(model)
    assert isinstance(done, Replacement), done
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


def assert_same_step(fused: Any, plain: Any, loose: float = 1e-6, called: Any = None) -> None:
    """``called``: the fused model in a wrapper."""
    expected, found = step(plain, **batch()), step(fused if called is None else called, **batch())
    torch.testing.assert_close(found.loss, expected.loss, rtol=loose, atol=1e-6)
    compare(gradients(fused), gradients(plain))


def test_every_class_with_a_head_has_a_model_here() -> None:
    assert {animal_of(name).model for name in LANGUAGES} == set(HEADS)


@in_one_item(LANGUAGES)
def test_a_family_trains_and_evaluates_as_the_model(name: str) -> None:
    """Logits that are read are the model's, with their gradients."""
    plain, fused = pair(name)
    done = fuse(fused)
    assert inspect.signature(fused.forward) == inspect.signature(plain.forward)
    assert list(fused.state_dict()) == list(plain.state_dict())
    assert fused.get_submodule(done.where) is not None
    expected, found = step(plain, **batch()), step(fused, **batch())
    assert isinstance(found, type(expected)) and "logits" not in found
    for loss in (found.loss, found["loss"]):
        torch.testing.assert_close(loss, expected.loss, rtol=1e-6, atol=1e-6)
    compare(gradients(fused), gradients(plain))

    read = []
    for model in (plain, fused):
        model.zero_grad()
        outputs = model(**batch())
        assert outputs.logits is outputs.logits
        (outputs.loss + outputs.logits.float().square().mean()).backward()
        read.append(outputs.logits.detach())
    torch.testing.assert_close(*read, rtol=1e-6, atol=1e-6)
    compare(gradients(fused), gradients(plain))

    given = batch()
    with torch.no_grad():
        assert torch.equal(fused(**given).logits, plain(**given).logits)
        assert torch.equal(fused.eval()(**given).loss, plain.eval()(**given).loss)
    fused.train(), plain.train()
    if name not in SEQ2SEQ:
        del given["labels"]
        assert torch.equal(fused(**given).logits, plain(**given).logits)

    left = {place: set(each.__dict__) for place, each in plain.named_modules()}
    for _ in range(2):
        done.undo()
        assert {place: set(each.__dict__) for place, each in fused.named_modules()} == left
    assert fused(**batch()).logits is not None


def test_printing_and_copying_outputs_makes_no_logits() -> None:
    plain, fused = fused_pair("llama")
    outputs = fused(**batch(), use_cache=False)
    assert "logits" not in repr(outputs)
    assert repr(outputs).startswith("CausalLMOutputWithPast(loss=tensor(")
    with torch.no_grad():
        outputs["loss"] = outputs.loss.detach()
    copied = pickle.loads(pickle.dumps(outputs))
    assert type(copied) is type(plain(**batch())) and copied.logits is None
    assert torch.equal(copied.loss, outputs.loss)
    assert outputs.logits is not None


@pytest.mark.parametrize("name", ["llama", "distilbert"])
def test_by_the_kernel_in_the_interpreter_too(
    name: str, monkeypatch: pytest.MonkeyPatch, checked_triton: Any
) -> None:
    monkeypatch.setenv("HF_ZERO_TRITON", "1")
    plain, fused = fused_pair(name)
    assert_same_step(fused, plain)


@in_one_item(["llama", "mixtral, with its routers' loss", "bert", "t5"])
def test_the_tokens_of_the_whole_step_divide(name: str) -> None:
    for count in (23, torch.tensor(23)):
        plain, fused = fused_pair(name)
        given = batch()
        found = step(fused, **given, num_items_in_batch=count)
        if name in CAUSAL:
            expected = step(plain, **given, num_items_in_batch=count).loss
        else:  # transformers' own ignore it
            logits = plain(**given).logits.view(-1, VOCABULARY)
            expected = F.cross_entropy(logits, given["labels"].view(-1), reduction="sum") / 23
            expected.backward()
        torch.testing.assert_close(found.loss, expected, rtol=1e-6, atol=1e-6)
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


@in_one_item(["llama", "bert"])
def test_under_autocast_the_error_is_no_larger_than_torchs(name: str) -> None:
    """Over several batches: on a single one, a tenth either way is chance."""
    plain, fused = fused_pair(name)
    truth = copy.deepcopy(plain)
    errors = [0.0, 0.0]
    for seed in range(4):
        for model in (truth, fused, plain):
            model.zero_grad()
        exact = step(truth, **batch(seed))
        for at, model in enumerate((fused, plain)):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(**batch(seed)).loss
            loss.backward()
            assert loss.dtype == torch.float32
            if model is fused:
                assert abs(float(loss.detach() - exact.loss.detach())) < 0.02
            found, true = gradients(model), gradients(truth)
            errors[at] += sum(float((found[key] - true[key]).square().sum()) for key in true)
    assert errors[0] ** 0.5 <= 1.1 * errors[1] ** 0.5, errors


def test_ways_to_call_a_model() -> None:
    """Labels that are shifted already, another ignored label, without dropping rows, a tuple,
    positional arguments, checkpointed layers, logits outside the autocast of their forward.
    """
    plain, fused = fused_pair("llama")
    given = batch()
    given["labels"] = given["labels"].where(given["labels"] != -100, 5)
    for more in ({"ignore_index": 5}, {"shift_labels": given["labels"].roll(3, 1)}):
        found, expected = (model(**given, **more).loss for model in (fused, plain))
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    with torch.autocast("cpu", torch.bfloat16):
        wanted, outputs = plain(**batch()), fused(**batch())
    assert outputs.logits.dtype == torch.bfloat16 and torch.equal(outputs.logits, wanted.logits)
    fused.gradient_checkpointing_enable({"use_reentrant": False})
    assert_same_step(fused, plain)

    plain, fused = pair("bert")
    done = fuse_head(fused, sparse=False)
    assert isinstance(done, Replacement) and done.what == "linear_cross_entropy"
    given = batch()
    asked = {"labels": given["labels"], "output_hidden_states": True, "return_dict": False}
    ids, mask = given["input_ids"], given["attention_mask"]
    expected, found = (model(ids, mask, **asked) for model in (plain, fused))
    torch.testing.assert_close(found[0], expected[0], rtol=1e-6, atol=1e-6)
    # the logits are missing
    assert len(found) == len(expected) - 1 and torch.equal(found[1][-1], expected[2][-1])


def test_copies_and_forwards_wrapped_before_and_after_as_accelerate_does() -> None:
    plain, fused = pair("llama")
    again = copy.deepcopy(fused)
    wrap = torch.autocast("cpu", torch.bfloat16)
    fused.forward = wrap(fused.forward)
    done = fuse(fused)
    assert "logits" not in fused(**batch())
    undo = fuse(again).undo
    copied = copy.deepcopy(again)
    again.forward = wrap(again.forward)
    assert "logits" not in again(**batch())
    undo()
    assert again(**batch()).logits is not None  # what is wrapped stays, and does nothing of its own
    done.undo()
    assert fused(**batch()).logits is not None and "_hf_zero_head" not in fused.__dict__
    assert "logits" not in copied(**batch())
    assert_same_step(copied, plain)


@in_one_item([("llama", "q_proj"), ("llama", "lm_head"), ("distilbert", "vocab_transform")])
def test_with_adapters_inside_and_around(case: tuple[str, str]) -> None:
    name, target = case
    plain, before = fused_pair(name)
    config = peft.LoraConfig(target_modules=[target], init_lora_weights=False, r=4)
    models = []
    for model in (plain, before, copy.deepcopy(plain)):
        torch.manual_seed(5)
        models.append(peft.get_peft_model(model, config).train())
    said = fuse_head(models[2])
    if target == "lm_head":
        assert said == "lm_head is a Linear of peft.tuners.lora.layer, not a linear layer of torch"
    else:
        assert isinstance(said, Replacement)
    for model in models[1:]:
        models[0].zero_grad()
        assert_same_step(model, models[0], 1e-5)


@pytest.mark.long
def test_the_whole_model_compiles_without_a_break() -> None:
    plain, fused = fused_pair("bert")
    assert_same_step(fused, plain, 1e-5, torch.compile(fused, backend="aot_eager"))


def test_what_cannot_be_fused_says_why() -> None:
    own, twice, another, named = (build("llama") for _ in range(4))
    own.loss_function = lambda *args, **kwargs: None
    fuse(twice)
    another.forward = lambda **kwargs: None
    # as TRL's fused head does: what it wraps is in its name alone
    named.forward = functools.wraps(type(named).forward)(lambda **kwargs: None)
    sizes = {"vocab_size": 67, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    deberta = transformers.DebertaV2ForMaskedLM(transformers.DebertaV2Config(**sizes, legacy=False))
    classes = transformers.BertForSequenceClassification(build("bert").config)
    replaced = f"the model's forward is another one already, of {__name__}"
    for model, reason in (
        (classes, "no fused head for BertForSequenceClassification"),
        (own, "the model has a loss function of its own"),
        (twice, "lm_head has a forward of its own already"),
        (another, replaced),
        (named, replaced),
        (deberta, "DebertaV2ForMaskedLM with legacy=False multiplies by the embedding itself"),
    ):
        assert fuse_head(model) == reason


def test_forwards_that_run_as_before_or_fail() -> None:
    plain, fused = fused_pair("llama")
    given = batch() | {"logits_to_keep": 4}
    given["labels"] = given["labels"][:, -4:]
    assert torch.equal(fused(**given).logits, plain(**given).logits)
    with pytest.raises(KernelError, match="label 999"):
        fused(**{**batch(), "labels": torch.full((2, 9), 999)})
    assert fused(input_ids=batch()["input_ids"]).logits.shape == (2, 9, VOCABULARY)
    fused.loss_function = lambda logits, labels, vocab_size, **kwargs: logits.sum()
    assert fused(**batch()).logits is not None
    _, fused = fused_pair("llama")
    fused._hf_zero_head.before = lambda **kwargs: {}
    with pytest.raises(KernelError, match="LlamaForCausalLM has not called its head lm_head"):
        fused(**batch())
