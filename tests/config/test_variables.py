"""The warning about environment variables of hf-zero that are misspelt or have unknown values."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hf_zero
from hf_zero.cli import examination
from hf_zero.config import variables
from hf_zero.config.launched import LAUNCH_FILE, LAUNCHED_BY, WRITTEN, check_launch
from hf_zero.errors import ConfigError

UNKNOWN = "hf-zero has no such variable"
FAULTS = {
    "HF_ZERO_LOGLEVEL": ("debug", f"{UNKNOWN}; did you mean HF_ZERO_LOG_LEVEL?"),
    "HFZERO_TRITON": ("0", f"{UNKNOWN}; did you mean HF_ZERO_TRITON?"),
    "HF_ZERO_COLOUR": ("red", f"{UNKNOWN}; `hf-zero docs environment` lists the variables"),
    "HF_ZERO_PREFLIGHT": ("nope", "'nope' is unknown and counts as 1; write 0 or 1, or unset it"),
    "HF_ZERO_IO": ("io", "'io' is unknown; write io_uring, threads, python, or unset it"),
}


def test_a_fault_is_named_with_its_remedy_and_a_known_value_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, (value, said) in FAULTS.items():
        assert [*variables.faults({name: value, "HF_HOME": "/"})] == [(name, said)]
    for value in ("0", "Off", " no ", "1", "TRUE", ""):
        assert [*variables.faults({"HF_ZERO_TRITON": value, "HF_ZERO_HOST": "a"})] == []
        monkeypatch.setenv("HF_ZERO_TRITON", value)
        assert variables.is_off("HF_ZERO_TRITON") == (value in ("0", "Off", " no "))
    # ``datasets.Dataset.map`` replaces ``os.environ`` by a copy
    monkeypatch.setattr(os, "environ", {**os.environ, "HF_ZERO_NATIVE": "off"})
    assert variables.is_off("HF_ZERO_NATIVE")


def test_initialize_warns_once_on_rank_0(monkeypatch, caplog) -> None:
    monkeypatch.setenv(variables.WARNED, "")
    monkeypatch.delenv(variables.WARNED)
    for name, (value, _) in FAULTS.items():
        monkeypatch.setenv(name, value)
    for _ in range(2):
        hf_zero.initialize(nn.Linear(2, 2), "zero1")[0].destroy()
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warned == sorted(f"{name}: {said}" for name, (_, said) in FAULTS.items())
    monkeypatch.delenv(variables.WARNED)
    monkeypatch.setenv("RANK", "1")
    variables.warn_once()
    assert len([each for each in caplog.records if each.levelname == "WARNING"]) == len(FAULTS)


NAMES = ("CONFIG_FILE", "ZERO_STAGE", "OFFLOAD_OPTIMIZER_DEVICE", "OFFLOAD_PARAM_DEVICE")
PRESET = "hf-zero launch --preset zero2 --precision bf16"
BF16 = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 2}}


@pytest.fixture(autouse=True)
def no_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    names = (f"ACCELERATE_DEEPSPEED_{name}" for name in NAMES)
    for name in (LAUNCH_FILE, LAUNCHED_BY, WRITTEN, "ACCELERATE_MIXED_PRECISION", "RANK", *names):
        monkeypatch.delenv(name, raising=False)


def launch(
    monkeypatch: pytest.MonkeyPatch, stage: int, precision: str = "no", by: str = "", **more: str
) -> None:
    """Set the variables that `accelerate launch` sets."""
    variables = {f"ACCELERATE_DEEPSPEED_{name}": value for name, value in more.items()}
    variables |= {"ACCELERATE_DEEPSPEED_ZERO_STAGE": str(stage)}
    variables |= {"ACCELERATE_MIXED_PRECISION": precision} | ({LAUNCHED_BY: by} if by else {})
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def test_initialize_refuses_a_preset_of_the_launch_that_it_would_ignore(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launch(monkeypatch, 2, "bf16", PRESET)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    said = rf"`{PRESET}` .*stage 2 \(the script: 3, preset zero3\), precision bf16 .*leave --preset"
    with pytest.raises(ConfigError, match=said):
        hf_zero.initialize(model=model, optimizer=optimizer, config="zero3")


def test_accelerate_launch_gets_a_warning_on_rank_0_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "zero2.json"
    file.write_text(json.dumps(BF16))
    launch(monkeypatch, 3, CONFIG_FILE=str(file))  # the file is what Accelerate reads
    monkeypatch.setenv(LAUNCH_FILE, "zero.yaml")
    with caplog.at_level(logging.WARNING, "hf_zero"):
        check_launch(hf_zero.ZeroConfig(stage=3))
        monkeypatch.setenv("RANK", "1")
        check_launch(hf_zero.ZeroConfig(stage=3))
    (record,) = caplog.records
    assert "`accelerate launch --config_file zero.yaml` asks for zero_opt" in record.getMessage()
    assert "stage 2 (the script: 3, keyword), precision bf16" in record.getMessage()


def test_doctor_shows_the_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ZERO_LOGLEVEL", "debug")
    monkeypatch.setenv("HF_ZERO_LOG_LEVEL", "loud")
    found = {each.name: each for each in examination.examine() if each.part == "environment"}
    assert found["HF_ZERO_LOGLEVEL"].detail == FAULTS["HF_ZERO_LOGLEVEL"][1]
    assert "'loud' is unknown; write debug, info" in found["HF_ZERO_LOG_LEVEL"].detail


def test_precision_offload_and_keys_of_set_count(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(config: dict[str, Any], said: str) -> None:
        with pytest.raises(ConfigError, match=said):
            check_launch(hf_zero.ZeroConfig.from_dict(config))

    launch(monkeypatch, 2, "no", "hf-zero launch --preset zero2 --precision fp32")
    refused(BF16, r"asks for precision fp32 .the script: bf16, config dict: bf16.enabled.,")
    by = "hf-zero launch --config zero3.yaml"
    launch(monkeypatch, 3, by=by, OFFLOAD_OPTIMIZER_DEVICE="cpu", OFFLOAD_PARAM_DEVICE="none")
    refused({"stage": 3}, "offload_optimizer cpu .the script: none.*leave the configuration out")

    command = "hf-zero launch --preset zero2 --set metrics.enabled=true --set metrics.path=runs/a"
    launch(monkeypatch, 2, by=command, OFFLOAD_OPTIMIZER_DEVICE="none")
    asked = {"metrics": {"enabled": True, "path": "runs/a"}}
    monkeypatch.setenv(WRITTEN, json.dumps(asked))
    own: dict[str, Any] = {"zero_optimization": {"stage": 2}}
    check_launch(hf_zero.ZeroConfig.from_dict(own | {"metrics": asked["metrics"]}))
    refused(own, r"metrics.enabled True .the script: False\),.*and --set")
    other = {"metrics": {"enabled": True, "path": "runs/b"}}
    refused(own | other, "metrics.path runs/a .the script: runs/b, config dict: metrics.path.,")
