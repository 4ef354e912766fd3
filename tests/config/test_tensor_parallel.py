"""``tensor_parallel`` of a configuration: its size, and the batch sizes over it."""

from __future__ import annotations

from typing import Any

import pytest

from hf_zero.config import ZeroConfig
from hf_zero.errors import ConfigError


def config(**more: Any) -> ZeroConfig:
    return ZeroConfig.from_dict({"tensor_parallel": {"autotp_size": 2}, **more})


def test_batch_sizes_are_over_the_groups() -> None:
    resolved = config(train_micro_batch_size_per_gpu=3, gradient_accumulation_steps=2).resolve(8)
    assert resolved.train_batch_size == 24 and resolved.tensor_parallel.size == 2
    assert config(train_batch_size=16).resolve(8).train_micro_batch_size_per_gpu == 4


def test_a_batch_size_that_counts_every_rank_is_corrected() -> None:
    written = {"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 1}
    assert config(**written, train_batch_size=24).resolve(8).train_batch_size == 12
    with pytest.raises(ConfigError, match="autotp_size; change one"):
        config(**written, train_batch_size=13).resolve(8)


def test_sizes() -> None:
    assert ZeroConfig(stage=1).tensor_parallel.size == 1
    other = ZeroConfig.from_dict({"tensor_parallel": {"tp": {"tp_size": 4}}})
    assert other.tensor_parallel.size == 4
    with pytest.raises(ConfigError, match=r"autotp_size = 2 .* does not divide 3 ranks"):
        config().resolve(3)
