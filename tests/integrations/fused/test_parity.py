"""Loss and every gradient of a model with fused kernels against the untouched model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import hf_zero
from hf_zero.integrations.fused import report
from hf_zero.ops import philox
from tests.helpers.cells import fast
from tests.integrations.fused.animals import ANIMALS, BLOCKS, build, error, inputs, on_every, step

IN_BF16 = ("llama", "gemma2", "bert", "gpt2", "t5", "vit")  # kinds of blocks, in the fast suite


@pytest.fixture(autouse=True)
def references(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ZERO_TRITON", "0")


def assert_equal(
    model: nn.Module, right: nn.Module, batch: dict[str, torch.Tensor], bound: float = 1e-5
) -> None:
    (loss, grads), (right_loss, right_grads) = step(model, batch), step(right, batch)
    torch.testing.assert_close(loss, right_loss, rtol=bound, atol=0)
    worst = max(error(grads, right_grads).items(), key=lambda item: item[1])
    assert worst[1] < bound, worst


@on_every
def test_every_known_module_is_replaced(name: str) -> None:
    model = hf_zero.optimize(build(name), BLOCKS)
    found: dict[str, set[str]] = {}
    for line in report(model).replaced:
        found.setdefault(line.what, set()).update(line.kernels)
    assert found == {kind: set(kernels) for kind, kernels in ANIMALS[name].replaced.items()}, str(
        report(model)
    )


@on_every
def test_loss_and_gradients_are_those_of_the_model(name: str) -> None:
    assert_equal(hf_zero.optimize(build(name), BLOCKS), build(name), inputs(name))


@pytest.mark.parametrize("kernel", BLOCKS)
@pytest.mark.parametrize("name", ["llama", "bert", "vit"])
def test_each_kernel_alone(name: str, kernel: str) -> None:
    assert_equal(hf_zero.optimize(build(name), [kernel]), build(name), inputs(name))


@on_every
def test_evaluation_is_that_of_the_model(name: str) -> None:
    batch = inputs(name)
    with torch.no_grad():
        right = build(name).eval()(**batch)
        out = hf_zero.optimize(build(name), [*BLOCKS, "loss"]).eval()(**batch)
    torch.testing.assert_close(out.logits, right.logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", fast(ANIMALS, lambda name: name in IN_BF16))
def test_the_error_of_bf16_is_no_larger(name: str) -> None:
    """Squared errors of all gradients against fp32, over weights and batches: of a single one, a
    tenth either way is chance.
    """
    ours = plain = 0.0
    for seed in range(6):
        batch = inputs(name, seed=seed)
        kept = {"dtype": torch.bfloat16, "seed": seed}
        right = step(build(name, **kept).float(), batch)[1]
        size = sum(float(grad.square().sum()) for grad in right.values())
        for model, is_ours in (
            (hf_zero.optimize(build(name, **kept), BLOCKS), True),
            (build(name, **kept), False),
        ):
            grads = step(model, batch)[1]
            squared = sum(float((grads[key] - right[key]).square().sum()) for key in right) / size
            ours, plain = (ours + squared, plain) if is_ours else (ours, plain + squared)
    assert ours**0.5 <= 1.1 * plain**0.5, (ours**0.5, plain**0.5)


@on_every
def test_dropout_of_modules_draws_as_before(name: str) -> None:
    """Without "residual" every mask is still torch's, drawn in the same order."""
    names = [kernel for kernel in BLOCKS if kernel != "residual"]
    assert_equal(
        hf_zero.optimize(build(name, dropout=True), names), build(name, dropout=True), inputs(name)
    )


class PhiloxDropout(nn.Module):
    """Dropout with the mask of the fused kernels, in plain torch."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seed = philox.draw_seed(x.device)
        kept = philox.kept_rows(seed, x.numel() // x.shape[-1], x.shape[-1], self.p).view_as(x)
        return torch.where(kept, x / (1 - self.p), 0.0)


@pytest.mark.parametrize(
    "name",
    [
        name
        for name, animal in ANIMALS.items()
        if any("residual" in kernels for kernels in animal.replaced.values())
    ],
)
def test_fused_dropout_is_dropout(name: str) -> None:
    model, right = hf_zero.optimize(build(name, dropout=True), BLOCKS), build(name, dropout=True)
    fused = {
        "bert_output": ("dropout",),
        "vit_layer": ("dropout",),
        "t5_": ("dropout",),
        "phi3_layer": ("resid_mlp_dropout",),
    }
    for place, module in model.named_modules():
        function = getattr(module.__dict__.get("forward"), "__func__", None)
        for start, attributes in fused.items():
            if (
                function is not None
                and function.__module__.endswith("residuals")
                and function.__name__.startswith(start)
            ):
                for attribute in attributes:
                    other = right.get_submodule(place)
                    setattr(other, attribute, PhiloxDropout(getattr(other, attribute).p))
    assert_equal(model, right, inputs(name))


@pytest.mark.turns
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["llama", "qwen3", "mixtral", "bert", "gpt2", "t5", "vit"])
def test_checkpointing_replays_the_same_dropout(name: str, reentrant: bool) -> None:
    batch = inputs(name)
    models = [hf_zero.optimize(build(name, dropout=True), BLOCKS) for _ in range(2)]
    models[1].gradient_checkpointing_enable(
        gradient_checkpointing_kwargs={"use_reentrant": reentrant}
    )
    if reentrant and name != "vit":
        for model in models:
            model.enable_input_require_grads()
    assert_equal(models[1], models[0], batch)


def with_adapters(model: Any) -> Any:
    import peft

    torch.manual_seed(3)
    settings = peft.LoraConfig(r=3, target_modules="all-linear", init_lora_weights=False)
    return peft.get_peft_model(model, settings)


@pytest.fixture
def quiet_adapters() -> Iterator[None]:
    pytest.importorskip("peft")
    yield


@pytest.mark.turns
@pytest.mark.usefixtures("quiet_adapters")
@pytest.mark.parametrize("adapters_first", [False, True])
@pytest.mark.parametrize("name", ["llama", "qwen3", "phi", "phi3", "bert", "gpt2", "t5", "vit"])
def test_adapters_are_called(name: str, adapters_first: bool) -> None:
    batch, right = inputs(name), with_adapters(build(name))
    if adapters_first:
        model = hf_zero.optimize(with_adapters(build(name)), BLOCKS)
        assert report(model).replaced
    else:
        model = with_adapters(hf_zero.optimize(build(name), BLOCKS))
    assert_equal(model, right, batch)


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_under_autocast_the_models_own_code_runs(name: str) -> None:
    batch, model, right = inputs(name), hf_zero.optimize(build(name), BLOCKS), build(name)
    with torch.autocast("cpu", torch.bfloat16):
        loss, grads = step(model, batch)
        right_loss, right_grads = step(right, batch)
    assert torch.equal(loss, right_loss)
    assert all(torch.equal(grads[key], right_grads[key]) for key in right_grads)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_generation_is_that_of_the_model(name: str) -> None:
    ids = inputs(name)["input_ids"][1:]
    wanted = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    right = build(name).eval().generate(ids, **wanted)
    assert torch.equal(
        hf_zero.optimize(build(name), [*BLOCKS, "loss"]).eval().generate(ids, **wanted), right
    )
