"""The keys of offload and of activation checkpointing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from hf_zero.config import (
    OffloadOptimizer,
    OffloadParam,
    ZeroConfig,
)
from hf_zero.errors import ConfigError
from tests.helpers.cells import in_one_item

CPU = {"device": "cpu"}


def zero(**keys: Any) -> ZeroConfig:
    return ZeroConfig.from_dict({"zero_optimization": {"stage": 3, **keys}})


def test_relative_paths_are_resolved_and_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/somebody")
    config = zero(offload_optimizer={"device": "nvme", "nvme_path": "local_scratch"})
    assert config.offload_optimizer.nvme_path == (str(tmp_path / "local_scratch"),)
    row = next(row for row in config.explain() if row.key.endswith("nvme_path"))
    assert row.value == os.path.join(tmp_path, "local_scratch")
    config = zero(offload_optimizer={"device": "nvme", "nvme_path": ["~/a", Path("/b")]})
    assert config.offload_optimizer.nvme_path == ("/home/somebody/a", "/b")


def test_optimizer_states_in_bf16() -> None:
    config = zero(offload_optimizer={"device": "cpu"})
    states = config.override({"bf16": {"enabled": True, "bf16_optimizer_states": True}}, "cli")
    moments = "zero_optimization.offload_optimizer.moments"
    assert (config.offload_optimizer.moments, states.offload_optimizer.moments) == ("fp32", "bf16")
    assert states.sources[moments] == "computed: bf16.bf16_optimizer_states"
    assert ZeroConfig.from_dict(states.to_dict()) == states
    assert states.resolve(2).resolve(4).offload_optimizer.moments == "bf16"
    without = states.override({"bf16": {"bf16_optimizer_states": False}}, "cli")
    assert without.offload_optimizer.moments == "fp32"
    said = r"moments = 'int8' \(cli: offload_optimizer\.moments\) contradicts bf16\.bf16_optimizer"
    with pytest.raises(ConfigError, match=said):
        states.override({"offload_optimizer": {"moments": "int8"}}, "cli")


def test_auto_is_a_value_of_the_ratio_and_a_hole_elsewhere() -> None:
    config = ZeroConfig(2, offload_optimizer={"device": "cpu", "ratio": "auto"})
    assert config.offload_optimizer.ratio == config.resolve(8).offload_optimizer.ratio == "auto"
    assert not config.autos
    holes = {"device": "auto", "nvme_path": "auto"}
    written = {"stage": 2, "offload_optimizer": holes, "offload_param": holes}
    early = ZeroConfig.from_dict({"zero_optimization": written}, allow_auto=True)
    assert not early.offload_optimizer.on and len(early.autos) == 4
    former = ZeroConfig.from_dict({"zero_optimization": {"cpu_offload": "auto"}}, allow_auto=True)
    assert former.autos == {"zero_optimization.offload_optimizer.device"}
    # Accelerate writes "none" where its own arguments are silent, also for a path
    none = {"device": "none", "nvme_path": "none"}
    filled = {"offload_optimizer": none, "offload_param": none}
    config = early.override(filled, "Accelerate").resolve(2)
    assert (config.offload_optimizer, config.offload_param) == (OffloadOptimizer(), OffloadParam())


def notes(config: ZeroConfig) -> dict[str, str]:
    return {
        row.key.rpartition(".")[2]: row.note
        for row in config.explain()
        if "offload_optimizer" in row.key or row.key.startswith("aio")
    }


DEVICE = "zero_optimization.offload_optimizer.device"


@in_one_item(
    [
        ({"offload_optimizer": {"device": "cpu", "nvme_path": "/a"}}, "nvme_path", DEVICE),
        ({"offload_optimizer": {"ratio": 0.5}}, "ratio", f"{DEVICE} is none"),
        ({"aio": {"queue_depth": 4}}, "queue_depth", "nothing is offloaded to nvme"),
    ]
)
def test_a_key_without_effect_says_why(case: tuple[dict[str, Any], str, str]) -> None:
    keys, name, why = case
    assert notes(ZeroConfig(2, **keys))[name].startswith(f"no effect: {why}")
    assert set(notes(ZeroConfig(2))) == {"device"}


BLOCKS: list[tuple[dict[str, Any], int | None, bool]] = [
    ({}, 0, False),
    ({"blocks": True}, None, False),
    ({"blocks": 3}, 3, False),
    ({"blocks": "Selective"}, None, True),
    ({"number_checkpoints": 4}, 4, False),
    ({"number_checkpoints": None}, 0, False),
    ({"blocks": True, "number_checkpoints": 0}, None, False),
    ({"blocks": 4, "number_checkpoints": 4}, 4, False),
    ({"blocks": "selective", "number_checkpoints": 4}, 4, True),
    ({"blocks": False, "number_checkpoints": 4}, 0, False),
]


@in_one_item(BLOCKS)
def test_how_many_blocks(case: tuple[dict[str, Any], int | None, bool]) -> None:
    section, number, selective = case
    found = ZeroConfig.from_dict({"activation_checkpointing": section}).activation_checkpointing
    assert (found.number, found.selective) == (number, selective)
