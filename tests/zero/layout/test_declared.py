"""What a model of transformers declares is read wherever the model is."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hf_zero.checkpoint.model_entries import export_of
from hf_zero.errors import ConfigError
from hf_zero.zero.layout.precision import compute_dtype, kept_in_fp32
from hf_zero.zero.layout.walk import config_of, declared, text_config_of
from hf_zero.zero.layout.whole_names import WholeNames
from hf_zero.zero.layout.wrap import repeated_blocks


class Config:
    model_type = "inner"

    def get_text_config(self) -> str:
        return "text"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wi, self.wo = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.wo(self.wi(rows))


class Inner(nn.Module):
    _keep_in_fp32_modules = ["wo"]
    _keep_in_fp32_modules_strict = {"blocks.1.wi"}
    _no_split_modules = ["Block"]
    _keys_to_ignore_on_save = ["blocks.0.wi.bias"]

    def __init__(self) -> None:
        super().__init__()
        self.config = Config()
        self.blocks = nn.Sequential(Block(), Block())


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wo, self.lm = nn.Linear(2, 2), Inner()


@pytest.mark.parametrize(
    "model, prefix", [(Inner(), ""), (Outer(), "lm.")], ids=["itself", "wrapped"]
)
def test_every_declaration_is_read(model: nn.Module, prefix: str) -> None:
    own = prefix.removesuffix(".")
    assert declared(model, "_no_split_modules") == {own: ("Block",)}
    assert config_of(model).model_type == "inner" and text_config_of(model) == "text"
    assert [name for name, _ in repeated_blocks(model)] == [
        f"{prefix}blocks.0",
        f"{prefix}blocks.1",
    ]
    strict = {f"{prefix}blocks.1.wi.{name}" for name in ("weight", "bias")}
    both = {f"{prefix}blocks.{at}.wo.{name}" for at in (0, 1) for name in ("weight", "bias")}
    assert kept_in_fp32(model, "bf16", ()) == strict
    assert kept_in_fp32(model, "fp16", ()) == strict | both
    assert export_of(model, {}, WholeNames(model)).skip == (f"{prefix}blocks.0.wi.bias",)


def test_configured_names_are_kept_too() -> None:
    kept = kept_in_fp32(Outer(), "bf16", ["wo"])
    assert {"wo.weight", "lm.blocks.0.wo.bias"} <= kept
    weight = nn.Parameter(torch.zeros(2))
    assert compute_dtype("wo.weight", weight, "bf16", kept) == torch.float32
    assert compute_dtype("lm.blocks.0.wi.weight", weight, "bf16", kept) == torch.bfloat16
    with pytest.raises(ConfigError, match=r"wo\.weight"):
        compute_dtype("wo.weight", nn.Parameter(weight.bfloat16()), "fp32", kept)
