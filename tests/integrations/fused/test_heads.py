"""Fused heads against the untouched model: loss and every gradient, in all the ways a model is
called.
"""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from hf_zero.errors import KernelError
from hf_zero.integrations.fused.heads import HEADS, fuse_head
from hf_zero.integrations.fused.replacement import Replacement
from tests.helpers.engines import config_of, full_grads, start
from tests.helpers.ranks import run_ranks
from tests.integrations.fused.languages import (
    CAUSAL,
    LANGUAGES,
    MASKED,
    SEQ2SEQ,
    VOCABULARY,
    batch,
    build,
    compare,
    gradients,
    pair,
)


@pytest.fixture(autouse=True)
def forms_for_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ZERO_TRITON", "0")


def fuse(model: Any) -> Replacement:
    done = fuse_head(model)
    assert isinstance(done, Replacement), done
    return done


def step(model: Any, **inputs: Any) -> Any:
    outputs = model(**inputs)
    outputs.loss.backward()
    return outputs


def test_every_class_with_a_head_has_a_model_here() -> None:
    assert {model for model, _, _ in LANGUAGES.values()} == set(HEADS)


@pytest.mark.parametrize("name", LANGUAGES)
def test_loss_and_every_gradient_are_the_models(name: str) -> None:
    plain, fused = pair(name)
    fuse(fused)
    expected, found = step(plain, **batch()), step(fused, **batch())
    assert isinstance(found, type(expected)) and "logits" not in found
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found["loss"], expected["loss"], rtol=1e-6, atol=1e-6)
    compare(gradients(fused), gradients(plain))


@pytest.mark.parametrize("name", LANGUAGES)
def test_logits_that_are_read_are_the_models_with_their_gradients(name: str) -> None:
    plain, fused = pair(name)
    fuse(fused)
    for model, kept in ((plain, {}), (fused, {})):
        outputs = model(**batch())
        logits = outputs.logits
        assert outputs.logits is logits
        kept["logits"] = logits.detach()
        (outputs.loss + logits.float().square().mean()).backward()
    torch.testing.assert_close(kept["logits"], plain(**batch()).logits, rtol=1e-6, atol=1e-6)
    compare(gradients(fused), gradients(plain))


def test_logits_that_are_read_outside_the_autocast_of_their_forward() -> None:
    plain, fused = pair("llama")
    fuse(fused)
    with torch.autocast("cpu", torch.bfloat16):
        expected, found = plain(**batch()), fused(**batch())
    assert found.logits.dtype == torch.bfloat16 and torch.equal(found.logits, expected.logits)


def test_printing_and_copying_outputs_makes_no_logits() -> None:
    _, fused = pair("llama")
    fuse(fused)
    outputs = fused(**batch(), use_cache=False)
    assert "logits" not in repr(outputs)
    assert repr(outputs).startswith("CausalLMOutputWithPast(loss=tensor(")
    with torch.no_grad():
        outputs["loss"] = outputs.loss.detach()
    copied = pickle.loads(pickle.dumps(outputs))
    assert type(copied) is type(pair("llama")[0](**batch()))
    assert copied.logits is None
    assert torch.equal(copied.loss, outputs.loss)
    assert outputs.logits is not None


@pytest.mark.parametrize("name", ["llama", "bert", "distilbert", "t5"])
def test_by_the_kernel_in_the_interpreter_too(
    name: str, monkeypatch: pytest.MonkeyPatch, checked_triton: Any
) -> None:
    monkeypatch.setenv("HF_ZERO_TRITON", "1")
    plain, fused = pair(name)
    fuse(fused)
    expected, found = step(plain, **batch()), step(fused, **batch())
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-6, atol=1e-6)
    compare(gradients(fused), gradients(plain))


