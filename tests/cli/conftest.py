"""A small model for the commands."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import BertConfig


@pytest.fixture
def model(tmp_path: Path) -> str:
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16}
    config = BertConfig(num_hidden_layers=1, num_attention_heads=2, **sizes)
    config.architectures = ["BertForMaskedLM"]
    config.save_pretrained(tmp_path)
    return str(tmp_path)
