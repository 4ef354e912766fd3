"""The configuration of ZeroStrategy for the arguments of a Trainer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hf_zero.config import ZeroConfig
from hf_zero.errors import ConfigError
from hf_zero.integrations.lightning.settings import precision_values, read, resolve

TOTAL, MICRO = "train_batch_size", "train_micro_batch_size_per_gpu"
ACCUMULATION, STAGE = "gradient_accumulation_steps", "zero_optimization.stage"


def completed(config: dict[str, Any], ranks: int = 2, steps: int = 1, **given: Any) -> ZeroConfig:
    """``config`` for a Trainer that accumulates ``steps`` micro-batches, as the engine has it."""
    arguments = {"precision": "32-true", "gradient_clip_val": None, "gradient_clip_algorithm": None}
    trainer: Any = SimpleNamespace(**{**arguments, "accumulate_grad_batches": steps, **given})
    settings = resolve(read({"stage": 2, **config}, None, "ZeroStrategy"), trainer, ranks)
    return settings.resolve(ranks)


def sizes(config: ZeroConfig) -> tuple[int | None, ...]:
    return (
        config.train_batch_size,
        config.train_micro_batch_size_per_gpu,
        config.gradient_accumulation_steps,
    )


@pytest.mark.parametrize(
    "axis", [{"tensor_parallel": {"autotp_size": 2}}, {"sequence_parallel_size": 2}]
)
def test_batch_sizes_count_the_ranks_that_share_batches_once(axis, heard):
    assert sizes(completed({**axis, MICRO: 4}, 4)) == (8, 4, 1)
    assert sizes(completed({**axis, MICRO: 4, TOTAL: 16}, 4, steps=2)) == (8, 4, 1)
    assert sizes(completed({**axis, TOTAL: 16}, 4, steps=2)) == (8, 4, 1)
    assert not heard
    assert sizes(completed({**axis, MICRO: 4, TOTAL: 16}, 4)) == (8, 4, 1)
    assert "train_batch_size = 16 (config dict: train_batch_size) is taken for 8" in heard[0]
    with pytest.raises(ConfigError, match="does not divide 3 ranks"):
        completed({**axis, TOTAL: 6}, 3)


def test_batch_sizes_keep_the_sources_of_what_was_written():
    written = completed({MICRO: 4, TOTAL: 16}, steps=2)
    assert sizes(written) == (8, 4, 1)
    assert written.sources[MICRO] == f"config dict: {MICRO}"
    assert written.sources[TOTAL].startswith("computed: ")
    assert written.sources[ACCUMULATION].startswith("default: Lightning's Trainer accumulates")
    shared = completed({TOTAL: 16, MICRO: "auto"}, steps=2)
    assert sizes(shared) == (8, 4, 1)
    assert shared.sources[MICRO].startswith(f"computed: {TOTAL}")
    unknown = completed({TOTAL: "auto", MICRO: "auto"}, steps=2)
    assert sizes(unknown) == (2, 1, 1) and not unknown.has_batch_size


def test_batch_sizes_that_the_trainer_contradicts_are_refused():
    with pytest.raises(ConfigError, match="ranks = a whole number × 4 × 2; leave"):
        completed({TOTAL: 4}, steps=4)
    with pytest.raises(ConfigError, match="data-parallel ranks = 4 × 1 × 2; leave"):
        completed({TOTAL: 6, MICRO: 4})
    with pytest.raises(ConfigError, match=r"contradicts Trainer\(accumulate_grad_batches=1\)"):
        completed({ACCUMULATION: 4})


def test_stage_completes_a_config_that_names_none():
    settings = read({"bf16": {"enabled": True}}, 3, "ZeroStrategy")
    assert (settings.stage, settings.sources[STAGE]) == (3, f"ZeroStrategy(stage=...): {STAGE}")
    assert read({"bf16": {"enabled": True}}, None, "ZeroStrategy").stage == 0
    assert read("zero2", 2, "ZeroStrategy").stage == 2
    assert [read(None, stage, "ZeroStrategy").stage for stage in (None, 0)] == [3, 0]
    with pytest.raises(ConfigError, match=r"stage='3'\) .* zero_optimization.stage = 3 \(config d"):
        read({"stage": 3}, "3", "ZeroStrategy")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"stage=3\) contradicts its config"):
        read({"stage": 0}, 3, "ZeroStrategy")


def test_a_precision_that_the_config_switches_off_is_refused():
    off = read({"bf16": {"enabled": False}}, None, "ZeroStrategy")
    with pytest.raises(ConfigError, match=r"bf16.enabled = False .*config dict.*bf16-mixed"):
        precision_values(off, "bf16-mixed", "Trainer")
    assert precision_values(off, "16-mixed", "Trainer") == {"fp16": {"enabled": True}}
    assert precision_values(off, "32-true", "Trainer") == {}
    auto = read({"bf16": {"enabled": "auto"}}, None, "ZeroStrategy")
    assert precision_values(auto, "bf16-mixed", "Trainer") == {"bf16": {"enabled": True}}
