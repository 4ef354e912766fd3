"""``deepspeed.init_inference`` beside the model as it is."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from torch import nn

from hf_zero.integrations.fused import report
from tests.helpers.ranks import run_ranks
from tests.helpers.tensor_parallel import HIDDEN, llama

TOKENS = torch.arange(6).view(1, 6)


@pytest.fixture
def model() -> Any:
    torch.manual_seed(3)
    return llama().eval()


def test_a_model_computes_and_generates_as_before(model: Any) -> None:
    want = model(TOKENS).logits
    made = model.generate(TOKENS, max_new_tokens=3, do_sample=False, pad_token_id=0)
    engine = deepspeed.init_inference(model.train(), dtype=torch.float32)
    assert isinstance(engine, deepspeed.InferenceEngine) and not model.training
    assert engine.module is model and engine.config is model.config
    assert torch.equal(engine(TOKENS).logits, want)
    again = engine.generate(TOKENS, max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert torch.equal(again, made)
    with pytest.raises(AttributeError, match="no_such"):
        _ = engine.no_such


def test_kernels_are_put_in(model: Any) -> None:
    want = model(TOKENS).logits
    config = {"dtype": "torch.float32"}
    engine = deepspeed.init_inference(model, config, replace_with_kernel_inject=True)
    assert report(engine.module) != report(nn.Linear(1, 1))
    torch.testing.assert_close(engine(TOKENS).logits, want)


@pytest.mark.parametrize("key", [{"tensor_parallel": {"tp_size": 2}}, {"mp_size": 2}])
def test_layers_are_cut_over_ranks(key: dict[str, Any], model: Any) -> None:
    want = model(TOKENS).logits
    copies = [copy.deepcopy(model) for _ in range(2)]

    def run(rank: int) -> tuple[torch.Tensor, int]:
        engine = deepspeed.init_inference(copies[rank], dtype="fp32", **key)
        with torch.no_grad():
            return engine(TOKENS).logits, sum(p.numel() for p in engine.module.parameters())

    for got, elements in run_ranks(2, run):
        torch.testing.assert_close(got, want)
        assert elements < sum(p.numel() for p in model.parameters())


def test_the_dtype_is_that_of_the_configuration(tmp_path: Path) -> None:
    names = {"half": torch.float16, "bf16": torch.bfloat16, "torch.float32": torch.float32}
    file = tmp_path / "inference.json"
    for name, want in names.items():
        file.write_text(json.dumps({"dtype": name}))
        assert deepspeed.init_inference(nn.Linear(2, 2), str(file)).weight.dtype is want
    assert deepspeed.init_inference(nn.Linear(2, 2)).weight.dtype is torch.float16
    linear = nn.Linear(2, 2)
    assert deepspeed.init_inference(linear, {"dtype": "fp32"}, dtype="fp32").module is linear


def test_sections_as_booleans_and_by_their_former_names() -> None:
    read = deepspeed.inference.config
    for enabled in (True, False):
        config = read.DeepSpeedInferenceConfig(moe=enabled, max_tokens=HIDDEN)
        assert isinstance(config.moe, read.DeepSpeedMoEConfig)
        assert config.moe.enabled is enabled and config.max_out_tokens == HIDDEN
        assert config.dtype is torch.float16