@pytest.mark.parametrize("name", LANGUAGES)
def test_evaluation_prediction_and_a_forward_without_labels_are_untouched(name: str) -> None:
    plain, fused = pair(name)
    fuse(fused)
    given = batch()
    with torch.no_grad():
        assert torch.equal(fused(**given).logits, plain(**given).logits)
        assert torch.equal(fused.eval()(**given).loss, plain.eval()(**given).loss)
    fused.train(), plain.train()
    if name not in SEQ2SEQ:
        del given["labels"]
        assert torch.equal(fused(**given).logits, plain(**given).logits)


@pytest.mark.parametrize("count", [23, torch.tensor(23)], ids=["a number", "a tensor"])
@pytest.mark.parametrize(
    "name", ["llama", "mixtral, with its routers' loss", "gpt2", "bert", "distilbert", "t5"]
)
def test_the_tokens_of_the_whole_step_divide(name: str, count: Any) -> None:
    plain, fused = pair(name)
    fuse(fused)
    given = batch()
    found = step(fused, **given, num_items_in_batch=count)
    if name in CAUSAL:
        expected = step(plain, **given, num_items_in_batch=count).loss
    else:  # transformers' own ignore it
        logits = plain(**given).logits
        expected = (
            F.cross_entropy(logits.view(-1, VOCABULARY), given["labels"].view(-1), reduction="sum")
            / 23
        )
        expected.backward()
    torch.testing.assert_close(found.loss, expected, rtol=1e-6, atol=1e-6)
    compare(gradients(fused), gradients(plain))


@pytest.mark.parametrize("name", ["llama", "bert", "t5"])
def test_without_any_label_that_counts_the_loss_is_nan_and_no_gradient_is(name: str) -> None:
    plain, fused = pair(name)
    fuse(fused)
    given = batch()
    if name == "t5":
        given["decoder_input_ids"] = given["labels"].clamp(min=0)
    given["labels"] = torch.full_like(given["labels"], -100)
    assert step(fused, **given).loss.isnan() and step(plain, **given).loss.isnan()
    compare(gradients(fused), gradients(plain))


@pytest.mark.parametrize("name", ["llama", "bert", "roberta", "t5"])
def test_under_autocast_the_error_is_no_larger_than_torchs(name: str) -> None:
    truth, plain = pair(name)
    fused = copy.deepcopy(plain)
    fuse(fused)
    exact = step(truth, **batch())
    with torch.autocast("cpu", torch.bfloat16):
        ours, torchs = fused(**batch()), plain(**batch())
    ours.loss.backward(), torchs.loss.backward()
    assert ours.loss.dtype == torch.float32
    true, our, their = (
        torch.cat([each.flatten() for each in gradients(model).values()])
        for model in (truth, fused, plain)
    )
    assert float((our - true).norm()) <= 1.1 * float((their - true).norm())
    assert abs(float(ours.loss.detach() - exact.loss.detach())) < 0.02


@pytest.mark.turns
@pytest.mark.parametrize(
    "name", ["llama, tied", "gemma2, capped", "gpt2", "bert", "distilbert", "t5"]
)
@pytest.mark.parametrize("stage", [0, 3])
def test_on_two_ranks_of_the_engine(name: str, stage: int) -> None:
    def on_rank(rank: int, models: list[Any]) -> Any:
        engine = start(
            models[rank], torch.optim.AdamW(models[rank].parameters(), lr=1e-3), config_of(stage)
        )
        losses = []
        for micro in range(2):
            outputs = engine(**batch(10 * micro + rank))
            assert ("logits" in outputs) != hasattr(models[rank], "_hf_zero_head")
            loss = outputs.loss
            engine.backward(loss)
            losses.append(loss.detach())
            grads = full_grads(engine)
            engine.step()
        engine.destroy()
        return losses, grads

    plain = [build(name) for _ in range(2)]
    fused = [build(name) for _ in range(2)]
    for model in fused:
        fuse(model)
    for (losses, grads), (expected, exact) in zip(
        run_ranks(2, on_rank, fused), run_ranks(2, on_rank, plain)
    ):
        torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)
        compare(grads, exact, 2e-5)


