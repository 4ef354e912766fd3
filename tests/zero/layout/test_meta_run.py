"""Runs on the meta device: copies, inputs, and reads of values that do not exist."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import ViTConfig, ViTModel

from hf_zero.errors import ConfigError
from hf_zero.zero.layout.meta_run import (
    COPIES,
    GROUPED,
    META,
    NUMBERS,
    MetaAnswers,
    copy_on_meta,
    inputs_on_meta,
)


class Images(nn.Module):
    main_input_name = "pixel_values"

    def __init__(self, **config: Any):
        super().__init__()
        self.config = SimpleNamespace(**config)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        return pixel_values


@pytest.mark.parametrize(
    "config, shape",
    [
        ({"image_size": 8}, (1, 3, 8, 8)),
        ({"image_size": [8, 12], "num_channels": 1}, (1, 1, 8, 12)),
        ({"image_size": (8, 12)}, (1, 3, 8, 12)),
        ({}, (1, 3, 224, 224)),
    ],
    ids=("a number", "a list", "a tuple", "without the field"),
)
def test_sides_of_an_image(config: dict[str, Any], shape: tuple[int, ...]) -> None:
    images = inputs_on_meta(Images(**config), 2, 6)["pixel_values"]
    assert isinstance(images, torch.Tensor) and images.is_meta and images.shape == shape


def test_inputs_of_unknown_shape_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"Linear is not a model of transformers.*pass one"):
        inputs_on_meta(nn.Linear(2, 2), 1, 8)
    sounds = Images()
    sounds.main_input_name = "input_features"
    with pytest.raises(ConfigError, match=r"Images takes input_features.*token ids or images"):
        inputs_on_meta(sounds, 1, 8)


def test_only_tensors_without_values_read_as_zero() -> None:
    values = torch.tensor([3.0, 4.0])
    with MetaAnswers({**NUMBERS, **COPIES}):
        assert values[0].item() == 3 and int(values.sum()) == 7
        assert torch.ones(2, device=META).sum().item() == 0
        assert torch.equal(torch.ones(2, device=META).cpu(), torch.zeros(2))
        assert values.clone().copy_(torch.ones(2)).tolist() == [1, 1]
        assert values.clone().copy_(torch.ones(2, device=META)).tolist() == [0, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_products_of_groups_have_a_shape_in_every_dtype(dtype: torch.dtype) -> None:
    rows = torch.empty(6, 8, dtype=dtype, device=META)
    weights = torch.empty(3, 8, 16, dtype=dtype, device=META)
    ends = torch.tensor([2, 4, 6], dtype=torch.int32, device=META)
    with MetaAnswers(GROUPED):
        product = torch.nn.functional.grouped_mm(rows, weights, offs=ends)
    assert product.shape == (6, 16) and product.dtype == dtype


def test_a_copy_on_meta() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    model.add_module("tied", model[0])
    model[0].bias.requires_grad_(False)
    other = nn.Identity()
    copied = copy_on_meta(model, {"0.weight": torch.bfloat16}, {id(model[1]): other})
    assert copied[0].weight.dtype == torch.bfloat16 and copied[0].bias.dtype == torch.float32
    assert not copied[0].bias.requires_grad and copied.tied is copied[0]
    assert copied[1] is other and all(value.is_meta for value in copied.state_dict().values())


def test_the_inputs_run_a_model_with_sides_in_a_list() -> None:
    config = ViTConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8,
        image_size=[8, 16], patch_size=4,
    )  # fmt: skip
    copied = copy_on_meta(ViTModel(config))
    with MetaAnswers(NUMBERS):
        out = copied(**inputs_on_meta(copied, 1, 8))
    assert out.last_hidden_state.shape == (1, 1 + 2 * 4, 8)
