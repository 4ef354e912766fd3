"""Compiled blocks on one GPU, by inductor: as near to fp32 as uncompiled ones, compiled once,
and no step waits for the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch._dynamo.utils import counters

import hf_zero
from hf_zero.distributed.init import init_distributed
from hf_zero.distributed.process_group import destroy_process_group
from tests.helpers.engines import STAGES

DEVICE = "cuda"
VOCAB, HIDDEN, LAYERS, ROWS, LENGTH = 1000, 256, 3, 8, 128
STEPS = 4
SIZES = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS}
SIZES["num_attention_heads"] = 4


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    init_distributed()
    yield
    destroy_process_group()
    torch._dynamo.reset()


def bert() -> nn.Module:
    torch.manual_seed(3)
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.BertConfig(**SIZES, intermediate_size=4 * HIDDEN, **dropout)
    return transformers.BertForMaskedLM(config)


def llama() -> nn.Module:
    torch.manual_seed(3)
    tokens = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "use_cache": False}
    sizes = {**SIZES, "intermediate_size": 2 * HIDDEN, "num_key_value_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **tokens))


MODELS = {"bert": bert, "llama": llama}


def ids(number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(3, VOCAB, (ROWS, LENGTH), generator=generator).to(DEVICE)


def started(model: nn.Module, stage: int, precision: str, **more: Any) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 1.0,
        "bf16": {"enabled": precision == "bf16"},
        **more,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6)
    return hf_zero.initialize(model=model, optimizer=optimizer, config=config)[0]


def train(
    name: str, stage: int, precision: str, checkpointed: bool = False, **more: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits of the first batch and the losses of all."""
    model = MODELS[name]()
    if checkpointed:
        model.gradient_checkpointing_enable()
    engine = started(model, stage, precision, **more)
    model.train()
    losses = []
    for number in range(STEPS):
        with torch._dynamo.config.patch(error_on_recompile=True) if number else nullcontext():
            outputs = engine(input_ids=ids(number), labels=ids(number))
            engine.backward(outputs.loss)
        if not number:
            first = outputs.logits.detach().float().cpu()
        engine.step()
        losses.append(outputs.loss.detach().float().cpu())
    engine.destroy()
    return first, torch.stack(losses)


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", MODELS)
def test_bf16_errs_no_more_than_uncompiled(name: str, stage: int, checkpointed: bool) -> None:
    exact, exact_losses = train(name, 0, "fp32")
    plain, plain_losses = train(name, stage, "bf16", checkpointed)
    assert counters["stats"]["unique_graphs"] == 0
    got, losses = train(name, stage, "bf16", checkpointed, compile="blocks")
    assert counters["stats"]["unique_graphs"] == 1
    assert (got - exact).norm() <= 1.1 * (plain - exact).norm() + 1e-3
    off, allowed = (each.sub(exact_losses).abs().max() for each in (losses, plain_losses))
    assert off <= 1.1 * allowed + 2e-2


@pytest.mark.parametrize("name", MODELS)
def test_fp32_is_equal(name: str) -> None:
    want, want_losses = train(name, 3, "fp32")
    got, losses = train(name, 3, "fp32", compile="blocks")
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(losses, want_losses, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("stage", STAGES)
def test_a_step_never_waits_for_the_device(stage: int) -> None:
    engine = started(model := bert(), stage, "bf16", compile="blocks")
    model.train()
    data = [ids(number) for number in range(5)]
    for number, tokens in enumerate(data):
        if number == 3:  # the first steps compile, record orders and make optimizer state
            torch.cuda.set_sync_debug_mode("error")
        try:
            engine.backward(engine(input_ids=tokens, labels=tokens).loss)
            engine.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    engine.destroy()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("backend", ["flash", "cudnn", "efficient"])
def test_attention_runs_on_the_kernels_that_come_first(backend: str, compiled: bool) -> None:
    more = {"compile": "blocks"} if compiled else {}
    engine = started(model := bert(), 0, "bf16", attention_backend=backend, **more)
    model.train()

    def step() -> None:
        engine.backward(engine(input_ids=ids(0), labels=ids(0)).loss)

    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step()
    called = {event.key for event in profile.key_averages() if "attention" in event.key}
    assert f"aten::_scaled_dot_product_{backend}_attention" in called
    assert f"aten::_scaled_dot_product_{backend}_attention_backward" in called
    engine.destroy()