def test_labels_that_are_shifted_already_and_another_ignored_label() -> None:
    plain, fused = pair("llama")
    fuse(fused)
    given = batch()
    given["labels"] = given["labels"].where(given["labels"] != -100, 5)
    more = {"ignore_index": 5}
    torch.testing.assert_close(
        fused(**given, **more).loss, plain(**given, **more).loss, rtol=1e-6, atol=1e-6
    )
    more = {"shift_labels": given["labels"].roll(3, 1)}
    torch.testing.assert_close(
        fused(**given, **more).loss, plain(**given, **more).loss, rtol=1e-6, atol=1e-6
    )


def test_as_a_tuple_and_with_positional_arguments() -> None:
    plain, fused = pair("bert")
    fuse(fused)
    given = batch()
    found = fused(
        given["input_ids"],
        given["attention_mask"],
        labels=given["labels"],
        output_hidden_states=True,
        return_dict=False,
    )
    expected = plain(
        given["input_ids"],
        given["attention_mask"],
        labels=given["labels"],
        output_hidden_states=True,
        return_dict=False,
    )
    torch.testing.assert_close(found[0], expected[0], rtol=1e-6, atol=1e-6)
    # the logits are missing
    assert len(found) == len(expected) - 1 and torch.equal(found[1][-1], expected[2][-1])


@pytest.mark.parametrize("name", LANGUAGES)
def test_undone_nothing_is_left(name: str) -> None:
    model = build(name)
    before = {place: set(module.__dict__) for place, module in model.named_modules()}
    done = fuse(model)
    assert inspect.signature(model.forward) == inspect.signature(type(model).forward.__get__(model))
    assert list(model.state_dict()) == list(build(name).state_dict())
    assert model.get_submodule(done.where) is not None
    done.undo()
    assert {place: set(module.__dict__) for place, module in model.named_modules()} == before
    assert model(**batch()).logits is not None
    done.undo()


def test_a_copy_is_fused_by_itself() -> None:
    plain, fused = pair("llama")
    done = fuse(fused)
    copied = copy.deepcopy(fused)
    done.undo()
    assert "logits" in fused(**batch()) and "logits" not in copied(**batch())
    expected, found = step(plain, **batch()), step(copied, **batch())
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-6, atol=1e-6)
    compare(gradients(copied), gradients(plain))


def test_a_forward_wrapped_before_and_after_as_accelerate_does() -> None:
    fused = build("llama")
    wrap = torch.autocast("cpu", torch.bfloat16)
    fused.forward = wrap(fused.forward)
    done = fuse(fused)
    assert "logits" not in fused(**batch())
    again = build("llama")
    undo = fuse(again).undo
    again.forward = wrap(again.forward)
    assert "logits" not in again(**batch())
    undo()
    assert again(**batch()).logits is not None  # what is wrapped stays, and does nothing of its own
    done.undo()
    assert fused(**batch()).logits is not None and "_hf_zero_head" not in fused.__dict__


def test_with_adapters_inside_and_around() -> None:
    peft = pytest.importorskip("peft")
    for name, targets in (
        ("llama", ["q_proj"]),
        ("llama", ["lm_head"]),
        ("distilbert", ["vocab_transform"]),
    ):
        plain, fused = pair(name)
        before, after = copy.deepcopy(fused), copy.deepcopy(fused)
        fuse(before)
        config = peft.LoraConfig(target_modules=targets, init_lora_weights=False, r=4)
        models = []
        for model in (plain, before, after):
            torch.manual_seed(5)
            models.append(peft.get_peft_model(model, config).train())
        said = fuse_head(models[2])
        assert (
            said == "lm_head is a Linear of peft.tuners.lora.layer, not a linear layer of torch"
            if targets == ["lm_head"]
            else isinstance(said, Replacement)
        )
        expected = step(models[0], **batch())
        for model in models[1:]:
            torch.testing.assert_close(
                step(model, **batch()).loss, expected.loss, rtol=1e-5, atol=1e-6
            )
            compare(gradients(model), gradients(models[0]))


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_with_checkpointing_of_its_layers(name: str) -> None:
    plain, fused = pair(name)
    fuse(fused)
    fused.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    expected, found = step(plain, **batch()), step(fused, **batch())
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-6, atol=1e-6)
    compare(gradients(fused), gradients(plain))


def test_a_model_that_generates_generates_the_same() -> None:
    plain, fused = pair("llama")
    fuse(fused)
    ids = batch()["input_ids"]
    for model in (plain, fused):
        model.eval()
    assert torch.equal(
        fused.generate(ids, max_new_tokens=5, do_sample=False),
        plain.generate(ids, max_new_tokens=5, do_sample=False),
    )


def test_without_dropping_rows() -> None:
    plain, fused = pair("bert")
    done = fuse_head(fused, sparse=False)
    assert isinstance(done, Replacement) and done.what == "linear_cross_entropy"
    torch.testing.assert_close(fused(**batch()).loss, plain(**batch()).loss, rtol=1e-6, atol=1e-6)


def test_what_cannot_be_fused_says_why() -> None:
    import transformers

    reasons = {}
    classifier = transformers.BertForSequenceClassification(build("bert").config)
    reasons["no fused head for BertForSequenceClassification"] = classifier
    own = build("llama")
    own.loss_function = lambda *args, **kwargs: None
    reasons["the model has a loss function of its own"] = own
    twice = build("llama")
    fuse(twice)
    reasons["lm_head has a forward of its own already"] = twice
    another = build("llama")
    another.forward = lambda **kwargs: None
    reasons[f"the model's forward is another one already, of {__name__}"] = another
    named = build("llama")  # as TRL's fused head does: what it wraps is in its name alone
    named.forward = functools.wraps(type(named).forward)(lambda **kwargs: None)
    assert fuse_head(named) == f"the model's forward is another one already, of {__name__}"
    config = transformers.DebertaV2Config(
        vocab_size=67, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, legacy=False
    )
    reasons["DebertaV2ForMaskedLM with legacy=False multiplies by the embedding itself"] = (
        transformers.DebertaV2ForMaskedLM(config)
    )
    assert {reason: fuse_head(model) for reason, model in reasons.items()} == {
        reason: reason for reason in reasons
    }


def test_logits_asked_for_in_part_and_a_loss_of_its_own_run_as_before() -> None:
    plain, fused = pair("llama")
    fuse(fused)
    given = batch()
    given["labels"] = given["labels"][:, -4:]
    assert torch.equal(
        fused(**given, logits_to_keep=4).logits, plain(**given, logits_to_keep=4).logits
    )
    fused.loss_function = lambda logits, labels, vocab_size, **kwargs: logits.sum()
    assert fused(**batch()).logits is not None


def test_a_forward_that_never_calls_the_head_is_said() -> None:
    model = build("llama")
    fuse(model)
    model._hf_zero_head.before = lambda **kwargs: {}
    with pytest.raises(KernelError, match="LlamaForCausalLM has not called its head lm_head"):
        model(**batch())


def test_after_a_forward_that_raised_the_head_makes_logits_again() -> None:
    model = build("llama")
    fuse(model)
    with pytest.raises(KernelError, match="label 999"):
        model(**{**batch(), "labels": torch.full((2, 9), 999)})
    assert model(input_ids=batch()["input_ids"]).logits.shape == (2, 9, VOCABULARY)


@pytest.mark.parametrize("name", ["llama", *list(MASKED)[:1]])
def test_the_whole_model_compiles_without_a_break(name: str) -> None:
    plain, fused = pair(name)
    fuse(fused)
    compiled = torch.compile(fused, backend="aot_eager")
    expected, found = step(plain, **batch()), step(compiled, **batch())
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-5, atol=1e-6)
    compare(gradients(fused), gradients(plain))
